// A run whose ranks are processes that attach to one engine (docs/processes.md), of a controller
// program or of one of them.
//
// The oracle starts a leader for each run: itself again, with one thread. The leader replays the
// script on the reference and then forks the processes of the run, which therefore have both, and
// the meeting, in shared memory. Each of them maps some memory at once, so that what they map later
// lies elsewhere in each.
#ifndef FRUGAL_TESTS_ORACLE_PROCESSES_H_
#define FRUGAL_TESTS_ORACLE_PROCESSES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "oracle/driver.h"
#include "oracle/script.h"

namespace frugal_oracle {

struct Layout {
  bool program = false;  // frugal-controller has the engine; else process 0
  uint32_t processes = 1;
  std::vector<uint32_t> process_of_rank;
  bool Attached(uint32_t rank) const { return program || process_of_rank[rank] != 0; }
  std::string Describe() const;
};

Layout MakeLayout(const Script& script);

// What cannot be said over processes becomes something that can. Returns what that was; "" for
// nothing.
std::string ForProcesses(Script* script);

// A leader: the run of `seed`, with the memory of the caller that `descriptor` names. Returns its
// exit status.
int Lead(uint64_t seed, const Options& options, const std::string& controller, int hang_seconds,
         int descriptor);

// Starts a leader with `arguments` for oracle and waits for it.
Outcome RunLeader(const std::vector<std::string>& arguments);

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_PROCESSES_H_
