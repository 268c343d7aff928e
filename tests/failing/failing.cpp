// Makes the n-th call for something of the system fail, once or from then on for ever. Loaded
// before everything else (LD_PRELOAD) into a program that uses the library; tests/failing/sweep.py
// drives it.
//
//   FAILING_KIND     memory, map, descriptor, thread or io (see failing.h)
//   FAILING_AT       the n-th call of the kind fails; 0, or none: calls are counted only
//   FAILING_EVER     1: all calls of the kind from the n-th on fail
//   FAILING_PROGRAM  only in processes of this name (at most its first 15 letters count), of all
//                    those that inherit the variables; without: in each of them
//   FAILING_WHOLE    1: calls of all threads of the process count, from its start on. Without:
//                    calls of threads that are inside the library, that is, between
//                    failing_enter() and failing_leave(), and of threads that such a one has
//                    started
//   FAILING_REPORT   a file of sizeof(failing::Report) bytes at least, where the counts go (shared
//                    by all processes)
//   FAILING_TRACE    1: the report contains the stack of the call that has failed
//
// The engine's heap is mimalloc, found by name: it is not found here, so that the engine takes
// plain malloc, which this can make fail. Nothing here allocates or locks, for it is called from
// wherever memory is asked for.
#include "failing.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using failing::Kind;
using failing::Report;

Report g_own;  // where there is no file
Report* g_report = &g_own;
std::atomic<bool> g_on{false};  // calls count
Kind g_kind = failing::kMemory;
uint64_t g_at = 0;
bool g_ever = false, g_whole = false, g_trace = false;
__thread int t_inside __attribute__((tls_model("initial-exec"))) = 0;
__thread int t_busy __attribute__((tls_model("initial-exec"))) =
    0;  // here: what this calls does not count

const char* variable(const char* name) {
  const char* text = getenv(name);
  return text && *text ? text : nullptr;
}

// The next definition of a name after this library's. (While dlsym looks, it may ask for memory.)
void* find(std::atomic<void*>& slot, const char* name) {
  static __thread bool looking __attribute__((tls_model("initial-exec"))) = false;
  if (looking) return nullptr;
  looking = true;
  void* found = dlsym(RTLD_NEXT, name);
  looking = false;
  if (!found) abort();
  slot.store(found, std::memory_order_release);
  return found;
}

void* next(std::atomic<void*>& slot, const char* name) {
  void* found = slot.load(std::memory_order_acquire);
  return found ? found : find(slot, name);
}
#define NEXT(name)                                               \
  ([]() -> decltype(&name) {                                     \
    static constinit std::atomic<void*> slot{nullptr};           \
    return reinterpret_cast<decltype(&name)>(next(slot, #name)); \
  }())

void tell_stack() {
  void* at[24];
  const int n = backtrace(at, 24);
  size_t used = 0;
  for (int i = 2; i < n; ++i) {
    Dl_info info;
    if (!dladdr(at[i], &info) || !info.dli_fname) continue;
    const int written =
        snprintf(g_report->stack + used, sizeof g_report->stack - used, "%s %#lx\n", info.dli_fname,
                 static_cast<unsigned long>(static_cast<char*>(at[i]) -
                                            static_cast<char*>(info.dli_fbase) - 1));
    if (written < 0 || used + static_cast<size_t>(written) >= sizeof g_report->stack) break;
    used += static_cast<size_t>(written);
  }
}

// Is it this call that fails?
bool fails(Kind kind) {
  if (!g_on.load(std::memory_order_relaxed) || t_busy || !(g_whole || t_inside)) return false;
  const uint64_t n = g_report->points[kind].fetch_add(1) + 1;
  if (kind != g_kind || g_at == 0 || n < g_at || (n > g_at && !g_ever) || g_report->over.load())
    return false;
  if (g_report->fired.fetch_add(1) == 0 && g_trace) {
    ++t_busy;
    tell_stack();
    --t_busy;
  }
  return true;
}

// Is it the loader that calls from there?
bool in_loader(const void* from) {
  static const auto* base = reinterpret_cast<const char*>(getauxval(AT_BASE));
  static size_t bytes = 0;
  if (bytes == 0 && base) {
    const auto* file = reinterpret_cast<const Elf64_Ehdr*>(base);
    const auto* parts = reinterpret_cast<const Elf64_Phdr*>(base + file->e_phoff);
    for (int i = 0; i < file->e_phnum; ++i)
      if (parts[i].p_type == PT_LOAD && parts[i].p_vaddr + parts[i].p_memsz > bytes)
        bytes = parts[i].p_vaddr + parts[i].p_memsz;
  }
  return base && from >= base && from < base + bytes;
}

// What the thread has freed and not asked for again. The C library gives it that next: the
// loader, which ends the process where it gets none, gets it.
__thread size_t t_spare __attribute__((tls_model("initial-exec"))) = 0;

bool spared(size_t bytes, const void* from) {
  const bool has = bytes <= t_spare && in_loader(from);
  t_spare -= t_spare < bytes + 16 ? t_spare : bytes + 16;
  return has;
}

__attribute__((constructor)) void configure() {
  ++t_busy;
  const char* program = variable("FAILING_PROGRAM");
  const bool here = !program || strncmp(program_invocation_short_name, program, 15) == 0;
  if (const char* path = variable("FAILING_REPORT")) {
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    void* p = fd < 0 ? MAP_FAILED
                     : mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) abort();
    g_report = static_cast<Report*>(p);
    close(fd);
  }
  if (const char* kind = variable("FAILING_KIND"))
    for (uint32_t k = 0; k < failing::kKinds; ++k)
      if (strcmp(kind, failing::kNames[k]) == 0) g_kind = static_cast<Kind>(k);
  if (const char* at = variable("FAILING_AT")) g_at = strtoull(at, nullptr, 10);
  g_ever = variable("FAILING_EVER") != nullptr;
  g_whole = variable("FAILING_WHOLE") != nullptr;
  g_trace = variable("FAILING_TRACE") != nullptr;
  void* at[2];
  if (g_trace) backtrace(at, 2);  // which loads what it needs
  --t_busy;
  g_on.store(here);
}

struct Start {
  void* (*run)(void*);
  void* context;
};

void* inside(void* context) {
  const Start start = *static_cast<Start*>(context);
  ++t_busy;
  free(context);
  --t_busy;
  t_inside = 1;
  return start.run(start.context);
}

}  // namespace

