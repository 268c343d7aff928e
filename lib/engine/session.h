// A session: an opened engine as the C API calls it.
//
// A session is an Engine (engine/engine.h) in the process that runs it, or a Client
// (process/client.h) in another process. Its tables, trainers and batches are of its own kind. This
// file has what both kinds share.
//
// The C API gives a session its own objects only, with these exceptions: the table and the batch
// that an op names, and the batch of cancel(). The session checks these where it uses them.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "base/handles.h"
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"
#include "engine/data_path.h"
#include "frugal.h"
#include "window/part.h"

namespace frugal {

class Engine;
class Gpu;
class Session;

struct AnyTable : HeapObject {
  static constexpr HandleKind kHandle = HandleKind::kTable;
  static constexpr const char* kNoun = "table";
  std::shared_ptr<Session> session;
  uint64_t handle = 0;
  String name;
  uint32_t dim = 0;
  size_t stride = 0;           // floats between rows
  bool keys_are_slots = true;  // each key has its own slot; as in Rows
  bool any_key = false;        // all 64-bit keys are allowed; as in Rows
  uint64_t capacity = 0;       // rows
  int32_t nan_policy = 0;
  std::atomic<bool> dropped{false};
  std::atomic<bool> created_here{false};  // this process has created it, which it may do once
};
using AnyTableRef = std::shared_ptr<AnyTable>;

// A part of the step that a rank is inside of.
struct StepPart {
  uint64_t batch = 0;  // its AnyBatch::id; 0: it was not declared, or has no handle
  uint32_t index = 0;  // of the part in it
  AnyTableRef table;
  PartRef part;
  bool whole = false;       // declared and resolved
  bool up_to_date = false;  // its rows may be read without asking the engine
  // Of attached trainers:
  bool cached = false;      // the trainer caches rows of the table
  bool used = false;        // the controller knows that it is used, or need not know
  uint64_t stale_keys = 0;  // keys of rows that had updates pending
  const device::Element* cached_values = nullptr;  // of cache slot 0, in host memory
};

// The keys of an op in this step.
struct Access {
  AnyTableRef table;
  PartRef part;        // resolved; null: the keys are not declared as they are used
  PartRef declared;    // what the op names without keys, which may not be resolved
  bool whole = false;  // `part` was declared, and the op names exactly its keys
  size_t number = 0;   // of the part in the step
};

// What a rank has pushed for a table in its current step.
struct PushState : PushSums {
  AnyTableRef table;    // null: nothing yet
  uint32_t number = 0;  // of the first push's part in the step
};

struct AnyTrainer : HeapObject {
  static constexpr HandleKind kHandle = HandleKind::kTrainer;
  static constexpr const char* kNoun = "trainer";
  std::shared_ptr<Session> session;
  uint64_t handle = 0;
  uint32_t rank = 0;
  std::shared_ptr<Gpu> gpu;  // null: the cpu device
  Mutex call_mu;             // held by a call of this trainer; taken by an abort to undo its step
  std::atomic<bool> closing{false};
  uint64_t step = kNoStep;  // begun last
  // Of the step that it is inside of, with call_mu held:
  // What is declared; then what an attached trainer has asked for.
  Vector<StepPart> parts GUARDED_BY(call_mu);
  size_t next_part GUARDED_BY(call_mu) = 0;  // the one that was found last
  Map<const AnyTable*, PushState> pushes GUARDED_BY(call_mu);
  Vector<std::shared_ptr<Buffer>> lent GUARDED_BY(call_mu);
  Vector<Access> accesses GUARDED_BY(call_mu);  // of a call; empty between calls
};
using AnyTrainerRef = std::shared_ptr<AnyTrainer>;

struct AnyBatch : HeapObject {
  static constexpr HandleKind kHandle = HandleKind::kBatch;
  static constexpr const char* kNoun = "batch";
  const Session* session = nullptr;
  uint64_t step = 0;
  uint32_t rank = 0;
  uint64_t handle = 0;                  // 0: the caller wants none
  uint64_t id = 0;                      // by which a step's parts name it
  const AnyTrainer* trainer = nullptr;  // that has numbered the id; null: it is a handle
  Status failed = FRUGAL_OK;            // it could not be declared after all, and why
  String why;
  virtual size_t size() const = 0;
  virtual const AnyTable& table(size_t part) const = 0;

 protected:
  ~AnyBatch() = default;
};
using AnyBatchRef = std::shared_ptr<AnyBatch>;

// Objects and their handles.
template <class T>
uint64_t handle_of(std::type_identity_t<std::shared_ptr<T>> object) {
  return handle_add(T::kHandle, std::move(object));
}
template <class T>
std::shared_ptr<T> object_of(const void* handle) {
  return std::static_pointer_cast<T>(handle_get(T::kHandle, reinterpret_cast<uint64_t>(handle)));
}

struct Deadline {
  uint64_t at = 0;  // now_ns() value; UINT64_MAX: never
  bool passed() const { return at != UINT64_MAX && now_ns() >= at; }
  // This deadline, or one in `ns` if that is earlier.
  Deadline within(uint64_t ns) const { return {std::min(at, now_ns() + ns)}; }
};

class Session : public HeapObject, public std::enable_shared_from_this<Session> {
 public:
  static constexpr HandleKind kHandle = HandleKind::kEngine;
  static constexpr const char* kNoun = "engine";
  virtual ~Session() = default;

