// State that the ranks of a run share, wherever they are: threads of one process, or processes that
// have this struct in shared memory. Hence plain data and atomics.
#ifndef FRUGAL_TESTS_ORACLE_MEETING_H_
#define FRUGAL_TESTS_ORACLE_MEETING_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "frugal.h"
#include "oracle/driver.h"
#include "oracle/far.h"

namespace frugal_oracle {

struct Meeting {
  // Aborts that have happened. A rank that has received fewer is about to receive the rest.
  std::atomic<uint64_t> aborts{0};
  std::atomic<uint64_t> rows_checked{0};
  std::atomic<uint64_t> older_rows{0};

  // Over all step boundaries: ranks that have come to one, and actions that were done there.
  std::atomic<uint64_t> arrived{0};
  std::atomic<uint64_t> outside_done{0};
  std::atomic<int64_t> boundaries_open{-1};  // up to this step

  // Processes that have come so far.
  std::atomic<uint32_t> serving{0};
  std::atomic<uint32_t> joined{0};
  std::atomic<uint32_t> ended{0};
  std::atomic<uint32_t> checked{0};
  std::atomic<uint32_t> closed{0};

  // With Script::killed: processes that have done their last call to the controller, and whether it
  // is dead.
  std::atomic<uint32_t> waiting_for_death{0};
  std::atomic<bool> controller_dead{false};

  // A run that is recorded: nothing is compared. Of results whose order depends on timing the
  // digests are added up.
  bool recording = false;
  std::atomic<uint64_t> lookups{0};  // with staleness 0
  std::atomic<uint64_t> outside{0};
  std::atomic<uint64_t> tables{0};

  uint64_t resumes = 0;               // engines that went on from a checkpoint
  uint64_t other_worlds = 0;          // of these, of another world size than the one before
  uint64_t created = 0, deleted = 0;  // rows, while a checkpoint was written
  FarCounts far = {};                 // of the process that has the engine, if it is one of several
  frugal_stats stats = {};            // at the end, by one of them
  std::atomic<uint32_t> failures{0};
  std::atomic<bool> told{false};
  char message[4096] = {};  // of the first failure; there when `told` is

  // The text that a program gives to `progress` is at the same place in processes that were forked
  // from one.
  Progress progress;

  void Fail(const std::string& text) {
    if (failures++ != 0) return;
    const size_t n = std::min(text.size(), sizeof(message) - 1);
    std::memcpy(message, text.data(), n);
    message[n] = 0;
    told = true;
  }
  bool failed() const { return failures != 0; }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<const char*>::is_always_lock_free,
              "processes share them");

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_MEETING_H_