EXPORTED void failing_enter() { ++t_inside; }
EXPORTED void failing_leave() { --t_inside; }
EXPORTED void failing_over() { g_report->over.store(1); }
EXPORTED uint64_t failing_fired() { return g_report->fired.load(); }

// --- memory ---

EXPORTED void* malloc(size_t bytes) noexcept {
  auto* f = NEXT(malloc);
  if (f && spared(bytes, __builtin_return_address(0))) return f(bytes);
  if (!f || fails(failing::kMemory)) return errno = ENOMEM, nullptr;
  return f(bytes);
}
EXPORTED void* calloc(size_t n, size_t bytes) noexcept {
  auto* f = NEXT(calloc);
  if (!f || fails(failing::kMemory)) return errno = ENOMEM, nullptr;
  return f(n, bytes);
}
EXPORTED void* realloc(void* p, size_t bytes) noexcept {
  auto* f = NEXT(realloc);
  if (f && spared(bytes, __builtin_return_address(0))) return f(p, bytes);
  if (!f || fails(failing::kMemory)) return errno = ENOMEM, nullptr;
  return f(p, bytes);
}
EXPORTED void free(void* p) noexcept {
  auto* f = NEXT(free);
  if (!p || !f) return;
  const size_t bytes = malloc_usable_size(p);
  if (bytes > t_spare) t_spare = bytes;
  f(p);
}
EXPORTED void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  auto* f = NEXT(aligned_alloc);
  if (!f || fails(failing::kMemory)) return errno = ENOMEM, nullptr;
  return f(alignment, bytes);
}
EXPORTED void* memalign(size_t alignment, size_t bytes) noexcept {
  auto* f = NEXT(memalign);
  if (!f || fails(failing::kMemory)) return errno = ENOMEM, nullptr;
  return f(alignment, bytes);
}
EXPORTED int posix_memalign(void** out, size_t alignment, size_t bytes) noexcept {
  auto* f = NEXT(posix_memalign);
  if (!f || fails(failing::kMemory)) return ENOMEM;
  return f(out, alignment, bytes);
}

// Its heap is not to be had (see the head).
EXPORTED void* dlopen(const char* file, int mode) noexcept {
  if (file && strstr(file, "mimalloc")) return nullptr;
  return NEXT(dlopen)(file, mode);
}

// --- the others: a failed call returns -1, or what is given ---

#define FAILING(kind, code, failed, type, name, parameters, arguments) \
  EXPORTED type name parameters noexcept(noexcept(name arguments)) {   \
    if (fails(failing::kind)) return errno = (code), failed;           \
    return NEXT(name) arguments;                                       \
  }

FAILING(kMap, ENOMEM, MAP_FAILED, void*, mmap, (void* at, size_t n, int p, int f, int fd, off_t o),
        (at, n, p, f, fd, o))
