// frugal.hpp - the C ABI of frugal.h for C++17 and later: RAII, exceptions, spans. Header only.
//
// - A class holds one handle of frugal.h, and nothing else that matters.
// - Each method maps to the C function of the same name. The comment of that function says which
//   threads may call it, what each side owns, and which statuses it has.
// - A status other than FRUGAL_OK becomes a frugal::Error.
// - Classes are move-only. A moved-from object holds NULL.
// - Destructors never throw, and may run in any order. A handle that is closed already is no error.
//
// Example: a table, a trainer, and a hundred steps.
//
//     frugal::Engine engine;
//     auto config = frugal::TableConfig("users", /*rows=*/1000, /*dim=*/16);
//     config.optimizer.kind = FRUGAL_ADAGRAD;
//     frugal::Table table = engine.CreateTable(config);
//     frugal::Trainer trainer = engine.CreateTrainer();
//     for (uint64_t step = 0; step < 100; ++step) {
//       frugal::Batch batch = trainer.Prefetch(step, table, keys);
//       trainer.StepBegin(step);
//       trainer.Lookup(batch, rows);       // std::vector<float> rows(keys.size() * 16)
//       trainer.PushGrad(batch, grads);
//       trainer.StepEnd(step);
//     }
#ifndef FRUGAL_HPP
#define FRUGAL_HPP

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "frugal.h"

namespace frugal {

// A failed call: its status, and the code of the system or device call that caused it.
class Error : public std::runtime_error {
 public:
  Error(int32_t status, const std::string& message, int32_t system_code = 0,
        int32_t device_code = 0)
      : std::runtime_error(std::string(frugal_status_name(status)) + ": " + message),
        status_(status),
        system_code_(system_code),
        device_code_(device_code) {}

  int32_t status() const noexcept { return status_; }
  int32_t system_code() const noexcept { return system_code_; }
  int32_t device_code() const noexcept { return device_code_; }

 private:
  int32_t status_, system_code_, device_code_;
};

// Throws the calling thread's last error unless `status` is FRUGAL_OK.
inline void Check(int32_t status) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  throw Error(status, error.message, error.system_code, error.device_code);
}

// A view of contiguous elements, as std::span of C++20. It is made from an object with data() and
// size(), from a pointer and a size, or from an array.
template <typename T>
class Span {
 public:
  constexpr Span() noexcept = default;
  constexpr Span(T* data, size_t size) noexcept : data_(data), size_(size) {}
  template <size_t kSize>
  constexpr Span(T (&array)[kSize]) noexcept : data_(array), size_(kSize) {}
  template <typename Container, typename = std::enable_if_t<std::is_convertible_v<
                                    decltype(std::declval<Container&>().data()), T*>>>
  constexpr Span(Container&& container) noexcept
      : data_(container.data()), size_(container.size()) {}

