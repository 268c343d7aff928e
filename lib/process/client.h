// An engine in another process: the calls of engine.h, made through a controller.
//
// What has keys, rows or gradients goes through channels (protocol.h); a trainer gathers rows and sums
// gradients of declared keys by itself, from the controller's memory into its own.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include "base/handles.h"
#include "engine/data_path.h"
#include "engine/engine.h"
#include "engine/row_path.h"
#include "process/channel.h"
#include "process/control.h"
#include "process/helpers.h"
#include "process/patience.h"
#include "process/pinned_slabs.h"
#include "process/protocol.h"
#include "process/readout.h"
#include "process/regions.h"
#include "process/watch.h"

namespace frugal {

struct RemoteTable : AnyTable {
  std::shared_ptr<DevicePinner> pinner;
  uint64_t id = 0;             // its handle in the controller
  frugal_table_info info{};
  RowLayout layout;
  device::RowsView rows{};
  Mapping arrays[Rows::kArrays];
  PinnedSlabs pinned, pinned_state;  // `rows`, as far as devices see them
  uint64_t ledger = kNoPlace;  // its record in the controller's ledger
  bool lazy = false;
  std::mutex readout_mu;
  std::unique_ptr<TableReadout> readout;  // when the controller is dead and somebody has asked
  ~RemoteTable();
};
using RemoteTableRef = std::shared_ptr<RemoteTable>;

struct RemoteTrainer;

// Its id is its number, for the controller.
struct RemoteBatch final : AnyBatch {
  Vector<RemoteTableRef> tables;
  size_t size() const override { return tables.size(); }
  const AnyTable& table(size_t part) const override { return *tables[part]; }
};
using RemoteBatchRef = std::shared_ptr<RemoteBatch>;

struct RemoteTrainer : AnyTrainer {
  std::unique_ptr<Channel> channel;
  RegionRefs home, reads;      // of the controller's memory: where `notices` are, and what `parts` look at
  // Aborts that the controller has counted for this rank, and those that it has told of.
  const std::atomic<uint32_t>* notices = nullptr;
  std::atomic<bool> closer{false};  // a thread is about it
  // All that follows with call_mu held.
  Arena staging;
  BufferPool sums;             // and declared keys: in the staging memory, which its GPU sees; before who has its buffers
  std::optional<Patience> patience;
  uint64_t sequence = 0;
  // A declaration whose answer its call has not waited for. Any thread takes the answer, with `mu`; the trainer's calls
  // do what follows from it.
  struct Late {
    std::mutex mu;
    bool open = false;         // the next message is its answer
    RemoteBatchRef batch;      // null: nothing follows
    size_t used = 0;           // told with it, of `used`
    Vector<uint64_t> places;   // of its keys, that were not given back
  } late;
  uint64_t last_batch = 0;     // number of the last declaration
  uint32_t told = 0;
  bool in_step = false;
  bool ending = false;         // step_end has sent what follows; if it has failed it is to be called again
  Vector<PushPlace> places;
  Vector<Handover> sent;       // whose memory the places name
  bool failed = false;         // its GPU has, and the controller knows
  bool left_gpu = false;       // while it is closed
  bool let_go = false;         // it has lost its rank, and the controller holds nothing of it any more
  // Its caches: lines in memory of its GPU. The controller has the index, and numbers what it wants done to them.
  struct OfTable {
    RemoteTableRef table;
    std::unique_ptr<Lines> lines;
  };
  Map<uint64_t, OfTable> lines;
  uint64_t boundary = 0;       // the last that was carried out
  uint64_t said = 0;           // when the controller was told last that this process waits for its device
  uint64_t joined = 0;         // what the controller knows this trainer by, of all that had the rank
  std::atomic<uint64_t> begun{kNoStep};  // the last step that it has begun, if that was not undone
  Vector<uint32_t> used;       // numbers of parts that the controller is to be told of
  Map<uint64_t, Buffer> handed;  // sums and declared keys, by place, until they have been read
  Map<uint64_t, RemoteBatchRef> batches;
  RemoteCounts counts;
  uint64_t cpu_ns = 0;
  bool traced = false;         // the controller records a trace
  Vector<TraceEvent> events;   // of the step, for it

  // Of memory from `sums`, as the controller is told.
  uint64_t place(const Buffer& b) const { return static_cast<uint64_t>(b.data() - channel->staging()); }
  // What has buffers of `sums` ends before that. (What the GPU has in flight has landed when a step's end is sent.)
  ~RemoteTrainer() {
    parts.clear();
    pushes.clear();
    gpu.reset();
  }
};
using RemoteTrainerRef = std::shared_ptr<RemoteTrainer>;

class Client final : public Session, private DataPath {
 public:
  // Attaches to the controller at config.service.
  static Status open(const frugal_config& config, std::shared_ptr<Client>* out);
  ~Client();
  void shutdown() override;

  Status health() override;
  Status flush(Deadline deadline) override;
  Status committed(uint64_t* step) override;
  Status stats(frugal_stats* out) override;
  Status metrics(String* out) override;
  // Of the controller, which writes the file, too.
  Status start_trace(size_t events) override;
  Status stop_trace(const char* path) override;

