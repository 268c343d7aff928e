#include "base/forked.h"

#include <unistd.h>

#include <algorithm>
#include <memory>

#include "base/heap.h"
#include "base/os.h"

namespace frugal {
namespace {

struct Known : HeapObject {
  Mutex mutex;
  Vector<int> descriptors GUARDED_BY(mutex);
};

// Never destroyed: servers may be stopped, and forks made, while the process exits.
Known& known() {
  static Known* all = [] {
    auto made = std::make_unique<Known>();
    os_at_fork([]() NO_THREAD_SAFETY_ANALYSIS { known().mutex.lock(); },
               []() NO_THREAD_SAFETY_ANALYSIS { known().mutex.unlock(); },
               []() NO_THREAD_SAFETY_ANALYSIS {
                 for (int fd : known().descriptors) ::close(fd);
                 known().descriptors.clear();
                 known().mutex.unlock();
               });
    return made.release();
  }();
  return *all;
}

}  // namespace

Mutex& ForkedDescriptors::mutex() { return known().mutex; }

void ForkedDescriptors::add(int fd) {
  known().mutex.assert_held();
  try {
    known().descriptors.push_back(fd);
  } catch (const std::bad_alloc&) {
    // Then a forked child keeps it. The pidfd reports its parent's death all the same.
  }
}

void ForkedDescriptors::close(int fd) noexcept {
  if (fd < 0) return;
  Known& all = known();
  Lock lock(all.mutex);
  auto found = std::find(all.descriptors.begin(), all.descriptors.end(), fd);
  if (found != all.descriptors.end()) {
    *found = all.descriptors.back();
    all.descriptors.pop_back();
  }
  ::close(fd);
}

}  // namespace frugal
