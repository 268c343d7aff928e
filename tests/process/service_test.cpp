// A controller and its trainer processes when something is wrong: configurations, users, taken
// ranks, and hostile, stopped, forked or memory-starved peers.
//
// All processes of a job stop and continue, or one does before it opens the engine. Declarations
// without replies meet aborts, other calls and a stopped controller. Batches of a replaced trainer
// are covered. A controller, or a process that serves, is asked to stop or is killed, with and
// without pidfds. A tracer counts keys that cross the socket: none. Flush threads go to rest and
// return. Idle processes use no processor time and do not wake up. An observer reads, and each
// change that it requests is refused. frugal-top shows steps, ranks and tables. What a rank has
// submitted counts when the rank is lost, and nothing that its process writes later. Memory of
// large declarations goes back, also while the controller stops.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "controller.h"
#include "frugal.h"
#include "proc.h"
#include "support/never.h"

namespace {

std::string Error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}
bool Says(const char* what) { return Error().find(what) != std::string::npos; }

#define OK(call) ASSERT_EQ(FRUGAL_OK, (call)) << #call << ": " << Error()

// After this time an unresponsive process is taken for lost, in tests that wait for that. It is
// longer than a busy machine lets a process wait for its turn.
constexpr int64_t kSilenceMs = 4000;

frugal_config Config(const std::string& address, int64_t timeout_ms = kNeverMs) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = 2;
  c.timeout_ms = timeout_ms;
  c.service = address.empty() ? nullptr : address.c_str();
  return c;
}
int Open(const std::string& address, frugal_engine** e, int64_t timeout_ms = kNeverMs,
         uint32_t world = 2) {
  frugal_config c = Config(address, timeout_ms);
  c.world_size = world;
  return frugal_open(&c, e);
}
// For one rank. Where the processors have other things to do than to connect in so short a time, it
// is done again.
void OpenPatiently(const std::string& address, frugal_engine** e, int64_t timeout_ms) {
  int status;
  do {
    status = Open(address, e, timeout_ms, 1);
  } while (status == FRUGAL_ERR_TIMEOUT || status == FRUGAL_ERR_PEER_LOST);
  OK(status);
}
std::vector<std::string> Names(frugal_engine* e) {
  std::vector<std::string> names;
  uint64_t cursor = 0;
  char name[256];
  for (size_t size = 1; size > 0;) {
    EXPECT_EQ(FRUGAL_OK, frugal_table_next(e, &cursor, name, sizeof name, &size)) << Error();
    if (size > 0) names.emplace_back(name, size - 1);
  }
  return names;
}

frugal_table_config TableConfig(const char* name, uint64_t rows = 1000) {
  frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
  c.name = name;
  c.rows = rows;
  c.dim = 8;
  return c;
}
int Join(frugal_engine* e, uint32_t rank, frugal_trainer** t, uint32_t flags = 0) {
  frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
  c.rank = rank;
  c.flags = flags;
  return frugal_trainer_create(e, &c, t);
}

// A gradient of ones for a row of 8.
int PushOnes(frugal_trainer* t, frugal_table* table, uint64_t key) {
  const std::vector<float> grads(8, 1);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = &key;
  op.count = 1;
  op.grads = grads.data();
  return frugal_push_grad(t, &op, 1);
}
// Steps until a call fails, and returns its status; `ended` is called after each.
int Train(frugal_trainer* t, frugal_table* table, uint64_t step,
          const std::function<void()>& ended) {
  const uint64_t key = 1;
  float row[8];
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = &key;
  op.count = 1;
  op.rows_out = row;
  for (;; ++step) {
    int status = frugal_step_begin(t, step, -1);
    if (status == FRUGAL_OK) status = frugal_lookup(t, &op, 1);
    if (status == FRUGAL_OK) status = PushOnes(t, table, key);
    if (status == FRUGAL_OK) status = frugal_step_end(t, step, 0);
    ended();
    if (status != FRUGAL_OK) return status;
  }
}

// The test's own process attaches, too; others are forked before it does.
class Service : public testing::Test {
 protected:
  const std::string& address() const { return address_; }
  static int InChild(const std::function<int()>& body) {
    const pid_t pid = fork_child();
    if (pid == 0) _exit(body());
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  const Folder folder_;
  const std::string address_ = folder_.address();
};

// Called when the library begins its watch of other processes, which is when it has attached, and
// has not opened the engine yet.
std::function<void()> g_attached;

TEST_F(Service, WhoStandsStillBeforeItOpensAttachesAgain) {
  ControllerProgram controller(address());
  const long before = descriptors_of(controller.pid());
  int stood = 0;
  g_attached = [&] {
    ++stood;
    while (descriptors_of(controller.pid()) > before) usleep(10'000);  // the connection is ended
  };
  frugal_engine* e = nullptr;
  const int status = Open(address(), &e);
  g_attached = nullptr;
  OK(status);
  EXPECT_EQ(1, stood);
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

TEST_F(Service, NobodyThere) {
  frugal_engine* e = nullptr;
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, Open(address(), &e, 50));
  EXPECT_TRUE(Says("no controller")) << Error();
}

// One declaration that is larger than all others: what it took goes back when it has passed, has
// been cancelled, or its trainer has left, in the controller and in all that are attached.
TEST_F(Service, WhatALargeDeclarationTookGoesBack) {
  constexpr uint64_t kIds = 4000000;
  ControllerProgram controller(address());
  frugal_engine *e, *other;
  OK(Open(address(), &e, kNeverMs, 1));
  OK(Open(address(), &other, kNeverMs, 1));
  frugal_table* table;
  frugal_table_config config = TableConfig("t", kIds);
  config.dim = 1;
  OK(frugal_table_create(e, &config, &table));
  frugal_trainer* t;
  OK(Join(e, 0, &t));
  std::vector<uint64_t> ids(kIds), few(1000);
  for (uint64_t i = 0; i < kIds; ++i) ids[i] = i;
  for (uint64_t i = 0; i < few.size(); ++i) few[i] = i;
  std::vector<float> rows(kIds);
  uint64_t step = 0;
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = few.data();
  op.count = few.size();
  op.rows_out = rows.data();
  auto small_step = [&] {
    OK(frugal_step_begin(t, step, -1));
    OK(frugal_lookup(t, &op, 1));
    OK(frugal_step_end(t, step++, 0));
  };
  for (int i = 0; i < 4; ++i) small_step();
  // The pools keep 64 MiB.
  const long before = resident_kib(controller.pid());
  [[maybe_unused]] const long mine = resident_kib(getpid());
  auto segments = [] { return mapped_of(getpid(), "memfd"); };
  [[maybe_unused]] const long mapped = segments();
  for (const char* how : {"passed", "cancelled", "left"}) {
    SCOPED_TRACE(how);
    frugal_op large = op;
    large.keys = ids.data();
    large.count = kIds;
    frugal_batch* batch;
    OK(frugal_prefetch(t, step + 1, &large, 1, &batch));
    small_step();
    const bool cancelled = how[0] == 'c', left = how[0] == 'l';
    if (cancelled) {
      OK(frugal_prefetch_cancel(t, batch));
    }
    OK(frugal_step_begin(t, step, -1));
    // It is read, by this process in place.
    large.keys = nullptr;
    large.count = 0;
    large.batch = batch;
    if (!cancelled) {
      OK(frugal_lookup(t, &large, 1));
    }
    const long most = resident_kib(controller.pid());
    OK(frugal_step_end(t, step++, 0));
    if (left) {
      OK(frugal_trainer_close(t));
      OK(Join(e, 0, &t));
    }
    for (int i = 0; !left && i < 100; ++i) small_step();
    EXPECT_GT(most, cancelled ? before : before + (80 << 10));
#ifndef FRUGAL_SANITIZED  // which keep what was freed
    // A flush thread may be at work for what was cancelled; when that is done steps go on to pass.
    const long bound = before + (72 << 10);
    for (int i = 0; cancelled && i < 2000 && resident_kib(controller.pid()) >= bound; ++i) {
      usleep(10000);
      small_step();
    }
    EXPECT_LT(resident_kib(controller.pid()), before + (72 << 10)) << before << " to " << most;
    // What is kept is in four segments of 16 MiB at most, and mapped twice here.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (segments() > mapped + 8 && std::chrono::steady_clock::now() < until) usleep(1000);
    EXPECT_LE(segments(), mapped + 8);
    // And the ids of the declaration stay in staging memory.
    EXPECT_LT(resident_kib(getpid()), mine + (110 << 10));
#endif
  }
  OK(frugal_close(other));
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// The controller stops in good order. Once it notifies no process any more, it gives back much
// memory that others have mapped. They read out what is committed all the same.
TEST_F(Service, StoppedWhileMemoryGoesBack) {
  constexpr uint64_t kIds = 4000000;
  ControllerProgram controller(address());
  frugal_engine *e, *other;
  OK(Open(address(), &e, kNeverMs, 1));
  OK(Open(address(), &other, kNeverMs, 1));
  frugal_table *table, *seen;
  frugal_table_config config = TableConfig("t", kIds);
  config.dim = 1;
  config.optimizer.lr = 1;
  OK(frugal_table_create(e, &config, &table));
  OK(frugal_table_find(other, "t", &seen));
  frugal_trainer* t;
  OK(Join(e, 0, &t));
  std::vector<uint64_t> ids(kIds);
  for (uint64_t i = 0; i < kIds; ++i) ids[i] = i;
  const std::vector<float> ones(1000, 1);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = ids.data();
  op.count = ones.size();
  op.grads = ones.data();
  frugal_op large = op;
  large.count = kIds;
  for (uint64_t step = 0; step < 2; ++step) {
    OK(frugal_prefetch(t, step + 1, &large, 1, nullptr));
    OK(frugal_step_begin(t, step, -1));
    OK(frugal_push_grad(t, &op, 1));
    OK(frugal_step_end(t, step, 0));
  }
  EXPECT_EQ(0, controller.end(SIGTERM));
  for (frugal_table* of : {table, seen}) {
    std::vector<float> rows(kIds);
    OK(frugal_get(of, ids.data(), kIds, 0, rows.data(), 0, nullptr));
    for (uint64_t i = 0; i < kIds; ++i) ASSERT_EQ(i < ones.size() ? -2 : 0, rows[i]) << i;
  }
  OK(frugal_close(e));
  OK(frugal_close(other));
}

// Connections without a message keep no process out, however many there are.
TEST_F(Service, SilentConnections) {
  ControllerProgram controller(address());
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::snprintf(name.sun_path, sizeof name.sun_path, "%s", address().c_str());
  rlimit files;
  ASSERT_EQ(0, getrlimit(RLIMIT_NOFILE, &files));
  const long most = std::min<long>(1100, static_cast<long>(files.rlim_cur) - 100);
  std::vector<int> unresponsive;
  while (static_cast<long>(unresponsive.size()) < most) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unresponsive.push_back(fd);
    ASSERT_EQ(0, connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name));
  }
  frugal_engine* e = nullptr;
  frugal_trainer* t = nullptr;
  OK(Open(address(), &e));
  OK(Join(e, 0, &t));
  OK(frugal_close(e));
  for (int fd : unresponsive) close(fd);
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// A controller without memory says so.
TEST_F(Service, AControllerWithoutMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory does not fit there";
#endif
  int serves = 0;
  for (rlim_t mib = 24; mib <= 120; mib += 4) {
    ControllerProgram controller(address(), [mib] {
      const rlimit limit{mib << 20, mib << 20};
      return setrlimit(RLIMIT_AS, &limit) == 0;
    });
    serves += controller.serves();
    const int status = controller.serves() ? controller.end(SIGTERM) : controller.wait_for();
    // Below that the program's own libraries find no place: the loader says 127.
    if (!controller.serves() && status == 127) continue;
    EXPECT_EQ(controller.serves() ? 0 : 1, status) << mib << " MiB";
  }
  EXPECT_GT(serves, 0);
}

// Programs that a trainer starts get none of what it has open.
TEST_F(Service, DescriptorsStayInTheProcess) {
  ControllerProgram controller(address());
  const std::vector<std::string> before = entries_of("/proc/self/fd");
  frugal_engine* e = nullptr;
  frugal_trainer* t = nullptr;
  frugal_table* table = nullptr;
  OK(Open(address(), &e));
  OK(Join(e, 0, &t));
  const frugal_table_config c = TableConfig("t");
  OK(frugal_table_create(e, &c, &table));
  size_t seen = 0;
  for (const std::string& fd : entries_of("/proc/self/fd")) {
    if (std::find(before.begin(), before.end(), fd) != before.end()) continue;
    const int flags = fcntl(std::stoi(fd), F_GETFD);
    if (flags < 0) continue;  // what the folder was read with
    ++seen;
    EXPECT_EQ(FD_CLOEXEC, flags) << fd;
  }
  EXPECT_GT(seen, 5u);
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// Of this process, and of what it starts, from now on.
template <size_t kSize>
bool Filter(sock_filter (&program)[kSize]) {
  const sock_fprog filter{kSize, program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}
// A system call is refused.
bool Refuse(uint32_t call) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return Filter(program);
}

TEST_F(Service, WhoIsAtTheOtherEndIsNotTold) {
  ControllerProgram controller(address());
  EXPECT_EQ(0, InChild([&] {
              frugal_engine* e = nullptr;
              if (!Refuse(SYS_getsockopt)) return 1;
              if (Open(address(), &e) != FRUGAL_ERR_UNSUPPORTED) return 2;
              return Says("SO_PEERCRED") ? 0 : 3;
            }));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// No pidfd is had: of a socket by the first code, of a process's number by the second.
bool RefusePidfds(uint32_t of_socket, uint32_t of_number) {
  constexpr uint32_t kPeerPidfd = 77;  // SO_PEERPIDFD
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 4, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsockopt, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kPeerPidfd, 0, 2),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | of_socket),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | of_number),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return Filter(program);
}

// A process that could not see the other end die does not attach.
TEST_F(Service, NoDescriptorForThePeersProcess) {
  auto refuse = [] { return RefusePidfds(EMFILE, EMFILE); };
  auto refused = [&](const std::string& who) {
    frugal_engine* e = nullptr;
    return Open(address(), &e) == FRUGAL_ERR_OUT_OF_MEMORY && Says("no file descriptor") &&
           Says(who.c_str());
  };
  {
    ControllerProgram controller(address());
    EXPECT_EQ(0, InChild([&] {
                if (!refuse()) return 1;
                return refused("process " + std::to_string(getpid())) ? 0 : 2;
              }));
    EXPECT_EQ(0, controller.end(SIGTERM));
  }
  ControllerProgram controller(address(), refuse);
  EXPECT_TRUE(refused("process " + std::to_string(controller.pid()))) << Error();
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// Where the kernel has no pidfds, the end of the connection shows a process's death.
TEST_F(Service, TheKernelHasNoPidfds) {
  auto refuse = [] { return RefusePidfds(ENOPROTOOPT, ENOSYS); };
  // Rank 0, which learns that another process has died: that one is killed when this is ready.
  auto outlives = [&](int ready, const char* says) {
    alarm(120);  // it would wait for much longer
    frugal_engine* e = nullptr;
    frugal_trainer* t = nullptr;
    if (Open(address(), &e, kNeverMs) || Join(e, 0, &t) || frugal_step_begin(t, 0, -1) ||
        frugal_step_end(t, 0, 0) || write(ready, "r", 1) != 1)
      return 1;
    if (frugal_step_begin(t, 1, -1) != FRUGAL_ERR_PEER_LOST || !Says(says)) return 2;
    return frugal_close(e) ? 3 : 0;
  };
  int ready[2];
  ASSERT_EQ(0, pipe2(ready, O_CLOEXEC));
  char word;
  auto kill_when_ready = [&](pid_t pid) {
    ASSERT_EQ(1, read(ready[0], &word, 1));
    usleep(20000);  // the call is under way, as a rule
    kill(pid, SIGKILL);
  };
  {
    ControllerProgram controller(address());
    const pid_t child = fork_child();
    if (child == 0) _exit(refuse() ? outlives(ready[1], "controller") : 9);
    kill_when_ready(controller.pid());
    int status = 0;
    ASSERT_EQ(child, waitpid(child, &status, 0));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  ControllerProgram controller(address(), refuse);
  const pid_t other = fork_child();
  if (other == 0) {
    frugal_engine* e = nullptr;
    frugal_trainer* t = nullptr;
    if (Open(address(), &e, kNeverMs) || Join(e, 1, &t) || write(ready[1], "r", 1) != 1) _exit(1);
    for (;;) pause();
  }
  ASSERT_EQ(1, read(ready[0], &word, 1));
  const pid_t child = fork_child();
  if (child == 0) _exit(outlives(ready[1], "rank 1"));
  kill_when_ready(other);
  int status = 0;
  ASSERT_EQ(child, waitpid(child, &status, 0));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ASSERT_EQ(other, waitpid(other, &status, 0));
  EXPECT_EQ(SIGKILL, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

// An address that can never belong to a controller is reported at once.
TEST_F(Service, NoSocketThere) {
  std::FILE* f = std::fopen(address().c_str(), "w");
  ASSERT_NE(f, nullptr);
  std::fclose(f);
  for (const std::string& wrong : {address(), folder_.path()}) {
    frugal_engine* e = nullptr;
    EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, Open(wrong, &e, 600000));
    EXPECT_TRUE(Says("no socket")) << Error();
  }
  unlink(address().c_str());
}

// Another program removes the files of a controller, and a second controller begins in its place.
// The second one's files stay.
TEST_F(Service, FilesOfAnother) {
  ControllerProgram first(address());
  ASSERT_TRUE(first.serves());
  ASSERT_EQ(0, unlink(address().c_str()));
  ASSERT_EQ(0, unlink((address() + ".lock").c_str()));
  ControllerProgram second(address());
  ASSERT_TRUE(second.serves());
  EXPECT_EQ(0, first.end(SIGTERM));
  frugal_engine* e = nullptr;
  OK(Open(address(), &e));
  OK(frugal_close(e));
  EXPECT_EQ(0, second.end(SIGTERM));
  EXPECT_TRUE(folder_.entries().empty());
}

// A controller that was given a relative address and goes to another folder removes its files all
// the same.
TEST_F(Service, ARelativeAddress) {
  const int status = InChild([&] {
    frugal_config c = Config("");
    c.backing = FRUGAL_BACKING_SHM;
    frugal_engine *host = nullptr, *other = nullptr;
    if (chdir(folder_.path().c_str()) || frugal_open(&c, &host)) return 1;
    if (frugal_serve(host, "nowhere/service") != FRUGAL_ERR_INVALID_ARGUMENT ||
        !Says("is its folder there"))
      return 2;
    if (frugal_serve(host, "service") || chdir("/")) return 3;
    if (Open(address(), &other) || frugal_close(other)) return 4;
    return frugal_close(host) ? 5 : 0;
  });
  EXPECT_EQ(0, status);
  EXPECT_TRUE(folder_.entries().empty());
}

TEST_F(Service, LongNames) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e));
  frugal_table* t = nullptr;
  for (size_t n : {255, 256, 66000, 1000000}) {
    const std::string name(n, 'n');
    EXPECT_EQ(FRUGAL_ERR_NOT_FOUND, frugal_table_find(e, name.c_str(), &t)) << n;
  }
  const std::string longest(255, 'n');
  const frugal_table_config c = TableConfig(longest.c_str());
  OK(frugal_table_create(e, &c, &t));
  OK(frugal_table_find(e, longest.c_str(), &t));
  OK(frugal_close(e));
}

TEST_F(Service, AnotherConfiguration) {
  ControllerProgram controller(address());
  ASSERT_TRUE(controller.serves());
  frugal_engine *first = nullptr, *other = nullptr;
  OK(Open(address(), &first));
  const std::pair<const char*, std::function<void(frugal_config*)>> changes[] = {
      {"world_size", [](frugal_config* c) { c->world_size = 3; }},
      {"lookahead", [](frugal_config* c) { c->lookahead = 4; }},
      {"staleness", [](frugal_config* c) { c->staleness = 1; }},
      {"seed", [](frugal_config* c) { c->seed = 9; }}};
  for (const auto& [name, change] : changes) {
    frugal_config c = Config(address());
    change(&c);
    EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_open(&c, &other)) << name;
    EXPECT_TRUE(Says(name)) << Error();
  }
  OK(Open(address(), &other));
  OK(frugal_close(other));
  OK(frugal_close(first));
}

