#include "engine/gpu.h"

#include <algorithm>

namespace frugal {

using device::ErrorKind;
using device::Result;

namespace {

constexpr uint64_t kAskNs = 1000000;  // one wait for an event that a thread must wait for
constexpr int kLasting = 1000;        // failed polls in a row that count as a failure
// Handles of streams that CUDA reserves: cudaStreamLegacy, which is the default stream, and
// cudaStreamPerThread.
constexpr uintptr_t kLegacy = 1, kPerThread = 2;

}  // namespace

// --- In flight -----------------------------------------------------------------------------------

namespace {

// Returns when the event has passed, or never will.
void wait_for(Gpu& gpu, device::Event e) {
  for (std::atomic<int> errors{0}; !gpu.await(e, &errors);) {
  }
}

}  // namespace

OnDevice::~OnDevice() {
  if (!sent.handle) return;
  wait_for(*gpu, sent);  // short, except for declarations that were taken back at once
  gpu->give_back(sent);
}

KeyDownload::~KeyDownload() {
  if (!event.handle) return;
  wait_for(*gpu, event);
  gpu->give_back(event);
}

bool KeyDownload::ask() {
  if (downloaded.load(std::memory_order_acquire)) return true;
  bool passed = false;
  Result r = gpu->runtime().query(event, &passed);
  gpu->answered(r, &errors);
  if (gpu->sticky())
    failed.store(true);
  else if (!r.ok() || !passed)
    return false;
  downloaded.store(true, std::memory_order_release);
  return true;
}

Status DeviceWork::use(device::Stream s) {
  completed.store(false);
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i].handle == s.handle) {
      dirty[i] = 1;
      return FRUGAL_OK;
    }
  // Reserves its event, too: the end of the step must need no memory.
  streams.reserve(streams.size() + 1);
  events.reserve(streams.size() + 1);
  dirty.reserve(streams.size() + 1);
  device::Event e;
  FRUGAL_TRY(gpu->create_event(&e));
  events.push_back(e);
  streams.push_back(s);
  dirty.push_back(1);
  return FRUGAL_OK;
}

// Called after each call. A thread that later undoes the step must not touch the caller's streams,
// which may be captured by then.
Status DeviceWork::mark() {
  for (size_t i = 0; i < streams.size(); ++i) {
    if (!dirty[i]) continue;
    if (!events[i].handle) FRUGAL_TRY(gpu->create_event(&events[i]));
    Result r = gpu->runtime().record(events[i], streams[i]);
    FRUGAL_TRY(gpu->noted(r, "the end of a call"));
    dirty[i] = 0;
  }
  return FRUGAL_OK;
}

Status DeviceWork::end() {
  for (device::Stream s : streams) FRUGAL_TRY(gpu->ready(s));
  return mark();
}

Status DeviceWork::look_at(Vector<const uint32_t*>* words, const uint32_t** out) {
  Buffer word;
  FRUGAL_TRY(gpu->pinned().get(sizeof(uint32_t), &word));
  *word.as<uint32_t>() = 0;
  *out = word.as<uint32_t>();
  words->reserve(words->size() + 1);
  pinned.push_back(std::move(word));
  words->push_back(*out);
  must_complete = true;
  return FRUGAL_OK;
}

DeviceWork::Found DeviceWork::found() const {
  Found found = Found::kNothing;
  for (const uint32_t* word : nans)
    if (*word) found = Found::kNan;
  for (const uint32_t* word : wrong_offsets)
    if (*word) found = Found::kWrongOffsets;
  return found;
}

Status found_in_step(DeviceWork::Found found, uint64_t step) {
  switch (found) {
    case DeviceWork::Found::kNothing:
      return FRUGAL_OK;
    case DeviceWork::Found::kWrongOffsets:
      return fail(
          FRUGAL_ERR_INVALID_ARGUMENT,
          "offsets on the device in step %llu do not ascend from 0 to the number of keys: the "
          "step is undone on all ranks; begin it again",
          static_cast<unsigned long long>(step));
    case DeviceWork::Found::kNan:
      break;
  }
  return fail(FRUGAL_ERR_NAN,
              "a gradient of step %llu has a NaN and its table rejects them (nan_policy skip or "
              "accept would take it): the step is undone on all ranks; begin it again",
              static_cast<unsigned long long>(step));
}