  Status create_table(const frugal_table_config& config, AnyTableRef* out) override;
  Status find_table(const char* name, AnyTableRef* out) override;
  Status next_table(uint64_t* cursor, String* name) override;
  Status drop_table(const AnyTableRef& table) override;
  Status describe(AnyTable& table, frugal_table_info* out) override;
  Status set_optimizer(AnyTable& table, uint64_t first_step, const frugal_optimizer& optimizer) override;
  Status count(AnyTable& table, uint64_t* out) override;
  Status keys(AnyTable& table, uint64_t* cursor, uint64_t* out, size_t capacity, size_t* n) override;
  Status get(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, float* out, size_t stride,
             uint8_t* found) override;
  Status put(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, const float* in,
             size_t stride) override;
  Status remove(AnyTable& table, const uint64_t* keys, size_t n, uint64_t* deleted) override;

  Status create_trainer(const frugal_trainer_config& config, AnyTrainerRef* out) override;
  Status close_trainer(const AnyTrainerRef& trainer, bool abandoned) override;
  Status set_stream(AnyTrainer& t, void* stream) override;
  Status prefetch(AnyTrainer& t, uint64_t step, const frugal_op* ops, size_t n, bool want_handle,
                  uint64_t* batch_out) override;
  Status cancel(AnyTrainer& t, const AnyBatchRef& batch) override;
  Status step_begin(AnyTrainer& t, uint64_t step, Deadline deadline) override;
  Status lookup(AnyTrainer& t, const frugal_op* ops, size_t n) override;
  Status push(AnyTrainer& t, const frugal_op* ops, size_t n) override;
  Status borrow(AnyTrainer& t, size_t bytes, void** out) override;
  Status step_end(AnyTrainer& t, uint64_t step, uint32_t flags) override;
  Status abort_call(AnyTrainer& t) override;
  Status read(AnyTrainer* t, const frugal_op* ops, size_t n, Deadline deadline) override;
  Status told(AnyTrainer& t, Status status) override;

 private:
  explicit Client(const frugal_config& config) : Session(config) { pinned_.pin_with(pinner_); }
  static RemoteTable& own(AnyTable& t) { return static_cast<RemoteTable&>(t); }
  static RemoteTrainer& own(AnyTrainer& t) { return static_cast<RemoteTrainer&>(t); }
  Status op_table(const frugal_op& op, RemoteTableRef* out) const;
  // Null: it is no batch of this session.
  RemoteBatchRef batch_of(const void* handle) const;
  Status connect(const frugal_config& config, int64_t timeout_ms);
  Status attach(const frugal_config& config);
  Status lost() const;
  Status check() const;
  Status connected() const;
  // Whether the controller has ended, its process or only the engine there, so that rows are read out of what it has
  // left: which stays until this does.
  class Remaining {
   public:
    explicit Remaining(Client& c)
        : stay_(c.remains_mu_), there_(!c.closed_.load() && (c.lost_.load() || c.remains_.ended())) {}
    explicit operator bool() const { return there_; }

   private:
    std::shared_lock<std::shared_mutex> stay_;
    const bool there_;
  };
  // What lies at a place that the controller has told. It stays as long as `reads` has its region.
  template <class T>
  Status in_arena(uint64_t place, RegionRefs* reads, const T** out, uint64_t count = 1) {
    const char* at;
    const bool many = count > UINT64_MAX / sizeof(T);
    FRUGAL_TRY(regions_.find(place, many ? UINT64_MAX : count * sizeof(T), reads, &at));
    *out = reinterpret_cast<const T*>(at);
    return FRUGAL_OK;
  }
  Status remains_of(RemoteTable& table, TableReadout** out);
  Status read_out(const RemoteTrainer* t, const frugal_op* ops, size_t n);
  void peer_ended() noexcept;
  void cut_channels() noexcept;
  void connection_ended() noexcept;
  bool see_end(Status s);
  // A call that reads, during which the controller may end: then it reads what that has left.
  template <class Call>
  Status outlive(Call call) {
    const Status s = call();
    return see_end(s) ? call() : s;
  }
  Status parallel(size_t chunks, void (*run)(void*, size_t), void* context) override {
    return helpers_.parallel(chunks, run, context);
  }

