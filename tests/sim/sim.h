// "sim:N": the Runtime on the host, and its controls for tests.
//
// What: streams are threads, kernels run in fibers, device memory is memory that the host cannot
// touch. All that CUDA leaves open is random: when an operation of a stream starts, in which order
// blocks run, and threads between barriers. Calls fail on request.
// Invariants: never prints, never aborts. A fault (docs/cuda.md, "simt.h") is sticky: every later
// call on the device returns it, and what its streams still hold is skipped. Threads: any, several
// at once. Callers: tests.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "device/runtime.h"

namespace frugal::device::sim {

// How a kernel is found: its arguments' size, and a call of its body.
struct KernelEntry {
  const char* name;
  size_t bytes;
  void (*run)(const void* arguments);
};

// The kernels of ops/kernels.h, by number.
const KernelEntry* kernel_entry(uint32_t number);

// What happens to an operation of a stream before it starts, each in percent of operations.
struct Delays {
  uint32_t yields = 25;  // its thread yields a few times
  uint32_t sleeps = 8;   // for up to sleep_us
  uint32_t holds = 4;    // until a thread waits for it or for what follows it, or hold_us
  uint32_t sleep_us = 200;
  uint32_t hold_us = 3000;
};

struct Live {
  uint64_t allocations, bytes;    // of the device
  uint64_t streams, events;       // created and not destroyed
  uint64_t pinned, pinned_bytes;  // of the process
  // The same and what is no more, since the device was opened; of the process.
  uint64_t allocations_ever, streams_ever, events_ever, pinned_ever;
};

class Sim : public Runtime {
 public:
  // Of the streams that are created from now on.
  virtual void set_seed(uint64_t seed) = 0;
  // Of all streams, for what they have not begun to wait for.
  virtual void set_delays(const Delays& delays) = 0;

  // The n-th call from now that has a Result fails with `kind`, or it and all later ones; 0: none
  // does. kFault stays anyhow.
  virtual void fail_after(uint64_t n, ErrorKind kind, bool forever) = 0;
  // With the n-th call from now that has a Result the host program resets the device: what its
  // streams hold is skipped, and that call and all later ones are misuse.
  virtual void reset_after(uint64_t n) = 0;
  // With the n-th call from now that has a Result the device's memory is used up. That call and all
  // later ones fail if they need some, as allocations, new streams and events, copies, fills and
  // launches may. 0: there is memory.
  virtual void exhaust_after(uint64_t n) = 0;
  // Calls so far that fail_after counts.
  virtual uint64_t calls() const = 0;

  virtual void set_memory_bytes(uint64_t bytes) = 0;

  // A stream that is being captured: any operation on it is misuse, and counted.
  virtual void set_capturing(Stream s, bool capturing) = 0;
  virtual uint64_t capture_violations() const = 0;

  virtual Live live() const = 0;
  // Names of the kernels that were launched.
  virtual std::vector<std::string> launched() const = 0;
  // Of the streams that were given launches of the kernel, or a "copy" or a "fill": each once, the
  // default stream's is kNormal.
  virtual std::vector<Priority> priorities(const char* of) const = 0;
  // Kernels of a test, with the numbers from kTestKernels on. Before the first of their launches;
  // the array is used in place.
  static constexpr uint32_t kTestKernels = 1u << 16;
  virtual void set_test_kernels(const KernelEntry* kernels, uint32_t count) = 0;
};

// Of the process: what may be pinned.
void set_pinnable_bytes(uint64_t bytes);

// Of the process: while it lives it counts the bytes that kernels read in each of the pieces, of
// `piece` bytes, from `begin` on. One at a time; no kernel runs while it begins or ends.
class ReadCounts {
 public:
  ReadCounts(const void* begin, size_t piece, size_t pieces);
  ~ReadCounts();
  ReadCounts(const ReadCounts&) = delete;
  ReadCounts& operator=(const ReadCounts&) = delete;
  std::vector<uint64_t> now() const;  // of each piece
  void add(uint64_t address, size_t bytes) const;

 private:
  const uint64_t begin_, piece_;
  mutable std::vector<std::atomic<uint64_t>> counts_;
};

inline constexpr uint32_t kDevices = 8;

// Opens device `index`, which is a Sim. Several calls give the same while it lives.
Result open_sim(uint32_t index, std::shared_ptr<Runtime>* out);

}  // namespace frugal::device::sim
