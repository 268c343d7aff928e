// Trainers that the controller treats as lost, because they do not reply or break the protocol. A
// thread of its own removes each: the thread that finds one holds locks, or is the one that must
// end.
#pragma once
#include <memory>

#include "base/condition.h"
#include "base/thread.h"
#include "engine/engine.h"

namespace frugal {

class Reaper {
 public:
  class Owner {
   public:
    // Both are called on the reaper's thread. reap() removes the trainer. reaped() notifies threads
    // that wait for its rank, once the reaper no longer has the trainer.
    virtual void reap(const TrainerRef& trainer) = 0;
    virtual void reaped() = 0;

   protected:
    ~Owner() = default;
  };
  explicit Reaper(Owner& owner) : owner_(owner) {}
  Status start();
  // Makes room for so many ranks. Called before the first lose_async().
  void reserve(size_t ranks);
  void lose_async(const TrainerRef& trainer);
  // Whether it has a trainer of this rank to remove.
  bool has(uint32_t rank);
  // Trainers that are left are not removed.
  void stop();

 private:
  void loop();

  Owner& owner_;
  Mutex mu_;  // taken under the engine's mutex, so no call is made while it is held
  Condition wake_;
  Vector<TrainerRef> unresponsive_ GUARDED_BY(mu_);
  bool stopping_ GUARDED_BY(mu_) = false;
  Thread thread_;
};

}  // namespace frugal
