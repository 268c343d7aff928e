// The simulated GPU detects each kind of fault and race, and its streams, events, copies and
// failures behave as CUDA's.
//
// Kernels run in fibers, threads and blocks in any order, streams start at random moments, and
// failures come on request. Each fault has its text. Under ThreadSanitizer each kind of race is
// reported, and none where there is none. A mistake of the simulated GPU would hide faults of
// everything tested on it. So most tests here provoke a fault.
#include "sim/sim.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device/simt.h"
#include "sim/order.h"

namespace frugal::device {
namespace {

using sim::Delays;
using sim::Sim;

constexpr uint64_t kLong = 100'000'000'000;
constexpr Delays kNone = {0, 0, 0, 0, 0};
constexpr Delays kHeld = {0, 0, 100, 0, 30'000'000};  // until a thread waits

// --- Kernels ------------------------------------------------------------------------------------

struct SumArgs {
  Ptr<float> in, out;  // out: a sum for each block
  uint32_t count;
  uint32_t forget_sync;
};

// Grid-stride loop, shuffles in a warp, shared memory between warps.
void sum_body(const SumArgs& a) {
  float sum = 0;
  for (uint64_t i = uint64_t{block()} * threads() + thread(); i < a.count;
       i += uint64_t{blocks()} * threads())
    sum += load(a.in + i);
  for (uint32_t mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  float* sums = reinterpret_cast<float*>(shared());
  if (lane() == 0) sums[thread() / kWarp] = sum;
  if (!a.forget_sync) device::sync();
  if (thread() == 0) {
    float all = 0;
    for (uint32_t w = 0; w < threads() / kWarp; ++w) all += sums[w];
    store(a.out + block(), all);
  }
}

struct WarpArgs {
  Ptr<uint32_t> out;  // for each thread four words
};

void warp_body(const WarpArgs& a) {
  const uint64_t at = uint64_t{4} * (block() * threads() + thread());
  const uint32_t id = thread() + 1000 * block();
  store(a.out + at, shuffle(id, 5, 8));
  store(a.out + (at + 1), shuffle_xor(id, 3));
  store(a.out + (at + 2), ballot(thread() % 3 == 0));
  // Eight bytes, and a second meeting directly after the first.
  const uint64_t wide = shuffle((uint64_t{id} << 32) | 7, lane() + 1);
  store(a.out + (at + 3), static_cast<uint32_t>(wide >> 32) + static_cast<uint32_t>(wide));
}

struct ReturnArgs {
  Ptr<uint32_t> out;
};

// Threads of the upper half return, those of the lower meet three times.
void early_return_body(const ReturnArgs& a) {
  uint32_t* words = reinterpret_cast<uint32_t*>(shared());
  words[thread()] = thread();
  device::sync();
  if (thread() >= threads() / 2) return;
  uint32_t v = words[thread() + threads() / 2];
  device::sync();
  words[thread()] = v;
  device::sync();
  store(a.out + thread(), words[(thread() + 1) % (threads() / 2)]);
}

enum Touch : uint32_t {
  kRead4,
  kRead8,
  kRead16,
  kWrite4,
  kWrite16,
  kAdd4,
  kLaneReturns,
  kLaneInSync,
  kOtherMeeting,
  kSharedOverflow,
  kLoopThenFault
};
struct TouchArgs {
  Ptr<char> p;
  uint32_t touch;
  uint32_t known = 0;  // bytes before p, another access of the same allocation
};

void touch_body(const TouchArgs& a) {
  switch (a.touch) {
    case kLaneReturns:
      if (lane() == 9) return;
      ballot(true);
      return;
    case kLaneInSync:
      if (thread() == 35)
        device::sync();
      else
        shuffle(1u, 0);
      return;
    case kOtherMeeting:
      if (lane() < 16)
        ballot(true);
      else
        shuffle(1u, 0);
      return;
    case kSharedOverflow:
      if (thread() == 3) shared()[64] = 1;
      return;
    case kLoopThenFault:
      for (int i = 0; i < 5; ++i) device::sync();
      if (thread() == 33) load(as<uint32_t>(a.p));
      ballot(true);
      device::sync();
      return;
    default:
      break;
  }
  if (block() != 1 || thread() != 17) return;
  if (a.known > 0) load(as<uint32_t>(Ptr<char>{a.p.address - a.known}));
  switch (a.touch) {
    case kRead4:
      load(as<uint32_t>(a.p));
      break;
    case kRead8:
      load(as<uint64_t>(a.p));
      break;
    case kRead16:
      load(as<Float4>(a.p));
      break;
    case kWrite4:
      store(as<uint32_t>(a.p), 1u);
      break;
    case kWrite16:
      store(as<Float4>(a.p), Float4{1, 2, 3, 4});
      break;
    case kAdd4:
      add(as<uint32_t>(a.p), 1);
      break;
  }
}

struct TicketArgs {
  Ptr<uint32_t> counter;
  Ptr<uint32_t> out;  // a word for each thread of the grid
};

// Records the order in which threads came, without a race.
void ticket_body(const TicketArgs& a) {
  store(a.out + (block() * threads() + thread()), add(a.counter, 1));
}

struct WordsArgs {
  Ptr<uint32_t> from, to;
  uint32_t count;
  uint32_t times, plus;
};

// to[i] = from[i] * times + plus
void words_body(const WordsArgs& a) {
  for (uint32_t i = block() * threads() + thread(); i < a.count; i += blocks() * threads())
    store(a.to + i, load(a.from + i) * a.times + a.plus);
}

struct SharedArgs {
  Ptr<uint32_t> out;
};
void garbage_body(const SharedArgs& a) {
  store(a.out + (block() * threads() + thread()), reinterpret_cast<uint32_t*>(shared())[thread()]);
}

enum Clash : uint32_t { kTwoThreads, kTwoLanes, kTwoBlocks };
struct ClashArgs {
  Ptr<uint32_t> p;
  uint32_t clash;
};
void clash_body(const ClashArgs& a) {
  if (a.clash == kTwoThreads) {
    if (thread() < 2) store(a.p, thread());
  } else if (a.clash == kTwoLanes) {
    if (lane() == 3) store(a.p + thread() / kWarp, 1u);
    ballot(true);  // orders nothing
    if (lane() == 4) store(a.p + thread() / kWarp, 2u);
  } else {
    device::sync();
    if (thread() == 0) store(a.p, block());
    device::sync();
  }
}

template <class Arguments, void (*body)(const Arguments&)>
constexpr sim::KernelEntry Entry(const char* name) {
  return {name, sizeof(Arguments), [](const void* a) { body(*static_cast<const Arguments*>(a)); }};
}

enum : uint32_t { kSum, kWarps, kEarlyReturn, kTouch, kTicket, kWords, kGarbage, kClash };
const sim::KernelEntry kKernels[] = {
    Entry<SumArgs, sum_body>("sum"),
    Entry<WarpArgs, warp_body>("warp"),
    Entry<ReturnArgs, early_return_body>("early_return"),
    Entry<TouchArgs, touch_body>("touch"),
    Entry<TicketArgs, ticket_body>("ticket"),
    Entry<WordsArgs, words_body>("words"),
    Entry<SharedArgs, garbage_body>("garbage"),
    Entry<ClashArgs, clash_body>("clash"),
};

// --- A device -----------------------------------------------------------------------------------

#define ASSERT_FINE(call)                                       \
  do {                                                          \
    const Result result_ = (call);                              \
    ASSERT_TRUE(result_.ok()) << #call << ": " << result_.text; \
  } while (0)
#define EXPECT_FINE(call)                                       \
  do {                                                          \
    const Result result_ = (call);                              \
    EXPECT_TRUE(result_.ok()) << #call << ": " << result_.text; \
  } while (0)

struct Device {
  explicit Device(uint32_t index = 0, uint64_t seed = 1, const Delays& delays = Delays()) {
    EXPECT_FINE(sim::open_sim(index, &runtime));
    sim = static_cast<Sim*>(runtime.get());
    sim->set_test_kernels(kKernels, static_cast<uint32_t>(std::size(kKernels)));
    sim->set_seed(seed);
    sim->set_delays(delays);
  }
  Ptr<char> Alloc(size_t bytes) {
    Ptr<char> p;
    EXPECT_FINE(sim->alloc(bytes, &p));
    return p;
  }
  Stream NewStream() {
    Stream s;
    EXPECT_FINE(sim->create_stream(Priority::kNormal, &s));
    return s;
  }
  Event NewEvent() {
    Event e;
    EXPECT_FINE(sim->create_event(&e));
    return e;
  }
  // Waits for all that the stream has to do.
  Result Finish(Stream s = {}) {
    Event event;
    Result result = sim->create_event(&event);
    if (!result.ok()) return result;
    result = sim->record(event, s);
    bool passed = false;
    if (result.ok()) result = sim->synchronize(event, kLong, &passed);
    sim->destroy_event(event);
    EXPECT_TRUE(passed || !result.ok());
    return result;
  }
  template <class Arguments>
  Result Launch(uint32_t kernel, const Shape& shape, const Arguments& arguments, Stream s = {}) {
    return sim->launch(Sim::kTestKernels + kernel, shape, &arguments, sizeof arguments, s);
  }
  std::shared_ptr<Runtime> runtime;
  Sim* sim;
};

struct Pinned {
  Pinned(Device& device_in, size_t bytes_in) : device(device_in.runtime), bytes(bytes_in) {
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_FINE(device->pin(p, bytes));
  }
  ~Pinned() {
    device->unpin(p);
    munmap(p, bytes);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  uint32_t& operator[](size_t i) const { return static_cast<uint32_t*>(p)[i]; }
  float* floats() const { return static_cast<float*>(p); }
  Ptr<char> bytes_ptr() const { return Runtime::visible(p); }
  Ptr<uint32_t> words() const { return as<uint32_t>(bytes_ptr()); }
  std::shared_ptr<Runtime> device;
  void* p;
  size_t bytes;
};

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

double Seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// --- Kernels run as they should -----------------------------------------------------------------

TEST(Kernels, SumOfBlocks) {
  constexpr uint32_t kCount = 5'000;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Device device(0, seed);
    Pinned in(device, kCount * 4), out(device, 4096);
    float expected = 0;
    for (uint32_t i = 0; i < kCount; ++i) expected += in.floats()[i] = static_cast<float>(i % 17);
    const uint32_t blocks = static_cast<uint32_t>(1 + seed % 5);
    const uint32_t threads = seed == 8 ? 1024 : static_cast<uint32_t>(32 << (seed % 4));
    ASSERT_FINE(
        device.Launch(kSum, {blocks, threads, threads / kWarp * 4},
                      SumArgs{as<float>(in.bytes_ptr()), as<float>(out.bytes_ptr()), kCount, 0}));
    ASSERT_FINE(device.Finish());
    float sum = 0;
    for (uint32_t i = 0; i < blocks; ++i) sum += out.floats()[i];
    EXPECT_EQ(sum, expected) << "seed " << seed;
  }
}

TEST(Kernels, WarpOperations) {
  constexpr uint32_t kBlocks = 3, kThreads = 96;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Device device(0, seed);
    Pinned out(device, kBlocks * kThreads * 16);
    ASSERT_FINE(device.Launch(kWarps, {kBlocks, kThreads, 0}, WarpArgs{out.words()}));
    ASSERT_FINE(device.Finish());
    for (uint32_t b = 0; b < kBlocks; ++b) {
      for (uint32_t t = 0; t < kThreads; ++t) {
        const size_t at = 4 * (b * kThreads + t);
        const uint32_t first = t / 32 * 32;
        uint32_t bits = 0;
        for (uint32_t i = 0; i < 32; ++i) bits |= ((first + i) % 3 == 0 ? 1u : 0u) << i;
        ASSERT_EQ(out[at], t / 8 * 8 + 5 + 1000 * b);
        ASSERT_EQ(out[at + 1], (t ^ 3) + 1000 * b);
        ASSERT_EQ(out[at + 2], bits);
        ASSERT_EQ(out[at + 3], first + (t + 1) % 32 + 1000 * b + 7);
      }
    }
  }
}

TEST(Kernels, ReturnedThreadsCountAsArrived) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Device device(0, seed);
    Pinned out(device, 4096);
    ASSERT_FINE(device.Launch(kEarlyReturn, {1, 128, 512}, ReturnArgs{out.words()}));
    ASSERT_FINE(device.Finish());
    for (uint32_t t = 0; t < 64; ++t) ASSERT_EQ(out[t], 64 + (t + 1) % 64);
  }
}

