// Hostile peers do not harm honest ranks: each is detected, the rank is replaced, and the final
// tables are those of threads.
//
// Two ranks of this process train a small job of three. The third rank is an enemy's, or an honest
// process has it and the enemy is a further process. Each enemy is a process that speaks to the
// controller with the library's classes or with raw bytes:
//
//    hostile_test [MODE ...]                  all, or these
//    hostile_test --enemy MODE ADDRESS STEP   an enemy
//    hostile_test --honest ADDRESS STEP       an honest process with the third rank, until STEP is
//                                             committed
//
// Enemies send impossible requests, also after their step was undone. They send sums of rows that
// were declared and not used, and false counts and lengths. They submit more sums than a step has
// rows, and more batches than a step may have. They wait for a missing device, stop in the middle
// of messages, and do not read replies. They let everything fail, open memory anew, and place sums
// in memory that others cannot read. They declare 20,000,000 ids, connect and never attach or never
// open, and open too many engines. They request large replies, leave a trace running, and send
// descriptors, noise and floods.
//
// A peer that breaks a rule is lost at once, before any rank waits for it, and nothing of it is
// committed. A peer that only stalls is lost by the time-out for unresponsive ranks. At most two
// calls of honest ranks use up their whole time-out. Another process then takes the rank, and the
// controller's memory stays what it was. Its memory at most includes two attached processes: the
// enemy, and the one that takes the rank. The test prints what each mode cost.
#include <capnp/serialize.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/futex.h"
#include "base/os.h"
#include "control.capnp.h"
#include "controller.h"
#include "fence.h"
#include "frugal.h"
#include "process/channel.h"
#include "process/control.h"
#include "process/protocol.h"
#include "process/regions.h"
#include "process/request_loop.h"
#include "send_descriptors.h"
#include "support/mix.h"
#include "support/never.h"

namespace {

using frugal::Call;
using frugal::Channel;
using frugal::Header;
using frugal::now_ns;
using frugal::Piece;

constexpr uint32_t kWorld = 3, kRank = 2;  // the enemy's
constexpr int64_t kSilenceMs = 2000;       // where it is found out by that
constexpr uint32_t kMostTimedOut = 2;      // calls of honest ranks that may, on a busy machine
constexpr uint32_t kRejoined = 3;          // that may be lost to one, in a whole job
constexpr int kBoundMs = 60000;      // of what is waited for: a machine that has other things to do
constexpr uint64_t kSteps = 20;      // of the job with each mode
constexpr long kMostKib = 64 << 10;  // that the controller may have more
constexpr size_t kKeys = 64, kDim = 8, kRows = 4096;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "hostile_test: %s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}
#define CHECK(what)                                        \
  do {                                                     \
    if (!(what)) Die(std::string(mode_name) + ": " #what); \
  } while (0)
const char* mode_name = "start";

std::string Error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}
void Ok(int status, const char* what) {
  if (status != FRUGAL_OK)
    Die(std::string(mode_name) + ": " + what + ": " + frugal_status_name(status) + ": " + Error());
}
#define OK(call) Ok((call), #call)

// --- The job -------------------------------------------------------------------------------------

frugal_config JobConfig() {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = kWorld;
  c.lookahead = 4;
  return c;
}

struct Rank {
  frugal_engine* engine = nullptr;
  frugal_table* tables[2] = {};
  frugal_trainer* trainer = nullptr;
  uint32_t rank = 0;

