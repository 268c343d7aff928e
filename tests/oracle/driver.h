// Does a script on the engine, with as many threads as it says, and compares everything that comes
// back with the reference.
#ifndef FRUGAL_TESTS_ORACLE_DRIVER_H_
#define FRUGAL_TESTS_ORACLE_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "frugal.h"
#include "oracle/script.h"
#include "reference/reference.h"

namespace frugal_oracle {

// Where a run is, for a watchdog to print when it hangs.
struct Progress {
  static constexpr size_t kRanks = 8;
  struct Rank {
    std::atomic<uint64_t> step{0};  // index
    std::atomic<const char*> doing{"nothing yet"};
  };
  std::atomic<const char*> phase{"idle"};
  Rank ranks[kRanks];
};

struct Outcome {
  bool passed = false;
  std::string message;  // of the first failure
  frugal_stats stats = {};
  uint64_t rows_checked = 0;
  uint64_t older_rows = 0;  // rows that were of an earlier step than the one that read them
};

// Runs `script` after Replay() has seen it.
Outcome RunScript(const Script& script, const frugal_reference::Reference& reference,
                  Progress* progress);

struct Meeting;

// Which processes have which ranks, and which of them one is.
struct Party {
  std::string address;  // "": no services
  bool host = false;    // this process opens the engine and serves it there; else it attaches
  uint32_t process = 0;
  uint32_t processes = 1;
  std::vector<uint32_t> process_of_rank;
};

// What one process does of a run. Whatever fails is told to `meeting`.
void RunParty(const Script& script, const frugal_reference::Reference& reference, const Party& party,
              Meeting* meeting);

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_DRIVER_H_
