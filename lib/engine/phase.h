// What of an engine runs beside what: one table, looked at by whoever begins something.
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
    kStep,      // a rank begins a step
    kPrepare,   // a step is taken in ahead
    kCommit,    // of a step that all ranks have ended
    kAbort,     // uncommitted steps are undone
    kOutside,   // an operation outside steps
    kAlone,     // such an operation has rows and caches for itself
    kRead,      // a trainer between steps reads rows
    kGet,       // rows are read as of the last committed step, whatever ranks are inside of
    kPlan,      // a refresh of a cache is worked out ahead, or a cache given up
    kJoin,      // a rank that was here before comes back
    kLeave,     // the caches of a rank that leaves are taken away
    kRevoke,    // parts of later steps give up their places
    kWhole,     // what all ranks have ended is looked at: no step of it is half committed
    kEnd,       // the engine's tables and steps are
    kClosed,    // the engine is: calls end, and no step is committed any more. For good
    kActs
  };
  Phase(ControlMutex& mu, Workers& workers) : mu_(mu), workers_(workers) {}

  // Nothing that it is not to run beside is under way.
  bool may(Act act) const REQUIRES(control) {
    for (uint32_t other = 0; other < kActs; ++other)
      if (kNotBeside[act] >> other & 1 && under_way_[other] != 0) return false;
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
  // Waits until the act may begin. False: it cannot any more, since the engine is closed.
  bool await(ControlLock& lock, Act act) REQUIRES(control) {
    const bool ends = kNotBeside[act] >> kClosed & 1;
    workers_.wait_until(lock, [&]() REQUIRES(control) { return may(act) || (ends && closed()); });
    return may(act);
  }
  // Was it closed before?
  bool close() REQUIRES(control) {
    under_way_[kClosed] = 1;
    const bool was = closed_.exchange(true);
    workers_.progress();
    return was;
  }
  bool closed() const { return closed_.load(); }

  // An act from where it begins, with the mutex held, to the end of this, without.
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
  static constexpr uint32_t kNotBeside[kActs] = {
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
  std::atomic<bool> closed_{false};  // for who looks without the mutex
};

}  // namespace frugal