  void Tables() {
    for (int i = 0; i < 2; ++i) {
      frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
      t.name = i ? "hashed" : "dense";
      t.rows = i ? 2 * kRows : kRows;  // enemies have keys of their own
      t.dim = kDim;
      t.key_space = i ? FRUGAL_HASHED : FRUGAL_DENSE;
      t.init = FRUGAL_INIT_UNIFORM;
      t.init_a = -1;
      t.init_b = 1;
      t.optimizer.kind = i ? FRUGAL_ADAM : FRUGAL_ADAGRAD;
      OK(frugal_table_create(engine, &t, &tables[i]));
    }
  }
  void Join(uint32_t as) {
    rank = as;
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.rank = as;
    // Where others have ended the step already, not before the rank that has not is lost, too.
    const uint64_t until = now_ns() + uint64_t{kBoundMs} * 1000000;
    int status;
    while ((status = frugal_trainer_create(engine, &c, &trainer)) == FRUGAL_ERR_BUSY &&
           now_ns() < until)
      usleep(1000);
    Ok(status, "join");
  }
  void Attach(const std::string& address, int64_t timeout_ms) {
    frugal_config c = JobConfig();
    c.service = address.c_str();
    c.timeout_ms = timeout_ms;
    OK(frugal_open(&c, &engine));
    Tables();
  }
  // Gradients depend on the rank, the step, and the rows that were looked up.
  int Begin(uint64_t step, int64_t timeout_ms) const {
    return frugal_step_begin(trainer, step, timeout_ms);
  }
  int Work(uint64_t step) const {
    uint64_t keys[kKeys];
    float rows[kKeys * kDim], grads[kKeys * kDim];
    for (int i = 0; i < 2; ++i) {
      for (size_t k = 0; k < kKeys; ++k)
        keys[k] = mix(step * 1000 + rank * 100000007 + k + (i ? 77 : 0)) % kRows;
      frugal_op op = FRUGAL_OP_INIT;
      op.table = tables[i];
      op.keys = keys;
      op.count = kKeys;
      op.rows_out = rows;
      if (int s = frugal_lookup(trainer, &op, 1)) return s;
      for (size_t k = 0; k < kKeys * kDim; ++k)
        grads[k] = rows[k] * 0.01f + static_cast<float>(rank + k % 7) * 0.125f;
      op.rows_out = nullptr;
      op.grads = grads;
      if (int s = frugal_push_grad(trainer, &op, 1)) return s;
    }
    return frugal_step_end(trainer, step, 0);
  }
  uint64_t Next() const {
    uint64_t committed = 0;
    int status;  // a time-out means an unresponsive controller; a busy one has no fault
    while ((status = frugal_committed_step(engine, &committed)) == FRUGAL_ERR_TIMEOUT) {
    }
    Ok(status, "the last step that is committed");
    return committed == FRUGAL_NO_STEP ? 0 : committed + 1;
  }
  // All that is in the tables.
  std::vector<uint64_t> Contents() const {
    std::vector<uint64_t> all;
    for (frugal_table* table : tables) {
      std::vector<uint64_t> keys(kRows), sorted;
      uint64_t cursor = 0;
      size_t n = 0;
      OK(frugal_table_keys(table, &cursor, keys.data(), kRows, &n));
      keys.resize(n);
      std::sort(keys.begin(), keys.end());
      std::vector<float> rows(n * kDim * 3);
      OK(frugal_get(table, keys.data(), n, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
      all.insert(all.end(), keys.begin(), keys.end());
      all.resize(all.size() + rows.size() / 2);
      std::memcpy(&all[all.size() - rows.size() / 2], rows.data(), rows.size() / 2 * 8);
    }
    return all;
  }
};

bool Undone(int status) {
  return status == FRUGAL_ERR_PEER_LOST || status == FRUGAL_ERR_STEP_ABORTED;
}

// An honest process.
int Honest(const std::string& address, uint64_t until) {
  Rank r;
  r.Attach(address, kBoundMs);
  r.Join(kRank);
  if (dprintf(1, "in\n") < 0) return 1;
  for (uint64_t step = r.Next(); step < until;) {
    int s = r.Begin(step, 200);
    if (s == FRUGAL_OK) s = r.Work(step);
    if (s == FRUGAL_OK)
      ++step;
    else if (Undone(s))
      step = r.Next();
    else if (s != FRUGAL_ERR_TIMEOUT)
      Ok(s, "a step of an honest process");
  }
  while (r.Next() < until) usleep(1000);
  OK(frugal_trainer_close(r.trainer));
  OK(frugal_close(r.engine));
  return 0;
}

// The two honest ranks of this process, each with an attachment and a thread of its own.
class Job {
 public:
  Job(const std::string& address, int64_t timeout_ms) {
    for (uint32_t i = 0; i < 2; ++i) {
      ranks_[i].Attach(address, timeout_ms);
      ranks_[i].Join(i);
    }
    for (Rank& r : ranks_) threads_.emplace_back([this, &r] { Run(r); });
  }
  void Stop() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      over_ = true;
      cv_.notify_all();
    }
    for (std::thread& t : threads_) t.join();
    for (Rank& r : ranks_) OK(frugal_close(r.engine));
  }
  // No step from this one on is begun.
  void Allow(uint64_t limit) {
    std::lock_guard<std::mutex> lock(mu_);
    limit_ = limit;
    cv_.notify_all();
  }
  // The next step that the first rank begins is undone by it.
  void Undo() {
    std::lock_guard<std::mutex> lock(mu_);
    undo_ = true;
  }
  uint32_t losses() {
    std::lock_guard<std::mutex> lock(mu_);
    return losses_;
  }
  // Both trainers have been notified of the loss of the third rank. Returns when the last was.
  uint64_t AwaitLoss(uint32_t before) {
    std::unique_lock<std::mutex> lock(mu_);
    if (!cv_.wait_for(lock, std::chrono::milliseconds(kBoundMs),
                      [&] { return losses_ >= before + 2; }))
      Die(std::string(mode_name) + ": its rank was not lost");
    return lost_at_;
  }
  // Until so many steps are committed.
  uint64_t AwaitSteps(uint64_t steps) {
    const uint64_t until = now_ns() + uint64_t{kBoundMs} * 1000000;
    while (ranks_[0].Next() < steps) {
      if (now_ns() > until) Die(std::string(mode_name) + ": the honest ranks do not go on");
      usleep(1000);
    }
    return now_ns();
  }
  const Rank& first() const { return ranks_[0]; }
  // Calls that have waited for their whole time-out, since the last look.
  uint32_t TimedOut() { return timed_out_.exchange(0); }

 private:
  void Run(Rank& r) {
    uint64_t step = r.Next();
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mu_);
        cv_.wait(lock, [&] { return over_ || step < limit_; });
        if (over_) return;
      }
      // With the default time-out: the call that waits for an unresponsive rank finds that out.
      int s = r.Begin(step, FRUGAL_TIMEOUT_DEFAULT);
      if (s == FRUGAL_OK && r.rank == 0 && Undoes()) {
        OK(frugal_step_abort(r.trainer));
        continue;
      }
      if (s == FRUGAL_OK) s = r.Work(step);
      if (s == FRUGAL_OK) {
        ++step;
      } else if (Undone(s)) {
        const std::string why = Error();
        if (why.find("rank 2") != std::string::npos) {
          std::lock_guard<std::mutex> lock(mu_);
          ++losses_;
          lost_at_ = now_ns();
          cv_.notify_all();
        } else if (s == FRUGAL_ERR_PEER_LOST) {
          // On a busy machine it may have been too slow itself, or the controller.
          if (++rejoined_ > kRejoined)
            Die(std::string(mode_name) + ": honest ranks are lost: " + why);
          std::printf("%s: rank %u joins again: %s\n", mode_name, r.rank, why.c_str());
          (void)frugal_trainer_close(r.trainer);
          r.Join(r.rank);
        }
        step = r.Next();
      } else if (s == FRUGAL_ERR_TIMEOUT) {
        ++timed_out_;
      } else {
        Ok(s, "a step of an honest rank");
      }
    }
  }
  bool Undoes() {
    std::lock_guard<std::mutex> lock(mu_);
    return std::exchange(undo_, false);
  }
  Rank ranks_[2];
  std::vector<std::thread> threads_;
  std::mutex mu_;
  std::condition_variable cv_;
  uint64_t limit_ = 0, lost_at_ = 0;
  uint32_t losses_ = 0;
  std::atomic<uint32_t> timed_out_{0}, rejoined_{0};
  bool over_ = false, undo_ = false;
};