TEST_F(Service, Ranks) {
  ControllerProgram controller(address());
  frugal_engine *a = nullptr, *b = nullptr;
  OK(Open(address(), &a));
  OK(Open(address(), &b));
  frugal_trainer *t0 = nullptr, *t1 = nullptr, *t = nullptr;
  OK(Join(a, 0, &t0));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, Join(a, 0, &t));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, Join(b, 0, &t));
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, Join(b, 2, &t));
  OK(Join(b, 1, &t1));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, Join(b, 1, &t));
  OK(frugal_trainer_close(t1));
  OK(Join(a, 1, &t1));
  // Rank 0 is taken over, as if its process did not reply: the old trainer learns it at once.
  OK(Join(b, 0, &t, FRUGAL_TRAINER_REPLACE));
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(t0, 0, 1000));
  OK(frugal_trainer_close(t0));
  OK(frugal_close(a));
  OK(frugal_close(b));
}

TEST_F(Service, OneAddressOneController) {
  ControllerProgram controller(address()), second(address());
  EXPECT_TRUE(controller.serves());
  EXPECT_FALSE(second.serves());
  EXPECT_EQ(1, second.wait_for());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e));
  // Killed: the next controller takes over the files that it leaves.
  controller.end(SIGKILL);
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_flush(e, 1000));
  ControllerProgram third(address());
  EXPECT_TRUE(third.serves());
  frugal_engine* again = nullptr;
  OK(Open(address(), &again));
  OK(frugal_close(again));
  OK(frugal_close(e));
  EXPECT_EQ(0, third.end(SIGTERM));
  EXPECT_TRUE(folder_.entries().empty());
}

TEST_F(Service, AnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ControllerProgram controller(address());
  chmod(folder_.path().c_str(), 0755);
  chmod(address().c_str(), 0666);
  EXPECT_EQ(0, InChild([&] {
              if (setresuid(65534, 65534, 65534) != 0) return 1;
              frugal_engine* e = nullptr;
              return Open(address(), &e, 300) == FRUGAL_ERR_INVALID_ARGUMENT && Says("user") ? 0
                                                                                             : 2;
            }));
}

// ThreadSanitizer allows no threads in a child of a process that has some. AddressSanitizer's
// allocator has a lock for each size of memory. GCC's run-time does not take them around fork(), so
// a child that was forked while another thread allocated can wait for one in malloc() for ever.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// The list of served engines is locked while this process forks.
TEST_F(Service, ForksBesideServing) {
  frugal_config c = Config("");
  c.backing = FRUGAL_BACKING_SHM;
  frugal_engine* served = nullptr;
  OK(frugal_open(&c, &served));
  OK(frugal_serve(served, address().c_str()));
  std::atomic<bool> stop{false};
  std::atomic<int> serving{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&] {
      for (++serving; !stop;) (void)frugal_serve(served, address().c_str());  // FRUGAL_ERR_EXISTS
    });
  while (serving < 2) std::this_thread::yield();
  for (int i = 0; i < 50 && !HasFailure(); ++i)
    EXPECT_EQ(0, InChild([&] {
                alarm(60);  // ends a child that hangs, so that the test fails
                frugal_engine* own = nullptr;
                return Open("", &own) || frugal_close(own);
              }));
  stop = true;
  for (std::thread& t : threads) t.join();
  OK(frugal_close(served));
}
#endif

TEST_F(Service, Serving) {
  frugal_engine *own = nullptr, *shared = nullptr, *attached = nullptr;
  OK(Open("", &own));
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_serve(own, address().c_str()));
  OK(frugal_close(own));
  frugal_config c = Config("");
  c.backing = FRUGAL_BACKING_SHM;
  OK(frugal_open(&c, &shared));
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_serve(shared, "/no/such/folder/service"));
  OK(frugal_serve(shared, address().c_str()));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, frugal_serve(shared, (address() + "2").c_str()));
  OK(Open(address(), &attached));
  EXPECT_EQ(FRUGAL_ERR_UNSUPPORTED, frugal_serve(attached, (address() + "2").c_str()));
  // A thread of this process and an attached trainer in one job.
  frugal_trainer *here = nullptr, *there = nullptr;
  OK(Join(shared, 0, &here));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, Join(attached, 0, &there, FRUGAL_TRAINER_REPLACE));
  OK(Join(attached, 1, &there));
  for (uint64_t s = 0; s < 3; ++s) {
    OK(frugal_step_begin(here, s, kNeverMs));
    OK(frugal_step_begin(there, s, kNeverMs));
    OK(frugal_step_end(here, s, 0));
    OK(frugal_step_end(there, s, 0));
  }
  std::thread waits([&] {
    const int s = frugal_step_begin(there, 3, kNeverMs) || frugal_step_end(there, 3, 0) ||
                  frugal_step_begin(there, 4, kNeverMs);
    EXPECT_TRUE(s);
  });
  usleep(20000);
  OK(frugal_close(shared));
  waits.join();
  OK(frugal_close(attached));
}

TEST_F(Service, Tables) {
  ControllerProgram controller(address());
  frugal_engine *a = nullptr, *b = nullptr;
  OK(Open(address(), &a));
  OK(Open(address(), &b));
  frugal_table *ta = nullptr, *tb = nullptr;
  frugal_table_config c = TableConfig("t");
  c.optimizer.kind = FRUGAL_ADAM;
  OK(frugal_table_create(a, &c, &ta));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, frugal_table_create(a, &c, &tb));
  OK(frugal_table_create(b, &c, &tb));
  c.optimizer.lr = 0.5f;
  EXPECT_EQ(FRUGAL_ERR_EXISTS, frugal_table_create(b, &c, &tb));
  const std::string longest(255, 'x');
  const frugal_table_config of_b = TableConfig(longest.c_str());
  frugal_table* last = nullptr;
  OK(frugal_table_create(b, &of_b, &last));
  for (frugal_engine* e : {a, b}) EXPECT_EQ((std::vector<std::string>{"t", longest}), Names(e));
  OK(frugal_table_drop(ta));
  EXPECT_EQ(std::vector<std::string>{longest}, Names(a));
  uint64_t n = 0;
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_table_count(tb, &n));
  EXPECT_EQ(FRUGAL_ERR_NOT_FOUND, frugal_table_find(b, "t", &tb));
  OK(frugal_close(a));
  OK(frugal_close(b));
}

TEST_F(Service, ForkedChild) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e));
  frugal_table* t = nullptr;
  const frugal_table_config c = TableConfig("t");
  OK(frugal_table_create(e, &c, &t));
  EXPECT_EQ(0, InChild([&] {
              uint64_t n;
              return frugal_table_count(t, &n) == FRUGAL_ERR_FORKED &&
                             frugal_flush(e, 100) == FRUGAL_ERR_FORKED &&
                             frugal_close(e) == FRUGAL_ERR_FORKED
                         ? 0
                         : 1;
            }));
  uint64_t n = 0;
  OK(frugal_table_count(t, &n));
  EXPECT_EQ(1000u, n);
  OK(frugal_close(e));
}

TEST_F(Service, LimitsOfMemory) {
  ControllerProgram controller(address());
  rlimit few{48, 48};
  ASSERT_EQ(0, prlimit(controller.pid(), RLIMIT_NOFILE, &few, nullptr));
  frugal_config c = Config(address());
  c.host_bytes = 1 << 20;
  frugal_engine* e = nullptr;
  OK(frugal_open(&c, &e));
  frugal_table* t = nullptr;
  frugal_table_config large = TableConfig("large", 10000000);
  EXPECT_EQ(FRUGAL_ERR_OUT_OF_MEMORY, frugal_table_create(e, &large, &t));
  int status = FRUGAL_OK;
  for (int i = 0; i < 40 && status == FRUGAL_OK; ++i) {
    const std::string name = std::to_string(i);
    const frugal_table_config small = TableConfig(name.c_str(), 10);
    status = frugal_table_create(e, &small, &t);
  }
  EXPECT_EQ(FRUGAL_ERR_OUT_OF_MEMORY, status) << Error();
  OK(frugal_flush(e, 1000));
  OK(frugal_close(e));
}

// Each trainer has staging memory of 64 GiB of addresses.
TEST_F(Service, LimitOfAddresses) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer wants addresses of its own";
#endif
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e));
  rlimit before, little;
  ASSERT_EQ(0, prlimit(controller.pid(), RLIMIT_AS, nullptr, &before));
  little = before;
  little.rlim_cur = rlim_t{1} << 30;  // less than it has
  ASSERT_EQ(0, prlimit(controller.pid(), RLIMIT_AS, &little, nullptr));
  frugal_trainer *t0 = nullptr, *t1 = nullptr;
  EXPECT_EQ(FRUGAL_ERR_OUT_OF_MEMORY, Join(e, 0, &t0)) << Error();
  ASSERT_EQ(0, prlimit(controller.pid(), RLIMIT_AS, &before, nullptr));
  OK(Join(e, 0, &t0));
  OK(Join(e, 1, &t1));
  for (frugal_trainer* t : {t0, t1}) OK(frugal_step_begin(t, 0, kNeverMs));
  for (frugal_trainer* t : {t0, t1}) OK(frugal_step_end(t, 0, 0));
  OK(frugal_close(e));
}

// As containers have it. Memory is not taken there, but without a name.
TEST_F(Service, SmallDevShm) {
  constexpr uint64_t kRows = 6000000;  // 192 MB of them
  ControllerProgram controller(address(), [] {
    struct statvfs shm;
    return unshare(CLONE_NEWNS) == 0 &&
           mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64m") == 0 &&
           statvfs("/dev/shm", &shm) == 0 && shm.f_blocks * shm.f_frsize == size_t{64} << 20;
  });
  if (!controller.serves()) {
    ASSERT_EQ(77, controller.wait_for());
    GTEST_SKIP() << "this process may not mount a /dev/shm";
  }
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, FRUGAL_TIMEOUT_INFINITE, 1));
  frugal_table* table = nullptr;
  frugal_table_config tc = TableConfig("t", kRows);
  tc.optimizer.lr = 1;
  const int status = frugal_table_create(e, &tc, &table);
  if (status == FRUGAL_ERR_OUT_OF_MEMORY) GTEST_SKIP() << "this machine has no 192 MB: " << Error();
  ASSERT_EQ(FRUGAL_OK, status) << Error();
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  const uint64_t keys[] = {0, kRows / 2, kRows - 1};
  std::vector<float> rows(3 * 8, 1);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys;
  op.count = 3;
  op.grads = rows.data();
  OK(frugal_step_begin(t, 0, FRUGAL_TIMEOUT_INFINITE));
  OK(frugal_push_grad(t, &op, 1));
  OK(frugal_step_end(t, 0, 0));
  OK(frugal_get(table, keys, 3, 0, rows.data(), 0, nullptr));
  for (float x : rows) EXPECT_EQ(-1, x);
  OK(frugal_close(e));
}

// The controller's trace contains what a trainer does by itself. A path is relative to the calling
// process.
TEST_F(Service, TraceOfTrainers) {
  ControllerProgram controller(address());
  frugal_config c = Config(address());
  c.world_size = 1;
  frugal_engine* e = nullptr;
  OK(frugal_open(&c, &e));
  frugal_table* table = nullptr;
  const frugal_table_config tc = TableConfig("t");
  OK(frugal_table_create(e, &tc, &table));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  OK(frugal_trace_start(e, 1000));
  std::vector<uint64_t> keys = {1, 2, 3, 2};
  std::vector<float> rows(keys.size() * 8), grads(keys.size() * 8, 1);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = keys.size();
  op.rows_out = rows.data();
  op.grads = grads.data();
  for (uint64_t step = 0; step < 3; ++step) {
    OK(frugal_prefetch(t, step, &op, 1, nullptr));
    OK(frugal_step_begin(t, step, FRUGAL_TIMEOUT_DEFAULT));
    for (int i = 0; i < 50; ++i) OK(frugal_lookup(t, &op, 1));  // more calls than go with a step
    for (int i = 0; i < 50; ++i) OK(frugal_push_grad(t, &op, 1));
    OK(frugal_step_end(t, step, 0));
  }
  char here[4096];
  ASSERT_NE(getcwd(here, sizeof here), nullptr);
  ASSERT_EQ(0, chdir(folder_.path().c_str()));
  const int stopped = frugal_trace_stop(e, "trace.json");
  ASSERT_EQ(0, chdir(here));
  OK(stopped);
  std::FILE* f = std::fopen((folder_.path() + "/trace.json").c_str(), "r");
  ASSERT_NE(f, nullptr);
  std::string text(1 << 20, 0);
  text.resize(std::fread(text.data(), 1, text.size(), f));
  std::fclose(f);
  auto count = [&](const std::string& what) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; ++at) ++n;
    return n;
  };
  EXPECT_EQ(count("\"name\":\"lookup\""), 150u);
  EXPECT_EQ(count("\"name\":\"push\""), 3u * (64 - 50));
  EXPECT_GE(count("\"name\":\"gate\"") + count("\"name\":\"step_begin\""), 3u);
  OK(frugal_close(e));
}

// A trace ends with the process that has begun it, and with no other process.
TEST_F(Service, ATraceEndsWithItsProcess) {
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  OK(Open(address(), &e));
  const long before = descriptors_of(controller.pid());
  OK(Open(address(), &other));
  OK(frugal_trace_start(other, 1000));
  EXPECT_EQ(FRUGAL_ERR_EXISTS, frugal_trace_start(e, 1000));
  OK(frugal_close(other));
  int status;  // the controller may still be at it
  while ((status = frugal_trace_start(e, 1000)) == FRUGAL_ERR_EXISTS) usleep(1000);
  OK(status);
  OK(frugal_trace_stop(e, nullptr));
  OK(Open(address(), &other));
  OK(frugal_trace_start(other, 1000));
  OK(frugal_trace_stop(e, nullptr));
  OK(frugal_trace_start(e, 1000));
  OK(frugal_close(other));
  while (descriptors_of(controller.pid()) > before) usleep(1000);
  OK(frugal_trace_stop(e, nullptr));
  OK(frugal_close(e));
}

