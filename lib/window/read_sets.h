// The flat index of a window: a read set of 8 bytes for each row of the table, by slot. It is the
// row's R set.
//
// The bits of a read set count from the step in its stamp. A read set is brought up to date at its
// next access, so no pass removes past steps. Stamps wrap around: a row without accesses for some
// 500 steps may appear to be read soon. That makes an update too urgent, never too late.
//
// Threads: `Window::links_mu_`.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/os.h"
#include "flush/queue.h"

namespace frugal {

// From the lowest bit (bit fields are slower here than shifts):
// - reads, kPast + kHorizon bits: bit i says that step stamp - kPast + i reads the row by a
//   declaration, or updates it;
// - owner, kHorizon bits: bit i says that the row's owner, which may have it cached, reads it in
//   step stamp + i;
// - cached: the owner has it cached, so the owner's reads do not count;
// - stamp, 9 bits of a step.
using ReadSet = uint64_t;

class ReadSets {
 public:
  // Declared steps in [next_commit, next_commit + kHorizon) can be linked. Later ones wait for the
  // next commit.
  static constexpr uint32_t kHorizon = 21;
  // Read sets remember this many past steps. Unwritten updates of older steps are searched for
  // every row that is accessed.
  static constexpr uint32_t kPast = 12;
  static constexpr int kOwnerAt = kPast + kHorizon, kCachedAt = kOwnerAt + kHorizon, kStampAt = 55;
  static constexpr ReadSet kReads = (ReadSet{1} << kOwnerAt) - 1,
                           kOwner = (ReadSet{1} << kHorizon) - 1;
  static constexpr ReadSet kPassed = (ReadSet{1} << kPast) - 1, kCached = ReadSet{1} << kCachedAt;
  static constexpr ReadSet kStamp = 511;
  static_assert(kCachedAt < kStampAt && kStampAt + 9 == 64);

  ReadSets() = default;
  ReadSets(const ReadSets&) = delete;
  ReadSets& operator=(const ReadSets&) = delete;
  ~ReadSets() { os_release(&map_); }
  // Reserves addresses only. Pages are committed at first use and are zero then: no reads.
  Status open(uint64_t rows) {
    FRUGAL_TRY(os_reserve(rows * sizeof(ReadSet), false, &map_));
    read_sets_ = reinterpret_cast<ReadSet*>(map_.base);
    return FRUGAL_OK;
  }
  ReadSet& operator[](uint32_t slot) { return read_sets_[slot]; }

  // The read set with its stamp at `next_commit`.
  static ReadSet at_step(ReadSet w, uint64_t next_commit) {
    uint64_t passed = std::min<uint64_t>((next_commit - (w >> kStampAt)) & kStamp, 63);
    ReadSet reads = (w & kReads) >> passed;
    // The owner's past reads are dropped like all others.
    ReadSet owner = (w >> kOwnerAt & kOwner) << kPast >> passed;
    return reads | (owner & kPassed) | owner >> kPast << kOwnerAt | (w & kCached) |
           (next_commit & kStamp) << kStampAt;
  }
  // Steps from the stamp on with reads that count.
  static uint64_t effective_reads(ReadSet current) {
    uint64_t owner = current & kCached ? 0 : current >> kOwnerAt & kOwner;
    return (current & kReads) >> kPast | owner;
  }
  // Returns a priority: the first declared step, from `first` on, that reads the row. The read
  // set's stamp is at `next_commit`.
  static uint8_t next_read(ReadSet current, uint64_t next_commit, uint64_t first) {
    uint64_t skip = std::min<uint64_t>(first > next_commit ? first - next_commit : 0, 63);
    uint64_t reads = effective_reads(current) >> skip;
    if (reads == 0) return kInfinity;
    return static_cast<uint8_t>(
        (next_commit + skip + static_cast<uint64_t>(std::countr_zero(reads))) & (kRing - 1));
  }

 private:
  Mapping map_;
  ReadSet* read_sets_ = nullptr;
};

}  // namespace frugal
