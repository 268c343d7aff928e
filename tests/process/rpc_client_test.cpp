// The calls of an attached process over its channel, with a controller that refuses, replies
// unasked, stops, disconnects or dies.
//
// The test is the other side of the channel.
#include "process/rpc_client.h"

#include <string>
#include <thread>

#include "peers.h"
#include "served.h"

namespace frugal {
namespace {

constexpr size_t kRing = 4096;
constexpr uint64_t kGrace = 5'000'000'000;

class TalkTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(Channel::create(kRing, nullptr, &controller));
    std::unique_ptr<Channel> trainer;
    EXPECT_FALSE(rpc.opened());
    ASSERT_OK(Channel::attach(dup(controller->up_fd()), dup(controller->down_fd()), -1, &trainer));
    rpc.open(std::move(trainer));
    EXPECT_TRUE(rpc.opened());
  }
  // The controller's reply, which may be there before the request.
  void answer(Call call, uint64_t sequence, Status status = FRUGAL_OK, uint64_t arg = 0,
              const std::string& payload = "") {
    Header h{};
    h.type = static_cast<uint32_t>(call);
    h.sequence = sequence;
    h.status = static_cast<uint32_t>(status);
    h.args[0] = arg;
    h.args[4] = ~arg;
    const Piece piece{payload.data(), payload.size()};
    ASSERT_OK(controller->send(h, &piece, 1, kNever));
  }
  static std::string failed(int32_t system, int32_t device, const std::string& text) {
    const Failure f{system, device};
    return std::string(reinterpret_cast<const char*>(&f), sizeof f) + text;
  }
  // The message that the caller receives: "" where all is well.
  static std::string told(Status s, frugal_error* error = nullptr) {
    frugal_error e;
    end_call(s);
    last_error(&e);
    if (error) *error = e;
    return s == FRUGAL_OK ? "" : std::string(status_name(s)) + ": " + e.message;
  }
  std::string ask(Exchange e) { return told(rpc.ask(e, nothing_more)); }
  // For a request whose reply has begun to come.
  std::string take(const Header& h, Exchange& e, bool* answered) {
    return told(rpc.take_answer(h, kNever, e, nothing_more, answered));
  }
  static void expect_in(const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }

  Asker asker{FRUGAL_TIMEOUT_INFINITE};
  std::unique_ptr<Channel> controller;
  RpcClient rpc{asker.controller()};
};

const Exchange kFlush{Call::kFlush, {1}, {}};
constexpr char kBroken[] = "the controller broke the protocol: a reply to no request";
constexpr char kCut[] = "is gone, or its channel was cut";

// --- Requests and replies ------------------------------------------------------------------------

TEST_F(TalkTest, ARequestHasItsCallAndItsPieces) {
  for (uint64_t sequence : {1, 2}) {
    Exchange e{Call::kPut, {1, 2, 3, 4, 5}, {}};
    e.add("none", 0);
    e.add("abc", 3);
    e.add("de", 2);
    EXPECT_EQ(e.pieces.size(), 2u);
    ASSERT_OK(rpc.request(e));
    Header h;
    ASSERT_OK(controller->receive(&h, kNever));
    EXPECT_EQ(h.type, static_cast<uint32_t>(Call::kPut));
    EXPECT_EQ(h.sequence, sequence);
    EXPECT_GE(h.status, 1u);  // a processor
    for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(h.args[i], i + 1);
    char payload[5];
    ASSERT_EQ(h.payload, sizeof payload);
    ASSERT_OK(controller->read(payload, sizeof payload, kNever));
    EXPECT_EQ(std::string(payload, 5), "abcde");
  }
}