std::vector<uint32_t> Tickets(uint64_t seed, uint32_t blocks) {
  Device device(0, seed);
  Pinned out(device, blocks * 32 * 4);
  Ptr<char> counter = device.Alloc(4);
  EXPECT_FINE(device.sim->fill(counter, 0, 4, {}));
  EXPECT_FINE(
      device.Launch(kTicket, {blocks, 32, 0}, TicketArgs{as<uint32_t>(counter), out.words()}));
  EXPECT_FINE(device.Finish());
  device.sim->free(counter);
  return std::vector<uint32_t>(&out[0], &out[blocks * 32]);
}

TEST(Kernels, OrderIsTheSeeds) {
  std::set<uint32_t> first_blocks, first_threads;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const std::vector<uint32_t> tickets = Tickets(seed, 8);
    const auto first = std::find(tickets.begin(), tickets.end(), 0u) - tickets.begin();
    first_blocks.insert(static_cast<uint32_t>(first / 32));
    first_threads.insert(static_cast<uint32_t>(first % 32));
    if (seed <= 3) {
      EXPECT_EQ(tickets, Tickets(seed, 8));
    }
  }
  EXPECT_GE(first_blocks.size(), 5u);
  EXPECT_GE(first_threads.size(), 5u);
}

TEST(Kernels, FreshMemoryIsGarbage) {
  Device device;
  Pinned out(device, 4096);
  Ptr<char> p = device.Alloc(4096);
  ASSERT_FINE(
      device.Launch(kWords, {1, 32, 0}, WordsArgs{as<uint32_t>(p), out.words(), 1024, 1, 0}));
  ASSERT_FINE(device.Finish());
  for (int i = 0; i < 1024; ++i) ASSERT_NE(out[i], 0u);
  device.sim->free(p);
  std::set<uint32_t> seen;
  ASSERT_FINE(device.Launch(kGarbage, {32, 32, 128}, SharedArgs{out.words()}));
  ASSERT_FINE(device.Finish());
  for (int i = 0; i < 1024; ++i) seen.insert(out[i]);
  EXPECT_GT(seen.size(), 32u) << "blocks see what others left";
}

