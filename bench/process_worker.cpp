// Trainers as threads of one engine, or as processes of a controller: the same steps on the same memory.
//
// prepare: side=threads|frugal ranks rows dim batch dist, controller=PROGRAM address=PATH (frugal). run: steps.
#include <signal.h>
#include <sys/wait.h>

#include "frugal.h"
#include "harness.h"
#include "zipf.h"

namespace bench {
namespace {

constexpr int kWindow = 10, kBatches = 40;

void Check(int32_t status) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  throw std::runtime_error(std::string(frugal_status_name(status)) + ": " + error.message);
}

struct Setting {
  explicit Setting(const Params& p)
      : ranks(static_cast<uint32_t>(p.Int("ranks", 1))), rows(static_cast<uint64_t>(p.Int("rows", 10'000'000))),
        dim(static_cast<uint32_t>(p.Int("dim", 32))), batch(static_cast<size_t>(p.Int("batch", 65536))),
        zipf(p.Num("zipf", 0)), address(p.Str("address")), controller(p.Str("controller")) {}
  uint32_t ranks;
  uint64_t rows;
  uint32_t dim;
  size_t batch;
  double zipf;
  std::string address, controller;
};

// One rank and what it trains with.
class Rank {
 public:
  Rank(const Setting& s, frugal_engine* engine, uint32_t rank) : s_(s), out_(s.batch * s.dim), grads_(s.batch * s.dim) {
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "table";
    t.rows = s.rows;
    t.dim = s.dim;
    t.optimizer.kind = FRUGAL_ROWWISE_ADAGRAD;
    t.nan_policy = FRUGAL_NAN_ACCEPT;
    if (frugal_table_find(engine, "table", &table_) != FRUGAL_OK) Check(frugal_table_create(engine, &t, &table_));
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.rank = rank;
    Check(frugal_trainer_create(engine, &c, &trainer_));
    Random random(rank + 1);
    std::unique_ptr<Zipf> zipf(s.zipf > 0 ? new Zipf(s.rows, s.zipf) : nullptr);
    keys_.resize(kBatches);
    for (auto& batch : keys_) {
      batch.resize(s.batch);
      for (uint64_t& k : batch) k = zipf ? Mix(zipf->Rank(&random)) % s.rows : static_cast<uint64_t>(random.Uniform() * static_cast<double>(s.rows));
    }
    for (size_t i = 0; i < s.batch * s.dim; ++i) grads_.data()[i] = 0.01f;
    for (int i = 0; i < kWindow; ++i) Declare(static_cast<uint64_t>(i));
  }
  ~Rank() { frugal_trainer_close(trainer_); }

  void Run(int steps) {
    for (int i = 0; i < steps; ++i, ++step_) {
      frugal_op op = Op(step_);
      int64_t at = NowNs();
      auto took = [&](int which) {
        const int64_t now = NowNs();
        ns[which] += now - at;
        at = now;
      };
      Declare(step_ + kWindow);
      took(0);
      Check(frugal_step_begin(trainer_, step_, FRUGAL_TIMEOUT_DEFAULT));
      took(1);
      op.rows_out = out_.data();
      Check(frugal_lookup(trainer_, &op, 1));
      took(2);
      op.grads = grads_.data();
      Check(frugal_push_grad(trainer_, &op, 1));
      took(3);
      Check(frugal_step_end(trainer_, step_, 0));
      took(4);
    }
  }
  int64_t ns[5] = {};

 private:
  frugal_op Op(uint64_t step) {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table_;
    op.keys = keys_[step % kBatches].data();
    op.count = s_.batch;
    return op;
  }
  void Declare(uint64_t step) {
    frugal_op op = Op(step);
    Check(frugal_prefetch(trainer_, step, &op, 1, nullptr));
  }

  Setting s_;
  HugeArray<float> out_, grads_;
  frugal_table* table_ = nullptr;
  frugal_trainer* trainer_ = nullptr;
  std::vector<std::vector<uint64_t>> keys_;
  uint64_t step_ = 0;
};

frugal_engine* Open(const Setting& s, bool attach) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = s.ranks;
  c.lookahead = kWindow;
  c.backing = FRUGAL_BACKING_SHM;
  c.timeout_ms = 120'000;
  if (attach) c.service = s.address.c_str();
  frugal_engine* engine = nullptr;
  Check(frugal_open(&c, &engine));
  return engine;
}

class Side {
 public:
  virtual ~Side() = default;
  virtual void Run(int steps, int64_t* ns) = 0;  // time inside each call, summed over ranks
};