// A call that fails before its rows have come skips them, however long they take. The controller
// may be about to give back the memory that an earlier reply has left it.
TEST_F(Service, ALargeCallFails) {
  constexpr uint32_t kDim = 65536;
  constexpr size_t kGot = 200, kPut = 2048;  // 50 MiB; 512 MiB of pages that were never written
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  OK(Open(address(), &e));
  OK(Open(address(), &other));
  frugal_table_config c = TableConfig("got", 1);
  c.dim = kDim;
  frugal_table *got = nullptr, *dropped = nullptr, *same = nullptr;
  OK(frugal_table_create(e, &c, &got));
  c.name = "dropped";
  OK(frugal_table_create(e, &c, &dropped));
  OK(frugal_table_find(other, "dropped", &same));
  OK(frugal_table_drop(same));
  frugal_trainer* trainer = nullptr;
  OK(Join(e, 0, &trainer));
  const std::vector<uint64_t> keys(kPut, 0);
  std::vector<float> rows(kGot * kDim);
  const size_t bytes = kPut * kDim * sizeof(float);
  void* nothing =
      mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(nothing, MAP_FAILED);
  OK(frugal_get(got, keys.data(), kGot, 0, rows.data(), 0, nullptr));
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE,
            frugal_put(dropped, keys.data(), kPut, 0, static_cast<float*>(nothing), 0))
      << Error();
  OK(frugal_step_begin(trainer, 0, -1));
  OK(frugal_step_end(trainer, 0, 0));
  munmap(nothing, bytes);
  OK(frugal_close(e));
  OK(frugal_close(other));
}

// A step whose gate has opened needs no other process. Nor do new rows of a hashed table, or cached
// rows. No call waits for ever for a process that never replies.
TEST_F(Service, StoppedController) {
  for (const double cache : {0.0, 1.0}) {
    ControllerProgram controller(address());
    frugal_engine* e = nullptr;
    OK(Open(address(), &e, 3000, 1));
    constexpr size_t kKeys = 500, kDim = 8;
    std::vector<uint64_t> keys(kKeys);
    std::vector<float> rows(kKeys * kDim), grads(kKeys * kDim, 1);
    frugal_op ops[2];
    for (int i : {0, 1}) {
      frugal_table_config tc = TableConfig(i ? "hashed" : "dense");
      tc.key_space = i ? FRUGAL_HASHED : FRUGAL_DENSE;
      tc.init_a = 7;
      tc.optimizer.lr = 1;
      ops[i] = FRUGAL_OP_INIT;
      OK(frugal_table_create(e, &tc, &ops[i].table));
      ops[i].keys = keys.data();
      ops[i].count = kKeys;
      ops[i].rows_out = rows.data();
      ops[i].grads = grads.data();
    }
    frugal_trainer* t = nullptr;
    frugal_trainer_config trainer = FRUGAL_TRAINER_CONFIG_INIT;
    trainer.cache_ratio = cache;
    OK(frugal_trainer_create(e, &trainer, &t));
    for (uint64_t s = 0; s < 3; ++s) {
      for (size_t i = 0; i < kKeys; ++i)
        keys[i] = i + (s == 2 ? 100 : 0);  // hashed: new ones in the first and last
      OK(frugal_prefetch(t, s, ops, 2, nullptr));
      while (int status = frugal_step_begin(t, s, 5000))
        ASSERT_EQ(FRUGAL_ERR_TIMEOUT, status) << Error();
      controller.stop();
      for (const frugal_op& op : ops) {
        std::fill(rows.begin(), rows.end(), 0.0f);
        OK(frugal_lookup(t, &op, 1));
        for (size_t i = 0; i < kKeys; ++i) {
          const float trained = s < 2 ? static_cast<float>(s) : keys[i] < kKeys ? 2 : 0;
          for (size_t d = 0; d < kDim; ++d)
            ASSERT_EQ(7 - trained, rows[i * kDim + d]) << s << " " << keys[i];
        }
        OK(frugal_push_grad(t, &op, 1));
      }
      kill(controller.pid(), SIGCONT);
      OK(frugal_step_end(t, s, 0));
    }
    uint64_t step = 99, n = 0;
    OK(frugal_committed_step(e, &step));
    EXPECT_EQ(2u, step);
    OK(frugal_table_count(ops[1].table, &n));
    EXPECT_EQ(kKeys + 100, n);
    controller.stop();
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(t, 3, 100));
    EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_committed_step(e, &step));
    kill(controller.pid(), SIGCONT);
    OK(frugal_close(e));
  }
}

// The controller may stop in the middle of a reply, too. The reply is larger than a ring, so most
// of such a call is the reply.
TEST_F(Service, StoppedInAnAnswer) {
  constexpr size_t kKeys = 1000000, kDim = 8;
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, kSilenceMs));
  frugal_table* table = nullptr;
  const frugal_table_config tc = TableConfig("t", kKeys);
  OK(frugal_table_create(e, &tc, &table));
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  std::vector<float> rows(kKeys * kDim);
  std::atomic<int> answered{0};
  int status = FRUGAL_OK;
  std::thread gets([&] {
    while ((status = frugal_get(table, keys.data(), kKeys, 0, rows.data(), 0, nullptr)) ==
           FRUGAL_OK)
      ++answered;
  });
  while (answered.load() < 2) usleep(1000);
  controller.stop();
  gets.join();
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, status);
  kill(controller.pid(), SIGCONT);
  OK(frugal_close(e));
}

// Large declarations lie in memory of the trainer's until they are resolved: more of them, and
// sums, follow at once.
TEST_F(Service, DeclarationsLieUntilTheyAreResolved) {
  constexpr size_t kKeys = 30000, kDim = 8;
  constexpr uint64_t kAhead = 6, kRows = 100000;
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  frugal_config c = Config(address(), kNeverMs);
  c.world_size = 1;
  c.lookahead = kAhead;
  OK(frugal_open(&c, &e));
  frugal_op ops[2] = {FRUGAL_OP_INIT, FRUGAL_OP_INIT};
  for (int k = 0; k < 2; ++k) {
    frugal_table_config tc = TableConfig(k ? "hashed" : "dense", kRows);
    tc.key_space = k ? FRUGAL_HASHED : FRUGAL_DENSE;
    tc.init = FRUGAL_INIT_UNIFORM;
    tc.init_a = -1;
    tc.init_b = 1;
    tc.optimizer.lr = 0;
    OK(frugal_table_create(e, &tc, &ops[k].table));
    ops[k].count = kKeys;
  }
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  std::vector<uint64_t> keys[2];
  std::vector<float> rows[2], wanted(kKeys * kDim);
  auto make = [&](uint64_t step) {
    for (int k = 0; k < 2; ++k) {
      keys[k].resize(kKeys);
      for (size_t i = 0; i < kKeys; ++i)
        keys[k][i] = ((step * kKeys + i) * 0x9e3779b97f4a7c15 >> 32) % kRows;
      ops[k].keys = keys[k].data();
    }
  };
  frugal_batch* batches[kAhead] = {};
  for (uint64_t first = 0; first < 3 * kAhead; first += kAhead) {
    for (uint64_t i = 0; i < kAhead; ++i) {
      make(first + i);
      OK(frugal_prefetch(t, first + i, ops, 2, &batches[i]));
    }
    for (uint64_t i = 0; i < kAhead; ++i) {
      OK(frugal_step_begin(t, first + i, -1));
      make(first + i);
      for (uint32_t k = 0; k < 2; ++k) {
        frugal_op op = FRUGAL_OP_INIT;
        op.table = ops[k].table;
        op.batch = batches[i];
        op.part = k;
        rows[k].resize(kKeys * kDim);
        op.rows_out = rows[k].data();
        OK(frugal_lookup(t, &op, 1));
        op.rows_out = nullptr;
        op.grads = rows[k].data();
        OK(frugal_push_grad(t, &op, 1));
      }
      OK(frugal_step_end(t, first + i, 0));
      for (int k = 0; k < 2; ++k) {  // which has changed nothing
        OK(frugal_get(ops[k].table, keys[k].data(), kKeys, 0, wanted.data(), 0, nullptr));
        ASSERT_TRUE(rows[k] == wanted) << "step " << first + i << ", table " << k;
      }
    }
  }
  OK(frugal_close(e));
}

// Inside a step a declaration needs no reply. The call that uses the declaration reports what is
// wrong with it.
TEST_F(Service, DeclarationsWithoutAnAnswer) {
  constexpr size_t kKeys = 5000, kDim = 8;
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  OK(Open(address(), &e, kNeverMs, 1));
  OK(Open(address(), &other, kNeverMs, 1));
  frugal_op ops[2] = {FRUGAL_OP_INIT, FRUGAL_OP_INIT};
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i * 7;
  for (int k = 0; k < 2; ++k) {
    frugal_table_config tc = TableConfig(k ? "hashed" : "dense", 100000);
    tc.key_space = k ? FRUGAL_HASHED : FRUGAL_DENSE;
    tc.optimizer.lr = 1;
    OK(frugal_table_create(e, &tc, &ops[k].table));
    ops[k].keys = keys.data();
    ops[k].count = kKeys;
  }
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  std::vector<float> rows(kKeys * kDim), grads(kKeys * kDim, 1);
  auto use = [&](frugal_batch* batch, uint32_t part) {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = ops[part].table;
    op.batch = batch;
    op.part = part;
    op.rows_out = rows.data();
    op.grads = grads.data();
    return op;
  };
  // All of them while the controller is stopped.
  frugal_batch* batches[6] = {};
  OK(frugal_prefetch(t, 0, ops, 2, &batches[0]));
  for (uint64_t s = 0; s < 5; ++s) {
    OK(frugal_step_begin(t, s, -1));
    controller.stop();
    OK(frugal_prefetch(t, s + 1, ops, 2, &batches[s + 1]));
    for (uint32_t part : {0, 1}) {
      const frugal_op op = use(batches[s], part);
      OK(frugal_lookup(t, &op, 1));
      for (float x : rows) ASSERT_EQ(-static_cast<float>(s), x);
      OK(frugal_push_grad(t, &op, 1));
    }
    kill(controller.pid(), SIGCONT);
    OK(frugal_step_end(t, s, 0));
  }
  // Another process drops a table, and this one does not know.
  frugal_table* hashed = nullptr;
  OK(frugal_table_find(other, "hashed", &hashed));
  OK(frugal_table_drop(hashed));
  OK(frugal_step_begin(t, 5, -1));
  // A call outside of steps comes after declarations. A declaration that was withdrawn is none.
  frugal_stats before{}, after{};
  before.struct_size = after.struct_size = sizeof before;
  OK(frugal_get_stats(e, &before));
  frugal_batch *later = nullptr, *wrong = nullptr;
  OK(frugal_prefetch(t, 6, ops, 1, &later));
  OK(frugal_get_stats(e, &after));
  EXPECT_EQ(kKeys, after.keys_declared - before.keys_declared);
  OK(frugal_prefetch_cancel(t, later));
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_prefetch_cancel(t, later));
  EXPECT_EQ(FRUGAL_ERR_STEP_RANGE, frugal_prefetch(t, 5, ops, 1, nullptr));
  EXPECT_EQ(FRUGAL_ERR_STEP_RANGE,
            frugal_prefetch(t, 5 + FRUGAL_MAX_LOOKAHEAD + 1, ops, 1, nullptr));
  OK(frugal_prefetch(t, 6, ops, 2, &later));
  // Whose words are not the other's.
  EXPECT_EQ(FRUGAL_ERR_STEP_RANGE, frugal_prefetch(t, 5, ops, 1, nullptr));
  OK(frugal_prefetch(t, 6, ops, 2, &wrong));
  OK(frugal_prefetch(t, 6, ops, 1, &batches[0]));
  OK(frugal_step_end(t, 5, 0));
  OK(frugal_step_begin(t, 6, -1));
  frugal_op op = use(later, 0);
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_lookup(t, &op, 1));
  EXPECT_TRUE(Says("could not be declared") &&
              Says("another process of the job has dropped the table"))
      << Error();
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_push_grad(t, &op, 1));
  op.keys = keys.data();
  op.count = kKeys;
  OK(frugal_lookup(t, &op, 1));
  for (float x : rows) ASSERT_EQ(-5.0f, x);  // five steps have pushed
  op = use(batches[0], 0);
  OK(frugal_lookup(t, &op, 1));
  OK(frugal_push_grad(t, &op, 1));
  OK(frugal_step_end(t, 6, 0));
  OK(frugal_get(ops[0].table, keys.data(), kKeys, 0, rows.data(), 0, nullptr));
  for (float x : rows) ASSERT_EQ(-6.0f, x);
  OK(frugal_close(other));
  OK(frugal_close(e));
}

// A call outside of steps waits for its own time only, and takes nothing from the trainer.
TEST_F(Service, AskedBesideADeclaration) {
  constexpr size_t kKeys = 1000;
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, kNeverMs, 1));
  std::vector<uint64_t> keys(kKeys, 5);
  frugal_op op = FRUGAL_OP_INIT;
  const frugal_table_config tc = TableConfig("t");
  OK(frugal_table_create(e, &tc, &op.table));
  op.keys = keys.data();
  op.count = kKeys;
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  OK(frugal_step_begin(t, 0, -1));
  controller.stop();
  OK(frugal_prefetch(t, 1, &op, 1, nullptr));
  std::thread flushes([&] { EXPECT_EQ(FRUGAL_OK, frugal_flush(e, -1)) << Error(); });
  usleep(20000);
  kill(controller.pid(), SIGCONT);
  OK(frugal_step_end(t, 0, 0));
  flushes.join();
  OK(frugal_step_begin(t, 1, -1));
  OK(frugal_step_end(t, 1, 0));
  OK(frugal_close(e));
}

// An undo comes between: what was declared without a reply stays declared, and the undo is reported
// all the same, once.
TEST_F(Service, AnUndoBesideADeclaration) {
  constexpr size_t kKeys = 1000, kDim = 8;
  ControllerProgram controller(address());
  frugal_engine *a = nullptr, *b = nullptr;
  OK(Open(address(), &a, kNeverMs));
  OK(Open(address(), &b, kNeverMs));
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  std::vector<float> rows(kKeys * kDim);
  frugal_op op = FRUGAL_OP_INIT;
  const frugal_table_config tc = TableConfig("t", kKeys);
  OK(frugal_table_create(a, &tc, &op.table));
  op.keys = keys.data();
  op.count = kKeys;
  frugal_trainer *t0 = nullptr, *t1 = nullptr;
  OK(Join(a, 0, &t0));
  OK(Join(b, 1, &t1));
  frugal_stats stats{};
  stats.struct_size = sizeof stats;
  for (uint64_t s = 0; s < 60; ++s) {
    OK(frugal_step_begin(t0, s, -1));
    OK(frugal_step_begin(t1, s, -1));
    frugal_batch *before = nullptr, *beside = nullptr;
    OK(frugal_prefetch(t0, s + 2, &op, 1, &before));
    // Usually both requests reach a stopped controller, which decides which comes first.
    const bool both = s % 10 != 0;
    OK(frugal_get_stats(a, &stats));  // after the declaration
    if (both) controller.stop();
    std::thread aborts([&] { EXPECT_EQ(FRUGAL_OK, frugal_step_abort(t1)) << Error(); });
    usleep(both ? 1000 : static_cast<useconds_t>(s * 20));
    int status = frugal_prefetch(t0, s + 1, &op, 1, &beside);
    if (both) kill(controller.pid(), SIGCONT);
    const bool declared = status == FRUGAL_OK;
    aborts.join();
    if (declared) status = frugal_step_end(t0, s, 0);
    EXPECT_EQ(FRUGAL_ERR_STEP_ABORTED, status) << Error();
    OK(frugal_step_begin(t0, s, -1));
    if (!declared) {
      OK(frugal_prefetch(t0, s + 1, &op, 1, &beside));
    }
    OK(frugal_step_begin(t1, s, -1));
    OK(frugal_step_end(t0, s, 0));
    OK(frugal_step_end(t1, s, 0));
    OK(frugal_step_begin(t0, s + 1, -1));
    OK(frugal_step_begin(t1, s + 1, -1));
    frugal_op look = FRUGAL_OP_INIT;
    look.table = op.table;
    look.batch = beside;
    look.rows_out = rows.data();
    OK(frugal_lookup(t0, &look, 1));
    OK(frugal_step_end(t0, s + 1, 0));
    OK(frugal_step_end(t1, s + 1, 0));
    ++s;
  }
  OK(frugal_close(a));
  OK(frugal_close(b));
}

// Two ranks, the second of which does not end step 0.
struct Waiting {
  void begin(const std::string& address, int64_t timeout_ms) {
    OK(Open(address, &a, timeout_ms));
    OK(Open(address, &b, timeout_ms));
    const frugal_table_config tc = TableConfig("t", 100);
    OK(frugal_table_create(a, &tc, &table));
    OK(Join(a, 0, &t0));
    OK(Join(b, 1, &t1));
    OK(frugal_step_begin(t0, 0, -1));
    OK(frugal_step_begin(t1, 0, -1));
    OK(frugal_step_end(t0, 0, 0));
  }
  frugal_engine *a = nullptr, *b = nullptr;
  frugal_trainer *t0 = nullptr, *t1 = nullptr;
  frugal_table* table = nullptr;
};

