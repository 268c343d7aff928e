// A trainer of this process whose engine is in another: its step as far as this side knows it, and
// its conversation with the controller.
//
// Threads: with call_mu held, but for what says otherwise.
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
  // What has buffers of `sums` ends before that. (What the GPU has in flight has completed when a
  // step's end is sent.)
  ~RemoteTrainer() {
    parts.clear();
    pushes.clear();
    gpu.reset();
  }
  // Of memory from `sums`, as the controller is told.
  uint64_t shm_address(const Buffer& b) const {
    return static_cast<uint64_t>(b.data() - channel().staging());
  }
  Channel& channel() const { return rpc.channel(); }

  // --- Asking. What was used comes first, and what an answer says of the step is done.
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
  // That this process lives, without more.
  Status say_here() REQUIRES(call_mu);
  // What a failed call tells; what it says of the step is done.
  Status concluded(Status s) REQUIRES(call_mu);
  // A declaration, whose answer is not waited for.
  Status declare_late(Exchange& e, const Vector<OpHead>& heads, const RemoteBatchRef& batch)
      REQUIRES(call_mu);
  // First thing before anything else is asked.
  Status take_late_reply() REQUIRES(call_mu);
  // The same for any thread, which waits at most so long: the trainer's own calls do what follows
  // from the answer.
  void take_late_reply_within(uint64_t until);
  void take_releases();

  // --- The step
  Status inside() REQUIRES(call_mu);
  // Undoes it.
  Status abort() REQUIRES(call_mu);
  // Nothing of the step is of use any more, but for sums that the controller may be reading.
  void leave_step() REQUIRES(call_mu);
  // Parts that the controller answers. `asked`: the accesses that they are for; or null: they are
  // the declared ones.
  Status take_parts(Channel& from, uint64_t bytes, uint64_t until, const Vector<Access*>* asked)
      REQUIRES(call_mu);
  // Rows of hashed tables exist once they have been used.
  Status use(const Vector<Access>& accesses) REQUIRES(call_mu);
  // Before parts get other numbers.
  void forget_used() REQUIRES(call_mu);
  // The sums of the step, for its end: the same however often that is tried, since the controller
  // may have them.
  Status share_sums() REQUIRES(call_mu);
  // A call that this process has made by itself.
  void trace(SpanKind span, uint64_t begin, uint64_t keys) noexcept;
  // The lines of a table; none if there are none.
  device::RowsPtr device_cached_rows(const AnyTable& table) const;

  RpcClient rpc;
  RegionRefs reads;  // of the controller's memory: what `parts` look at
  // Aborts that the controller has counted for this rank, and those that it has told of.
  struct Notices {
    RegionRefs home;
    const std::atomic<uint32_t>* counted = nullptr;
    uint32_t told = 0;
  } notices;
  std::atomic<bool> closer{false};  // a thread is about it
  Arena staging;
  BufferPool sums;  // and declared keys: in the staging memory, which its GPU sees; before who has
                    // its buffers
  std::optional<SpinPolicy> spin_policy;
  uint64_t last_batch = 0;     // number of the last declaration
  bool in_step = false;
  // The end of the step: what is sent, and whether it has been. If step_end has failed it is to be
  // called again.
  struct End {
    bool begun = false;
    Vector<PushAddress> shm_addresses;
    Vector<RankGradients> sums;  // whose memory the places name
  } end;
  struct Device {
    bool failed = false;       // and the controller knows
    bool left = false;         // while it is closed
    uint64_t said = 0;  // when the controller was told last that this process waits for its device
  } device;
  bool forgotten = false;  // it has lost its rank, and the controller holds nothing of it any more
  // Its caches: lines in memory of its GPU. The controller has the index, and numbers what it wants
  // done to them.
  struct Caches {
    struct OfTable {
      RemoteTableRef table;
      std::unique_ptr<CachedRows> cached_rows;
      uint64_t kinds = 0;  // of the table, when they were made
    };
    Map<uint64_t, OfTable> tables;
    uint64_t refresh = 0;      // the last that was carried out
  } caches;
  uint64_t joined = 0;  // what the controller knows this trainer by, of all that had the rank
  std::atomic<uint64_t> begun{kNoStep};  // the last step that it has begun, if that was not undone
  Map<uint64_t, Buffer> handed;  // sums and declared keys, by place, until they have been read
  Map<uint64_t, RemoteBatchRef> batches;
  RemoteCounts counts;
  uint64_t cpu_ns = 0;
  struct Traced {
    bool on = false;             // the controller records a trace
    Vector<TraceEvent> events;   // of the step, for it
  } traced;

  // A declaration whose answer its call has not waited for. Any thread takes the answer, with `mu`;
  // the trainer's calls do what follows from it.
  struct Late {
    Mutex mu;
    bool open GUARDED_BY(mu) = false;  // the next message is its answer
    RemoteBatchRef batch;      // null: nothing follows
    size_t used = 0;           // told with it, of `used`
    Vector<uint64_t> shm_addresses;  // of its keys, that were not given back
  } late;

 private:
  static constexpr uint64_t kLookNs =
      15000;  // for an answer before sleeping: the controller wants the processors

  void add_used(Exchange* e) const;
  Status await_late_reply();
  Status answer_late(uint64_t until) REQUIRES(late.mu);

  Controller& controller_;
  Vector<uint32_t> used;       // numbers of parts that the controller is to be told of
};
using RemoteTrainerRef = std::shared_ptr<RemoteTrainer>;

}  // namespace frugal