TEST(Kernels, ShapesAndArguments) {
  Device device;
  const TouchArgs arguments = {};
  const auto launch = [&](uint32_t blocks, uint32_t threads, uint32_t shared) {
    return device.Launch(kTouch, {blocks, threads, shared}, arguments).kind;
  };
  EXPECT_EQ(launch(0, 32, 0), ErrorKind::kMisuse);
  EXPECT_EQ(launch(1, 0, 0), ErrorKind::kMisuse);
  EXPECT_EQ(launch(1, 48, 0), ErrorKind::kMisuse);
  EXPECT_EQ(launch(1, 1056, 0), ErrorKind::kMisuse);
  EXPECT_EQ(launch(1, 32, 48 * 1024 + 1), ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->launch(Sim::kTestKernels + 99, {}, &arguments, sizeof arguments, {}).kind,
            ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->launch(Sim::kTestKernels + kTouch, {}, &arguments, 1, {}).kind,
            ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->launched().size(), 0u);
  EXPECT_FINE(device.Launch(kTouch, {1, 32, 48 * 1024}, TouchArgs{{}, kRead4}));
  EXPECT_FINE(device.Finish());
  EXPECT_EQ(device.sim->launched(), std::vector<std::string>{"touch"});
}

// --- Faults -------------------------------------------------------------------------------------

// The text of the fault of a launch, or "" if there is none. Nothing may work afterwards.
std::string FaultOf(Device& device, const TouchArgs& arguments, uint32_t threads = 64) {
  EXPECT_FINE(device.Launch(kTouch, {3, threads, 64}, arguments));
  const Result result = device.Finish();
  if (result.ok()) return "";
  EXPECT_EQ(result.kind, ErrorKind::kFault);
  const std::string text = result.text;
  Ptr<char> p;
  Stream s;
  Event e;
  bool flag;
  Memory memory;
  const Result later[] = {
      device.sim->alloc(16, &p),        device.sim->create_stream(Priority::kLow, &s),
      device.sim->create_event(&e),     device.Launch(kTouch, {}, TouchArgs{}),
      device.sim->capturing({}, &flag), device.sim->kind_of(&p, &memory),
      device.sim->fill({1}, 0, 1, {}),  device.sim->copy({1}, {1}, 1, {}),
      device.sim->pin(&p, 1),           device.sim->query({}, &flag),
  };
  for (const Result& r : later) {
    EXPECT_EQ(r.kind, ErrorKind::kFault) << r.call;
    EXPECT_STREQ(r.text, text.c_str());
  }
  return text;
}

TEST(Faults, OfMemory) {
  struct Case {
    uint32_t touch;
    std::function<Ptr<char>(Device&, Device&, Pinned&)> where;
    const char* text;  // "": none
    uint32_t known = 0;
  };
  const auto device_memory = [](uint64_t at) {
    return [at](Device& d, Device&, Pinned&) { return d.Alloc(1000) + at; };
  };
  const auto pinned_memory = [](uint64_t at) {
    return [at](Device&, Device&, Pinned& p) { return p.bytes_ptr() + at; };
  };
  static uint32_t pageable[64];
  const Case cases[] = {
      {kRead4, device_memory(996), ""},
      {kRead16, device_memory(976), ""},
      {kWrite4, pinned_memory(8188), ""},
      {kAdd4, device_memory(0), ""},
      {kRead4, device_memory(1000), "read of 4 bytes at 0x"},
      {kRead4, device_memory(1000),
       "out of bounds: 0 bytes after the end of device memory of 1000"},
      {kRead16, device_memory(992),
       "out of bounds: 8 bytes before the end of device memory of 1000"},
      {kRead16, device_memory(992), "out of bounds: 8 bytes before", 992},
      {kRead4, device_memory(1000), "out of bounds: 0 bytes after", 1000},
      {kRead16, device_memory(976), "", 976},
      {kWrite4, device_memory(4096), "out of bounds: 3096 bytes after"},
      {kRead4, device_memory(2), "misaligned"},
      {kRead8, device_memory(4), "read of 8 bytes"},
      {kWrite16, device_memory(8), "misaligned"},
      {kWrite16, pinned_memory(8176), ""},
      {kRead16, pinned_memory(8192), "not pinned"},
      {kAdd4, pinned_memory(0), "add of 4 bytes"},
      {kAdd4, pinned_memory(0), "may read, modify and write"},
      {kRead4, [](Device&, Device&, Pinned&) { return Ptr<char>{}; }, "a null pointer"},
      {kRead4, [](Device&, Device&, Pinned&) { return Runtime::visible(pageable); }, "not pinned"},
      {kWrite4, [](Device&, Device&, Pinned&) { return Runtime::visible(pageable); }, "write of 4"},
      {kRead4, [](Device&, Device& other, Pinned&) { return other.Alloc(64); },
       "memory of another device"},
      {kRead4,
       [](Device& d, Device&, Pinned&) {
         Ptr<char> p = d.Alloc(64);
         d.sim->free(p);
         return p;
       },
       "freed device memory, once of 64 bytes"},
      {kRead4,
       [](Device& d, Device&, Pinned&) {
         Pinned gone(d, 4096);
         return gone.bytes_ptr();
       },
       "not pinned"},
  };
  for (const Case& c : cases) {
    Device device(0), other(1);
    Pinned pinned(device, 8192);
    const std::string text = FaultOf(device, {c.where(device, other, pinned), c.touch, c.known});
    SCOPED_TRACE(std::string(c.text) + " | " + text);
    if (*c.text) {
      EXPECT_TRUE(Contains(text, "touch, block 1, thread 17: "));
      EXPECT_TRUE(Contains(text, c.text));
    } else {
      EXPECT_EQ(text, "");
    }
    EXPECT_FINE(other.Finish());
  }
}

