// A trainer of this process whose engine is in another: its step as far as this process knows it,
// and its requests to the controller.
//
// Threads: with call_mu held, unless stated otherwise.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "base/sync.h"
#include "base/trace.h"
#include "cache/cached_rows.h"
#include "engine/engine.h"
#include "engine/gpu.h"
#include "engine/row_path.h"
#include "process/remote_table.h"
#include "process/rpc_client.h"
#include "process/spin_policy.h"

namespace frugal {

struct RemoteTrainer : AnyTrainer {
  explicit RemoteTrainer(Controller& controller) : rpc(controller), controller_(controller) {}
  // What holds buffers of `sums` ends before `sums`. (The GPU's work in flight has completed when a
  // step's end is sent.)
  ~RemoteTrainer() {
    parts.clear();
    pushes.clear();
    gpu.reset();
  }
  // The offset of memory from `sums`, as messages to the controller name it.
  uint64_t shm_address(const Buffer& b) const {
    return static_cast<uint64_t>(b.data() - channel().staging());
  }
  Channel& channel() const { return rpc.channel(); }

  // --- Requests. Used parts come first in each. What a reply says of the step is carried out.
  template <class Answer>
  Status ask(Exchange& e, Answer answer) REQUIRES(call_mu) {
    FRUGAL_TRY(take_late_reply());
    add_used(&e);
    spin_policy->set(e.call, kLookNs);
    const Status s = rpc.ask(e, answer);
    spin_policy->waited(e.call);
    if (s == FRUGAL_OK) used.clear();
    return concluded(s);
  }
  Status ask(Exchange& e) REQUIRES(call_mu) { return ask(e, nothing_more); }
  // Reports that this process lives, and nothing more.
  Status say_here() REQUIRES(call_mu);
  // Carries out what the status of a call says of the step, and returns the status.
  Status concluded(Status s) REQUIRES(call_mu);
  // Sends a declaration, and does not wait for its reply.
  Status declare_late(Exchange& e, const Vector<OpHead>& heads, const RemoteBatchRef& batch)
      REQUIRES(call_mu);
  // Called before any other request.
  Status take_late_reply() REQUIRES(call_mu);
  // The same for any thread, which waits until then at most. The trainer's own calls do what
  // follows from the reply.
  void take_late_reply_within(uint64_t until);
  void take_releases();

  // --- The step
  Status inside() REQUIRES(call_mu);
  // Undoes the step.
  Status abort() REQUIRES(call_mu);
  // Drops all of the step, except for sums that the controller may be reading.
  void leave_step() REQUIRES(call_mu);
  // Takes parts from a reply. `asked`: the accesses that they are for, or null: they are the
  // declared parts.
  Status take_parts(Channel& from, uint64_t bytes, uint64_t until, const Vector<Access*>* asked)
      REQUIRES(call_mu);
  // Rows of hashed tables exist once they have been used.
  Status use(const Vector<Access>& accesses) REQUIRES(call_mu);
  // Called before parts get other numbers.
  void forget_used() REQUIRES(call_mu);
  // Collects the step's sums for its end. Repeated, it gives the same ones, since the controller
  // may have them.
  Status share_sums() REQUIRES(call_mu);
  // Records a call that this process has made by itself.
  void trace(SpanKind span, uint64_t begin, uint64_t keys) noexcept;
  // The cached rows of a table; null if there are none.
  device::RowsPtr device_cached_rows(const AnyTable& table) const;

  RpcClient rpc;
  RegionRefs reads;  // of the controller's memory: what `parts` read
  // Aborts that the controller has counted for this rank, and how many of them its replies have
  // reported.
  struct Notices {
    RegionRefs home;
    const std::atomic<uint32_t>* counted = nullptr;
    uint32_t told = 0;
  } notices;
  std::atomic<bool> closer{false};  // a thread is closing it
  Arena staging;
  // Sums and declared keys, in the staging memory, which its GPU sees. Declared before what holds
  // its buffers.
  BufferPool sums;
  std::optional<SpinPolicy> spin_policy;
  uint64_t last_batch = 0;  // number of the last declaration
  bool in_step = false;
  // The end of the step: what is sent, and whether it was sent. If step_end has failed, it is to be
  // called again.
  struct End {
    bool begun = false;
    Vector<PushAddress> shm_addresses;
    Vector<RankGradients> sums;  // whose memory `shm_addresses` name
  } end;
  struct Device {
    bool failed = false;  // it does not work, and the controller knows
    bool left = false;    // removed from the pins, when the trainer was closed
    uint64_t said = 0;    // when this process last reported that it waits for its device
  } device;
  bool forgotten = false;  // it has lost its rank, and the controller holds nothing of it any more
  // Its caches: cached rows in memory of its GPU. The controller has the index, and numbers the
  // refreshes that it asks for.
  struct Caches {
    struct OfTable {
      RemoteTableRef table;
      std::unique_ptr<CachedRows> cached_rows;
      uint64_t kinds = 0;  // of the table, when they were made
    };
    Map<uint64_t, OfTable> tables;
    uint64_t refresh = 0;  // the last that was carried out
  } caches;
  uint64_t joined = 0;  // the controller's number for this trainer, among all that had the rank
  std::atomic<uint64_t> begun{kNoStep};  // the last step that it has begun, if that was not undone
  Map<uint64_t, Buffer> handed;  // sums and declared keys, by offset, until they have been read
  Map<uint64_t, RemoteBatchRef> batches;
  RemoteCounts counts;
  uint64_t cpu_ns = 0;
  struct Traced {
    bool on = false;            // the controller records a trace
    Vector<TraceEvent> events;  // of the step, for it
  } traced;

  // A declaration whose call has not waited for the reply. Any thread takes the reply, with `mu`;
  // the trainer's calls do what follows from it.
  struct Late {
    Mutex mu;
    bool open GUARDED_BY(mu) = false;  // the next message is its reply
    RemoteBatchRef batch;              // null: nothing follows
    size_t used = 0;                   // how many of `used` were sent with it
    Vector<uint64_t> shm_addresses;    // of its keys, as far as they are not released
  } late;

 private:
  // How long to poll for a reply before sleeping: the controller needs the processors.
  static constexpr uint64_t kLookNs = 15000;

  void add_used(Exchange* e) const;
  Status await_late_reply();
  Status answer_late(uint64_t until) REQUIRES(late.mu);

  Controller& controller_;
  Vector<uint32_t> used;  // numbers of parts that the next request reports
};
using RemoteTrainerRef = std::shared_ptr<RemoteTrainer>;

}  // namespace frugal
