// A trainer's GPU: its streams, its memory and its device work (docs/cuda.md).
//
// Gpu is the engine's side of one trainer on an accelerator. The trainer is a thread of the
// engine's process or of an attached one (process/client.h). DeviceWork is what one step of a rank
// has given to the device. Until it completes, its memory is not reused and its step does not
// commit. Threads: a Gpu's own mutexes guard its streams; the calls of a step come one at a time
// (call_mu).
#pragma once
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>

#include "base/buffer.h"
#include "base/heap.h"
#include "base/status.h"
#include "base/sync.h"
#include "cache/cached_rows.h"
#include "device/ops/kernels.h"
#include "device/ops/shapes.h"
#include "device/runtime.h"
#include "engine/data_path.h"
#include "engine/device_memory.h"
#include "engine/op_check.h"
#include "storage/rows.h"
#include "window/part.h"

namespace frugal {

class Gpu;

// Arrays copied to the device together, in an engine stream.
struct OnDevice : HeapObject {
  std::shared_ptr<Gpu> gpu;
  DeviceBuffer memory;
  Buffer staging;      // pinned: the source of the copy
  device::Event sent;  // recorded after the copy
  ~OnDevice();
};

// Where the rows of a part are in the step's cache: sources and items (docs/cuda.md, "Lookup").
struct SourcesOnDevice : OnDevice {
  device::Ptr<device::Source> source;
  device::Ptr<device::Item> items;  // of host rows that are not staged, then of the others
  uint32_t host_items = 0, hbm_items = 0;
  device::Ptr<uint32_t>
      host_rows;  // distinct rows without a cache slot: `host_items`, then `staged`
  uint32_t staged = 0;
};

// The lists of a CachedRowUpdate, on the device.
struct CachedUpdateOnDevice : OnDevice {
  device::Ptr<uint32_t> cache_slots, start;
  device::Ptr<device::Term> terms;
  size_t count = 0;
};

// The lists of a CachePlan, on the device.
struct PlanOnDevice : OnDevice {
  device::Ptr<uint32_t> slots, to;  // of admitted rows
  size_t count = 0;
  std::shared_ptr<CachedUpdateOnDevice> update;
};

// A part's arrays on the device, uploaded once.
struct PartOnDevice : OnDevice {
  device::PartPtr part{};
  Vector<device::FrequentRow> frequent;  // rows with more than one run of positions
  uint32_t runs = 0;                     // of the frequent rows
  // If some row is frequent: all runs of all rows, frequent ones last; the source of each row,
  // frequent ones staged; and the rows to stage, in order. Else null: item i is row i.
  device::Ptr<device::Item> items;
  uint32_t item_count = 0;
  device::Ptr<device::Source> source;
  device::Ptr<uint32_t> staged;
  device::Ptr<device::FrequentRow> frequent_list;  // `frequent`
  std::shared_ptr<SourcesOnDevice> cached;  // once there is a cache, and the sources are known
};

// Where kernels read the rows of a part, for plain and for pooled lookups. It stays valid for the
// step and the stream, so the part's next op stages nothing again.
struct Placed {
  const Part* part;
  void* stream;
  bool pooled;
  device::Ptr<device::Source> key_sources;  // pooled
  device::Ptr<device::Source> source;  // not pooled: sources and items; null: all are host rows
  device::Ptr<device::Item> items;
  uint32_t host_items, hbm_items;
  device::RowsPtr cached_rows, staged;
};

// Device work of one step of one rank. Destroyed when it has completed: all its events have passed.
struct DeviceWork : HeapObject {
  std::shared_ptr<Gpu> gpu;
  uint32_t rank = 0;
  uint64_t step = 0;
  Vector<device::Stream> streams;  // that the step has used
  Vector<device::Event> events;    // one for each, recorded after its last use; null: passed
  Vector<uint8_t> dirty;           // for each: used since its event
  Vector<PartRef> parts;
  Vector<Buffer> pinned;
  Vector<DeviceBuffer> memory;
  Vector<UpdateRef> updates;               // the refresh reads their sums
  Vector<std::shared_ptr<OnDevice>> sent;  // lists of the refresh
  Vector<std::shared_ptr<void>> kept;      // other objects that its kernels need
  bool after_refresh = false;
  Vector<Placed> placed;
  // Flags in pinned memory. Not 0: a gradient has a NaN that must be refused; offsets are wrong.
  Vector<const uint32_t*> nans, wrong_offsets;
  bool must_complete = false;  // before the step's end returns
  Mutex mu;                    // guards events, once the step has ended
  std::atomic<int> errors{0};  // failed polls in a row
  std::atomic<bool> completed{false};
  std::atomic<bool> failed{false};

