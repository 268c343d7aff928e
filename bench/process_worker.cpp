// Trainers as threads of one engine, or as processes of a controller: the same steps on the same
// kind of memory.
//
// prepare  side=threads|frugal ranks opt rows dim batch keys_file window flush_threads
//          controller (the program, for frugal)
// run      seconds=S   one repetition, about S seconds long
// idle     seconds=S   frugal: processor time of idle processes, in percent of a core
// check    as prepare, and steps out_file: trains a table and writes its rows
// free     gives the memory back
//
// `batch` is the number of keys of a step for each rank. The clock covers what it covers in bench
// train: from the first declaration of the first step to the end of frugal_flush after the last,
// and the caller's writing of new gradients. A step's latency is the time from its step_begin to
// the end of its step_end, on each rank.
#include <signal.h>
#include <sys/wait.h>

#include "frugal.h"
#include "harness.h"

namespace bench {
namespace {

constexpr size_t kMostSteps = 20000, kMostRanks = 16;
constexpr int kCalls = 5;
const char* const kCallNames[kCalls] = {"prefetch_time", "step_begin_time", "lookup_time",
                                        "push_time", "step_end_time"};

void Check(int32_t status) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  throw std::runtime_error(std::string(frugal_status_name(status)) + ": " + error.message);
}

struct Setting {
  explicit Setting(const Params& p)
      : threads(p.Str("side") == "threads"),
        ranks(static_cast<uint32_t>(p.Int("ranks", 1))),
        opt(p.Str("opt") == "sgd" ? FRUGAL_SGD : FRUGAL_ROWWISE_ADAGRAD),
        rows(static_cast<uint64_t>(p.Int("rows", 0))),
        dim(static_cast<uint32_t>(p.Int("dim", 32))),
        window(static_cast<uint32_t>(p.Int("window", 10))),
        flush_threads(static_cast<uint32_t>(p.Int("flush_threads", 1))),
        batch(static_cast<size_t>(p.Int("batch", 65536))),
        keys_file(p.Str("keys_file")),
        controller(p.Str("controller")),
        out_file(p.Str("out_file")) {
    if (ranks == 0 || ranks > kMostRanks) throw std::runtime_error("1 to 16 ranks");
  }
  bool threads;
  uint32_t ranks;
  int32_t opt;
  uint64_t rows;
  uint32_t dim, window, flush_threads;
  size_t batch;
  std::string keys_file, controller, out_file, address;
};

// A rank's results, in memory that the worker shares with its children.
struct Slot {
  char error[480];
  frugal_stats stats;
  int64_t ns[kCalls];
  int64_t step_ns[kMostSteps];
};

struct Task {
  enum What : int { kTrain, kDeclare, kFlush, kStats, kWriteRows } what;
  size_t steps;
};

frugal_engine* Open(const Setting& s) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = s.ranks;
  c.lookahead = s.window;
  c.flush_threads = s.flush_threads;
  c.backing = FRUGAL_BACKING_SHM;
  c.timeout_ms = 120'000;
  if (!s.threads) c.service = s.address.c_str();
  frugal_engine* engine = nullptr;
  for (int tries = 0;; ++tries) {
    const int32_t status = frugal_open(&c, &engine);
    if (status == FRUGAL_OK) return engine;
    // The controller may not serve yet.
    if (s.threads || status != FRUGAL_ERR_PEER_LOST || tries == 50) Check(status);
    usleep(100'000);
  }
}

// One rank and what it trains with.
class Rank {
 public:
  Rank(const Setting& s, frugal_engine* engine, uint32_t rank, const Batches& batches, Slot* slot)
      : s_(s),
        engine_(engine),
        rank_(rank),
        batches_(batches),
        slot_(slot),
        gradients_(s.dim),
        out_(s.batch * s.dim),
        grads_(s.batch * s.dim),
        ring_(s.window + 1) {
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "bench";
    t.rows = s.rows;
    t.dim = s.dim;
    t.init_a = 0.01f;
    t.optimizer.kind = s.opt;
    if (frugal_table_find(engine, t.name, &table_) != FRUGAL_OK)
      Check(frugal_table_create(engine, &t, &table_));
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.rank = rank;
    Check(frugal_trainer_create(engine, &c, &trainer_));
    std::fill_n(out_.data(), out_.size(), 0.0f);
    Fill(0);
  }
  ~Rank() { frugal_trainer_close(trainer_); }