TEST(Faults, OfMeetings) {
  const struct {
    uint32_t touch;
    const char* text;
    const char* other;
  } cases[] = {
      {kLaneReturns, "waits in ballot", "of its warp has returned"},
      {kLaneInSync, "waits in shuffle", "thread 35 of its warp waits in sync"},
      {kOtherMeeting, "divergence: it waits in ", " of its warp "},
      {kSharedOverflow, "a write after the end of its shared memory", ""},
      {kLoopThenFault, "thread 33: read of 4 bytes at 0x0: a null pointer", ""},
  };
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    for (const auto& c : cases) {
      Device device(0, seed);
      const std::string text = FaultOf(device, {{}, c.touch});
      EXPECT_TRUE(Contains(text, c.text)) << text;
      EXPECT_TRUE(Contains(text, c.other)) << text;
      EXPECT_TRUE(Contains(text, "touch, block ")) << text;
    }
  }
}

TEST(Faults, OfCopiesAreFoundWhenTheyRun) {
  Device device(0, 1, kHeld);
  Pinned pinned(device, 4096);
  Ptr<char> p = device.Alloc(4096);
  Stream s = device.NewStream();
  EXPECT_EQ(device.sim->copy(p, Runtime::visible(&device), 8, s).kind, ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->copy(Runtime::visible(&device), p, 8, s).kind, ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->fill(Runtime::visible(&device), 0, 8, s).kind, ErrorKind::kMisuse);
  EXPECT_FINE(device.sim->copy(p, pinned.bytes_ptr(), 4096, s));
  EXPECT_FINE(device.Finish(s));
  EXPECT_FINE(device.sim->copy(p, pinned.bytes_ptr(), 4096, s));
  device.sim->free(p);  // while the copy is held
  const Result result = device.Finish(s);
  EXPECT_EQ(result.kind, ErrorKind::kFault);
  EXPECT_TRUE(Contains(result.text, "copy: write of 4096 bytes")) << result.text;
  EXPECT_TRUE(Contains(result.text, "freed device memory")) << result.text;
}

TEST(Faults, OfOneDeviceAreNotTheOthers) {
  Device a(0), b(1);
  EXPECT_NE(FaultOf(a, {{}, kRead4}), "");
  EXPECT_FINE(b.Launch(kTouch, {1, 32, 0}, TouchArgs{}));
  EXPECT_FINE(b.Finish());
}

// Operations after a fault are skipped, and no wait for them hangs.
TEST(Faults, NobodyHangs) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Device device(0, seed);
    Pinned words(device, 4096);
    Stream a = device.NewStream(), b = device.NewStream();
    Event e = device.NewEvent();
    EXPECT_FINE(device.Launch(kTouch, {2, 32, 0}, TouchArgs{{}, kRead4}, a));
    // The fault may have come by now.
    for (Stream s : {a, b}) {
      if (s.handle == b.handle && !(device.sim->record(e, a).ok() && device.sim->wait(b, e).ok()))
        break;
      for (uint32_t i = 0; i < 100; ++i)
        if (!device.Launch(kWords, {2, 32, 0}, WordsArgs{words.words(), words.words(), 8, 1, 1}, s)
                 .ok())
          break;
      static_cast<void>(device.sim->fill(words.bytes_ptr() + 100, 1, 100, s));
    }
    EXPECT_EQ(device.Finish(b).kind, ErrorKind::kFault);
    EXPECT_EQ(device.Finish(a).kind, ErrorKind::kFault);
    device.sim->destroy_stream(b);
    device.sim->destroy_event(e);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (uint32_t i = 0; i < 100; ++i) ASSERT_EQ(words[i], 0u);
  }
}

TEST(Faults, CallsThatMakeNoSense) {
  {
    Device device;
    device.sim->free({4096});
    EXPECT_TRUE(Contains(device.Finish().text, "free of 0x1000"));
  }
  {
    Device device;
    Ptr<char> p = device.Alloc(16);
    device.sim->free(p);
    EXPECT_FINE(device.Finish());
    device.sim->free(p);
    EXPECT_EQ(device.Finish().kind, ErrorKind::kFault);
  }
  {
    Device device;
    device.sim->unpin(&device);
    EXPECT_TRUE(Contains(device.Finish().text, "unpin of "));
  }
  {
    Device device;
    void* memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_FINE(device.sim->pin(memory, 8192));
    munmap(memory, 8192);
    device.sim->unpin(memory);
    EXPECT_TRUE(Contains(device.Finish().text, "unpin of ")) << "it was unmapped before";
  }
  {
    Device device;
    Stream s = device.NewStream();
    device.sim->destroy_stream(s);
    EXPECT_EQ(device.Launch(kTouch, {}, TouchArgs{}, s).kind, ErrorKind::kMisuse);
    Event e = device.NewEvent();
    device.sim->destroy_event(e);
    bool flag;
    EXPECT_EQ(device.sim->record(e, {}).kind, ErrorKind::kMisuse);
    EXPECT_EQ(device.sim->query(e, &flag).kind, ErrorKind::kMisuse);
    EXPECT_EQ(device.sim->wait({}, e).kind, ErrorKind::kMisuse);
    EXPECT_FINE(device.Finish());
    device.sim->destroy_stream(s);
    EXPECT_TRUE(Contains(device.Finish().text, "destroy_stream of "));
  }
}

