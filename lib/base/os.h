// Everything the library asks of the operating system: memory mappings, clocks, the process.
// One place, so that tests can make the n-th call fail (os_test_fail_after).
#pragma once
#include <sched.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "base/scheduler.h"
#include "base/status.h"
#include "base/thread.h"

namespace frugal {

uint64_t now_ns();  // monotonic
// Whether the kernel's clock is the counter of this name. The kernel chooses a counter that runs
// evenly, and alike on all processors.
bool os_clock_is(const char* counter);
uint64_t after_ns(uint64_t ns);  // `ns` from now; UINT64_MAX: never
// The nanoseconds of a time-out. UINT64_MAX (never) if it is negative, or more than a century.
constexpr uint64_t ns_of_ms(int64_t ms) {
  return ms < 0 || ms > INT64_MAX / 2'000'000 ? UINT64_MAX : static_cast<uint64_t>(ms) * 1'000'000;
}
uint64_t process_cpu_ns();  // CPU time of all threads of the process
uint64_t thread_cpu_ns();   // CPU time of the calling thread
uint32_t cpu_count();       // processors that this process may run on
// From now on the calling thread has a lower priority than other threads of the process.
void os_background_thread();
// From now on the calling thread preempts no other when it is woken (SCHED_BATCH).
void os_batch_thread();
// For a thread that runs briefly and that others wait for: it may preempt others when it is woken
// (Linux 6.12 and later).
void os_brief_thread();
int os_processor();  // that the calling thread is on; or -1
// Calls these around each fork() from now on. Throws std::bad_alloc if there is no memory for that.
void os_at_fork(void (*before)(), void (*in_parent)(), void (*in_child)());

// Processors that a thread may run on.
struct Processors {
  cpu_set_t set;
  static Processors mine();  // the calling thread's; none if they are not known
  static Processors only(int processor);
  bool has(int processor) const {
    return processor >= 0 && processor < CPU_SETSIZE && CPU_ISSET(processor, &set);
  }
  // The set without `processor`; unchanged if it has no other.
  Processors but(int processor) const;
  // From now on `thread` (null: the calling one) runs on these. False: it stays where it was.
  bool bind(Thread* thread = nullptr) const;
};
uint64_t os_memory_bytes();  // that the machine has
uint64_t available_bytes();  // memory that can be had without swapping
// Reports that no file descriptor could be had for `what`, with errno `code`: OUT_OF_MEMORY. The
// message has the limit and a remedy.
Status os_no_descriptor(int code, const char* what);
Status os_check_available(uint64_t bytes);  // OUT_OF_MEMORY if it is less

// For loops that poll.
inline void cpu_relax() {
#ifdef FRUGAL_SCHEDULES
  if (Scheduler* s = this_scheduler) return s->pause();
#endif
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A reserved range of addresses; memory comes with os_commit.
struct Mapping {
  char* base = nullptr;
  size_t bytes = 0;
  int fd = -1;  // shared memory, else -1
};

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t in_huge_pages(size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

// Reserves `bytes` (rounded up to 2 MiB) of address space, private or as shared memory. Shared
// memory is a memfd, which has no name, sealed at this size. No memory is committed. Without
// `others_write` shared memory can be written through this mapping only, even if another process
// opens it (F_SEAL_FUTURE_WRITE, from Linux 5.1 on). `at`: an address in a range of
// os_reserve_range(), for shared memory.
Status os_reserve(size_t bytes, bool shared, Mapping* out, bool others_write = false,
                  char* at = nullptr);
// Shared memory that another process writes and this one reads. Only its size is sealed until
// os_seal(); from then on only mappings that exist can write it.
Status os_reserve_to_read(size_t bytes, Mapping* out);
Status os_seal(const Mapping& mapping);
// Maps all of the memory that os_reserve() made in another process. The descriptor may be any. One
// that is no memfd sealed at its size is refused: its owner could truncate it under the mapping. On
// success it belongs to *out, else to the caller as before.
Status os_map_shared(int fd, bool writable, Mapping* out);
// Reserves addresses for shared memory that comes and goes. Addresses without memory read as zeros.
Status os_reserve_range(size_t bytes, Mapping* out);
// Removes the shared memory at addresses of such a range. False: it stays.
bool os_empty(char* at, size_t bytes);
// From now on this process cannot write to the mapping.
Status os_make_read_only(const Mapping& mapping);
// Makes [offset, offset + bytes) usable: afterwards touching it cannot fail. The range should be
// aligned to 2 MiB for huge pages.
Status os_commit(const Mapping& mapping, size_t offset, size_t bytes);
void os_release(Mapping* mapping);

// A read-only descriptor of the same file; without /proc a writable one. -1, and errno: no
// descriptor is left.
int os_read_only(int fd);
// Sends a message, and a descriptor (-1: none), through a socket of messages. Does not wait.
// Returns 0 or the errno: EAGAIN if the receiver has left too many messages unread.
int os_send(int socket, const void* message, size_t bytes, int fd);
// Copies the next message, which stays the next until os_drop(). Returns its size; 0: there is
// none; -1, and errno: it cannot be read. *fd is the caller's; -1: none has come, or none is left.
// *ended: no message will come.
ssize_t os_peek(int socket, void* message, size_t bytes, int* fd, bool* ended);
void os_drop(int socket);

// A file that appears only when it is complete: it is written under another name in the same
// folder, and then renamed. Only its owner can read it. A file that was not published is removed.
class NewFile {
 public:
  NewFile() = default;
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  // All: INVALID_ARGUMENT with the errno if the system refuses.
  Status open(const char* path);
  Status write(const char* bytes, size_t n);
  Status publish();

 private:
  Status refused(int code, const char* what) const;
  String path_, temporary_;
  int fd_ = -1, folder_fd_ = -1;
  uint64_t written_ = 0;
};

// Test hook: the n-th os_reserve, os_map_shared, os_commit, os_send or call of a NewFile from now
// on fails (0: off; -1: each os_commit). Returns what was left of the last n.
int64_t os_test_fail_after(int64_t n);

}  // namespace frugal
