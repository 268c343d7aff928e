// Waits end by their time-outs although the system's clock is set back by an hour in the middle of
// them.
//
// The program's own clock_gettime, gettimeofday and time replace the C library's, also for the
// library. By this system clock it is an hour later than in the kernel. A deadline computed on it
// is reached an hour late, as after setting it back. The steady clock can be slowed down: what then
// happens has waited for no time. When an unresponsive rank is lost, the other ranks continue at
// once. A process that serves an engine is a fork of this one and has both clocks. An alarm ends a
// wait that hangs, and the program with it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string>
#include <thread>

#include "base/condition.h"
#include "frugal.h"
#ifdef FRUGAL_CONTROLLER
#include "controller.h"
#include "support/never.h"
#endif

namespace {

std::atomic<long> g_ahead{0};  // seconds

// The steady clock of this program and its forks: it can be made 1000 times slower, and be set
// forward.
struct Steady {
  std::atomic<int64_t> slow_since{0}, jumped{0};  // ns; 0: it is the kernel's
};
Steady* g_steady = nullptr;  // shared; null before main()

int Real(clockid_t id, timespec* t) { return static_cast<int>(syscall(SYS_clock_gettime, id, t)); }

}  // namespace

extern "C" {
int clock_gettime(clockid_t id, timespec* t) noexcept {
  const int r = Real(id, t);
  if (r == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += g_ahead.load();
  if (r == 0 && id == CLOCK_MONOTONIC && g_steady) {
    if (const int64_t since = g_steady->slow_since.load()) {
      const int64_t real = t->tv_sec * 1'000'000'000 + t->tv_nsec;
      const int64_t ns = since + (real - since) / 1000 + g_steady->jumped.load();
      *t = {ns / 1'000'000'000, ns % 1'000'000'000};
    }
  }
  return r;
}
int gettimeofday(timeval* t, void*) noexcept {
  timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  *t = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}
time_t time(time_t* out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
}

namespace {

std::string Error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}
#define OK(call) ASSERT_EQ(FRUGAL_OK, (call)) << #call << ": " << Error()

// Ends the program where a wait takes the hour. (By another clock: alarms are not set back.)
class Clock : public testing::Test {
 protected:
  Clock() {
    alarm(120);
    g_ahead = 3600;
  }
  ~Clock() override {
    g_ahead = 0;
    g_steady->slow_since = g_steady->jumped = 0;
    alarm(0);
  }
};

frugal_table* Table(frugal_engine* e) {
  frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
  c.name = "t";
  c.rows = 10;
  c.dim = 4;
  frugal_table* t = nullptr;
  EXPECT_EQ(FRUGAL_OK, frugal_table_create(e, &c, &t)) << Error();
  return t;
}

frugal_trainer* Join(frugal_engine* e, uint32_t rank) {
  frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
  c.rank = rank;
  frugal_trainer* t = nullptr;
  EXPECT_EQ(FRUGAL_OK, frugal_trainer_create(e, &c, &t)) << Error();
  return t;
}

// What is waited for never comes.
void Waits(frugal_engine* e) {
  frugal_table* table = Table(e);
  frugal_trainer *waits = Join(e, 0), *other = Join(e, 1);
  for (frugal_trainer* t : {waits, other}) OK(frugal_step_begin(t, 0, kNeverMs));
  OK(frugal_step_end(waits, 0, 0));
  EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_step_begin(waits, 1, 100));
  const uint64_t key = 1;
  float row[4];
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = &key;
  op.count = 1;
  op.rows_out = row;
  EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_read(e, waits, &op, 1, 100));
  OK(frugal_step_end(other, 0, 0));
  EXPECT_EQ(FRUGAL_OK, frugal_read(e, nullptr, &op, 1, kNeverMs));
}

TEST_F(Clock, TheTestsOwn) {
  timespec mine, kernel;
  ASSERT_EQ(0, Real(CLOCK_REALTIME, &kernel));
  ASSERT_EQ(0, clock_gettime(CLOCK_REALTIME, &mine));
  EXPECT_GE(mine.tv_sec - kernel.tv_sec, 3600);
  EXPECT_GE(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now()) - kernel.tv_sec,
            3600);
}