TEST(FaultsDeathTest, HostTouchesDeviceMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto touch = [](bool write, bool freed) {
    Device device;
    volatile char* p = reinterpret_cast<char*>(device.Alloc(64).address);
    if (freed) device.sim->free({reinterpret_cast<uint64_t>(p)});
    if (write)
      *p = 1;
    else
      static_cast<void>(*p);
    _exit(0);
  };
#if defined(FRUGAL_TSAN) || defined(FRUGAL_ASAN)
  EXPECT_DEATH(touch(false, false), "SEGV");
#else
  EXPECT_EXIT(touch(false, false), testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(touch(true, false), testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(touch(false, true), testing::KilledBySignal(SIGSEGV), "");
#endif
}

// --- Memory -------------------------------------------------------------------------------------

TEST(Memory, Kinds) {
  Device a(0), b(1);
  Pinned pinned(a, 8192);
  Ptr<char> p = a.Alloc(100);
  Memory memory;
  const auto kind = [&](Device& d, uint64_t address) {
    EXPECT_FINE(d.sim->kind_of(reinterpret_cast<void*>(address), &memory));
    return memory;
  };
  EXPECT_EQ(p.address % 256, 0u);
  EXPECT_EQ(kind(a, p.address), Memory::kDevice);
  EXPECT_EQ(kind(a, p.address + 99), Memory::kDevice);
  EXPECT_EQ(kind(a, p.address + 100), Memory::kPageable);
  EXPECT_EQ(kind(b, p.address), Memory::kOther);
  EXPECT_EQ(kind(a, pinned.bytes_ptr().address + 5000), Memory::kPinned);
  EXPECT_EQ(kind(b, pinned.bytes_ptr().address), Memory::kPinned);
  EXPECT_EQ(kind(a, reinterpret_cast<uint64_t>(&memory)), Memory::kPageable);
  a.sim->free(p);
  EXPECT_EQ(kind(a, p.address), Memory::kPageable);
  // Pinned by one, seen by all.
  EXPECT_FINE(b.Launch(kWords, {1, 32, 0}, WordsArgs{pinned.words(), pinned.words(), 8, 0, 5}));
  EXPECT_FINE(b.Finish());
  EXPECT_EQ(pinned[7], 5u);
}

TEST(Memory, Limits) {
  Device device;
  Ptr<char> a, b;
  device.sim->set_memory_bytes(1000);
  EXPECT_EQ(device.sim->info().memory_bytes, 1000u);
  EXPECT_FINE(device.sim->alloc(600, &a));
  EXPECT_EQ(device.sim->alloc(401, &b).kind, ErrorKind::kOutOfMemory);
  EXPECT_FINE(device.sim->alloc(400, &b));
  device.sim->free(a);
  EXPECT_EQ(device.sim->alloc(601, &a).kind, ErrorKind::kOutOfMemory);
  EXPECT_FINE(device.sim->alloc(600, &a));
  EXPECT_EQ(device.sim->live().bytes, 1000u);
  EXPECT_EQ(device.sim->alloc(0, &a).kind, ErrorKind::kMisuse);

  sim::set_pinnable_bytes(8192);
  {
    Pinned pinned(device, 4096);
    char* memory = static_cast<char*>(
        mmap(nullptr, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(device.sim->pin(memory, 4097).kind, ErrorKind::kOutOfMemory);
    EXPECT_FINE(device.sim->pin(memory, 4096));
    EXPECT_EQ(device.sim->live().pinned_bytes, 8192u);
    device.sim->unpin(memory);
    sim::set_pinnable_bytes(UINT64_MAX);
    EXPECT_FINE(device.sim->pin(memory, 8192));
    EXPECT_EQ(device.sim->pin(memory, 4096).kind, ErrorKind::kMisuse);
    EXPECT_EQ(device.sim->pin(memory + 4096, 8192).kind, ErrorKind::kMisuse);
    EXPECT_EQ(device.sim->pin(memory + 8200, 64).kind, ErrorKind::kMisuse);
    EXPECT_FINE(device.sim->pin(memory + 8192, 4096));
    device.sim->unpin(memory + 8192);
    device.sim->unpin(memory);
    EXPECT_EQ(mprotect(memory, 4096, PROT_READ), 0);
    EXPECT_FINE(device.sim->pin(memory, 4096, true));
    device.sim->unpin(memory);
    munmap(memory, 16384);
    EXPECT_EQ(device.sim->pin(memory, 4096).kind, ErrorKind::kMisuse) << "nothing is mapped there";
    EXPECT_EQ(device.sim->pin(nullptr, 4096).kind, ErrorKind::kMisuse);
  }
  EXPECT_EQ(device.sim->live().pinned, 0u);
  EXPECT_FINE(device.Finish());
}

TEST(Memory, WhatWasThereIsTold) {
  Device device;
  const sim::Live before = device.sim->live();
  EXPECT_EQ(before.allocations_ever + before.streams_ever + before.events_ever, 0u);
  for (int i = 0; i < 3; ++i) {
    device.sim->free(device.Alloc(16));
    const Pinned pinned(device, 4096);
    device.sim->destroy_stream(device.NewStream());
    device.sim->destroy_event(device.NewEvent());
  }
  const sim::Live after = device.sim->live();
  EXPECT_EQ(after.allocations, 0u);
  EXPECT_EQ(after.allocations_ever, 3u);
  EXPECT_EQ(after.pinned_ever, before.pinned_ever + 3);
  EXPECT_EQ(after.streams_ever, 3u);
  EXPECT_EQ(after.events_ever, 3u);
}

// By kernels, a byte for each; copies are not counted.
TEST(Memory, ReadsAreCounted) {
  Device device;
  const Pinned in(device, 4096), out(device, 4096);
  const SumArgs sum{as<float>(in.bytes_ptr()) + 3, as<float>(out.bytes_ptr()), 10, 0};
  auto run = [&] {
    EXPECT_FINE(device.Launch(kSum, {2, 32, 4}, sum));
    EXPECT_FINE(device.sim->copy(out.bytes_ptr(), in.bytes_ptr(), 4096, {}));
    EXPECT_FINE(device.Finish());
  };
  {
    const sim::ReadCounts reads(in.floats() + 4, 16, 3);
    run();
    EXPECT_EQ(reads.now(), (std::vector<uint64_t>{16, 16, 4}));
    run();
    EXPECT_EQ(reads.now(), (std::vector<uint64_t>{32, 32, 8}));
  }
  run();  // no counter is active
}

// Kernels run while memory comes and goes.
TEST(Memory, RangesChangeUnderKernels) {
  Device device(0, 3);
  Pinned in(device, 65536), out(device, 65536);
  for (uint32_t i = 0; i < 16384; ++i) in[i] = i;
  Stream s = device.NewStream();
  for (int round = 0; round < 50; ++round) {
    ASSERT_FINE(
        device.Launch(kWords, {32, 32, 0}, WordsArgs{in.words(), out.words(), 16384, 3, 1}, s));
    Ptr<char> p[8];
    for (Ptr<char>& q : p) q = device.Alloc(5000);
    Pinned other(device, 4096);
    for (Ptr<char>& q : p) device.sim->free(q);
  }
  ASSERT_FINE(device.Finish(s));
  for (uint32_t i = 0; i < 16384; ++i) ASSERT_EQ(out[i], i * 3 + 1);
  EXPECT_EQ(device.sim->live().allocations, 0u);
  device.sim->destroy_stream(s);
}

#if !defined(FRUGAL_TSAN)
// To ThreadSanitizer this is the race that it is.
TEST(Memory, FreedUnderAKernel) {
  int faults = 0;
  for (uint64_t seed = 1; seed <= 60 || (faults == 0 && seed <= 400); ++seed) {
    Device device(0, seed, kNone);
    Ptr<char> p = device.Alloc(65536);
    ASSERT_FINE(device.sim->fill(p, 1, 65536, {}));
    ASSERT_FINE(device.Finish());
    ASSERT_FINE(device.Launch(kWords, {64, 32, 0},
                              WordsArgs{as<uint32_t>(p), as<uint32_t>(p), 16384, 3, 1}));
    std::this_thread::sleep_for(std::chrono::microseconds(seed % 8 * 20));
    device.sim->free(p);
    const Result result = device.Finish();
    if (!result.ok()) {
      ++faults;
      EXPECT_TRUE(Contains(result.text, "freed device memory")) << result.text;
    }
  }
  EXPECT_GE(faults, 1);
}
#endif

// --- Streams ------------------------------------------------------------------------------------

TEST(Streams, AreInOrder) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Device device(0, seed);
    Pinned words(device, 4096);
    words[0] = 1;
    Stream s = device.NewStream();
    uint32_t expected = 1;
    for (uint32_t i = 0; i < 60; ++i) {
      ASSERT_FINE(
          device.Launch(kWords, {1, 32, 0}, WordsArgs{words.words(), words.words(), 1, 3, i}, s));
      expected = expected * 3 + i;
    }
    ASSERT_FINE(device.Finish(s));
    EXPECT_EQ(words[0], expected);
  }
}

// Two streams draw a ticket each. Which one is first?
bool FirstIsFirst(uint64_t seed, bool joined) {
  Device device(0, seed);
  Pinned out(device, 4096);
  Ptr<char> counter = device.Alloc(4);
  Stream a = device.NewStream(), b = device.NewStream();
  Event e = device.NewEvent();
  EXPECT_FINE(device.sim->fill(counter, 0, 4, a));
  EXPECT_FINE(device.Finish(a));
  EXPECT_FINE(
      device.Launch(kTicket, {1, 32, 0}, TicketArgs{as<uint32_t>(counter), out.words()}, a));
  EXPECT_FINE(device.sim->record(e, a));
  if (joined) {
    EXPECT_FINE(device.sim->wait(b, e));
  }
  EXPECT_FINE(
      device.Launch(kTicket, {1, 32, 0}, TicketArgs{as<uint32_t>(counter), out.words() + 32}, b));
  EXPECT_FINE(device.Finish(b));
  EXPECT_FINE(device.Finish(a));
  const bool first = *std::max_element(&out[0], &out[32]) < *std::min_element(&out[32], &out[64]);
  device.sim->free(counter);
  return first;
}

TEST(Streams, WithoutAJoinEitherComesFirst) {
  int first = 0, all = 0;
  for (uint64_t seed = 1; seed <= 400 && (first < 2 || all - first < 2); ++seed, ++all)
    first += FirstIsFirst(seed, false);
  EXPECT_GE(first, 2);
  EXPECT_GE(all - first, 2);
}

TEST(Streams, JoinsHold) {
  for (uint64_t seed = 1; seed <= 100; ++seed) EXPECT_TRUE(FirstIsFirst(seed, true)) << seed;
}

TEST(Streams, WaitIsForTheRecordBeforeIt) {
  Device device(0, 1, kNone);
  Stream b = device.NewStream();
  device.sim->set_delays(kHeld);
  Stream a = device.NewStream();
  Event e = device.NewEvent();
  bool passed = false;
  // Never recorded: nothing to wait for.
  ASSERT_FINE(device.sim->wait(b, e));
  ASSERT_FINE(device.sim->query(e, &passed));
  EXPECT_TRUE(passed);
  ASSERT_FINE(device.sim->record(e, a));
  ASSERT_FINE(device.sim->wait(b, e));
  // Recorded again, after a held operation: `b` does not wait for this one.
  ASSERT_FINE(device.Launch(kTouch, {1, 32, 0}, TouchArgs{}, a));
  ASSERT_FINE(device.sim->record(e, a));
  ASSERT_FINE(device.Finish(b));
  ASSERT_FINE(device.sim->query(e, &passed));
  EXPECT_FALSE(passed);
  ASSERT_FINE(device.sim->synchronize(e, kLong, &passed));
  EXPECT_TRUE(passed);
}

TEST(Streams, TimeOuts) {
  Device device(0, 1, kHeld);
  Stream a = device.NewStream();
  Event e = device.NewEvent();
  bool passed = true;
  ASSERT_FINE(device.sim->record(e, a));
  ASSERT_FINE(device.sim->query(e, &passed));
  EXPECT_FALSE(passed);
  // A wait of a nanosecond is over before the thread of the stream has woken up, or finds it
  // passed.
  ASSERT_FINE(device.sim->synchronize(e, 1, &passed));
  ASSERT_FINE(device.sim->synchronize(e, kLong, &passed));
  EXPECT_TRUE(passed);
}

// Operations that are held until a thread waits: a wait frees all that is before, on all streams.
TEST(Streams, HeldWorkIsFreedByWhoWaits) {
  const double start = Seconds();
  Device device(0, 1, kHeld);
  Pinned words(device, 4096);
  words[0] = 0;
  std::vector<Stream> streams;
  for (int i = 0; i < 5; ++i) streams.push_back(device.NewStream());
  Event e = device.NewEvent();
  for (uint32_t i = 0; i < 20; ++i) {
    Stream s = streams[i % 5];
    if (i > 0) {
      ASSERT_FINE(device.sim->wait(s, e));
    }
    ASSERT_FINE(
        device.Launch(kWords, {1, 32, 0}, WordsArgs{words.words(), words.words(), 1, 2, i}, s));
    ASSERT_FINE(device.sim->record(e, s));
  }
  bool passed = false;
  // Queries alone get there, too.
  while (!passed) ASSERT_FINE(device.sim->query(e, &passed));
  uint32_t expected = 0;
  for (uint32_t i = 0; i < 20; ++i) expected = expected * 2 + i;
  EXPECT_EQ(words[0], expected);
  // A destroyed stream does what it has to.
  for (uint32_t i = 0; i < 5; ++i)
    ASSERT_FINE(device.Launch(kWords, {1, 32, 0}, WordsArgs{words.words(), words.words(), 1, 1, 1},
                              streams[0]));
  ASSERT_FINE(device.sim->record(e, streams[0]));
  for (Stream s : streams) device.sim->destroy_stream(s);
  ASSERT_FINE(device.sim->synchronize(e, kLong, &passed));
  EXPECT_TRUE(passed);
  EXPECT_EQ(words[0], expected + 5);
  device.sim->destroy_event(e);
  {
    // So does one of a device that is closed.
    Device other(1, 1, kHeld);
    for (int i = 0; i < 3; ++i)
      ASSERT_FINE(
          other.Launch(kWords, {1, 32, 0}, WordsArgs{words.words(), words.words(), 1, 1, 1}));
  }
  EXPECT_EQ(words[0], expected + 8);
  EXPECT_LT(Seconds() - start, 29) << "something was held for its whole time";
}

TEST(Streams, CopiesAndFills) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Device device(0, seed);
    const size_t bytes = seed * 4 * 1234;
    Pinned from(device, bytes), to(device, bytes);
    for (size_t i = 0; i < bytes / 4; ++i) from[i] = static_cast<uint32_t>(i * 7);
    Ptr<char> p = device.Alloc(bytes);
    Stream s = device.NewStream();
    EXPECT_FINE(device.sim->copy(p, from.bytes_ptr(), bytes, s));
    EXPECT_FINE(device.sim->copy(to.bytes_ptr(), p, bytes, s));
    EXPECT_FINE(device.sim->fill(to.bytes_ptr() + 400, 0x11, 400, s));
    EXPECT_FINE(device.sim->copy(p, p, 0, s));
    ASSERT_FINE(device.Finish(s));
    for (size_t i = 0; i < bytes / 4; ++i)
      ASSERT_EQ(to[i], i >= 100 && i < 200 ? 0x11111111u : static_cast<uint32_t>(i * 7));
    device.sim->free(p);
  }
}

