// The control socket: round trips of every call, descriptors, and failures.
//
// Processes that the test kills are this program again, with an argument.
#include "process/control.h"

#include <capnp/serialize.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "base/forked.h"
#include "base/region_publisher.h"
#include "control.capnp.h"
#include "frugal.h"
#include "proc.h"
#include "process/channel.h"
#include "process/control_structs.h"
#include "process/server.h"
#include "send_descriptors.h"
#include "support/never.h"

// Each attempt of this program to connect, the library's, too, is counted.
static std::atomic<int> g_attempts{0};
extern "C" int connect(int fd, const sockaddr* name, socklen_t length) {
  const long answer = syscall(SYS_connect, fd, name, length);
  const int code = errno;
  ++g_attempts;
  g_attempts.notify_all();
  errno = code;
  return static_cast<int>(answer);
}

namespace frugal {
namespace {

using Server = std::unique_ptr<ControlServer>;
using Client = std::unique_ptr<ControlClient>;

// Every byte of a struct gets a value of its own.
template <class T>
void fill(T* out, unsigned char first) {
  auto* bytes = reinterpret_cast<unsigned char*>(out);
  for (size_t i = 0; i < sizeof *out; ++i) bytes[i] = static_cast<unsigned char>(first + 7 * i);
  out->struct_size = sizeof *out;
}
template <class T>
bool same(const T& a, const T& b, size_t bytes = sizeof(T)) {
  return std::memcmp(&a, &b, bytes) == 0;
}

int memory_with(const std::string& text) {
  int fd = memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return fd;
}
std::string content(int fd) {
  char bytes[64];
  ssize_t n = pread(fd, bytes, sizeof bytes, 0);
  return n < 0 ? "no file" : std::string(bytes, static_cast<size_t>(n));
}
void close_all(Vector<int>* fds) {
  for (int fd : *fds) close(fd);
  fds->clear();
}

// A handler that does what a test sets.
struct Fake : ControlHandler {
  std::mutex mutex;
  std::condition_variable changed;
  std::multiset<uint64_t> left;  // peers
  Peer last;
  bool held = false;  // calls of drop_table wait
  int holding = 0;
  int calls = 0;

  frugal_config config;
  frugal_table_config table_config;
  frugal_trainer_config trainer_config;
  std::string name, device;
  std::atomic<uint64_t> id{0};
  std::atomic<uint32_t> rank{0};
  std::atomic<bool> lost{false};
  std::atomic<int> joins{0}, leaves{0};
  frugal_table_info info;
  frugal_stats numbers_of_stats;
  Vector<int> descriptors, read_only;
  Vector<uint64_t> numbers;
  std::function<void(OpenReply*)> on_open;
  std::function<Status()> status = [] { return FRUGAL_OK; };

  Status note(Peer& peer) {
    std::lock_guard<std::mutex> lock(mutex);
    last = peer;
    ++calls;
    changed.notify_all();
    return status();
  }
  Status open(Peer& peer, const frugal_config& c, OpenReply* reply) override {
    config = c;
    reply->config = c;
    reply->config.seed ^= 1;
    reply->descriptors = descriptors;
    reply->read_only = read_only;
    reply->numbers = numbers;
    if (on_open) on_open(reply);
    return note(peer);
  }
  void give(TableReply* reply) {
    reply->id = 0x123456789abcdef0;
    reply->info = info;
    reply->descriptors = descriptors;
    reply->read_only = read_only;
    reply->numbers = numbers;
  }
  Status create_table(Peer& peer, const frugal_table_config& c, TableReply* reply) override {
    table_config = c;
    name = c.name ? c.name : "(null)";
    give(reply);
    return note(peer);
  }
  Status find_table(Peer& peer, const char* n, TableReply* reply) override {
    {
      std::lock_guard<std::mutex> lock(mutex);
      name = n;
    }
    give(reply);
    return note(peer);
  }
  Status drop_table(Peer& peer, uint64_t i) override {
    id = i;
    {
      std::unique_lock<std::mutex> lock(mutex);
      ++holding;
      changed.notify_all();
      while (held) changed.wait(lock);
      --holding;
    }
    return note(peer);
  }
  Status join(Peer& peer, uint64_t, const frugal_trainer_config& c, JoinReply* reply) override {
    trainer_config = c;
    device = c.device ? c.device : "(null)";
    reply->descriptors = descriptors;
    reply->read_only = read_only;
    reply->numbers = numbers;
    ++joins;
    return note(peer);
  }
  Status leave(Peer& peer, uint64_t, uint32_t r, bool l, uint64_t) override {
    ++leaves;
    rank = r;
    lost = l;
    return note(peer);
  }
  Status stats(Peer& peer, frugal_stats* stats) override {
    *stats = numbers_of_stats;
    return note(peer);
  }
  Status health(Peer& peer, int32_t* health) override {
    *health = FRUGAL_ERR_NAN;
    return note(peer);
  }
  Status committed(Peer& peer, uint64_t* step) override {
    *step = 0xfedcba9876543210;
    return note(peer);
  }
  void gone(Peer& peer) override {
    std::lock_guard<std::mutex> lock(mutex);
    left.insert(peer.id);
    changed.notify_all();
  }

  void hold(bool on) {
    std::lock_guard<std::mutex> lock(mutex);
    held = on;
    changed.notify_all();
  }
  void wait_for(std::function<bool()> what) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!what()) changed.wait(lock);
  }
};

template <class Call>
frugal_error failure(Call call, std::string* message) {
  begin_call();
  Status s = end_call(call());
  frugal_error e;
  last_error(&e);
  EXPECT_TRUE(s == FRUGAL_OK || e.status == s);
  e.status = s;
  *message = e.message;
  return e;
}

int connect_to(int fd, const char* address) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::snprintf(name.sun_path, sizeof name.sun_path, "%s", address);
  return connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name);
}

// How long the controller "serve-briefly" waits for an attached process to open the engine.
constexpr uint64_t kBriefMs = 300;

class Control : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/frugal-control-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder = name;
    address = folder + "/socket";
    fill(&fake.info, 3);
    fill(&fake.numbers_of_stats, 5);
  }
  void TearDown() override {
    client.reset();
    server.reset();
    EXPECT_FALSE(std::filesystem::exists(address));
    EXPECT_FALSE(std::filesystem::exists(address + ".lock"));
    std::filesystem::remove_all(folder);
  }
  // Most tests open nothing.
  void serve(ControlLimits limits = {.open_ns = UINT64_MAX / 2}) {
    ASSERT_EQ(ControlServer::start(address.c_str(), &fake, &server, limits), FRUGAL_OK);
  }
  Client connected() {
    Client out;
    EXPECT_EQ(ControlClient::connect(address.c_str(), kNeverMs, &out), FRUGAL_OK);
    return out;
  }
  void both() {
    serve();
    client = connected();
    ASSERT_TRUE(client);
  }
  // A socket without the protocol.
  int raw() {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect_raw(fd), 0);
    return fd;
  }
  int connect_raw(int fd) const { return connect_to(fd, address.c_str()); }
  // A socket at the address that is the test's own.
  int listening() {
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::snprintf(name.sun_path, sizeof name.sun_path, "%s", address.c_str());
    EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
    EXPECT_EQ(listen(listener, 8), 0);
    return listener;
  }
  // This program as another process; it writes a line when it is ready.
  pid_t other(const char* what, std::string* line) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
      dup2(ends[1], 1);
      close(ends[0]);
      close(ends[1]);
      execl("/proc/self/exe", "control_test", what, address.c_str(), nullptr);
      _exit(9);
    }
    close(ends[1]);
    line->clear();
    for (char c; read(ends[0], &c, 1) == 1 && c != '\n';) line->push_back(c);
    close(ends[0]);
    return pid;
  }
  static void end(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }

  std::string folder, address;
  Fake fake;
  Server server;
  Client client;
};