  // A request, and what its answer has. `answer` takes the payload.
  struct Exchange {
    Call call;
    uint64_t args[5] = {};
    Vector<Piece> pieces;
    uint64_t until = 0;        // when the call's own time is up; 0: as the engine's time-out says
    void add(const void* data, size_t bytes) {
      if (bytes) pieces.push_back({data, bytes});
    }
  };
  template <class Answer>
  Status ask(Channel& channel, uint64_t* sequence, Exchange& e, Answer answer);
  Status request(Channel& channel, uint64_t sequence, const Exchange& e);
  template <class Answer>
  Status take_answer(Channel& channel, uint64_t sequence, const Header& h, uint64_t until, Exchange& e, Answer answer,
                     bool* answered);
  uint64_t overdue(const Exchange& e) const;
  Status not_answered(Channel& channel, Status s);
  Status of_controller(Status s) const;
  // Prefetches that were not waited for.
  Status declare_late(RemoteTrainer& t, Exchange& e, const Vector<OpHead>& heads, const RemoteBatchRef& batch);
  Status settle(RemoteTrainer& t);
  Status take_settled(RemoteTrainer& t);
  Status answer_late(RemoteTrainer& t, uint64_t until);
  void settle_all(uint64_t until);
  template <class Answer>
  Status ask(RemoteTrainer& t, Exchange& e, Answer answer);
  Status ask(RemoteTrainer& t, Exchange& e);
  static void add_used(const RemoteTrainer& t, Exchange* e);
  Status concluded(RemoteTrainer& t, Status s);
  template <class Answer>
  Status ask(Exchange& e, Answer answer);
  Status ask(Exchange& e);

  Status take_table(TableReply& reply, const char* name, AnyTableRef* out);
  Status lose_rank(uint32_t rank, uint64_t joined) noexcept;
  bool let_go_of_lost();
  Status give_up_join(uint32_t rank, Status why);
  Status enter(RemoteTrainer& t);
  Status inside(RemoteTrainer& t);
  void leave_step(RemoteTrainer& t);
  static void take_releases(RemoteTrainer& t);
  // A rank that is inside a step knows that steps which are further back are committed.
  uint64_t kept_steps() const { return std::min<uint64_t>(config_.staleness, 62); }
  // `asked`: the accesses that the parts are for; or null: they are the step's declared ones.
  Status take_parts(RemoteTrainer& t, Channel& channel, uint64_t bytes, uint64_t until,
                    const Vector<Access*>* asked);
  class AttachedStep;
  // Where the controller finds the keys of a declaration: at head->place if `stages`, or in `e`, for either in `memory`.
  Status declared_keys(RemoteTrainer& t, const RemoteTable& table, const frugal_op& op, bool stages, OpHead* head,
                       Buffer* memory, Exchange* e);
  Status ask_for(RemoteTrainer& t, const frugal_op* ops, Vector<Access>& accesses);
  Status use(RemoteTrainer& t, const Vector<Access>& accesses);
  void forget_used(RemoteTrainer& t);
  static void trace(RemoteTrainer& t, SpanKind span, uint64_t begin, uint64_t keys) noexcept;
  Status place_sums(RemoteTrainer& t);
  Status read_rows(RemoteTrainer* t, const frugal_op* ops, size_t n, Deadline deadline);

  // --- client_gpu.cpp: trainers on GPUs
  Status open_gpu(const frugal_trainer_config& config, std::shared_ptr<Gpu>* out);
  void leave_gpu(const Gpu& gpu) noexcept;
  Status pin_tables();
  Status show_device(const Access& access, Flight& flight);
  Status turn_lines(RemoteTrainer& t, const Vector<char>& told, uint64_t tables, uint64_t* without);
  Status pin_shared(const SumsPlace& sums, Flight& flight, const char** out);
  static device::RowsPtr device_lines(const RemoteTrainer& t, const AnyTable& table);
  template <class Wait>
  Status await_device(RemoteTrainer& t, const char* what, Wait wait);
  Status end_flight(RemoteTrainer& t, Flight::Found* found);
  Status await_stream(RemoteTrainer& t);
  uint64_t silence() const;
  void say_here(RemoteTrainer& t) noexcept;
  Status read_with_gpu(RemoteTrainer& t, const frugal_op* ops, size_t n, Deadline deadline);
  Status device_failed(RemoteTrainer& t);

  std::unique_ptr<ControlClient> control_;
  std::unique_ptr<Watch> watch_;
  std::shared_mutex remains_mu_;                     // what follows, against its end
  RegionRefs kept_;                                  // where remains_.root and versions_ are
  Remains remains_;                                  // regions_
  const VersionWord* versions_ = nullptr;  // with staleness
  std::mutex gpus_mu_;                               // trainers on GPUs come and go
  // While it has a device, what kernels read is pinned.
  const std::shared_ptr<DevicePinner> pinner_ = std::make_shared<DevicePinner>();
  Regions regions_{pinner_};                         // the controller's arena, and staging memory
  BufferPool pool_;
  BufferPool pinned_;                                // that devices see
  Helpers helpers_;
  std::unique_ptr<Channel> channel_;  // for calls outside steps
  std::mutex channel_mu_;
  uint64_t sequence_ = 0;
  std::atomic<bool> closed_{false}, lost_{false};
  mutable std::mutex mu_;             // what follows
  Vector<std::weak_ptr<RemoteTrainer>> trainers_;
  Vector<std::weak_ptr<RemoteTable>> tables_;
  Vector<std::atomic<bool>> unsure_;  // of each rank: a call to join has failed, and may have done it
  Vector<std::atomic<bool>> joins_;   // of each rank: a thread is about to join as it
};

}  // namespace frugal