class Threads : public Side {
 public:
  explicit Threads(const Setting& s) : engine_(Open(s, false)) {
    for (uint32_t r = 0; r < s.ranks; ++r) ranks_.push_back(std::make_unique<Rank>(s, engine_, r));
  }
  ~Threads() override {
    ranks_.clear();
    frugal_close(engine_);
  }
  void Run(int steps, int64_t* ns) override {
    std::vector<std::thread> threads;
    for (size_t r = 1; r < ranks_.size(); ++r) threads.emplace_back([&, r] { ranks_[r]->Run(steps); });
    ranks_[0]->Run(steps);
    for (std::thread& t : threads) t.join();
    for (auto& r : ranks_)
      for (int i = 0; i < 5; ++i) {
        ns[i] += r->ns[i];
        r->ns[i] = 0;
      }
  }

 private:
  frugal_engine* engine_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Children that are told by a pipe how many steps to run.
class Processes : public Side {
 public:
  explicit Processes(const Setting& s) {
    controller_ = fork();
    if (controller_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int out = open("/dev/null", O_WRONLY);
      dup2(out, 1);
      execl(s.controller.c_str(), s.controller.c_str(), s.address.c_str(), nullptr);
      _exit(127);
    }
    for (uint32_t r = 0; r < s.ranks; ++r) {
      int go[2], done[2];
      if (pipe(go) != 0 || pipe(done) != 0) throw std::runtime_error("no pipes");
      Child c;
      c.pid = fork();
      if (c.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(go[1]);
        close(done[0]);
        _exit(Train(s, r, go[0], done[1]));
      }
      close(go[0]);
      close(done[1]);
      c.go = go[1];
      c.done = done[0];
      children_.push_back(c);
    }
    int64_t none[5];
    for (Child& c : children_) Await(c, none);
  }
  ~Processes() override {
    for (Child& c : children_) {
      close(c.go);
      waitpid(c.pid, nullptr, 0);
      close(c.done);
    }
    kill(controller_, SIGTERM);
    waitpid(controller_, nullptr, 0);
  }
  void Run(int steps, int64_t* ns) override {
    for (Child& c : children_)
      if (write(c.go, &steps, sizeof steps) != sizeof steps) throw std::runtime_error("a rank has died");
    for (Child& c : children_) Await(c, ns);
  }

 private:
  struct Child {
    pid_t pid;
    int go, done;
  };
  static void Await(Child& c, int64_t* ns) {
    int64_t took[5];
    if (read(c.done, took, sizeof took) != sizeof took) throw std::runtime_error("a rank has died");
    for (int i = 0; i < 5; ++i) ns[i] += took[i];
  }
  static int Train(const Setting& s, uint32_t rank, int go, int done) {
    try {
      frugal_engine* engine = Open(s, true);
      Rank trainer(s, engine, rank);
      for (int steps = 0;;) {
        if (write(done, trainer.ns, sizeof trainer.ns) != sizeof trainer.ns) return 1;
        std::fill(std::begin(trainer.ns), std::end(trainer.ns), 0);
        if (read(go, &steps, sizeof steps) != sizeof steps) return 0;
        trainer.Run(steps);
      }
    } catch (const std::exception& e) {
      fprintf(stderr, "rank %u: %s\n", rank, e.what());
      return 1;
    }
  }

  pid_t controller_;
  std::vector<Child> children_;
};

}  // namespace
}  // namespace bench

int main() {
  std::unique_ptr<bench::Side> side;
  std::unique_ptr<bench::Setting> setting;
  return bench::Serve([&](const std::string& command, const bench::Params& params) -> bench::Metrics {
    if (command == "free") {
      side.reset();
      return {};
    }
    if (command == "prepare") {
      side.reset();
      setting = std::make_unique<bench::Setting>(params);
      if (params.Str("side") == "threads")
        side = std::make_unique<bench::Threads>(*setting);
      else
        side = std::make_unique<bench::Processes>(*setting);
      return {};
    }
    if (command != "run" || !side) throw std::runtime_error("unknown command " + command);
    const int steps = static_cast<int>(params.Int("steps", 30));
    int64_t ns[5] = {};
    const int64_t began = bench::NowNs();
    side->Run(steps, ns);
    const double seconds = static_cast<double>(bench::NowNs() - began) * 1e-9;
    bench::Metrics m{{"throughput", static_cast<double>(steps) * static_cast<double>(setting->batch) * setting->ranks / seconds},
                     {"latency", seconds * 1e6 / steps}};
    const char* names[5] = {"prefetch_time", "step_begin_time", "lookup_time", "push_time", "step_end_time"};
    for (int i = 0; i < 5; ++i) m.emplace_back(names[i], static_cast<double>(ns[i]) * 1e-3 / steps / setting->ranks);
    return m;
  });
}
