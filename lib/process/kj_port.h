// Cap'n Proto's event loop and message streams without those of kj's for Unix, which change how the
// whole process treats SIGPIPE and a signal more. The port polls; a stream writes with MSG_NOSIGNAL.
//
// A thread that runs a loop first makes a Quiet, then a KjPort, a kj::EventLoop on it and a
// kj::WaitScope. All but KjPort::post() belongs to that thread.
#pragma once
#include <capnp/serialize-async.h>
#include <kj/async.h>
#include <kj/exception.h>
#include <poll.h>

#include <functional>
#include <memory>
#include <mutex>

#include "base/heap.h"
#include "base/status.h"

namespace frugal {

// kj prints what it logs, and looks for the names of functions on the stack of an exception by other
// programs; this thread does neither. On the stack only.
class Quiet final : public kj::ExceptionCallback {
 public:
  void logMessage(kj::LogSeverity, const char*, int, int, kj::String&&) override {}
  StackTraceMode stackTraceMode() override { return StackTraceMode::NONE; }
};

// For a wait that watches none.
constexpr int kNoDescriptor = -1;

class KjPort final : public kj::EventPort {
 public:
  ~KjPort() noexcept(false);
  Status open();

  // Done when poll() tells one of `events`, an error or the end of `fd`.
  kj::Promise<void> ready(int fd, short events);
  kj::Promise<void> after(uint64_t ns);

  // What can be posted without memory. Its owner keeps it until run() or drop() is called, once.
  struct Work {
    virtual void run() = 0;
    virtual void drop() {}  // the port ends first

   protected:
    ~Work() = default;

   private:
    friend class KjPort;
    Work* next_ = nullptr;
  };

  // Any thread: `work` is run in the loop's thread, outside all promises. What it throws is dropped.
  void post(Work& work) noexcept;
  void post(std::function<void()> work);  // throws if there is no memory

  // kj::EventPort
  bool wait() override;
  bool poll() override;
  void wake() const override;

 private:
  struct Waiter;
  struct Once;
  void ring() const noexcept;
  bool look(bool sleep);

  int event_ = -1;
  Vector<Waiter*> waiters_;
  // Of look(): with room for all waiters, so that it needs no memory.
  Vector<pollfd> watched_;
  Vector<Waiter*> done_;
  // Memory that the loop keeps while it sleeps and gives up when it works: the RPC system ends the process where it
  // finds none in a destructor, or when it makes its own exception of a bad_alloc.
  std::unique_ptr<char[]> reserve_;
  mutable std::mutex mutex_;
  mutable bool woken_ = false;
  Work* posted_ = nullptr;
  Work** posted_end_ = &posted_;
};

// Messages with descriptors over a connected non-blocking socket, which it owns.
class SocketMessages final : public capnp::MessageStream {
 public:
  // No message of more words, and no descriptors with one, unless it `receives` them: the kernel drops
  // them. With `patient`, none is taken while the other side does not
  // take what it is sent: what a peer makes this process keep is bounded.
  SocketMessages(KjPort& port, int socket, size_t most_words, bool receives, bool patient);
  ~SocketMessages() noexcept(false);
  int socket() const { return socket_; }

  using capnp::MessageStream::tryReadMessage;
  using capnp::MessageStream::writeMessage;
  using capnp::MessageStream::writeMessages;
  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(
      kj::ArrayPtr<kj::AutoCloseFd> descriptors, capnp::ReaderOptions options,
      kj::ArrayPtr<capnp::word> scratch) override;
  kj::Promise<void> writeMessage(
      kj::ArrayPtr<const int> descriptors,
      kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override;
  kj::Promise<void> writeMessages(
      kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override;
  kj::Maybe<int> getSendBufferSize() override { return nullptr; }
  kj::Promise<void> end() override;

 private:
  struct Incoming;
  struct Outgoing;
  kj::Promise<bool> read(Incoming& incoming);  // false: the end came before the first byte
  kj::Promise<void> write(Outgoing& outgoing);
  size_t receive(Incoming& incoming);  // bytes; 0: the end; SIZE_MAX: nothing yet

  KjPort& port_;
  int socket_;
  size_t most_words_;
  bool receives_;
  bool patient_;
  bool stuck_ = false;  // a message is not wholly written
};

}  // namespace frugal