// A trainer that says nothing while others wait for it is taken for lost, in however many slices
// they wait.
TEST_F(Service, SilentTrainer) {
  ControllerProgram controller(address());
  Waiting ranks;
  ASSERT_NO_FATAL_FAILURE(ranks.begin(address(), kSilenceMs));
  auto& [a, b, t0, t1, table] = ranks;
  int status = FRUGAL_ERR_TIMEOUT, slices = 0;
  while (status == FRUGAL_ERR_TIMEOUT && ++slices < 1000) status = frugal_step_begin(t0, 1, 50);
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, status) << Error();
  EXPECT_TRUE(Says("rank 1")) << Error();
  EXPECT_GT(slices, 1);
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_end(t1, 0, 0));
  // Its place can be taken, and the step is done again.
  frugal_trainer* next = nullptr;
  OK(Join(b, 1, &next));
  while ((status = frugal_step_begin(t0, 0, -1)) == FRUGAL_ERR_PEER_LOST && --slices > 0) {
  }
  EXPECT_EQ(FRUGAL_OK, status) << Error();
  OK(frugal_step_begin(next, 0, -1));
  OK(frugal_step_end(t0, 0, 0));
  OK(frugal_step_end(next, 0, 0));
  OK(frugal_close(a));
  OK(frugal_close(b));
}

// All processes stop together, as with their machine, for longer than a process may be
// unresponsive. No process is taken for lost: neither a trainer that computes in a step, nor the
// controller, nor a waiting trainer.
TEST_F(Service, AJobThatStandsStill) {
  struct Shared {
    std::atomic<uint64_t> steps[2];
    std::atomic<bool> over;
  };
  auto* shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(MAP_FAILED, static_cast<void*>(shared));
  ControllerProgram controller(address());
  pid_t ranks[2];
  for (uint32_t r : {0, 1}) {
    ranks[r] = fork_child();
    if (ranks[r] != 0) continue;
    frugal_engine* e = nullptr;
    frugal_trainer* t = nullptr;
    int status = Open(address(), &e, kSilenceMs);
    if (status == FRUGAL_OK) status = Join(e, r, &t);
    for (uint64_t s = 0; status == FRUGAL_OK; s = shared->steps[r]) {
      while ((status = frugal_step_begin(t, s, FRUGAL_TIMEOUT_DEFAULT)) == FRUGAL_ERR_TIMEOUT) {
      }
      // It computes in 100 short sleeps: while its process is stopped, it gets no further.
      for (int i = 0; status == FRUGAL_OK && r == 1 && i < 100; ++i) usleep(10'000);
      if (status == FRUGAL_OK) status = frugal_step_end(t, s, 0);
      if (status == FRUGAL_OK) ++shared->steps[r];
      if (shared->over) _exit(0);
    }
    std::fprintf(stderr, "rank %u: %s\n", r, Error().c_str());
    _exit(2);
  }
  const auto ended = [&] {
    return waitpid(ranks[0], nullptr, WNOHANG) != 0 || waitpid(ranks[1], nullptr, WNOHANG) != 0;
  };
  const auto comes_to = [&](uint64_t steps) {
    while (shared->steps[0] < steps || shared->steps[1] < steps) {
      if (ended()) return false;
      usleep(1000);
    }
    return true;
  };
  ASSERT_TRUE(comes_to(2));
  usleep(200'000);  // one computes now, as a rule, and one waits for it
  for (pid_t p : {controller.pid(), ranks[0], ranks[1]}) EXPECT_EQ(0, kill(p, SIGSTOP));
  usleep((kSilenceMs + 6000) * 1000);  // a trainer that waits for a reply gives the controller 5 s
                                       // more
  for (pid_t p : ranks) EXPECT_EQ(0, kill(p, SIGCONT));
  usleep(100'000);
  EXPECT_EQ(0, kill(controller.pid(), SIGCONT));
  EXPECT_TRUE(comes_to(shared->steps[1] + 3));
  shared->over = true;
  for (pid_t p : ranks) {
    kill(p, SIGKILL);
    waitpid(p, nullptr, 0);
  }
  munmap(shared, sizeof(Shared));
}

// A trainer whose calls all fail is taken for lost like an unresponsive one: it does not begin the
// step that was undone.
TEST_F(Service, TrainerWhoseCallsFail) {
  ControllerProgram controller(address());
  frugal_engine* engines[3];
  frugal_trainer* ranks[3];
  frugal_table* table = nullptr;
  for (uint32_t r = 0; r < 3; ++r) {
    OK(Open(address(), &engines[r], kSilenceMs, 3));
    OK(Join(engines[r], r, &ranks[r]));
  }
  const frugal_table_config config = TableConfig("t", 100);
  OK(frugal_table_create(engines[1], &config, &table));
  for (frugal_trainer* t : ranks) OK(frugal_step_begin(t, 0, -1));
  OK(frugal_trainer_abandon(ranks[2]));
  OK(Join(engines[2], 2, &ranks[2]));
  for (const uint32_t r : {0, 2}) {
    int status = FRUGAL_ERR_PEER_LOST;
    for (int tries = 0; tries < 100 && status == FRUGAL_ERR_PEER_LOST; ++tries)
      status = frugal_step_begin(ranks[r], 0, -1);
    ASSERT_EQ(FRUGAL_OK, status) << Error();
    OK(frugal_step_end(ranks[r], 0, 0));
  }
  int status = FRUGAL_ERR_TIMEOUT;
  for (int slices = 0; status == FRUGAL_ERR_TIMEOUT && slices < 400; ++slices) {
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, PushOnes(ranks[1], table, 1)) << Error();
    status = frugal_step_begin(ranks[0], 1, 50);
  }
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, status) << Error();
  EXPECT_TRUE(Says("rank 1")) << Error();
  for (frugal_engine* e : engines) OK(frugal_close(e));
}

// One call with the engine's time-out is enough to learn of it, whatever it waits in.
TEST_F(Service, SilentTrainerInOneCall) {
  for (const bool reads : {false, true}) {
    SCOPED_TRACE(reads ? "read" : "step_begin");
    ControllerProgram controller(address());
    Waiting ranks;
    ASSERT_NO_FATAL_FAILURE(ranks.begin(address(), kSilenceMs));
    auto& [a, b, t0, t1, table] = ranks;
    const uint64_t keys[] = {1, 2, 3};
    std::vector<float> rows(3 * 8);
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys;
    op.count = 3;
    op.rows_out = rows.data();
    // Again on a time-out, which a stop of the machine may cause.
    int status = FRUGAL_ERR_TIMEOUT;
    for (int calls = 0; calls < 3 && status == FRUGAL_ERR_TIMEOUT; ++calls)
      status = reads ? frugal_read(a, t0, &op, 1, -1) : frugal_step_begin(t0, 1, -1);
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, status) << Error();
    EXPECT_TRUE(Says("rank 1")) << Error();
    OK(frugal_close(a));
    OK(frugal_close(b));
  }
}

// What a trainer that was replaced has in the controller goes when it is closed.
TEST_F(Service, ReplacedTrainersAreClosed) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, FRUGAL_TIMEOUT_INFINITE, 1));
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer *now = nullptr, *next = nullptr;
  OK(frugal_trainer_create(e, &config, &now));
  const long before = threads_of(controller.pid());
  config.flags = FRUGAL_TRAINER_REPLACE;
  for (int i = 0; i < 8; ++i) {
    OK(frugal_trainer_create(e, &config, &next));
    OK(frugal_trainer_close(now));
    now = next;
    OK(frugal_step_begin(now, 0, FRUGAL_TIMEOUT_INFINITE));
  }
  // A thread ends a moment after its last message.
  for (int i = 0; i < 1000 && threads_of(controller.pid()) > before + 1; ++i) usleep(10000);
  EXPECT_LE(threads_of(controller.pid()), before + 1);
  OK(frugal_close(e));
}

// However many trainers a process does not close: they keep no other process out, and their end is
// not that of the last.
TEST_F(Service, ReplacedTrainersAreLeftOpen) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer leaves no addresses for the staging memory of so many trainers";
#endif
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, kNeverMs, 1));
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  std::vector<frugal_trainer*> all(50);
  uint64_t step = 0;
  for (frugal_trainer*& t : all) {
    OK(frugal_trainer_create(e, &config, &t));
    config.flags = FRUGAL_TRAINER_REPLACE;
    OK(frugal_step_begin(t, step, kNeverMs));
    OK(frugal_step_end(t, step, 0));
    ++step;
    OK(frugal_step_begin(t, step, kNeverMs));
  }
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_end(all[i], i + 1, 0)) << i;
    OK(frugal_trainer_close(all[i]));
  }
  OK(frugal_step_end(all.back(), step, 0));
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// A process that replaces a trainer and one that closes it at the same time do not hinder each
// other.
TEST_F(Service, ReplacedWhileClosed) {
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  OK(Open(address(), &e, kNeverMs, 1));
  OK(Open(address(), &other, kNeverMs, 1));
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer *now = nullptr, *next = nullptr;
  OK(frugal_trainer_create(e, &config, &now));
  config.flags = FRUGAL_TRAINER_REPLACE;
  for (int i = 0; i < 100; ++i) {
    OK(frugal_step_begin(now, 0, kNeverMs));
    std::thread closes([&] {
      if (i % 3) usleep(static_cast<useconds_t>(i % 50 * 10));
      EXPECT_EQ(FRUGAL_OK, frugal_trainer_close(now)) << Error();
    });
    const int status = frugal_trainer_create(i % 2 ? e : other, &config, &next);
    closes.join();
    ASSERT_EQ(FRUGAL_OK, status) << Error();
    now = next;
  }
  OK(frugal_close(other));
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// Threads that find a table for the first time at once find the same.
TEST_F(Service, OneHandleOfATable) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, kNeverMs, 1));
  for (int i = 0; i < 20; ++i) {
    const std::string name = std::string("t") + std::to_string(i);
    const frugal_table_config tc = TableConfig(name.c_str(), 100);
    {
      frugal_engine* maker = nullptr;
      frugal_table* table = nullptr;
      OK(Open(address(), &maker, kNeverMs, 1));
      OK(frugal_table_create(maker, &tc, &table));
      OK(frugal_close(maker));
    }
    frugal_table* found[4] = {};
    std::vector<std::thread> threads;
    for (frugal_table*& f : found)
      threads.emplace_back(
          [&] { EXPECT_EQ(FRUGAL_OK, frugal_table_find(e, name.c_str(), &f)) << Error(); });
    for (std::thread& t : threads) t.join();
    for (frugal_table* f : found) EXPECT_EQ(f, found[0]);
  }
  OK(frugal_close(e));
}

// An engine of one rank with a table of 100 rows, and the rank's trainer.
void OneRank(const std::string& address, frugal_engine** e, frugal_table** table,
             frugal_trainer** t) {
  OK(Open(address, e, FRUGAL_TIMEOUT_INFINITE, 1));
  const frugal_table_config tc = TableConfig("t", 100);
  OK(frugal_table_create(*e, &tc, table));
  OK(Join(*e, 0, t));
}

// One process takes a rank over from itself: the old trainer reads nothing more, and its end is not
// the new one's.
TEST_F(Service, ReplacedBySelf) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  frugal_table* table = nullptr;
  frugal_trainer *x = nullptr, *y = nullptr;
  ASSERT_NO_FATAL_FAILURE(OneRank(address(), &e, &table, &x));
  const uint64_t keys[] = {1, 2, 3};
  std::vector<float> rows(3 * 8, 1);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys;
  op.count = 3;
  op.rows_out = rows.data();
  op.grads = rows.data();
  OK(frugal_prefetch(x, 0, &op, 1, nullptr));
  OK(frugal_step_begin(x, 0, kNeverMs));
  OK(frugal_lookup(x, &op, 1));
  OK(Join(e, 0, &y, FRUGAL_TRAINER_REPLACE));
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_lookup(x, &op, 1)) << Error();
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_push_grad(x, &op, 1)) << Error();
  for (uint64_t s = 0; s < 3; ++s) {
    OK(frugal_step_begin(y, s, kNeverMs));
    OK(frugal_push_grad(y, &op, 1));
    if (s == 1) {
      EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_lookup(x, &op, 1)) << Error();
      OK(frugal_trainer_close(x));
    }
    OK(frugal_step_end(y, s, 0));
  }
  OK(frugal_close(e));
}

// A batch belongs to its trainer alone, although the controller gives the same numbers to batches
// of the rank's next trainer.
TEST_F(Service, ABatchOfAReplacedTrainer) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  frugal_table* table = nullptr;
  frugal_trainer *x = nullptr, *y = nullptr;
  ASSERT_NO_FATAL_FAILURE(OneRank(address(), &e, &table, &x));
  std::vector<float> rows(2 * 8);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  const uint64_t before[] = {1, 2}, now[] = {7, 8};
  OK(frugal_put(table, now, 2, 0, rows.data(), 0));
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.count = 2;
  frugal_batch *of_x = nullptr, *of_y = nullptr;
  op.keys = before;
  OK(frugal_prefetch(x, 0, &op, 1, &of_x));
  OK(Join(e, 0, &y, FRUGAL_TRAINER_REPLACE));
  op.keys = now;
  OK(frugal_prefetch(y, 0, &op, 1, &of_y));
  OK(frugal_step_begin(y, 0, -1));
  const std::vector<float> grads(2 * 8, 1);
  std::vector<float> out(2 * 8, -1);
  frugal_op use = FRUGAL_OP_INIT;
  use.table = table;
  use.rows_out = out.data();
  use.grads = grads.data();
  use.batch = of_x;
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_lookup(y, &use, 1));
  EXPECT_TRUE(Says("another trainer")) << Error();
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_push_grad(y, &use, 1));
  EXPECT_TRUE(Says("another trainer")) << Error();
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_prefetch_cancel(y, of_x));
  EXPECT_EQ(std::vector<float>(2 * 8, -1), out);
  OK(frugal_trainer_close(x));
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_lookup(y, &use, 1));
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_prefetch_cancel(y, of_x));
  use.batch = of_y;
  OK(frugal_lookup(y, &use, 1));
  EXPECT_EQ(rows, out);
  OK(frugal_step_end(y, 0, 0));
  // Nothing was pushed.
  OK(frugal_get(table, now, 2, 0, out.data(), 0, nullptr));
  EXPECT_EQ(rows, out);
  OK(frugal_close(e));
}

double CpuSeconds(pid_t pid) {
  double ns = 0;
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task/";
  for (const std::string& task : entries_of(tasks)) {
    std::FILE* s = std::fopen((tasks + task + "/schedstat").c_str(), "r");
    if (!s) continue;
    double one = 0;
    if (std::fscanf(s, "%lf", &one) == 1) ns += one;
    std::fclose(s);
  }
  return ns * 1e-9;
}

// What a process moves by system calls, as its tracer sees them: whatever library makes them.
struct Moved {
  uint64_t calls = 0, socket = 0, other = 0;  // calls, bytes, bytes
  uint64_t unclear = 0;                       // calls whose bytes are unknown
};

// Runs `body` in a child, and sums up for each value of the number that it sets.
class Traced {
 public:
  static constexpr int kPhases = 3;
  // The child's exit status, 1000 + the signal, or -1 where no process may be traced.
  int Run(const std::function<int(std::atomic<int>&)>& body) {
    auto* phase = static_cast<std::atomic<int>*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    new (phase) std::atomic<int>(0);
    const pid_t pid = fork_child();
    if (pid == 0) {
      if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
      raise(SIGSTOP);
      _exit(body(*phase));
    }
    int status = 0;
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) return -1;
    ptrace(PTRACE_SETOPTIONS, pid, nullptr,
           PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL);
    std::map<pid_t, uint64_t> calls;  // by thread: the call that it is in, with its descriptor
    std::map<pid_t, int> descriptors;
    ptrace(PTRACE_SYSCALL, pid, nullptr, nullptr);
    for (;;) {
      const pid_t thread = waitpid(-1, &status, __WALL);
      if (thread < 0) return -1;
      if (WIFEXITED(status) || WIFSIGNALED(status)) {
        if (thread != pid) continue;
        munmap(phase, 4096);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
      }
      int signal = WSTOPSIG(status);
      if (signal == (SIGTRAP | 0x80)) {
        signal = 0;
        __ptrace_syscall_info info{};
        if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof info, &info) > 0) {
          if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
            calls[thread] = info.entry.nr;
            descriptors[thread] = static_cast<int>(info.entry.args[0]);
          } else if (info.op == PTRACE_SYSCALL_INFO_EXIT && calls.count(thread)) {
            Note(&moved_[phase->load()], pid, calls[thread], descriptors[thread], info.exit.rval);
          }
        }
      } else if (signal == SIGTRAP || signal == SIGSTOP) {
        signal = 0;  // a thread more
      }
      ptrace(PTRACE_SYSCALL, thread, nullptr, signal);
    }
  }
  const Moved& in(int phase) const { return moved_[phase]; }

 private:
  static void Note(Moved* m, pid_t pid, uint64_t call, int fd, int64_t result) {
    ++m->calls;
    switch (call) {
      case SYS_read:
      case SYS_write:
      case SYS_readv:
      case SYS_writev:
      case SYS_pread64:
      case SYS_pwrite64:
      case SYS_preadv:
      case SYS_pwritev:
      case SYS_preadv2:
      case SYS_pwritev2:
      case SYS_sendto:
      case SYS_recvfrom:
      case SYS_sendmsg:
      case SYS_recvmsg: {
        if (result <= 0) return;
        char link[64] = {};
        const std::string name = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
        const bool told = readlink(name.c_str(), link, sizeof link - 1) > 0;
        (told && std::strncmp(link, "socket:", 7) != 0 ? m->other : m->socket) +=
            static_cast<uint64_t>(result);
        return;
      }
      case SYS_sendmmsg:
      case SYS_recvmmsg:
      case SYS_splice:
      case SYS_tee:
      case SYS_vmsplice:
      case SYS_sendfile:
      case SYS_copy_file_range:
      case SYS_process_vm_readv:
      case SYS_process_vm_writev:
      case SYS_io_uring_setup:
      case SYS_io_uring_enter:
        ++m->unclear;
    }
  }
  Moved moved_[kPhases];
};