  // What the flags say after completion. With wrong offsets the sums are undefined.
  enum class Found { kNothing, kNan, kWrongOffsets };
  Found found() const;

  Status use(device::Stream s);
  // Adds a flag that the end of the step checks.
  Status look_at(Vector<const uint32_t*>* words, const uint32_t** out);
  Status mark();  // records events of the streams used since the last time
  Status end();   // the same at the step's end; refuses captured streams
  // Waits until it completes or fails. A status of `go_on` ends the wait.
  template <class GoOn>
  Status poll(GoOn go_on) {
    while (!ask(1000000)) FRUGAL_TRY(go_on());
    return FRUGAL_OK;
  }
  // Polls the events, or waits about `timeout_ns` for one of them. True: completed, or failed.
  bool ask(uint64_t timeout_ns = 0);
  ~DeviceWork();
};
using DeviceWorkRef = std::shared_ptr<DeviceWork>;

// Keys that the device is sending to the host.
struct KeyDownload : HeapObject {
  std::shared_ptr<Gpu> gpu;
  device::Event event;
  Vector<PartRef> parts;
  std::atomic<bool> downloaded{false};
  std::atomic<bool> failed{false};
  std::atomic<int> errors{0};  // failed polls in a row
  bool ask();                  // true: received, or failed
  ~KeyDownload();
};

// An op of a trainer on a GPU, with its keys and offsets on the host.
struct GpuOp {
  frugal_op op = FRUGAL_OP_INIT;
  bool rows_on_device = false;           // rows_out or grads
  Buffer keys, offsets, weights;         // pinned copies
  device::Ptr<uint64_t> device_offsets;  // op.offsets is then null, or a copy
  device::Ptr<float> device_weights, device_weight_grads;
};

class Gpu : public HeapObject, public std::enable_shared_from_this<Gpu> {
 public:
  // `pinned` outlives it.
  static Status open(std::shared_ptr<device::Runtime> runtime, BufferPool& pinned,
                     std::shared_ptr<Gpu>* out);
  Gpu(std::shared_ptr<device::Runtime> runtime, BufferPool& pinned);
  ~Gpu();
  device::Runtime& runtime() const { return *runtime_; }
  BufferPool& pinned() { return pinned_; }
  DevicePool& memory() { return *memory_; }

  // Sets the caller's stream. Refuses one that is being captured.
  Status set_stream(void* stream);
  device::Stream stream() const { return stream_; }
  // Refuses a call while the caller's stream is being captured, and after a failure.
  Status ready() { return ready(stream_); }
  Status ready(device::Stream stream);
  Status sticky() const { return failed_.load(std::memory_order_acquire); }
  void failed(const device::Result& result);
  // Takes the result of one poll of an event; `errors` counts failed polls in a row. Any error that
  // lasts for kLasting polls is a failure.
  void answered(const device::Result& result, std::atomic<int>* errors);
  void look();  // checks whether the device has failed
  // The result as device_status() returns it. A failure is also kept.
  Status noted(const device::Result& result, const char* what);

  // The device work of the step; begun when first needed.
  DeviceWork& device_work(uint32_t rank, uint64_t step);
  DeviceWorkRef take_device_work() { return std::move(device_work_); }
  DeviceWork* current_device_work() { return device_work_.get(); }
  DeviceWorkRef share_device_work() { return device_work_; }

