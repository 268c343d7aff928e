#include "base/forked.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/heap.h"
#include "base/immortal.h"
#include "base/os.h"

namespace frugal {
namespace {

struct Known {
  Mutex mutex;
  Vector<int> descriptors GUARDED_BY(mutex);
};

// Servers may be stopped, and forks made, while the process exits.
Immortal<Known> g_known;

void close_all() NO_THREAD_SAFETY_ANALYSIS {
  for (int fd : g_known->descriptors) ::close(fd);
  g_known->descriptors.clear();
  g_known->mutex.unlock();
}

constinit AtFork g_descriptors_at_fork{[]() NO_THREAD_SAFETY_ANALYSIS { g_known->mutex.lock(); },
                                       []() NO_THREAD_SAFETY_ANALYSIS { g_known->mutex.unlock(); },
                                       close_all};
[[gnu::constructor]] void register_descriptors() { g_descriptors_at_fork.at_load(); }

}  // namespace

void AtFork::at_load() noexcept {
  try {
    register_now();
  } catch (const std::bad_alloc&) {
    // ensure() tries again.
  }
}

void AtFork::register_now() {
  int now = kNone;
  if (state_.compare_exchange_strong(now, kTrying)) {
    try {
      os_at_fork(before_, in_parent_, in_child_);
    } catch (const std::bad_alloc&) {
      state_.store(kNone);
      throw;
    }
    state_.store(kDone, std::memory_order_release);
  } else if (now != kDone) {
    throw std::bad_alloc();
  }
}

Mutex& ForkedDescriptors::mutex() { return g_known->mutex; }

void ForkedDescriptors::ensure() { g_descriptors_at_fork.ensure(); }

void ForkedDescriptors::add(int fd) {
  g_known->mutex.assert_held();
  try {
    g_known->descriptors.push_back(fd);
  } catch (const std::bad_alloc&) {
    // Then a forked child keeps it. The pidfd reports its parent's death all the same.
  }
}

void ForkedDescriptors::close(int fd) noexcept {
  if (fd < 0) return;
  Known& all = *g_known;
  Lock lock(all.mutex);
  auto found = std::find(all.descriptors.begin(), all.descriptors.end(), fd);
  if (found != all.descriptors.end()) {
    *found = all.descriptors.back();
    all.descriptors.pop_back();
  }
  ::close(fd);
}

}  // namespace frugal