  constexpr T* data() const noexcept { return data_; }
  constexpr size_t size() const noexcept { return size_; }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T* begin() const noexcept { return data_; }
  constexpr T* end() const noexcept { return data_ + size_; }
  constexpr T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// An engine's configuration with every default set. The string that config.service points to must
// live until the engine is open.
inline frugal_config Config() {
  frugal_config config;
  frugal_config_init(&config);
  return config;
}

// A table's configuration; all other fields have their defaults. The string `name` must live until
// the table is created.
inline frugal_table_config TableConfig(const char* name, uint64_t rows, uint32_t dim) {
  frugal_table_config config;
  frugal_table_config_init(&config);
  config.name = name;
  config.rows = rows;
  config.dim = dim;
  return config;
}

// A trainer's configuration; all other fields have their defaults.
inline frugal_trainer_config TrainerConfig(uint32_t rank = 0) {
  frugal_trainer_config config;
  frugal_trainer_config_init(&config);
  config.rank = rank;
  return config;
}

// Hyper-parameters of that kind; all other fields have their defaults.
inline frugal_optimizer Optimizer(int32_t kind = FRUGAL_SGD) {
  frugal_optimizer optimizer;
  frugal_optimizer_init(&optimizer);
  optimizer.kind = kind;
  return optimizer;
}

// The next four have every default.
inline frugal_folder_config FolderConfig() {
  frugal_folder_config config;
  frugal_folder_config_init(&config);
  return config;
}

inline frugal_checkpoint_config CheckpointConfig() {
  frugal_checkpoint_config config;
  frugal_checkpoint_config_init(&config);
  return config;
}

inline frugal_restore_config RestoreConfig() {
  frugal_restore_config config;
  frugal_restore_config_init(&config);
  return config;
}

inline frugal_checkpoint_info CheckpointInfo() {
  frugal_checkpoint_info info = {};
  info.struct_size = sizeof(info);
  return info;
}

// An op with every default set.
inline frugal_op Op() {
  frugal_op op;
  frugal_op_init(&op);
  return op;
}

namespace internal {

// A value that a move takes along: the moved-from object holds T().
template <typename T>
class Moved {
 public:
  Moved() noexcept = default;
  Moved(T value) noexcept : value_(value) {}
  Moved(Moved&& other) noexcept : value_(std::exchange(other.value_, T())) {}
  Moved& operator=(Moved&& other) noexcept {
    value_ = std::exchange(other.value_, T());
    return *this;
  }
  operator T() const noexcept { return value_; }
  T Release() noexcept { return std::exchange(value_, T()); }

 private:
  T value_ = T();
};

// A handle that is closed when its owner is destroyed, or when another handle is assigned.
template <typename T, int32_t (*kClose)(T*)>
class Owned {
 public:
  Owned() noexcept = default;
  explicit Owned(T* handle) noexcept : handle_(handle) {}
  Owned(Owned&&) noexcept = default;
  Owned& operator=(Owned&& other) noexcept {
    T* taken = other.handle_.Release();
    kClose(handle_.Release());
    handle_ = Moved<T*>(taken);
    return *this;
  }
  ~Owned() { kClose(handle_); }
  T* get() const noexcept { return handle_; }
  T* Release() noexcept { return handle_.Release(); }

 private:
  Moved<T*> handle_;
};

inline void CheckSize(size_t have, size_t need, const char* what) {
  if (have < need) {
    throw Error(FRUGAL_ERR_INVALID_ARGUMENT, std::string(what) + " has " + std::to_string(have) +
                                                 " elements and needs " + std::to_string(need));
  }
}

}  // namespace internal

// A table. The engine owns it: the destructor does not drop it, Drop() does.
class Table {
 public:
  Table() noexcept = default;
  explicit Table(frugal_table* handle) : handle_(handle) { dim_ = Describe().dim; }

  frugal_table* get() const noexcept { return handle_; }
  uint32_t dim() const noexcept { return dim_; }
  // Floats of a row: dim(); with FRUGAL_WITH_STATE also those of its optimizer state.
  size_t RowFloats(uint32_t flags = 0) const {
    return dim() + (flags & FRUGAL_WITH_STATE ? static_cast<size_t>(Describe().state_floats) : 0);
  }

  frugal_table_info Describe() const {
    frugal_table_info info = {};
    info.struct_size = sizeof(info);
    Check(frugal_table_describe(get(), &info));
    return info;
  }

  uint64_t Count() const {
    uint64_t count = 0;
    Check(frugal_table_count(get(), &count));
    return count;
  }

  // Returns all keys, in the rows' internal order.
  std::vector<uint64_t> Keys() const {
    std::vector<uint64_t> keys(Count());
    uint64_t cursor = 0;
    size_t done = 0;
    for (size_t n = 1; done < keys.size() && n > 0; done += n) {
      Check(frugal_table_keys(get(), &cursor, keys.data() + done, keys.size() - done, &n));
    }
    keys.resize(done);
    return keys;
  }

