// Writes one line of an op script: docs/bindings.md has the form. Keys, seeds and steps
// are strings, since they need 64 bits; floats are the unsigned integers of their bits.
#ifndef FRUGAL_TESTS_OPSCRIPT_JSON_LINE_H_
#define FRUGAL_TESTS_OPSCRIPT_JSON_LINE_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace opscript {

class JsonObject {
 public:
  JsonObject& Text(const char* name, const std::string& value) {
    return Raw(name, '"' + value + '"');
  }
  JsonObject& Number(const char* name, int64_t value) { return Raw(name, std::to_string(value)); }
  JsonObject& Big(const char* name, uint64_t value) { return Text(name, std::to_string(value)); }
  JsonObject& Float(const char* name, float value) { return Raw(name, Bits(value)); }
  JsonObject& True(const char* name) { return Raw(name, "true"); }
  JsonObject& Bigs(const char* name, const std::vector<uint64_t>& values) {
    return List(name, values, [](uint64_t v) { return '"' + std::to_string(v) + '"'; });
  }
  JsonObject& Numbers(const char* name, const std::vector<uint64_t>& values) {
    return List(name, values, [](uint64_t v) { return std::to_string(v); });
  }
  JsonObject& Floats(const char* name, const std::vector<float>& values) {
    return List(name, values, Bits);
  }
  JsonObject& Object(const char* name, const JsonObject& value) { return Raw(name, value.str()); }
  JsonObject& Objects(const char* name, const std::vector<JsonObject>& values) {
    return List(name, values, [](const JsonObject& v) { return v.str(); });
  }

  std::string str() const { return '{' + text_ + '}'; }

 private:
  static std::string Bits(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return std::to_string(bits);
  }
  template <typename T, typename Write>
  JsonObject& List(const char* name, const std::vector<T>& values, Write write) {
    std::string list;
    for (const T& value : values) {
      if (!list.empty()) list += ',';
      list += write(value);
    }
    return Raw(name, '[' + list + ']');
  }
  JsonObject& Raw(const char* name, const std::string& value) {
    if (!text_.empty()) text_ += ',';
    text_ += '"';
    text_ += name;
    text_ += "\":";
    text_ += value;
    return *this;
  }

  std::string text_;
};

}  // namespace opscript

#endif  // FRUGAL_TESTS_OPSCRIPT_JSON_LINE_H_
