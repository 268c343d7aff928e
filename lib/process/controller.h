// The controller that a process has attached to: the connection, the memory that it has told of,
// and its end.
//
// Threads: any. Its end is seen by a thread of the watch or of the connection, or by a call that
// fails.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "base/sync.h"
#include "engine/session.h"
#include "process/control.h"
#include "process/descriptors.h"
#include "process/readout.h"
#include "process/regions.h"
#include "process/watch.h"
#include "storage/row_versions.h"

namespace frugal {

class Controller {
 public:
  // Who has channels to it. They are cut when it has ended, for nobody waits then any longer.
  class Owner {
   public:
    virtual void cut_channels() noexcept = 0;

   protected:
    ~Owner() = default;
  };
  // `session`: of which it is. What kernels read of its memory is among `pins`.
  Controller(const Session& session, Owner& owner, std::shared_ptr<Pins> pins)
      : session_(session), owner_(owner), regions_(std::move(pins)) {}

  // Opens the engine there, and takes what it answers: its memory, and where things are in it.
  Status open(const frugal_config& config, OpenReply* reply);
  Status take(const OpenReply& reply, Descriptors& descriptors);
  // From now on its end is seen.
  Status watch();
  ControlClient& control() { return *control_; }
  // As long as a call may wait for it, or for one that has begun now.
  int64_t timeout_ms() const { return session_.config().timeout_ms; }
  Deadline deadline() const { return session_.deadline(FRUGAL_TIMEOUT_DEFAULT); }

  // Whether this process goes on with it, and what a call tells if not.
  Status check() const;
  Status connected() const;
  bool closed() const { return closed_.load(); }
  bool is_lost() const { return lost_.load(); }
  Status lost() const;
  // One that stops in good order says that it is closed, which this engine is not.
  Status answered(Status s) const;
  // A controller that ends loses its connections a moment before its process, or its engine, counts
  // as ended. Whether that was it.
  bool see_end(Status s);
  // Whether it has ended, its process or only the engine there, so that rows are read out of what
  // it has left: which stays until this does.
  class Remaining {
   public:
    explicit Remaining(Controller& c)
        : stay_(c.controller_memory_mu_),
          there_(!c.closed_.load() && (c.lost_.load() || c.controller_memory_.ended())) {}
    explicit operator bool() const { return there_; }

   private:
    std::shared_lock<std::shared_mutex> stay_;
    const bool there_;
  };
  const ControllerMemory& controller_memory() const { return controller_memory_; }
  // How often a table got another kind of optimizer.
  Status kinds(uint64_t* out) {
    std::shared_lock stay(controller_memory_mu_);
    if (closed()) return check();
    *out = controller_memory_.root->kinds.load(std::memory_order_acquire);
    return FRUGAL_OK;
  }
  // A call that reads, during which it may end: then that reads what it has left.
  template <class Call>
  Status outlive(Call call) {
    const Status s = call();
    return see_end(s) ? call() : s;
  }

  Regions& regions() { return regions_; }
  // What lies at a place that it has told. It stays as long as `reads` has its region.
  template <class T>
  Status in_arena(uint64_t shm_address, RegionRefs* reads, const T** out, uint64_t count = 1) {
    const char* at;
    const bool many = count > UINT64_MAX / sizeof(T);
    FRUGAL_TRY(regions_.find(shm_address, many ? UINT64_MAX : count * sizeof(T), reads, &at));
    *out = reinterpret_cast<const T*>(at);
    return FRUGAL_OK;
  }
  const VersionWord* versions() const { return versions_; }  // with staleness

  // Closing: true for the first call. Then nothing of it is heard any more, and its memory is let
  // go of when nobody reads it: what it has left, or with these locks of calls.
  bool begin_close() { return !closed_.exchange(true); }
  void disconnect();
  void close(Mutex& calls, Mutex& trainers);

 private:
  Status connect(const frugal_config& config, int64_t timeout_ms);
  void peer_ended() noexcept;
  void connection_ended() noexcept;

  const Session& session_;
  Owner& owner_;
  std::unique_ptr<ControlClient> control_;
  std::unique_ptr<Watch> watch_;
  std::shared_mutex controller_memory_mu_;  // what follows, against its end
  RegionRefs kept_;                        // where controller_memory_.root and versions_ are
  ControllerMemory controller_memory_;     // regions_
  const VersionWord* versions_ = nullptr;
  Regions regions_;                        // its arena, and staging memory
  std::atomic<bool> closed_{false}, lost_{false};
};

}  // namespace frugal