  // Reads rows. `rows` has RowFloats(flags) floats for each key: its values and, with
  // FRUGAL_WITH_STATE, its optimizer state. `found` is empty, or has a byte for each key.
  void Get(Span<const uint64_t> keys, Span<float> rows, Span<uint8_t> found = {},
           uint32_t flags = 0) const {
    internal::CheckSize(rows.size(), keys.size() * RowFloats(flags), "rows");
    if (!found.empty()) internal::CheckSize(found.size(), keys.size(), "found");
    Check(frugal_get(get(), keys.data(), keys.size(), flags, rows.data(), 0, found.data()));
  }

  // Writes rows, laid out as for Get. Without FRUGAL_WITH_STATE they get the optimizer state of new
  // rows.
  void Put(Span<const uint64_t> keys, Span<const float> rows, uint32_t flags = 0) {
    internal::CheckSize(rows.size(), keys.size() * RowFloats(flags), "rows");
    Check(frugal_put(get(), keys.data(), keys.size(), flags, rows.data(), 0));
  }

  // Returns the number of rows that existed.
  uint64_t Delete(Span<const uint64_t> keys) {
    uint64_t deleted = 0;
    Check(frugal_delete(get(), keys.data(), keys.size(), &deleted));
    return deleted;
  }

  void SetOptimizer(uint64_t first_step, const frugal_optimizer& optimizer) {
    Check(frugal_table_set_optimizer(get(), first_step, &optimizer));
  }

  // After an error, as FRUGAL_ERR_BUSY, the table exists as before, and this object still names it.
  void Drop() {
    Check(frugal_table_drop(get()));
    handle_.Release();
  }

 private:
  internal::Moved<frugal_table*> handle_;
  internal::Moved<uint32_t> dim_;
};

// Keys declared for one step. The batch ends with its step.
class Batch {
 public:
  Batch() noexcept = default;

  frugal_batch* get() const noexcept { return handle_; }
  // For a batch of one table: its number of keys, and of the floats in their rows.
  size_t size() const noexcept { return size_; }
  size_t floats() const noexcept { return size_ * dim_; }

 private:
  friend class Trainer;
  friend frugal_op Op(const Table& table, const Batch& batch, uint32_t part);
  Batch(frugal_batch* handle, frugal_table* table, size_t size, uint32_t dim)
      : handle_(handle), table_(table), size_(size), dim_(dim) {}

  frugal_op ToOp() const {
    CheckDeclared();
    frugal_op op = Op();
    op.table = table_;
    op.batch = get();
    return op;
  }

  // The C functions take an op with neither batch nor keys for one without keys. So this throws.
  void CheckDeclared() const {
    if (get() == nullptr)
      throw Error(FRUGAL_ERR_BAD_HANDLE, "the batch was moved, cancelled or never declared");
  }

  internal::Moved<frugal_batch*> handle_;
  internal::Moved<frugal_table*> table_;
  internal::Moved<size_t> size_;
  internal::Moved<uint32_t> dim_;
};

// Ops for calls on several tables, or with bags. The caller then sets outputs, gradients and bags.
// Everything that an op points to must live until the call.

// An op with any keys.
inline frugal_op Op(const Table& table, Span<const uint64_t> keys) {
  static constexpr uint64_t kNone = 0;  // in an op with a batch NULL means the declared keys
  frugal_op op = Op();
  op.table = table.get();
  op.keys = keys.data() == nullptr ? &kNone : keys.data();
  op.count = keys.size();
  return op;
}

// An op with exactly the keys of a part of a declared batch.
inline frugal_op Op(const Table& table, const Batch& batch, uint32_t part = 0) {
  batch.CheckDeclared();
  frugal_op op = Op();
  op.table = table.get();
  op.batch = batch.get();
  op.part = part;
  return op;
}

// Pools an op's keys in bags. Bag b has the keys offsets[b] .. offsets[b + 1] - 1. Weights are for
// sums only, one for each key.
inline void SetBags(frugal_op* op, int32_t pooling, Span<const uint64_t> offsets,
                    Span<const float> weights = {}) {
  internal::CheckSize(offsets.size(), 1, "offsets");
  const uint64_t keys = offsets[offsets.size() - 1];
  if (!weights.empty()) internal::CheckSize(weights.size(), keys, "weights");
  op->pooling = pooling;
  op->offsets = offsets.data();
  op->bags = offsets.size() - 1;
  op->weights = weights.data();
}

// Rows of this key read as zeros, take no gradient and are never created.
inline void SetPadding(frugal_op* op, uint64_t key) {
  op->padding_key = key;
  op->flags |= FRUGAL_OP_PADDING;
}

// A rank of synchronous training. Its destructor leaves the rank. One thread at a time calls it.
class Trainer {
 public:
  Trainer() noexcept = default;
  explicit Trainer(frugal_trainer* handle) noexcept : handle_(handle) {}

