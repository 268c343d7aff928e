// An attached process joins as a rank while the controller refuses, replies unasked, stops,
// disconnects or dies at each point of the call.
//
// Also: an engine that is closed meanwhile.
#include "process/joins.h"

#include <sys/socket.h>

#include <atomic>
#include <barrier>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "served.h"

namespace frugal {
namespace {

constexpr uint32_t kRanks = 4;
// What the controller does instead of a reply; other values are statuses.
constexpr Status kGoes = 1;   // ends the connection
constexpr Status kWaits = 2;  // for the engine's closing, which comes meanwhile

class JoinsTest : public testing::Test {
 protected:
  void SetUp() override {
    handler.answer = [this](Peer& peer, const std::string& call, JoinReply* reply) {
      return answered(peer, call, reply);
    };
    ASSERT_OK(ControlServer::start(folder.address().c_str(), &handler, &server));
    asker.attach(folder.address());
    joins.open(kRanks);
  }
  Status answered(Peer& peer, const std::string& call, JoinReply* reply) {
    const Status s = note(call);
    if (s == kGoes) shutdown(peer.socket, SHUT_RDWR);
    if (s == kWaits) {
      asker.controller().begin_close();
      asker.controller().disconnect();
    }
    if (s != FRUGAL_OK) return fail(s < 0 ? s : FRUGAL_ERR_INTERNAL, "so says the test");
    if (reply) reply->numbers = {7, 9};
    return FRUGAL_OK;
  }
  // The status of the next reply; FRUGAL_OK where the test gives none.
  Status note(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex);
    calls += calls.empty() ? call : ", " + call;
    if (answers.empty()) return FRUGAL_OK;
    const Status s = answers.front();
    answers.pop_front();
    return s;
  }
  void begin(std::deque<Status> with) {
    std::lock_guard<std::mutex> lock(mutex);
    answers = std::move(with);
    calls.clear();
  }
  // The requests since begin(). A connection's end does not synchronize with the thread that has
  // served it: the lock orders that thread's notes before this call.
  std::string asked() {
    std::lock_guard<std::mutex> lock(mutex);
    return calls;
  }
  // "" where it is well.
  std::string join(uint32_t rank, std::deque<Status> with = {}) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = rank;
    begin(std::move(with));
    reply = {};
    const RankJoins::Scope one(joins, rank);
    return said(joins.join(config, &reply, [&] { return note("room") == FRUGAL_OK; }));
  }
  std::string lose(uint32_t rank, uint64_t joined, std::deque<Status> with = {}) {
    begin(std::move(with));
    const RankJoins::Scope one(joins, rank);
    return said(joins.lose(rank, joined));
  }
  static std::string said(Status s) {
    if (s == FRUGAL_OK) return "";
    return std::string(status_name(s)) + ": " + LastMessage();
  }
  static std::string so_says(Status s) {
    return std::string(status_name(s)) + ": so says the test";
  }

  const Folder folder;
  ToldHandler handler;
  std::mutex mutex;
  std::deque<Status> answers;
  std::string calls;
  JoinReply reply;
  Asker asker;
  RankJoins joins{asker.controller()};
  std::unique_ptr<ControlServer> server;  // the first to end
};

// --- One at a time -------------------------------------------------------------------------------

TEST_F(JoinsTest, OneIsAloneWithARankUntilItEnds) {
  for (int again = 0; again < 2; ++again) {
    const RankJoins::Scope first(joins, 1);
    EXPECT_TRUE(first.alone());
    for (int more = 0; more < 2; ++more) {  // nor does the end of one that is not make room
      const RankJoins::Scope second(joins, 1);
      EXPECT_FALSE(second.alone());
    }
    const RankJoins::Scope of_another(joins, 0), of_the_last(joins, kRanks - 1);
    EXPECT_TRUE(of_another.alone());
    EXPECT_TRUE(of_the_last.alone());
  }
}

