// A controller and its trainer processes when something is wrong: other configurations, ranks that are taken, a peer
// that is stopped, forked, of another user, or has no memory.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <thread>

#include "controller.h"
#include "frugal.h"

namespace {

std::string Error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}
bool Says(const char* what) { return Error().find(what) != std::string::npos; }

#define OK(call) ASSERT_EQ(FRUGAL_OK, (call)) << #call << ": " << Error()

frugal_config Config(const std::string& address, int64_t timeout_ms = 5000) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = 2;
  c.timeout_ms = timeout_ms;
  c.service = address.empty() ? nullptr : address.c_str();
  return c;
}
int Open(const std::string& address, frugal_engine** e, int64_t timeout_ms = 5000) {
  const frugal_config c = Config(address, timeout_ms);
  return frugal_open(&c, e);
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

// The test's own process attaches, too; others are forked before it does.
class Service : public testing::Test {
 protected:
  const std::string& address() const { return address_; }
  static int InChild(const std::function<int()>& body) {
    const pid_t pid = fork();
    if (pid == 0) _exit(body());
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  const Folder folder_;
  const std::string address_ = folder_.address();
};

TEST_F(Service, NobodyThere) {
  frugal_engine* e = nullptr;
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, Open(address(), &e, 50));
  EXPECT_TRUE(Says("no controller")) << Error();
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
  // Taken over, as if its process did not answer: the old one is told at once.
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
  // Killed: the next takes what it has left behind.
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
    return Open(address(), &e, 300) == FRUGAL_ERR_INVALID_ARGUMENT && Says("user") ? 0 : 2;
  }));
}

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
    OK(frugal_step_begin(here, s, 5000));
    OK(frugal_step_begin(there, s, 5000));
    OK(frugal_step_end(here, s, 0));
    OK(frugal_step_end(there, s, 0));
  }
  std::thread waits([&] {
    const int s = frugal_step_begin(there, 3, 5000) || frugal_step_end(there, 3, 0) || frugal_step_begin(there, 4, 5000);
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
  OK(frugal_table_drop(ta));
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
    return frugal_table_count(t, &n) == FRUGAL_ERR_FORKED && frugal_flush(e, 100) == FRUGAL_ERR_FORKED &&
                   frugal_close(e) == FRUGAL_ERR_FORKED ? 0 : 1;
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

// What a trainer does by itself is in the controller's trace, and a path is that of who asks.
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

// Its threads may run on for a moment after the signal.
void Stop(pid_t child) {
  int status = 0;
  kill(child, SIGSTOP);
  ASSERT_EQ(child, waitpid(child, &status, WUNTRACED));
  ASSERT_TRUE(WIFSTOPPED(status));
}

// What the gate has let through needs nobody's help; and who never answers is not waited for for ever.
TEST_F(Service, StoppedController) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  frugal_config c = Config(address(), 300);
  c.world_size = 1;
  OK(frugal_open(&c, &e));
  frugal_table* table = nullptr;
  const frugal_table_config tc = TableConfig("t");
  OK(frugal_table_create(e, &tc, &table));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  std::vector<uint64_t> keys(500);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<float> rows(keys.size() * 8), grads(keys.size() * 8, 1);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = keys.size();
  op.rows_out = rows.data();
  op.grads = grads.data();
  OK(frugal_prefetch(t, 0, &op, 1, nullptr));
  OK(frugal_step_begin(t, 0, 5000));
  Stop(controller.pid());
  OK(frugal_lookup(t, &op, 1));
  OK(frugal_push_grad(t, &op, 1));
  kill(controller.pid(), SIGCONT);
  OK(frugal_step_end(t, 0, 0));
  uint64_t step = 99;
  OK(frugal_committed_step(e, &step));
  EXPECT_EQ(0u, step);
  Stop(controller.pid());
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_step_begin(t, 1, 100));
  EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_committed_step(e, &step));
  kill(controller.pid(), SIGCONT);
}