  frugal_trainer* get() const noexcept { return handle_.get(); }
  void Close() { Check(frugal_trainer_close(handle_.Release())); }
  // As if this process had ended: with a service the other ranks wait until a trainer joins as this
  // rank.
  void Abandon() { Check(frugal_trainer_abandon(handle_.Release())); }
  // Names the stream, a cudaStream_t, of this trainer's calls from now on.
  void SetStream(void* stream) { Check(frugal_set_stream(get(), stream)); }

  // Declares keys of one table for a step.
  Batch Prefetch(uint64_t step, const Table& table, Span<const uint64_t> keys) {
    frugal_op op = Op();
    op.table = table.get();
    op.keys = keys.data();
    op.count = keys.size();
    frugal_batch* batch = nullptr;
    Check(frugal_prefetch(get(), step, &op, 1, &batch));
    return Batch(batch, table.get(), keys.size(), table.dim());
  }

  // Declares keys of many tables. The ops of Lookup and PushGrad name the batch and its parts.
  Batch Prefetch(uint64_t step, Span<const frugal_op> ops) {
    frugal_batch* batch = nullptr;
    Check(frugal_prefetch(get(), step, ops.data(), ops.size(), &batch));
    return Batch(batch, nullptr, 0, 0);
  }

  // After an error, as FRUGAL_ERR_STEP_RANGE, the batch can be used as before.
  void Cancel(Batch&& batch) {
    Check(frugal_prefetch_cancel(get(), batch.get()));
    batch = Batch();
  }

  void StepBegin(uint64_t step, int64_t timeout_ms = FRUGAL_TIMEOUT_DEFAULT) {
    Check(frugal_step_begin(get(), step, timeout_ms));
  }

  // Reads the rows of a declared batch of one table.
  void Lookup(const Batch& batch, Span<float> rows) {
    internal::CheckSize(rows.size(), batch.floats(), "rows");
    frugal_op op = batch.ToOp();
    op.rows_out = rows.data();
    Check(frugal_lookup(get(), &op, 1));
  }

  // Reads the rows of any keys, declared or not.
  void Lookup(const Table& table, Span<const uint64_t> keys, Span<float> rows) {
    internal::CheckSize(rows.size(), keys.size() * table.dim(), "rows");
    frugal_op op = Op();
    op.table = table.get();
    op.keys = keys.data();
    op.count = keys.size();
    op.rows_out = rows.data();
    Check(frugal_lookup(get(), &op, 1));
  }

  void Lookup(Span<const frugal_op> ops) { Check(frugal_lookup(get(), ops.data(), ops.size())); }

  void PushGrad(const Batch& batch, Span<const float> grads) {
    internal::CheckSize(grads.size(), batch.floats(), "grads");
    frugal_op op = batch.ToOp();
    op.grads = grads.data();
    Check(frugal_push_grad(get(), &op, 1));
  }

  void PushGrad(const Table& table, Span<const uint64_t> keys, Span<const float> grads) {
    internal::CheckSize(grads.size(), keys.size() * table.dim(), "grads");
    frugal_op op = Op();
    op.table = table.get();
    op.keys = keys.data();
    op.count = keys.size();
    op.grads = grads.data();
    Check(frugal_push_grad(get(), &op, 1));
  }