// Of a trainer's side, which is the other end of all that the controller sends and receives.
TEST_F(Service, NoKeyGoesOverTheSocket) {
  ControllerProgram controller(address());
  constexpr size_t kKeys = 65536;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kSteps = 100;
#else
  constexpr uint64_t kSteps = 1000;
#endif
  Traced traced;
  const int status = traced.Run([&](std::atomic<int>& phase) {
    frugal_engine* e = nullptr;
    if (Open(address(), &e, kNeverMs, 1)) return 1;
    frugal_table* table = nullptr;
    const frugal_table_config tc = TableConfig("t", 200000);
    if (frugal_table_create(e, &tc, &table)) return 2;
    frugal_trainer* t = nullptr;
    if (Join(e, 0, &t)) return 3;
    std::vector<uint64_t> keys(kKeys);
    std::vector<float> rows(kKeys * 8);
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = kKeys;
    op.rows_out = rows.data();
    op.grads = rows.data();
    phase = 1;
    for (uint64_t s = 0; s < kSteps; ++s) {
      for (size_t i = 0; i < kKeys; ++i) keys[i] = (i * 2654435761u + s * 977) % 200000;
      // Each third is not declared.
      if (s % 3 && frugal_prefetch(t, s, &op, 1, nullptr)) return 4;
      if (frugal_step_begin(t, s, -1) || frugal_lookup(t, &op, 1) || frugal_push_grad(t, &op, 1) ||
          frugal_step_end(t, s, 0))
        return 5;
    }
    phase = 2;
    frugal_stats stats{};
    stats.struct_size = sizeof stats;
    if (frugal_get_stats(e, &stats) || stats.keys_pushed != kSteps * kKeys) return 6;
    return frugal_close(e) ? 7 : 0;
  });
  if (status == -1 || status == 77) GTEST_SKIP() << "no process may be traced here";
  ASSERT_EQ(0, status);
  // The tracer sees what goes over the socket.
  EXPECT_GT(traced.in(0).socket, 500u);
  EXPECT_GT(traced.in(2).socket, 300u);
  const Moved& m = traced.in(1);
  EXPECT_EQ(0u, m.socket);
  EXPECT_EQ(0u, m.unclear);
  // An eventfd's wake-up has eight bytes: less than one for each step.
  EXPECT_LT(m.other, kSteps * 8);
  std::printf(
      "%lu steps of %zu keys: %lu system calls, %lu bytes on sockets, %lu by others; before and "
      "after %lu and %lu bytes on sockets\n",
      kSteps, kKeys, m.calls, m.socket, m.other, traced.in(0).socket, traced.in(2).socket);
}

// Keys that were not declared go through a ring of 4 MiB: more than fit there at once, and their
// gradients, and the rows of a get and a put.
TEST_F(Service, MoreThanARing) {
  ControllerProgram controller(address());
  constexpr size_t kKeys = 1'200'000;
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, kNeverMs, 1));
  frugal_table* table = nullptr;
  frugal_table_config tc = TableConfig("t", kKeys);
  tc.dim = 2;
  tc.optimizer.lr = 1;
  OK(frugal_table_create(e, &tc, &table));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> rows(kKeys * 2), grads(kKeys * 2);
  for (size_t i = 0; i < kKeys; ++i) {
    keys[i] = (i * 7 + 3) % kKeys;
    rows[2 * i] = rows[2 * i + 1] = static_cast<float>(keys[i]);
    grads[2 * i] = 1;
    grads[2 * i + 1] = -1;
  }
  OK(frugal_put(table, keys.data(), kKeys, 0, rows.data(), 0));
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = kKeys;
  op.rows_out = rows.data();
  op.grads = grads.data();
  auto off = [&](float by) {
    size_t wrong = 0;
    for (size_t i = 0; i < kKeys; ++i) {
      const float key = static_cast<float>(keys[i]);
      wrong += rows[2 * i] != key - by || rows[2 * i + 1] != key + by;
    }
    return wrong;
  };
  OK(frugal_step_begin(t, 0, -1));
  std::fill(rows.begin(), rows.end(), -5.0f);
  OK(frugal_lookup(t, &op, 1));
  EXPECT_EQ(0u, off(0));
  OK(frugal_push_grad(t, &op, 1));
  OK(frugal_step_end(t, 0, 0));
  std::fill(rows.begin(), rows.end(), -5.0f);
  OK(frugal_get(table, keys.data(), kKeys, 0, rows.data(), 0, nullptr));
  EXPECT_EQ(0u, off(1));
  OK(frugal_close(e));
}

// So often the threads of a process have slept or waited.
uint64_t Sleeps(pid_t pid) {
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task/";
  uint64_t all = 0;
  for (const std::string& task : entries_of(tasks)) {
    std::FILE* f = std::fopen((tasks + task + "/status").c_str(), "r");
    if (!f) continue;
    char line[256];
    unsigned long n;
    while (std::fgets(line, sizeof line, f))
      if (std::sscanf(line, "voluntary_ctxt_switches: %lu", &n) == 1) all += n;
    std::fclose(f);
  }
  return all;
}

// An idle process sleeps: it uses no processor time, and no thread polls for work. 20 wake-ups in 3
// s of all threads of a process would show a thread that does. A thread that always polls never
// sleeps, and shows in the processor time. The steps' remaining work ends first.
TEST_F(Service, Idleness) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer has a thread of its own that wakes up";
#endif
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, FRUGAL_TIMEOUT_INFINITE, 1));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  for (uint64_t s = 0; s < 100; ++s) {
    OK(frugal_step_begin(t, s, -1));
    OK(frugal_step_end(t, s, 0));
  }
  constexpr uint64_t kWakeUps = 20;
  constexpr double kSeconds = 0.005 * 3;  // of processor time, which other processes do not add to
  uint64_t woken = kWakeUps;
  double controllers = kSeconds, own = kSeconds;
  for (int i = 0; i < 5 && (woken >= kWakeUps || controllers >= kSeconds || own >= kSeconds); ++i) {
    const double its_before = CpuSeconds(controller.pid()), own_before = CpuSeconds(getpid());
    const uint64_t before = Sleeps(controller.pid()) + Sleeps(getpid());
    sleep(3);
    woken = Sleeps(controller.pid()) + Sleeps(getpid()) - before;
    controllers = CpuSeconds(controller.pid()) - its_before;
    own = CpuSeconds(getpid()) - own_before;
    std::printf("idle for 3 s: controller %.4f%%, trainer %.4f%% of a core, %lu wake-ups\n",
                controllers / 3 * 100, own / 3 * 100, woken);
  }
  EXPECT_LT(woken, kWakeUps);
  EXPECT_LT(controllers, kSeconds);
  EXPECT_LT(own, kSeconds);
  OK(frugal_close(e));
}

// One of a controller's metrics.
double Metric(frugal_engine* e, const std::string& name) {
  std::string text(1 << 16, 0);
  size_t size = 0;
  EXPECT_EQ(FRUGAL_OK, frugal_metrics(e, text.data(), text.size(), &size)) << Error();
  const size_t at = text.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + name.size() + 2);
}

// Where trainers have all processors, the controller's flush threads rest, and work again when
// there is idle time. Rows are right all the while, of batches that were declared ahead of the
// steps, too.
TEST_F(Service, FlushThreadsRest) {
  cpu_set_t mine, one;
  ASSERT_EQ(0, sched_getaffinity(0, sizeof mine, &mine));
  CPU_ZERO(&one);
  for (int i = 0; CPU_COUNT(&one) == 0; ++i)
    if (CPU_ISSET(i, &mine)) CPU_SET(i, &one);
  ControllerProgram controller(address(),
                               [&] { return sched_setaffinity(0, sizeof one, &one) == 0; });
  frugal_config c = Config(address(), kNeverMs);
  c.world_size = 1;
  c.lookahead = 8;
  c.flush_threads = 1;
  frugal_engine* e = nullptr;
  OK(frugal_open(&c, &e));
  frugal_table* table = nullptr;
  frugal_table_config tc = TableConfig("t", 1 << 16);
  tc.optimizer.lr = 1;
  OK(frugal_table_create(e, &tc, &table));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  EXPECT_EQ(1, Metric(e, "frugal_flush_threads"));

  constexpr size_t kKeys = 8192;  // 256 KiB of rows: no small step
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> rows(kKeys * 8);
  const std::vector<float> grads(kKeys * 8, 1);
  std::vector<uint32_t> pushed(tc.rows);
  uint64_t step = 0, declared = 0;
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = kKeys;
  auto batch = [&](uint64_t of) {  // each key once
    for (size_t i = 0; i < kKeys; ++i) keys[i] = (of * 2654435761u % tc.rows + i * 13) % tc.rows;
  };
  auto train = [&] {
    for (; declared <= step + 4; ++declared) {
      batch(declared);
      OK(frugal_prefetch(t, declared, &op, 1, nullptr));
    }
    batch(step);
    OK(frugal_step_begin(t, step, FRUGAL_TIMEOUT_DEFAULT));
    op.rows_out = rows.data();
    OK(frugal_lookup(t, &op, 1));
    for (size_t i = 0; i < rows.size(); ++i)
      ASSERT_EQ(-static_cast<float>(pushed[keys[i / 8]]), rows[i])
          << "step " << step << ", key " << keys[i / 8];
    op.rows_out = nullptr;
    op.grads = grads.data();
    OK(frugal_push_grad(t, &op, 1));
    OK(frugal_step_end(t, step, 0));
    op.grads = nullptr;
    for (uint64_t key : keys) ++pushed[key];
    ++step;
  };
  const auto until = [&](double threads, unsigned pause_ms) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    // What other programs take looks like idle time, and a sanitizer's programs are seldom alone:
    // so much is trained, whether they rest or not. When they do is for the optimized build, and
    // for pacing_test.
    for (int i = 0; i < 100 && !HasFailure(); ++i) {
      train();
      if (pause_ms) std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    }
    (void)threads;
    return;
#endif
    const auto begin = std::chrono::steady_clock::now();
    const uint64_t first = step;
    const long before = ticks_of_others(controller.pid());
    while (Metric(e, "frugal_flush_threads") != threads && step < first + 1000 && !HasFailure())
      for (int i = 0; i < 8 && !HasFailure(); ++i) {
        train();
        if (pause_ms) std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
      }
    if (Metric(e, "frugal_flush_threads") == threads) return;
    // What other programs take looks like idle time: only where they take little is it sure.
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
    const double others = static_cast<double>(ticks_of_others(controller.pid()) - before) /
                          static_cast<double>(sysconf(_SC_CLK_TCK)) / wall.count();
    EXPECT_GT(others, 0.05) << "not " << threads << " threads after " << step << " steps";
    std::printf("not seen: other programs have %.2f processors\n", others);
  };
  for (int i = 0; i < 2; ++i) {
    until(0, 0);
    for (int k = 0; k < 40 && !HasFailure(); ++k) train();
    until(1, 20);
  }
  // Once the flush threads rest, the thread that needs a pending update writes it.
  until(0, 0);
  OK(frugal_flush(e, FRUGAL_TIMEOUT_DEFAULT));
  std::vector<float> all(tc.rows * 8);
  std::vector<uint64_t> ids(tc.rows);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  OK(frugal_get(table, ids.data(), ids.size(), 0, all.data(), 0, nullptr));
  for (size_t i = 0; i < all.size(); ++i)
    ASSERT_EQ(-static_cast<float>(pushed[i / 8]), all[i]) << "key " << i / 8;
  std::printf("%lu steps\n", step);
  OK(frugal_close(e));
}

// Two ranks, whose rows of table 't' are as the steps say that they have trained.
struct Job {
  frugal_engine *a = nullptr, *b = nullptr;
  frugal_table *ta = nullptr, *tb = nullptr;
  frugal_trainer *t0 = nullptr, *t1 = nullptr;
  uint64_t step = 0, rows = 0;
  void Start(const std::string& address, int64_t timeout_ms) {
    OK(Open(address, &a, timeout_ms));
    OK(Open(address, &b, timeout_ms));
    frugal_table_config c = TableConfig("t", 4);
    c.optimizer.lr = 1;
    OK(frugal_table_create(a, &c, &ta));
    OK(frugal_table_create(b, &c, &tb));
    OK(Join(a, 0, &t0));
  }
  void Push(frugal_trainer* t, frugal_table* table) const { OK(PushOnes(t, table, step % 4)); }
  void Step() {
    int status;
    while ((status = frugal_step_begin(t0, step, kNeverMs)) == FRUGAL_ERR_PEER_LOST &&
           Says("begin step")) {
    }
    ASSERT_EQ(FRUGAL_OK, status) << Error();
    OK(frugal_step_begin(t1, step, kNeverMs));
    Push(t0, ta);
    Push(t1, tb);
    OK(frugal_step_end(t0, step, 0));
    OK(frugal_step_end(t1, step, 0));
    ++step;
  }
  void Check() const {
    const uint64_t keys[] = {0, 1, 2, 3};
    std::vector<float> rows(4 * 8);
    OK(frugal_get(ta, keys, 4, 0, rows.data(), 0, nullptr));
    for (size_t i = 0; i < rows.size(); ++i)
      EXPECT_EQ(-2.0f * static_cast<float>((step + 3 - i / 8) / 4), rows[i]) << i;
  }
};

// The first trainer's process may be the controller, and its death is then the controller's: the
// others learn of it at once, read out what is committed, and find the address free. So they do
// when it only closes the engine.
class Host : public Service {
 protected:
  void EndsBy(char way);
};
TEST_F(Host, IsKilled) { EndsBy('k'); }
TEST_F(Host, Exits) { EndsBy('x'); }
TEST_F(Host, ClosesAndLivesOn) { EndsBy('c'); }

void Host::EndsBy(char way) {
  int said[2], told[2];
  ASSERT_EQ(0, pipe2(said, O_CLOEXEC));
  ASSERT_EQ(0, pipe2(told, O_CLOEXEC));
  const pid_t host = fork_child();
  if (host == 0) {
    frugal_config c = Config("");
    c.backing = FRUGAL_BACKING_SHM;
    Job job;
    frugal_table_config tc = TableConfig("t", 4);
    tc.optimizer.lr = 1;
    if (frugal_open(&c, &job.a) || frugal_table_create(job.a, &tc, &job.ta) ||
        Join(job.a, 0, &job.t0) || frugal_serve(job.a, address().c_str()) ||
        write(said[1], "s", 1) != 1)
      _exit(2);
    for (;; ++job.step) {
      if (frugal_step_begin(job.t0, job.step, -1)) _exit(3);
      job.Push(job.t0, job.ta);
      if (job.step == 6) break;  // and it never ends that one
      if (frugal_step_end(job.t0, job.step, 0)) _exit(4);
    }
    if (write(said[1], "i", 1) != 1) _exit(5);
    char word = 0;
    if (read(told[0], &word, 1) != 1) _exit(6);
    if (word == 'x') exit(0);
    if (word == 'c' && frugal_close(job.a)) _exit(7);
    for (;;) pause();
  }
  close(said[1]);
  close(told[0]);
  char word;
  ASSERT_EQ(1, read(said[0], &word, 1));
  Job job;
  OK(Open(address(), &job.b, kNeverMs));
  OK(frugal_table_find(job.b, "t", &job.tb));
  OK(Join(job.b, 1, &job.t1));
  for (; job.step < 6; ++job.step) {
    OK(frugal_step_begin(job.t1, job.step, -1));
    job.Push(job.t1, job.tb);
    OK(frugal_step_end(job.t1, job.step, 0));
  }
  OK(frugal_step_begin(job.t1, 6, -1));
  job.Push(job.t1, job.tb);
  OK(frugal_step_end(job.t1, 6, 0));
  ASSERT_EQ(1, read(said[0], &word, 1));
  close(said[0]);
  // One call is under way, and another is made afterwards.
  std::thread waits(
      [&] { EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(job.t1, 7, -1)) << Error(); });
  usleep(10000);
  if (way == 'k')
    kill(host, SIGKILL);
  else
    ASSERT_EQ(1, write(told[1], &way, 1));
  close(told[1]);
  waits.join();
  int status = 0;
  if (way != 'c') {
    ASSERT_EQ(host, waitpid(host, &status, 0));
    ASSERT_TRUE(way == 'k' ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << status;
  }
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(job.t1, 7, -1));
  job.ta = job.tb;
  uint64_t committed = 99;
  // A host may take its time to close. The first call that is made then reads out, whichever it is.
  int first;
  for (int i = 0;
       (first = frugal_table_count(job.tb, &committed)) == FRUGAL_ERR_PEER_LOST && i < 10; ++i) {
  }
  ASSERT_EQ(FRUGAL_OK, first) << Error();
  EXPECT_EQ(4u, committed);
  job.Check();
  OK(frugal_committed_step(job.b, &committed));
  EXPECT_EQ(5u, committed);
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_health(job.b));
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(job.t1, 6, -1));
  ControllerProgram next(address());
  EXPECT_TRUE(next.serves());
  frugal_engine* again = nullptr;
  OK(Open(address(), &again));
  OK(frugal_close(again));
  job.Check();
  OK(frugal_close(job.b));
  if (way == 'c') {
    ASSERT_EQ(0, waitpid(host, &status, WNOHANG));  // all the while
    kill(host, SIGKILL);
    ASSERT_EQ(host, waitpid(host, &status, 0));
  }
}

