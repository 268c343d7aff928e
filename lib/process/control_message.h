// Messages of the control plane over a stream socket that does not block: Cap'n Proto's encoding,
// in the framing that it has for streams, with one segment. Descriptors come with a message's first
// byte.
//
// A message is made and read in memory of its own, and none is taken for it: making, sending and
// receiving cannot fail for want of memory. Reading throws where the bytes are no message
// (kj::Exception, or std::bad_alloc where there is no memory to say so).
#pragma once
#include <capnp/message.h>

#include <optional>

#include "process/control.h"

namespace frugal {

// Of messages. The largest are a table's configuration and an answer with kMostNumbers numbers.
constexpr size_t kMostRequestWords = 512, kMostAnswerWords = 4096;  // 4 and 32 KiB
constexpr size_t kMostText = 1024;  // bytes of a name or device in a request

enum class Progress {
  kWhole,
  kNothing,  // nothing goes, or comes, at the moment
  kRefused,  // nothing has gone, and the system will not take it: errno
  kEnd,      // nothing will: the connection has ended, or is to be ended
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
  // Goes on to send what begin() has begun.
  Progress push(int socket, const int* descriptors = nullptr, size_t count = 0);
  bool on_its_way() const { return sent_ > 0; }

 private:
  void clear();
  void seal();
  std::optional<capnp::FlatMessageBuilder> builder_;
  size_t bytes_ = 0;  // 0: not sealed
  size_t sent_ = 0;
  capnp::word* const words_;  // one more than
  const size_t most_;
};

class Incoming {
 public:
  // Who sends descriptors to one that does not take them has his connection ended.
  Incoming(capnp::word* room, size_t words, bool takes_descriptors)
      : takes_descriptors_(takes_descriptors), words_(room), most_(words) {}
  ~Incoming() { drop(); }

  // Goes on with the message that is under way; after a whole one, begins the next.
  Progress pull(int socket);
  // Of a whole message; lasts until the next pull().
  template <class Root>
  typename Root::Reader read() {
    open();
    return reader_->getRoot<Root>();
  }
  // Descriptors that have come with it, and belong to it until they are taken.
  size_t descriptors() const { return count_; }
  Vector<int> take_descriptors();  // all

 private:
  void open();
  void drop();
  const bool takes_descriptors_;
  bool can_throw_ = false;  // what libkj keeps of the thread is there
  size_t bytes_ = 0;   // there
  size_t wanted_ = 8;  // of all, as far as is known
  size_t count_ = 0;
  int descriptors_[kMostDescriptors];
  kj::ArrayPtr<const capnp::word> segment_;
  std::optional<capnp::SegmentArrayMessageReader> reader_;
  capnp::word* const words_;  // one more than
  const size_t most_;
};

// With room for messages of so many words.
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