  // Finds out which pointers of the ops are on the device. Keys, offsets and weights that are on
  // the device, and that the host needs, are copied, and the call waits. `offsets_stay`: only
  // kernels need the offsets of a batch.
  Status take_ops(const frugal_op* ops, size_t n, Use use, bool offsets_stay, Vector<GpuOp>* out);
  // Runs call(ops, taken) of a lookup or a push, with keys and offsets on the host. Before that
  // `match` may remove an op's keys that equal those of a batch.
  template <class Match, class Call>
  Status with_ops(const frugal_op* ops, size_t n, Use use, bool offsets_stay, Match match,
                  Call call);
  Status on_device(const void* p, size_t alignment, const char* what, bool* device);
  // Copies from the device in the caller's stream. Complete after wait_stream(), or an event.
  Status copy_in(const void* from, size_t bytes, Buffer* to);
  // The same, and waits.
  Status bring(const void* from, size_t bytes, Buffer* to);
  // Waits a moment. True: the event has passed, or never will.
  bool await(device::Event e, std::atomic<int>* errors);
  Status wait_stream() {
    return wait_stream([this] {
      if (while_waiting_) while_waiting_();
      return FRUGAL_OK;
    });
  }
  // Sets a call that threads make from time to time while they wait for the caller's stream.
  void while_waiting(std::function<void()> call) { while_waiting_ = std::move(call); }
  // `go_on` is called from time to time; its status ends the wait.
  template <class GoOn>
  Status wait_stream(GoOn go_on);
  void drain() { drain(stream_); }
  void drain(device::Stream stream);
  // Begins to download keys of parts from the device: an event in the caller's stream.
  Status begin_download(Vector<PartRef> parts, std::shared_ptr<KeyDownload>* out);

  // The part's arrays on the device; made if missing. Threads: any; of two that make them, one
  // wins.
  Status upload(Part& part, PartOnDevice** out);
  // Also uploads where its rows are in the step's cache. forget_sources() drops that, since it will
  // change.
  Status upload_sources(Part& part, PartOnDevice** out = nullptr);
  void forget_sources(Part& part);

  // The following launch kernels in the caller's stream (gpu_ops.cpp).

  // Gathers rows of a part, pooled or not, to the op's rows_out. Some may be cached.
  Status gather(DeviceWork& f, const PartRef& part, const device::RowsView& rows,
                const device::RowsPtr& cached_rows, const GpuOp& op);
  // Copies rows 0 .. n - 1 from pinned memory, `stride` floats apart, to the device, `out_stride`
  // bytes apart.
  Status put_rows(DeviceWork& f, Buffer pinned, size_t stride, size_t n, uint32_t dim, float* out,
                  size_t out_stride);
  // gather(op) gathers the rows of `n` keys on the host, `stride` floats apart. Copies them to the
  // op's rows_out.
  template <class Gather>
  Status send_rows(DeviceWork& f, const GpuOp& op, size_t n, uint32_t dim, size_t stride,
                   Gather gather);
  // gather(op) writes the rows of `n` keys to device memory; the op wants them in host memory.
  // Waits.
  template <class Gather>
  Status bring_rows(const GpuOp& op, size_t n, uint32_t dim, Gather gather);
  // The source of an op's gradients.
  Status gradients(DeviceWork& f, const PartRef& part, const GpuOp& op, uint32_t dim,
                   device::GradPtr* out);
  // fold32 of each distinct row into `sums`, and of frequent rows' runs into `runs`; both are
  // pinned. `nan` (may be null) becomes 1 if a term is a NaN.
  Status reduce(DeviceWork& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
                const Buffer& sums, size_t stride, const Buffer& runs, const uint32_t* nan);
  // Writes a gradient for each key to pinned memory.
  Status expand(DeviceWork& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
                const Buffer& out, const uint32_t* nan);
  // A push of a table's gradients. The first push of a step is summed into memory of `sums`; its
  // rank gradients are in *push. The host continues with a later push, from the gradient of each
  // key. With `reject` the device work reports NaNs.
  Status push(DeviceWork& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
              bool first, bool reject, BufferPool& sums, PushSums* push);
  // If an op's keys on the device equal those of the part, they need not come to the host: removes
  // them from the op. The device compares them, and the call waits for the result.
  Status match_keys(DeviceWork& f, const PartRef& part, bool by_key, frugal_op* op);
  Status weight_grads(DeviceWork& f, const PartRef& part, const device::RowsView& rows,
                      const device::RowsPtr& cached_rows, const GpuOp& op,
                      const device::GradPtr& source);

  // The same, with a row for each key in pinned memory.
  Status weight_grads_of(DeviceWork& f, Buffer pinned, size_t stride, const uint32_t* slots,
                         size_t n, uint32_t dim, const GpuOp& op, const device::GradPtr& source);

  // The step's lookups come after all that cache refreshes have launched so far (DeviceCachedRows).
  Status end_refresh(DeviceWork& f);

  Status create_event(device::Event* out);
  void give_back(device::Event e);