#if !defined(FRUGAL_TSAN)
// The race is the point.
TEST(Streams, CopiesReadLate) {
  int late = 0, all = 0;
  for (uint64_t seed = 1; seed <= 400 && (late < 2 || all - late < 2); ++seed, ++all) {
    Device device(0, seed);
    Pinned from(device, 4096), to(device, 4096);
    from[0] = 1;
    Stream s = device.NewStream();
    EXPECT_FINE(device.sim->copy(to.bytes_ptr(), from.bytes_ptr(), 4, s));
    if (seed % 2) std::this_thread::sleep_for(std::chrono::microseconds(200));
    from[0] = 2;
    EXPECT_FINE(device.Finish(s));
    late += to[0] == 2;
  }
  EXPECT_GE(late, 2);
  EXPECT_GE(all - late, 2);
}
#endif

TEST(Streams, PrioritiesAreTold) {
  Device device;
  Ptr<char> p = device.Alloc(64);
  Stream low, high;
  ASSERT_FINE(device.sim->create_stream(Priority::kLow, &low));
  ASSERT_FINE(device.sim->create_stream(Priority::kHigh, &high));
  const Pinned words(device, 4096);
  const WordsArgs arguments{words.words(), words.words(), 8, 0, 5};
  for (Stream s : {high, Stream{}}) {
    EXPECT_FINE(device.Launch(kWords, {1, 32, 0}, arguments, s));
    EXPECT_FINE(device.Finish(s));
  }
  EXPECT_FINE(device.sim->fill(p, 0, 64, low));
  EXPECT_FINE(device.Finish(low));
  EXPECT_EQ(device.sim->priorities("words"),
            (std::vector<Priority>{Priority::kNormal, Priority::kHigh}));
  EXPECT_EQ(device.sim->priorities("fill"), std::vector<Priority>{Priority::kLow});
  EXPECT_EQ(device.sim->priorities("copy"), std::vector<Priority>{});
  EXPECT_EQ(device.sim->launched(), std::vector<std::string>{"words"});
}