// True if the other side ends the connection. What it sends before that does not matter.
bool ends(int fd) {
  char bytes[4096];
  ssize_t n;
  do n = read(fd, bytes, sizeof bytes);
  while (n > 0);
  return n == 0 || errno == ECONNRESET;
}

void send_all(int fd, const void* bytes, size_t size) {
  const auto* p = static_cast<const char*>(bytes);
  while (size > 0) {
    ssize_t n = send(fd, p, size, MSG_NOSIGNAL);
    if (n <= 0) return;  // it has been ended already
    p += n;
    size -= static_cast<size_t>(n);
  }
}

// A request as a client sends it.
std::vector<char> request(const std::function<void(wire::Request::Builder)>& fill) {
  capnp::MallocMessageBuilder message;
  fill(message.initRoot<wire::Request>());
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asChars();
  return {bytes.begin(), bytes.end()};
}

TEST_F(Control, RoundTrips) {
  both();
  fake.numbers = {1, UINT64_MAX, 0x0102030405060708};
  ASSERT_EQ(client->ping(kNeverMs), FRUGAL_OK);

  frugal_config config;
  fill(&config, 11);
  config.log = nullptr;
  config.log_context = nullptr;
  config.service = nullptr;
  OpenReply opened;
  ASSERT_EQ(client->open(config, kNeverMs, &opened), FRUGAL_OK);
  EXPECT_TRUE(same(fake.config, config));
  config.seed ^= 1;
  EXPECT_TRUE(same(opened.config, config));
  EXPECT_EQ(opened.numbers, fake.numbers);
  EXPECT_TRUE(opened.descriptors.empty());
  EXPECT_EQ(fake.last.pid, getpid());
  EXPECT_GE(fake.last.pidfd, 0);

  frugal_table_config table;
  fill(&table, 23);
  table.name = "a name";
  table.optimizer.struct_size = sizeof table.optimizer;
  for (const char* name : {"a name", static_cast<const char*>(nullptr)}) {
    table.name = name;
    TableReply created;
    ASSERT_EQ(client->create_table(table, kNeverMs, &created), FRUGAL_OK);
    EXPECT_EQ(fake.name, name ? name : "(null)");
    frugal_table_config seen = fake.table_config;
    seen.name = table.name;
    EXPECT_TRUE(same(seen, table, sizeof table - 4));  // but for the padding at its end
    EXPECT_EQ(created.id, 0x123456789abcdef0u);
    EXPECT_TRUE(same(created.info, fake.info));
    EXPECT_EQ(created.numbers, fake.numbers);
  }
  TableReply found;
  ASSERT_EQ(client->find_table("another", kNeverMs, &found), FRUGAL_OK);
  EXPECT_EQ(fake.name, "another");
  EXPECT_EQ(found.id, 0x123456789abcdef0u);
  EXPECT_TRUE(same(found.info, fake.info));
  ASSERT_EQ(client->drop_table(0xfedcba9876543210, kNeverMs), FRUGAL_OK);
  EXPECT_EQ(fake.id, 0xfedcba9876543210u);

  frugal_trainer_config trainer;
  fill(&trainer, 31);
  for (const char* device : {"sim:1", static_cast<const char*>(nullptr)}) {
    trainer.device = device;
    JoinReply joined;
    ASSERT_EQ(client->join(trainer, kNeverMs, &joined), FRUGAL_OK);
    EXPECT_EQ(fake.device, device ? device : "(null)");
    frugal_trainer_config seen = fake.trainer_config;
    seen.device = device;
    EXPECT_TRUE(same(seen, trainer));
    EXPECT_EQ(joined.numbers, fake.numbers);
  }
  ASSERT_EQ(client->leave(0xfffffffe, false, kNeverMs), FRUGAL_OK);
  EXPECT_EQ(fake.rank, 0xfffffffeu);
  EXPECT_FALSE(fake.lost);
  ASSERT_EQ(client->leave(3, true, kNeverMs), FRUGAL_OK);
  EXPECT_TRUE(fake.lost);

  frugal_stats stats;
  ASSERT_EQ(client->stats(kNeverMs, &stats), FRUGAL_OK);
  EXPECT_TRUE(same(stats, fake.numbers_of_stats));
  int32_t health = 0;
  ASSERT_EQ(client->health(kNeverMs, &health), FRUGAL_OK);
  EXPECT_EQ(health, FRUGAL_ERR_NAN);
  uint64_t step = 0;
  ASSERT_EQ(client->committed(kNeverMs, &step), FRUGAL_OK);
  EXPECT_EQ(step, 0xfedcba9876543210u);

  EXPECT_EQ(client->controller_pid(), getpid());
  EXPECT_GE(client->controller_pidfd(), 0);
  EXPECT_FALSE(client->lost());
}

TEST_F(Control, FailuresComeWithTheirMessage) {
  both();
  fake.status = [] {
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, ENOSPC, "no room for %d rows", 7);
  };
  fake.descriptors = {memory_with("not given")};
  std::string message, here;
  const frugal_error expected = failure(fake.status, &here);
  OpenReply opened;
  opened.numbers = {42};
  TableReply table;
  JoinReply joined;
  frugal_stats stats;
  int32_t health = 42;
  uint64_t step = 42;
  const std::function<Status()> calls[] = {
      [&] { return client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened); },
      [&] { return client->create_table(FRUGAL_TABLE_CONFIG_INIT, kNeverMs, &table); },
      [&] { return client->find_table("x", kNeverMs, &table); },
      [&] { return client->drop_table(1, kNeverMs); },
      [&] { return client->join(FRUGAL_TRAINER_CONFIG_INIT, kNeverMs, &joined); },
      [&] { return client->leave(1, false, kNeverMs); },
      [&] { return client->stats(kNeverMs, &stats); },
      [&] { return client->health(kNeverMs, &health); },
      [&] { return client->committed(kNeverMs, &step); }};
  for (auto& call : calls) {
    frugal_error e = failure(call, &message);
    EXPECT_EQ(e.status, FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_EQ(e.system_code, expected.system_code);
    EXPECT_EQ(message, here);
  }
  EXPECT_EQ(opened.numbers, Vector<uint64_t>{42});
  EXPECT_EQ(health, 42);
  EXPECT_EQ(step, 42u);
  // A status that says time-out is not this side's time-out.
  fake.status = [] { return fail(FRUGAL_ERR_TIMEOUT, "the gate"); };
  EXPECT_EQ(failure(calls[3], &message).status, FRUGAL_ERR_TIMEOUT);
  EXPECT_EQ(message, "the gate");
  fake.status = []() -> Status { throw std::bad_alloc(); };
  EXPECT_EQ(failure(calls[3], &message).status, FRUGAL_ERR_OUT_OF_MEMORY);
  fake.status = []() -> Status { throw 7; };
  EXPECT_EQ(failure(calls[3], &message).status, FRUGAL_ERR_INTERNAL);
  fake.status = [] { return FRUGAL_OK; };
  EXPECT_EQ(client->drop_table(1, kNeverMs), FRUGAL_OK);
  close_all(&fake.descriptors);
}