  void PushGrad(Span<const frugal_op> ops) {
    Check(frugal_push_grad(get(), ops.data(), ops.size()));
  }

  // Memory for `floats` gradients, which the engine lends for this step.
  Span<float> Borrow(size_t floats) {
    if (floats > SIZE_MAX / sizeof(float))
      throw Error(FRUGAL_ERR_OUT_OF_MEMORY, "there is not as much memory in the world");
    void* memory = nullptr;
    Check(frugal_borrow(get(), floats * sizeof(float), &memory));
    return {static_cast<float*>(memory), floats};
  }

  // Whether the step that the rank is inside of will be a checkpoint.
  bool CheckpointDue() {
    bool due = false;
    Check(frugal_checkpoint_due(get(), &due));
    return due;
  }
  // Gives bytes that belong to the step, which a checkpoint of it has. The library copies them.
  void CheckpointBlob(const void* bytes, size_t size) {
    Check(frugal_checkpoint_blob(get(), bytes, size));
  }

  void StepEnd(uint64_t step, uint32_t flags = 0) { Check(frugal_step_end(get(), step, flags)); }
  void StepAbort() { Check(frugal_step_abort(get())); }

 private:
  internal::Owned<frugal_trainer, frugal_trainer_close> handle_;
};

// An engine. Its destructor closes it, which frees its tables.
class Engine {
 public:
  explicit Engine(const frugal_config& config = Config()) {
    frugal_engine* engine = nullptr;
    Check(frugal_open(&config, &engine));
    handle_ = Handle(engine);
  }

  frugal_engine* get() const noexcept { return handle_.get(); }
  void Close() { Check(frugal_close(handle_.Release())); }

  Table CreateTable(const frugal_table_config& config) {
    frugal_table* table = nullptr;
    Check(frugal_table_create(get(), &config, &table));
    return Table(table);
  }

  Table FindTable(const char* name) const {
    frugal_table* table = nullptr;
    Check(frugal_table_find(get(), name, &table));
    return Table(table);
  }

  // Returns the names of all tables, in the order of their creation.
  std::vector<std::string> TableNames() const {
    std::vector<std::string> names;
    char name[256];
    uint64_t cursor = 0;
    for (;;) {
      size_t size = 0;
      Check(frugal_table_next(get(), &cursor, name, sizeof(name), &size));
      if (size == 0) return names;
      names.emplace_back(name, size - 1);
    }
  }

  Trainer CreateTrainer(const frugal_trainer_config& config = TrainerConfig()) {
    frugal_trainer* trainer = nullptr;
    Check(frugal_trainer_create(get(), &config, &trainer));
    return Trainer(trainer);
  }

  // Returns FRUGAL_OK, or the status of the first background failure. Of a closed engine it is
  // FRUGAL_ERR_BAD_HANDLE.
  int32_t Health() const noexcept { return frugal_health(get()); }

  void Flush(int64_t timeout_ms = FRUGAL_TIMEOUT_DEFAULT) const {
    Check(frugal_flush(get(), timeout_ms));
  }

  // Returns the last step that all ranks have ended, if any.
  std::optional<uint64_t> CommittedStep() const {
    uint64_t step = FRUGAL_NO_STEP;
    Check(frugal_committed_step(get(), &step));
    if (step == FRUGAL_NO_STEP) return std::nullopt;
    return step;
  }

  // Reads rows for evaluation. It creates and declares nothing. `trainer` may be NULL.
  void Read(Trainer* trainer, Span<const frugal_op> ops,
            int64_t timeout_ms = FRUGAL_TIMEOUT_DEFAULT) const {
    if (trainer != nullptr && trainer->get() == nullptr)
      throw Error(FRUGAL_ERR_BAD_HANDLE, "the trainer was moved or closed; without one give NULL");
    Check(frugal_read(get(), trainer == nullptr ? nullptr : trainer->get(), ops.data(), ops.size(),
                      timeout_ms));
  }