// A job of one rank, whose gradients change with the step.
struct Alone {
  static constexpr size_t kRows = 6000, kDim = 512, kKeys = 5000;
  static constexpr uint64_t kSteps = 30;
  frugal_engine* engine = nullptr;
  frugal_table* table = nullptr;
  frugal_trainer* trainer = nullptr;
  std::vector<uint64_t> keys = std::vector<uint64_t>(kKeys);
  // Plain arrays: without optimization each access to a vector is a call, and these are millions.
  std::unique_ptr<float[]> rows{new float[kKeys * kDim]};

  int Start(double cache) {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.backing = FRUGAL_BACKING_SHM;
    c.flush_mode = FRUGAL_FLUSH_DEFERRED;
    c.flush_threads = 0;  // callers write everything
    frugal_table_config tc = TableConfig("t", kRows);
    tc.dim = kDim;
    tc.optimizer.kind = FRUGAL_ADAGRAD;
    frugal_trainer_config rc = FRUGAL_TRAINER_CONFIG_INIT;
    rc.cache_ratio = cache;
    if (int s = frugal_open(&c, &engine)) return s;
    if (int s = frugal_table_create(engine, &tc, &table)) return s;
    return frugal_trainer_create(engine, &rc, &trainer);
  }
  int Step(uint64_t step) {
    for (size_t i = 0; i < kKeys; ++i) keys[i] = (i * 2654435761u + step * step * 977) % kRows;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = kKeys;
    op.rows_out = rows.get();
    op.grads = rows.get();
    if (int s = frugal_prefetch(trainer, step, &op, 1, nullptr)) return s;
    if (int s = frugal_step_begin(trainer, step, -1)) return s;
    if (int s = frugal_lookup(trainer, &op, 1)) return s;
    float* const values = rows.get();
    for (size_t i = 0; i < kKeys * kDim; ++i)
      values[i] = values[i] * 0.1f + static_cast<float>((i + step) % 13) - 6;
    if (int s = frugal_push_grad(trainer, &op, 1)) return s;
    return frugal_step_end(trainer, step, 0);
  }
  // Of all rows and their states.
  static int Hash(frugal_table* of, uint64_t* out) {
    std::vector<uint64_t> all(kRows);
    for (size_t i = 0; i < kRows; ++i) all[i] = i;
    const std::unique_ptr<uint64_t[]> bits(new uint64_t[kRows * kDim]);  // two floats each
    const int s = frugal_get(of, all.data(), kRows, FRUGAL_WITH_STATE,
                             reinterpret_cast<float*>(bits.get()), 0, nullptr);
    *out = 0;
    if (s != FRUGAL_OK) return s;
    uint64_t hash = 14695981039346656037u;
    const uint64_t* const from = bits.get();
    for (size_t i = 0; i < kRows * kDim; ++i) hash = (hash ^ from[i]) * 1099511628211u;
    *out = hash;
    return s;
  }
};

// While the host trains and other threads of it flush, it closes: no call writes any more when the
// tables are read out, and nothing that is committed is missing.
TEST_F(Host, ClosesInTheMiddleOfItsOwnCalls) {
  // In a child, as the hosts: this process has no threads when it forks.
  constexpr size_t kBytes = (Alone::kSteps + 1) * sizeof(uint64_t);
  void* shared = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  uint64_t* const before = static_cast<uint64_t*>(shared);  // each step
  ASSERT_EQ(0, InChild([&] {
              Alone alone;
              if (alone.Start(0)) return 1;
              for (uint64_t s = 0; s <= Alone::kSteps; ++s) {
                if (Alone::Hash(alone.table, &before[s])) return 2;
                if (s < Alone::kSteps && alone.Step(s)) return 3;
              }
              return frugal_close(alone.engine) ? 4 : 0;
            }));
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint32_t kRounds = 8;
#else
  constexpr uint32_t kRounds = 40;
#endif
  for (uint32_t round = 0; round < kRounds; ++round) {
    int said[2], told[2];
    ASSERT_EQ(0, pipe2(said, O_CLOEXEC));
    ASSERT_EQ(0, pipe2(told, O_CLOEXEC));
    const pid_t host = fork_child();
    if (host == 0) {
      Alone alone;
      char word;
      // It steps, or six threads flush what three steps have left.
      const bool steps = round % 2;
      if (alone.Start(steps ? 0.5 : 0) || frugal_serve(alone.engine, address().c_str()) ||
          write(said[1], "s", 1) != 1 || read(told[0], &word, 1) != 1)
        _exit(2);
      std::vector<std::thread> threads;
      if (steps)
        threads.emplace_back([&] {
          uint64_t s = 0;
          int status = FRUGAL_OK;
          for (; s < Alone::kSteps && status == FRUGAL_OK; ++s) status = alone.Step(s);
          if (status != FRUGAL_OK && status != FRUGAL_ERR_CLOSED && status != FRUGAL_ERR_BAD_HANDLE)
            _exit(3);
        });
      else if (alone.Step(0) || alone.Step(1) || alone.Step(2))
        _exit(3);
      else
        for (int i = 0; i < 6; ++i)
          threads.emplace_back([&] { (void)frugal_flush(alone.engine, -1); });
      usleep(steps ? 1000 + round * 7919 % 24 * 2000 : round * 7919 % 12 * 400);
      if (frugal_close(alone.engine)) _exit(4);
      for (std::thread& t : threads) t.join();
      for (;;) pause();
    }
    close(said[1]);
    close(told[0]);
    char word;
    ASSERT_EQ(1, read(said[0], &word, 1));
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.service = address().c_str();
    c.flags = FRUGAL_OBSERVE;
    frugal_engine* e = nullptr;
    OK(frugal_open(&c, &e));
    frugal_table* table = nullptr;
    OK(frugal_table_find(e, "t", &table));
    ASSERT_EQ(1, write(told[1], "g", 1));
    // The moment it has ended.
    while (frugal_health(e) == FRUGAL_OK) {
    }
    uint64_t read_out;
    int status;
    for (int i = 0; (status = Alone::Hash(table, &read_out)) == FRUGAL_ERR_PEER_LOST &&
                    !Says("lost in") && i < 10;
         ++i) {
    }
    ASSERT_EQ(FRUGAL_OK, status) << round << ": " << Error();
    uint64_t step = 0;
    OK(frugal_committed_step(e, &step));
    step = step == FRUGAL_NO_STEP ? 0 : step + 1;
    EXPECT_EQ(before[step], read_out) << round << ", before step " << step;
    OK(frugal_close(e));
    kill(host, SIGKILL);
    int ended = 0;
    ASSERT_EQ(host, waitpid(host, &ended, 0));
    EXPECT_TRUE(WIFSIGNALED(ended)) << ended;
    close(said[0]);
    close(told[1]);
  }
  munmap(shared, kBytes);
}

// A controller that is asked to stop is treated as lost. No call reports that the engine was
// closed, which it was not.
TEST_F(Service, StoppedInGoodOrder) {
  for (int round = 0; round < 10; ++round) {
    ControllerProgram controller(address());
    Job job;
    job.Start(address(), kNeverMs);
    OK(Join(job.b, 1, &job.t1));
    job.Step();
    job.Step();
    OK(frugal_step_begin(job.t0, 2, -1));
    OK(frugal_step_begin(job.t1, 2, -1));
    job.Push(job.t0, job.ta);
    OK(frugal_step_end(job.t0, 2, 0));
    std::thread waits(
        [&] { EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(job.t0, 3, -1)) << Error(); });
    usleep(static_cast<useconds_t>(round * 500));
    kill(controller.pid(), SIGTERM);
    waits.join();
    if (round % 2) {
      // A concurrent call may begin before the controller's process has ended, and waits for that.
      int beside;
      for (int i = 0;
           (beside = frugal_table_count(job.ta, &job.rows)) == FRUGAL_ERR_PEER_LOST && i < 10;
           ++i) {
      }
      EXPECT_EQ(FRUGAL_OK, beside) << Error();
      job.Check();
    }
    EXPECT_EQ(0, controller.wait_for());
    uint64_t step = 99;
    OK(frugal_committed_step(job.a, &step));
    EXPECT_EQ(1u, step);
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_end(job.t1, 2, 0)) << Error();
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_health(job.b));
    OK(frugal_committed_step(job.b, &step));
    EXPECT_EQ(1u, step);
    job.Check();
    OK(frugal_close(job.a));
    OK(frugal_close(job.b));
  }
}

// An abandoned trainer is as one whose process has ended: it is waited for, and what it did is
// undone.
TEST_F(Service, AbandonedTrainer) {
  ControllerProgram controller(address());
  Job job;
  job.Start(address(), kNeverMs);
  OK(Join(job.b, 1, &job.t1));
  job.Step();
  OK(frugal_step_begin(job.t0, 1, kNeverMs));
  OK(frugal_step_begin(job.t1, 1, kNeverMs));
  job.Push(job.t0, job.ta);
  OK(frugal_step_end(job.t0, 1, 0));
  job.Push(job.t1, job.tb);
  OK(frugal_trainer_abandon(job.t1));
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_trainer_abandon(job.t1));
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(job.t0, 2, kNeverMs));
  EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_step_begin(job.t0, 1, 50));
  EXPECT_TRUE(Says("rank 1")) << Error();
  job.Check();
  OK(Join(job.b, 1, &job.t1));
  job.Step();
  job.Check();
  // In an engine of this process it is closed.
  frugal_engine* own = nullptr;
  frugal_trainer *here = nullptr, *other = nullptr;
  OK(Open("", &own));
  OK(Join(own, 0, &here));
  OK(Join(own, 1, &other));
  OK(frugal_trainer_abandon(other));
  OK(frugal_step_begin(here, 0, kNeverMs));
  OK(frugal_step_end(here, 0, 0));
  OK(frugal_step_begin(here, 1, kNeverMs));
  OK(frugal_close(own));
  OK(frugal_close(job.a));
  OK(frugal_close(job.b));
}

// While a job goes on.
TEST_F(Service, GarbageOnTheSocket) {
  ControllerProgram controller(address());
  Job job;
  job.Start(address(), kNeverMs);
  OK(Join(job.b, 1, &job.t1));
  std::vector<int> open;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path, address().c_str(), address().size());
    ASSERT_EQ(0, connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name));
    std::mt19937 random(seed);
    std::vector<uint32_t> words(2 + random() % 500);
    for (uint32_t& w : words) w = random();
    if (seed % 3 != 0) words[0] = 0;
    if (seed % 3 == 1) words[1] = static_cast<uint32_t>(words.size());  // what follows is less
    if (seed % 3 == 2) words[1] = UINT32_MAX;                           // more than it takes
    (void)send(fd, words.data(), words.size() * 4 - seed % 7, MSG_NOSIGNAL);
    if (seed % 2)
      open.push_back(fd);
    else
      close(fd);
    job.Step();
  }
  job.Check();
  for (int fd : open) close(fd);
  OK(frugal_close(job.a));
  OK(frugal_close(job.b));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// The shared memory that this process can write, each mapping's bounds.
std::vector<std::pair<uintptr_t, uintptr_t>> WritableShared() {
  std::vector<std::pair<uintptr_t, uintptr_t>> all;
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[512], mode[5];
  uintptr_t from, to;
  while (std::fgets(line, sizeof line, maps))
    if (std::sscanf(line, "%lx-%lx %4s", &from, &to, mode) == 3 && std::strcmp(mode, "rw-s") == 0 &&
        std::strstr(line, "memfd:"))
      all.emplace_back(from, to);
  std::fclose(maps);
  return all;
}

// All of it gets other bytes. Returns how much there is.
size_t Scribble(uint32_t seed) {
  std::mt19937_64 random(seed);
  size_t found = 0;
  for (const auto& [from, to] : WritableShared()) {
    found += to - from;
    auto* words = reinterpret_cast<std::atomic<uint64_t>*>(from);
    // The head, where counts and rings begin, and some of the rest.
    const size_t n = std::min<size_t>((to - from) / 8, size_t{1} << 18);
    for (int i = 0; i < 4000; ++i) {
      std::atomic<uint64_t>& word = words[random() % (random() % 2 ? std::min<size_t>(n, 512) : n)];
      switch (random() % 4) {
        case 0:
          word.store(random());
          break;
        case 1:
          word.fetch_add(random() % 100);
          break;
        case 2:
          word.store(UINT64_MAX - random() % 4096);
          break;
        default:
          word.store(0);
      }
    }
  }
  return found;
}

// All staging memory of this process gets other bytes. Returns in how many places there was
// `value`.
size_t Overwrite(float value) {
  size_t found = 0;
  for (const auto& [from, to] : WritableShared()) {
    if (to - from < size_t{1} << 30) continue;  // rings are smaller
    auto* floats = reinterpret_cast<volatile float*>(from);
    for (size_t i = 0; i < size_t{1} << 20; ++i) {  // it is used from its beginning on
      found += floats[i] == value;
      floats[i] = 1e6f;
    }
  }
  return found;
}