  void Do(const Task& task) {
    try {
      slot_->error[0] = 0;
      switch (task.what) {
        case Task::kTrain:
          return Train(task.steps);
        case Task::kDeclare:
          return DeclareUpTo(step_ + task.steps);
        case Task::kFlush:
          return Check(frugal_flush(engine_, FRUGAL_TIMEOUT_DEFAULT));
        case Task::kStats:
          slot_->stats.struct_size = sizeof slot_->stats;
          return Check(frugal_get_stats(engine_, &slot_->stats));
        case Task::kWriteRows:
          return WriteRows();
      }
    } catch (const std::exception& e) {
      snprintf(slot_->error, sizeof slot_->error, "rank %u: %s", rank_, e.what());
    }
  }

 private:
  void Train(size_t count) {
    std::fill(std::begin(slot_->ns), std::end(slot_->ns), 0);
    const uint64_t last = step_ + count;
    int64_t at = NowNs();
    auto took = [&](int call) {
      const int64_t now = NowNs();
      slot_->ns[call] += now - at;
      at = now;
    };
    DeclareUpTo(std::min<uint64_t>(last, step_ + s_.window));
    took(0);
    for (size_t i = 0; i < count; ++i, ++step_) {
      const int64_t began = at;
      Check(frugal_step_begin(trainer_, step_, FRUGAL_TIMEOUT_DEFAULT));
      took(1);
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table_;
      op.batch = ring_[step_ % ring_.size()];
      op.rows_out = out_.data();
      Check(frugal_lookup(trainer_, &op, 1));
      took(2);
      // Declares far ahead when a device would have got its work.
      DeclareUpTo(std::min<uint64_t>(last, step_ + s_.window + 1));
      took(0);
      op.rows_out = nullptr;
      op.grads = grads_.data();
      Check(frugal_push_grad(trainer_, &op, 1));
      took(3);
      // The buffer is the caller's again: the next step's gradients overwrite it at once.
      Fill(step_ + 1);
      at = NowNs();
      Check(frugal_step_end(trainer_, step_, 0));
      took(4);
      if (i < kMostSteps) slot_->step_ns[i] = at - began;
    }
  }

  void Fill(uint64_t step) { gradients_.Fill(step * s_.ranks + rank_, 0, s_.batch, grads_.data()); }

  void DeclareUpTo(uint64_t end) {
    for (; declared_ < end; ++declared_) {
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table_;
      op.keys = batches_.Get(declared_ * s_.ranks + rank_);
      op.count = s_.batch;
      Check(frugal_prefetch(trainer_, declared_, &op, 1, &ring_[declared_ % ring_.size()]));
    }
  }

  void WriteRows() {
    std::vector<uint64_t> keys(s_.rows);
    for (uint64_t i = 0; i < s_.rows; ++i) keys[i] = i;
    std::vector<float> rows(s_.rows * s_.dim);
    Check(frugal_get(table_, keys.data(), keys.size(), 0, rows.data(), 0, nullptr));
    WriteFile(s_.out_file, rows.data(), rows.size() * sizeof(float));
  }

  const Setting& s_;
  frugal_engine* const engine_;
  const uint32_t rank_;
  const Batches& batches_;
  Slot* const slot_;
  const Gradients gradients_;
  HugeArray<float> out_, grads_;
  std::vector<frugal_batch*> ring_;  // declared batches by step
  frugal_table* table_ = nullptr;
  frugal_trainer* trainer_ = nullptr;
  uint64_t step_ = 0, declared_ = 0;
};

double CpuNsOf(pid_t pid) {
  clockid_t clock;
  timespec t{};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) != 0)
    throw std::runtime_error("a process has died");
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

// All ranks. Rank r's task is tasks[r]; a rank without one rests.
class Side {
 public:
  explicit Side(const Setting& s) : s_(s), batches_(s.keys_file, s.batch, false) {
    void* memory = mmap(nullptr, s.ranks * sizeof(Slot), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("out of memory");
    slots_ = static_cast<Slot*>(memory);
    memset(memory, 0, s.ranks * sizeof(Slot));
  }
  virtual ~Side() { munmap(slots_, s_.ranks * sizeof(Slot)); }

  virtual void Begin(uint32_t rank, const Task& task) = 0;
  virtual void Await(uint32_t rank) = 0;
  // The processes of this side; of several the controller is the first.
  virtual std::vector<pid_t> Pids() const { return {getpid()}; }

  void All(const Task& task) {
    for (uint32_t r = 0; r < s_.ranks; ++r) Begin(r, task);
    for (uint32_t r = 0; r < s_.ranks; ++r) Await(r);
    Complain();
  }
  void One(const Task& task) {
    Begin(0, task);
    Await(0);
    Complain();
  }
  const Setting& setting() const { return s_; }
  const Slot& slot(uint32_t rank) const { return slots_[rank]; }

 protected:
  void Complain() const {
    for (uint32_t r = 0; r < s_.ranks; ++r)
      if (slots_[r].error[0]) throw std::runtime_error(slots_[r].error);
  }
  const Setting s_;
  const Batches batches_;
  Slot* slots_ = nullptr;
};

class Threads : public Side {
 public:
  explicit Threads(const Setting& s) : Side(s), engine_(Open(s_)), threads_(s.ranks) {
    for (uint32_t r = 0; r < s.ranks; ++r)
      ranks_.push_back(std::make_unique<Rank>(s_, engine_, r, batches_, &slots_[r]));
  }
  ~Threads() override {
    ranks_.clear();
    frugal_close(engine_);
  }
  void Begin(uint32_t r, const Task& task) override {
    threads_[r] = std::thread([this, r, task] { ranks_[r]->Do(task); });
  }
  void Await(uint32_t r) override { threads_[r].join(); }