bool DeviceWork::ask(uint64_t timeout_ns) {
  if (completed.load(std::memory_order_acquire)) return true;
  UniqueLock lock(mu, std::try_to_lock);
  if (!lock.owns_lock()) {  // another thread polls
    if (timeout_ns) sleep_ns(20'000);
    return false;
  }
  for (device::Event& e : events) {
    if (!e.handle) continue;
    bool passed = false;
    Result r = timeout_ns ? gpu->runtime().synchronize(e, timeout_ns, &passed)
                          : gpu->runtime().query(e, &passed);
    gpu->answered(r, &errors);
    if (gpu->sticky()) {
      failed.store(true, std::memory_order_release);
      break;
    }
    if (!passed) return false;  // or the poll failed, and is repeated
    gpu->give_back(e);
    e = {};
  }
  completed.store(true, std::memory_order_release);
  return true;
}

DeviceWork::~DeviceWork() {
  const KeepError why;
  // Until then the device uses everything that the step has given to it, even if the step was
  // undone.
  if (!completed.load() && mark() != FRUGAL_OK)
    for (size_t i = 0; i < streams.size(); ++i)
      if (dirty[i]) gpu->drain(streams[i]);
  for (device::Event e : events) {
    if (!e.handle) continue;
    wait_for(*gpu, e);
    gpu->give_back(e);
  }
}

// --- A trainer's GPU -----------------------------------------------------------------------------

Status Gpu::open(std::shared_ptr<device::Runtime> runtime, BufferPool& pinned,
                 std::shared_ptr<Gpu>* out) {
  auto gpu = std::allocate_shared<Gpu>(HeapAllocator<Gpu>(), std::move(runtime), pinned);
  FRUGAL_TRY_DEVICE(gpu->runtime_->create_stream(device::Priority::kHigh, &gpu->upload_),
                    "a stream of the engine");
  FRUGAL_TRY_DEVICE(gpu->runtime_->create_stream(device::Priority::kLow, &gpu->refresh_stream_),
                    "a stream of the engine");
  FRUGAL_TRY(gpu->create_event(&gpu->refresh_done_));
  FRUGAL_TRY(gpu->create_event(&gpu->drained_));
  *out = std::move(gpu);
  return FRUGAL_OK;
}

Gpu::Gpu(std::shared_ptr<device::Runtime> runtime, BufferPool& pinned)
    : runtime_(std::move(runtime)),
      pinned_(pinned),
      memory_(std::allocate_shared<DevicePool>(HeapAllocator<DevicePool>(), runtime_)) {
  const device::DeviceInfo info = runtime_->info();
  extent_.processors = info.processors;
  extent_.threads = info.block_threads;
}

Gpu::~Gpu() {
  if (refresh_done_.handle) runtime_->destroy_event(refresh_done_);
  if (drained_.handle) runtime_->destroy_event(drained_);
  if (refresh_stream_.handle) runtime_->destroy_stream(refresh_stream_);
  for (device::Event e : events_) runtime_->destroy_event(e);
  if (upload_.handle) runtime_->destroy_stream(upload_);
}

Result Gpu::take_event(device::Event* out) {
  {
    Lock lock(events_mu_);
    if (!events_.empty()) {
      *out = events_.back();
      events_.pop_back();
      return {};
    }
  }
  return runtime_->create_event(out);
}

Status Gpu::create_event(device::Event* out) {
  return device_status(take_event(out), "an event of the engine");
}

void Gpu::give_back(device::Event e) {
  Lock lock(events_mu_);
  try {
    events_.push_back(e);
  } catch (...) {
    runtime_->destroy_event(e);
  }
}

void Gpu::failed(const Result& r) {
  if (r.kind != ErrorKind::kFault && r.kind != ErrorKind::kNoDevice) return;
  Lock lock(events_mu_);
  if (failed_.load()) return;
  failure_ = r;
  failed_.store(FRUGAL_ERR_DEVICE, std::memory_order_release);
}

Status Gpu::noted(const Result& r, const char* what) {
  failed(r);
  return device_status(r, what);
}

void Gpu::look() {
  // A failure stays: any runtime call returns it.
  bool capturing = false;
  failed(runtime_->capturing(stream_, &capturing));
}

Status Gpu::ready(device::Stream stream) {
  if (failed_.load(std::memory_order_acquire))
    return device_status(failure_, "the device failed earlier");
  bool capturing = false;
  Result r = runtime_->capturing(stream, &capturing);
  FRUGAL_TRY(noted(r, "the caller's stream"));
  if (capturing)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "the stream is being captured: end the capture, steps cannot be part of a graph");
  return FRUGAL_OK;
}