TEST_F(JoinsTest, OneOfManyThreadsIsAlone) {
  constexpr int kThreads = 6, kRounds = 200;
  std::barrier all(kThreads);
  std::atomic<int> alone[kRounds][2] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (auto& round : alone) {
        all.arrive_and_wait();
        const RankJoins::Scope one(joins, t % 2);
        if (one.alone()) ++round[t % 2];
        all.arrive_and_wait();
      }
    });
  for (std::thread& t : threads) t.join();
  for (auto& round : alone)
    for (auto& of_rank : round) ASSERT_EQ(of_rank, 1);
}

// --- What the controller replies -----------------------------------------------------------------

TEST_F(JoinsTest, GivesWhatTheControllerAnswers) {
  EXPECT_EQ(join(3), "");
  EXPECT_EQ(asked(), "join 3");
  EXPECT_EQ(reply.numbers, (Vector<uint64_t>{7, 9}));
}

// Nothing has failed before, so nothing is lost, and no request is repeated.
TEST_F(JoinsTest, TellsWhatTheControllerRefuses) {
  for (Status s : {FRUGAL_ERR_EXISTS, FRUGAL_ERR_TIMEOUT, FRUGAL_ERR_OUT_OF_MEMORY,
                   FRUGAL_ERR_INVALID_ARGUMENT, FRUGAL_ERR_PEER_LOST, FRUGAL_ERR_UNHEALTHY}) {
    EXPECT_EQ(join(1, {s}), so_says(s));
    EXPECT_EQ(asked(), "join 1");
    EXPECT_TRUE(reply.numbers.empty());
  }
}

TEST_F(JoinsTest, MakesRoomOnceWhereThereIsAny) {
  const std::string busy = so_says(FRUGAL_ERR_BUSY);
  EXPECT_EQ(join(1, {FRUGAL_ERR_BUSY}), "");
  EXPECT_EQ(asked(), "join 1, room, join 1");
  EXPECT_EQ(join(1, {FRUGAL_ERR_BUSY, FRUGAL_ERR_NOT_FOUND}), busy);
  EXPECT_EQ(asked(), "join 1, room");
  EXPECT_EQ(join(1, {FRUGAL_ERR_BUSY, FRUGAL_OK, FRUGAL_ERR_BUSY}), busy);
  EXPECT_EQ(asked(), "join 1, room, join 1");
}

// --- Calls that have failed ----------------------------------------------------------------------

TEST_F(JoinsTest, LosesBeforeWhatAFailedCallMayHaveJoined) {
  for (Status why : {FRUGAL_ERR_TIMEOUT, FRUGAL_ERR_OUT_OF_MEMORY}) {
    joins.failed(1, why, false);
    EXPECT_EQ(join(2, {FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
    EXPECT_EQ(asked(), "join 2");  // that is of another rank
    EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS}), "");
    EXPECT_EQ(asked(), "join 1, lose 1 any, join 1");
    // Now it is known whose it is.
    EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
    EXPECT_EQ(asked(), "join 1");
  }
}

// Not even where the controller says at once that the rank was free.
TEST_F(JoinsTest, KnowsWhoHasARankThatItHasJoined) {
  joins.failed(1, FRUGAL_ERR_TIMEOUT, false);
  EXPECT_EQ(join(1), "");
  EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
  EXPECT_EQ(asked(), "join 1");
}

TEST_F(JoinsTest, LosesNothingThatIsAnothers) {
  for (Status why : {FRUGAL_ERR_EXISTS, FRUGAL_ERR_BUSY, FRUGAL_ERR_PEER_LOST, FRUGAL_ERR_CLOSED,
                     FRUGAL_ERR_INVALID_ARGUMENT})
    joins.failed(1, why, false);
  joins.failed(1, FRUGAL_ERR_TIMEOUT, true);  // a trainer of this process has it
  EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
  EXPECT_EQ(asked(), "join 1");
}

TEST_F(JoinsTest, AnotherHasTheRankThatWasLost) {
  joins.failed(1, FRUGAL_ERR_TIMEOUT, false);
  EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS, FRUGAL_OK, FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
  EXPECT_EQ(asked(), "join 1, lose 1 any, join 1");
  EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
  EXPECT_EQ(asked(), "join 1");
}