TEST_F(Clock, Conditions) {
  frugal::Condition condition;
  std::mutex mu;
  std::unique_lock<std::mutex> lock(mu);
  EXPECT_FALSE(condition.wait_until(lock, frugal::now_ns() + 50'000'000, [] { return false; }));
  EXPECT_TRUE(condition.wait_until(lock, 0, [] { return true; }));
  frugal::TimedMutex turn;
  ASSERT_TRUE(turn.try_lock());
  EXPECT_FALSE(turn.try_lock());
  EXPECT_FALSE(turn.try_lock_until(frugal::now_ns() + 50'000'000));
  std::thread next([&] { EXPECT_TRUE(turn.try_lock_until(UINT64_MAX)); });
  turn.unlock();
  next.join();
  turn.unlock();
  EXPECT_TRUE(turn.try_lock_until(0));
}

TEST_F(Clock, InThisProcess) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = 2;
  frugal_engine* e = nullptr;
  OK(frugal_open(&c, &e));
  Waits(e);
  // Threads of the engine that have nothing to do sleep, and are woken all the same when it is
  // closed.
  OK(frugal_close(e));
}

#ifdef FRUGAL_CONTROLLER

// A process of its own, which serves an engine until the other end of its pipe is closed.
class Host {
 public:
  Host(const std::string& address, int64_t timeout_ms) {
    int up[2], down[2];
    if (pipe2(up, O_CLOEXEC) || pipe2(down, O_CLOEXEC)) std::abort();
    pid_ = fork_child();
    if (pid_ == 0) {
      close(up[1]);
      close(down[0]);
      frugal_config c = FRUGAL_CONFIG_INIT;
      c.world_size = 2;
      c.backing = FRUGAL_BACKING_SHM;
      c.timeout_ms = timeout_ms;
      frugal_engine* e = nullptr;
      if (frugal_open(&c, &e) || frugal_serve(e, address.c_str())) _exit(1);
      char byte = 1;
      if (write(down[1], &byte, 1) != 1) _exit(2);
      while (read(up[0], &byte, 1) > 0) {
      }
      _exit(frugal_close(e) ? 3 : 0);
    }
    close(up[0]);
    close(down[1]);
    pipe_ = up[1];
    char byte = 0;
    serves_ = read(down[0], &byte, 1) == 1;
    close(down[0]);
  }
  ~Host() {
    kill(pid_, SIGCONT);
    close(pipe_);
    int status = 0;
    waitpid(pid_, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  pid_t pid() const { return pid_; }
  bool serves() const { return serves_; }

 private:
  pid_t pid_;
  int pipe_;
  bool serves_;
};

int32_t Attach(const std::string& address, int64_t timeout_ms, frugal_engine** e) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = 2;
  c.service = address.c_str();
  c.timeout_ms = timeout_ms;
  return frugal_open(&c, e);
}

TEST_F(Clock, Attached) {
  const Folder folder;
  frugal_engine* e = nullptr;
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, Attach(folder.address(), 100, &e));
  Host host(folder.address(), kNeverMs);
  ASSERT_TRUE(host.serves());
  OK(Attach(folder.address(), kNeverMs, &e));
  Waits(e);
  OK(frugal_close(e));
}

// A process that joins as rank 1, begins step 0, and is stopped.
void SilentRank(const std::string& address, pid_t* unresponsive) {
  *unresponsive = fork_child();
  if (*unresponsive == 0) {
    frugal_engine* e = nullptr;
    if (Attach(address, kNeverMs, &e)) _exit(1);
    frugal_trainer* t = Join(e, 1);
    if (!t || frugal_step_begin(t, 0, kNeverMs)) _exit(2);
    raise(SIGSTOP);
    _exit(3);
  }
  int status = 0;
  ASSERT_EQ(*unresponsive, waitpid(*unresponsive, &status, WUNTRACED));
  ASSERT_TRUE(WIFSTOPPED(status)) << status;
}

