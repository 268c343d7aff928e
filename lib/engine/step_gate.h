// The gate of a step. It opens when
// (a) every rank's steps < step - staleness are ended and committed,
// (b) every declaration for a step <= `step` is resolved and linked,
// (c) no update that `step` must see is queued, claimed but unwritten, or in a job.
//
// Each check goes through all conditions, with the engine's mutex held. Between two checks an
// operation outside steps may have dropped a table, or cached rows.
#pragma once
#include "engine/declarations.h"
#include "engine/flusher.h"
#include "engine/gate.h"
#include "engine/pacing.h"
#include "engine/phase.h"
#include "engine/ranks.h"
#include "engine/tables.h"
#include "engine/workers.h"

namespace frugal {

// How far a rank may run ahead of the last commit when staleness allows it. If priorities matter,
// the rows that it is about to read must be linked. (Marks of uncommitted rows distinguish a step
// from the kMarks - 1 steps after it.)
inline uint64_t most_ahead(const frugal_config& c) {
  return c.staleness >= kRing ? SlotMap::kMarks - 2 : Window::kHorizon - 2;
}

class StepGate : public Gate {
 public:
  struct Parts {
    const frugal_config& config;
    Phase& phase;
    Ranks& ranks;
    Workers& workers;
    Declarations& declarations;
    Pacing& pacing;
    Tables& tables;
    Flusher& flusher;
  };
  // Work that the engine itself does for a step that waits.
  struct Work {
    // Resolves or links one part that is declared for a step up to the given one. Returns false if
    // there is none.
    std::function<bool(uint64_t)> declare;
    // `loading`: are rows loading that are declared for a step up to the given one? `load`: loads
    // some; false: there are none.
    std::function<bool(uint64_t)> loading;
    std::function<bool()> load;
    // Is there room for copies of rows that a checkpoint needs?
    std::function<bool()> copies;
  };
  StepGate(const Parts& of, Work work);

 private:
  bool near(uint64_t step) const;
  const Parts of_;
  const Work work_;
};

}  // namespace frugal
