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

// What the loader takes for a library's objects, of which those that are met here have 32 bytes at
// most; and for its list of a thread's libraries, where that has become too short.
constexpr size_t kObjects = 32, kList = 4096;

// In the place of a ThisThread for which there was no memory.
char g_none;

// Atomic, since it may be made by several threads' first calls at once.
constexpr pthread_key_t kNoKey = ~pthread_key_t{0};
constinit std::atomic<pthread_key_t> g_key{kNoKey};
pthread_key_t key() { return g_key.load(std::memory_order_relaxed); }

// When the library is loaded, before objects of it could be made. The first 32 keys of a program
// take no memory. Where no key is left then, each thread's first call looks for one again.
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
  // A call whose result nobody looked at would not be made.
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

// A block that a thread has just freed is what malloc gives the same thread next.
bool touch_thread_locals(bool (*touch)() noexcept) noexcept {
  void* volatile list = std::malloc(kList);
  void* volatile objects = std::malloc(kObjects);
  const bool there = list && objects;
  std::free(list);
  std::free(objects);
  return there && touch();
}

}  // namespace frugal
