// What the programs of ./dev gpu share: options, memory, waiting, and lines of results.
//
// They use the interface lib/device/runtime.h, so the same program runs on a GPU and, for
// rehearsals, on the simulated GPU. Every line of results is on the disk before the next case
// begins.
#ifndef FRUGAL_TOOLS_GPU_COMMON_H_
#define FRUGAL_TOOLS_GPU_COMMON_H_

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../bench/harness.h"
#include "base/os.h"
#include "device/ops/kernels.h"
#include "device/runtime.h"

namespace gpu_tools {

using frugal::device::Event;
using frugal::device::Kernel;
using frugal::device::Ptr;
using frugal::device::Result;
using frugal::device::Runtime;
using frugal::device::Shape;
using frugal::device::Stream;

inline void Check(const Result& r, const char* what) {
  if (r.ok()) return;
  throw std::runtime_error(std::string(what) + ": " + r.call + ": " + r.text + " (error " +
                           std::to_string(r.code) + ")");
}

// Processors that this process may use: a time quota can give a container fewer than the machine
// has.
inline uint32_t Cores() {
  uint32_t n = frugal::cpu_count();
  if (std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    double quota = 0, period = 0;
    if (std::fscanf(f, "%lf %lf", &quota, &period) == 2 && period > 0)  // else it says "max"
      n = std::min(n, static_cast<uint32_t>(std::max(1.0, std::ceil(quota / period))));
    std::fclose(f);
  }
  return n;
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n == 0 ? NAN : n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// --- Options ------------------------------------------------------------------------------------

// --name value pairs, and flags without a value.
class Options {
 public:
  Options(int argc, char** argv) : arguments_(argv + 1, argv + argc) {}
  bool Flag(const std::string& name) {
    const auto at = std::find(arguments_.begin(), arguments_.end(), name);
    if (at == arguments_.end()) return false;
    arguments_.erase(at);
    return true;
  }
  std::string Str(const std::string& name, const std::string& fallback) {
    const auto at = std::find(arguments_.begin(), arguments_.end(), name);
    if (at == arguments_.end()) return fallback;
    if (at + 1 == arguments_.end()) throw std::runtime_error(name + " wants a value");
    const std::string value = at[1];
    arguments_.erase(at, at + 2);
    return value;
  }
  double Num(const std::string& name, double fallback) {
    const std::string value = Str(name, "");
    return value.empty() ? fallback : std::stod(value);
  }
  // Throws if there are other options; called after all have been read.
  void NoOthers() const {
    if (!arguments_.empty()) throw std::runtime_error("unknown option " + arguments_[0]);
  }

 private:
  std::vector<std::string> arguments_;
};

// --- Results ------------------------------------------------------------------------------------

// A JSON object, in the order of its fields.
class Json {
 public:
  Json& Raw(const std::string& name, const std::string& value) {
    text_ += (text_.empty() ? "\"" : ", \"") + name + "\": " + value;
    return *this;
  }
  Json& Set(const std::string& name, const std::string& value) {
    std::string safe;
    for (const char c : value) safe += c == '"' || c == '\\' || c < ' ' ? '\'' : c;
    return Raw(name, "\"" + safe + "\"");
  }
  Json& Set(const std::string& name, const char* value) { return Set(name, std::string(value)); }
  Json& Set(const std::string& name, double value) {
    if (!std::isfinite(value)) return Raw(name, "null");
    char text[40];
    snprintf(text, sizeof text, "%.6g", value);
    return Raw(name, text);
  }
  Json& Count(const std::string& name, uint64_t value) { return Raw(name, std::to_string(value)); }
  std::string Text() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

// Writes lines to stdout and, if there is a file, to its end.
class Results {
 public:
  explicit Results(const std::string& path) {
    if (path.empty()) return;
    file_ = fopen(path.c_str(), "a");
    if (file_ == nullptr) throw std::runtime_error("cannot write " + path);
  }
  ~Results() {
    if (file_ != nullptr) fclose(file_);
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;
  void Line(const Json& line) {
    const std::string text = line.Text();
    printf("%s\n", text.c_str());
    fflush(stdout);
    if (file_ == nullptr) return;
    // So a run that is cut off keeps its results.
    if (fprintf(file_, "%s\n", text.c_str()) < 0 || fflush(file_) != 0 || fsync(fileno(file_)) != 0)
      throw std::runtime_error("cannot write results");
  }

 private:
  FILE* file_ = nullptr;
};

// --- Memory -------------------------------------------------------------------------------------

// Host memory that kernels may use.
template <class T>
class Pinned {
 public:
  Pinned() = default;
  Pinned(std::shared_ptr<Runtime> runtime, size_t count)
      : runtime_(std::move(runtime)), array_(std::max<size_t>(count, 1)) {
    const size_t bytes = (array_.size() * sizeof(T) + 4095) / 4096 * 4096;
    memset(static_cast<void*>(array_.data()), 0, bytes);
    Check(runtime_->pin(array_.data(), bytes), "pinning");
    pinned_ = true;
  }
  Pinned(Pinned&& o) noexcept { *this = std::move(o); }
  Pinned& operator=(Pinned&& o) noexcept {
    std::swap(runtime_, o.runtime_);
    std::swap(array_, o.array_);
    std::swap(pinned_, o.pinned_);
    return *this;
  }
  ~Pinned() {
    if (pinned_) runtime_->unpin(array_.data());
  }
  T* data() const { return array_.data(); }
  size_t size() const { return array_.size(); }
  size_t bytes() const { return array_.size() * sizeof(T); }
  T& operator[](size_t i) const { return array_[i]; }
  template <class U = T>
  Ptr<U> seen() const {
    return {reinterpret_cast<uint64_t>(array_.data())};
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  bench::HugeArray<T> array_;
  bool pinned_ = false;
};

template <class T>
class OnDevice {
 public:
  OnDevice() = default;
  OnDevice(std::shared_ptr<Runtime> runtime, size_t count)
      : runtime_(std::move(runtime)), count_(std::max<size_t>(count, 1)) {
    Check(runtime_->alloc(count_ * sizeof(T), &at_), "device memory");
  }
  OnDevice(OnDevice&& o) noexcept { *this = std::move(o); }
  OnDevice& operator=(OnDevice&& o) noexcept {
    std::swap(runtime_, o.runtime_);
    std::swap(at_, o.at_);
    std::swap(count_, o.count_);
    return *this;
  }
  ~OnDevice() {
    if (at_) runtime_->free(at_);
  }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  template <class U = T>
  Ptr<U> at() const {
    return {at_.address};
  }
  Ptr<char> raw() const { return at_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  Ptr<char> at_;
  size_t count_ = 0;
};

template <class T>
Ptr<char> Raw(Ptr<T> p) {
  return {p.address};
}

// --- Streams ------------------------------------------------------------------------------------

// A stream and an event to wait for it.
class Lane {
 public:
  // `own` false: the default stream of the device.
  explicit Lane(std::shared_ptr<Runtime> runtime, bool own = true)
      : runtime_(std::move(runtime)), own_(own) {
    if (own_)
      Check(runtime_->create_stream(frugal::device::Priority::kNormal, &stream_), "a stream");
    Check(runtime_->create_event(&event_), "an event");
  }
  ~Lane() {
    runtime_->destroy_event(event_);
    if (own_) runtime_->destroy_stream(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Stream stream() const { return stream_; }
  Event Mark() {
    Check(runtime_->record(event_, stream_), "recording");
    return event_;
  }
  void After(Event e) { Check(runtime_->wait(stream_, e), "waiting in a stream"); }
  // Waits until all work of the stream is done.
  void Wait() {
    Mark();
    // Polls without sleep: the measured work is shorter than a sleep.
    for (bool passed = false; !passed; bench::CpuRelax())
      Check(runtime_->query(event_, &passed), "waiting");
  }
  template <class T, class U>
  void Copy(Ptr<T> to, Ptr<U> from, size_t bytes) {
    Check(runtime_->copy(Raw(to), Raw(from), bytes, stream_), "copying");
  }
  template <class Arguments>
  void Launch(Kernel kernel, const Shape& shape, const Arguments& arguments) {
    Check(runtime_->launch(static_cast<uint32_t>(kernel), shape, &arguments, sizeof arguments,
                           stream_),
          "launching");
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  Stream stream_;
  Event event_;
  bool own_;
};

// Copies host memory to the device, and waits.
template <class T>
OnDevice<T> Uploaded(const std::shared_ptr<Runtime>& runtime, const T* from, size_t count) {
  Pinned<T> pinned(runtime, count);
  memcpy(static_cast<void*>(pinned.data()), from, count * sizeof(T));
  OnDevice<T> out(runtime, count);
  Lane lane(runtime);
  lane.Copy(out.at(), pinned.seen(), count * sizeof(T));
  lane.Wait();
  return out;
}

}  // namespace gpu_tools

#endif  // FRUGAL_TOOLS_GPU_COMMON_H_
