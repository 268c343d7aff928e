// An engine in another process: the calls of engine.h, made through a controller.
//
// Calls with keys, rows or gradients use channels (protocol.h). For declared keys a trainer itself
// gathers rows from the controller's memory, and sums gradients into its own.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "base/sync.h"
#include "engine/data_path.h"
#include "process/controller.h"
#include "process/helpers.h"
#include "process/joins.h"
#include "process/pinned_slabs.h"
#include "process/remote_table.h"
#include "process/remote_trainer.h"
#include "process/rpc_client.h"

namespace frugal {

class Client final : public Session, private DataPath, private Controller::Owner {
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
  // The controller records the trace and writes the file.
  Status start_trace(size_t events) override;
  Status stop_trace(const char* path) override;

  Status create_table(const frugal_table_config& config, AnyTableRef* out) override;
  Status find_table(const char* name, AnyTableRef* out) override;
  Status next_table(uint64_t* cursor, String* name) override;
  Status drop_table(const AnyTableRef& table) override;
  Status describe(AnyTable& table, frugal_table_info* out) override;
  Status set_optimizer(AnyTable& table, uint64_t first_step,
                       const frugal_optimizer& optimizer) override;
  Status count(AnyTable& table, uint64_t* out) override;
  Status keys(AnyTable& table, uint64_t* cursor, uint64_t* out, size_t capacity,
              size_t* n) override;
  Status get(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, float* out,
             size_t stride, uint8_t* found) override;
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
  explicit Client(const frugal_config& config) : Session(config) {
    pinned_.pin_with(pins_->pinner());
  }
  static RemoteTable& own(AnyTable& t) { return static_cast<RemoteTable&>(t); }
  static RemoteTrainer& own(AnyTrainer& t) { return static_cast<RemoteTrainer&>(t); }
  Status op_table(const frugal_op& op, RemoteTableRef* out) const;
  // Null: it is no batch of this session.
  RemoteBatchRef batch_of(const void* handle) const;
  Status attach(const frugal_config& config);
  Status read_out(const RemoteTrainer* t, const frugal_op* ops, size_t n);
  Status parallel(size_t chunks, void (*run)(void*, size_t), void* context) override {
    return helpers_.parallel(chunks, run, context);
  }

  void cut_channels() noexcept override;
  void take_late_replies(uint64_t until);
  // A request outside steps.
  template <class Answer>
  Status ask(Exchange& e, Answer answer) {
    take_late_replies(e.until ? e.until : controller_.deadline().at);
    Lock one(rpc_mu_);
    return rpc_.ask(e, answer);
  }
  Status ask(Exchange& e) { return ask(e, nothing_more); }

  Status map_table(TableReply& reply, const char* name, RemoteTableRef* out);
  Status take_table(TableReply& reply, const char* name, AnyTableRef* out);
  Vector<RemoteTableRef> tables();
  Status see_kind(RemoteTable& table);
  Status see_kinds();
  Status left_of(RemoteTable& t, TableReadout** out) {
    return t.open_readout(controller_.controller_memory(), kinds_seen_.load(), pool_, out);
  }
  Status row_bytes(RemoteTable& t, uint32_t flags, size_t* bytes);
  bool forget_lost();
  bool has_rank(uint32_t rank);
  Status begin_call(RemoteTrainer& t) REQUIRES(t.call_mu);
  // How many steps before the rank's own may be uncommitted while it is inside a step.
  uint64_t kept_steps() const { return std::min<uint64_t>(config_.staleness, 62); }
  class AttachedStep;
  // Makes a declaration's keys available to the controller: in staging memory at head->shm_address
  // (only if `stages`), else as a piece of `e`. `memory` owns what is not the caller's.
  Status declared_keys(RemoteTrainer& t, const RemoteTable& table, const frugal_op& op, bool stages,
                       OpHead* head, Buffer* memory, Exchange* e);
  Status read_rows(RemoteTrainer* t, const frugal_op* ops, size_t n, Deadline deadline);

  // --- client_gpu.cpp: trainers on GPUs
  Status open_gpu(const frugal_trainer_config& config, std::shared_ptr<Gpu>* out);
  Status pin_tables();
  Status show_device(const Access& access, DeviceWork& device_work);
  class Told;
  Status cached_rows_of(RemoteTrainer& t, const CachedRowsAddress& of,
                        RemoteTrainer::Caches::OfTable** out, uint64_t* without);
  Status take_due(Told& told, DeviceWork& device_work, DueUpdate* due);
  Status ask_step(RemoteTrainer& t, Exchange& e, Vector<char>* told) REQUIRES(t.call_mu);
  Status refresh_cached_rows(RemoteTrainer& t, const Vector<char>& bytes, uint64_t tables,
                             uint64_t* without);
  Status pin_shared(const SumsAddress& sums, DeviceWork& device_work, const char** out);
  template <class Wait>
  Status await_device(RemoteTrainer& t, const char* what, Wait wait) REQUIRES(t.call_mu);
  Status end_device_work(RemoteTrainer& t, DeviceWork::Found* found) REQUIRES(t.call_mu);
  Status await_stream(RemoteTrainer& t) REQUIRES(t.call_mu);
  uint64_t heartbeat_ns() const;
  void say_here(RemoteTrainer& t) noexcept REQUIRES(t.call_mu);
  Status read_with_gpu(RemoteTrainer& t, const frugal_op* ops, size_t n, Deadline deadline);
  Status device_failed(RemoteTrainer& t) REQUIRES(t.call_mu);

  const std::shared_ptr<Pins> pins_ = std::make_shared<Pins>();  // what its devices see
  Controller controller_{*this, *this, pins_};
  BufferPool pool_;
  BufferPool pinned_;  // buffers that devices see
  Helpers helpers_;
  Mutex rpc_mu_;
  RpcClient rpc_{controller_};  // for calls outside steps
  RankJoins joins_{controller_};
  std::atomic<uint64_t> kinds_seen_{0};  // LedgerRoot::kinds when tables were last compared
  mutable Mutex mu_;
  Vector<std::weak_ptr<RemoteTrainer>> trainers_ GUARDED_BY(mu_);
  Vector<std::weak_ptr<RemoteTable>> tables_ GUARDED_BY(mu_);
};

}  // namespace frugal