Status Gpu::set_stream(void* stream) {
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  if (handle == kPerThread)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "cudaStreamPerThread is another stream in each thread, and work of a step goes on "
                "in others: create a "
                "stream, or give NULL for the default stream");
  if (handle == kLegacy) stream = nullptr;
  FRUGAL_TRY(ready({stream}));
  // Otherwise a stream of another device would be found only after work was submitted.
  device::Event probe;
  FRUGAL_TRY(create_event(&probe));
  const Result r = runtime_->record(probe, {stream});
  give_back(probe);
  FRUGAL_TRY(
      noted(r, "the stream given to frugal_set_stream, which must be of the trainer's device"));
  stream_ = {stream};
  return FRUGAL_OK;
}

DeviceWork& Gpu::device_work(uint32_t rank, uint64_t step) {
  if (!device_work_) {
    auto f = std::allocate_shared<DeviceWork>(HeapAllocator<DeviceWork>());
    f->gpu = shared_from_this();
    f->rank = rank;
    f->step = step;
    device_work_ = std::move(f);
  }
  return *device_work_;
}

// --- Pointers ------------------------------------------------------------------------------------

Status Gpu::on_device(const void* p, size_t alignment, const char* what, bool* out) {
  *out = false;
  if (!p) return FRUGAL_OK;
  device::Memory kind;
  Result r = runtime_->kind_of(p, &kind);
  FRUGAL_TRY(noted(r, what));
  if (kind == device::Memory::kOther)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "%s is memory of another device than %s: give memory of that one, or of the host",
                what, runtime_->name());
  *out = kind == device::Memory::kDevice || kind == device::Memory::kManaged;
  // In a kernel this would be a fault, after which no call of the process can use the device.
  if (*out && reinterpret_cast<uintptr_t>(p) % alignment)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "%s %p is not aligned to %zu bytes: give a multiple of that", what, p, alignment);
  return FRUGAL_OK;
}

Status Gpu::copy_in(const void* from, size_t bytes, Buffer* to) {
  FRUGAL_TRY(pinned_.get(bytes, to));
  Result r = runtime_->copy(device::Runtime::visible(to->data()),
                            {reinterpret_cast<uint64_t>(from)}, bytes, stream_);
  return noted(r, "copying from the device");
}

Status Gpu::bring(const void* from, size_t bytes, Buffer* to) {
  Status s = copy_in(from, bytes, to);
  if (s == FRUGAL_OK) s = wait_stream();
  if (s != FRUGAL_OK) drain();  // the copy may still write the returned buffer
  return s;
}

// An error that lasts without a fault: after the program's cudaDeviceReset such events do not exist
// any more.
void Gpu::answered(const Result& r, std::atomic<int>* errors) {
  failed(r);
  if (r.ok())
    errors->store(0);
  else if (errors->fetch_add(1) + 1 >= kLasting)  // the device's state is unknown
    failed({ErrorKind::kFault, r.code, r.call, r.text});
}

bool Gpu::await(device::Event e, std::atomic<int>* errors) {
  bool passed = false;
  answered(runtime_->synchronize(e, kAskNs, &passed), errors);
  return passed || sticky();
}

// Returns when the stream has no more work, whatever fails: its memory is about to be reused. It is
// called after a failure. That may have been a lack of memory, and then a new event may be refused,
// too.
void Gpu::drain(device::Stream stream) {
  device::Event e;
  UniqueLock last(drained_mu_, std::defer_lock);
  const Result made = take_event(&e);
  failed(made);
  if (!made.ok()) {
    last.lock();
    e = drained_;
  }
  bool recorded = false;
  for (int tries = 0; tries < kLasting && !recorded && !sticky(); ++tries) {
    const Result r = runtime_->record(e, stream);
    failed(r);
    recorded = r.ok();
  }
  if (recorded) wait_for(*this, e);
  if (!last.owns_lock()) give_back(e);
  if (recorded) return;
  // The device's state is unknown.
  if (!sticky()) failed({ErrorKind::kFault, 0, "cudaEventRecord", "streams cannot be waited for"});
}

