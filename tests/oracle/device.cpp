#include "oracle/device.h"

#include <sys/mman.h>

#include <cstring>

#include "device/runtime.h"
#include "engine/engine.h"
#include "oracle/random.h"

namespace frugal_oracle {
namespace {

using frugal::device::Event;
using frugal::device::Ptr;
using frugal::device::Result;
using frugal::device::Runtime;

constexpr size_t kBlock = size_t{1} << 20;

class RankDeviceOn : public RankDevice {
 public:
  RankDeviceOn(std::shared_ptr<Runtime> runtime, uint64_t seed)
      : runtime_(std::move(runtime)), random_(seed) {
    // The default stream, and one of the caller's own.
    Check(runtime_->create_stream(frugal::device::Priority::kNormal, &streams_[1]));
    for (Event& e : events_) Check(runtime_->create_event(&e));
  }
  ~RankDeviceOn() override {
    Collect();
    for (const Block& b : pinned_) {
      runtime_->unpin(b.host);
      munmap(b.host, b.bytes);
    }
    for (const Block& b : memory_) runtime_->free(b.device);
    for (Event e : events_) runtime_->destroy_event(e);
    runtime_->destroy_stream(streams_[1]);
  }

  void* Stream() override {
    if (random_.Chance(0.1)) now_ ^= 1;
    return streams_[now_].handle;
  }

  void* Send(const void* host, size_t bytes, size_t align) override {
    void* from = Pinned(bytes);
    std::memcpy(from, host, bytes);
    const Ptr<char> to = Memory(bytes, align);
    Check(runtime_->copy(to, Runtime::visible(from), bytes, streams_[now_]));
    return reinterpret_cast<void*>(to.address);
  }

  void Spoil(void* device, size_t bytes) override {
    Check(runtime_->fill({reinterpret_cast<uint64_t>(device)}, 0xa5, bytes, streams_[now_]));
  }

  void Fetch(void* host, const void* device, size_t bytes) override {
    void* to = Pinned(bytes);
    Check(runtime_->copy(Runtime::visible(to), {reinterpret_cast<uint64_t>(device)}, bytes,
                         streams_[now_]));
    fetched_.push_back({host, to, bytes});
  }

  void Collect() override {
    for (int i = 0; i < 2; ++i) {
      Check(runtime_->record(events_[i], streams_[i]));
      for (bool passed = false; !passed && error_.empty();) {
        Check(runtime_->synchronize(events_[i], 1000000, &passed));
      }
    }
    for (const Fetched& f : fetched_) std::memcpy(f.host, f.pinned, f.bytes);
    fetched_.clear();
    for (Block& b : pinned_) b.used = 0;
    for (Block& b : memory_) b.used = 0;
  }

  std::string Error() override { return error_; }
  void Forgive() override { error_.clear(); }

 private:
  struct Block {
    char* host = nullptr;
    Ptr<char> device = {};
    size_t bytes = 0, used = 0;
  };
  struct Fetched {
    void *host, *pinned;
    size_t bytes;
  };

  void Check(const Result& r) {
    if (r.ok() || !error_.empty()) return;
    error_ = std::string("the test's own ") + r.call + ": " + r.text;
  }

  // Offsets that are no multiple of 16 now and then: vector loads are not always possible.
  size_t Skip(size_t align) { return random_.Chance(0.2) ? align * random_.Below(16 / align) : 0; }

  void* Pinned(size_t bytes) {
    bytes = (bytes + 15) / 16 * 16 + 16;
    for (Block& b : pinned_) {
      if (b.bytes - b.used < bytes) continue;
      b.used += bytes;
      return b.host + b.used - bytes;
    }
    Block b;
    b.bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    b.host = static_cast<char*>(mmap(nullptr, b.bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    Check(runtime_->pin(b.host, b.bytes));
    b.used = bytes;
    pinned_.push_back(b);
    return b.host;
  }

  Ptr<char> Memory(size_t bytes, size_t align) {
    const size_t skip = Skip(align);
    bytes = (bytes + skip + 15) / 16 * 16 + 16;
    for (Block& b : memory_) {
      if (b.bytes - b.used < bytes) continue;
      b.used += bytes;
      return b.device + (b.used - bytes + skip);
    }
    Block b;
    b.bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    Check(runtime_->alloc(b.bytes, &b.device));
    b.used = bytes;
    memory_.push_back(b);
    return b.device + skip;
  }

  std::shared_ptr<Runtime> runtime_;
  Random random_;
  frugal::device::Stream streams_[2];
  Event events_[2];
  int now_ = 0;
  std::vector<Block> pinned_, memory_;
  std::vector<Fetched> fetched_;
  std::string error_;
};

}  // namespace

const bool kDeviceMemory = true;

std::unique_ptr<RankDevice> OpenDevice(const std::string& name, uint64_t seed) {
  std::shared_ptr<Runtime> runtime;
  if (!frugal::device::open_runtime(name.c_str(), &runtime).ok()) return nullptr;
  return std::make_unique<RankDeviceOn>(std::move(runtime), seed);
}

void WaitForCopies(bool wait) { frugal::checkpoint_test_budget(wait ? 0 : uint64_t{32} << 20); }

void TakeStepsAsSmall(bool small) {
  frugal::g_small_step.store(small ? frugal::kParallelBytes : 0);
}

}  // namespace frugal_oracle
