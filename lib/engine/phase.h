// Which activities of an engine exclude each other: one table, which a thread checks before it
// begins one.
#pragma once
#include <atomic>
#include <cstdint>

#include "base/assert.h"
#include "engine/control.h"
#include "engine/workers.h"

namespace frugal {

class Phase {
 public:
  enum Act : uint32_t {
    kStep,     // a rank begins a step
    kPrepare,  // a step's updates are prepared
    kCommit,   // of a step that all ranks have ended
    kAbort,    // uncommitted steps are undone
    kOutside,  // an operation outside steps
    kAlone,    // such an operation has rows and caches for itself
    kRead,     // a trainer between steps reads rows
    kGet,      // rows are read as of the last committed step, whatever ranks are inside of
    kPlan,     // a cache refresh is planned, or a cache is given up
    kJoin,     // a rank that joined before joins again
    kLeave,    // the caches of a leaving rank are taken away
    kRevoke,   // parts of later steps give up their slots
    kWhole,    // whole steps are needed: none that all ranks have ended is half committed
    kEnd,      // the engine's tables and records are taken away
    kClosed,   // the engine is closed: calls end, and no step is committed any more. For good
    kActs
  };
  Phase(ControlMutex& mu, Workers& workers) : mu_(mu), workers_(workers) {}

  // Nothing that `act` excludes is under way.
  bool may(Act act) const REQUIRES(control) {
    for (uint32_t other = 0; other < kActs; ++other)
      if (kExcludes[act] >> other & 1 && under_way_[other] != 0) return false;
    return true;
  }
  bool is(Act act) const REQUIRES(control) { return under_way_[act] != 0; }
  void begin(Act act) REQUIRES(control) {
    FRUGAL_ASSERT(may(act));
    ++under_way_[act];
  }
  void end(Act act) REQUIRES(control) {
    FRUGAL_ASSERT(is(act));
    --under_way_[act];
    workers_.progress();
  }
  // Waits until the activity may begin. Returns false if it never can, since the engine is closed.
  bool await(ControlLock& lock, Act act) REQUIRES(control) {
    const bool ends = kExcludes[act] >> kClosed & 1;
    workers_.await(lock, [&]() REQUIRES(control) { return may(act) || (ends && closed()); });
    return may(act);
  }
  // Closes the engine. Returns whether it was closed before.
  bool close() REQUIRES(control) {
    under_way_[kClosed] = 1;
    const bool was = closed_.exchange(true);
    workers_.progress();
    return was;
  }
  bool closed() const { return closed_.load(); }

  // An activity: it begins with the mutex held; the end of this object takes the mutex and ends it.
  class During {
   public:
    During(Phase& of, Act act) REQUIRES(control) : of_(of), act_(act) { of_.begin(act_); }
    During(const During&) = delete;
    ~During() {
      ControlLock lock(of_.mu_);
      of_.end(act_);
    }

   private:
    Phase& of_;
    const Act act_;
  };

 private:
  static constexpr uint32_t kExcludes[kActs] = {
      /* kStep    */ 1u << kOutside | 1u << kAbort | 1u << kClosed,
      /* kPrepare   */ 1u << kCommit | 1u << kAbort,
      /* kCommit  */ 1u << kCommit | 1u << kAbort | 1u << kGet | 1u << kClosed,
      /* kAbort   */ 1u << kCommit | 1u << kGet,
      /* kOutside */ 1u << kCommit | 1u << kAbort | 1u << kClosed,
      /* kAlone   */ 1u << kRead | 1u << kGet | 1u << kPlan,
      /* kRead    */ 1u << kOutside | 1u << kAbort,
      /* kGet     */ 1u << kCommit | 1u << kAbort | 1u << kOutside | 1u << kClosed,
      /* kPlan    */ 1u << kOutside | 1u << kAbort | 1u << kClosed,
      /* kJoin    */ 1u << kCommit | 1u << kAbort | 1u << kClosed,
      /* kLeave   */ 1u << kOutside,
      /* kRevoke  */ 1u << kPlan,
      /* kWhole   */ 1u << kCommit,
      /* kEnd     */ 1u << kCommit | 1u << kAbort | 1u << kOutside | 1u << kGet,
      /* kClosed  */ 0,
  };
  ControlMutex& mu_;
  Workers& workers_;
  uint32_t under_way_[kActs] GUARDED_BY(control) = {};
  std::atomic<bool> closed_{false};  // for threads without the mutex
};

}  // namespace frugal