TEST_F(TalkTest, AnAnswerHasItsArgumentsAndItsPayload) {
  answer(Call::kGet, 1, FRUGAL_OK, 42, "payload");
  Exchange e{Call::kGet, {1, 2, 3, 4, 5}, {}};
  std::string got;
  ASSERT_OK(rpc.ask(e, [&](Channel& channel, uint64_t bytes, uint64_t until) {
    EXPECT_EQ(until, kNever);
    got.resize(bytes);
    return channel.read(got.data(), bytes, until);
  }));
  EXPECT_EQ(got, "payload");
  EXPECT_EQ(e.args[0], 42u);
  EXPECT_EQ(e.args[4], ~uint64_t{42});
  // The unread rest of a reply is released.
  answer(Call::kGet, 2, FRUGAL_OK, 0, "unread");
  answer(Call::kFlush, 3);
  EXPECT_EQ(ask({Call::kGet, {}, {}}), "");
  EXPECT_EQ(ask(kFlush), "");
}

// More than the ring has room for, in both directions.
TEST_F(TalkTest, AskAndAnswerAreLongerThanTheRing) {
  const std::string sent(5 * kRing + 3, 's'), wanted(7 * kRing + 5, 'w');
  std::string received;
  std::thread serves([&] {
    Header h;
    ASSERT_OK(controller->receive(&h, kNever));
    received.resize(h.payload);
    ASSERT_OK(controller->read(received.data(), h.payload, kNever));
    answer(Call::kPut, 1, FRUGAL_OK, 0, wanted);
  });
  Exchange e{Call::kPut, {}, {}};
  e.add(sent.data(), sent.size());
  std::string got;
  EXPECT_OK(rpc.ask(e, [&](Channel& channel, uint64_t bytes, uint64_t until) {
    got.resize(bytes);
    return channel.read(got.data(), bytes, until);
  }));
  serves.join();
  EXPECT_EQ(received, sent);
  EXPECT_EQ(got, wanted);
}

TEST_F(TalkTest, MoreIsDoneBetweenARequestAndItsAnswer) {
  Exchange e = kFlush;
  ASSERT_OK(rpc.request(e));
  answer(Call::kFlush, 1, FRUGAL_OK, 9);
  Header h;
  ASSERT_OK(rpc.channel().receive(&h, kNever));
  bool answered = false;
  EXPECT_EQ(take(h, e, &answered), "");
  EXPECT_TRUE(answered);
  EXPECT_EQ(e.args[0], 9u);
}

// The controller knows, and each reply says.
TEST_F(TalkTest, AnswersTellWhetherBothAreOnOneProcessor) {
  uint64_t sequence = 0;
  for (bool together : {true, false, true}) {
    answer(together ? static_cast<Call>(static_cast<uint32_t>(Call::kFlush) | kTogether)
                    : Call::kFlush,
           ++sequence);
    EXPECT_EQ(ask(kFlush), "");
    EXPECT_EQ(rpc.channel().together(), together);
  }
}

// A call that waits for its reply returns the status of the function that reads it.
TEST_F(TalkTest, WhatTakesAnAnswerMayFail) {
  answer(Call::kGet, 1, FRUGAL_OK, 0, "rows");
  answer(Call::kFlush, 2);
  Exchange e{Call::kGet, {}, {}};
  EXPECT_EQ(told(rpc.ask(e,
                         [](Channel&, uint64_t, uint64_t) {
                           return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for %s", "rows");
                         })),
            "FRUGAL_ERR_OUT_OF_MEMORY: no memory for rows");
  EXPECT_EQ(ask(kFlush), "");
}

// --- Refusals ------------------------------------------------------------------------------------

TEST_F(TalkTest, ARefusalComesAsTheControllerMetIt) {
  answer(Call::kFlush, 1, FRUGAL_ERR_NAN, 7, failed(12, 34, "row 5 is none"));
  answer(Call::kFlush, 2);
  Exchange e = kFlush;
  frugal_error error;
  EXPECT_EQ(told(rpc.ask(e, nothing_more), &error), "FRUGAL_ERR_NAN: row 5 is none");
  EXPECT_EQ(error.system_code, 12);
  EXPECT_EQ(error.device_code, 34);
  EXPECT_EQ(e.args[0], 1u);  // as it was asked
  EXPECT_EQ(ask(kFlush), "");
}