// --- Processes -----------------------------------------------------------------------------------

// This program with other arguments. What it says comes line by line.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    int out[2];
    if (pipe2(out, O_CLOEXEC) != 0) Die("pipe");
    arguments.insert(arguments.begin(), "hostile_test");
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork_child();
    if (pid_ == 0) {
      dup2(out[1], 1);
      execv("/proc/self/exe", argv.data());
      _exit(127);
    }
    close(out[1]);
    out_ = out[0];
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      (void)Wait();
    }
    close(out_);
  }
  std::string Line() {
    std::string line;
    for (char c;;) {
      pollfd p{out_, POLLIN, 0};
      if (poll(&p, 1, kBoundMs) != 1) Die(std::string(mode_name) + ": a process says nothing");
      if (read(out_, &c, 1) != 1)
        Die(std::string(mode_name) + ": a process has ended, and said '" + line + "'");
      if (c == '\n') return line;
      line += c;
    }
  }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

 private:
  pid_t pid_;
  int out_;
};

void Say(const char* what) {
  if (dprintf(1, "%s\n", what) < 0) _exit(1);
}

// --- Enemies -------------------------------------------------------------------------------------

enum class How {
  kAtOnce,  // it has the rank, and breaks a rule
  kSilent,  // it has the rank, and does nothing that counts
  kEnded,   // it only connects: its connections are ended
  kBeside,  // its acts are allowed, or no thread waits for them: the others go on
};

struct Enemy {
  std::string address;
  uint64_t step = 0;
  std::unique_ptr<frugal::ControlClient> control;
  frugal::OpenReply opened;
  frugal::JoinReply joined;
  std::unique_ptr<Channel> process, trainer;
  uint64_t table = 0, sequence = 0;
  bool shows = true;  // its staging memory

  void Attach(bool join, uint32_t flags = 0) {
    OK(frugal::ControlClient::connect(address.c_str(), kBoundMs, &control));
    frugal_config c = JobConfig();
    c.flags = flags;
    OK(control->open(c, kBoundMs, &opened));
    OK(Channel::attach(dup(opened.descriptors[1]), dup(opened.descriptors[2]), -1, &process));
    frugal::TableReply found;
    OK(control->find_table("dense", kBoundMs, &found));
    table = found.id;
    if (!join) return;
    frugal_trainer_config as = FRUGAL_TRAINER_CONFIG_INIT;
    as.rank = kRank;
    OK(control->join(as, kBoundMs, &joined));
    OK(Channel::attach(dup(joined.descriptors[0]), dup(joined.descriptors[1]),
                       dup(joined.descriptors[2]), &trainer));
    if (shows) OK(Ask(*trainer, Call::kMapped, {}));
  }
  frugal::Status Send(Channel& to, Call call, std::vector<uint64_t> args,
                      const std::vector<char>& payload = {}, int64_t ms = kBoundMs) {
    Header h{};
    h.type = static_cast<uint32_t>(call);
    h.sequence = ++sequence;
    std::copy(args.begin(), args.end(), h.args);
    const Piece piece{payload.data(), payload.size()};
    return to.send(h, &piece, 1, now_ns() + static_cast<uint64_t>(ms) * 1000000);
  }
  frugal::Status Ask(Channel& to, Call call, std::vector<uint64_t> args,
                     const std::vector<char>& payload = {}) {
    if (frugal::Status s = Send(to, call, std::move(args), payload)) return s;
    Header answer;
    if (frugal::Status s = to.receive(&answer, now_ns() + uint64_t{kBoundMs} * 1000000)) return s;
    return static_cast<frugal::Status>(answer.status);
  }
  // Words of the up region, as channel.cpp lays them out: the count of requests comes first.
  std::atomic<uint64_t>& Requests() {
    char* up = writable_mapping_of(joined.descriptors[0]);
    if (!up) Die("there is no up region");
    return *reinterpret_cast<std::atomic<uint64_t>*>(up);
  }
  void Move(uint64_t by) {
    auto& word = Requests();
    word.fetch_add(by);
    frugal::futex_wake(reinterpret_cast<const uint32_t*>(&word));
  }
  // The beginning of a message, of which the rest never comes.
  void Begin(Call call, std::vector<uint64_t> args, uint64_t payload,
             const std::vector<char>& there = {}) {
    Header h{};
    h.type = static_cast<uint32_t>(call);
    h.sequence = ++sequence;
    h.payload = payload;
    std::copy(args.begin(), args.end(), h.args);
    auto& word = Requests();
    char* ring = reinterpret_cast<char*>(&word) + 4096;
    constexpr size_t kRing = size_t{4} << 20;
    std::vector<char> bytes(reinterpret_cast<char*>(&h), reinterpret_cast<char*>(&h + 1));
    bytes.insert(bytes.end(), there.begin(), there.end());
    for (size_t i = 0; i < bytes.size(); ++i) ring[(word.load() + i) % kRing] = bytes[i];
    Move(bytes.size());
  }
};