// Trainer processes that write anything into what they can write, and live on or end.
TEST_F(Service, HostileTrainers) {
  ControllerProgram controller(address());
  constexpr uint32_t kEnemies = 12;
  struct Enemy {
    pid_t pid;
    int begin;
  };
  std::vector<Enemy> enemies;
  for (uint32_t number = 0; number < kEnemies; ++number) {
    int begin[2];
    ASSERT_EQ(0, pipe2(begin, O_CLOEXEC));
    const pid_t pid = fork_child();
    if (pid == 0) {
      char word;
      if (read(begin[0], &word, 1) != 1) _exit(1);
      Job as;
      as.step = number;
      // On a machine that has other things to do it may take longer than that.
      auto made = [](const std::function<int()>& call) {
        int status;
        while ((status = call()) == FRUGAL_ERR_TIMEOUT || status == FRUGAL_ERR_PEER_LOST) {
        }
        return status == FRUGAL_OK;
      };
      if (!made([&] { return Open(address(), &as.b, kSilenceMs); }) ||
          !made([&] { return frugal_table_find(as.b, "t", &as.tb); }) ||
          !made([&] { return Join(as.b, 1, &as.t1); }))
        _exit(2);
      int status;
      while ((status = frugal_step_begin(as.t1, as.step, 1000)) == FRUGAL_ERR_TIMEOUT) {
      }
      if (status) _exit(3);
      as.Push(as.t1, as.tb);
      for (uint32_t i = 0; i < 20; ++i)
        if (Scribble(number * 100 + i) < (size_t{1} << 20)) _exit(4);
      if (number % 2) _exit(0);
      for (;;) pause();
    }
    close(begin[0]);
    enemies.push_back({pid, begin[1]});
  }
  Job job;
  job.Start(address(), kSilenceMs);
  for (const Enemy& enemy : enemies) {
    ASSERT_EQ(1, write(enemy.begin, "x", 1));
    close(enemy.begin);
    // It takes part, and then it is lost: it ends, or does not reply.
    int status;
    while ((status = frugal_step_begin(job.t0, job.step, 5000)) == FRUGAL_ERR_TIMEOUT ||
           status == FRUGAL_ERR_PEER_LOST) {
    }
    ASSERT_EQ(FRUGAL_OK, status) << Error();
    status = frugal_step_end(job.t0, job.step, 0);
    while (status == FRUGAL_OK || status == FRUGAL_ERR_TIMEOUT)
      status = frugal_step_begin(job.t0, job.step + 1, 200);
    EXPECT_EQ(FRUGAL_ERR_PEER_LOST, status) << Error();
    while ((status = Join(job.b, 1, &job.t1, FRUGAL_TRAINER_REPLACE)) == FRUGAL_ERR_TIMEOUT) {
    }
    ASSERT_EQ(FRUGAL_OK, status) << Error();
    job.Step();
    job.Check();
    OK(frugal_trainer_abandon(job.t1));
  }
  OK(frugal_close(job.a));
  OK(frugal_close(job.b));
  for (const Enemy& enemy : enemies) {
    kill(enemy.pid, SIGKILL);
    int status = 0;
    ASSERT_EQ(enemy.pid, waitpid(enemy.pid, &status, 0));
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
  }
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// Rank gradients of a committed step count, however the rank is lost. They are in memory that goes
// with the rank. A process that was replaced, and lives on, can still write it.
TEST_F(Service, HandedOverBeforeTheLoss) {
  constexpr size_t kKeys = 512;
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  auto step = [&](frugal_trainer* t, frugal_table* table, float gradient) -> int {
    const std::vector<float> grads(kKeys * 8, gradient);
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = kKeys;
    op.grads = grads.data();
    if (int s = frugal_step_begin(t, 0, kNeverMs)) return s;
    if (int s = frugal_push_grad(t, &op, 1)) return s;
    return frugal_step_end(t, 0, 0);
  };
  for (const char way : {'r', 'a', 'k'}) {
    SCOPED_TRACE(way == 'r' ? "replaced" : way == 'a' ? "abandoned" : "killed");
    int orders[2], reports[2];
    ASSERT_EQ(0, pipe2(orders, O_CLOEXEC));
    ASSERT_EQ(0, pipe2(reports, O_CLOEXEC));
    ControllerProgram controller(address());
    // No thread writes an update before a step, or a call outside of steps, needs its rows.
    frugal_config c = Config(address(), kNeverMs);
    c.flush_mode = FRUGAL_FLUSH_DEFERRED;
    c.flush_threads = 0;
    const pid_t pid = fork_child();
    if (pid == 0) {
      auto await = [&](char order) {
        char word;
        if (read(orders[0], &word, 1) != 1 || word != order) _exit(1);
      };
      auto tell = [&] {
        if (write(reports[1], "x", 1) != 1) _exit(1);
      };
      frugal_engine* e = nullptr;
      frugal_table* table = nullptr;
      frugal_trainer* t = nullptr;
      await('s');
      if (frugal_open(&c, &e) || frugal_table_find(e, "t", &table) || Join(e, 1, &t) ||
          step(t, table, 2))
        _exit(2);
      tell();
      await(way);
      // A trainer that abandons its rank has no such memory any more; a replaced one has.
      if (way == 'a' ? frugal_trainer_abandon(t) != FRUGAL_OK : Overwrite(2) < kKeys * 8) _exit(3);
      tell();
      for (;;) pause();
    }
    close(orders[0]);
    close(reports[1]);
    auto tell = [&](char order) { ASSERT_EQ(1, write(orders[1], &order, 1)); };
    auto await = [&] {
      char word;
      ASSERT_EQ(1, read(reports[0], &word, 1)) << "the other process has ended";
    };
    frugal_engine* e = nullptr;
    frugal_table* table = nullptr;
    frugal_trainer *t0 = nullptr, *t1 = nullptr;
    OK(frugal_open(&c, &e));
    frugal_table_config tc = TableConfig("t");
    tc.optimizer.lr = 1;
    OK(frugal_table_create(e, &tc, &table));
    OK(Join(e, 0, &t0));
    tell('s');
    OK(step(t0, table, 1));
    await();
    uint64_t committed = FRUGAL_NO_STEP;
    OK(frugal_committed_step(e, &committed));
    ASSERT_EQ(0u, committed);
    ASSERT_EQ(static_cast<double>(kKeys), Metric(e, "frugal_pending_rows"));
    if (way == 'k') {
      kill(pid, SIGKILL);
      siginfo_t info;
      ASSERT_EQ(0, waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT));
    } else if (way == 'a') {
      tell(way);
      await();
    }
    OK(Join(e, 1, &t1, way == 'r' ? FRUGAL_TRAINER_REPLACE : 0));
    if (way == 'r') {
      tell(way);
      await();
    }
    std::vector<float> rows(kKeys * 8);
    OK(frugal_get(table, keys.data(), kKeys, 0, rows.data(), 0, nullptr));
    EXPECT_EQ(std::vector<float>(rows.size(), -3), rows);
    OK(frugal_close(e));
    kill(pid, SIGKILL);
    int status = 0;
    ASSERT_EQ(pid, waitpid(pid, &status, 0));
    EXPECT_TRUE(WIFSIGNALED(status)) << status;
    close(orders[1]);
    close(reports[0]);
    EXPECT_EQ(0, controller.end(SIGTERM));
  }
}

#ifdef FRUGAL_TOP
// What the program prints, or nothing if it does not end with 0.
std::string Printed(std::vector<std::string> arguments) {
  int out[2];
  if (pipe2(out, O_CLOEXEC) != 0) return "";
  std::vector<char*> raw;
  for (std::string& a : arguments) raw.push_back(a.data());
  raw.push_back(nullptr);
  const pid_t pid = fork_child();
  if (pid == 0) {
    dup2(out[1], 1);
    execv(raw[0], raw.data());
    _exit(127);
  }
  close(out[1]);
  std::string all;
  char some[4096];
  for (ssize_t n; (n = read(out[0], some, sizeof some)) > 0;)
    all.append(some, static_cast<size_t>(n));
  close(out[0]);
  int status = 0;
  return waitpid(pid, &status, 0) == pid && status == 0 ? all : "";
}

// The value of the first field of that name in a line of JSON.
double Field(const std::string& json, const std::string& name) {
  const std::string head = "\"" + name + "\":";
  const size_t at = json.find(head);
  return at == std::string::npos ? -1 : std::atof(json.c_str() + at + head.size());
}
#endif

// An engine that is attached with FRUGAL_OBSERVE sees a job of two ranks, and changes nothing of
// it.
TEST_F(Service, Observers) {
  ControllerProgram controller(address());
  frugal_engine *a = nullptr, *b = nullptr, *observer = nullptr;
  frugal_config as = Config(address());
  as.flags = FRUGAL_OBSERVE;
  EXPECT_EQ(FRUGAL_ERR_NOT_FOUND, frugal_open(&as, &observer));
  OK(Open(address(), &a));
  OK(Open(address(), &b));
  frugal_table *ta = nullptr, *tb = nullptr, *hashed = nullptr;
  frugal_table_config c = TableConfig("t");
  c.optimizer.lr = 1;
  OK(frugal_table_create(a, &c, &ta));
  OK(frugal_table_create(b, &c, &tb));
  frugal_table_config h = TableConfig("u", 50);
  h.key_space = FRUGAL_HASHED;
  OK(frugal_table_create(a, &h, &hashed));
  frugal_trainer *t0 = nullptr, *t1 = nullptr;
  OK(Join(a, 0, &t0));
  OK(Join(b, 1, &t1));
  const uint64_t keys[] = {3, 5, 999};
  const std::vector<float> grads(3 * 8, 1);
  std::vector<float> rows(3 * 8);
  auto op = [&](frugal_table* table) {
    frugal_op o = FRUGAL_OP_INIT;
    o.table = table;
    o.keys = keys;
    o.count = 3;
    o.rows_out = rows.data();
    o.grads = grads.data();
    return o;
  };
  constexpr uint64_t kSteps = 7;
  for (uint64_t s = 0; s < kSteps; ++s)
    for (auto [t, table] : {std::pair(t0, ta), std::pair(t1, tb)}) {
      const frugal_op o = op(table);
      OK(frugal_step_begin(t, s, -1));
      if (t == t0 || s == 0) {
        OK(frugal_lookup(t, &o, 1));
      }
      OK(frugal_push_grad(t, &o, 1));
      OK(frugal_step_end(t, s, 0));
    }
  const uint64_t key = 77;
  OK(frugal_put(hashed, &key, 1, 0, grads.data(), 0));

  OK(frugal_open(&as, &observer));
  frugal_table *seen = nullptr, *none = nullptr;
  OK(frugal_table_find(observer, "t", &seen));
#define REFUSED(call)                                                      \
  do {                                                                     \
    EXPECT_EQ(FRUGAL_ERR_UNSUPPORTED, (call)) << #call << ": " << Error(); \
    EXPECT_TRUE(Says("FRUGAL_OBSERVE")) << #call << ": " << Error();       \
  } while (0)
  uint64_t deleted = 0;
  REFUSED(frugal_put(seen, keys, 3, 0, grads.data(), 0));
  REFUSED(frugal_delete(seen, keys, 3, &deleted));
  REFUSED(frugal_table_set_optimizer(seen, kSteps, &h.optimizer));
  const frugal_table_config other = TableConfig("v");
  REFUSED(frugal_table_create(observer, &other, &none));
  REFUSED(frugal_table_create(observer, &c, &none));  // nor one that is there
  REFUSED(frugal_table_drop(seen));
  frugal_trainer* joined = nullptr;
  REFUSED(Join(observer, 1, &joined));
  REFUSED(Join(observer, 1, &joined, FRUGAL_TRAINER_REPLACE));
#undef REFUSED

  // All is as it was.
  OK(frugal_get(seen, keys, 3, 0, rows.data(), 0, nullptr));
  for (float f : rows) EXPECT_EQ(-2.0f * kSteps, f);
  rows.assign(rows.size(), 0);
  const frugal_op o = op(seen);
  OK(frugal_read(observer, nullptr, &o, 1, kNeverMs));
  for (float f : rows) EXPECT_EQ(-2.0f * kSteps, f);
  uint64_t n = 0, cursor = 0, committed = 0;
  OK(frugal_table_count(seen, &n));
  EXPECT_EQ(1000u, n);
  std::vector<uint64_t> all(2000);
  size_t count = 0;
  OK(frugal_table_keys(seen, &cursor, all.data(), all.size(), &count));
  EXPECT_EQ(1000u, count);
  frugal_table_info info{};
  info.struct_size = sizeof info;
  OK(frugal_table_describe(seen, &info));
  EXPECT_EQ(8u, info.dim);
  EXPECT_EQ(c.optimizer.kind, info.optimizer);
  OK(frugal_committed_step(observer, &committed));
  EXPECT_EQ(kSteps - 1, committed);
  OK(frugal_health(observer));
  EXPECT_EQ(2 * kSteps * 3, Metric(observer, "frugal_keys_pushed_total"));
  EXPECT_EQ(FRUGAL_ERR_NOT_FOUND, frugal_table_find(observer, "v", &none));
  EXPECT_EQ((std::vector<std::string>{"t", "u"}), Names(observer));
  // What it has the controller keep is bounded.
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, frugal_trace_start(observer, size_t{1} << 24));
  EXPECT_TRUE(Says("16777216") && Says("524288")) << Error();
  OK(frugal_trace_start(observer, size_t{1} << 19));
  OK(frugal_trace_stop(observer, nullptr));

  OK(frugal_step_begin(t0, kSteps, -1));  // the other is between two steps
#ifdef FRUGAL_TOP
  const std::string told = Printed({FRUGAL_TOP, address(), "--once", "--json"});
  EXPECT_EQ(2, Field(told, "world_size")) << told;
  EXPECT_EQ(kSteps - 1, Field(told, "committed_step")) << told;
  EXPECT_NEAR(kSteps, Field(told, "steps_per_second") * Field(told, "seconds"), 1e-6) << told;
  EXPECT_NE(told.find("\"health\":\"FRUGAL_OK\""), std::string::npos) << told;
  const size_t ranks = told.find("\"trainers\":["), second = told.find("{\"rank\":1"),
               tables = told.find("\"tables\":["), last = told.find("{\"name\":\"u\"");
  ASSERT_TRUE(ranks < second && second < tables && tables < last && last < told.size()) << told;
  const std::string rank0 = told.substr(ranks, second - ranks),
                    rank1 = told.substr(second, tables - second),
                    t = told.substr(tables, last - tables), u = told.substr(last);
  const double seconds = Field(told, "seconds");
  EXPECT_EQ(0, Field(rank0, "rank"));
  EXPECT_EQ(kSteps, Field(rank0, "step"));
  EXPECT_NE(rank0.find("\"in_step\":true"), std::string::npos) << rank0;
  EXPECT_NEAR(3.0 * kSteps, Field(rank0, "keys_per_second") * seconds, 1e-6) << told;
  EXPECT_EQ(kSteps - 1, Field(rank1, "step"));
  EXPECT_NE(rank1.find("\"in_step\":false"), std::string::npos) << rank1;
  EXPECT_NEAR(3.0, Field(rank1, "keys_per_second") * seconds, 1e-6) << told;
  EXPECT_NEAR(3.0 * kSteps, Field(rank1, "pushed_per_second") * seconds, 1e-6) << told;
  EXPECT_NE(t.find("\"name\":\"t\""), std::string::npos) << told;
  EXPECT_EQ(1000, Field(t, "rows"));
  EXPECT_EQ(1, Field(u, "rows"));
#endif

  // The ranks go on, with the same tables.
  const frugal_op o0 = op(ta), o1 = op(tb);
  OK(frugal_push_grad(t0, &o0, 1));
  OK(frugal_step_end(t0, kSteps, 0));
  OK(frugal_step_begin(t1, kSteps, -1));
  OK(frugal_push_grad(t1, &o1, 1));
  OK(frugal_step_end(t1, kSteps, 0));
  OK(frugal_get(ta, keys, 3, 0, rows.data(), 0, nullptr));
  for (float f : rows) EXPECT_EQ(-2.0f * (kSteps + 1), f);
  OK(frugal_close(observer));
  OK(frugal_close(a));
  OK(frugal_close(b));
}

// A refused push makes no rows, whichever of its ops is at fault. The controller makes the rows of
// undeclared keys, and does not see the gradients.
TEST_F(Service, RefusedPush) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e, FRUGAL_TIMEOUT_INFINITE, 1));
  frugal_table *dense = nullptr, *hashed = nullptr;
  frugal_table_config tc = TableConfig("dense");
  OK(frugal_table_create(e, &tc, &dense));
  tc = TableConfig("hashed");
  tc.key_space = FRUGAL_HASHED;
  OK(frugal_table_create(e, &tc, &hashed));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  const uint64_t declared[] = {5, 7, 9}, others[] = {1, 2};
  frugal_op op[2] = {FRUGAL_OP_INIT, FRUGAL_OP_INIT};
  for (uint64_t s = 0; s < 4; ++s) {
    op[0].table = s % 2 ? hashed : dense;
    op[0].keys = declared;
    op[0].count = 3;
    op[0].flags = FRUGAL_OP_PADDING;
    op[0].padding_key = 7;
    op[0].batch = nullptr;
    frugal_batch* batch = nullptr;
    OK(frugal_prefetch(t, s, op, 1, &batch));
    OK(frugal_step_begin(t, s, -1));
    std::vector<float> grads(3 * 8, 1);
    op[0].keys = s < 2 ? nullptr : declared;
    op[0].count = s < 2 ? 0 : 3;
    op[0].batch = batch;
    op[0].grads = grads.data();
    op[1].table = hashed;
    op[1].keys = others;
    op[1].count = 2;
    op[1].grads = grads.data();  // those before the NaN
    grads[2 * 8 + 3] = NAN;
    EXPECT_EQ(FRUGAL_ERR_NAN, frugal_push_grad(t, op, 2)) << s;
    OK(frugal_step_end(t, s, 0));
    uint64_t n = 99;
    OK(frugal_table_count(hashed, &n));
    EXPECT_EQ(0u, n) << s;
  }
  // A NaN for the padding is none.
  op[0].table = dense;
  op[0].keys = declared;
  op[0].count = 3;
  op[0].batch = nullptr;
  frugal_batch* batch = nullptr;
  OK(frugal_prefetch(t, 4, op, 1, &batch));
  OK(frugal_step_begin(t, 4, -1));
  std::vector<float> grads(3 * 8, 1);
  grads[8] = NAN;
  op[0].keys = nullptr;
  op[0].count = 0;
  op[0].batch = batch;
  op[0].grads = op[1].grads = grads.data();
  op[1].count = 1;
  OK(frugal_push_grad(t, op, 2));
  OK(frugal_step_end(t, 4, 0));
  uint64_t n = 99;
  OK(frugal_table_count(hashed, &n));
  EXPECT_EQ(1u, n);
  OK(frugal_close(e));
}

// A row that a trainer has made is there for all who read after that, in the same process at once.
TEST_F(Service, RowsThatOthersRead) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OK(Open(address(), &e));
  frugal_table* table = nullptr;
  frugal_table_config tc = TableConfig("t");
  tc.key_space = FRUGAL_HASHED;
  tc.init = FRUGAL_INIT_CONSTANT;
  tc.init_a = 3;
  OK(frugal_table_create(e, &tc, &table));
  frugal_trainer* t[2] = {};
  OK(Join(e, 0, &t[0]));
  OK(Join(e, 1, &t[1]));
  for (uint64_t s = 0; s < 6; ++s) {
    const uint64_t key = 10 + s;
    std::vector<float> row(8), grad(8, 1), seen(8);
    uint8_t found = 9;
    frugal_op op = FRUGAL_OP_INIT, look = FRUGAL_OP_INIT;
    op.table = look.table = table;
    op.keys = look.keys = &key;
    op.count = look.count = 1;
    op.rows_out = row.data();
    op.grads = grad.data();
    look.rows_out = seen.data();
    look.found_out = &found;
    OK(frugal_prefetch(t[0], s, &op, 1, nullptr));
    OK(frugal_step_begin(t[0], s, -1));
    OK(frugal_step_begin(t[1], s, -1));
    OK(frugal_read(e, t[1], &look, 1, -1));
    EXPECT_EQ(0, found);
    if (s % 2)
      OK(frugal_lookup(t[0], &op, 1));
    else
      OK(frugal_push_grad(t[0], &op, 1));
    OK(frugal_read(e, t[1], &look, 1, -1));
    EXPECT_EQ(1, found);
    EXPECT_EQ(3, seen[7]);
    if (s == 4) {  // undone rows are gone, and the rank's own call reports the abort
      OK(frugal_push_grad(t[0], &op, 1));
      OK(frugal_step_abort(t[1]));
      OK(frugal_read(e, nullptr, &look, 1, -1));
      EXPECT_EQ(0, found);
      EXPECT_EQ(FRUGAL_ERR_STEP_ABORTED, frugal_step_end(t[0], s, 0));
      OK(frugal_step_begin(t[0], s, -1));
      OK(frugal_step_begin(t[1], s, -1));
    }
    OK(frugal_step_end(t[0], s, 0));
    OK(frugal_step_end(t[1], s, 0));
  }
  OK(frugal_close(e));
}