 private:
  frugal_engine* engine_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::thread> threads_;
};

// Child processes; each gets its tasks through a pipe.
class Processes : public Side {
 public:
  explicit Processes(const Setting& s) : Side(WithAddress(s)) {
    controller_ = fork();
    if (controller_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(2, 1);  // its output is no reply of the worker
      execl(s_.controller.c_str(), s_.controller.c_str(), s_.address.c_str(), nullptr);
      _exit(127);
    }
    for (uint32_t r = 0; r < s.ranks; ++r) {
      int go[2], done[2];
      if (pipe2(go, O_CLOEXEC) != 0 || pipe2(done, O_CLOEXEC) != 0)
        throw std::runtime_error("no pipes");
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        // Closes the other ranks' ends, too: a rank ends when its pipe is closed.
        for (const Child& c : children_) close(c.go);
        close(go[1]);
        close(done[0]);
        _exit(ChildMain(r, go[0], done[1]));
      }
      close(go[0]);
      close(done[1]);
      children_.push_back({pid, go[1], done[0]});
    }
    for (uint32_t r = 0; r < s.ranks; ++r) Await(r);
    Complain();
  }
  ~Processes() override {
    for (Child& c : children_) close(c.go);
    for (Child& c : children_) {
      waitpid(c.pid, nullptr, 0);
      close(c.done);
    }
    kill(controller_, SIGTERM);
    waitpid(controller_, nullptr, 0);
    unlink((s_.address + ".lock").c_str());
    rmdir(s_.address.substr(0, s_.address.rfind('/')).c_str());
  }
  void Begin(uint32_t r, const Task& task) override {
    if (write(children_[r].go, &task, sizeof task) != sizeof task)
      throw std::runtime_error("a rank has died");
  }
  void Await(uint32_t r) override {
    char done;
    if (read(children_[r].done, &done, 1) != 1) throw std::runtime_error("a rank has died");
  }
  std::vector<pid_t> Pids() const override {
    std::vector<pid_t> pids{controller_};
    for (const Child& c : children_) pids.push_back(c.pid);
    return pids;
  }

 private:
  struct Child {
    pid_t pid;
    int go, done;
  };
  int ChildMain(uint32_t rank, int go, int done) {
    try {
      frugal_engine* engine = Open(s_);
      {
        Rank trainer(s_, engine, rank, batches_, &slots_[rank]);
        Task task;
        while (write(done, "", 1) == 1 && read(go, &task, sizeof task) == sizeof task)
          trainer.Do(task);
      }
      frugal_close(engine);
      return 0;
    } catch (const std::exception& e) {
      snprintf(slots_[rank].error, sizeof slots_[rank].error, "rank %u: %s", rank, e.what());
      (void)!write(done, "", 1);
      return 1;
    }
  }
  static Setting WithAddress(Setting s) {
    char folder[] = "/tmp/frugal-bench-XXXXXX";
    if (!mkdtemp(folder)) throw std::runtime_error("no folder for the controller's address");
    s.address = std::string(folder) + "/service";
    return s;
  }

  pid_t controller_ = -1;
  std::vector<Child> children_;
};

// The value that this share of the values do not exceed.
double Percentile(std::vector<double>* values, double share) {
  if (values->empty()) return 0;
  const size_t at = std::min(values->size() - 1,
                             static_cast<size_t>(share * static_cast<double>(values->size())));
  std::nth_element(values->begin(), values->begin() + static_cast<ptrdiff_t>(at), values->end());
  return (*values)[at];
}

