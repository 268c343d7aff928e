#include "process/control_message.h"

#include <fcntl.h>
#include <kj/exception.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "base/assert.h"
#include "base/this_thread.h"
#include "process/control_socket.h"

namespace frugal {
namespace {

// What precedes a message: the number of segments less one, and the number of the first one's
// words.
constexpr size_t kHead = sizeof(capnp::word);

bool touch_kj() noexcept {
  try {
    (void)kj::getExceptionCallback();  // the first one of the process takes memory
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool later(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

}  // namespace

void Outgoing::clear() {
  builder_.reset();
  std::memset(static_cast<void*>(words_), 0, bytes_ ? bytes_ : (1 + most_) * sizeof(capnp::word));
  bytes_ = sent_ = 0;
  builder_.emplace(kj::arrayPtr(words_ + 1, most_));
}

void Outgoing::seal() {
  const auto segments = builder_->getSegmentsForOutput();
  FRUGAL_ASSERT(segments.size() == 1 && segments[0].size() <= most_);
  const uint32_t head[] = {0, static_cast<uint32_t>(segments[0].size())};
  std::memcpy(static_cast<void*>(words_), head, sizeof head);
  bytes_ = kHead + head[1] * sizeof(capnp::word);
}

Progress Outgoing::push(int socket, const int* descriptors, size_t count) {
  FRUGAL_ASSERT(builder_ && count <= kMostDescriptors);
  if (bytes_ == 0) seal();
  while (sent_ < bytes_) {
    iovec piece{reinterpret_cast<char*>(words_) + sent_, bytes_ - sent_};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char room[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
    if (sent_ == 0 && count > 0) {
      header.msg_control = room;
      header.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(c), descriptors, count * sizeof(int));
    }
    const ssize_t n = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
      sent_ += static_cast<size_t>(n);
    else if (later(errno))
      return Progress::kNothing;
    else if (errno == EPIPE || errno == ECONNRESET || (errno != EINTR && sent_ > 0))
      return Progress::kEnd;
    else if (errno != EINTR)
      return Progress::kRefused;
  }
  return Progress::kWhole;
}

Progress Incoming::pull(int socket) {
  if (bytes_ == wanted_ && wanted_ > kHead) {
    drop();
    bytes_ = 0;
    wanted_ = kHead;
  }
  while (bytes_ < wanted_) {
    // Not a byte more than this message's: the next one's descriptors would come with it.
    iovec piece{reinterpret_cast<char*>(words_) + bytes_, wanted_ - bytes_};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    // Without room the kernel drops descriptors that were sent, and reports that.
    alignas(cmsghdr) char room[CMSG_SPACE(kMostDescriptors * sizeof(int))];
    if (takes_descriptors_) {
      header.msg_control = room;
      header.msg_controllen = sizeof room;
    }
    const ssize_t n = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && later(errno)) return Progress::kNothing;
    if (n <= 0) return Progress::kEnd;
    if (takes_descriptors_)
      for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
          for (size_t at = 0; at + sizeof(int) <= c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;
            std::memcpy(&fd, CMSG_DATA(c) + at, sizeof fd);
            fd = above_standard(fd);
            if (fd >= 0 && count_ < kMostDescriptors)
              descriptors_[count_++] = fd;
            else
              close(fd);
          }
    if ((header.msg_flags & MSG_CTRUNC) && !takes_descriptors_) return Progress::kEnd;
    bytes_ += static_cast<size_t>(n);
    if (bytes_ == kHead && wanted_ == kHead) {
      uint32_t head[2];
      std::memcpy(head, static_cast<const void*>(words_), sizeof head);
      if (head[0] != 0 || head[1] == 0 || head[1] > most_) return Progress::kEnd;
      wanted_ += head[1] * sizeof(capnp::word);
    }
  }
  return Progress::kWhole;
}

void Incoming::open() {
  FRUGAL_ASSERT(bytes_ == wanted_ && wanted_ > kHead);
  // libkj reports bytes that are no message by exceptions. Without memory for its state of this
  // thread, a good message is read all the same.
  if (!can_throw_) can_throw_ = touch_thread_locals(touch_kj);
  capnp::ReaderOptions options;
  options.traversalLimitInWords = 4 * most_;
  options.nestingLimit = 8;
  segment_ = kj::arrayPtr(words_ + 1, wanted_ / sizeof(capnp::word) - 1);
  reader_.emplace(kj::arrayPtr(&segment_, 1), options);
}

Vector<int> Incoming::take_descriptors() {
  Vector<int> all(descriptors_, descriptors_ + count_);
  count_ = 0;
  return all;
}

void Incoming::drop() {
  reader_.reset();
  while (count_ > 0) close(descriptors_[--count_]);
}

}  // namespace frugal
