// Messages of the control plane over a nonblocking stream socket: Cap'n Proto's encoding, in its
// framing for streams, with one segment. Descriptors come with a message's first byte.
//
// A message is made and read in memory of its own, and takes none: making, sending and receiving
// cannot fail for lack of memory. Reading throws if the bytes are no message (kj::Exception, or
// std::bad_alloc if there is no memory for that exception).
#pragma once
#include <capnp/message.h>

#include <optional>

#include "process/control.h"

namespace frugal {

// The largest messages are a table's configuration and a reply with kMostNumbers numbers.
constexpr size_t kMostRequestWords = 512, kMostAnswerWords = 4096;  // 4 and 32 KiB
constexpr size_t kMostText = 1024;  // bytes of a name or device in a request

enum class Progress {
  kWhole,
  kNothing,  // the socket takes, or has, nothing at the moment
  kRefused,  // nothing was sent, and the system refuses to send it: errno
  kEnd,      // nothing more passes: the connection has ended, or is to be ended
};

class Outgoing {
 public:
  Outgoing(capnp::word* room, size_t words) : words_(room), most_(words) {}
  // Begins a message.
  template <class Root>
  typename Root::Builder begin() {
    clear();
    return builder_->getRoot<Root>();
  }
  // Continues to send the message that begin() has begun.
  Progress push(int socket, const int* descriptors = nullptr, size_t count = 0);
  bool on_its_way() const { return sent_ > 0; }

 private:
  void clear();
  void seal();
  std::optional<capnp::FlatMessageBuilder> builder_;
  size_t bytes_ = 0;  // 0: not sealed
  size_t sent_ = 0;
  capnp::word* const words_;  // most_ + 1 of them
  const size_t most_;
};

class Incoming {
 public:
  // If it takes no descriptors, a peer that sends some has its connection ended.
  Incoming(capnp::word* room, size_t words, bool takes_descriptors)
      : takes_descriptors_(takes_descriptors), words_(room), most_(words) {}
  ~Incoming() { drop(); }

  // Continues with the message under way; after a whole one, begins the next.
  Progress pull(int socket);
  // Reads a whole message. The reader is valid until the next pull().
  template <class Root>
  typename Root::Reader read() {
    open();
    return reader_->getRoot<Root>();
  }
  // Descriptors that came with the message. It owns them until they are taken.
  size_t descriptors() const { return count_; }
  Vector<int> take_descriptors();  // all

 private:
  void open();
  void drop();
  const bool takes_descriptors_;
  bool can_throw_ = false;  // libkj's state of this thread exists
  size_t bytes_ = 0;        // received so far
  size_t wanted_ = 8;       // of the message, as far as is known
  size_t count_ = 0;
  int descriptors_[kMostDescriptors];
  kj::ArrayPtr<const capnp::word> segment_;
  std::optional<capnp::SegmentArrayMessageReader> reader_;
  capnp::word* const words_;  // most_ + 1 of them
  const size_t most_;
};

// With memory for messages of kWords words.
template <size_t kWords>
struct OutgoingOf : Outgoing {
  OutgoingOf() : Outgoing(room, kWords) {}
  capnp::word room[1 + kWords];
};
template <size_t kWords>
struct IncomingOf : Incoming {
  explicit IncomingOf(bool takes_descriptors) : Incoming(room, kWords, takes_descriptors) {}
  capnp::word room[1 + kWords];
};

}  // namespace frugal
