// Does a script on the engine, with as many threads as it says, and compares everything that comes
// back with the reference.
#ifndef FRUGAL_TESTS_ORACLE_DRIVER_H_
#define FRUGAL_TESTS_ORACLE_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "frugal.h"
#include "oracle/far.h"
#include "oracle/script.h"
#include "reference/reference.h"

namespace frugal_oracle {

// Where a run is, for a watchdog to print when it hangs. A run hangs when nothing in it moves for
// many ticks of the watchdog: a machine that is slow, or that stops for a while, is no hang.
struct Progress {
  static constexpr size_t kRanks = 8;
  struct Rank {
    std::atomic<uint64_t> step{0};  // index
    std::atomic<const char*> doing{"nothing yet"};
  };
  std::atomic<const char*> phase{"idle"};
  std::atomic<uint64_t> moves{0};  // calls that have come back, and phases
  Rank ranks[kRanks];

  void Enter(const char* next) {
    phase = next;
    ++moves;
  }
};

// Counts the ticks of a watchdog since a run has moved.
class Stillness {
 public:
  // One more tick. Returns how many there were without a move.
  uint64_t Tick(const Progress& progress) {
    const uint64_t moves = progress.moves;
    ticks_ = moves == moves_ ? ticks_ + 1 : 0;
    moves_ = moves;
    return ticks_;
  }

 private:
  uint64_t moves_ = 0;
  uint64_t ticks_ = 0;
};

struct Outcome {
  bool passed = false;
  std::string message;  // of the first failure
  frugal_stats stats = {};
  FarCounts far = {};
  uint64_t resumes = 0;               // engines that went on from a checkpoint of another one
  uint64_t other_worlds = 0;          // of these, of another world size
  uint64_t created = 0, deleted = 0;  // rows, while a checkpoint was written
  uint64_t rows_checked = 0;
  uint64_t older_rows = 0;  // rows that were of an earlier step than the one that read them
  // Digests, if the run was recorded: what lookups (with staleness 0) and calls outside steps gave,
  // and what the tables were at last.
  uint64_t lookups = 0, outside = 0, tables = 0;
};

// Runs `script` after Replay() has seen it. If it is `recorded`, the reference has to know the
// tables alone.
Outcome RunScript(const Script& script, const frugal_reference::Reference& reference, bool recorded,
                  Progress* progress);

struct Meeting;

// What `meeting` has when all have ended.
Outcome OutcomeOf(const Meeting& meeting);

// Which processes have which ranks, and which of them one is.
struct Party {
  std::string address;  // "": no services
  bool host = false;    // this process opens the engine and serves it there; else it attaches
  uint32_t process = 0;
  uint32_t processes = 1;
  std::vector<uint32_t> process_of_rank;
};

// What one process does of a run. It reports every failure to `meeting`.
void RunParty(const Script& script, const frugal_reference::Reference& reference,
              const Party& party, Meeting* meeting);

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_DRIVER_H_
