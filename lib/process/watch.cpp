#include "process/watch.h"

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/forked.h"
#include "base/os.h"
#include "base/retry.h"

namespace frugal {

Status Watch::open(std::unique_ptr<Watch>* out) {
  std::unique_ptr<Watch> w(new Watch);
  w->poll_ = epoll_create1(EPOLL_CLOEXEC);
  w->stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (w->poll_ < 0 || w->stop_ < 0 || epoll_ctl(w->poll_, EPOLL_CTL_ADD, w->stop_, &event) != 0)
    return os_no_descriptor(errno, "the watch of other processes");
  int code = 0;
  try {
    w->thread_ = quiet_thread([watch = w.get()] { watch->loop(); });
  } catch (const std::system_error& e) {
    code = e.code().value();
  } catch (...) {
    code = ENOMEM;
  }
  if (code != 0) return no_thread("the thread that watches processes", code);
  *out = std::move(w);
  return FRUGAL_OK;
}

Watch::~Watch() {
  if (thread_.joinable()) {
    eventfd_write(stop_, 1);
    thread_.join();
  }
  for (auto& [id, entry] : entries_) ForkedDescriptors::close(entry.fd);
  if (stop_ >= 0) close(stop_);
  if (poll_ >= 0) close(poll_);
}

Status Watch::add(int process_fd, std::function<void()> gone, uint64_t* id) {
  return enter(process_fd, std::move(gone), false, id);
}

Status Watch::follow(int socket, std::function<void()> some, uint64_t* id) {
  return enter(socket, std::move(some), true, id);
}

Status Watch::enter(int fd, std::function<void()> call, bool stays, uint64_t* id) try {
  Lock lock(mutex_);
  const uint64_t number = last_id_ + 1;
  const auto entry = entries_.emplace(number, Entry{fd, std::move(call), stays}).first;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = number;
  if (epoll_ctl(poll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    const int code = errno;
    entries_.erase(entry);
    return fail_errno(
        code == ENOSPC || code == ENOMEM ? FRUGAL_ERR_OUT_OF_MEMORY : FRUGAL_ERR_INVALID_ARGUMENT,
        code,
        "descriptor %d cannot be watched: free memory of the machine, or raise its "
        "limit (fs.epoll.max_user_watches)",
        fd);
  }
  *id = last_id_ = number;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to watch another process: free memory of the machine and call again");
}

void Watch::remove(uint64_t id) {
  std::function<void()> gone;  // destroyed without the lock
  UniqueLock lock(mutex_);
  if (!pthread_equal(pthread_self(), thread_.native_handle()))
    returned_.wait(lock, [&]() REQUIRES(mutex_) { return running_ != id; });
  const auto entry = entries_.find(id);
  if (entry != entries_.end()) {
    // Not by closing: a forked child may hold the descriptor, too.
    epoll_ctl(poll_, EPOLL_CTL_DEL, entry->second.fd, nullptr);
    ForkedDescriptors::close(entry->second.fd);
    gone = std::move(entry->second.gone);
    entries_.erase(entry);
  }
  lock.unlock();
}

void Watch::loop() {
  for (;;) {
    epoll_event event{};
    const int n = epoll_wait(poll_, &event, 1, -1);
    if (n < 0 && errno != EINTR) return;  // it cannot fail in another way
    if (n <= 0) continue;
    if (event.data.u64 == 0) return;
    std::function<void()> gone;
    const std::function<void()>* some = nullptr;
    {
      Lock lock(mutex_);
      const auto entry = entries_.find(event.data.u64);
      if (entry == entries_.end()) continue;  // removed meanwhile
      running_ = entry->first;
      const bool stays = entry->second.stays;
      if (!stays || event.events & EPOLLHUP)
        epoll_ctl(poll_, EPOLL_CTL_DEL, entry->second.fd, nullptr);
      if (stays) {
        some = &entry->second.gone;  // which is not removed while it runs
      } else {
        ForkedDescriptors::close(entry->second.fd);
        gone = std::move(entry->second.gone);
        entries_.erase(entry);
      }
    }
    if (some)
      (*some)();
    else
      retry_for_memory(gone);
    gone = nullptr;
    {
      Lock lock(mutex_);
      running_ = 0;
    }
    returned_.notify_all();
  }
}

}  // namespace frugal
