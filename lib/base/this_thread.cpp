#include "base/this_thread.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <new>
#include <type_traits>

namespace frugal {
namespace {

static_assert(std::is_trivially_destructible_v<ThisThread>);

// What the loader allocates: for a library's thread_local objects (those used here have 32 bytes at
// most), and for its list of a thread's libraries. It does the latter if the list is too short.
constexpr size_t kObjects = 32, kList = 4096;

// The pthread key's value where there was no memory for a ThisThread.
char g_none;

// Atomic, since the first calls of several threads may make it at once.
constexpr pthread_key_t kNoKey = ~pthread_key_t{0};
constinit std::atomic<pthread_key_t> g_key{kNoKey};
pthread_key_t key() { return g_key.load(std::memory_order_relaxed); }

// Runs when the library is loaded, before any object of it can be made. The first 32 keys of a
// program take no memory. If no key is left then, each thread's first call tries again.
[[gnu::constructor(101)]] void make_key() {
  pthread_key_t made, none = kNoKey;
  const auto free = [](void* p) {
    if (p != &g_none) std::free(p);
  };
  if (pthread_key_create(&made, free) != 0) return;
  if (!g_key.compare_exchange_strong(none, made)) pthread_key_delete(made);
}

void* found() { return key() == kNoKey ? nullptr : pthread_getspecific(key()); }

[[gnu::noinline]] ThisThread* make() noexcept {
  // The result is used, or the compiler would drop the call.
  const auto touch = []() noexcept {
    asm volatile("" : : "r"(std::uncaught_exceptions()));
    return true;
  };
  if (key() == kNoKey) make_key();
  if (key() == kNoKey) return nullptr;
  void* memory = touch_thread_locals(touch) ? std::malloc(sizeof(ThisThread)) : nullptr;
  if (memory && pthread_setspecific(key(), memory) == 0) return new (memory) ThisThread;
  std::free(memory);
  (void)pthread_setspecific(key(), &g_none);
  return nullptr;
}

}  // namespace

ThisThread* this_thread() noexcept {
  void* p = found();
  return p && p != &g_none ? static_cast<ThisThread*>(p) : make();
}

const ThisThread* this_thread_if_any(bool* tried) noexcept {
  void* p = found();
  *tried = p == &g_none || key() == kNoKey;
  return *tried ? nullptr : static_cast<const ThisThread*>(p);
}

const char* no_thread() noexcept {
  if (key() == kNoKey)
    return "no pthread key is left for what the library keeps of a thread: the process may have "
           "1024, "
           "of all its libraries; delete one, or load this library earlier, and call again";
  return "memory for what the library keeps of a thread is exhausted; free some and call again";
}

// malloc next gives a thread the blocks that it has just freed: so the loader gets these.
bool touch_thread_locals(bool (*touch)() noexcept) noexcept {
  void* volatile list = std::malloc(kList);
  void* volatile objects = std::malloc(kObjects);
  const bool there = list && objects;
  std::free(list);
  std::free(objects);
  return there && touch();
}

}  // namespace frugal
