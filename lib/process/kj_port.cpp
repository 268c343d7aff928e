#include "process/kj_port.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/debug.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "base/os.h"
#include "process/forked.h"

namespace frugal {

namespace {

// Less than what the C library asks the kernel for, and gives back to it, piece by piece.
constexpr size_t kReserve = 64 << 10;

}  // namespace

struct KjPort::Waiter {
  Waiter(kj::PromiseFulfiller<void>& f, KjPort& p, int fd, short events, uint64_t until)
      : fulfiller(f), port(p), fd(fd), events(events), until(until) {
    const size_t all = port.waiters_.size() + 1;
    if (all >= port.watched_.capacity()) {
      port.done_.reserve(2 * all);
      port.watched_.reserve(2 * all + 1);  // and the event; last: it tells whether both have room
    }
    port.waiters_.push_back(this);
  }
  ~Waiter() { forget(); }
  void forget() {
    auto found = std::find(port.waiters_.begin(), port.waiters_.end(), this);
    if (found == port.waiters_.end()) return;
    *found = port.waiters_.back();
    port.waiters_.pop_back();
  }

  kj::PromiseFulfiller<void>& fulfiller;
  KjPort& port;
  int fd;
  short events;
  uint64_t until;  // of now_ns()
};

struct KjPort::Once final : KjPort::Work, HeapObject {
  explicit Once(std::function<void()> w) : work(std::move(w)) {}
  void run() override {
    const std::unique_ptr<Once> mine(this);
    work();
  }
  void drop() override { delete this; }
  std::function<void()> work;
};

KjPort::~KjPort() noexcept(false) {
  while (Work* work = posted_) {
    posted_ = work->next_;
    work->drop();
  }
  if (event_ >= 0) close(event_);
}

Status KjPort::open() {
  watched_.reserve(1);
  event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_ < 0) return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, errno, "no descriptor for an event loop");
  return FRUGAL_OK;
}

kj::Promise<void> KjPort::ready(int fd, short events) {
  return kj::newAdaptedPromise<void, Waiter>(*this, fd, events, UINT64_MAX);
}

kj::Promise<void> KjPort::after(uint64_t ns) {
  return kj::newAdaptedPromise<void, Waiter>(*this, kNoDescriptor, 0, now_ns() + ns);
}

void KjPort::post(Work& work) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work.next_ = nullptr;
    *posted_end_ = &work;
    posted_end_ = &work.next_;
  }
  ring();
}

void KjPort::post(std::function<void()> work) { post(*new Once(std::move(work))); }

void KjPort::wake() const {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_ = true;
  }
  ring();
}