template <class T>
std::vector<char> Bytes(const T& value) {
  const char* raw = reinterpret_cast<const char*>(&value);
  return {raw, raw + sizeof value};
}

int Connect(const std::string& address) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strcpy(name.sun_path, address.c_str());
  if (connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name) != 0) Die("connect");
  return fd;
}
// The other side has ended the connection.
void AwaitEnd(int fd) {
  char bytes[4096];
  for (;;) {
    pollfd p{fd, POLLIN, 0};
    if (poll(&p, 1, kBoundMs) != 1) Die("a connection is not ended");
    if (recv(fd, bytes, sizeof bytes, 0) <= 0) return;
  }
}
std::vector<char> Request(const std::function<void(frugal::wire::Request::Builder)>& fill) {
  capnp::MallocMessageBuilder message;
  fill(message.initRoot<frugal::wire::Request>());
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asChars();
  return {bytes.begin(), bytes.end()};
}
void SendAll(int fd, const std::vector<char>& bytes, size_t n = SIZE_MAX) {
  if (send(fd, bytes.data(), std::min(n, bytes.size()), MSG_NOSIGNAL) < 0 && errno != EPIPE &&
      errno != ECONNRESET)
    Die("send");
}
std::vector<char> AttachRequest() {
  return Request([](auto r) { r.setAttach(frugal::kControlVersion); });
}
// One that the other side takes, attached.
int ConnectAttached(const std::string& address) {
  const int fd = Connect(address);
  SendAll(fd, AttachRequest());
  char answer[4096];
  if (recv(fd, answer, sizeof answer, 0) <= 0) Die("not attached");
  return fd;
}

// Inside of its step.
void BeginStep(Enemy& e) {
  frugal::Status s;
  while ((s = e.Ask(*e.trainer, Call::kStepBegin, {e.step, 100000000})) == FRUGAL_ERR_TIMEOUT) {
  }
  OK(s);
}
void EndStep(Enemy& e, const frugal::PushAddress& push, bool used = false) {
  std::vector<char> payload;
  auto add = [&](const std::vector<char>& more) {
    payload.insert(payload.end(), more.begin(), more.end());
  };
  if (used) add(Bytes(uint32_t{0}));  // its first part
  add(Bytes(frugal::RemoteCounts{}));
  add(Bytes(push));
  (void)e.Send(*e.trainer, Call::kStepEnd, {e.step, 0, 1, 0, used}, payload);
}
// Declares a row that does not exist, and submits rank gradients for it: those of the part, or of a
// list of its own. Usually without a lookup before.
void PushSums(Enemy& e, bool joined, bool used = false) {
  frugal::TableReply hashed;
  OK(e.control->find_table("hashed", kBoundMs, &hashed));
  frugal::OpHead op{};
  op.table = hashed.id;
  op.keys = 1;
  op.given = 1;
  op.shm_address = frugal::kNoShmAddress;
  const uint64_t key = (uint64_t{1} << 40) + e.step;
  std::vector<char> payload = Bytes(op), more = Bytes(key);
  payload.insert(payload.end(), more.begin(), more.end());
  OK(e.Ask(*e.trainer, Call::kPrefetch, {e.step, 1, 1}, payload));
  BeginStep(e);
  frugal::PartAddress part;
  OK(e.trainer->read(&part, sizeof part, now_ns() + uint64_t{kBoundMs} * 1000000));
  if (part.distinct != 1 || !(part.flags & frugal::kPartWhole)) Die("the key was not declared");
  frugal::PushAddress push{};
  push.table = hashed.id;
  push.whole = 1;
  if (joined) {
    frugal::Regions regions;
    frugal::RegionRefs reads;
    const char* rows = nullptr;
    regions.open(dup(e.opened.descriptors[0]));
    OK(regions.find(part.rows, sizeof(uint32_t), &reads, &rows));
    push.part = frugal::kJoined;
    push.distinct = 1;
    push.rows = 4096;
    OK(e.trainer->commit_staging(0, 8192));
    std::memcpy(e.trainer->staging() + push.rows, rows, sizeof(uint32_t));
  }
  EndStep(e, push, used);
}

struct Mode {
  const char* name;
  How how;
  const char* what;
  std::function<void(Enemy&)> act;  // after it comes back it stays, and does nothing
  bool first = false;   // the others begin when it has acted: what it does is refused while a step
                        // is under way
  long asked_mib = 0;   // what it is given, and the controller has for so long
  bool undone = false;  // an honest rank undoes its step
};

// Opens the engine as often as it may, and once more.
void OpenAll(Enemy& e, uint32_t flags) {
  static std::vector<std::unique_ptr<frugal::ControlClient>> all;
  for (frugal::Status s;;) {
    std::unique_ptr<frugal::ControlClient> one;
    frugal::begin_call();
    s = frugal::end_call(frugal::ControlClient::connect(e.address.c_str(), kBoundMs, &one));
    if (s == FRUGAL_ERR_BUSY && Error().find("32") != std::string::npos) break;
    OK(s);
    frugal_config c = JobConfig();
    c.flags = flags;
    frugal::OpenReply opened;
    OK(one->open(c, kBoundMs, &opened));
    // A process that cannot receive regions any more loses its connection.
    std::for_each(opened.descriptors.begin() + 1, opened.descriptors.end(),
                  [](int fd) { close(fd); });
    all.push_back(std::move(one));
  }
  if (all.size() != 32) Die("it has " + std::to_string(all.size()) + " engines open");
}
// The number by which the controller knows it.
uint64_t LargeTable(Enemy& e, int32_t key_space, uint64_t rows, uint32_t dim) {
  frugal_table_config large = FRUGAL_TABLE_CONFIG_INIT;
  large.name = "large";
  large.rows = rows;
  large.dim = dim;
  large.key_space = key_space;
  frugal::TableReply made;
  OK(e.control->create_table(large, kBoundMs, &made));
  return made.id;
}
constexpr size_t kManyKeys = size_t{1} << 22;
// Skips the replies that it does not want to read.
void AskForMuch(Enemy& e, Call call, const std::vector<uint64_t>& args,
                const std::vector<char>& payload) {
  for (int i = 0; i < 2; ++i) {
    OK(e.Ask(*e.process, call, args, payload));
    OK(e.process->skip(e.process->payload_left(), now_ns() + uint64_t{kBoundMs} * 1000000));
  }
}