class Worker {
 public:
  Metrics Handle(const std::string& command, const Params& p) {
    if (command == "free") {
      side_.reset();
      return {};
    }
    if (command == "prepare" || command == "check") {
      side_.reset();
      per_run_ = 0;
      const Setting setting(p);
      if (setting.threads)
        side_ = std::make_unique<Threads>(setting);
      else
        side_ = std::make_unique<Processes>(setting);
      if (command == "check") {
        side_->All({Task::kTrain, static_cast<size_t>(p.Int("steps", 0))});
        side_->One({Task::kWriteRows, 0});
        side_.reset();
      }
      return {};
    }
    if (!side_) throw std::runtime_error("nothing is prepared");
    if (command == "run") return Run(p.Num("seconds", 0.4));
    if (command == "idle") return Idle(p.Num("seconds", 5));
    throw std::runtime_error("unknown command " + command);
  }

 private:
  double Train(size_t steps) {
    const int64_t began = NowNs();
    side_->All({Task::kTrain, steps});
    side_->One({Task::kFlush, 0});
    return static_cast<double>(NowNs() - began) * 1e-9;
  }

  Metrics Run(double seconds) {
    if (per_run_ == 0) {
      Train(20);
      const double step = Train(20) / 20;
      per_run_ = std::clamp<size_t>(static_cast<size_t>(seconds / step), 40, kMostSteps);
    }
    Train(4);  // the first touches after another side's turn
    const frugal_stats before = Stats();
    const double cpu = Cpu();
    const double took = Train(per_run_);
    const Setting& s = side_->setting();
    const double steps = static_cast<double>(per_run_), ranks = s.ranks;
    std::vector<double> step_us;
    double ns[kCalls] = {};
    for (uint32_t r = 0; r < s.ranks; ++r) {
      for (size_t i = 0; i < per_run_; ++i)
        step_us.push_back(static_cast<double>(side_->slot(r).step_ns[i]) * 1e-3);
      for (int i = 0; i < kCalls; ++i) ns[i] += static_cast<double>(side_->slot(r).ns[i]);
    }
    Metrics m{{"throughput", steps * ranks * static_cast<double>(s.batch) / took},
              {"latency_p50", Percentile(&step_us, 0.5)},
              {"latency_p99", Percentile(&step_us, 0.99)},
              {"cpu_per_step", (Cpu() - cpu) * 1e-3 / steps}};
    const frugal_stats after = Stats();
    const double updated = static_cast<double>(after.rows_updated - before.rows_updated);
    m.emplace_back("deferred_share",
                   updated > 0
                       ? static_cast<double>(after.rows_deferred - before.rows_deferred) / updated
                       : 0);
    for (int i = 0; i < kCalls; ++i) m.emplace_back(kCallNames[i], ns[i] * 1e-3 / steps / ranks);
    return m;
  }

  frugal_stats Stats() {
    side_->One({Task::kStats, 0});
    return side_->slot(0).stats;
  }

  // Processor time of all processes of the side.
  double Cpu() const {
    double ns = 0;
    for (const pid_t pid : side_->Pids()) ns += CpuNsOf(pid);
    return ns;
  }

  // Percent of a core, of the controller and of the busiest trainer, while no trainer works.
  // `idle`: all trainers have declared their window and are between two steps. `waiting`: rank 0
  // waits in a step_begin for the other ranks.
  Metrics Idle(double seconds) {
    const Setting& s = side_->setting();
    Metrics m;
    auto measure = [&](const std::string& what) {
      usleep(500'000);  // until all declarations are resolved
      const std::vector<pid_t> pids = side_->Pids();
      std::vector<double> cpu;
      for (const pid_t pid : pids) cpu.push_back(CpuNsOf(pid));
      const int64_t began = NowNs();
      usleep(static_cast<useconds_t>(seconds * 1e6));
      const double wall = static_cast<double>(NowNs() - began);
      for (size_t i = 0; i < pids.size(); ++i) cpu[i] = (CpuNsOf(pids[i]) - cpu[i]) / wall * 100;
      m.emplace_back(what + "_controller", cpu[0]);
      m.emplace_back(what + "_trainer", *std::max_element(cpu.begin() + 1, cpu.end()));
    };
    side_->All({Task::kDeclare, s.window});
    measure("idle");
    if (s.ranks > 1) {
      side_->Begin(0, {Task::kTrain, s.window});
      measure("waiting");
      for (uint32_t r = 1; r < s.ranks; ++r) side_->Begin(r, {Task::kTrain, s.window});
      for (uint32_t r = 0; r < s.ranks; ++r) side_->Await(r);
    } else {
      side_->All({Task::kTrain, s.window});
    }
    side_->One({Task::kFlush, 0});
    return m;
  }

  std::unique_ptr<Side> side_;
  size_t per_run_ = 0;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve([&](const std::string& command, const bench::Params& params) {
    return worker.Handle(command, params);
  });
}