// A trainer that says nothing while others wait for it is taken for lost, in however many slices they wait.
TEST_F(Service, SilentTrainer) {
  ControllerProgram controller(address());
  frugal_engine *a = nullptr, *b = nullptr;
  OK(Open(address(), &a, 600));
  OK(Open(address(), &b, 600));
  frugal_trainer *t0 = nullptr, *t1 = nullptr;
  OK(Join(a, 0, &t0));
  OK(Join(b, 1, &t1));
  OK(frugal_step_begin(t0, 0, -1));
  OK(frugal_step_begin(t1, 0, -1));
  OK(frugal_step_end(t0, 0, 0));
  int status = FRUGAL_ERR_TIMEOUT, slices = 0;
  while (status == FRUGAL_ERR_TIMEOUT && ++slices < 200) status = frugal_step_begin(t0, 1, 50);
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

// A push that is refused makes no rows, whichever of its ops is at fault: those of keys that nobody has declared are the
// controller's to make, who does not see the gradients.
TEST_F(Service, RefusedPush) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  frugal_config c = Config(address());
  c.world_size = 1;
  OK(frugal_open(&c, &e));
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
    if (s % 2) OK(frugal_lookup(t[0], &op, 1));
    else OK(frugal_push_grad(t[0], &op, 1));
    OK(frugal_read(e, t[1], &look, 1, -1));
    EXPECT_EQ(1, found);
    EXPECT_EQ(3, seen[7]);
    if (s == 4) {  // what is undone is there no more, and the rank is told of that by its own call
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

long BytesRead(const std::string& process) {  // by read and write calls and their like
  std::FILE* f = std::fopen(("/proc/" + process + "/io").c_str(), "r");
  if (!f) return -1;
  long r = 0, w = 0;
  char line[100];
  while (std::fgets(line, sizeof line, f)) {
    (void)std::sscanf(line, "rchar: %ld", &r);
    (void)std::sscanf(line, "wchar: %ld", &w);
  }
  std::fclose(f);
  return r + w;
}

double CpuSeconds(pid_t pid) {
  double ns = 0;
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  if (DIR* d = opendir(tasks.c_str())) {
    while (dirent* e = readdir(d)) {
      if (e->d_name[0] == '.') continue;
      if (std::FILE* s = std::fopen((tasks + "/" + e->d_name + "/schedstat").c_str(), "r")) {
        double one = 0;
        if (std::fscanf(s, "%lf", &one) == 1) ns += one;
        std::fclose(s);
      }
    }
    closedir(d);
  }
  return ns * 1e-9;
}

// Neither keys nor gradients go through a system call, let alone the socket; and who is idle, sleeps.
TEST_F(Service, TrafficAndIdleness) {
  ControllerProgram controller(address());
  frugal_engine* e = nullptr;
  frugal_config c = Config(address());
  c.world_size = 1;
  OK(frugal_open(&c, &e));
  frugal_table* table = nullptr;
  const frugal_table_config tc = TableConfig("t", 200000);
  OK(frugal_table_create(e, &tc, &table));
  frugal_trainer* t = nullptr;
  OK(Join(e, 0, &t));
  constexpr size_t kKeys = 65536;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kSteps = 100;
#else
  constexpr uint64_t kSteps = 1000;
#endif
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> rows(kKeys * 8);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = kKeys;
  op.rows_out = rows.data();
  op.grads = rows.data();
  const std::string program = std::to_string(controller.pid());
  const long before = BytesRead(program), mine = BytesRead("self");
  for (uint64_t s = 0; s < kSteps; ++s) {
    for (size_t i = 0; i < kKeys; ++i) keys[i] = (i * 2654435761u + s * 977) % 200000;
    OK(frugal_prefetch(t, s, &op, 1, nullptr));
    OK(frugal_step_begin(t, s, -1));
    OK(frugal_lookup(t, &op, 1));
    OK(frugal_push_grad(t, &op, 1));
    OK(frugal_step_end(t, s, 0));
  }
  // Eight bytes are an eventfd's: less than that for each step, and nothing near a key.
  if (before >= 0) {
    EXPECT_LT(BytesRead(program) - before, 16384);
    EXPECT_LT(BytesRead("self") - mine, 16384);
  }
  const double used = CpuSeconds(controller.pid()), own = CpuSeconds(getpid());
  sleep(3);
  std::printf("idle for 3 s: controller %.4f%%, trainer %.4f%% of a core\n",
              (CpuSeconds(controller.pid()) - used) / 3 * 100, (CpuSeconds(getpid()) - own) / 3 * 100);
  OK(frugal_close(e));
}

// Calls of other threads end when the engine is closed, or the trainer, and touch nothing that is gone.
TEST_F(Service, CloseBesideCalls) {
  ControllerProgram controller(address());
  for (int round = 0; round < 20; ++round) {
    frugal_engine* e = nullptr;
    frugal_config c = Config(address(), 20000);
    c.world_size = 1;
    OK(frugal_open(&c, &e));
    frugal_table* table = nullptr;
    const frugal_table_config tc = TableConfig("t");
    OK(frugal_table_create(e, &tc, &table));
    std::atomic<frugal_trainer*> trainer{nullptr};
    std::atomic<int> wrong{FRUGAL_OK};
    std::atomic<bool> over{false};
    auto allowed = [&](int status) {
      static const int all[] = {FRUGAL_OK, FRUGAL_ERR_CLOSED, FRUGAL_ERR_BAD_HANDLE, FRUGAL_ERR_EXISTS, FRUGAL_ERR_BUSY,
                                FRUGAL_ERR_NOT_IN_STEP, FRUGAL_ERR_STEP_ABORTED, FRUGAL_ERR_STEP_ORDER,
                                FRUGAL_ERR_STEP_RANGE};
      if (std::find(std::begin(all), std::end(all), status) == std::end(all)) wrong.store(status);
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
      while (t && !over.load() && allowed(frugal_prefetch(t, s, &op, 1, nullptr)) && allowed(frugal_step_begin(t, s, -1)) &&
             allowed(frugal_lookup(t, &op, 1)) && allowed(frugal_push_grad(t, &op, 1)) &&
             allowed(frugal_step_end(t, s, 0)))
        ++s;
    });
    again([&] {  // outside steps
      uint64_t n = 0;
      frugal_table* found = nullptr;
      allowed(frugal_table_count(table, &n));
      allowed(frugal_flush(e, 20000));
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
    EXPECT_EQ(FRUGAL_OK, wrong.load()) << frugal_status_name(wrong.load());
  }
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// What a controller has to do for a process that is dead may be under way when it is to stop.
TEST_F(Service, StopAfterDeath) {
  for (int round = 0; round < 40; ++round) {
    ControllerProgram controller(address());
    EXPECT_EQ(0, InChild([&] {
      frugal_engine* e = nullptr;
      frugal_trainer* t = nullptr;
      return Open(address(), &e) != FRUGAL_OK || Join(e, 0, &t) != FRUGAL_OK;  // and ends without a word
    }));
    EXPECT_EQ(0, controller.end(SIGTERM)) << round;
  }
}

// A stopping controller answers, or is gone; it ends in any case.
TEST_F(Service, AttachDuringShutdown) {
  for (int round = 0; round < 20; ++round) {
    ControllerProgram controller(address());
    std::atomic<bool> over{false};
    std::thread attaches([&] {
      while (!over.load()) {
        frugal_engine* e = nullptr;
        if (Open(address(), &e, 20) != FRUGAL_OK) continue;
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