  frugal_stats Stats() const {
    frugal_stats stats = {};
    stats.struct_size = sizeof(stats);
    Check(frugal_get_stats(get(), &stats));
    return stats;
  }

  // Returns the text of a Prometheus scrape.
  std::string Metrics() const {
    // The text may grow between two calls, so there is room for more than it took.
    std::string text(16384, '\0');
    for (;;) {
      size_t size = 0;
      const int32_t status = frugal_metrics(get(), text.data(), text.size(), &size);
      if (status != FRUGAL_ERR_OVERFLOW) {
        Check(status);
        text.resize(size - 1);  // without the 0 at its end
        return text;
      }
      text.resize(size + 1024);
    }
  }

  // Records the newest `events` events. TraceStop writes them to a file; nullptr discards them.
  void TraceStart(size_t events = size_t{1} << 17) { Check(frugal_trace_start(get(), events)); }
  void TraceStop(const char* path) { Check(frugal_trace_stop(get(), path)); }

  // --- Checkpoints
  void OpenFolder(const char* path, const frugal_folder_config& config = FolderConfig()) {
    Check(frugal_folder_open(get(), path, &config));
  }
  void CloseFolder() { Check(frugal_folder_close(get())); }

  // Begins a checkpoint, and returns its number.
  uint64_t BeginCheckpoint(const frugal_checkpoint_config& config = CheckpointConfig()) {
    uint64_t number = 0;
    Check(frugal_checkpoint(get(), &config, &number));
    return number;
  }
  // Waits until it is on disk; number 0: the one that was begun last.
  frugal_checkpoint_info AwaitCheckpoint(uint64_t number = 0,
                                         int64_t timeout_ms = FRUGAL_TIMEOUT_DEFAULT) const {
    frugal_checkpoint_info info = CheckpointInfo();
    Check(frugal_checkpoint_wait(get(), number, timeout_ms, &info));
    return info;
  }
  void CancelCheckpoint(uint64_t number) { Check(frugal_checkpoint_cancel(get(), number)); }
  void DeleteCheckpoint(uint64_t number) { Check(frugal_checkpoint_delete(get(), number)); }

  // Creates the tables of a checkpoint. An error NOT_FOUND: there is none.
  frugal_checkpoint_info Restore(const frugal_restore_config& config = RestoreConfig()) {
    frugal_checkpoint_info info = CheckpointInfo();
    Check(frugal_restore(get(), &config, &info));
    return info;
  }

  // Lets other processes attach to this engine by frugal_config.service.
  void Serve(const char* address) { Check(frugal_serve(get(), address)); }

 private:
  using Handle = internal::Owned<frugal_engine, frugal_close>;
  Handle handle_;
};

// The checkpoints of a folder, in the order of their numbers.
inline std::vector<frugal_checkpoint_info> Checkpoints(const char* folder) {
  std::vector<frugal_checkpoint_info> all;
  for (uint64_t cursor = 0;;) {
    frugal_checkpoint_info info = CheckpointInfo();
    Check(frugal_checkpoint_next(folder, &cursor, &info));
    if (info.number == 0) return all;
    all.push_back(info);
  }
}

// The blob that a rank has given for a checkpoint; number 0: the newest one.
inline std::string ReadBlob(const char* folder, uint64_t number, uint32_t rank) {
  std::string bytes;
  for (;;) {
    size_t size = 0;
    const int32_t status = frugal_checkpoint_read_blob(
        folder, number, rank, bytes.empty() ? nullptr : &bytes[0], bytes.size(), &size);
    if (status != FRUGAL_ERR_OVERFLOW) Check(status);
    bytes.resize(size);
    if (status == FRUGAL_OK) return bytes;
  }
}

inline void CopyCheckpoint(const char* folder, uint64_t number, const char* to) {
  Check(frugal_checkpoint_copy(folder, number, to));
}

}  // namespace frugal

#endif  // FRUGAL_HPP
