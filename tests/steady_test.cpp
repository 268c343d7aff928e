// Memory of a tiny job stays constant over very many steps.
//
//    steady_test STEPS [MODE] [FLUSH_THREADS] [KIB]
//        MODE: 0 auto, 1 at once, 2 deferred (frugal.h)
//
// Resident memory after all steps may exceed that after a tenth of them by KIB (1024) at most.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "frugal.h"
#include "process/proc.h"

namespace {

void check(int32_t status, const char* what) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  std::fprintf(stderr, "%s: %s: %s\n", what, frugal_status_name(status), error.message);
  std::exit(1);
}
#define CHECK(call) check((call), #call)

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100000;
  frugal_config config = FRUGAL_CONFIG_INIT;
  config.flush_mode = argc > 2 ? std::atoi(argv[2]) : FRUGAL_FLUSH_DEFERRED;
  config.flush_threads = argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : 1;
  const long bound = argc > 4 ? std::atol(argv[4]) : 1024;
  config.lookahead = 4;
  frugal_engine* engine;
  CHECK(frugal_open(&config, &engine));
  frugal_table* tables[2];
  frugal_table_config table = FRUGAL_TABLE_CONFIG_INIT;
  table.dim = 4;
  table.rows = 1000;
  table.optimizer.kind = FRUGAL_ADAGRAD;
  table.name = "dense";
  CHECK(frugal_table_create(engine, &table, &tables[0]));
  table.name = "hashed";
  table.key_space = FRUGAL_HASHED;
  CHECK(frugal_table_create(engine, &table, &tables[1]));
  frugal_trainer_config rank = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer* trainer;
  CHECK(frugal_trainer_create(engine, &rank, &trainer));

  constexpr size_t kKeys = 4;
  constexpr uint64_t kWindow = 4;
  uint64_t keys[2][kKeys];
  float rows[2][kKeys * 4], grads[kKeys * 4];
  uint64_t state = 1;
  auto random = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  };
  frugal_op ops[2] = {FRUGAL_OP_INIT, FRUGAL_OP_INIT};
  frugal_batch* batches[kWindow + 1];
  auto declare = [&](uint64_t step) {
    for (int t = 0; t < 2; ++t) {
      for (uint64_t& k : keys[t]) k = random() % 500;
      ops[t].table = tables[t];
      ops[t].keys = keys[t];
      ops[t].count = kKeys;
      ops[t].batch = nullptr;
      ops[t].rows_out = nullptr;
      ops[t].grads = nullptr;
    }
    CHECK(frugal_prefetch(trainer, step, ops, 2, &batches[step % (kWindow + 1)]));
  };
  long early = 0;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t s = 0; s < kWindow; ++s) declare(s);
  for (uint64_t s = 0; s < steps; ++s) {
    if (s == steps / 10) early = resident_kib(getpid());
    declare(s + kWindow);
    CHECK(frugal_step_begin(trainer, s, 60000));
    for (int t = 0; t < 2; ++t) {
      ops[t].keys = nullptr;
      ops[t].count = 0;
      ops[t].batch = batches[s % (kWindow + 1)];
      ops[t].part = static_cast<uint32_t>(t);
      ops[t].rows_out = rows[t];
    }
    CHECK(frugal_lookup(trainer, ops, 2));
    for (float& g : grads) g = static_cast<float>(random() % 1000) * 1e-3f - 0.5f;
    for (frugal_op& op : ops) {
      op.rows_out = nullptr;
      op.grads = grads;
    }
    CHECK(frugal_push_grad(trainer, ops, 2));
    CHECK(frugal_step_end(trainer, s, 0));
    for (frugal_op& op : ops) op.part = 0;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const long late = resident_kib(getpid());
  CHECK(frugal_close(engine));
  std::printf(
      "%llu steps in %.1f s (%.2f us a step); resident %ld KiB after %llu, %ld KiB at the end\n",
      static_cast<unsigned long long>(steps), seconds.count(),
      seconds.count() * 1e6 / static_cast<double>(steps), early,
      static_cast<unsigned long long>(steps / 10), late);
  if (late > early + bound) {
    std::fprintf(stderr, "memory grew by %ld KiB\n", late - early);
    return 1;
  }
  return 0;
}
