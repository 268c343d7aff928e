// Trainers that the controller takes for lost, because they do not answer or break the protocol: a
// thread takes each out, for whoever finds it holds locks, or is what is to end.
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
    // From its thread: takes the trainer out, and tells who waits for its rank when it is taken for
    // lost no more.
    virtual void reap(const TrainerRef& trainer) = 0;
    virtual void reaped() = 0;

   protected:
    ~Owner() = default;
  };
  explicit Reaper(Owner& owner) : owner_(owner) {}
  Status start();
  // Before the first: so many ranks.
  void reserve(size_t ranks);
  void lose_async(const TrainerRef& trainer);
  // Whether it is about a trainer of this rank.
  bool has(uint32_t rank);
  // Those that are left are lost by nobody.
  void stop();

 private:
  void loop();

  Owner& owner_;
  Mutex mu_;  // under the engine's mutex, so nothing is done with it held
  Condition wake_;
  Vector<TrainerRef> unresponsive_ GUARDED_BY(mu_);
  bool stopping_ GUARDED_BY(mu_) = false;
  Thread thread_;
};

}  // namespace frugal