const std::vector<Mode>& Modes() {
  static const std::vector<Mode> modes = {
      // Rules that a rank breaks.
      {"no-such-call", How::kAtOnce, "a request that there is not",
       [](Enemy& e) { (void)e.Send(*e.trainer, static_cast<Call>(9999), {}); }},
      {"here", How::kAtOnce, "says that it waits for its device, all the time, and has none",
       [](Enemy& e) {
         while (e.Ask(*e.trainer, Call::kHere, {}) == FRUGAL_OK) {
         }
       }},
      {"backwards", How::kAtOnce, "the count of its ring goes backwards",
       [](Enemy& e) {
         OK(e.Ask(*e.trainer, Call::kPrefetch, {e.step, 0, 1}));
         e.Move(-uint64_t{64});
       }},
      {"ahead", How::kAtOnce, "the count of its ring is further than the ring",
       [](Enemy& e) { e.Move((4 << 20) + 1); }},
      {"length", How::kAtOnce, "a list of 2^40 ops in a message of 2^60 bytes",
       [](Enemy& e) {
         e.Begin(Call::kPrefetch, {e.step, uint64_t{1} << 40, 1}, uint64_t{1} << 60);
       }},
      {"short", How::kAtOnce, "a message that is shorter than it says",
       [](Enemy& e) {
         (void)e.Send(*e.trainer, Call::kPrefetch, {e.step, 4, 1}, std::vector<char>(10));
       }},
      {"parts", How::kAtOnce, "parts of a step that it has not",
       [](Enemy& e) {
         (void)e.Send(*e.trainer, Call::kInside, {0, 0, 0, 0, 1000}, std::vector<char>(4000));
       }},
      {"place", How::kAtOnce, "keys outside of its memory",
       [](Enemy& e) {
         frugal::OpHead op{};
         op.table = e.table;
         op.keys = 1000;
         op.given = 1;
         op.shm_address = uint64_t{1} << 50;
         (void)e.Send(*e.trainer, Call::kPrefetch, {e.step, 1, 1}, Bytes(op));
       }},
      {"sums", How::kAtOnce, "the end of a step with sums outside of its memory",
       [](Enemy& e) {
         BeginStep(e);
         frugal::PushAddress push{};
         push.table = e.table;
         push.part = frugal::kJoined;
         push.distinct = 1000;
         push.rows = uint64_t{1} << 50;
         EndStep(e, push);
       }},
      {"sums-many", How::kAtOnce, "the end of a step with 2^28 rows that are none of its parts'",
       [](Enemy& e) {
         BeginStep(e);
         frugal::PushAddress push{};
         push.table = e.table;
         push.part = frugal::kJoined;
         push.distinct = uint64_t{1} << 28;
         EndStep(e, push);
       }},
      {"unused", How::kAtOnce, "sums of a part that it has not used",
       [](Enemy& e) { PushSums(e, false); }},
      {"unused-rows", How::kAtOnce, "sums of a list of rows that it has not used",
       [](Enemy& e) { PushSums(e, true); }},
      {"unshown", How::kAtOnce, "sums in memory that others cannot read",
       [](Enemy& e) { PushSums(e, false, true); }},
      {"undone", How::kAtOnce, "a request that there is not, when its step was undone",
       [](Enemy& e) {
         static frugal::Regions regions;
         frugal::RegionRefs reads;
         const char* counted = nullptr;
         regions.open(dup(e.opened.descriptors[0]));
         OK(regions.find(e.joined.numbers[1], sizeof(uint32_t), &reads, &counted));
         // It makes no call that would return the abort.
         while (reinterpret_cast<const std::atomic<uint32_t>*>(counted)->load() == 0) usleep(1000);
         (void)e.Send(*e.trainer, static_cast<Call>(9999), {});
       },
       false, 0, true},
      {"outside", How::kAtOnce, "a request that there is not, outside of steps",
       [](Enemy& e) { (void)e.Send(*e.process, static_cast<Call>(9999), {}); }},
      // Nothing that counts.
      {"silence", How::kSilent, "says nothing at all", [](Enemy&) {}},
      {"in-a-step", How::kSilent, "begins a step, and says nothing more",
       [](Enemy& e) {
         while (e.Ask(*e.trainer, Call::kStepBegin, {e.step, 100000000}) == FRUGAL_ERR_TIMEOUT) {
         }
       }},
      {"half-a-message", How::kSilent, "stops in the middle of a message",
       [](Enemy& e) {
         e.Begin(Call::kPrefetch, {e.step, 2, 1}, 1000, std::vector<char>(70));
       }},
      {"claims", How::kSilent, "says that 8 GiB of keys follow",
       [](Enemy& e) {
         frugal::ReadHead head{};
         head.op.table = e.table;
         head.op.keys = uint64_t{1} << 30;
         e.Begin(Call::kRead, {1, 1000000}, sizeof head + (uint64_t{8} << 30), Bytes(head));
       }},
      {"claims-ops", How::kSilent, "says that a million ops follow",
       [](Enemy& e) {
         e.Begin(Call::kPrefetch, {e.step, 1 << 20, 1}, uint64_t{64} << 20);
       }},
      {"no-reading", How::kSilent,
       "sends requests until replies that it does not take fill the ring",
       [](Enemy& e) {
         while (e.Send(*e.trainer, Call::kInside, {}, {}, 500) == FRUGAL_OK) {
         }
       }},
      {"declares", How::kSilent, "declares 20,000,000 ids",
       [](Enemy& e) {
         constexpr size_t kIds = 20000000;
         frugal::OpHead op{};
         op.table = e.table;
         op.keys = kIds;
         op.given = 1;
         op.shm_address = frugal::kNoShmAddress;
         std::vector<char> payload = Bytes(op);
         payload.resize(sizeof op + kIds * sizeof(uint64_t));
         auto* ids = payload.data() + sizeof op;
         for (uint64_t i = 0, id; i < kIds; ++i, ids += sizeof id)
           std::memcpy(ids, &(id = i % kRows), sizeof id);
         OK(e.Ask(*e.trainer, Call::kPrefetch, {e.step, 1, 1}, payload));
       },
       true, 1024},
      {"failures", How::kSilent, "asks for what fails, all the time",
       [](Enemy& e) {
         while (e.Ask(*e.trainer, Call::kCancel, {12345}) != FRUGAL_ERR_PEER_LOST) {
         }
       }},
      {"batches", How::kSilent, "declares nothing for all steps that it may, until it is refused",
       [](Enemy& e) {
         uint64_t number = 0;
         for (uint64_t step = e.step; step <= e.step + JobConfig().lookahead; ++step) {
           uint32_t taken = 0;
           while (e.Ask(*e.trainer, Call::kPrefetch, {step, 0, ++number}) == FRUGAL_OK)
             if (++taken > 4096) Die("there is no end to it");
         }
       },
       true},
      {"scribbles", How::kSilent, "writes anything into all that it can write",
       [](Enemy& e) {
         for (int fd :
              {e.joined.descriptors[0], e.joined.descriptors[2], e.opened.descriptors[1]}) {
           auto* words = reinterpret_cast<std::atomic<uint64_t>*>(writable_mapping_of(fd));
           for (uint64_t i = 0; words && i < 20000; ++i)
             words[mix(i) % (i % 2 ? 512 : 1 << 16)].store(mix(i + 1));
         }
       }},
      {"reopens", How::kSilent, "opens all that it has for writing",
       [](Enemy& e) {
         // Not its own ring. Its staging memory it has mapped, which is enough to write it.
         std::vector<int> all = {e.opened.descriptors[2], e.joined.descriptors[1],
                                 e.joined.descriptors[2]};
         frugal::TableReply table;
         for (const char* name : {"dense", "hashed"}) {
           OK(e.control->find_table(name, kBoundMs, &table));
           all.insert(all.end(), table.descriptors.begin(), table.descriptors.end());
         }
         if (all.size() < 3 + 2 + 4) Die("there are fewer descriptors than expected");
         for (int fd : all)
           if (const std::string done = Attack(fd); !done.empty()) Die("it could " + done);
       }},
      // Connections that never attach.
      {"connects", How::kEnded, "900 connections that say nothing",
       [](Enemy& e) {
         rlimit limit{2000, 2000};
         setrlimit(RLIMIT_NOFILE, &limit);
         std::vector<int> all;
         for (int i = 0; i < 900; ++i) all.push_back(Connect(e.address));
         for (int fd : all) AwaitEnd(fd), close(fd);
       }},
      {"attaches", How::kEnded, "attaches until it is refused, and opens nothing",
       [](Enemy& e) {
         std::vector<int> all;
         for (int i = 0; i < 32; ++i) all.push_back(ConnectAttached(e.address));
         OK(frugal::ControlClient::connect(e.address.c_str(), kBoundMs, &e.control) ==
                    FRUGAL_ERR_BUSY
                ? FRUGAL_OK
                : FRUGAL_ERR_INTERNAL);
         for (int fd : all) AwaitEnd(fd), close(fd);
       }},
      {"half-an-attach", How::kEnded, "half of the first message",
       [](Enemy& e) {
         const int fd = Connect(e.address);
         SendAll(fd, AttachRequest(), 12);
         AwaitEnd(fd);
       }},
      {"noise", How::kEnded, "bytes that are no message",
       [](Enemy& e) {
         for (uint64_t seed = 0; seed < 100; ++seed) {
           const int fd = Connect(e.address);
           std::vector<char> bytes(1 + mix(seed) % 3000);
           for (size_t i = 0; i < bytes.size(); ++i)
             bytes[i] = static_cast<char>(mix(seed * 10000 + i));
           SendAll(fd, bytes);
           AwaitEnd(fd);
           close(fd);
         }
       }},
      {"descriptors", How::kEnded, "messages with descriptors",
       [](Enemy& e) {
         for (int i = 0; i < 100; ++i) {
           const int fd = ConnectAttached(e.address);
           const std::vector<char> ping = Request([](auto r) { r.setPing(); });
           int sent[200];
           std::fill(std::begin(sent), std::end(sent), fd);
           if (send_descriptors(fd, ping.data(), ping.size(), sent, std::size(sent)) < 0)
             Die("sendmsg");
           AwaitEnd(fd);
           close(fd);
         }
       }},
      // Acts that no thread waits for, or that are allowed.
      {"half-a-call", How::kBeside, "attaches, and stops in the middle of a call",
       [](Enemy& e) {
         SendAll(ConnectAttached(e.address), Request([](auto r) { r.setPing(); }), 12);
       }},
      {"unread-calls", How::kBeside, "200,000 calls whose replies it does not read",
       [](Enemy& e) {
         const int fd = ConnectAttached(e.address);
         const std::vector<char> stats = Request([](auto r) { r.setStats(); });
         for (int i = 0; i < 200000; ++i) {
           pollfd room{fd, POLLOUT, 0};
           if (poll(&room, 1, 300) == 0) break;  // nothing is taken any more
           SendAll(fd, stats);
         }
       }},
      {"calls", How::kBeside, "calls over the socket from eight threads, all the time",
       [](Enemy& e) {
         e.Attach(false, FRUGAL_OBSERVE);
         std::vector<std::thread> threads;
         for (int i = 0; i < 8; ++i)
           threads.emplace_back([&e] {
             for (frugal_stats stats{};;) {
               stats.struct_size = sizeof stats;
               frugal::TableReply none;
               (void)e.control->stats(kBoundMs, &stats);
               (void)e.control->find_table("no such table", kBoundMs, &none);
             }
           });
         for (auto& t : threads) t.join();
       }},
      {"keys", How::kBeside, "asks for 2^26 keys of a large table without rows",
       [](Enemy& e) {
         e.Attach(false);
         const uint64_t rows = uint64_t{1} << 26, large = LargeTable(e, FRUGAL_HASHED, rows, kDim);
         OK(e.Ask(*e.process, Call::kKeys, {large, 0, rows}));
         OK(e.control->drop_table(large, kBoundMs));
       },
       true},
      {"engines", How::kBeside, "opens the engine until it is refused",
       [](Enemy& e) { OpenAll(e, 0); }, true},
      {"observers", How::kBeside, "observes until it is refused",
       [](Enemy& e) { OpenAll(e, FRUGAL_OBSERVE); }, true},
      // Afterwards the controller has no more than before.
      {"gets", How::kBeside, "gets 2^22 rows, twice",
       [](Enemy& e) {
         e.Attach(false);
         AskForMuch(e, Call::kGet, {e.table, kManyKeys, 0},
                    std::vector<char>(kManyKeys * sizeof(uint64_t)));
       },
       true, 256},
      {"reads", How::kBeside, "reads 2^22 rows, twice",
       [](Enemy& e) {
         e.Attach(false);
         frugal::ReadHead head{};
         head.op.table = e.table;
         head.op.keys = kManyKeys;
         head.op.given = 1;
         head.has = frugal::kHasFound;
         std::vector<char> payload = Bytes(head);
         payload.resize(sizeof head + kManyKeys * sizeof(uint64_t));
         AskForMuch(e, Call::kRead, {1, UINT64_MAX}, payload);
       },
       true, 256},
      {"dense-keys", How::kBeside, "asks for the 12,582,912 keys of a dense table, twice",
       [](Enemy& e) {
         e.Attach(false);
         const uint64_t rows = uint64_t{3} << 22, large = LargeTable(e, FRUGAL_DENSE, rows, 1);
         AskForMuch(e, Call::kKeys, {large, 0, rows}, {});
         OK(e.control->drop_table(large, kBoundMs));
       },
       true, 256},
      {"trace", How::kBeside, "begins a trace of 2^22 events, and does not end it",
       [](Enemy& e) {
         e.Attach(false);
         OK(e.Ask(*e.process, Call::kTraceStart, {uint64_t{1} << 22}));
       },
       true, 256},
      {"requests", How::kBeside, "requests over the ring, all the time",
       [](Enemy& e) {
         e.Attach(false, FRUGAL_OBSERVE);
         const std::vector<char> keys(1000 * sizeof(uint64_t));
         for (;;)
           for (Call call : {Call::kCount, Call::kDescribe, Call::kMetrics, Call::kGet})
             (void)e.Ask(*e.process, call, {e.table, 1000, 0},
                         call == Call::kGet ? keys : std::vector<char>());
       }},
  };
  return modes;
}

