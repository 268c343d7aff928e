// A small job of one process, made to meet failures (tests/failing/failing.h): two ranks with
// caches, a dense and a hashed table, declared and other keys, bags, several pushes, rows outside
// steps, an abort, a rank that leaves and comes back, a table that comes and goes, a trace. All
// rows that it looks up and the final tables make up the digest.
//
//   embedded_job [--at-once] [--threads N] [--tree-heap] [--staleness N] [--shm] [--write-through]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "failing.h"
#include "frugal.h"
#include "job.h"

namespace {

constexpr int kTries = 3, kMost = 8;

struct Options {
  int32_t mode = FRUGAL_FLUSH_DEFERRED;
  uint32_t threads = 1;
  uint64_t staleness = 0;
  int32_t backing = FRUGAL_BACKING_PRIVATE;
};

Digest g_digest;
uint64_t g_told = 0;
frugal_engine* g_engine = nullptr;

[[noreturn]] void end(int status, const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
  _exit(status);
}

// Makes a call until it succeeds; one that may not fail has to do so at once. `named`: what it may
// answer beside OUT_OF_MEMORY where something fails.
void again(const char* call, const std::function<int32_t()>& make, bool may_fail = true,
           std::initializer_list<int32_t> named = {}) {
  for (int tries = 1;; ++tries) {
    int32_t status;
    {
      failing::Call inside;
      status = make();
    }
    if (status == FRUGAL_OK) return;
    ++g_told;
    const std::string why = said(call, status);
    if (!may_fail) end(1, "wrong status of " + why);
    if (!failing::fired()) end(1, "wrong without a failure: " + why);
    if (g_engine && frugal_health(g_engine) != FRUGAL_OK) {
      failing::over();
      const int32_t closed = frugal_close(g_engine);
      if (closed != FRUGAL_OK) end(1, "wrong: " + said("close of an unhealthy engine", closed));
      end(3, "unhealthy " + why);
    }
    bool known = status == FRUGAL_ERR_OUT_OF_MEMORY;
    for (int32_t n : named) known |= status == n;
    if (!known) end(1, "wrong status of " + why);
    if (std::strlen(why.c_str()) < 20) end(1, "wrong: no message of " + why);
    if (tries == kTries) failing::over();
    if (tries == kMost) end(1, "wrong: never succeeds: " + why);
  }
}
#define AGAIN(call, ...) \
  again(                 \
      #call, [&] { return call; }, ##__VA_ARGS__)

struct Job {
  Options options;
  frugal_table *dense = nullptr, *hashed = nullptr;
  frugal_trainer* trainers[kRanks] = {};

  frugal_table* table(const char* name, int32_t key_space, uint64_t rows, int32_t optimizer) {
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = name;
    config.key_space = key_space;
    config.rows = rows;
    config.dim = kDim;
    config.init = FRUGAL_INIT_UNIFORM;
    config.init_a = -1;
    config.init_b = 1;
    config.optimizer.kind = optimizer;
    frugal_table* made = nullptr;
    AGAIN(frugal_table_create(g_engine, &config, &made), true, {FRUGAL_ERR_UNSUPPORTED});
    return made;
  }
  void join(uint32_t rank) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = rank;
    config.cache_ratio = 0.25;
    AGAIN(frugal_trainer_create(g_engine, &config, &trainers[rank]));
  }
  void declare(uint64_t step) {
    for (uint32_t r = 0; r < kRanks; ++r) {
      Op a(dense, keys_of(step, r, kDense, 120), 0),
          b(hashed, keys_of(step + 1, r, kHashed, 120), 0);
      frugal_op ops[] = {a.op, b.op};
      frugal_batch* batch = nullptr;
      AGAIN(frugal_prefetch(trainers[r], step, ops, 2, &batch));
      if (step % 4 != 3) continue;  // and taken back, and declared again
      AGAIN(frugal_prefetch_cancel(trainers[r], batch));
      AGAIN(frugal_prefetch(trainers[r], step, ops, 2, nullptr));
    }
  }
  void use(uint64_t step, bool pushes) {
    for (uint32_t r = 0; r < kRanks; ++r) {
      Op a(dense, keys_of(step, r, kDense, 120), 0.5f),
          b(hashed, keys_of(step + 1, r, kHashed, 120), 0.25f),
          hot(dense, keys_of(0, 0, 3, 120), 0.125f),
          bags(hashed, keys_of(step, r, kHashed, 60), -0.5f, 12);
      frugal_op ops[] = {a.op, b.op, bags.op};
      AGAIN(frugal_lookup(trainers[r], ops, 3));
      for (const Op* o : {&a, &b, &bags})
        g_digest.add(o->rows.data(), o->rows.size() * sizeof(float));
      if (!pushes) continue;
      AGAIN(frugal_push_grad(trainers[r], ops, 2));
      if (step % 2 == 0) AGAIN(frugal_push_grad(trainers[r], &hot.op, 1));
      if (step % 3 == 0) AGAIN(frugal_push_grad(trainers[r], &bags.op, 1));
    }
  }
  void begin(uint64_t step) {
    for (frugal_trainer* t : trainers) AGAIN(frugal_step_begin(t, step, FRUGAL_TIMEOUT_DEFAULT));
  }
  void finish(uint64_t step) {
    for (frugal_trainer* t : trainers) AGAIN(frugal_step_end(t, step, 0));
  }
  void train(uint64_t step) {
    begin(step);
    use(step, true);
    finish(step);
    declare(step + 2);
  }
  void look(frugal_table* t, uint64_t n) {
    std::vector<uint64_t> keys(n);
    for (uint64_t i = 0; i < n; ++i) keys[i] = i;
    std::vector<float> rows(n * 2 * kDim, 0);
    std::vector<uint8_t> found(n);
    AGAIN(frugal_get(t, keys.data(), n, FRUGAL_WITH_STATE, rows.data(), 0, found.data()));
    for (uint64_t i = 0; i < n; ++i)
      if (found[i]) g_digest.add(&rows[i * 2 * kDim], 2 * kDim * sizeof(float));
    g_digest.add(found.data(), n);
  }

  void run() {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.world_size = kRanks;
    config.flush_threads = options.threads;
    config.flush_mode = options.mode;
    config.staleness = options.staleness;
    config.backing = options.backing;
    config.timeout_ms = 8000;
    AGAIN(frugal_open(&config, &g_engine), true, {FRUGAL_ERR_UNSUPPORTED});
    AGAIN(frugal_trace_start(g_engine, 1000));
    dense = table("dense", FRUGAL_DENSE, kDense, FRUGAL_ADAGRAD);
    hashed = table("hashed", FRUGAL_HASHED, kHashed, FRUGAL_MOMENTUM);
    join(0);
    join(1);
    declare(0);
    declare(1);
    for (uint64_t s = 0; s < 3; ++s) train(s);
    // Outside steps.
    {
      Op some(hashed, keys_of(5, 0, kHashed + 50, 70), 0.75f);
      AGAIN(frugal_put(hashed, some.keys.data(), some.keys.size(), 0, some.grads.data(), 0));
      AGAIN(frugal_delete(hashed, some.keys.data(), 20, nullptr));
      AGAIN(frugal_delete(dense, some.keys.data(), 5, nullptr));
      Op seen(dense, keys_of(9, 1, kDense, 50), 0);
      AGAIN(frugal_read(g_engine, nullptr, &seen.op, 1, FRUGAL_TIMEOUT_DEFAULT));
      g_digest.add(seen.rows.data(), seen.rows.size() * sizeof(float));
      frugal_optimizer slower{};
      slower = FRUGAL_OPTIMIZER_INIT;
      slower.kind = FRUGAL_ADAGRAD;
      slower.lr = 0.001f;
      AGAIN(frugal_table_set_optimizer(dense, 4, &slower));
      frugal_table* other = table("other", FRUGAL_HASHED, 500, FRUGAL_ADAGRAD);
      AGAIN(frugal_put(other, some.keys.data(), some.keys.size(), 0, some.grads.data(), 0));
      uint64_t cursor = 0, keys[100];
      size_t n = 0;
      AGAIN(frugal_table_keys(other, &cursor, keys, 100, &n));
      AGAIN(frugal_table_drop(other));
    }
    train(3);
    train(4);
    // A step that is undone, and begun again.
    begin(5);
    use(5, true);
    AGAIN(frugal_step_abort(trainers[0]));
    again("frugal_step_begin, which tells of the abort", [&] {
      const int32_t told = frugal_step_begin(trainers[1], 5, FRUGAL_TIMEOUT_DEFAULT);
      return told == FRUGAL_ERR_STEP_ABORTED ? FRUGAL_OK
             : told == FRUGAL_OK             ? FRUGAL_ERR_INTERNAL
                                             : told;
    });
    train(5);
    // A rank leaves and comes back.
    AGAIN(frugal_trainer_close(trainers[1]));
    join(1);
    declare(6);
    declare(7);
    train(6);
    train(7);
    AGAIN(frugal_flush(g_engine, FRUGAL_TIMEOUT_DEFAULT));
    std::string path = "/tmp/frugal-failing-" + std::to_string(getpid()) + ".json";
    AGAIN(frugal_trace_stop(g_engine, path.c_str()), true, {FRUGAL_ERR_INVALID_ARGUMENT});
    unlink(path.c_str());
    std::vector<char> text(1 << 16);
    size_t size = 0;
    AGAIN(frugal_metrics(g_engine, text.data(), text.size(), &size));
    look(dense, kDense);
    look(hashed, kHashed + 50);
    frugal_stats stats;
    stats.struct_size = sizeof stats;
    AGAIN(frugal_get_stats(g_engine, &stats));
    again(
        "frugal_close", [] { return frugal_close(g_engine); }, false);
    char line[64];
    std::snprintf(line, sizeof line, "ok %016llx", static_cast<unsigned long long>(g_digest.value));
    end(0, std::string(line) + " told " + std::to_string(g_told));
  }
};

}  // namespace

int main(int argc, char** argv) {
  Job job;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::strtoull(argv[++i], nullptr, 10) : 0; };
    if (name == "--at-once")
      job.options.mode = FRUGAL_FLUSH_AT_ONCE;
    else if (name == "--tree-heap")
      job.options.mode = FRUGAL_FLUSH_TREE_HEAP;
    else if (name == "--threads")
      job.options.threads = static_cast<uint32_t>(number());
    else if (name == "--staleness")
      job.options.staleness = number();
    else if (name == "--shm")
      job.options.backing = FRUGAL_BACKING_SHM;
    else
      return std::fprintf(stderr, "unknown option %s\n", name.c_str()), 2;
  }
  job.run();
}
