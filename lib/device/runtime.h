// The run-time interface of accelerators: memory, streams, events, launches.
//
// What: everything that the engine asks of a GPU. Two implementations: cuda/ on the CUDA run-time
// library, and the simulated GPU of the tests (tests/sim), which a test program registers. Kernels
// are named by their number in ops/kernels.h.
//
// Invariants: no call changes the calling thread's current device or its last CUDA error. Errors
// are results, never exceptions. Work of a stream runs in order. Work of different streams runs in
// any order that events do not forbid. All sizes and offsets are 64-bit. Threads: any, several at
// once; one thread at a time gives work to a stream.
//
// Callers: the engine's part for GPUs, slabs and buffer pools that pin memory.
#ifndef FRUGAL_DEVICE_RUNTIME_H_
#define FRUGAL_DEVICE_RUNTIME_H_

#include <stddef.h>
#include <stdint.h>

#include <memory>

#include "arith/hd.h"

namespace frugal::device {

// An address that kernels may use: device memory, or host memory that is pinned and mapped. Only
// simt.h's load and store dereference it; on the host it is a number.
template <class T>
struct Ptr {
  uint64_t address = 0;
  FRUGAL_HD explicit operator bool() const { return address != 0; }
};

template <class T>
FRUGAL_HD Ptr<T> operator+(Ptr<T> p, uint64_t n) {
  return {p.address + n * sizeof(T)};
}

enum class ErrorKind : int32_t {
  kNone,
  kNoDevice,     // no driver, a driver too old, no such device
  kOutOfMemory,  // of the device, or memory that can be pinned
  kMisuse,       // a pointer of another device, a stream that is being captured
  kFault         // sticky: a kernel failed; nothing works on this device any more
};

// `code` and `text` as the CUDA run-time library returns them; `call` is what was asked for.
struct Result {
  ErrorKind kind = ErrorKind::kNone;
  int32_t code = 0;
  const char* call = "";  // static
  const char* text = "";  // static, or lives as long as the Runtime
  bool ok() const { return kind == ErrorKind::kNone; }
};

struct DeviceInfo {
  char name[128];
  uint64_t memory_bytes;
  uint32_t processors;           // streaming multiprocessors
  uint32_t compute;              // 90 for sm_90
  uint32_t block_threads = 256;  // that suit it; results do not depend on them
  bool pins_read_only = true;    // memory that the process cannot write
};

enum class Memory : int32_t {
  kPageable,  // plain host memory: kernels cannot see it
  kPinned,    // host memory that kernels may use
  kDevice,    // of this device
  kManaged,
  kOther  // memory of another device
};

struct Stream {
  void* handle = nullptr;
};
struct Event {
  void* handle = nullptr;
};

// Priorities of engine streams.
enum class Priority : int32_t { kLow, kNormal, kHigh };

struct Shape {
  uint32_t blocks = 1;
  uint32_t threads = 32;  // of a block
  uint32_t shared_bytes = 0;
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual const char* name() const = 0;  // "cuda:0"
  virtual DeviceInfo info() const = 0;

  virtual Result alloc(size_t bytes, Ptr<char>* out) = 0;  // aligned to 256 bytes
  virtual void free(Ptr<char> p) = 0;
  // Pins and maps host memory, for every device of the process; page-aligned, not yet pinned.
  // `read_only`: the process cannot write the memory, and kernels do not either.
  virtual Result pin(void* p, size_t bytes, bool read_only) = 0;
  Result pin(void* p, size_t bytes) { return pin(p, bytes, false); }
  virtual void unpin(void* p) = 0;
  // Pinned host memory as kernels see it.
  static Ptr<char> visible(void* pinned) { return {reinterpret_cast<uint64_t>(pinned)}; }
  virtual Result kind_of(const void* p, Memory* out) = 0;

  // Streams of the engine do not wait for the legacy default stream.
  virtual Result create_stream(Priority priority, Stream* out) = 0;
  virtual void destroy_stream(Stream s) = 0;
  virtual Result create_event(Event* out) = 0;
  virtual void destroy_event(Event e) = 0;
  virtual Result record(Event e, Stream s) = 0;
  virtual Result wait(Stream s, Event e) = 0;       // what follows in `s` comes after `e`
  virtual Result query(Event e, bool* passed) = 0;  // never waits
  // Waits until `e` has passed (then *passed is true) or about `timeout_ns` are over. Sleeps.
  virtual Result synchronize(Event e, uint64_t timeout_ns, bool* passed) = 0;
  virtual Result capturing(Stream s, bool* out) = 0;

  // Copies between device and pinned memory, either way. Pageable memory is refused.
  virtual Result copy(Ptr<char> to, Ptr<char> from, size_t bytes, Stream s) = 0;
  virtual Result fill(Ptr<char> to, int value, size_t bytes, Stream s) = 0;

  // Runs kernel number `kernel` of ops/kernels.h; `arguments` (its argument struct) is copied.
  virtual Result launch(uint32_t kernel, const Shape& shape, const void* arguments, size_t bytes,
                        Stream s) = 0;
};

// Devices that are not the library's own: "NAME:N".
struct DeviceKind {
  const char* name;
  Result (*open)(uint32_t index, std::shared_ptr<Runtime>* out);
  bool (*any_memory)();                 // has there been memory of any of them?
  bool (*is_memory)(uint64_t address);  // is this some of theirs?
};
// Registers a kind: one of a process, before the first call that names a device. `kind` stays.
void register_devices(const DeviceKind* kind);
const DeviceKind* registered_devices();  // or null

// Whether the name begins as those of a known kind of devices.
bool names_device(const char* name);

// Opens "cuda:N", or one of the kind that is registered: several calls for one device give the same
// Runtime while it lives.
Result open_runtime(const char* name, std::shared_ptr<Runtime>* out);

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_RUNTIME_H_