 private:
  friend class DeviceCachedRows;
  device::Result take_event(device::Event* out);  // a returned one, or a new one
  Status take_pointers(const frugal_op& from, Use use, bool offsets_stay, GpuOp* out, bool* copied);
  Status same_keys(DeviceWork& f, const PartRef& part, bool by_key, const uint64_t* keys,
                   bool* same);
  // Begins work of a step in the caller's stream, after the part's upload.
  Status begin(DeviceWork& f, const PartRef& part, PartOnDevice** out);
  // Gets memory for `bytes` on both sides; send() copies from the host to the device.
  Status room(size_t bytes, OnDevice* out);
  Status send(size_t bytes, OnDevice* out) REQUIRES(upload_mu_);
  template <class Arguments>
  Status launch(device::Kernel kernel, const device::Shape& shape, const Arguments& arguments,
                device::Stream stream);
  template <class Arguments>
  Status launch(device::Kernel kernel, const device::Shape& shape, const Arguments& arguments) {
    return launch(kernel, shape, arguments, stream_);
  }
  // A pinned copy that lives as long as the device work.
  template <class T>
  Status keep(DeviceWork& f, const T* from, size_t n, device::Ptr<T>* out);
  Status sources(DeviceWork& f, Part& part, const device::RowsView& rows, PartOnDevice& d,
                 const device::RowsPtr& cached_rows, Placed* out);
  Status cached_sources(Part& part, PartOnDevice& d);
  Status behind(const OnDevice& sent);
  Status stage(DeviceWork& f, const PartOnDevice& d, const device::RowsView& rows,
               device::Ptr<uint32_t> which, device::Ptr<uint32_t> to, size_t count,
               device::RowsPtr* out);
  Status key_sources(DeviceWork& f, Part& part, const device::RowsView& rows, PartOnDevice& d,
                     const device::RowsPtr& cached_rows, Placed* out);
  // 0, 1, 2 ...: at least n of them, pinned.
  Status identity(size_t n, device::Ptr<uint32_t>* out);
  Status bags_of(DeviceWork& f, const GpuOp& op, size_t keys, device::BagsPtr* out);
  Status weights_of(DeviceWork& f, const GpuOp& op, size_t keys, device::Ptr<float>* out);

  std::shared_ptr<device::Runtime> runtime_;
  BufferPool& pinned_;
  device::Extent extent_;
  std::shared_ptr<DevicePool> memory_;
  device::Stream stream_;      // call_mu
  DeviceWorkRef device_work_;  // call_mu
  Buffer identity_;            // call_mu
  Vector<Buffer> outgrown_;
  Mutex upload_mu_;
  device::Stream upload_ GUARDED_BY(upload_mu_);
  device::Stream refresh_stream_;  // call_mu
  device::Event refresh_done_;
  Mutex events_mu_;
  Vector<device::Event> events_ GUARDED_BY(events_mu_);
  Mutex drained_mu_;
  device::Event drained_ GUARDED_BY(drained_mu_);  // for drain() if no other can be made
  std::atomic<Status> failed_{FRUGAL_OK};
  std::function<void()> while_waiting_;
  device::Result failure_;
};

// A cache's rows on the trainer's GPU. A refresh runs in a stream of its own, as device work of its
// step.
class DeviceCachedRows final : public CachedRows {
 public:
  // `rows`: the table's, at addresses for kernels.
  static Status open(Gpu& gpu, const device::RowsView& rows, uint64_t cache_slots,
                     std::unique_ptr<CachedRows>* out);
  DeviceCachedRows(Gpu& gpu, const device::RowsView& rows) : gpu_(gpu), rows_(rows) {}
  void send(const CachePlan& plan) override;
  void forget_plan() noexcept override;
  Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) override;
  Status finish() override;

 private:
  Status send_plan(const CachePlan& plan);  // if it was not sent yet
  Status send_lists(const CachedRowUpdate& update, std::shared_ptr<CachedUpdateOnDevice>* out);
  // Applies the update to the cached rows [from, to) of the lists.
  Status apply(const UpdateRef& update, const std::shared_ptr<CachedUpdateOnDevice>& lists,
               size_t from, size_t to);
  Status fill();
  Gpu& gpu_;
  const device::RowsView rows_;
  DeviceBuffer values_, state_;
  std::shared_ptr<PlanOnDevice> plan_;  // of the next refresh, once it is sent
  struct Later {
    UpdateRef update;
    std::shared_ptr<CachedUpdateOnDevice> lists;
    size_t from;
  };
  Vector<Later> later_;
};