void KjPort::ring() const noexcept {
  const uint64_t one = 1;
  while (write(event_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

bool KjPort::wait() { return look(true); }
bool KjPort::poll() { return look(false); }

bool KjPort::look(bool sleep) {
  Vector<pollfd>& watched = watched_;
  watched.clear();
  watched.push_back({event_, POLLIN, 0});
  uint64_t until = UINT64_MAX;
  for (const Waiter* w : waiters_) {
    watched.push_back({w->fd, w->events, 0});  // poll() passes over negative ones
    until = std::min(until, w->until);
  }
  int ms = sleep ? -1 : 0;
  if (sleep && until != UINT64_MAX) {
    const uint64_t now = now_ns();
    ms = until > now ? static_cast<int>(std::min<uint64_t>((until - now) / 1000000 + 1, 60000)) : 0;
  }
  reserve_.reset(new (std::nothrow) char[kReserve]);
  const int found = ::poll(watched.data(), watched.size(), ms);
  reserve_.reset();
  if (found < 0) {
    // Interrupted, or no memory for a moment. What is posted is looked for all the same.
    for (pollfd& p : watched) p.revents = 0;
  }
  if (watched[0].revents) {
    uint64_t count;
    while (read(event_, &count, sizeof count) < 0 && errno == EINTR) {
    }
  }
  // Fulfilling only puts events into the loop's queue: nothing but forget() moves the waiters.
  const uint64_t now = until == UINT64_MAX ? 0 : now_ns();
  done_.clear();
  for (size_t i = 0; i < waiters_.size(); ++i)
    if (watched[i + 1].revents || waiters_[i]->until <= now) done_.push_back(waiters_[i]);
  for (Waiter* w : done_) {
    w->forget();
    w->fulfiller.fulfill();
  }
  Work* posted;
  bool woken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted = std::exchange(posted_, nullptr);
    posted_end_ = &posted_;
    woken = std::exchange(woken_, false);
  }
  while (Work* work = posted) {
    posted = work->next_;  // it may end with its run
    try {
      work->run();
    } catch (...) {
      // No memory: what it was for is missed by whoever waits for it, and the loop goes on.
    }
  }
  return woken;
}

struct SocketMessages::Incoming {
  kj::Array<capnp::word> words;
  size_t bytes = 0;  // there
  size_t wanted = 0;
  kj::ArrayPtr<kj::AutoCloseFd> descriptors;
  size_t descriptor_count = 0;
  capnp::ReaderOptions options;
};

struct SocketMessages::Outgoing {
  kj::Array<capnp::word> words;
  size_t bytes = 0;  // gone
  kj::ArrayPtr<const int> descriptors;
};

SocketMessages::SocketMessages(KjPort& port, int socket, size_t most_words, bool receives, bool patient)
    : port_(port), socket_(socket), most_words_(most_words), receives_(receives), patient_(patient) {}

SocketMessages::~SocketMessages() noexcept(false) { ForkedDescriptors::close(socket_); }

size_t SocketMessages::receive(Incoming& in) {
  // Not a byte more than this message's: descriptors come with the first byte of theirs.
  iovec piece{reinterpret_cast<char*>(in.words.begin()) + in.bytes, in.wanted - in.bytes};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  // Without room for descriptors the kernel lets go of those that a peer sends.
  alignas(cmsghdr) char room[CMSG_SPACE(253 * sizeof(int))];
  const size_t free_places = in.descriptors.size() - in.descriptor_count;
  if (free_places > 0) {
    header.msg_control = room;
    header.msg_controllen = CMSG_SPACE(std::min<size_t>(free_places, 253) * sizeof(int));
  }
  ssize_t n;
  do n = recvmsg(socket_, &header, MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return SIZE_MAX;
    KJ_FAIL_SYSCALL("recvmsg", errno);
  }
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      kj::AutoCloseFd owned(fd);  // alignment may have made room for one more
      if (in.descriptor_count < in.descriptors.size())
        in.descriptors[in.descriptor_count++] = kj::mv(owned);
    }
  }
  in.bytes += static_cast<size_t>(n);
  return static_cast<size_t>(n);
}

