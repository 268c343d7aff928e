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

[[noreturn]] void end(int status, const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
  _exit(status);
}

void again(const char* call, const std::function<int32_t()>& make,
           std::initializer_list<int32_t> named) {
  for (int tries = 1;; ++tries) {
    int32_t status;
    {
      failing::Call inside;
      status = make();
    }
    if (status == FRUGAL_OK) return;
    ++g_told;
    const std::string why = said(call, status);
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

struct Job : JobBase {
  Options options;

  void declare(uint64_t step) {
    for (uint32_t r = 0; r < kRanks; ++r) JobBase::declare(step, r);
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
  void run() {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.world_size = kRanks;
    config.flush_threads = options.threads;
    config.flush_mode = options.mode;
    config.staleness = options.staleness;
    config.backing = options.backing;
    config.timeout_ms = 8000;
    AGAIN(frugal_open(&config, &g_engine), {FRUGAL_ERR_UNSUPPORTED});
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
      char name[256];
      n = 1;
      for (uint64_t from = 0; n > 0;)
        AGAIN(frugal_table_next(g_engine, &from, name, sizeof name, &n));
      AGAIN(frugal_table_drop(other));
    }
    train(3);
    train(4);
    // A step that is undone, and begun again.
    begin(5);
    use(5, true);
    AGAIN(frugal_step_abort(trainers[0]));
    again("frugal_step_begin, which reports the abort", [&] {
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
    AGAIN(frugal_trace_stop(g_engine, path.c_str()), {FRUGAL_ERR_INVALID_ARGUMENT});
    unlink(path.c_str());
    std::vector<char> text(1 << 16);
    size_t size = 0;
    AGAIN(frugal_metrics(g_engine, text.data(), text.size(), &size));
    look(dense, kDense, &g_digest);
    look(hashed, kHashed + 50, &g_digest);
    frugal_stats stats;
    stats.struct_size = sizeof stats;
    AGAIN(frugal_get_stats(g_engine, &stats));
    int32_t closed;
    {
      failing::Call inside;
      closed = frugal_close(g_engine);  // which may not fail
    }
    if (closed != FRUGAL_OK) end(1, "wrong status of " + said("frugal_close", closed));
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