  uint32_t generation() const { return generation_; }
  const frugal_config& config() const { return config_; }
  Deadline deadline(int64_t timeout_ms) const;
  // The table that an op names, if it is one of this session.
  Status op_table(const frugal_op& op, AnyTableRef* out) const;

  // The engine, if it runs in this process; else null.
  virtual std::shared_ptr<Engine> here() { return nullptr; }
  // Called before shutdown(): calls of this process's ranks report the close, and not an abort by
  // ranks that end.
  virtual void close_ranks() {}
  virtual void shutdown() = 0;
  virtual Status health() = 0;
  virtual Status flush(Deadline deadline) = 0;
  virtual Status committed(uint64_t* step) = 0;
  virtual Status stats(frugal_stats* out) = 0;
  virtual Status metrics(String* out) = 0;
  virtual Status start_trace(size_t events) = 0;
  virtual Status stop_trace(const char* path) = 0;

  virtual Status create_table(const frugal_table_config& config, AnyTableRef* out) = 0;
  virtual Status find_table(const char* name, AnyTableRef* out) = 0;
  virtual Status next_table(uint64_t* cursor,
                            String* name) = 0;  // without a name: there are no more
  virtual Status drop_table(const AnyTableRef& table) = 0;
  virtual Status describe(AnyTable& table, frugal_table_info* out) = 0;
  virtual Status set_optimizer(AnyTable& table, uint64_t first_step,
                               const frugal_optimizer& optimizer) = 0;

  // Rows outside steps.
  virtual Status count(AnyTable& table, uint64_t* out) = 0;
  virtual Status keys(AnyTable& table, uint64_t* cursor, uint64_t* out, size_t capacity,
                      size_t* n) = 0;
  virtual Status get(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, float* out,
                     size_t stride, uint8_t* found) = 0;
  virtual Status put(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags,
                     const float* in, size_t stride) = 0;
  virtual Status remove(AnyTable& table, const uint64_t* keys, size_t n, uint64_t* deleted) = 0;

  virtual Status create_trainer(const frugal_trainer_config& config, AnyTrainerRef* out) = 0;
  // `abandoned`: an attached trainer is closed as if its process had ended.
  virtual Status close_trainer(const AnyTrainerRef& trainer, bool abandoned) = 0;
  virtual Status set_stream(AnyTrainer& t, void* stream) = 0;
  virtual Status prefetch(AnyTrainer& t, uint64_t step, const frugal_op* ops, size_t n,
                          bool want_handle, uint64_t* batch_out) = 0;
  virtual Status cancel(AnyTrainer& t, const AnyBatchRef& batch) = 0;
  virtual Status step_begin(AnyTrainer& t, uint64_t step, Deadline deadline) = 0;
  virtual Status lookup(AnyTrainer& t, const frugal_op* ops, size_t n) = 0;
  virtual Status push(AnyTrainer& t, const frugal_op* ops, size_t n) = 0;
  virtual Status borrow(AnyTrainer& t, size_t bytes, void** out) = 0;
  virtual Status step_end(AnyTrainer& t, uint64_t step, uint32_t flags) = 0;
  virtual Status abort_call(AnyTrainer& t) = 0;
  virtual Status read(AnyTrainer* t, const frugal_op* ops, size_t n, Deadline deadline) = 0;
  // Checkpoints. UNSUPPORTED, unless the session overrides it.
  virtual Status open_folder(const char* path, const frugal_folder_config& config);
  virtual Status close_folder();
  virtual Status checkpoint(const frugal_checkpoint_config& config, uint64_t* number);
  virtual Status await_checkpoint(uint64_t number, Deadline deadline, frugal_checkpoint_info* info);
  virtual Status cancel_checkpoint(uint64_t number);
  virtual Status delete_checkpoint(uint64_t number);
  virtual Status checkpoint_due(AnyTrainer& t, bool* due);
  virtual Status give_blob(AnyTrainer& t, const void* bytes, size_t size);
  virtual Status restore(const frugal_restore_config& config, frugal_checkpoint_info* info);
  // The status that a trainer's call returns. If its GPU has failed, the other ranks must not wait
  // for it.
  virtual Status told(AnyTrainer& t, Status status) = 0;

 protected:
  explicit Session(const frugal_config& config) : config_(config) { config_.service = nullptr; }

  const uint32_t generation_ = process_generation();
  frugal_config
      config_;  // without the name of the service, which is the caller's, for the call alone
};
using SessionRef = std::shared_ptr<Session>;

}  // namespace frugal