kj::Promise<bool> SocketMessages::read(Incoming& in) {
  while (in.bytes < in.wanted) {
    const size_t n = receive(in);
    if (n == SIZE_MAX) return port_.ready(socket_, POLLIN).then([this, &in] { return read(in); });
    if (n == 0) {
      if (in.bytes == 0) return false;
      return KJ_EXCEPTION(DISCONNECTED, "the connection ended inside a message");
    }
  }
  return true;
}

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> SocketMessages::tryReadMessage(
    kj::ArrayPtr<kj::AutoCloseFd> descriptors, capnp::ReaderOptions options,
    kj::ArrayPtr<capnp::word>) {
  using Result = kj::Maybe<capnp::MessageReaderAndFds>;
  if (patient_ && stuck_)
    return port_.ready(socket_, POLLOUT).then([this, descriptors, options] {
      return tryReadMessage(descriptors, options, nullptr);
    });
  auto incoming = kj::heap<Incoming>();
  Incoming& in = *incoming;
  if (receives_) in.descriptors = descriptors;
  in.options = options;
  // The table: the number of segments less one, their sizes in words, and padding to a word.
  in.words = kj::heapArray<capnp::word>(1);
  in.wanted = sizeof(capnp::word);
  auto u32 = [](const Incoming& in, size_t i) {
    uint32_t value;  // little-endian, as is every machine that this is built for
    std::memcpy(&value, reinterpret_cast<const char*>(in.words.begin()) + i * 4, 4);
    return size_t{value};
  };
  auto longer = [](Incoming& in, size_t words) {
    auto more = kj::heapArray<capnp::word>(words);
    std::memcpy(more.begin(), in.words.begin(), in.bytes);
    in.words = kj::mv(more);
    in.wanted = words * sizeof(capnp::word);
  };
  constexpr size_t kMostSegments = 64;
  auto promise = read(in).then([this, &in, u32, longer](bool there) -> kj::Promise<Result> {
    if (!there) return Result(nullptr);
    const size_t segments = u32(in, 0) + 1;
    if (segments > kMostSegments) return KJ_EXCEPTION(FAILED, "a message of too many segments");
    longer(in, segments / 2 + 1);
    return read(in).then([this, &in, u32, longer, segments](bool) -> kj::Promise<Result> {
      size_t words = in.words.size();
      for (size_t i = 1; i <= segments; ++i) words += u32(in, i);
      if (words > most_words_) return KJ_EXCEPTION(FAILED, "a message that is too large");
      longer(in, words);
      return read(in).then([&in](bool) -> Result {
        auto space = in.words.asPtr();
        capnp::MessageReaderAndFds out;
        out.reader = kj::heap<capnp::FlatArrayMessageReader>(space, in.options).attach(kj::mv(in.words));
        out.fds = in.descriptors.slice(0, in.descriptor_count);
        return kj::mv(out);
      });
    });
  });
  return promise.attach(kj::mv(incoming));
}

kj::Promise<void> SocketMessages::write(Outgoing& out) {
  const auto* bytes = reinterpret_cast<char*>(out.words.begin());
  const size_t size = out.words.size() * sizeof(capnp::word);
  while (out.bytes < size) {
    iovec piece{const_cast<char*>(bytes) + out.bytes, size - out.bytes};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char room[CMSG_SPACE(253 * sizeof(int))];
    if (out.bytes == 0 && out.descriptors.size() > 0) {
      KJ_REQUIRE(out.descriptors.size() <= 253, "too many descriptors for a message");
      std::memset(room, 0, sizeof room);
      header.msg_control = room;
      header.msg_controllen = CMSG_SPACE(out.descriptors.size() * sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(out.descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(c), out.descriptors.begin(), out.descriptors.size() * sizeof(int));
    }
    const ssize_t n = sendmsg(socket_, &header, MSG_NOSIGNAL);
    if (n >= 0) {
      out.bytes += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      stuck_ = true;
      return port_.ready(socket_, POLLOUT).then([this, &out] { return write(out); });
    } else if (errno == EPIPE || errno == ECONNRESET) {
      // Nobody is there to read it. That is no failure: the RPC system would read no more, and lose the
      // last answers, which may have come already. Reading comes to the end of the connection by itself.
      break;
    } else if (errno != EINTR) {
      stuck_ = false;
      KJ_FAIL_SYSCALL("sendmsg", errno);
    }
  }
  stuck_ = false;
  return kj::READY_NOW;
}

kj::Promise<void> SocketMessages::writeMessage(
    kj::ArrayPtr<const int> descriptors,
    kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  auto out = kj::heap<Outgoing>();
  out->words = capnp::messageToFlatArray(segments);
  out->descriptors = descriptors;
  auto promise = write(*out);
  return promise.attach(kj::mv(out));
}

kj::Promise<void> SocketMessages::writeMessages(
    kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) {
  if (messages.size() == 0) return kj::READY_NOW;
  return writeMessage(nullptr, messages[0]).then([this, messages]() mutable {
    return writeMessages(messages.slice(1, messages.size()));
  });
}

kj::Promise<void> SocketMessages::end() {
  shutdown(socket_, SHUT_WR);
  return kj::READY_NOW;
}

}  // namespace frugal
