// The controller that a process has attached to: the connection, the memory that it has published,
// and its end.
//
// Threads: any. Its end is noticed by a thread of the watch or of the connection, or by a call that
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
  // The owner of channels to the controller. They are cut at its end, so no thread waits any
  // longer.
  class Owner {
   public:
    virtual void cut_channels() noexcept = 0;

   protected:
    ~Owner() = default;
  };
  // `session`: the session that this belongs to. `pins` has what kernels read of its memory.
  Controller(const Session& session, Owner& owner, std::shared_ptr<Pins> pins)
      : session_(session), owner_(owner), regions_(std::move(pins)) {}

  // open() opens the engine in the controller. take() takes its reply: memory, and addresses in it.
  Status open(const frugal_config& config, OpenReply* reply);
  Status take(const OpenReply& reply, Descriptors& descriptors);
  // From now on its end is noticed.
  Status watch();
  ControlClient& control() { return *control_; }
  // How long a call may wait for the controller; the deadline of a call that begins now.
  int64_t timeout_ms() const { return session_.config().timeout_ms; }
  Deadline deadline() const { return session_.deadline(FRUGAL_TIMEOUT_DEFAULT); }

  // Whether this process still uses the controller; if not, the status that a call returns.
  Status check() const;
  Status connected() const;
  bool closed() const { return closed_.load(); }
  bool is_lost() const { return lost_.load(); }
  Status lost() const;
  // The status of a reply, for the caller. A controller that stops in good order replies that it is
  // closed; the engine of this process is not.
  Status answered(Status s) const;
  // Whether `s` was due to the controller's end. Its connections end a moment before its process,
  // or its engine, counts as ended, so this waits for that moment.
  bool see_end(Status s);
  // Whether the controller's process has ended, or only its engine. Then rows are read out of the
  // memory that it has left. That memory stays as long as this object.
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
  // Runs a call that reads. If the controller ends meanwhile, runs it again, to read what it has
  // left.
  template <class Call>
  Status outlive(Call call) {
    const Status s = call();
    return see_end(s) ? call() : s;
  }

  Regions& regions() { return regions_; }
  // What is at a shared address that the controller sent. It stays mapped as long as `reads` has
  // its region.
  template <class T>
  Status in_arena(uint64_t shm_address, RegionRefs* reads, const T** out, uint64_t count = 1) {
    const char* at;
    const bool many = count > UINT64_MAX / sizeof(T);
    FRUGAL_TRY(regions_.find(shm_address, many ? UINT64_MAX : count * sizeof(T), reads, &at));
    *out = reinterpret_cast<const T*>(at);
    return FRUGAL_OK;
  }
  const VersionWord* versions() const { return versions_; }  // with staleness

  // Closing: begin_close() returns true to the first call. Then this process receives nothing more
  // of the controller. close() releases its memory when no read-out and no call with these locks
  // reads it.
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
  std::shared_mutex controller_memory_mu_;  // guards what follows against the controller's end
  RegionRefs kept_;                         // regions of controller_memory_.root and versions_
  ControllerMemory controller_memory_;      // in regions_
  const VersionWord* versions_ = nullptr;
  Regions regions_;  // its arena, and staging memory
  std::atomic<bool> closed_{false}, lost_{false};
};

}  // namespace frugal