TEST_F(Control, DescriptorsArriveInOrderAndWork) {
  both();
  for (size_t i = 0; i < kMostDescriptors; ++i)
    fake.descriptors.push_back(memory_with("file " + std::to_string(i)));
  fake.numbers.assign(kMostNumbers, UINT64_MAX);
  for (int round = 0; round < 12; ++round) {  // more than a peer may keep, if it did
    OpenReply opened;
    ASSERT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_OK);
    ASSERT_EQ(opened.descriptors.size(), kMostDescriptors);
    for (size_t i = 0; i < kMostDescriptors; ++i) {
      EXPECT_EQ(content(opened.descriptors[i]), "file " + std::to_string(i));
      EXPECT_EQ(fcntl(opened.descriptors[i], F_GETFD), FD_CLOEXEC);
    }
    EXPECT_EQ(opened.numbers, fake.numbers);
    close_all(&opened.descriptors);
  }
  // What is written by one side is seen by the other.
  TableReply table;
  JoinReply joined;
  ASSERT_EQ(client->find_table("x", kNeverMs, &table), FRUGAL_OK);
  ASSERT_EQ(client->join(FRUGAL_TRAINER_CONFIG_INIT, kNeverMs, &joined), FRUGAL_OK);
  ASSERT_EQ(pwrite(table.descriptors[5], "new!", 4, 0), 4);
  EXPECT_EQ(content(joined.descriptors[5]), "new! 5");
  EXPECT_EQ(content(fake.descriptors[5]), "new! 5");
  close_all(&table.descriptors);
  close_all(&joined.descriptors);
  fake.numbers.push_back(1);
  OpenReply opened;
  EXPECT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_ERR_INTERNAL);
  fake.numbers.clear();
  fake.descriptors.push_back(memory_with("one too many"));
  EXPECT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_ERR_INTERNAL);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  close_all(&fake.descriptors);
}

TEST_F(Control, DescriptorsThatAreReadOnly) {
  both();
  for (const char* what : {"first", "second", "third"})
    fake.descriptors.push_back(memory_with(what));
  fake.read_only = {fake.descriptors[1]};
  OpenReply opened;
  ASSERT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_OK);
  ASSERT_EQ(opened.descriptors.size(), 3u);
  EXPECT_EQ(content(opened.descriptors[1]), "second");
  EXPECT_EQ(fcntl(opened.descriptors[1], F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(pwrite(opened.descriptors[1], "x", 1, 0), -1);
  for (int i : {0, 2}) EXPECT_EQ(pwrite(opened.descriptors[i], "x", 1, 0), 1);
  close_all(&opened.descriptors);
  close_all(&fake.descriptors);
}

TEST_F(Control, ALongCallHoldsNobodyUp) {
  both();
  Client second = connected();
  fake.hold(true);
  Status long_one = 1;
  std::thread caller([&] { long_one = client->drop_table(1, kNeverMs); });
  fake.wait_for([&] { return fake.holding == 1; });
  EXPECT_EQ(second->ping(kNeverMs), FRUGAL_OK);
  EXPECT_EQ(second->leave(3, false, kNeverMs), FRUGAL_OK);
  // The same process from another thread, too.
  EXPECT_EQ(client->leave(4, false, kNeverMs), FRUGAL_OK);
  fake.hold(false);
  caller.join();
  EXPECT_EQ(long_one, FRUGAL_OK);
}

TEST_F(Control, ManyThreadsOfOneClient) {
  both();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 16; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        uint64_t step;
        good += client->committed(kNeverMs, &step) == FRUGAL_OK && step == 0xfedcba9876543210;
      }
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(good, 800);
  EXPECT_EQ(fake.calls, 800);
}

TEST_F(Control, TimeOut) {
  both();
  std::string message;
  const long before = descriptors_of(getpid());
  fake.hold(true);
  frugal_error e = failure([&] { return client->drop_table(1, 20); }, &message);
  EXPECT_EQ(e.status, FRUGAL_ERR_TIMEOUT);
  EXPECT_NE(message.find("dropTable"), std::string::npos) << message;
  EXPECT_EQ(client->drop_table(2, 0), FRUGAL_ERR_TIMEOUT);
  // A reply that no thread waits for is dropped, with its descriptors.
  fake.descriptors = {memory_with("late")};
  OpenReply opened;
  (void)client->open(FRUGAL_CONFIG_INIT, 0, &opened);
  close_all(&opened.descriptors);
  fake.hold(false);
  fake.wait_for([&] { return fake.calls == 3; });
  ASSERT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  close_all(&fake.descriptors);
  client.reset();
  server.reset();
  EXPECT_LT(descriptors_of(getpid()), before);
}

TEST_F(Control, StopWhileCallsWait) {
  both();
  Client second = connected(), third = connected();
  fake.hold(true);
  // The first eight are under way, the rest waits for a thread.
  std::vector<std::thread> callers;
  std::atomic<int> done{0}, not_begun{0};
  for (int i = 0; i < 12; ++i)
    callers.emplace_back([&] {
      Status s = client->drop_table(1, kNeverMs);
      done += s == FRUGAL_OK;
      not_begun += s == FRUGAL_ERR_CLOSED || s == FRUGAL_ERR_PEER_LOST;
    });
  fake.wait_for([&] { return fake.holding == 8; });
  EXPECT_EQ(second->leave(1, false, kNeverMs), FRUGAL_OK);
  std::thread stopper([&] { server->stop(); });
  // Peers without a call receive the end at once.
  Status s;
  while ((s = second->leave(1, false, kNeverMs)) == FRUGAL_OK) {
  }
  EXPECT_TRUE(s == FRUGAL_ERR_CLOSED || s == FRUGAL_ERR_PEER_LOST);
  fake.hold(false);
  stopper.join();
  for (auto& t : callers) t.join();
  EXPECT_GE(done, 8);
  EXPECT_EQ(done + not_begun, 12);
  EXPECT_EQ(fake.left, (std::multiset<uint64_t>{1, 2, 3}));
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(third->ping(kNeverMs), FRUGAL_ERR_PEER_LOST);
  EXPECT_TRUE(client->lost());
  server->stop();  // again
}