TEST(Streams, Capture) {
  Device device;
  Stream s = device.NewStream();
  Event e = device.NewEvent();
  Ptr<char> p = device.Alloc(64);
  bool flag = true;
  ASSERT_FINE(device.sim->capturing(s, &flag));
  EXPECT_FALSE(flag);
  ASSERT_FINE(device.sim->capturing({}, &flag));
  EXPECT_FALSE(flag);
  device.sim->set_capturing(s, true);
  ASSERT_FINE(device.sim->capturing(s, &flag));
  EXPECT_TRUE(flag);
  EXPECT_EQ(device.sim->capture_violations(), 0u);
  EXPECT_EQ(device.sim->record(e, s).kind, ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->fill(p, 0, 64, s).kind, ErrorKind::kMisuse);
  EXPECT_EQ(device.Launch(kTouch, {}, TouchArgs{}, s).kind, ErrorKind::kMisuse);
  EXPECT_EQ(device.sim->capture_violations(), 3u);
  device.sim->set_capturing(s, false);
  EXPECT_FINE(device.Finish(s));
}

TEST(Streams, ManyThreadsAndDevices) {
  Device devices[2] = {Device(0, 5), Device(1, 6)};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Device& device = devices[t % 2];
      for (uint32_t round = 0; round < 5; ++round) {
        Pinned words(device, 4096);
        Ptr<char> p = device.Alloc(4096);
        Stream a = device.NewStream(), b = device.NewStream();
        Event e = device.NewEvent();
        for (uint32_t i = 0; i < 1024; ++i) words[i] = i + t;
        EXPECT_FINE(device.sim->copy(p, words.bytes_ptr(), 4096, a));
        EXPECT_FINE(device.sim->record(e, a));
        EXPECT_FINE(device.sim->wait(b, e));
        EXPECT_FINE(device.Launch(kWords, {4, 32, 0},
                                  WordsArgs{as<uint32_t>(p), words.words(), 1024, 2, round}, b));
        EXPECT_FINE(device.Finish(b));
        for (uint32_t i = 0; i < 1024; ++i) ASSERT_EQ(words[i], (i + t) * 2 + round);
        device.sim->free(p);
        device.sim->destroy_stream(a);
        device.sim->destroy_stream(b);
        device.sim->destroy_event(e);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Device& device : devices) {
    const sim::Live live = device.sim->live();
    EXPECT_EQ(live.allocations + live.bytes + live.streams + live.events + live.pinned, 0u);
  }
}

// --- Failures -----------------------------------------------------------------------------------

// A user of the device that takes back all it has when a call fails.
Result Scenario(Device& device) {
  Ptr<char> p;
  Stream s;
  Event e;
  bool flag = false;
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  bool pinned = false;
  const Result result = [&] {
    Result r = device.sim->alloc(4096, &p);
    if (r.ok()) r = device.sim->pin(memory, 4096);
    pinned = r.ok();
    if (r.ok()) r = device.sim->create_stream(Priority::kHigh, &s);
    if (r.ok()) r = device.sim->create_event(&e);
    if (r.ok()) r = device.sim->capturing(s, &flag);
    if (r.ok()) r = device.sim->copy(p, Runtime::visible(memory), 4096, s);
    if (r.ok()) r = device.sim->fill(p, 1, 64, s);
    if (r.ok())
      r = device.Launch(kWords, {1, 32, 0}, WordsArgs{as<uint32_t>(p), as<uint32_t>(p), 8, 1, 1},
                        s);
    if (r.ok()) r = device.sim->record(e, s);
    if (r.ok()) r = device.sim->wait(s, e);
    if (r.ok()) r = device.sim->query(e, &flag);
    if (r.ok()) r = device.sim->synchronize(e, kLong, &flag);
    return r;
  }();
  // What is on its way is waited for, unless the device has failed or was reset: then nothing runs
  // any more.
  if (s.handle && result.kind != ErrorKind::kFault && result.code != 400) {
    EXPECT_FINE(device.Finish(s));
  }
  if (s.handle) device.sim->destroy_stream(s);
  if (e.handle) device.sim->destroy_event(e);
  device.sim->free(p);
  if (pinned) device.sim->unpin(memory);
  munmap(memory, 4096);
  return result;
}

TEST(Failures, EachCallOnce) {
  constexpr uint64_t kCalls = 12;  // of the scenario, without what it does to end
  for (const ErrorKind kind : {ErrorKind::kOutOfMemory, ErrorKind::kMisuse, ErrorKind::kFault}) {
    for (uint64_t n = 1; n <= kCalls; ++n) {
      SCOPED_TRACE(n);
      Device device(0, n);
      device.sim->fail_after(n, kind, false);
      const Result result = Scenario(device);
      EXPECT_EQ(result.kind, kind) << result.call;
      EXPECT_STREQ(result.text, "a failure that was asked for");
      device.sim->fail_after(0, kind, false);
      const sim::Live live = device.sim->live();
      EXPECT_EQ(live.allocations + live.bytes + live.streams + live.pinned, 0u);
      if (kind == ErrorKind::kFault)
        EXPECT_EQ(Scenario(device).kind, ErrorKind::kFault);
      else
        EXPECT_FINE(Scenario(device));
    }
  }
}