FAILING(kMap, ENOMEM, -1, int, madvise, (void* at, size_t n, int what), (at, n, what))
FAILING(kMap, ENOMEM, -1, int, mprotect, (void* at, size_t n, int what), (at, n, what))
FAILING(kMap, ENOSPC, -1, int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n))
EXPORTED int posix_fallocate(int fd, off_t at, off_t n) {
  return fails(failing::kMap) ? ENOSPC : NEXT(posix_fallocate)(fd, at, n);
}

FAILING(kDescriptor, EMFILE, -1, int, memfd_create, (const char* name, unsigned flags),
        (name, flags))
FAILING(kDescriptor, EFBIG, -1, int, ftruncate, (int fd, off_t n), (fd, n))
FAILING(kDescriptor, EMFILE, -1, int, eventfd, (unsigned n, int flags), (n, flags))
FAILING(kDescriptor, EMFILE, -1, int, epoll_create1, (int flags), (flags))
FAILING(kDescriptor, ENOMEM, -1, int, epoll_ctl, (int e, int what, int fd, epoll_event* event),
        (e, what, fd, event))
FAILING(kDescriptor, EMFILE, -1, int, socket, (int domain, int type, int protocol),
        (domain, type, protocol))
FAILING(kDescriptor, ENOMEM, -1, int, bind, (int fd, const sockaddr* to, socklen_t n), (fd, to, n))
FAILING(kDescriptor, EADDRINUSE, -1, int, listen, (int fd, int n), (fd, n))
FAILING(kDescriptor, EAGAIN, -1, int, connect, (int fd, const sockaddr* to, socklen_t n),
        (fd, to, n))
FAILING(kDescriptor, EMFILE, -1, int, accept4, (int fd, sockaddr* from, socklen_t* n, int flags),
        (fd, from, n, flags))
FAILING(kDescriptor, EMFILE, -1, int, dup, (int fd), (fd))
FAILING(kDescriptor, EMFILE, -1, int, pipe2, (int* fds, int flags), (fds, flags))
EXPORTED int fcntl(int fd, int what, ...) {
  va_list args;
  va_start(args, what);
  void* argument = va_arg(args, void*);
  va_end(args);
  const bool new_one = what == F_DUPFD || what == F_DUPFD_CLOEXEC;
  if ((new_one || what == F_ADD_SEALS) && fails(failing::kDescriptor))
    return errno = new_one ? EMFILE : EPERM, -1;
  return NEXT(fcntl)(fd, what, argument);
}
// Only a pidfd of the other end costs a descriptor.
EXPORTED int getsockopt(int fd, int level, int option, void* out, socklen_t* n) noexcept {
  constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD
  if (level == SOL_SOCKET && option == kPeerPidfd && fails(failing::kDescriptor))
    return errno = EMFILE, -1;
  return NEXT(getsockopt)(fd, level, option, out, n);
}
EXPORTED long syscall(long number, ...) noexcept {
  va_list args;
  va_start(args, number);
  long a[6];
  for (long& one : a) one = va_arg(args, long);
  va_end(args);
  if (number == SYS_pidfd_open && fails(failing::kDescriptor)) return errno = EMFILE, -1;
  return NEXT(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

EXPORTED int pthread_create(pthread_t* out, const pthread_attr_t* attributes, void* (*run)(void*),
                            void* context) noexcept {
  if (fails(failing::kThread)) return EAGAIN;
  if (!t_inside) return NEXT(pthread_create)(out, attributes, run, context);
  auto* start = static_cast<Start*>(NEXT(malloc)(sizeof(Start)));
  *start = {run, context};
  const int answer = NEXT(pthread_create)(out, attributes, inside, start);
  if (answer != 0) free(start);
  return answer;
}

EXPORTED int open(const char* path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const mode_t mode = va_arg(args, mode_t);
  va_end(args);
  if (fails(failing::kIo)) return errno = EMFILE, -1;
  return NEXT(open)(path, flags, mode);
}
FAILING(kIo, EMFILE, nullptr, FILE*, fopen, (const char* path, const char* mode), (path, mode))
FAILING(kIo, EIO, -1, ssize_t, read, (int fd, void* to, size_t n), (fd, to, n))
FAILING(kIo, ENOSPC, -1, ssize_t, write, (int fd, const void* from, size_t n), (fd, from, n))
FAILING(kIo, EIO, -1, int, rename, (const char* from, const char* to), (from, to))
FAILING(kIo, ENOBUFS, -1, ssize_t, sendmsg, (int fd, const msghdr* m, int flags), (fd, m, flags))
FAILING(kIo, ENOMEM, -1, ssize_t, recvmsg, (int fd, msghdr* m, int flags), (fd, m, flags))
