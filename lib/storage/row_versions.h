// Version words, for rows that are read concurrently with writes (staleness > 0), by threads and by
// other processes.
//
// Several rows share a version word. A writer makes the word odd, stores the row and makes the word
// even. Two writers of one word exclude each other. A reader copies the row. The copy is valid if
// the word was even before the copy and has the same value after it. A reader stores nothing, so a
// process can read rows that it has mapped read-only. Rows are stored and copied with relaxed
// atomic accesses, so an invalid copy is no data race.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "device/element.h"

namespace frugal {

using VersionWord = std::atomic<uint32_t>;
constexpr size_t kVersionWords = 1024;  // of an engine

// Returns the index of a row's version word.
inline size_t version_of(uint64_t table, uint32_t slot) {
  return (slot * 0x9e3779b1u ^ static_cast<uint32_t>(table * 0x85ebca6bu)) % kVersionWords;
}

// Pauses a thread that waits for a version word. The wait is usually short, but the writer may be
// off the processor. `looks` is the number of failed checks.
void pause_for_version(uint32_t looks);

void begin_write(VersionWord& word);
void end_write(VersionWord& word);

// Copies n elements, rounded up to a multiple of 8 bytes, between a row and its copy. Both are
// aligned to 8 bytes.
void store_shared(device::Element* row, const device::Element* from, size_t n);
void load_shared(const device::Element* row, device::Element* to, size_t n);

// Copies n elements of a row, as load_shared does. While the row is being written it calls go_on(),
// whose failure ends the wait: the writer may have died.
template <class GoOn>
Status read_row(const VersionWord& word, const device::Element* row, size_t n, device::Element* to,
                GoOn go_on) {
  for (uint32_t looks = 0;; ++looks) {
    const uint32_t before = word.load(std::memory_order_acquire);
    if (!(before & 1)) {
      load_shared(row, to, n);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (word.load(std::memory_order_relaxed) == before) return FRUGAL_OK;
    }
    FRUGAL_TRY(go_on());
    pause_for_version(looks);
  }
}

}  // namespace frugal