int RunEnemy(const std::string& name, const std::string& address, uint64_t step) {
  for (const Mode& mode : Modes()) {
    if (name != mode.name) continue;
    mode_name = mode.name;
    Enemy e;
    e.address = address;
    e.step = step;
    const bool ranked = mode.how == How::kAtOnce || mode.how == How::kSilent;
    e.shows = std::strcmp(mode.name, "unshown") != 0;
    if (ranked) e.Attach(true);
    Say("acts");
    mode.act(e);
    // The controller stops reading a channel that breaks a rule, though no thread waits for it, and
    // writes nothing more to it.
    Channel* broken = std::strcmp(mode.name, "outside") ? e.trainer.get() : e.process.get();
    while (mode.how == How::kAtOnce && broken->look() == FRUGAL_OK) usleep(1000);
    Say("done");
    for (;;) pause();
  }
  return 1;
}

// --- What happens --------------------------------------------------------------------------------

// The most memory that the controller has had since the last call.
long PeakKib(pid_t pid) {
  const long kib = status_kib(pid, "VmHWM: %ld");
  if (std::FILE* f = std::fopen(("/proc/" + std::to_string(pid) + "/clear_refs").c_str(), "w")) {
    std::fputs("5", f);
    std::fclose(f);
  }
  return kib;
}

