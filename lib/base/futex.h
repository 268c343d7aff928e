// Sleeping on a 32-bit word in memory that processes share. All calls only read the word: it may be
// mapped read-only.
#pragma once
#include <algorithm>
#include <cstdint>

namespace frugal {

// Sleeps while the word is `seen`, at most `ns` (UINT64_MAX: for ever). It may also return early:
// callers check again.
void futex_wait(const uint32_t* word, uint32_t seen, uint64_t ns);

// The time that is left of a wait. A sleep counts at most with its planned length. A process that
// was stopped, perhaps with its machine, cannot conclude that the awaited event is late.
class WaitTime {
 public:
  explicit WaitTime(uint64_t ns) : left_(ns) {}
  static WaitTime until(uint64_t at);  // a value of now_ns(); UINT64_MAX: never, which is centuries
  bool over() const { return left_ == 0; }
  uint64_t slice() const { return std::min(left_, std::max(left_ / 8, kSliceNs)); }  // of a sleep
  void slept(uint64_t ns) { left_ -= std::min(slice(), ns); }

 private:
  static constexpr uint64_t kSliceNs = 50'000'000;  // the shortest slice, except the last
  uint64_t left_;
};
// Sleeps for one slice of `time`.
void futex_wait(const uint32_t* word, uint32_t seen, WaitTime* time);

// Wakes all threads that sleep on the word, in any process.
void futex_wake(const uint32_t* word);

}  // namespace frugal