Status Gpu::take_ops(const frugal_op* ops, size_t n, Use use, bool offsets_stay,
                     Vector<GpuOp>* out) {
  out->resize(n);
  bool copied = false;
  Status s = FRUGAL_OK;
  for (size_t i = 0; i < n && s == FRUGAL_OK; ++i)
    s = in_op(take_pointers(ops[i], use, offsets_stay, &(*out)[i], &copied), i, n,
              static_cast<const char*>(nullptr));
  if (s == FRUGAL_OK && copied) s = wait_stream();
  if (s != FRUGAL_OK) drain(stream_);  // copies may still write the returned buffers
  return s;
}

Status Gpu::take_pointers(const frugal_op& from, Use use, bool offsets_stay, GpuOp* out,
                          bool* copied) {
  GpuOp& o = *out;
  o.op = from;
  frugal_op& op = o.op;
  bool device = false;
  if (op.keys && op.count) {
    FRUGAL_TRY(on_device(op.keys, sizeof(uint64_t), "frugal_op.keys", &device));
    if (device) {
      FRUGAL_TRY(copy_in(op.keys, op.count * sizeof(uint64_t), &o.keys));
      op.keys = o.keys.as<uint64_t>();
      *copied = true;
    }
  }
  if (use == Use::kDeclare) return FRUGAL_OK;
  const float* rows = use == Use::kPush ? op.grads : op.rows_out;
  FRUGAL_TRY(on_device(rows, sizeof(float),
                       use == Use::kPush ? "frugal_op.grads" : "frugal_op.rows_out",
                       &o.rows_on_device));
  if (op.pooling != FRUGAL_POOL_NONE) {
    FRUGAL_TRY(on_device(op.offsets, sizeof(uint64_t), "frugal_op.offsets", &device));
    if (device) {
      o.device_offsets = {reinterpret_cast<uint64_t>(op.offsets)};
      if (offsets_stay && o.rows_on_device && op.batch && !op.keys) {
        op.offsets = nullptr;
      } else {
        FRUGAL_TRY(copy_in(op.offsets, (op.bags + 1) * sizeof(uint64_t), &o.offsets));
        op.offsets = o.offsets.as<uint64_t>();
        *copied = true;
      }
    }
  }
  if (use == Use::kRead) {
    FRUGAL_TRY(on_device(op.found_out, 1, "frugal_op.found_out", &device));
    if (device) return fail(FRUGAL_ERR_INVALID_ARGUMENT, "frugal_op.found_out must be host memory");
  }
  auto apart = [&](const char* what) {
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "frugal_op.%s is on the %s, the rows on the %s: give both on the same side", what,
                device ? "device" : "host", device ? "host" : "device");
  };
  FRUGAL_TRY(on_device(op.weights, sizeof(float), "frugal_op.weights", &device));
  if (device) {
    if (!o.rows_on_device) return apart("weights");
    o.device_weights = {reinterpret_cast<uint64_t>(op.weights)};
  }
  if (!op.weight_grads_out || use != Use::kPush) return FRUGAL_OK;
  FRUGAL_TRY(on_device(op.weight_grads_out, sizeof(float), "frugal_op.weight_grads_out", &device));
  if (device != o.rows_on_device) return apart("weight_grads_out");
  if (device) o.device_weight_grads = {reinterpret_cast<uint64_t>(op.weight_grads_out)};
  return FRUGAL_OK;
}

Status Gpu::begin_download(Vector<PartRef> parts, std::shared_ptr<KeyDownload>* out) {
  auto a = std::allocate_shared<KeyDownload>(HeapAllocator<KeyDownload>());
  a->gpu = shared_from_this();
  a->parts = std::move(parts);
  FRUGAL_TRY(create_event(&a->event));
  Result r = runtime_->record(a->event, stream_);
  FRUGAL_TRY(noted(r, "the keys' event"));
  *out = std::move(a);
  return FRUGAL_OK;
}

}  // namespace frugal