// A rank that says nothing is lost after the engine's time-out.
TEST_F(Clock, ASilentRank) {
  const Folder folder;
  Host host(folder.address(), 2000);
  ASSERT_TRUE(host.serves());
  pid_t unresponsive;
  ASSERT_NO_FATAL_FAILURE(SilentRank(folder.address(), &unresponsive));
  frugal_engine* e = nullptr;
  OK(Attach(folder.address(), kNeverMs, &e));
  frugal_trainer* t = Join(e, 0);
  OK(frugal_step_begin(t, 0, kNeverMs));
  OK(frugal_step_end(t, 0, 0));
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(t, 1, FRUGAL_TIMEOUT_INFINITE));
  kill(unresponsive, SIGKILL);
  waitpid(unresponsive, nullptr, 0);
  OK(frugal_close(e));
}

// An unresponsive rank is lost when the engine's time-out has passed by its own clock, not before.
// From then on another trainer can take the rank, and all go on. The clock almost stops meanwhile,
// so a thread that waited for a time would wait for ever.
TEST_F(Clock, OthersGoOnAtOnceWhenASilentRankIsLost) {
  const Folder folder;
  Host host(folder.address(), 2000);
  ASSERT_TRUE(host.serves());
  pid_t unresponsive;
  ASSERT_NO_FATAL_FAILURE(SilentRank(folder.address(), &unresponsive));
  frugal_engine *e = nullptr, *other = nullptr;
  OK(Attach(folder.address(), kNeverMs, &e));
  frugal_trainer* ranks[2] = {Join(e, 0)};
  OK(frugal_step_begin(ranks[0], 0, kNeverMs));
  OK(frugal_step_end(ranks[0], 0, 0));
  g_steady->slow_since = static_cast<int64_t>(frugal::now_ns());
  EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_step_begin(ranks[0], 1, 1));  // it is waited for from now on
  for (int calls = 0; calls < 6; ++calls) {  // at once it would be a machine that has stood still
    g_steady->jumped += 300'000'000;
    EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_step_begin(ranks[0], 1, 1));
  }
  g_steady->jumped += 200'000'000;
  const uint64_t due = frugal::now_ns();
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(ranks[0], 1, 20));
  EXPECT_NE(Error().find("rank 1"), std::string::npos) << Error();
  OK(Attach(folder.address(), kNeverMs, &other));
  ranks[1] = Join(other, 1);
  for (uint64_t step = 0; step < 10; ++step) {
    for (frugal_trainer* t : ranks) OK(frugal_step_begin(t, step, 20));
    for (frugal_trainer* t : ranks) OK(frugal_step_end(t, step, 0));
  }
  EXPECT_LT(frugal::now_ns() - due, 2'000'000'000u);
  kill(unresponsive, SIGKILL);
  waitpid(unresponsive, nullptr, 0);
  OK(frugal_close(other));
  OK(frugal_close(e));
}

// Calls on the control socket, and on the rings, when the controller does not reply.
TEST_F(Clock, AStoppedController) {
  const Folder folder;
  Host host(folder.address(), kNeverMs);
  ASSERT_TRUE(host.serves());
  frugal_engine* e = nullptr;
  int32_t attached;
  do  // the time-out is short for what comes below, and a busy machine may take longer to attach
    attached = Attach(folder.address(), 300, &e);
  while (attached == FRUGAL_ERR_TIMEOUT);
  OK(attached);
  ASSERT_EQ(0, kill(host.pid(), SIGSTOP));
  int status = 0;
  ASSERT_EQ(host.pid(), waitpid(host.pid(), &status, WUNTRACED));
  uint64_t step;
  frugal_stats stats;
  stats.struct_size = sizeof stats;
  EXPECT_NE(FRUGAL_OK, frugal_committed_step(e, &step));
  EXPECT_NE(FRUGAL_OK, frugal_get_stats(e, &stats));
  EXPECT_NE(FRUGAL_OK, frugal_flush(e, 100));
  EXPECT_EQ(FRUGAL_OK, frugal_close(e)) << Error();
}

#endif

}  // namespace

int main(int argc, char** argv) {
  void* shared =
      mmap(nullptr, sizeof(Steady), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  g_steady = new (shared) Steady;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
