// The controller is killed at each point where its ledger or its rows change, one after the other;
// in the middle of a write the rows that are written are spoilt first. Each time the tables are
// read out, and are what they were after the last committed step, or after the last operation
// outside of steps: of one that was under way each row may be as before or as after it.
//
//   readout_test [EVERY]: each EVERY-th point
#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <map>

#include "base/heap.h"
#include "controller.h"
#include "engine/ledger.h"
#include "frugal.h"
#include "process/server.h"
#include "support/mix.h"
#include "support/never.h"

namespace {

constexpr uint32_t kWorld = 2, kTables = 4, kSteps = 6, kDim[kTables] = {5, 12, 3, 8};
constexpr uint64_t kRows = 400;
constexpr size_t kKeys = 90;

[[noreturn]] void die(const char* what, int status) {
  frugal_error e;
  frugal_last_error(&e);
  std::printf("readout_test: %s: %s: %s\n", what, frugal_status_name(status), e.message);
  std::exit(1);
}
#define OK(call)                                         \
  do {                                                   \
    if (const int status_ = (call)) die(#call, status_); \
  } while (0)

struct Mode {
  const char* name;
  int flush;
  uint32_t threads;
  uint64_t staleness;
  double cache;
};

using Tables =
    std::vector<std::map<uint64_t, std::vector<float>>>;  // of each: key -> values and state

struct Job {
  frugal_engine* engine = nullptr;
  frugal_table* tables[kTables] = {};
  frugal_trainer* ranks[kWorld] = {};

  int open(const Mode& m, const char* service, uint32_t joining = kWorld) {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.world_size = kWorld;
    c.seed = 11;
    c.service = service;
    c.flush_mode = m.flush;
    c.flush_threads = m.threads;
    c.staleness = m.staleness;
    c.timeout_ms = kNeverMs;
    if (int s = frugal_open(&c, &engine)) return s;
    constexpr int kOptimizers[kTables] = {FRUGAL_ADAGRAD, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_SGD,
                                          FRUGAL_ADAM};
    for (uint32_t i = 0; i < kTables; ++i) {
      frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
      const std::string name(1, static_cast<char>('a' + i));
      t.name = name.c_str();
      t.rows = kRows;
      t.dim = kDim[i];
      t.init = FRUGAL_INIT_UNIFORM;
      t.init_a = -1;
      t.init_b = 1;
      t.optimizer.kind = kOptimizers[i];
      if (i == 2) t.flags = FRUGAL_TABLE_LAZY;
      if (i == 3) t.key_space = FRUGAL_HASHED;
      if (int s = frugal_table_create(engine, &t, &tables[i])) return s;
    }
    for (uint32_t r = 0; r < joining; ++r) {
      frugal_trainer_config t = FRUGAL_TRAINER_CONFIG_INIT;
      t.rank = r;
      t.cache_ratio = m.cache;
      if (int s = frugal_trainer_create(engine, &t, &ranks[r])) return s;
    }
    return FRUGAL_OK;
  }

  static std::vector<uint64_t> keys_of(uint64_t step, uint32_t rank, uint32_t table) {
    std::vector<uint64_t> keys(kKeys);
    for (size_t i = 0; i < kKeys; ++i) {
      keys[i] = mix(step * 64 + rank * 8 + table + i * 1000003) % (i % 3 ? kRows : 30);
      if (table == 3) keys[i] = mix(keys[i] % (60 + step * 30));
    }
    return keys;
  }

  int step(uint64_t s, bool abort_first) {
    for (uint32_t r = 0; r < kWorld; ++r) {
      frugal_op ops[kTables];
      std::vector<uint64_t> keys[kTables];
      for (uint32_t t = 0; t < kTables; ++t) {
        keys[t] = keys_of(s, r, t);
        ops[t] = FRUGAL_OP_INIT;
        ops[t].table = tables[t];
        ops[t].keys = keys[t].data();
        ops[t].count = kKeys;
      }
      if (s % 2 == 0)
        if (int bad = frugal_prefetch(ranks[r], s, ops, kTables, nullptr)) return bad;
    }
    for (int round = abort_first ? 0 : 1; round < 2; ++round)
      for (uint32_t r = 0; r < kWorld; ++r) {
        int begun = frugal_step_begin(ranks[r], s, FRUGAL_TIMEOUT_DEFAULT);
        if (begun == FRUGAL_ERR_STEP_ABORTED)
          begun = frugal_step_begin(ranks[r], s, FRUGAL_TIMEOUT_DEFAULT);
        if (begun) return begun;
        frugal_op ops[kTables];
        std::vector<uint64_t> keys[kTables];
        std::vector<float> rows[kTables], grads[kTables];
        for (uint32_t t = 0; t < kTables; ++t) {
          keys[t] = keys_of(s, r, t);
          rows[t].resize(kKeys * kDim[t]);
          grads[t].resize(kKeys * kDim[t]);
          for (size_t i = 0; i < grads[t].size(); ++i)
            grads[t][i] = static_cast<float>(mix(s * 16 + r, i * 4 + t) % 2001) / 1000.0f - 1;
          ops[t] = FRUGAL_OP_INIT;
          ops[t].table = tables[t];
          ops[t].keys = keys[t].data();
          ops[t].count = kKeys;
          ops[t].rows_out = rows[t].data();
          ops[t].grads = grads[t].data();
        }
        if (int bad = frugal_lookup(ranks[r], ops, kTables)) return bad;
        if (int bad = frugal_push_grad(ranks[r], ops, kTables)) return bad;
        if (s % 3 == 1)
          if (int bad = frugal_push_grad(ranks[r], ops, 2)) return bad;
        if (round == 0) {  // what it has created is taken back
          if (int bad = frugal_step_abort(ranks[r])) return bad;
          break;
        }
        if (int bad = frugal_step_end(ranks[r], s, 0)) return bad;
      }
    return FRUGAL_OK;
  }
  static uint64_t mix(uint64_t a, uint64_t b = 0) { return ::mix(::mix(a) + b); }

  int put(uint64_t s) {
    for (uint32_t t = 0; t < kTables; ++t) {
      std::vector<uint64_t> keys = keys_of(s + 100, 0, t);
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      std::vector<float> rows(keys.size() * kDim[t]);
      for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = static_cast<float>(mix(s, i) % 1000) / 100.0f;
      if (int bad = frugal_put(tables[t], keys.data(), keys.size(), 0, rows.data(), 0)) return bad;
    }
    return FRUGAL_OK;
  }
  int remove(uint64_t s) {
    for (uint32_t t = 0; t < kTables; ++t) {
      const std::vector<uint64_t> keys = keys_of(s, 1, t);
      if (int bad = frugal_delete(tables[t], keys.data(), 20, nullptr)) return bad;
    }
    return FRUGAL_OK;
  }

  // One thing after the other: of each `operation`, its step if it is one, else kNoStep.
  static constexpr uint32_t kOperations = 3 * kSteps;
  static uint64_t step_of(uint32_t operation) {
    return operation % 3 == 0 ? operation / 3 : UINT64_MAX;
  }
  int run(uint32_t operation) {
    const uint64_t s = operation / 3;
    return operation % 3 == 0 ? step(s, s % 3 == 2) : operation % 3 == 1 ? put(s) : remove(s);
  }

  int read(Tables* out) {
    out->assign(kTables, {});
    for (uint32_t t = 0; t < kTables; ++t) {
      std::vector<uint64_t> keys(2 * kRows);
      size_t n = 0;
      uint64_t cursor = 0, count = 0;
      if (int bad = frugal_table_keys(tables[t], &cursor, keys.data(), keys.size(), &n)) return bad;
      if (int bad = frugal_table_count(tables[t], &count)) return bad;
      if (count != n) return FRUGAL_ERR_INTERNAL;
      frugal_table_info info{};
      info.struct_size = sizeof info;
      if (int bad = frugal_table_describe(tables[t], &info)) return bad;
      const size_t floats = info.dim + info.state_floats;
      std::vector<float> rows(n * floats);
      std::vector<uint8_t> found(n);
      if (int bad = frugal_get(tables[t], keys.data(), n, FRUGAL_WITH_STATE, rows.data(), 0,
                               found.data()))
        return bad;
      for (size_t i = 0; i < n; ++i) {
        if (!found[i]) return FRUGAL_ERR_INTERNAL;
        (*out)[t][keys[i]].assign(rows.begin() + static_cast<long>(i * floats),
                                  rows.begin() + static_cast<long>((i + 1) * floats));
      }
    }
    return FRUGAL_OK;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Is each row as in one of the two, or missing where it is missing in one?
bool between(const Tables& got, const Tables& a, const Tables& b) {
  for (uint32_t t = 0; t < kTables; ++t) {
    auto of = [&](const Tables& x, uint64_t k) {
      auto at = x[t].find(k);
      return at == x[t].end() ? std::vector<float>() : at->second;
    };
    std::map<uint64_t, int> keys;
    for (const Tables* x : {&got, &a, &b})
      for (auto& [k, row] : (*x)[t]) keys[k] = 1;
    for (auto& [k, ignored] : keys)
      if (!same(of(got, k), of(a, k)) && !same(of(got, k), of(b, k))) {
        std::printf("  table %u, key %llu\n", t, static_cast<unsigned long long>(k));
        return false;
      }
  }
  return true;
}

pid_t start_controller(const char* address, int64_t n) {
  int out[2];
  if (pipe2(out, 0) != 0) std::exit(1);
  const pid_t pid = fork_child();
  if (pid == 0) {
    close(out[0]);
    const std::string point = std::to_string(n), fd = std::to_string(out[1]);
    execl("/proc/self/exe", "readout_test", "--controller", address, point.c_str(), fd.c_str(),
          nullptr);
    _exit(127);
  }
  close(out[1]);
  char said;
  if (read(out[0], &said, 1) != 1) std::exit(1);
  close(out[0]);
  return pid;
}

int64_t g_heap_failure = 0;
void fail_soon(int) { frugal::heap_test_fail_after(g_heap_failure); }

// n below 0: at SIGUSR1 the -n-th allocation from then on fails.
int serve(const char* address, int64_t n, int fd) {
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  std::unique_ptr<frugal::Server> server;
  if (frugal::Server::start(address, nullptr, &server) != FRUGAL_OK) return 1;
  frugal::ledger_test_kill_at(std::max<int64_t>(n, 0));
  g_heap_failure = -n;
  signal(SIGUSR1, fail_soon);
  if (write(fd, "1", 1) != 1) return 1;
  int got = 0;
  sigwait(&ends, &got);
  server->stop();
  return 0;
}

// What the modes below cannot have: ranks that are far apart, and a cache that joins late. In a
// process of its own each, since the controller is killed.
int special(const char* name, const Mode& m, uint32_t joining,
            int (*train)(Job& job, std::vector<uint64_t>* keys)) {
  Folder folder;
  const pid_t controller = start_controller(folder.address().c_str(), 0);
  Job job;
  OK(job.open(m, folder.address().c_str(), joining));
  std::vector<uint64_t> expected;
  if (int bad = train(job, &expected)) die(name, bad);
  kill(controller, SIGKILL);
  int ended = 0;
  waitpid(controller, &ended, 0);
  for (int tries = 0; frugal_health(job.engine) != FRUGAL_ERR_PEER_LOST && tries < 5000; ++tries)
    usleep(1000);
  Tables got;
  OK(job.read(&got));
  std::sort(expected.begin(), expected.end());
  expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
  std::vector<uint64_t> keys;
  for (auto& [k, row] : got[3]) keys.push_back(k);
  if (keys != expected) {
    std::printf("readout_test: FAILED: %s: %zu rows of the hashed table, not %zu\n", name,
                keys.size(), expected.size());
    return 1;
  }
  std::printf("readout_test: %s: right\n", name);
  return frugal_close(job.engine) != FRUGAL_OK;
}

// An allocation of the controller fails. Whether it goes on or not, what is read out is right, or
// is reported as missing.
int out_of_memory(const Mode& m, const std::vector<Tables>& expected, int64_t every) {
  uint64_t right = 0, told = 0;
  for (int64_t n = 1; n < 1500; n += 1 + n % 7 + 3 * every) {
    Folder folder;
    const pid_t controller = start_controller(folder.address().c_str(), -n);
    Job job;
    OK(job.open(m, folder.address().c_str()));
    kill(controller, SIGUSR1);
    for (uint32_t o = 0; o < Job::kOperations; o += 3)
      if (job.run(o)) break;
    kill(controller, n % 2 ? SIGKILL : SIGTERM);
    int ended = 0;
    waitpid(controller, &ended, 0);
    for (int tries = 0; frugal_health(job.engine) != FRUGAL_ERR_PEER_LOST && tries < 5000; ++tries)
      usleep(1000);
    uint64_t committed = 0;
    OK(frugal_committed_step(job.engine, &committed));
    Tables got;
    if (int status = job.read(&got)) {
      if (status != FRUGAL_ERR_PEER_LOST) die("reading out after a failure", status);
      ++told;
    } else {
      const uint64_t next = committed == FRUGAL_NO_STEP ? 0 : committed + 1;
      if (!between(got, expected[next], expected[next])) {
        std::printf(
            "readout_test: FAILED: allocation %lld failed, %s: not the tables before step %llu\n",
            static_cast<long long>(n), m.name, static_cast<unsigned long long>(next));
        return 1;
      }
      ++right;
    }
    OK(frugal_close(job.engine));
  }
  std::printf("readout_test: %s, an allocation fails: %llu right, %llu told to be incomplete\n",
              m.name, static_cast<unsigned long long>(right),
              static_cast<unsigned long long>(told));
  return 0;
}

int look_up(Job& job, uint32_t rank, const std::vector<uint64_t>& keys) {
  std::vector<float> rows(keys.size() * kDim[3]);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = job.tables[3];
  op.keys = keys.data();
  op.count = keys.size();
  op.rows_out = rows.data();
  return frugal_lookup(job.ranks[rank], &op, 1);
}

// A rank runs as far ahead as it may, and makes rows in each step.
int far_ahead(Job& job, std::vector<uint64_t>* keys) {
  *keys = {1000, 2000};
  for (uint32_t r = 0; r < kWorld; ++r) {
    if (int bad = frugal_step_begin(job.ranks[r], 0, FRUGAL_TIMEOUT_DEFAULT)) return bad;
    if (int bad = look_up(job, r, {1000 * (r + 1)})) return bad;
    if (int bad = frugal_step_end(job.ranks[r], 0, 0)) return bad;
  }
  uint64_t step = 1;
  for (;; ++step) {
    const int status = frugal_step_begin(job.ranks[0], step, 100);
    if (status == FRUGAL_ERR_TIMEOUT) break;
    if (status) return status;
    if (int bad = look_up(job, 0, {step})) return bad;
    if (int bad = frugal_step_end(job.ranks[0], step, 0)) return bad;
  }
  std::printf("readout_test: a rank has begun %llu steps ahead of the last commit\n",
              static_cast<unsigned long long>(step - 1));
  return step > 40 ? FRUGAL_OK : FRUGAL_ERR_INTERNAL;
}

// Rows are made before any cache is there, in the step in which the first one joins.
int late_cache(Job& job, std::vector<uint64_t>* keys) {
  if (int bad = frugal_step_begin(job.ranks[0], 0, FRUGAL_TIMEOUT_DEFAULT)) return bad;
  for (uint64_t k = 0; k < 50; ++k) keys->push_back(k * 7);
  if (int bad = look_up(job, 0, *keys)) return bad;
  frugal_trainer_config t = FRUGAL_TRAINER_CONFIG_INIT;
  t.rank = 1;
  t.cache_ratio = 0.5;
  if (int bad = frugal_trainer_create(job.engine, &t, &job.ranks[1])) return bad;
  if (int bad = frugal_step_end(job.ranks[0], 0, 0)) return bad;
  for (uint64_t s = 0; s < 4; ++s)
    for (uint32_t r = s == 0 ? 1 : 0; r < kWorld; ++r) {
      if (int bad = frugal_step_begin(job.ranks[r], s, FRUGAL_TIMEOUT_DEFAULT)) return bad;
      if (int bad = look_up(job, r, {s + 1})) return bad;
      keys->push_back(s + 1);
      if (int bad = frugal_step_end(job.ranks[r], s, 0)) return bad;
    }
  uint64_t committed = 0;
  if (int bad = frugal_committed_step(job.engine, &committed)) return bad;
  return committed == 3 ? FRUGAL_OK : FRUGAL_ERR_INTERNAL;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], "--controller") == 0)
    return serve(argv[2], std::atoll(argv[3]), std::atoi(argv[4]));
  const int64_t every = argc > 1 ? std::atoll(argv[1]) : 1;
  if (special("ranks far apart", {"", FRUGAL_FLUSH_DEFERRED, 1, FRUGAL_STALENESS_ASYNC, 0}, kWorld,
              far_ahead))
    return 1;
  if (special("a late cache", {"", FRUGAL_FLUSH_DEFERRED, 1, 0, 0}, 1, late_cache)) return 1;
  const Mode modes[] = {{"at once", FRUGAL_FLUSH_AT_ONCE, 1, 0, 0},
                        {"deferred", FRUGAL_FLUSH_DEFERRED, 2, 0, 0},
                        {"deferred, caches", FRUGAL_FLUSH_DEFERRED, 1, 0, 0.5},
                        {"no flush threads", FRUGAL_FLUSH_DEFERRED, 0, 0, 0},
                        {"write-through", FRUGAL_FLUSH_WRITE_THROUGH, 1, 0, 0}};
  int first = 1;
  for (const Mode& m : modes) {
    std::vector<Tables> expected(Job::kOperations + 1);
    {
      Job job;
      OK(job.open(m, nullptr));
      for (uint32_t o = 0; o < Job::kOperations; ++o) {
        OK(job.read(&expected[o]));
        OK(job.run(o));
      }
      OK(job.read(&expected[Job::kOperations]));
      OK(frugal_close(job.engine));
    }
    {  // steps alone
      std::vector<Tables> steps(kSteps + 1);
      Job job;
      OK(job.open(m, nullptr));
      for (uint32_t step = 0; step < kSteps; ++step) {
        OK(job.read(&steps[step]));
        OK(job.run(3 * step));
      }
      OK(job.read(&steps[kSteps]));
      OK(frugal_close(job.engine));
      if (out_of_memory(m, steps, every)) return 1;
    }
    uint64_t points = 0, torn = 0;
    bool whole = false;
    for (int64_t n = first++; !whole; n += every) {
      Folder folder;
      const pid_t controller = start_controller(folder.address().c_str(), n);
      Job job;
      OK(job.open(m, folder.address().c_str()));
      uint32_t done = 0;
      int status = FRUGAL_OK;
      while (done < Job::kOperations && (status = job.run(done)) == FRUGAL_OK) ++done;
      if (status == FRUGAL_OK) status = frugal_flush(job.engine, FRUGAL_TIMEOUT_DEFAULT);
      whole = status == FRUGAL_OK;
      if (whole)
        kill(controller, SIGTERM);
      else if (status != FRUGAL_ERR_PEER_LOST)
        die("the job", status);
      int ended = 0;
      waitpid(controller, &ended, 0);
      // What it has left is read where it is known to be dead, at once or soon.
      for (int tries = 0; frugal_health(job.engine) != FRUGAL_ERR_PEER_LOST && tries < 5000;
           ++tries)
        usleep(1000);
      uint64_t committed = 0;
      OK(frugal_committed_step(job.engine, &committed));
      Tables got;
      OK(job.read(&got));
      const uint64_t step = done < Job::kOperations ? Job::step_of(done) : UINT64_MAX;
      const uint64_t before = done == 0 ? FRUGAL_NO_STEP : (done - 1) / 3;
      bool right;
      if (step == UINT64_MAX) {  // an operation outside of steps, or none, was under way
        right = committed == before &&
                between(got, expected[done], expected[std::min(done + 1, Job::kOperations)]);
      } else {
        const bool in = committed == step;
        right =
            (in || committed == before) && between(got, expected[done + in], expected[done + in]);
      }
      if (!right) {
        std::printf(
            "readout_test: FAILED: %s, point %lld: operation %u was under way, step %lld is the "
            "last\n",
            m.name, static_cast<long long>(n), done, static_cast<long long>(committed));
        return 1;
      }
      ++points;
      torn += !whole;
      OK(frugal_close(job.engine));
    }
    std::printf("readout_test: %s: killed at %llu points, %llu read-outs\n", m.name,
                static_cast<unsigned long long>(torn), static_cast<unsigned long long>(points));
    std::fflush(stdout);
    if (torn * static_cast<uint64_t>(every) < 300) {
      std::printf("readout_test: FAILED: so few are no test\n");
      return 1;
    }
  }
  return 0;
}