TEST(Failures, ForEver) {
  Device device;
  device.sim->fail_after(3, ErrorKind::kOutOfMemory, true);
  Ptr<char> p = device.Alloc(16), q = device.Alloc(16), r;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(device.sim->alloc(16, &r).kind, ErrorKind::kOutOfMemory);
  device.sim->fail_after(0, ErrorKind::kNone, false);
  EXPECT_FINE(device.sim->alloc(16, &r));
  EXPECT_EQ(device.sim->live().allocations, 3u);
  device.sim->free(p), device.sim->free(q), device.sim->free(r);
}

// What wants memory fails, what was there goes on.
TEST(Failures, MemoryIsUsedUp) {
  Device device;
  const Pinned words(device, 4096);
  const Ptr<char> p = device.Alloc(64);
  Stream s = device.NewStream(), no_stream;
  Event e = device.NewEvent(), no_event;
  Ptr<char> last, none;
  device.sim->exhaust_after(2);
  EXPECT_FINE(device.sim->alloc(16, &last));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(device.sim->alloc(16, &none).kind, ErrorKind::kOutOfMemory);
    EXPECT_EQ(device.sim->create_stream(Priority::kHigh, &no_stream).kind, ErrorKind::kOutOfMemory);
    EXPECT_EQ(device.sim->create_event(&no_event).kind, ErrorKind::kOutOfMemory);
    EXPECT_EQ(device.sim->copy(p, words.bytes_ptr(), 64, s).kind, ErrorKind::kOutOfMemory);
    EXPECT_EQ(device.sim->fill(p, 0, 64, s).kind, ErrorKind::kOutOfMemory);
    const WordsArgs arguments{words.words(), words.words(), 8, 0, 5};
    EXPECT_EQ(device.Launch(kWords, {1, 32, 0}, arguments, s).kind, ErrorKind::kOutOfMemory);
    bool flag = false;
    EXPECT_FINE(device.sim->record(e, s));
    EXPECT_FINE(device.sim->wait(s, e));
    EXPECT_FINE(device.sim->synchronize(e, kLong, &flag));
    EXPECT_TRUE(flag);
    const Pinned of_the_host(device, 4096);
  }
  device.sim->exhaust_after(0);
  EXPECT_FINE(Scenario(device));
}

TEST(Failures, AReset) {
  Device device;
  device.sim->reset_after(8);
  Result result = Scenario(device);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(result.kind, ErrorKind::kMisuse) << result.call;
    EXPECT_EQ(result.code, 400);
    result = Scenario(device);
  }
  const sim::Live live = device.sim->live();
  EXPECT_EQ(live.allocations + live.bytes + live.streams + live.pinned, 0u);
}

TEST(Open, OneDeviceIsOneRuntime) {
  std::shared_ptr<Runtime> a, b, c;
  ASSERT_FINE(sim::open_sim(0, &a));
  ASSERT_FINE(sim::open_sim(0, &b));
  ASSERT_FINE(sim::open_sim(1, &c));
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  EXPECT_STREQ(c->name(), "sim:1");
  EXPECT_EQ(sim::open_sim(sim::kDevices, &c).kind, ErrorKind::kNoDevice);
  EXPECT_NE(std::string(a->info().name), "");
}

// --- What ThreadSanitizer sees ------------------------------------------------------------------

#if defined(FRUGAL_TSAN)
enum class Race {
  kNone,
  kStreams,
  kHostReads,
  kHostWrites,
  kFree,
  kShared,
  kThreads,
  kLanes,
  kBlocks
};

// Two streams, the host, threads and blocks that share memory. Without a race: by events, sync()
// and the results of calls alone.
void Provoke(Race race) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Device device(0, seed);
    Pinned words(device, 4096);
    Ptr<char> p = device.Alloc(4096), other = device.Alloc(4096);
    Stream a = device.NewStream(), b = device.NewStream();
    Event e = device.NewEvent();
    const WordsArgs write = {words.words(), as<uint32_t>(p), 64, 1, 0};
    EXPECT_FINE(device.Launch(kWords, {1, 32, 0}, write, a));
    EXPECT_FINE(device.sim->record(e, a));
    if (race != Race::kStreams) {
      EXPECT_FINE(device.sim->wait(b, e));
    }
    const WordsArgs read = {as<uint32_t>(p), words.words() + 512, 64, 1, 0};
    EXPECT_FINE(device.Launch(kWords, {1, 32, 0}, read, b));
    if (race == Race::kHostWrites) words[0] = 5;
    const std::map<Race, uint32_t> clashes = {
        {Race::kThreads, kTwoThreads}, {Race::kLanes, kTwoLanes}, {Race::kBlocks, kTwoBlocks}};
    if (clashes.count(race)) {
      const uint32_t blocks = race == Race::kBlocks ? 4 : 1;
      EXPECT_FINE(
          device.Launch(kClash, {blocks, 64, 0}, ClashArgs{as<uint32_t>(p), clashes.at(race)}, b));
    }
    EXPECT_FINE(
        device.Launch(kSum, {2, 128, 16},
                      SumArgs{as<float>(words.bytes_ptr()), as<float>(words.bytes_ptr()) + 900, 100,
                              race == Race::kShared},
                      b));
    // Time passes, and other calls are made: no order comes from that.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    device.sim->free(device.Alloc(64));
    EXPECT_FINE(device.sim->fill(other, 0, 64, a));
    EXPECT_FINE(device.sim->fill(other + 64, 0, 64, b));
    if (race == Race::kHostReads && words[512] == 77) std::abort();
    if (race == Race::kFree) device.sim->free(p);
    EXPECT_FINE(device.Finish(b));
    EXPECT_FINE(device.Finish(a));
    if (words[513] == 77) std::abort();
    words[0] = 6;
    // What ran before a fault is over when a call has reported the fault.
    EXPECT_FINE(device.Launch(kWords, {1, 32, 0}, read, a));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_FINE(device.Launch(kTouch, {2, 32, 0}, TouchArgs{{}, kRead4}, b));
    EXPECT_EQ(device.Finish(b).kind, ErrorKind::kFault);
    words[512] = 7;
    if (race != Race::kFree) device.sim->free(p);
  }
  std::exit(0);
}

TEST(RacesDeathTest, AreSeen) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const Race race : {Race::kStreams, Race::kHostReads, Race::kHostWrites, Race::kFree,
                          Race::kShared, Race::kThreads, Race::kLanes, Race::kBlocks}) {
    SCOPED_TRACE(static_cast<int>(race));
    EXPECT_DEATH(Provoke(race), "data race");
  }
  EXPECT_EXIT(Provoke(Race::kNone), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace frugal::device