double Seconds(uint64_t from, uint64_t to) {
  return to > from ? static_cast<double>(to - from) * 1e-9 : 0;
}

class World {
 public:
  // Of all modes that need this time-out.
  World(int64_t timeout_ms, const std::vector<const Mode*>& modes)
      : controller_(folder_.address()) {
    if (!controller_.serves()) Die("there is no controller");
    Job job(folder_.address(), timeout_ms);
    // As long as steps take without an enemy; the first make what is made once.
    HonestSteps(job);
    const uint64_t began = now_ns();
    HonestSteps(job);
    const double usual = Seconds(began, now_ns());
    std::printf("without an enemy %llu steps take %.2f s\n",
                static_cast<unsigned long long>(kSteps), usual);
    (void)PeakKib(controller_.pid());
    first_kib_ = resident_kib(controller_.pid());
    for (const Mode* mode : modes) Try(*mode, job, usual);
    mode_name = "the tables";
    Compare(job);
    job.Stop();
    if (int s = controller_.end(SIGTERM)) Die("the controller has ended with " + std::to_string(s));
  }

 private:
  void HonestSteps(Job& job) {
    steps_ += kSteps;
    Process honest({"--honest", folder_.address(), std::to_string(steps_)});
    // The rank's former trainer has left, so no step would wait for this one.
    CHECK(honest.Line() == "in");
    (void)job.TimedOut();
    job.Allow(steps_);
    if (honest.Wait() != 0) Die(std::string(mode_name) + ": an honest process has failed");
    job.AwaitSteps(steps_);
    // Its rank gradients are in its own memory until they are written.
    OK(frugal_flush(job.first().engine, kBoundMs));
  }