TEST_F(TalkTest, ARefusalIsWhatTheControllerHasAnswered) {
  Exchange e = kFlush;
  ASSERT_OK(rpc.request(e));
  answer(Call::kFlush, 1, FRUGAL_ERR_NAN, 0, failed(0, 0, "no number"));
  Header h;
  ASSERT_OK(rpc.channel().receive(&h, kNever));
  bool answered = false;
  EXPECT_EQ(take(h, e, &answered), "FRUGAL_ERR_NAN: no number");
  EXPECT_TRUE(answered);
}

// A text without an end, a long one, and none: the next reply is read from its beginning.
TEST_F(TalkTest, ARefusalMayHaveAnyText) {
  uint64_t sequence = 0;
  for (size_t length : {0, 1, 510, 511, 512, 5000}) {
    std::thread serves([&, length] {
      answer(Call::kFlush, sequence + 1, FRUGAL_ERR_NAN, 0, failed(0, 0, std::string(length, 'x')));
      answer(Call::kFlush, sequence + 2);
    });
    const std::string text = ask(kFlush), prefix = "FRUGAL_ERR_NAN: ";
    EXPECT_EQ(text.substr(0, prefix.size()), prefix);
    EXPECT_EQ(std::string(length, 'x').find(text.substr(prefix.size())), 0u) << text;
    EXPECT_LE(text.size(), prefix.size() + 511);
    if (length) {
      EXPECT_GT(text.size(), prefix.size());
    }
    EXPECT_EQ(ask(kFlush), "");
    serves.join();
    sequence += 2;
  }
  frugal_error error;
  Exchange e = kFlush;
  answer(Call::kFlush, sequence + 1, FRUGAL_ERR_NAN, 0, "short");  // than its codes
  EXPECT_EQ(told(rpc.ask(e, nothing_more), &error), "FRUGAL_ERR_NAN: ");
  EXPECT_EQ(error.system_code, 0);
  answer(Call::kFlush, sequence + 2);
  EXPECT_EQ(ask(kFlush), "");
}

// The engine there is closed, and not this one.
TEST_F(TalkTest, AControllerThatStopsIsLost) {
  answer(Call::kFlush, 1, FRUGAL_ERR_CLOSED, 0, failed(0, 0, "the engine was closed"));
  expect_in("PEER_LOST: the controller is stopping", ask(kFlush));
  EXPECT_FALSE(rpc.channel().is_cut());
}

// --- Replies without a request -------------------------------------------------------------------

TEST_F(TalkTest, AnAnswerOfAnotherCallBreaksTheProtocol) {
  answer(Call::kGet, 1);
  expect_in(kBroken, ask(kFlush));
  ASSERT_TRUE(rpc.channel().is_cut());
  expect_in(kCut, ask(kFlush));
}

TEST_F(TalkTest, AnAnswerOfAnotherRequestBreaksTheProtocol) {
  Exchange e = kFlush;
  ASSERT_OK(rpc.request(e));  // no thread waits for its reply
  answer(Call::kFlush, 1);
  expect_in(kBroken, ask(kFlush));
  EXPECT_TRUE(rpc.channel().is_cut());
}

// A request that could not be made has its number all the same.
TEST_F(TalkTest, AnAnswerToWhatWasNotAskedBreaksTheProtocol) {
  Exchange e = kFlush;
  ASSERT_OK(rpc.request(e));
  answer(Call::kFlush, 2);
  Header h;
  ASSERT_OK(rpc.channel().receive(&h, kNever));
  bool answered = true;
  expect_in(kBroken, take(h, e, &answered));
  EXPECT_FALSE(answered);
}

// --- Time ----------------------------------------------------------------------------------------

