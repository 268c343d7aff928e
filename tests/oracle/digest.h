// A hash of what a run has given, for the record (--record). It is the same on every machine with
// this byte order.
#ifndef FRUGAL_TESTS_ORACLE_DIGEST_H_
#define FRUGAL_TESTS_ORACLE_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace frugal_oracle {

class Digest {
 public:
  void Add(const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (; bytes >= sizeof(uint64_t); p += sizeof(uint64_t), bytes -= sizeof(uint64_t))
      Word(p, sizeof(uint64_t));
    if (bytes > 0) Word(p, bytes);
  }
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void Add(T value) {
    Add(&value, sizeof(value));
  }
  // The size first: two lists, one after the other, are not one.
  template <typename T>
  void Add(const std::vector<T>& values) {
    static_assert(std::is_arithmetic_v<T>);
    Add(uint64_t{values.size()});
    Add(values.data(), values.size() * sizeof(T));
  }
  void Add(const std::string& text) {
    Add(uint64_t{text.size()});
    Add(text.data(), text.size());
  }

  // Digests are added up where their order depends on timing, so each is mixed once more.
  uint64_t value() const { return Mix(hash_); }

 private:
  static uint64_t Mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  void Word(const unsigned char* p, size_t bytes) {
    uint64_t word = bytes;
    std::memcpy(&word, p, bytes);
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 32;
  }

  uint64_t hash_ = 0x2545f4914f6cdd1du;
};

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_DIGEST_H_