// Calls of other threads end when the engine is closed, or the trainer, and touch nothing that is
// gone.
TEST_F(Service, CloseBesideCalls) {
  ControllerProgram controller(address());
  for (int round = 0; round < 20; ++round) {
    frugal_engine* e = nullptr;
    OK(Open(address(), &e, kNeverMs, 1));
    frugal_table* table = nullptr;
    const frugal_table_config tc = TableConfig("t");
    OK(frugal_table_create(e, &tc, &table));
    std::atomic<frugal_trainer*> trainer{nullptr};
    std::mutex mutex;
    std::string wrong;
    std::atomic<bool> over{false};
    auto allowed = [&](int status) {
      static const int all[] = {FRUGAL_OK,
                                FRUGAL_ERR_CLOSED,
                                FRUGAL_ERR_BAD_HANDLE,
                                FRUGAL_ERR_EXISTS,
                                FRUGAL_ERR_BUSY,
                                FRUGAL_ERR_NOT_IN_STEP,
                                FRUGAL_ERR_STEP_ABORTED,
                                FRUGAL_ERR_STEP_ORDER,
                                FRUGAL_ERR_STEP_RANGE};
      if (std::find(std::begin(all), std::end(all), status) == std::end(all)) {
        frugal_error why;
        frugal_last_error(&why);
        std::lock_guard<std::mutex> lock(mutex);
        wrong = std::string(frugal_status_name(status)) + ": " + why.message;
      }
      return status == FRUGAL_OK;
    };
    std::vector<std::thread> threads;
    auto again = [&](std::function<void()> calls) {
      threads.emplace_back([&over, calls = std::move(calls)] {
        while (!over.load()) calls();
      });
    };
    std::vector<uint64_t> keys(200);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 5;
    again([&] {  // steps
      std::vector<float> rows(keys.size() * 8), grads(keys.size() * 8, 1);
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table;
      op.keys = keys.data();
      op.count = keys.size();
      op.rows_out = rows.data();
      op.grads = grads.data();
      uint64_t s = 0;
      if (!allowed(frugal_committed_step(e, &s))) return;
      s = s == FRUGAL_NO_STEP ? 0 : s + 1;
      frugal_trainer* t = trainer.load();
      while (t && !over.load() && allowed(frugal_prefetch(t, s, &op, 1, nullptr)) &&
             allowed(frugal_step_begin(t, s, -1)) && allowed(frugal_lookup(t, &op, 1)) &&
             allowed(frugal_push_grad(t, &op, 1)) && allowed(frugal_step_end(t, s, 0)))
        ++s;
    });
    again([&] {  // outside steps
      uint64_t n = 0;
      frugal_table* found = nullptr;
      allowed(frugal_table_count(table, &n));
      allowed(frugal_flush(e, kNeverMs));
      allowed(frugal_table_find(e, "t", &found));
      allowed(frugal_health(e));
    });
    again([&] {  // joins and leaves
      frugal_trainer* t = nullptr;
      if (!allowed(Join(e, 0, &t))) return;
      trainer.store(t);
      usleep(500);
      allowed(frugal_trainer_close(t));
    });
    usleep(static_cast<useconds_t>(3000 + round * 700));
    OK(frugal_close(e));
    over.store(true);
    for (std::thread& t : threads) t.join();
    EXPECT_EQ("", wrong);
  }
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// There is no step as yet to begin again.
TEST_F(Service, ARankIsLostBeforeTheFirstStep) {
  ControllerProgram controller(address());
  int joined[2];
  ASSERT_EQ(0, pipe(joined));
  const pid_t other = fork_child();
  if (other == 0) {
    frugal_engine* e = nullptr;
    frugal_trainer* t = nullptr;
    if (Open(address(), &e) != FRUGAL_OK || Join(e, 1, &t) != FRUGAL_OK) _exit(2);
    if (write(joined[1], "", 1) == 1) pause();
    _exit(3);
  }
  close(joined[1]);
  frugal_engine* e = nullptr;
  frugal_trainer* t = nullptr;
  OK(Open(address(), &e));
  OK(Join(e, 0, &t));
  char byte;
  EXPECT_EQ(1, read(joined[0], &byte, 1));
  close(joined[0]);
  kill(other, SIGKILL);
  EXPECT_EQ(other, waitpid(other, nullptr, 0));
  int status = FRUGAL_OK;  // declarations have a bound, which ends this, too
  while ((status = frugal_prefetch(t, 5, nullptr, 0, nullptr)) == FRUGAL_OK) usleep(5000);
  frugal_error why;
  frugal_last_error(&why);
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, status) << why.message;
  EXPECT_NE(std::string::npos, std::string(why.message).find("begin the first step"))
      << why.message;
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// A rank's call during the engine's end reports that end, and not what the end of another rank
// undoes.
TEST_F(Service, CloseBesideRanks) {
  ControllerProgram controller(address());
  for (int round = 0; round < 150; ++round) {
    frugal_engine* e = nullptr;
    OK(Open(address(), &e));
    frugal_table* table = nullptr;
    const frugal_table_config tc = TableConfig("t");
    OK(frugal_table_create(e, &tc, &table));
    std::atomic<int> wrong{FRUGAL_OK}, going{0};
    std::thread ranks[2];
    frugal_trainer* trainers[2];
    for (uint32_t r = 0; r < 2; ++r) OK(Join(e, r, &trainers[r]));
    uint64_t first = 0;
    OK(frugal_committed_step(e, &first));
    first = first == FRUGAL_NO_STEP ? 0 : first + 1;
    for (int r = 0; r < 2; ++r)
      ranks[r] = std::thread([&, t = trainers[r]] {
        const int status = Train(t, table, first, [&] { ++going; });
        if (status != FRUGAL_ERR_CLOSED && status != FRUGAL_ERR_BAD_HANDLE) wrong.store(status);
      });
    while (going.load() < 4 + round % 7) std::this_thread::yield();
    OK(frugal_close(e));
    for (std::thread& t : ranks) t.join();
    EXPECT_EQ(FRUGAL_OK, wrong.load()) << frugal_status_name(wrong.load()) << " in round " << round;
  }
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// The same of the process that serves the engine.
TEST_F(Service, CloseOfTheEngineBesideItsRank) {
  for (int round = 0; round < 20; ++round) {
    const pid_t other = fork_child();
    if (other == 0) {
      frugal_engine* e = nullptr;
      frugal_trainer* t = nullptr;
      if (Open(address(), &e) != FRUGAL_OK || Join(e, 1, &t) != FRUGAL_OK) {
        std::fprintf(stderr, "%s\n", Error().c_str());
        _exit(2);
      }
      int status = FRUGAL_OK;
      for (uint64_t s = 0; status == FRUGAL_OK; ++s) {
        status = frugal_step_begin(t, s, -1);
        if (status == FRUGAL_OK) status = frugal_step_end(t, s, 0);
      }
      if (status != FRUGAL_ERR_PEER_LOST) std::fprintf(stderr, "%s\n", Error().c_str());
      _exit(status == FRUGAL_ERR_PEER_LOST ? 0 : 3);
    }
    frugal_config c = Config("");
    c.backing = FRUGAL_BACKING_SHM;
    frugal_engine* e = nullptr;
    frugal_table* table = nullptr;
    frugal_trainer* t = nullptr;
    const frugal_table_config tc = TableConfig("t");
    OK(frugal_open(&c, &e));
    OK(frugal_table_create(e, &tc, &table));
    OK(Join(e, 0, &t));
    OK(frugal_serve(e, address().c_str()));
    std::atomic<int> going{0};
    int status = FRUGAL_OK;
    std::string why;
    std::thread rank([&] {
      status = Train(t, table, 0, [&] { ++going; });
      why = Error();
      going.store(INT_MAX);
    });
    while (going.load() < 3 + round % 7) std::this_thread::yield();
    EXPECT_EQ(FRUGAL_OK, frugal_close(e)) << Error();
    rank.join();
    EXPECT_TRUE(status == FRUGAL_ERR_CLOSED || status == FRUGAL_ERR_BAD_HANDLE)
        << round << ": " << why;
    int others = 0;
    ASSERT_EQ(other, waitpid(other, &others, 0));
    EXPECT_TRUE(WIFEXITED(others) && WEXITSTATUS(others) == 0) << round << ": " << others;
  }
}

// A call that has failed because the controller did not reply in time may have been done all the
// same. The same call again is right, and does what the first was to do.
TEST_F(Service, CallsAreMadeAgain) {
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  auto again = [](const std::function<int()>& call) {
    int status;
    while ((status = call()) == FRUGAL_ERR_TIMEOUT) {
    }
    return status;
  };
  OK(again([&] { return Open(address(), &e, 500, 1); }));
  OK(Open(address(), &other, kNeverMs, 1));
  auto failing = [&](const std::function<int()>& call) {
    controller.stop();
    EXPECT_EQ(FRUGAL_ERR_TIMEOUT, call()) << Error();
    kill(controller.pid(), SIGCONT);
    return again(call);
  };
  for (int round = 0; round < 2; ++round) {
    frugal_table *table = nullptr, *found = nullptr;
    frugal_table_config tc = TableConfig("t");
    tc.optimizer.lr = 1;
    OK(failing([&] { return frugal_table_create(e, &tc, &table); }));
    auto create = [&] { return frugal_table_create(e, &tc, &found); };
    EXPECT_EQ(FRUGAL_ERR_EXISTS, again(create)) << "this process has it";
    tc.rows *= 2;
    EXPECT_EQ(FRUGAL_ERR_EXISTS, again(create)) << "another configuration";
    for (const bool abandons : {false, true}) {
      frugal_trainer* t = nullptr;
      OK(failing([&] { return Join(e, 0, &t); }));
      frugal_trainer* second = nullptr;
      EXPECT_EQ(FRUGAL_ERR_EXISTS, again([&] { return Join(e, 0, &second); }));
      uint64_t step = 0;
      OK(frugal_committed_step(other, &step));
      step = step == FRUGAL_NO_STEP ? 0 : step + 1;
      OK(again([&] { return frugal_step_begin(t, step, 300); }));
      OK(PushOnes(t, table, 3));
      OK(frugal_step_end(t, step, 0));
      OK(failing([&] { return abandons ? frugal_trainer_abandon(t) : frugal_trainer_close(t); }));
      EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_trainer_close(t));
    }
    // The rank is free.
    frugal_trainer* t = nullptr;
    OK(Join(other, 0, &t));
    OK(frugal_trainer_close(t));
    float row[8] = {};
    const uint64_t key = 3;
    OK(frugal_table_find(other, "t", &found));
    OK(frugal_get(found, &key, 1, 0, row, 0, nullptr));
    EXPECT_EQ(-2, row[0]);
    OK(failing([&] { return frugal_table_drop(table); }));
    EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_table_drop(table));
    OK(frugal_table_drop(found));  // which another process has dropped
    EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_table_drop(found)) << "its handle was released";
    EXPECT_EQ(FRUGAL_ERR_NOT_FOUND, frugal_table_find(other, "t", &found));
  }
  OK(frugal_close(e));
  OK(frugal_close(other));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// Of threads of a process that join as the same rank at once one has it, also where a call before
// may have had it.
TEST_F(Service, JoinsBesideEachOther) {
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  OpenPatiently(address(), &e, 100);
  ASSERT_NE(e, nullptr);
  OK(Open(address(), &other, kNeverMs, 1));
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    if (round % 2) {
      frugal_trainer* nobody = nullptr;
      controller.stop();
      EXPECT_EQ(FRUGAL_ERR_TIMEOUT, Join(e, 0, &nobody));
      kill(controller.pid(), SIGCONT);
    }
    frugal_trainer* trainers[4] = {};
    int status[4];
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        while ((status[i] = Join(e, 0, &trainers[i])) == FRUGAL_ERR_TIMEOUT) {
        }
      });
    for (std::thread& t : threads) t.join();
    int joined = 0;
    for (int i = 0; i < 4; ++i) {
      if (status[i] == FRUGAL_ERR_EXISTS) continue;
      ASSERT_EQ(FRUGAL_OK, status[i]) << frugal_status_name(status[i]);
      ++joined;
      uint64_t step = 0;
      OK(frugal_committed_step(other, &step));
      step = step == FRUGAL_NO_STEP ? 0 : step + 1;
      OK(frugal_step_begin(trainers[i], step, kNeverMs));
      OK(frugal_step_end(trainers[i], step, 0));
      int left;
      while ((left = frugal_trainer_close(trainers[i])) == FRUGAL_ERR_TIMEOUT) {
      }
      OK(left);
    }
    EXPECT_EQ(1, joined);
    if (HasFailure()) return;
  }
  OK(frugal_close(e));
  OK(frugal_close(other));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// A repeated request to end a trainer does not end the trainer that has joined as its rank
// meanwhile.
TEST_F(Service, ClosedAgainAfterAJoin) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  OpenPatiently(address(), &e, 300);
  ASSERT_NE(e, nullptr);
  uint64_t step = 0;
  for (int round = 0; round < 5; ++round) {
    auto again = [](const std::function<int()>& call) {
      int status;
      while ((status = call()) == FRUGAL_ERR_TIMEOUT) {
      }
      return status;
    };
    frugal_trainer *before = nullptr, *now = nullptr;
    OK(again([&] { return Join(e, 0, &before); }));
    controller.stop();
    EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_trainer_close(before)) << Error();
    kill(controller.pid(), SIGCONT);
    int status;
    while ((status = again([&] { return Join(e, 0, &now); })) == FRUGAL_ERR_EXISTS) usleep(1000);
    OK(status);
    OK(again([&] { return frugal_trainer_close(before); }));
    OK(frugal_step_begin(now, step, kNeverMs));
    OK(frugal_step_end(now, step, 0));
    ++step;
    OK(again([&] { return frugal_trainer_close(now); }));
  }
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// A join that its process does not wait for any more holds nothing, whenever it is done.
TEST_F(Service, JoinsThatNobodyWaitsFor) {
  ControllerProgram controller(address());
  frugal_engine *e = nullptr, *other = nullptr;
  OpenPatiently(address(), &e, 300);
  ASSERT_NE(e, nullptr);
  OK(Open(address(), &other, kNeverMs, 1));
  for (int round = 0; round < 10; ++round) {
    frugal_trainer* t = nullptr;
    controller.stop();
    EXPECT_EQ(FRUGAL_ERR_TIMEOUT, Join(e, 0, &t));
    kill(controller.pid(), SIGCONT);
    // Another process has the rank soon, without an end of the one that has given up.
    int status;
    while ((status = Join(other, 0, &t)) == FRUGAL_ERR_EXISTS) usleep(1000);
    OK(status);
    OK(frugal_trainer_close(t));
  }
  OK(frugal_close(e));
  OK(frugal_close(other));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// What a controller has to do for a process that is dead may be under way when it is to stop.
TEST_F(Service, StopAfterDeath) {
  for (int round = 0; round < 40; ++round) {
    ControllerProgram controller(address());
    EXPECT_EQ(0, InChild([&] {
                frugal_engine* e = nullptr;
                frugal_trainer* t = nullptr;
                // The process ends without closing anything.
                return Open(address(), &e) != FRUGAL_OK || Join(e, 0, &t) != FRUGAL_OK;
              }));
    EXPECT_EQ(0, controller.end(SIGTERM)) << round;
  }
}

// A stopping controller replies, or is gone; it ends in any case.
TEST_F(Service, AttachDuringShutdown) {
  for (int round = 0; round < 20; ++round) {
    ControllerProgram controller(address());
    std::atomic<bool> over{false};
    std::thread attaches([&] {
      while (!over.load()) {
        frugal_engine* e = nullptr;
        const int status = Open(address(), &e, 20);
        EXPECT_TRUE(status == FRUGAL_OK || status == FRUGAL_ERR_PEER_LOST ||
                    status == FRUGAL_ERR_TIMEOUT)
            << Error();
        if (status != FRUGAL_OK) continue;
        frugal_trainer* t = nullptr;
        (void)Join(e, 0, &t);
        (void)frugal_close(e);
      }
    });
    usleep(static_cast<useconds_t>(2000 + round * 300));
    EXPECT_EQ(0, controller.end(SIGTERM));
    over.store(true);
    attaches.join();
  }
}

}  // namespace

int epoll_create1(int flags) noexcept {
  if (g_attached) g_attached();
  return static_cast<int>(syscall(SYS_epoll_create1, flags));
}