  void Try(const Mode& mode, Job& job, double usual) {
    mode_name = mode.name;
    const long before = resident_kib(controller_.pid());
    (void)PeakKib(controller_.pid());
    const long files = descriptors_of(controller_.pid());
    const uint32_t losses = job.losses();
    const bool ranked = mode.how == How::kAtOnce || mode.how == How::kSilent;
    double found = 0, on = 0;
    {
      Process enemy({"--enemy", mode.name, folder_.address(), std::to_string(steps_)});
      CHECK(enemy.Line() == "acts");
      const uint64_t acts = now_ns();
      // A process that breaks a rule is cut off before any thread waits for it.
      if (mode.first || (mode.how == How::kAtOnce && !mode.undone)) CHECK(enemy.Line() == "done");
      if (ranked) {
        if (mode.undone) job.Undo();
        job.Allow(steps_ + kSteps);
        const uint64_t lost = job.AwaitLoss(losses);
        found = Seconds(acts, lost);
        CHECK(job.TimedOut() <= kMostTimedOut);
        CHECK(job.first().Next() == steps_);  // nothing of the enemy's is committed
      }
      // A new process has the rank, while the enemy lives.
      const uint64_t began = now_ns();
      HonestSteps(job);
      on = Seconds(began, now_ns());
      CHECK(job.TimedOut() <= kMostTimedOut);
      if (mode.how == How::kEnded) {
        CHECK(enemy.Line() == "done");
        found = Seconds(acts, now_ns());
      }
      if (!std::strcmp(mode.name, "reopens")) CHECK(enemy.Line() == "done");
    }
    // What it had open goes with it.
    for (int i = 0; i < kBoundMs && descriptors_of(controller_.pid()) > files; ++i) usleep(1000);
    CHECK(descriptors_of(controller_.pid()) <= files);
    const long peak = PeakKib(controller_.pid()) - before,
               after = resident_kib(controller_.pid()) - first_kib_;
    std::printf(
        "%-14s %-60s found out %5.2f s, steps %+5.2f s, controller %+6.1f MiB at most, %+6.1f "
        "since the start\n",
        mode.name, mode.what, found, on - usual, static_cast<double>(peak) / 1024,
        static_cast<double>(after) / 1024);
    std::fflush(stdout);
#ifndef FRUGAL_SANITIZED  // which keep what was freed
    CHECK(peak < kMostKib + (mode.asked_mib << 10));
    CHECK(after < kMostKib);
#endif
  }

  // Threads of one process do the same steps.
  void Compare(const Job& job) {
    Rank ranks[kWorld];
    frugal_config c = JobConfig();
    OK(frugal_open(&c, &ranks[0].engine));
    ranks[0].Tables();
    for (uint32_t r = 0; r < kWorld; ++r) {
      if (r) {
        ranks[r].engine = ranks[0].engine;
        std::copy(std::begin(ranks[0].tables), std::end(ranks[0].tables), ranks[r].tables);
      }
      ranks[r].Join(r);
    }
    for (uint64_t step = 0; step < steps_; ++step) {
      for (Rank& r : ranks) OK(frugal_step_begin(r.trainer, step, -1));
      for (Rank& r : ranks) OK(r.Work(step));
    }
    CHECK(job.first().Contents() == ranks[0].Contents());
    OK(frugal_close(ranks[0].engine));
  }

  const Folder folder_;
  ControllerProgram controller_;
  uint64_t steps_ = 0;
  long first_kib_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 4 && arguments[0] == "--enemy")
    return RunEnemy(arguments[1], arguments[2], std::stoull(arguments[3]));
  if (arguments.size() == 3 && arguments[0] == "--honest")
    return Honest(arguments[1], std::stoull(arguments[2]));
  std::vector<const Mode*> told, unresponsive;
  for (const Mode& mode : Modes()) {
    if (!arguments.empty() &&
        std::find(arguments.begin(), arguments.end(), mode.name) == arguments.end())
      continue;
    (mode.how == How::kSilent ? unresponsive : told).push_back(&mode);
  }
  if (!told.empty()) World(kNeverMs, told);
  if (!unresponsive.empty()) World(kSilenceMs, unresponsive);
  std::puts("hostile_test: all is well");
  return 0;
}