// The status of a step's end whose device work has found something. By then the step is undone.
Status found_in_step(DeviceWork::Found found, uint64_t step);

template <class Gather>
Status Gpu::send_rows(DeviceWork& f, const GpuOp& op, size_t n, uint32_t dim, size_t stride,
                      Gather gather) {
  const size_t rows = op.op.pooling != FRUGAL_POOL_NONE ? op.op.bags : n;
  Buffer copies, weights;
  FRUGAL_TRY(pinned_.get(rows * stride * sizeof(float), &copies));
  frugal_op host = op.op;
  if (op.device_weights) {
    FRUGAL_TRY(bring(op.op.weights, n * sizeof(float), &weights));
    host.weights = weights.as<float>();
  }
  host.rows_out = copies.as<float>();
  host.row_stride = stride * sizeof(float);
  FRUGAL_TRY(gather(host));
  return put_rows(f, std::move(copies), stride, rows, dim, op.op.rows_out, op.op.row_stride);
}

template <class GoOn>
Status Gpu::wait_stream(GoOn go_on) {
  device::Event e;
  FRUGAL_TRY(create_event(&e));
  Status s = noted(runtime_->record(e, stream_), "waiting for the caller's stream");
  std::atomic<int> errors{0};
  bool over = s != FRUGAL_OK;
  while (!over && !(over = await(e, &errors)))
    if ((s = go_on()) != FRUGAL_OK) break;
  if (over)
    give_back(e);
  else
    runtime_->destroy_event(e);
  FRUGAL_TRY(s);
  return sticky() ? device_status(failure_, "the device failed") : FRUGAL_OK;
}

template <class Gather>
Status Gpu::bring_rows(const GpuOp& op, size_t n, uint32_t dim, Gather gather) {
  const size_t rows = op.op.pooling != FRUGAL_POOL_NONE ? op.op.bags : n;
  const size_t row_bytes = dim * sizeof(float), bytes = rows * row_bytes;
  if (bytes == 0) return FRUGAL_OK;
  GpuOp there;
  there.op = op.op;
  there.device_offsets = op.device_offsets;
  DeviceBuffer out;
  FRUGAL_TRY(memory_->get(bytes, &out));
  there.op.rows_out = reinterpret_cast<float*>(out.as<float>().address);
  there.op.row_stride = 0;
  Buffer back;
  Status s = gather(there);
  if (s == FRUGAL_OK) s = copy_in(there.op.rows_out, bytes, &back);
  if (s == FRUGAL_OK) s = wait_stream();
  if (s != FRUGAL_OK) drain();  // a kernel may be writing `out`
  FRUGAL_TRY(s);
  const size_t stride = stride_of(op.op.row_stride, dim);
  for (size_t i = 0; i < rows; ++i)
    std::memcpy(reinterpret_cast<char*>(op.op.rows_out) + i * stride, back.data() + i * row_bytes,
                row_bytes);
  return FRUGAL_OK;
}

template <class Match, class Call>
Status Gpu::with_ops(const frugal_op* ops, size_t n, Use use, bool offsets_stay, Match match,
                     Call call) {
  FRUGAL_TRY(ready());
  Vector<GpuOp> taken;
  Vector<frugal_op> known(ops, ops + n);
  for (frugal_op& op : known) FRUGAL_TRY(match(&op));
  FRUGAL_TRY(take_ops(known.data(), n, use, offsets_stay, &taken));
  Vector<frugal_op> host(n);
  for (size_t i = 0; i < n; ++i) host[i] = taken[i].op;
  // If the call fails, its flags must not count: remove them afterwards.
  const DeviceWork* before = current_device_work();
  const size_t nans = before ? before->nans.size() : 0,
               wrong_offsets = before ? before->wrong_offsets.size() : 0;
  Status s = call(host.data(), taken.data());
  if (DeviceWork* f = current_device_work(); f && s != FRUGAL_OK) {
    if (f->nans.size() > nans) f->nans.resize(nans);
    if (f->wrong_offsets.size() > wrong_offsets) f->wrong_offsets.resize(wrong_offsets);
  }
  // If this fails, the end of the step tries again.
  if (DeviceWork* f = current_device_work()) {
    const KeepError why;
    (void)f->mark();
  }
  return s;
}

}  // namespace frugal