TEST_F(TalkTest, AnAnswerMayBeLate) {
  EXPECT_EQ(answer_until(0), kGrace);
  EXPECT_EQ(answer_until(kNever - kGrace - 1), kNever - 1);
  EXPECT_EQ(answer_until(kNever - kGrace), kNever);
  EXPECT_EQ(answer_until(kNever), kNever);
  EXPECT_EQ(rpc.overdue(kFlush), kNever);  // with this engine's time-out
  Asker soon(1);
  const RpcClient brief(soon.controller());
  const uint64_t before = soon.controller().deadline().at, answer = brief.overdue(kFlush);
  EXPECT_GE(answer, answer_until(before));
  EXPECT_LE(answer, answer_until(soon.controller().deadline().at));
  Exchange e = kFlush;
  e.until = kNever - kGrace - 5;  // later than the engine's
  EXPECT_EQ(brief.overdue(e), kNever - 5);
  e.until = 1;
  EXPECT_GE(brief.overdue(e), answer_until(before));
}

// Once a reply has begun, the time-out counts anew.
TEST_F(TalkTest, TheRestOfAnAnswerHasItsOwnTime) {
  Exchange e = kFlush;
  for (uint64_t late : {uint64_t{1}, kNever}) {
    Asker soon(1);
    RpcClient brief(soon.controller());
    std::unique_ptr<Channel> there, here;
    ASSERT_OK(Channel::create(kRing, nullptr, &there));
    ASSERT_OK(Channel::attach(dup(there->up_fd()), dup(there->down_fd()), -1, &here));
    brief.open(std::move(here));
    ASSERT_OK(brief.request(e));
    Header h{};
    h.type = static_cast<uint32_t>(Call::kFlush);
    h.sequence = 1;
    const uint64_t before = answer_until(soon.controller().deadline().at);
    bool answered;
    ASSERT_OK(brief.take_answer(
        h, late, e,
        [&](Channel&, uint64_t, uint64_t until) {
          EXPECT_GE(until, std::max(before, late));
          EXPECT_TRUE(late == kNever || until < kNever);
          return FRUGAL_OK;
        },
        &answered));
  }
}

TEST_F(TalkTest, ANoneAnswererIsAsGoodAsGone) {
  EXPECT_EQ(rpc.not_answered(FRUGAL_OK), FRUGAL_OK);
  EXPECT_EQ(rpc.not_answered(FRUGAL_ERR_NAN), FRUGAL_ERR_NAN);
  EXPECT_EQ(rpc.not_answered(FRUGAL_ERR_PEER_LOST), FRUGAL_ERR_PEER_LOST);
  EXPECT_FALSE(rpc.channel().is_cut());
  EXPECT_EQ(told(rpc.not_answered(FRUGAL_ERR_TIMEOUT)),
            "FRUGAL_ERR_PEER_LOST: the controller's process does not respond: close the engine, or "
            "the trainer");
  EXPECT_TRUE(rpc.channel().is_cut());  // what it says later fits to nothing
}

// --- The controller goes away --------------------------------------------------------------------

// Why a channel fails: it is cut without more, the engine is closed, or the controller has ended.
enum class End { kCut, kClosed, kLost };