TEST_F(JoinsTest, TriesAgainToLoseWhatItCouldNot) {
  joins.failed(1, FRUGAL_ERR_OUT_OF_MEMORY, false);
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS, FRUGAL_ERR_TIMEOUT}), so_says(FRUGAL_ERR_TIMEOUT));
    EXPECT_EQ(asked(), "join 1, lose 1 any");
  }
  // Whom the controller does not know has nothing to lose.
  EXPECT_EQ(join(1, {FRUGAL_ERR_EXISTS, FRUGAL_ERR_NOT_FOUND}), "");
  EXPECT_EQ(asked(), "join 1, lose 1 any, join 1");
}

TEST_F(JoinsTest, LosesTheJoinThatItIsTold) {
  EXPECT_EQ(lose(2, 42), "");
  EXPECT_EQ(asked(), "lose 2 42");
  EXPECT_EQ(lose(2, 43, {FRUGAL_ERR_NOT_FOUND}), "");
  EXPECT_EQ(join(2, {FRUGAL_ERR_EXISTS}), so_says(FRUGAL_ERR_EXISTS));
  EXPECT_EQ(asked(), "join 2");
  // What stays taken is lost by the next call that joins, whichever join it was.
  EXPECT_EQ(lose(2, 44, {FRUGAL_ERR_TIMEOUT}), so_says(FRUGAL_ERR_TIMEOUT));
  EXPECT_EQ(join(2, {FRUGAL_ERR_EXISTS}), "");
  EXPECT_EQ(asked(), "join 2, lose 2 any, join 2");
}

// --- The controller goes away --------------------------------------------------------------------

// Of all requests that one call may make, this many get a reply first.
class JoinsAt : public JoinsTest, public testing::WithParamInterface<size_t> {
 protected:
  std::string join_until(Status end) {
    std::deque<Status> with{FRUGAL_ERR_EXISTS, FRUGAL_OK, FRUGAL_ERR_BUSY, FRUGAL_OK};
    with.resize(GetParam());
    with.push_back(end);
    joins.failed(1, FRUGAL_ERR_TIMEOUT, false);
    return join(1, std::move(with));
  }
  std::string calls_until() const {
    return std::string("join 1, lose 1 any, join 1, room, join 1")
        .substr(0, std::vector<size_t>{6, 18, 26, 0, 40}[GetParam()]);
  }
};

TEST_P(JoinsAt, TheEndOfTheConnection) {
  const std::string lost = join_until(kGoes);
  EXPECT_NE(lost.find("PEER_LOST: the controller at " + folder.address()), std::string::npos)
      << lost;
  EXPECT_NE(lost.find("is gone, or has ended the connection"), std::string::npos) << lost;
  EXPECT_EQ(asked(), calls_until());
  // From then on no controller is left to ask.
  EXPECT_EQ(join(1), lost);
  EXPECT_EQ(lose(1, 7), lost);
  EXPECT_EQ(asked(), "");
}

TEST_P(JoinsAt, AControllerThatStops) {
  const std::string stops = join_until(FRUGAL_ERR_CLOSED);
  EXPECT_NE(stops.find("PEER_LOST: the controller is stopping"), std::string::npos) << stops;
  EXPECT_EQ(asked(), calls_until());
}

TEST_P(JoinsAt, TheEngineIsClosed) {
  const std::string closed = join_until(kWaits);
  EXPECT_NE(closed.find("CLOSED: the connection to the controller was closed"), std::string::npos)
      << closed;
  EXPECT_EQ(asked(), calls_until());
  EXPECT_EQ(join(1), closed);
  EXPECT_EQ(lose(1, 7), closed);
  EXPECT_EQ(asked(), "");
}

INSTANTIATE_TEST_SUITE_P(EachPlace, JoinsAt, testing::Values(0, 1, 2, 4));

}  // namespace
}  // namespace frugal
