// Every kind of call succeeds on a stack of half the documented size, on an own engine and on an
// attached one.
//
// The header asks for 64 KiB of every calling thread. A frame that has grown fails here first. A
// stack that is too small is a segmentation fault.
//
//    stack_test [KIB]
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "frugal.h"
#if defined(FRUGAL_CONTROLLER)
#include "process/controller.h"
#endif

namespace {

[[noreturn]] void die(const char* what) {
  frugal_error error;
  frugal_last_error(&error);
  std::fprintf(stderr, "stack_test: %s: %s\n", what, error.message);
  std::_Exit(1);
}
void expect(int32_t wanted, int32_t status, const char* what) {
  if (status != wanted) die(what);
}
#define CHECK(call) expect(FRUGAL_OK, (call), #call)

constexpr size_t kKeys = 70000;  // so many that they are sorted by the largest digits
constexpr size_t kBag = 100;     // longer than a run of the fold

// All that is large lies here.
struct Job {
  frugal_config config = FRUGAL_CONFIG_INIT;
  frugal_trainer_config rank = FRUGAL_TRAINER_CONFIG_INIT;
  std::string trace;
  std::vector<uint64_t> keys, offsets;
  std::vector<float> rows, grads, weights, weight_grads;
  std::vector<uint8_t> found;
  std::vector<char> text;
};

// One table, and three steps with it.
void train(Job& job, frugal_engine* engine, int32_t key_space, int32_t kind, uint32_t dim,
           size_t count) {
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = "table";
  config.key_space = key_space;
  config.rows = uint64_t{1} << (count == kKeys ? 24 : 12);
  config.dim = dim;
  config.init = FRUGAL_INIT_TRUNCATED_NORMAL;
  config.init_b = 1;
  config.flags = key_space == FRUGAL_DENSE ? FRUGAL_TABLE_LAZY : 0;
  config.optimizer.kind = kind;
  config.optimizer.clip_norm = 1;
  config.optimizer.weight_decay = 1e-3f;
  frugal_table* table;
  CHECK(frugal_table_create(engine, &config, &table));
  frugal_trainer* trainer;
  CHECK(frugal_trainer_create(engine, &job.rank, &trainer));
  uint64_t committed;
  CHECK(frugal_committed_step(engine, &committed));
  const uint64_t first = committed + 1;

  job.keys.resize(count);
  for (size_t i = 0; i < count; ++i)
    job.keys[i] = (i % 8 ? i * 2654435761u : i / 512) % config.rows;
  job.rows.assign(count * dim, 0);
  job.grads.assign(count * dim, .25f);
  job.weights.assign(count, 2);
  job.weight_grads.assign(count, 0);
  job.found.assign(count, 0);
  job.offsets.clear();
  for (size_t at = 0; at < count; at += kBag) job.offsets.push_back(at);
  job.offsets.push_back(count);

  frugal_op rows = FRUGAL_OP_INIT;
  rows.table = table;
  rows.keys = job.keys.data();
  rows.count = count;
  frugal_batch* batches[3];
  for (uint64_t s = 0; s < 3; ++s)
    CHECK(frugal_prefetch(trainer, first + s, &rows, 1, &batches[s]));
  for (uint64_t s = 0; s < 3; ++s) {
    CHECK(frugal_step_begin(trainer, first + s, -1));
    frugal_op op = rows;
    op.batch = batches[s];
    op.rows_out = job.rows.data();
    op.grads = job.grads.data();
    CHECK(frugal_lookup(trainer, &op, 1));
    CHECK(frugal_push_grad(trainer, &op, 1));
    // Bags of undeclared keys.
    op = rows;
    op.pooling = FRUGAL_POOL_SUM;
    op.offsets = job.offsets.data();
    op.bags = job.offsets.size() - 1;
    op.weights = job.weights.data();
    op.rows_out = job.rows.data();
    CHECK(frugal_lookup(trainer, &op, 1));
    op.rows_out = nullptr;
    op.grads = job.grads.data();
    op.weight_grads_out = job.weight_grads.data();
    CHECK(frugal_push_grad(trainer, &op, 1));
    if (s == 1) {
      CHECK(frugal_step_abort(trainer));
      CHECK(frugal_step_begin(trainer, first + s, -1));
    }
    op = rows;
    op.rows_out = job.rows.data();
    CHECK(frugal_read(engine, trainer, &op, 1, -1));
    CHECK(frugal_step_end(trainer, first + s, 0));
  }
  CHECK(frugal_flush(engine, -1));
  CHECK(frugal_trainer_close(trainer));

  // What is called outside of steps, and calls that are refused.
  CHECK(frugal_get(table, job.keys.data(), count, 0, job.rows.data(), 0, job.found.data()));
  CHECK(frugal_put(table, job.keys.data(), count, 0, job.rows.data(), 0));
  uint64_t number, cursor = 0;
  size_t size = 0;
  CHECK(frugal_table_count(table, &number));
  CHECK(frugal_table_keys(table, &cursor, job.keys.data(), count, &size));
  CHECK(frugal_delete(table, job.keys.data(), size, &number));
  frugal_table_info info;
  info.struct_size = sizeof info;
  CHECK(frugal_table_describe(table, &info));
  config.optimizer.lr = .5f;
  CHECK(frugal_table_set_optimizer(table, first + 100, &config.optimizer));
  expect(FRUGAL_ERR_EXISTS, frugal_table_create(engine, &config, &table), "a table of that name");
  expect(FRUGAL_ERR_NOT_FOUND, frugal_table_find(engine, "nobody", &table),
         "a table that is not there");
  CHECK(frugal_table_find(engine, "table", &table));
  CHECK(frugal_table_drop(table));
}

void* run(void* given) {
  Job& job = *static_cast<Job*>(given);
  frugal_engine* engine;
  CHECK(frugal_open(&job.config, &engine));
  CHECK(frugal_trace_start(engine, 1000));
  train(job, engine, FRUGAL_HASHED, FRUGAL_ADAM, 4, kKeys);
  for (int32_t kind = FRUGAL_SGD; kind <= FRUGAL_FTRL; ++kind) {
    for (uint32_t dim : {7, 64, 128, 600, 2048, 3000})
      train(job, engine, kind % 2 ? FRUGAL_HASHED : FRUGAL_DENSE, kind, dim, 2 * kBag + kind);
  }
  size_t size;
  job.text.resize(1 << 16);
  CHECK(frugal_metrics(engine, job.text.data(), job.text.size(), &size));
  frugal_stats stats;
  stats.struct_size = sizeof stats;
  CHECK(frugal_get_stats(engine, &stats));
  CHECK(frugal_trace_stop(engine, job.trace.c_str()));
  CHECK(frugal_close(engine));
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t stack = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 32) << 10;
  pthread_attr_t small;
  pthread_attr_init(&small);
  if (pthread_attr_setstacksize(&small, stack) != 0) {
    std::fprintf(stderr, "stack_test: no thread has a stack of %zu bytes\n", stack);
    return 1;
  }
  char folder[] = "/tmp/frugal-stack-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  // Each on a new thread, whose first calls they are.
  auto on_a_small_stack = [&](const char* what, Job& job) {
    std::printf("%s\n", what);
    std::fflush(stdout);
    job.trace = std::string(folder) + "/trace";
    pthread_t thread;
    if (pthread_create(&thread, &small, run, &job) != 0 || pthread_join(thread, nullptr) != 0)
      std::abort();
    std::remove(job.trace.c_str());
  };
  for (uint32_t threads : {0, 1}) {
    for (double cached : {0., .3}) {
      Job job;
      job.config.flush_threads = threads;
      job.config.flush_mode = cached ? FRUGAL_FLUSH_DEFERRED : FRUGAL_FLUSH_AUTO;
      job.rank.cache_ratio = cached;
      on_a_small_stack("an engine of its own", job);
    }
  }
#if defined(FRUGAL_CONTROLLER)
  {
    const Folder place;
    const std::string address = place.address();
    ControllerProgram controller(address);
    Job job;
    job.config.service = address.c_str();
    on_a_small_stack("an engine of another process", job);
  }
#endif
  std::remove(folder);
  return 0;
}