// The controller is a process of its own, which is there before this one has threads.
class TalkUntil : public testing::TestWithParam<End> {
 protected:
  TalkUntil()
      : process_([this] {
          ToldHandler handler;
          std::unique_ptr<ControlServer> server;
          if (ControlServer::start(folder_.address().c_str(), &handler, &server)) return 1;
          for (;;) pause();
        }) {}
  // Then `where` makes a call, and returns the message that the caller receives.
  template <class Where>
  void at(Where where) {
    Asker asker;
    asker.attach(folder_.address());
    std::unique_ptr<Channel> there, here;
    ASSERT_OK(Channel::create(kRing, nullptr, &there));
    ASSERT_OK(Channel::attach(dup(there->up_fd()), dup(there->down_fd()), -1, &here));
    RpcClient rpc(asker.controller());
    rpc.open(std::move(here));
    const auto end = [&] {
      if (GetParam() == End::kClosed) asker.controller().begin_close();
      if (GetParam() == End::kLost) {
        process_.Kill(SIGKILL);
        EXPECT_TRUE(asker.controller().see_end(FRUGAL_ERR_PEER_LOST));
        EXPECT_EQ(asker.cuts(), 1);
      }
      rpc.channel().cut();
    };
    const Status s = where(rpc, *there, end);
    const bool closed = GetParam() == End::kClosed;
    EXPECT_EQ(s, closed ? FRUGAL_ERR_CLOSED : FRUGAL_ERR_PEER_LOST);
    const std::string text = LastMessage(), why = closed ? "the engine was closed"
                                                  : GetParam() == End::kLost
                                                      ? "the controller is gone: open the engine"
                                                      : kCut;
    EXPECT_NE(text.find(why), std::string::npos) << text;
  }
  // The end comes when the controller has the request's header.
  template <class End>
  static Status ask_until(RpcClient& rpc, Channel& there, End end, Exchange e) {
    std::thread serves([&] {
      Header h;
      EXPECT_OK(there.receive(&h, kNever));
      end();
    });
    const Status s = rpc.ask(e, nothing_more);
    serves.join();
    return s;
  }
  // A message of which only as much comes as the ring has room for.
  static void send_begun(Channel& there, Status status, size_t payload) {
    EXPECT_EQ(send(there, status, payload, 1), FRUGAL_ERR_TIMEOUT);
  }
  static Status send(Channel& there, Status status, size_t payload, uint64_t until) {
    Header h{};
    h.type = static_cast<uint32_t>(Call::kFlush);
    h.sequence = 1;
    h.status = static_cast<uint32_t>(status);
    const std::string bytes(payload, '\0');
    const Piece piece{bytes.data(), bytes.size()};
    return there.send(h, &piece, 1, until);
  }

 private:
  const Folder folder_;
  Child process_;
};

TEST_P(TalkUntil, BeforeTheRequest) {
  at([](RpcClient& rpc, Channel&, auto end) {
    end();
    return rpc.request(kFlush);
  });
}

TEST_P(TalkUntil, BeforeTheAnswer) {
  at([](RpcClient& rpc, Channel& there, auto end) { return ask_until(rpc, there, end, kFlush); });
}

TEST_P(TalkUntil, InTheMiddleOfTheRequest) {
  at([](RpcClient& rpc, Channel& there, auto end) {
    const std::string more(3 * kRing, 'm');
    Exchange e = kFlush;
    e.add(more.data(), more.size());
    return ask_until(rpc, there, end, e);
  });
}

TEST_P(TalkUntil, InTheMiddleOfTheAnswer) {
  at([](RpcClient& rpc, Channel& there, auto end) {
    send_begun(there, FRUGAL_OK, 2 * kRing);
    Exchange e = kFlush;
    return rpc.ask(e, [&](Channel& channel, uint64_t bytes, uint64_t until) {
      EXPECT_EQ(bytes, 2 * kRing);
      EXPECT_OK(channel.skip(100, until));
      end();
      return channel.skip(bytes - 100, until);
    });
  });
}

// What was refused is not known then.
TEST_P(TalkUntil, InTheMiddleOfARefusal) {
  at([](RpcClient& rpc, Channel& there, auto end) {
    EXPECT_OK(rpc.request(kFlush));
    EXPECT_OK(send(there, FRUGAL_OK, kRing - 256, kNever));  // leaves little room
    send_begun(there, FRUGAL_ERR_NAN, kRing);
    Header h;
    for (int i = 0; i < 2; ++i) EXPECT_OK(rpc.channel().receive(&h, kNever));
    EXPECT_EQ(h.payload, kRing);
    end();
    Exchange e = kFlush;
    bool answered = true;
    const Status s = rpc.take_answer(h, kNever, e, nothing_more, &answered);
    EXPECT_FALSE(answered);
    return s;
  });
}

INSTANTIATE_TEST_SUITE_P(EachEnd, TalkUntil, testing::Values(End::kCut, End::kClosed, End::kLost));

// The controller ends its side in good order: what it has sent before is there.
TEST_F(TalkTest, AChannelThatTheControllerCloses) {
  answer(Call::kFlush, 1);
  controller->close();
  EXPECT_EQ(ask(kFlush).substr(0, 20), "FRUGAL_ERR_PEER_LOST");
}

}  // namespace
}  // namespace frugal
