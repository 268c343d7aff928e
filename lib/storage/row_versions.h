// Rows that are read while others write them (staleness > 0), by threads and by other processes.
//
// A row shares a version word with others. A writer makes the word odd, stores the row and makes
// the word even; two writers of one word exclude each other. A reader copies the row, and the copy
// is good if the word was even before and is the same behind. So a reader stores nothing, and a
// process can read what it has mapped read-only. Rows are stored and copied by relaxed atomic
// accesses: a copy that is thrown away has met no data race.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "device/element.h"

namespace frugal {

using VersionWord = std::atomic<uint32_t>;
constexpr size_t kVersionWords = 1024;  // of an engine

// Which word is a row's.
inline size_t version_of(uint64_t table, uint32_t slot) {
  return (slot * 0x9e3779b1u ^ static_cast<uint32_t>(table * 0x85ebca6bu)) % kVersionWords;
}

// What who waits for a word does between two looks: a row is soon written, but its writer may be
// off the processor.
void pause_for_version(uint32_t looks);

void begin_write(VersionWord& word);
void end_write(VersionWord& word);

// Elements between a row and its copy: n of them, rounded up to a multiple of 8 bytes. Both are
// aligned to that.
void store_shared(device::Element* row, const device::Element* from, size_t n);
void load_shared(const device::Element* row, device::Element* to, size_t n);

// Copies n elements of a row, as load_shared does. Where it finds that the row is being written it
// asks go_on(), whose failure ends it: the writer may be gone for good.
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