TEST_F(Control, AddressesThatCannotBe) {
  std::string message;
  const auto start = [&](const std::string& where) {
    return failure([&] { return ControlServer::start(where.c_str(), &fake, &server); }, &message)
        .status;
  };
  EXPECT_EQ(start(""), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(start(folder + "/none/socket"), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(message.find("folder"), std::string::npos) << message;
  EXPECT_EQ(start(folder + "/" + std::string(200, 'x')), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(message.find("107"), std::string::npos) << message;
  int fd = open(address.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  close(fd);
  EXPECT_EQ(start(address), FRUGAL_ERR_EXISTS);
  EXPECT_TRUE(std::filesystem::exists(address));
  EXPECT_FALSE(std::filesystem::exists(address + ".lock"));
  std::filesystem::remove(address);
  const std::string longest = folder + "/" + std::string(107 - folder.size() - 1, 'x');
  EXPECT_EQ(start(longest), FRUGAL_OK);
  EXPECT_EQ(ControlClient::connect(longest.c_str(), kNeverMs, &client), FRUGAL_OK);
  client.reset();
  server.reset();
  const auto connect = [&](const std::string& where, int64_t ms) {
    return failure([&] { return ControlClient::connect(where.c_str(), ms, &client); }, &message)
        .status;
  };
  EXPECT_EQ(connect(longest + "x", kNeverMs), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(connect("", kNeverMs), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(connect(address, 20), FRUGAL_ERR_TIMEOUT);
  EXPECT_NE(message.find(address), std::string::npos) << message;
  EXPECT_FALSE(client);
}

TEST_F(Control, ASecondControllerIsRefused) {
  const mode_t before = umask(0);
  both();
  umask(before);
  struct stat st;
  ASSERT_EQ(stat(address.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
  ASSERT_EQ(stat((address + ".lock").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
  Server second;
  std::string message;
  EXPECT_EQ(failure([&] { return ControlServer::start(address.c_str(), &fake, &second); }, &message)
                .status,
            FRUGAL_ERR_EXISTS);
  EXPECT_NE(message.find(address), std::string::npos) << message;
  EXPECT_FALSE(second);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
  server->stop();
  ASSERT_EQ(ControlServer::start(address.c_str(), &fake, &second), FRUGAL_OK);
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, ConnectWaitsForTheController) {
  const int before = g_attempts.load();
  std::thread later([&] {
    g_attempts.wait(before);  // an attempt has failed: nothing listened
    serve();
  });
  client = connected();
  later.join();
  ASSERT_TRUE(client);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
}

// The reported time is that of the whole call, not of its last attempt.
TEST_F(Control, ConnectTellsTheTimeItWasGiven) {
  const int listener = listening();
  std::thread ends_some([&] {
    for (int i = 0; i < 3; ++i) close(accept(listener, nullptr, nullptr));
  });
  std::string message;
  int32_t status;  // PEER_LOST: its time has passed while the ends came
  do {
    status =
        failure([&] { return ControlClient::connect(address.c_str(), 300, &client); }, &message)
            .status;
  } while (status == FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(status, FRUGAL_ERR_TIMEOUT);
  EXPECT_NE(message.find("\"attach\" within 300 ms"), std::string::npos) << message;
  EXPECT_NE(message.find("call again"), std::string::npos) << message;
  ends_some.join();
  close(listener);
  std::filesystem::remove(address);
}

TEST_F(Control, AnotherVersion) {
  serve();
  std::string message;
  EXPECT_EQ(failure([&] { return ControlClient::connect(address.c_str(), kNeverMs, &client, 77); },
                    &message)
                .status,
            FRUGAL_ERR_UNSUPPORTED);
  EXPECT_NE(message.find("77"), std::string::npos) << message;
  EXPECT_NE(message.find(" " + std::to_string(kControlVersion) + ";"), std::string::npos)
      << message;
  EXPECT_FALSE(client);
  EXPECT_TRUE(fake.left.empty());
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  both();
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  for (bool open_to_all : {false, true}) {
    ASSERT_EQ(chmod(address.c_str(), open_to_all ? 0666 : 0600), 0);
    int mine = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pid_t pid = fork();
    if (pid == 0) {
      if (syscall(SYS_setuid, 65534) != 0) _exit(3);
      if (connect_raw(mine) != 0) _exit(errno == EACCES ? 1 : 4);
      _exit(ends(mine) ? 2 : 5);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(WEXITSTATUS(status), open_to_all ? 2 : 1);
    close(mine);
  }
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, AKilledControllersSocketIsReplaced) {
  std::string line;
  const pid_t pid = other("serve", &line);
  client = connected();
  ASSERT_TRUE(client);
  EXPECT_EQ(client->controller_pid(), pid);
  Status s = 1;
  // "hold" waits for ever in the handler.
  std::thread caller([&] { s = client->drop_table(1, kNeverMs); });
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  end(pid);
  caller.join();
  EXPECT_EQ(s, FRUGAL_ERR_PEER_LOST);
  std::string message;
  EXPECT_EQ(failure([&] { return client->ping(kNeverMs); }, &message).status, FRUGAL_ERR_PEER_LOST);
  EXPECT_NE(message.find(std::to_string(pid)), std::string::npos) << message;
  EXPECT_TRUE(client->lost());
  ASSERT_TRUE(std::filesystem::exists(address));
  ASSERT_TRUE(std::filesystem::exists(address + ".lock"));
  serve();
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
}

// A child that was made without the C library's knowledge, so that it keeps every descriptor.
TEST_F(Control, AKilledControllersChildKeepsNothingAlive) {
  std::string line;
  const pid_t pid = other("serve-and-fork", &line);
  client = connected();
  ASSERT_TRUE(client);
  uint64_t child = 0;
  ASSERT_EQ(client->committed(kNeverMs, &child), FRUGAL_OK);  // it forks now
  Status s = 1;
  std::thread caller([&] { s = client->drop_table(1, kNeverMs); });
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  end(pid);
  caller.join();
  EXPECT_EQ(s, FRUGAL_ERR_PEER_LOST);
  kill(static_cast<pid_t>(child), SIGKILL);
  // The lock was that child's, too: it is free when it is dead.
  for (Status t; (t = ControlServer::start(address.c_str(), &fake, &server)) != FRUGAL_OK;
       usleep(1000))
    ASSERT_EQ(t, FRUGAL_ERR_EXISTS);
}

TEST_F(Control, AKilledClientIsGoneOnce) {
  both();
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  for (const char* what : {"attach", "attach-and-fork"}) {
    std::string line;
    const pid_t pid = other(what, &line);
    Peer peer;
    {
      std::lock_guard<std::mutex> lock(fake.mutex);
      peer = fake.last;
    }
    EXPECT_EQ(peer.pid, pid);
    pollfd alive{peer.pidfd, POLLIN, 0};
    EXPECT_EQ(poll(&alive, 1, 0), 0);
    end(pid);
    fake.wait_for([&] { return fake.left.count(peer.id) > 0; });
    if (line != "0") kill(std::stoi(line), SIGKILL);
  }
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  client.reset();
  server->stop();
  EXPECT_EQ(fake.left.size(), 3u);
  EXPECT_EQ(std::set<uint64_t>(fake.left.begin(), fake.left.end()).size(), 3u);
}

TEST_F(Control, AForkedChildDisturbsNobody) {
  both();
  pid_t pid = fork();
  if (pid == 0) {
    uint64_t step;
    int bad = client->ping(kNeverMs) != FRUGAL_ERR_FORKED ||
              client->committed(kNeverMs, &step) != FRUGAL_ERR_FORKED;
    client.reset();
    server.reset();
    _exit(bad);
  }
  int status = -1;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
  // A child that lives on holds neither lock nor connection.
  int hold[2];
  ASSERT_EQ(pipe(hold), 0);
  pid = fork();
  if (pid == 0) {
    char c;
    close(hold[1]);
    _exit(static_cast<int>(read(hold[0], &c, 1)));
  }
  close(hold[0]);
  client.reset();
  fake.wait_for([&] { return fake.left.size() == 2; });  // this one, and the short one above
  server.reset();
  serve();
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
  close(hold[1]);
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
}

TEST_F(Control, BadBytesEndTheirConnectionOnly) {
  both();
  testing::internal::CaptureStderr();
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    std::vector<uint32_t> words(1 + random() % 600);
    const uint32_t zeros = random() % 4;
    for (uint32_t& w : words) w = random() % 4 < zeros ? random() % 3 : random();
    if (seed % 3 == 0) {
      // The frame is good, what is in it is not.
      words.resize((words.size() + 1) / 2 * 2 + 2);
      words[0] = 0;
      words[1] = static_cast<uint32_t>(words.size() - 2) / 2;
    }
    int fd = raw();
    send_all(fd, words.data(), words.size() * sizeof words[0] - (seed % 5 == 0 ? seed % 8 : 0));
    shutdown(fd, SHUT_WR);
    EXPECT_TRUE(ends(fd)) << seed;
    close(fd);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
}

TEST_F(Control, OversizedMessagesAreNotWaitedFor) {
  both();
  const uint32_t headers[][4] = {{0, UINT32_MAX, 0, 0}, {UINT32_MAX, 1, 0, 0},
                                 {200, 1, 1, 1},        {0, 8192, 0, 0},
                                 {2, 4000, 4000, 4000}, {63, UINT32_MAX, 0, 0}};
  for (auto& header : headers) {
    int fd = raw();
    send_all(fd, header, sizeof header);
    if (header[0] == 63) {
      std::vector<uint32_t> rest(62, UINT32_MAX);
      send_all(fd, rest.data(), rest.size() * 4);
    }
    EXPECT_TRUE(ends(fd)) << header[0] << " " << header[1];  // this side is still open
    close(fd);
  }
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, HalfAMessageHoldsNobodyUp) {
  both();
  std::vector<int> fds;
  for (int i = 0; i < 20; ++i) {
    const uint32_t header[] = {0, 100, 0, 0};
    fds.push_back(raw());
    send_all(fds.back(), header, static_cast<size_t>(i % 16));
  }
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  EXPECT_EQ(connected()->leave(1, false, kNeverMs), FRUGAL_OK);
  for (int fd : fds) close(fd);
}

TEST_F(Control, DescriptorsThatAPeerSendsEndItsConnection) {
  both();
  const long before = descriptors_of(getpid());
  std::vector<int> fds;
  for (int i = 0; i < 10; ++i) {
    int fd = raw();
    const uint32_t header[] = {0, 100};
    ASSERT_EQ(send_descriptors(fd, header, sizeof header, &fd, 1), 8);
    EXPECT_TRUE(ends(fd));  // though this side is open, and the message not whole
    fds.push_back(fd);
  }
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  connected().reset();
  // Of each this side is left. The server's go soon.
  for (int i = 0; i < 10000 && descriptors_of(getpid()) != before + 10; ++i) usleep(1000);
  EXPECT_EQ(descriptors_of(getpid()), before + 10);
  for (int fd : fds) close(fd);
}

// Sends the bytes `times` times, without reading a reply, as far as the other side takes them.
size_t flood(int fd, const std::vector<char>& bytes, size_t times) {
  for (size_t i = 0; i < times; ++i) {
    ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) {
      pollfd room{fd, POLLOUT, 0};
      if (poll(&room, 1, 200) == 0) return i;  // nothing is taken any more
      n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
    if (n != static_cast<ssize_t>(bytes.size())) return i;
  }
  return times;
}

TEST_F(Control, APeerThatTakesNoAnswersIsReadNoFurther) {
  both();
  fake.numbers.assign(kMostNumbers, 7);
  for (const char* what : {"attach", "stats"}) fake.descriptors.push_back(memory_with(what));
  const long before = resident_kib(getpid()), threads = threads_of(getpid());
  std::vector<int> fds;
  for (int peer = 0; peer < 4; ++peer) {
    fds.push_back(raw());
    const auto attach = request([](auto r) { r.setAttach(kControlVersion); });
    send_all(fds.back(), attach.data(), attach.size());
    // Replies of 16 KiB, with descriptors: 1.6 GiB, if all were made.
    const auto find = request([](auto r) { r.setFindTable("x"); });
    EXPECT_LT(flood(fds.back(), find, 100000), 20000u);
  }
  EXPECT_LE(threads_of(getpid()), threads + 4 * 8);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr long kMib = 256;  // of which each thread's shadow takes some
#else
  constexpr long kMib = 32;
#endif
  EXPECT_LT(resident_kib(getpid()), before + kMib * 1024);
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  EXPECT_EQ(connected()->leave(1, false, kNeverMs), FRUGAL_OK);
  for (int fd : fds) close(fd);
  fake.wait_for([&] { return fake.left.size() == 5; });
  close_all(&fake.descriptors);
}

TEST_F(Control, CallsThatAreNotFinishedAreBounded) {
  both();
  fake.hold(true);
  const int fd = raw();
  const auto attach = request([](auto r) { r.setAttach(kControlVersion); });
  const auto drop = request([](auto r) { r.setDropTable(1); });
  send_all(fd, attach.data(), attach.size());
  EXPECT_LT(flood(fd, drop, 1000000), 100000u);
  {
    std::lock_guard<std::mutex> lock(fake.mutex);
    EXPECT_LE(fake.holding, 8);
  }
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  close(fd);
  fake.hold(false);
  fake.wait_for([&] { return fake.left.size() == 1; });
}

// A process that gives up its joins as a rank gives up those that it has asked for before: also one
// that begins late, because its thread had to wait, and none that comes later.
TEST_F(Control, JoinsThatAreGivenUp) {
  std::unique_ptr<frugal::Server> controller;
  ASSERT_EQ(frugal::Server::start(address.c_str(), nullptr, &controller), FRUGAL_OK);
  const int fd = raw();
  const auto ask = [&](uint64_t id, const std::function<void(wire::Request::Builder)>& what) {
    const auto bytes = request([&](auto r) {
      r.setId(id);
      what(r);
    });
    send_all(fd, bytes.data(), bytes.size());
    capnp::StreamFdMessageReader answer(fd);
    EXPECT_EQ(answer.getRoot<wire::Answer>().getId(), id);
    return answer.getRoot<wire::Answer>().getStatus();
  };
  const auto join = [&](uint64_t id) {
    return ask(id, [](auto r) { put(FRUGAL_TRAINER_CONFIG_INIT, r.initJoin()); });
  };
  const auto give_up = [&](uint64_t id) {
    return ask(id, [](auto r) {
      r.initLeave().setLost(true);
      r.getLeave().setJoined(kAnyJoin);
    });
  };
  ASSERT_EQ(ask(1, [](auto r) { r.setAttach(kControlVersion); }), FRUGAL_OK);
  ASSERT_EQ(ask(2, [](auto r) { put(FRUGAL_CONFIG_INIT, r.initOpen()); }), FRUGAL_OK);
  EXPECT_EQ(join(10), FRUGAL_OK);
  EXPECT_EQ(give_up(9), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(join(11), FRUGAL_ERR_EXISTS);
  EXPECT_EQ(give_up(20), FRUGAL_OK);
  EXPECT_EQ(join(15), FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(join(21), FRUGAL_OK);
  close(fd);
}

TEST_F(Control, WhoDoesNotAttachIsEnded) {
  serve({.attach_ns = 500'000'000});
  client = connected();
  OpenReply opened;
  ASSERT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_OK);
  const int fd = raw(), slow = raw();
  const auto attach = request([](auto r) { r.setAttach(kControlVersion); });
  send_all(slow, attach.data(), attach.size() - 1);
  EXPECT_TRUE(ends(fd));
  EXPECT_TRUE(ends(slow));
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  close(fd);
  close(slow);
}

// Nor does a peer keep its connection that attaches and opens nothing. The time of a slow open
// counts from its beginning.
TEST_F(Control, WhoDoesNotOpenIsEnded) {
  serve({.open_ns = 3'000'000'000});
  const auto attach = request([](auto r) { r.setAttach(kControlVersion); });
  const auto ping = request([](auto r) { r.setPing(); });
  client = connected();
  std::atomic<bool> ended{false};
  fake.on_open = [&](OpenReply*) { ended.wait(false); };
  Status opens = 1;
  std::thread opener([&] {
    OpenReply opened;
    opens = client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened);
  });
  // Taken later than that: where their time is up, that one's is.
  const int fd = raw(), busy = raw();
  for (int it : {fd, busy}) send_all(it, attach.data(), attach.size());
  std::thread pings([&] {
    // Nor does it help to say something.
    char bytes[4096];
    while (send(busy, ping.data(), ping.size(), MSG_NOSIGNAL) > 0 &&
           recv(busy, bytes, sizeof bytes, 0) > 0) {
    }
  });
  EXPECT_TRUE(ends(fd));
  pings.join();
  ended = true;
  ended.notify_all();
  opener.join();
  EXPECT_EQ(opens, FRUGAL_OK);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  close(fd);
  close(busy);
}

// A controller that is stopped when the time runs out finds the messages that came meanwhile.
TEST_F(Control, ALateControllerTakesWhatHasCome) {
  std::string line;
  for (int tries = 0;; ++tries) {
    const pid_t controller = other("serve-briefly", &line);
    client = connected();
    kill(controller, SIGSTOP);
    waitpid(controller, nullptr, WUNTRACED);
    std::thread goes_on([&] {
      usleep(2 * kBriefMs * 1000);
      kill(controller, SIGCONT);
    });
    OpenReply opened;
    const Status s = client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened);
    goes_on.join();
    client.reset();
    end(controller);
    std::filesystem::remove(address);
    std::filesystem::remove(address + ".lock");
    if (s == FRUGAL_OK) break;
    // It was this process that was late.
    ASSERT_EQ(s, FRUGAL_ERR_PEER_LOST);
    ASSERT_LT(tries, 20);
  }
}

TEST_F(Control, OneProcessHasSoManyConnections) {
  serve({.of_process = 3, .open_ns = UINT64_MAX / 2});
  std::vector<Client> mine;
  for (int i = 0; i < 3; ++i) mine.push_back(connected());
  std::string message, line;
  Client one_more;
  const auto connect = [&] { return ControlClient::connect(address.c_str(), kNeverMs, &one_more); };
  EXPECT_EQ(failure(connect, &message).status, FRUGAL_ERR_BUSY);
  EXPECT_NE(message.find("process " + std::to_string(getpid()) + " has 3 "), std::string::npos)
      << message;
  EXPECT_NE(message.find("close"), std::string::npos) << message;
  const pid_t another = other("attach", &line);
  EXPECT_EQ(line, "0");
  // There is room for a connection at once, however long the controller is about the one that was
  // closed.
  fake.hold(true);
  std::thread caller([&] { (void)mine[0]->drop_table(1, kNeverMs); });
  fake.wait_for([&] { return fake.holding == 1; });
  mine[0]->disconnect();
  caller.join();
  std::thread later([&] { fake.hold(false); });
  EXPECT_EQ(connect(), FRUGAL_OK);
  later.join();
  for (size_t i = 1; i < 3; ++i) EXPECT_EQ(mine[i]->ping(kNeverMs), FRUGAL_OK);
  end(another);
}

TEST_F(Control, SilentConnectionsKeepNobodyOut) {
  serve({.connections = 100, .of_process = 100, .open_ns = UINT64_MAX / 2});
  std::vector<int> fds;
  for (int i = 0; i < 300; ++i) fds.push_back(raw());
  std::vector<Client> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(connected());
    ASSERT_TRUE(clients.back());
    close(fds.back());
    fds.pop_back();
    fds.insert(fds.begin(), raw());
  }
  EXPECT_LE(server->connections(), 100u);
  for (auto& c : clients) EXPECT_EQ(c->leave(1, false, kNeverMs), FRUGAL_OK);
  for (int fd : fds) close(fd);
}

// Nor do those of another process push out one that was there before.
TEST_F(Control, SilentConnectionsPushOutTheirOwn) {
  serve();
  const int fd = raw();
  std::string line;
  const pid_t unresponsive = other("be-silent", &line);
  const auto attach = request([](auto r) { r.setAttach(kControlVersion); });
  send_all(fd, attach.data(), attach.size());
  char byte;
  EXPECT_EQ(recv(fd, &byte, 1, 0), 1);
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
  end(unresponsive);
  close(fd);
}

TEST_F(Control, TheFirstRequestAttaches) {
  both();
  const auto attach = request([](auto r) { r.setAttach(kControlVersion); });
  const auto ping = request([](auto r) { r.setPing(); });
  int fd = raw();
  send_all(fd, ping.data(), ping.size());
  EXPECT_TRUE(ends(fd));
  close(fd);
  fd = raw();
  send_all(fd, attach.data(), attach.size());
  send_all(fd, attach.data(), attach.size());
  EXPECT_TRUE(ends(fd));
  close(fd);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
}

// The connection ends after the reply to open(), before the attached engine exists: no engine is
// made.
TEST_F(Control, AConnectionEndsWhileItIsOpened) {
  ASSERT_EQ(ControlServer::start(nullptr, &fake, &server), FRUGAL_OK);
  Mapping arena;
  ASSERT_EQ(os_reserve(size_t{2} << 20, true, &arena), FRUGAL_OK);
  RegionPublisher region_publisher;
  uint64_t root = 0;
  // So many are mapped first that the end has been seen by then, as a rule.
  for (int i = 0; i < 100; ++i) ASSERT_EQ(region_publisher.come(arena, &root), FRUGAL_OK);
  std::unique_ptr<Channel> channel;
  ASSERT_EQ(Channel::create(size_t{64} << 10, nullptr, &channel), FRUGAL_OK);
  fake.numbers = {0, UINT64_MAX, root};
  const int listener = listening();
  int taken = -1;
  std::vector<int> given;
  fake.on_open = [&](OpenReply* reply) {
    int sockets[2];
    uint64_t id;
    ASSERT_TRUE(ForkedDescriptors::open(sockets, [](int(&fds)[2]) {
      return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0;
    }));
    ASSERT_EQ(region_publisher.add(sockets[0], -1, &id), FRUGAL_OK);
    given.push_back(sockets[1]);
    reply->descriptors = {sockets[1], channel->up_fd(), channel->down_fd()};
    shutdown(taken, SHUT_RD);
  };
  std::thread takes([&] {  // until the listener is closed
    for (int socket; (socket = accept(listener, nullptr, nullptr)) >= 0;) {
      if (taken >= 0) close(taken);
      taken = fcntl(socket, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
      server->adopt(socket);
    }
  });
  int32_t status = FRUGAL_OK;
  for (int tries = 0; status == FRUGAL_OK && tries < 20; ++tries) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.service = address.c_str();
    frugal_engine* engine = nullptr;
    status = frugal_open(&config, &engine);
    if (status == FRUGAL_OK) {  // it ended later
      EXPECT_EQ(frugal_flush(engine, kNeverMs), FRUGAL_ERR_PEER_LOST);
      EXPECT_EQ(frugal_close(engine), FRUGAL_OK);
    }
  }
  EXPECT_EQ(status, FRUGAL_ERR_PEER_LOST);
  frugal_error why;
  frugal_last_error(&why);
  EXPECT_NE(std::string(why.message).find("has ended"), std::string::npos) << why.message;
  shutdown(listener, SHUT_RDWR);
  takes.join();
  if (taken >= 0) close(taken);
  close(listener);
  std::filesystem::remove(address);
  server.reset();
  for (int fd : given) ForkedDescriptors::close(fd);
  os_release(&arena);
}

// A reply that cannot be written: the waiting client returns at once, not after the time-out.
TEST_F(Control, AnAnswerThatCannotBeSentEndsTheConnection) {
  both();
  fake.descriptors = {memory_with("a")};
  fake.numbers = {1};
  fake.on_open = [](OpenReply* reply) {
    // A descriptor that was closed after the handler returned it.
    const int gone = fcntl(reply->descriptors[0], F_DUPFD_CLOEXEC, 900);
    reply->descriptors.push_back(gone);
    close(gone);
  };
  OpenReply opened;
  EXPECT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_ERR_PEER_LOST);
  fake.wait_for([&] { return fake.left.size() == 1; });
  fake.on_open = nullptr;
  Client second = connected();
  EXPECT_EQ(second->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_OK);
  close_all(&opened.descriptors);
  close_all(&fake.descriptors);
}

// Memory fails at each allocation, on either side. The call returns a status, and a rank whose
// trainer did not receive it is given back.
TEST_F(Control, EachAllocationMayFail) {
  both();
  fake.descriptors = {memory_with("a"), memory_with("b")};
  fake.read_only = {fake.descriptors[1]};
  fake.numbers = {1, 2, 3};
  const long before = descriptors_of(getpid());
  int n = 1;
  for (;; ++n) {
    fake.joins = fake.leaves = 0;
    heap_test_fail_after(n);
    Client c;
    OpenReply opened, again;
    TableReply table;
    JoinReply joined;
    Status s = ControlClient::connect(address.c_str(), kNeverMs, &c);
    if (s == FRUGAL_OK) s = c->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened);
    if (s == FRUGAL_OK) s = c->find_table("x", kNeverMs, &table);
    if (s == FRUGAL_OK) s = c->join(FRUGAL_TRAINER_CONFIG_INIT, kNeverMs, &joined);
    const int64_t left = heap_test_fail_after(0);
    EXPECT_TRUE(s == FRUGAL_OK || s == FRUGAL_ERR_OUT_OF_MEMORY || s == FRUGAL_ERR_PEER_LOST)
        << n << ": " << s;
    if (s != FRUGAL_OK && c && !c->lost()) {
      EXPECT_EQ(fake.joins, fake.leaves) << n;
      EXPECT_EQ(c->ping(kNeverMs), FRUGAL_OK) << n;
      EXPECT_EQ(c->open(FRUGAL_CONFIG_INIT, kNeverMs, &again), FRUGAL_OK) << n;
    }
    for (Vector<int>* fds :
         {&opened.descriptors, &again.descriptors, &table.descriptors, &joined.descriptors})
      close_all(fds);
    if (left > 0) break;
  }
  EXPECT_GT(n, 15);
  for (int i = 0; i < 10000 && descriptors_of(getpid()) != before; ++i) usleep(1000);
  EXPECT_EQ(descriptors_of(getpid()), before);
  close_all(&fake.descriptors);
}

TEST_F(Control, TextsThatAreTooLong) {
  both();
  const std::string name(5000, 'x');
  TableReply table;
  JoinReply joined;
  frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
  t.name = name.c_str();
  frugal_trainer_config trainer = FRUGAL_TRAINER_CONFIG_INIT;
  trainer.device = name.c_str();
  EXPECT_EQ(client->create_table(t, kNeverMs, &table), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(client->find_table(name.c_str(), kNeverMs, &table), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(client->join(trainer, kNeverMs, &joined), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, TwoHundredConnections) {
  serve({.of_process = 201, .open_ns = UINT64_MAX / 2});
  client = connected();
  std::vector<Client> clients;
  for (int i = 0; i < 200; ++i) {
    clients.push_back(connected());
    ASSERT_TRUE(clients.back());
  }
  EXPECT_EQ(server->connections(), 201u);
  for (auto& c : clients) EXPECT_EQ(c->leave(1, false, kNeverMs), FRUGAL_OK);
  clients.clear();
  fake.wait_for([&] { return fake.left.size() == 200; });
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, NoMoreConnectionsThanTheLimit) {
  serve({.connections = 3, .open_ns = UINT64_MAX / 2});
  Client a = connected(), b = connected(), c = connected(), d;
  std::string message;
  frugal_error e =
      failure([&] { return ControlClient::connect(address.c_str(), 50, &d); }, &message);
  EXPECT_TRUE(e.status == FRUGAL_ERR_PEER_LOST || e.status == FRUGAL_ERR_TIMEOUT) << message;
  EXPECT_EQ(a->ping(kNeverMs), FRUGAL_OK);
  b.reset();
  d = connected();  // when there is room for a connection
  ASSERT_TRUE(d);
  EXPECT_EQ(d->ping(kNeverMs), FRUGAL_OK);
  EXPECT_EQ(c->ping(kNeverMs), FRUGAL_OK);
}

TEST_F(Control, WithoutDescriptorsConnectionsAreEnded) {
  both();
  std::vector<int> fds;
  for (int i = 0; i < 5; ++i) fds.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(fds.back());  // numbers below are taken
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  for (int fd : fds) EXPECT_EQ(connect_raw(fd), 0);
  for (int fd : fds) EXPECT_TRUE(ends(fd));
  // The server has its spare descriptor back, so that no number is free.
  for (int fd = 0; fd < fds.back();) {
    if (fcntl(fd, F_GETFD) >= 0)
      ++fd;
    else
      std::this_thread::yield();
  }
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  // The descriptors of a reply fail in the same way.
  fake.descriptors = {0};
  OpenReply opened;
  std::string message;
  const auto opens = [&] { return client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened); };
  EXPECT_EQ(failure(opens, &message).status, FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(message.find(" " + std::to_string(none.rlim_cur) + ";"), std::string::npos) << message;
  EXPECT_NE(message.find("ulimit -n"), std::string::npos) << message;
  // Nor can a socket.
  Client late;
  const auto connects = [&] { return ControlClient::connect(address.c_str(), kNeverMs, &late); };
  EXPECT_EQ(failure(connects, &message).status, FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(message.find("ulimit -n"), std::string::npos) << message;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(client->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_OK);
  close_all(&opened.descriptors);
  EXPECT_EQ(connected()->ping(kNeverMs), FRUGAL_OK);
  for (int fd : fds) close(fd);
}

TEST_F(Control, NothingIsLeftBehind) {
  both();  // what is made once
  client.reset();
  server.reset();
  const long before = descriptors_of(getpid());
  fake.descriptors = {memory_with("a"), memory_with("b")};
  for (int round = 0; round < 20; ++round) {
    serve();
    Client a = connected(), b = connected(), none;
    OpenReply opened;
    ASSERT_EQ(a->open(FRUGAL_CONFIG_INIT, kNeverMs, &opened), FRUGAL_OK);
    close_all(&opened.descriptors);
    ASSERT_EQ(b->ping(kNeverMs), FRUGAL_OK);
    EXPECT_EQ(ControlClient::connect(address.c_str(), kNeverMs, &none, kControlVersion + 1),
              FRUGAL_ERR_UNSUPPORTED);
    if (round % 2) b.reset();
    server.reset();
  }
  EXPECT_EQ(descriptors_of(getpid()), before + 2);
  close_all(&fake.descriptors);
}

TEST_F(Control, SignalsAreTheProgramsOwn) {
  struct Now {
    std::vector<struct sigaction> actions{65};
    sigset_t mask;
    Now() {
      std::memset(actions.data(), 0, actions.size() * sizeof actions[0]);
      for (int s = 1; s <= 64; ++s) sigaction(s, nullptr, &actions[static_cast<size_t>(s)]);
      sigemptyset(&mask);
      pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    }
    bool operator==(const Now& o) const {
      for (size_t s = 1; s <= 64; ++s)
        if (actions[s].sa_handler != o.actions[s].sa_handler ||
            actions[s].sa_flags != o.actions[s].sa_flags)
          return false;
      for (int s = 1; s <= 64; ++s)
        if (sigismember(&mask, s) != sigismember(&o.mask, s)) return false;
      return true;
    }
  };
  const Now before;
  EXPECT_EQ(before.actions[SIGPIPE].sa_handler, SIG_DFL);
  both();
  EXPECT_EQ(client->leave(1, false, kNeverMs), FRUGAL_OK);
  // Both sides write to a peer that is gone: a SIGPIPE would end the test.
  int fd = raw();
  std::vector<uint64_t> bad(1000, 1);
  send_all(fd, bad.data(), 64);
  close(fd);
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_OK);
  EXPECT_TRUE(Now() == before);
  server->stop();
  EXPECT_EQ(client->ping(kNeverMs), FRUGAL_ERR_PEER_LOST);
  client.reset();
  server.reset();
  EXPECT_TRUE(Now() == before);
}

// A fork() without notice to its handlers, as clone() by some other library is.
pid_t unseen_fork() {
  const auto pid = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  if (pid == 0)
    for (;;) syscall(SYS_ppoll, nullptr, 0, nullptr, nullptr, 0);
  return pid;
}

struct ForkingFake : Fake {
  bool forks = false;
  Status committed(Peer& peer, uint64_t* step) override {
    *step = forks ? static_cast<uint64_t>(unseen_fork()) : 0;
    return note(peer);
  }
};

int as_other(const std::string& what, const char* address) {
  if (what.starts_with("serve")) {
    ForkingFake fake;
    fake.forks = what == "serve-and-fork";
    fake.hold(true);
    Server server;
    ControlLimits limits;
    if (what == "serve-briefly") limits.open_ns = kBriefMs * 1'000'000;
    if (ControlServer::start(address, &fake, &server, limits) != FRUGAL_OK) return 1;
    if (write(1, "\n", 1) != 1) return 1;
    for (;;) pause();
  }
  if (what == "be-silent") {
    for (int i = 0; i < 400; ++i)
      if (connect_to(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), address) != 0) return 1;
    if (write(1, "\n", 1) != 1) return 1;
    for (;;) pause();
  }
  Client client;
  if (ControlClient::connect(address, kNeverMs, &client) != FRUGAL_OK) return 1;
  if (client->leave(1, false, kNeverMs) != FRUGAL_OK) return 1;
  const std::string line = std::to_string(what == "attach-and-fork" ? unseen_fork() : 0) + "\n";
  if (write(1, line.data(), line.size()) < 0) return 1;
  for (;;) pause();
}

}  // namespace
}  // namespace frugal

int main(int argc, char** argv) {
  if (argc == 3 && argv[1][0] != '-') return frugal::as_other(argv[1], argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
