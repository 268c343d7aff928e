// Processes of a job are killed, stopped and replaced at random moments; the final tables are those
// of an undisturbed run with threads, bit for bit.
//
// No call hangs, and no descriptor, thread or file is left. When the controller is killed, each
// trainer process that has opened the tables, and at least one has, reads them out. They are those
// of the last committed step, bit for bit.
//
//   kill_test --kills N --seed S --cache R --world W --steps T --mode
//   trainer|all|stop|controller|mixed
//
// One run follows another, each with its own controller at the same address, until there were N
// events. The gradients depend on rank, step, and the rows that were looked up. To kill more than
// CI does (keep seeds far apart: neighbours share their random numbers):
//
//   kill_test --kills 700 --seed 410001; kill_test --kills 700 --seed 420001 --cache 1 --world 3
//   kill_test --kills 400 --seed 430001 --cache .5 --world 4
//   kill_test --kills 500 --seed 440001 --mode controller --cache .5
//   kill_test --kills 350 --seed 450001 --mode all --cache 1
//   kill_test --kills 350 --seed 460001 --mode stop --cache .25
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <thread>

#include "controller.h"
#include "frugal.h"
#include "proc.h"
#include "support/mix.h"

namespace {

// --- What all processes of the job know ----------------------------------------------------------

struct Options {
  uint64_t kills = 50, seed = 1;
  double cache = 0;
  uint32_t world = 2, steps = 250, events = 12;  // of a run
  std::string mode = "mixed";
  int flush = FRUGAL_FLUSH_AUTO;  // frugal_flush_mode
};

enum Point : uint32_t {
  kStarted,
  kOpened,
  kTables,
  kJoining,
  kJoined,
  kDeclared,
  kBeginning,
  kBegun,
  kLooked,
  kPushing,
  kPushed,
  kEnding,
  kEnded,
  kPoints
};
constexpr const char* kNames[] = {"started",  "opened",    "tables", "joining", "joined",
                                  "declared", "beginning", "begun",  "looked",  "pushing",
                                  "pushed",   "ending",    "ended"};
static_assert(sizeof kNames / sizeof *kNames == kPoints);

constexpr int kPageFd = 100;
constexpr uint32_t kMaxWorld = 8;
constexpr int kDone = 0, kLost = 3, kWrong = 4;
constexpr int64_t kTimeoutMs = 20000;  // a stopped process is replaced; less than watch() waits
constexpr uint32_t kMaxSteps = 2000;

struct Page {  // shared by all
  struct Rank {
    std::atomic<uint64_t> step;
    std::atomic<uint32_t> point;
    std::atomic<uint32_t> visits;  // of points, so that a reader sees that one is new
    std::atomic<pid_t> attached;   // the process that has opened all tables
    std::atomic<pid_t> read_out;   // the process that has read them out, as they have to be
  } ranks[kMaxWorld];
  std::atomic<uint64_t> limit;  // no rank begins a later step,
  std::atomic<pid_t> replaced;  // but this process
  std::atomic<bool> ended;      // the controller has
  std::atomic<uint64_t> hash;
  uint64_t hashes[kMaxSteps + 1];  // of the tables before each step, and after the last
};

const bool g_says = std::getenv("FRUGAL_KILL_SAYS") != nullptr;  // every loss, too

using ::mix;
uint64_t mix(uint64_t a, uint64_t b, uint64_t c = 0) { return mix(mix(mix(a) + b) + c); }

uint64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000 + static_cast<uint64_t>(t.tv_nsec) / 1000000;
}

std::string last_error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}

int told(const char* call, int status, int result) {
  std::fprintf(stderr, "%d: %s: %s: %s\n", getpid(), call, frugal_status_name(status),
               last_error().c_str());
  return result;
}

#define NEEDS(call)                                                      \
  do {                                                                   \
    if (const int status_ = (call)) return told(#call, status_, kWrong); \
  } while (0)
// The same of a call that goes to the controller, which may have been killed.
#define NEEDS_CONTROLLER(call)                                                                \
  do {                                                                                        \
    const int status_ = (call);                                                               \
    if (status_ == FRUGAL_ERR_PEER_LOST) return g_says ? told(#call, status_, kLost) : kLost; \
    if (status_) return told(#call, status_, kWrong);                                         \
  } while (0)

// --- The job -------------------------------------------------------------------------------------

constexpr uint64_t kDense = 1500, kHashed = 2500;
// So many that the declarations of the hashed table lie in staging memory, those of the other in
// the ring.
constexpr size_t kKeys = 260, kDim[2] = {12, 5};

frugal_config engine_config(const Options& o, const char* service) {
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.world_size = o.world;
  c.seed = 5;
  c.timeout_ms = kTimeoutMs;
  c.flush_mode = o.flush;
  c.service = service;
  return c;
}

int make_tables(frugal_engine* e, frugal_table* t[2]) {
  frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
  c.name = "dense";
  c.rows = kDense;
  c.dim = kDim[0];
  c.init = FRUGAL_INIT_UNIFORM;
  c.init_a = -1;
  c.init_b = 1;
  c.optimizer.kind = FRUGAL_ADAGRAD;
  NEEDS_CONTROLLER(frugal_table_create(e, &c, &t[0]));
  c.name = "hashed";
  c.key_space = FRUGAL_HASHED;
  c.rows = kHashed;
  c.dim = kDim[1];
  c.optimizer.kind = FRUGAL_ADAM;
  NEEDS_CONTROLLER(frugal_table_create(e, &c, &t[1]));
  return kDone;
}

struct Trainer {
  const Options& options;
  uint32_t rank;
  Page* page;  // or null
  frugal_table* tables[2];
  frugal_trainer* handle = nullptr;
  std::vector<uint64_t> keys[2] = {};
  std::vector<float> rows[2] = {}, grads[2] = {};

  void at(Point p) {
    if (!page) return;
    page->ranks[rank].point.store(p);
    page->ranks[rank].visits.fetch_add(1);
  }
  void make_keys(uint64_t step) {
    for (int t = 0; t < 2; ++t) {
      keys[t].resize(kKeys);
      // A few rows that all want, and for the hashed table new ones with each step.
      const uint64_t most = t == 0 ? kDense : std::min<uint64_t>(kHashed - 500, 200 + step * 6);
      for (size_t i = 0; i < kKeys; ++i) {
        const uint64_t x = mix(step * 1000 + rank, i, t);
        keys[t][i] = (x >> 32) % (x % 4 == 0 ? 20 : most);
        if (t == 1) keys[t][i] = mix(keys[t][i]);
      }
    }
  }
  void ops(frugal_op out[2]) {
    for (int t = 0; t < 2; ++t) {
      out[t] = FRUGAL_OP_INIT;
      out[t].table = tables[t];
      out[t].keys = keys[t].data();
      out[t].count = kKeys;
      rows[t].resize(kKeys * kDim[t]);
      grads[t].resize(kKeys * kDim[t]);
      out[t].rows_out = rows[t].data();
      out[t].grads = grads[t].data();
    }
  }
  int declare(uint64_t step) {
    if (step % 13 == 5) return FRUGAL_OK;  // a step without declarations
    make_keys(step);
    frugal_op op[2];
    ops(op);
    return frugal_prefetch(handle, step, op, 2, nullptr);
  }
  int one_step(uint64_t step, bool abort) {
    make_keys(step);
    frugal_op op[2];
    ops(op);
    if (int s = frugal_lookup(handle, op, 2)) return s;
    at(kLooked);
    for (int t = 0; t < 2; ++t)
      for (size_t i = 0; i < grads[t].size(); ++i)
        grads[t][i] = rows[t][i] * 0.05f +
                      static_cast<float>(mix(step * 8 + rank, i, t) % 1000) / 1000.0f - 0.4f;
    if (abort) return frugal_step_abort(handle);
    at(kPushing);
    if (int s = frugal_push_grad(handle, op, 2)) return s;
    if (step % 3 == 0)
      if (int s = frugal_push_grad(handle, op, 1)) return s;  // sums of two pushes
    at(kPushed);
    at(kEnding);
    return frugal_step_end(handle, step, 0);
  }

  // Steps until the last one is committed. In threads nothing may go wrong but aborts.
  int train(frugal_engine* e, bool process) {
    uint64_t declared = 0, aborts = 0;
    int refused = 0;
    for (;;) {
      uint64_t step = 0;
      int s = FRUGAL_OK;
      NEEDS(frugal_committed_step(e, &step));  // also without a controller
      step = step == FRUGAL_NO_STEP ? 0 : step + 1;
      if (step >= options.steps) return kDone;
      for (s = FRUGAL_OK; s == FRUGAL_OK; ++step) {
        if (page) page->ranks[rank].step.store(step);
        // Held so, the job does not end before that has happened to it which is to happen.
        while (page && step > page->limit.load() && page->replaced.load() != getpid()) usleep(100);
        for (declared = std::max(declared, step);
             s == FRUGAL_OK && declared < std::min<uint64_t>(step + 6, options.steps);)
          if ((s = declare(declared)) == FRUGAL_OK) ++declared;
        if (s != FRUGAL_OK) break;
        at(kDeclared);
        at(kBeginning);
        const uint64_t began = now_ms();
        s = frugal_step_begin(handle, step, step < options.steps ? FRUGAL_TIMEOUT_DEFAULT : 200);
        if (s == FRUGAL_OK && step == options.steps) return kDone;
        if (s == FRUGAL_OK || now_ms() - began > 1000) refused = 0;
        if (s != FRUGAL_OK) break;
        at(kBegun);
        const bool abort = mix(step, rank, 77) % 60 == 0 && aborts++ % 2 == 0;
        s = one_step(step, abort);
        at(kEnded);
        if (abort && s == FRUGAL_OK) break;
      }
      const bool lost = s == FRUGAL_ERR_PEER_LOST && process;
      // A trainer that is cut off learns that at once, at each call.
      if (lost && ++refused > 20) {
        if (g_says)
          std::fprintf(stderr, "rank %u, step %llu: refused: %s\n", rank,
                       static_cast<unsigned long long>(step), last_error().c_str());
        return kLost;
      }
      if (s != FRUGAL_OK && s != FRUGAL_ERR_STEP_ABORTED && !lost &&
          !(s == FRUGAL_ERR_TIMEOUT && step == options.steps)) {
        // The step to begin may have become another while this rank asked for it.
        if (s == FRUGAL_ERR_STEP_ORDER && ++refused < 20) continue;
        std::fprintf(stderr, "rank %u, step %llu: %s: %s\n", rank,
                     static_cast<unsigned long long>(step), frugal_status_name(s),
                     last_error().c_str());
        return kWrong;
      }
    }
  }
};

int hash_of(frugal_table* const tables[2], uint64_t* out) {
  uint64_t h = 1469598103934665603u;
  for (int t = 0; t < 2; ++t) {
    std::vector<uint64_t> keys;
    std::vector<uint64_t> some(500);
    size_t n = 0;
    for (uint64_t cursor = 0;;) {
      NEEDS(frugal_table_keys(tables[t], &cursor, some.data(), some.size(), &n));
      if (n == 0) break;
      keys.insert(keys.end(), some.begin(), some.begin() + static_cast<long>(n));
    }
    std::sort(keys.begin(), keys.end());
    frugal_table_info info{};
    info.struct_size = sizeof info;
    NEEDS(frugal_table_describe(tables[t], &info));
    const size_t floats = info.dim + info.state_floats;
    std::vector<float> rows(keys.size() * floats);
    NEEDS(frugal_get(tables[t], keys.data(), keys.size(), FRUGAL_WITH_STATE, rows.data(), 0,
                     nullptr));
    for (uint64_t k : keys) h = (h ^ k) * 1099511628211u;
    for (float f : rows) {
      uint32_t bits;
      std::memcpy(&bits, &f, sizeof bits);
      h = (h ^ bits) * 1099511628211u;
    }
  }
  *out = h;
  return kDone;
}

// The controller is dead: its tables are those of the last committed step.
int read_out(frugal_engine* e, uint32_t rank, frugal_table* const tables[2], Page* page) {
  uint64_t step = 0, hash = 0;
  NEEDS(frugal_committed_step(e, &step));
  if (int bad = hash_of(tables, &hash)) return bad;
  const uint64_t next = step == FRUGAL_NO_STEP ? 0 : step + 1;
  if (hash != page->hashes[next]) {
    std::fprintf(stderr, "%d: the tables are not those before step %llu", getpid(),
                 static_cast<unsigned long long>(next));
    for (uint32_t s = 0; s <= kMaxSteps; ++s)
      if (page->hashes[s] == hash) std::fprintf(stderr, ", but before step %u", s);
    std::fprintf(stderr, "\n");
    return kWrong;
  }
  // A lookup that changes nothing sees the same, pooled ones, too.
  std::vector<uint64_t> keys(kKeys), offsets = {0, kKeys / 2, kKeys};
  std::vector<float> rows(kKeys * kDim[0]), read(kKeys * kDim[0]), sums(2 * kDim[0]);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = mix(i, step) % kDense;
  NEEDS(frugal_get(tables[0], keys.data(), kKeys, 0, rows.data(), 0, nullptr));
  frugal_op op = FRUGAL_OP_INIT;
  op.table = tables[0];
  op.keys = keys.data();
  op.count = kKeys;
  op.rows_out = read.data();
  NEEDS(frugal_read(e, nullptr, &op, 1, FRUGAL_TIMEOUT_DEFAULT));
  if (std::memcmp(rows.data(), read.data(), rows.size() * sizeof(float)) != 0) return kWrong;
  op.pooling = FRUGAL_POOL_SUM;
  op.offsets = offsets.data();
  op.bags = 2;
  op.rows_out = sums.data();
  NEEDS(frugal_read(e, nullptr, &op, 1, FRUGAL_TIMEOUT_DEFAULT));
  for (size_t d = 0; d < kDim[0]; ++d) {
    double sum = 0;
    for (size_t i = 0; i < kKeys / 2; ++i) sum += static_cast<double>(rows[i * kDim[0] + d]);
    if (!(std::abs(sum - static_cast<double>(sums[d])) < 1e-3 * kKeys)) return kWrong;
  }
  // A call that would change a table reports the loss.
  float row[kDim[0]] = {};
  if (frugal_put(tables[0], keys.data(), 1, 0, row, 0) != FRUGAL_ERR_PEER_LOST) return kWrong;
  page->ranks[rank].read_out.store(getpid());
  return kDone;
}

int trainer_process(const Options& o, const char* address, uint32_t rank, bool replace,
                    Page* page) {
  Trainer t{o, rank, page, {}};
  t.at(kStarted);
#if defined(__SANITIZE_THREAD__)
  constexpr long kOwn = 1;  // ThreadSanitizer begins one of its own with the first
#else
  constexpr long kOwn = 0;
#endif
  const long descriptors = descriptors_of(getpid()), threads = threads_of(getpid()) + kOwn;
  frugal_engine* e = nullptr;
  const frugal_config c = engine_config(o, address);
  NEEDS_CONTROLLER(frugal_open(&c, &e));
  t.at(kOpened);
  if (int bad = make_tables(e, t.tables)) return bad;
  page->ranks[rank].attached.store(getpid());  // from here on it has what there is to read out
  t.at(kTables);
  frugal_trainer_config tc = FRUGAL_TRAINER_CONFIG_INIT;
  tc.rank = rank;
  tc.cache_ratio = o.cache;
  tc.flags = replace ? FRUGAL_TRAINER_REPLACE : 0;
  t.at(kJoining);
  // A killed process may not be dead yet: a signal takes its time on a busy machine.
  int32_t joined;
  const uint64_t until = now_ms() + 5000;
  while ((joined = frugal_trainer_create(e, &tc, &t.handle)) == FRUGAL_ERR_EXISTS &&
         now_ms() < until)
    usleep(1000);
  if (joined != FRUGAL_ERR_PEER_LOST) {
    NEEDS(joined);
    t.at(kJoined);
  }
  [[maybe_unused]] const std::vector<std::string> held = open_files_of(getpid());
  const int result = joined == FRUGAL_OK ? t.train(e, true) : kLost;
  const bool ended = page->ended.load();
  const int health = frugal_health(e);
  if (ended && health != FRUGAL_ERR_PEER_LOST)
    return told("frugal_health without a controller", health, kWrong);
  if (health == FRUGAL_ERR_PEER_LOST)
    if (int bad = read_out(e, rank, t.tables, page)) return bad;
      // Whatever has happened to the others, and to the controller, leaves nothing here.
      // AddressSanitizer's build does not judge: on some machines two descriptors more were seen in
      // it, in no other one, and for a second.
#if !defined(__SANITIZE_ADDRESS__)
  std::vector<std::string> holds;
  for (int i = 0; i < 1000 && (holds = open_files_of(getpid())).size() > held.size(); ++i)
    usleep(1000);
  if (holds.size() > held.size()) {
    for (const std::string& file : holds)
      if (std::find(held.begin(), held.end(), file) == held.end())
        std::fprintf(stderr, "rank %u: %s was not open when it had joined\n", rank, file.c_str());
    return kWrong;
  }
#endif
  if (rank % 2 == 0) return result;  // without closing
  NEEDS(frugal_close(e));
  // A joined thread is in /proc for a moment longer.
  for (int i = 0;
       i < 1000 && (threads_of(getpid()) > threads || descriptors_of(getpid()) > descriptors); ++i)
    usleep(1000);
  if (descriptors_of(getpid()) != descriptors || threads_of(getpid()) > threads ||
      mapped_of(getpid(), "memfd:frugal") != 0) {
    std::fprintf(stderr, "rank %u: closing leaves %ld descriptors, %ld threads, %ld mappings\n",
                 rank, descriptors_of(getpid()) - descriptors, threads_of(getpid()) - threads,
                 mapped_of(getpid(), "memfd:frugal"));
    return kWrong;
  }
  return result;
}

int reader_process(const Options& o, const char* address, Page* page) {
  frugal_engine* e = nullptr;
  const frugal_config c = engine_config(o, address);
  NEEDS(frugal_open(&c, &e));
  frugal_table* tables[2];
  if (int bad = make_tables(e, tables)) return bad;
  uint64_t hash = 0;
  if (int bad = hash_of(tables, &hash)) return bad;
  page->hash.store(hash);
  NEEDS(frugal_close(e));
  return kDone;
}

// The same, rank after rank in one thread: the tables before each step.
int one_by_one(const Options& o, Page* page) {
  frugal_engine* e = nullptr;
  const frugal_config c = engine_config(o, nullptr);
  NEEDS(frugal_open(&c, &e));
  std::vector<Trainer> trainers;
  frugal_table* tables[2];
  if (int bad = make_tables(e, tables)) return bad;
  for (uint32_t r = 0; r < o.world; ++r) {
    trainers.push_back({o, r, nullptr, {tables[0], tables[1]}});
    frugal_trainer_config tc = FRUGAL_TRAINER_CONFIG_INIT;
    tc.rank = r;
    NEEDS(frugal_trainer_create(e, &tc, &trainers[r].handle));
  }
  for (uint64_t step = 0; step <= o.steps; ++step) {
    if (int bad = hash_of(tables, &page->hashes[step])) return bad;
    for (Trainer& t : trainers) {
      if (step == o.steps) break;
      NEEDS(frugal_step_begin(t.handle, step, FRUGAL_TIMEOUT_DEFAULT));
      NEEDS(t.one_step(step, false));
    }
  }
  return frugal_close(e) == FRUGAL_OK ? kDone : kWrong;
}

// The same in threads, undisturbed.
int reference(const Options& o, Page* page) {
  frugal_engine* e = nullptr;
  const frugal_config c = engine_config(o, nullptr);
  NEEDS(frugal_open(&c, &e));
  std::vector<Trainer> trainers;
  for (uint32_t r = 0; r < o.world; ++r) {
    trainers.push_back({o, r, nullptr, {}});
    frugal_trainer_config tc = FRUGAL_TRAINER_CONFIG_INIT;
    tc.rank = r;
    NEEDS(frugal_trainer_create(e, &tc, &trainers[r].handle));
  }
  frugal_table* tables[2];
  if (int bad = make_tables(e, tables)) return bad;
  std::vector<int> results(o.world);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < o.world; ++r) {
    std::copy(tables, tables + 2, trainers[r].tables);
    threads.emplace_back([&, r] {
      results[r] = trainers[r].train(e, false);
      (void)frugal_trainer_close(trainers[r].handle);
    });
  }
  for (std::thread& t : threads) t.join();
  for (int r : results)
    if (r) return r;
  uint64_t hash = 0;
  if (int bad = hash_of(tables, &hash)) return bad;
  page->hash.store(hash);
  return frugal_close(e) == FRUGAL_OK ? kDone : kWrong;
}

// --- The harness ---------------------------------------------------------------------------------

std::atomic<uint64_t> g_alive{0};  // when something has happened last
std::string g_doing;

class Harness {
 public:
  Harness(const Options& o, Page* page) : options_(o), page_(page), random_(o.seed) {}

  int run() {
    std::printf("kill_test: seed %llu, mode %s, %u ranks, cache %g\n",
                static_cast<unsigned long long>(options_.seed), options_.mode.c_str(),
                options_.world, options_.cache);
    g_alive.store(now_ms());
    std::thread([this] { watch(); }).detach();
    doing("reference");
    if (wait_for(spawn({"--reference"}), true) != kDone) return fail("the reference fails");
    expected_ = page_->hash.load();
    if (page_->hashes[options_.steps] != expected_)
      return fail("one thread and several do not agree");
    uint32_t runs = 0;
    while (events_ < options_.kills) {
      if (int bad = one_run()) return bad;
      ++runs;
    }
    std::printf(
        "kill_test: %llu events in %u runs (%llu trainers, %llu jobs, %llu stopped, %llu "
        "controllers): all equal, "
        "%llu read-outs, %llu without tables\n",
        static_cast<unsigned long long>(events_), runs, static_cast<unsigned long long>(kinds_[0]),
        static_cast<unsigned long long>(kinds_[1]), static_cast<unsigned long long>(kinds_[2]),
        static_cast<unsigned long long>(kinds_[3]), static_cast<unsigned long long>(readouts_),
        static_cast<unsigned long long>(without_));
    return 0;
  }

 private:
  uint64_t random(uint64_t n) { return mix(random_++) % n; }
  static void doing(const std::string& what) {
    g_doing = what;
    g_alive.store(now_ms());
  }
  int fail(const std::string& what) {
    std::printf("kill_test: FAILED, seed %llu, event %llu (%s): %s\n",
                static_cast<unsigned long long>(options_.seed),
                static_cast<unsigned long long>(events_), g_doing.c_str(), what.c_str());
    dump();
    return 1;
  }
  void dump() {
    for (uint32_t r = 0; r < options_.world; ++r)
      std::printf("  rank %u: pid %d, step %llu, %s\n", r, pids_[r],
                  static_cast<unsigned long long>(page_->ranks[r].step.load()),
                  kNames[page_->ranks[r].point.load()]);
    std::printf("  controller: pid %d\n", controller_pid_);
    std::fflush(stdout);
  }
  // A hang beyond all time-outs.
  void watch() {
    for (;;) {
      sleep(1);
      const uint64_t last = g_alive.load();  // before the clock, or it may be later than now
      if (now_ms() - last < 60000) continue;
      (void)fail("nothing happens any more");
      if (std::getenv("FRUGAL_KILL_HOLD")) pause();  // for a debugger
      for (pid_t pid : pids_)
        if (pid > 0) kill(pid, SIGKILL);
      if (zombie_ > 0) kill(zombie_, SIGKILL);
      _exit(1);
    }
  }
  pid_t spawn(std::vector<std::string> more) {
    std::vector<std::string> args = {"kill_test",
                                     "--world",
                                     std::to_string(options_.world),
                                     "--steps",
                                     std::to_string(options_.steps),
                                     "--cache",
                                     std::to_string(options_.cache),
                                     "--flush",
                                     std::to_string(options_.flush)};
    args.insert(args.end(), more.begin(), more.end());
    std::vector<char*> raw;
    for (std::string& a : args) raw.push_back(a.data());
    raw.push_back(nullptr);
    const pid_t pid = fork_child();
    if (pid == 0) {
      execv("/proc/self/exe", raw.data());
      _exit(127);
    }
    return pid;
  }
  int wait_for(pid_t pid, bool working = false) {
    int status = 0;
    // Work of a single process may take long under a sanitizer.
    while (waitpid(pid, &status, working ? WNOHANG : 0) == 0) {
      usleep(2000);
      g_alive.store(now_ms());
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  void start(uint32_t rank, bool replace) {
    page_->ranks[rank].point.store(kStarted);
    pids_[rank] = spawn({"--trainer", folder_.address(), "--rank", std::to_string(rank),
                         replace ? "--replace" : "--new"});
  }
  uint64_t progress() const {
    uint64_t least = UINT64_MAX;
    for (uint32_t r = 0; r < options_.world; ++r)
      least = std::min(least, page_->ranks[r].step.load());
    return least;
  }
  bool has_exited(uint32_t rank, siginfo_t* info) {
    *info = {};
    return waitid(P_PID, static_cast<id_t>(pids_[rank]), info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info->si_pid;
  }
  // False: a trainer has ended, which none may before.
  bool await_step(uint64_t step) {
    uint64_t seen = UINT64_MAX;
    for (;;) {
      for (uint32_t r = 0; r < options_.world; ++r) {
        siginfo_t info;
        if (!has_exited(r, &info)) continue;
        g_doing += ", rank " + std::to_string(r) +
                   (info.si_code == CLD_EXITED ? " exited with " : " was ended by signal ") +
                   std::to_string(info.si_status);
        return false;
      }
      const uint64_t now = progress();
      if (now >= step) return true;
      if (now != seen) g_alive.store(now_ms());
      seen = now;
      usleep(100);
    }
  }
  // At a moment that is random, or near to one of the named points.
  void await_moment(uint32_t rank, uint32_t first, uint32_t last) {
    Page::Rank& r = page_->ranks[rank];
    if (random(3)) {
      const uint32_t point = first + static_cast<uint32_t>(random(last - first + 1)),
                     visits = r.visits.load();
      g_doing += std::string(" at ") + kNames[point];
      for (uint64_t until = now_ms() + 50;
           now_ms() < until && (r.point.load() != point || r.visits.load() == visits);) {
      }
    }
    timespec t{0, static_cast<long>(random(4) ? random(60000) : random(3000000))};
    nanosleep(&t, nullptr);
  }

  int one_run() {
    doing("controller");
    constexpr int kModes[] = {FRUGAL_FLUSH_AUTO, FRUGAL_FLUSH_DEFERRED, FRUGAL_FLUSH_AT_ONCE,
                              FRUGAL_FLUSH_WRITE_THROUGH};
    options_.flush = kModes[random(4)];
    ControllerProgram controller(folder_.address());
    if (!controller.serves()) return fail("a controller does not start");
    controller_pid_ = controller.pid();
    // With one process that has come and gone it has what it needs itself.
    if (wait_for(spawn({"--read", folder_.address()})) != kDone)
      return fail("no process can attach");
    const long descriptors = wait_to_fall(descriptors_of, LONG_MAX),
               threads = wait_to_fall(threads_of, LONG_MAX);
    for (auto& r : page_->ranks) r.step.store(0);
    page_->ended.store(false);
    page_->limit.store(0);
    for (uint32_t r = 0; r < options_.world; ++r) start(r, false);
    long resident = 0;
    const uint32_t events = options_.events;
    for (uint32_t i = 0; i < events && events_ < options_.kills; ++i) {
      // Not before the next awaited step, and so that no rank ends the last step.
      page_->limit.store((i + 3) * options_.steps / (events + 2) - 2);
      if (!await_step((i + 1) * options_.steps / (events + 2)))
        return fail("a trainer has ended too early");
      if (i == 2) resident = resident_kib(controller.pid());
      uint32_t kind = options_.mode == "trainer"      ? 0
                      : options_.mode == "all"        ? 1
                      : options_.mode == "stop"       ? 2
                      : options_.mode == "controller" ? 3
                                                      : static_cast<uint32_t>(random(8));
      if (kind >= 4) kind = kind == 7 ? 2 : 0;
      if (kind == 3 && options_.mode == "mixed" && i < 4) kind = 0;
      if (kind != 3) ++events_, ++kinds_[kind];
      const uint32_t rank = static_cast<uint32_t>(random(options_.world));
      doing(kind == 0 ? "trainer" : kind == 1 ? "all" : kind == 2 ? "stop" : "controller");
      if (kind == 3) {
        await_moment(rank, kDeclared, kEnded);
        return end_by_controller(controller);
      }
      if (kind == 0) {
        await_moment(rank, kDeclared, kEnded);
        kill(pids_[rank], SIGKILL);
        if (random(2))
          wait_for(pids_[rank]);  // else its successor may come before its death is known
        const pid_t old = pids_[rank];
        start(rank, false);
        if (random(5) == 0) {  // one that dies early
          await_moment(rank, kStarted, kDeclared);
          kill(pids_[rank], SIGKILL);
          wait_for(pids_[rank]);
          start(rank, false);
        }
        waitpid(old, nullptr, 0);
      } else if (kind == 1) {
        await_moment(rank, kDeclared, kEnded);
        for (uint32_t r = 0; r < options_.world; ++r) kill(pids_[r], SIGKILL);
        for (uint32_t r = 0; r < options_.world; ++r) wait_for(pids_[r]);
        for (uint32_t r = 0; r < options_.world; ++r) start(r, false);
      } else {
        for (uint64_t last = now_ms() + 20000;
             page_->ranks[rank].point.load() < kJoined && now_ms() < last;)
          usleep(100);
        await_moment(rank, kDeclared, kEnded);
        kill(pids_[rank], SIGSTOP);
        zombie_ = pids_[rank];
        if (random(2)) usleep(static_cast<useconds_t>(random(3000)));
        start(rank, true);
        // It goes on before or after its successor has come.
        const uint64_t until = now_ms() + random(60);
        while (now_ms() < until) usleep(200);
        // Before it is replaced it would only be slow.
        for (uint64_t last = now_ms() + 20000;
             page_->ranks[rank].point.load() < kJoined && now_ms() < last;)
          usleep(200);
        page_->replaced.store(zombie_);
        kill(zombie_, SIGCONT);
        const int status = wait_for(zombie_);
        zombie_ = -1;
        if (status != kLost) return fail("a replaced trainer ends with " + std::to_string(status));
      }
    }
    doing("the end of the job");
    page_->limit.store(UINT64_MAX);
    for (uint32_t r = 0; r < options_.world; ++r)
      if (int status = wait_for(pids_[r]); status != kDone)
        return fail("rank " + std::to_string(r) + " ends with " + std::to_string(status));
    doing("reading");
    page_->hash.store(0);
    if (wait_for(spawn({"--read", folder_.address()})) != kDone)
      return fail("the tables cannot be read");
    if (page_->hash.load() != expected_) return fail("the tables are not those of the reference");
    if (long n = wait_to_fall(descriptors_of, descriptors); n > descriptors)
      return fail(std::to_string(n - descriptors) + " descriptors are left in the controller");
    if (long n = wait_to_fall(threads_of, threads); n > threads)
      return fail(std::to_string(n - threads) + " threads are left in the controller");
    if (long kib = resident_kib(controller.pid()); resident && kib > 2 * resident + 65536)
      return fail("the controller has " + std::to_string(kib) + " KiB, had " +
                  std::to_string(resident));
    doing("stopping the controller");
    if (int status = controller.end(SIGTERM))
      return fail("the controller ends with " + std::to_string(status));
    if (!folder_.entries().empty()) return fail("files are left: " + folder_.entries()[0]);
    return 0;
  }

  // A trainer that has opened both tables reads them out. One that has not has nothing to read out
  // yet. If that is true of all trainers, nothing was tried, and the round does not count.
  int end_by_controller(ControllerProgram& controller) {
    bool has[kMaxWorld];
    uint32_t having = 0;
    for (uint32_t r = 0; r < options_.world; ++r) {
      siginfo_t info;
      if (has_exited(r, &info)) return fail("rank " + std::to_string(r) + " has ended too early");
      has[r] = page_->ranks[r].attached.load() == pids_[r];
      having += has[r];
    }
    const uint64_t began = now_ms();
    controller.end(SIGKILL);
    page_->ended.store(true);
    page_->limit.store(UINT64_MAX);
    for (uint32_t r = 0; r < options_.world; ++r) {
      if (int status = wait_for(pids_[r]); status != kLost)
        return fail("without a controller rank " + std::to_string(r) + " ends with " +
                    std::to_string(status));
      const bool read = page_->ranks[r].read_out.load() == pids_[r];
      if (has[r] && !read)
        return fail("rank " + std::to_string(r) + " has not read out the tables that it had");
      readouts_ += read;
      without_ += !read;
    }
    if (now_ms() - began > kTimeoutMs + 5000)
      return fail("a trainer takes its time without a controller");
    // In that mode no trainer is replaced before.
    if (options_.mode == "controller" && having != options_.world)
      return fail("a rank in the middle of the job has no tables");
    if (having) ++events_, ++kinds_[3];
    return 0;
  }

  // A number that is to fall to `aim`; it is given time.
  long wait_to_fall(long (*of)(pid_t), long aim) {
    long n = of(controller_pid_);
    for (int i = 0; i < 1000; ++i) {
      if (aim == LONG_MAX ? i >= 100 : n <= aim) break;
      usleep(aim == LONG_MAX ? 1000 : 5000);
      n = aim == LONG_MAX ? std::min(n, of(controller_pid_)) : of(controller_pid_);
    }
    return n;
  }

  Options options_;
  Page* const page_;
  uint64_t random_, expected_ = 0, events_ = 0, kinds_[4] = {}, readouts_ = 0, without_ = 0;
  Folder folder_;
  pid_t pids_[kMaxWorld] = {}, zombie_ = -1, controller_pid_ = -1;
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  std::string role, address;
  uint32_t rank = 0;
  bool replace = false;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    auto value = [&]() -> const char* { return i + 1 < argc ? argv[++i] : ""; };
    if (a == "--kills")
      o.kills = std::strtoull(value(), nullptr, 10);
    else if (a == "--seed")
      o.seed = std::strtoull(value(), nullptr, 10);
    else if (a == "--cache")
      o.cache = std::atof(value());
    else if (a == "--world")
      o.world = static_cast<uint32_t>(std::atoi(value()));
    else if (a == "--steps")
      o.steps = static_cast<uint32_t>(std::atoi(value()));
    else if (a == "--events")
      o.events = static_cast<uint32_t>(std::atoi(value()));
    else if (a == "--mode")
      o.mode = value();
    else if (a == "--flush")
      o.flush = std::atoi(value());
    else if (a == "--trainer" || a == "--read")
      role = a, address = value();
    else if (a == "--reference")
      role = a;
    else if (a == "--rank")
      rank = static_cast<uint32_t>(std::atoi(value()));
    else if (a == "--replace")
      replace = true;
    else if (a != "--new") {
      std::fprintf(stderr, "what is %s?\n", a.c_str());
      return 2;
    }
  }
  if (o.steps > kMaxSteps || o.steps / (o.events + 2) < 4 || o.world < 1 || o.world > kMaxWorld ||
      rank >= o.world)
    return 2;
  int fd = kPageFd;
  if (role.empty()) {
    fd = memfd_create("kill_test", 0);
    if (fd < 0 || ftruncate(fd, sizeof(Page)) != 0 || dup2(fd, kPageFd) < 0) return 1;
  }
  void* at = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return 1;
  Page* page = static_cast<Page*>(at);
  if (role == "--trainer") return trainer_process(o, address.c_str(), rank, replace, page);
  if (role == "--read") return reader_process(o, address.c_str(), page);
  if (role == "--reference") {
    const int bad = one_by_one(o, page);
    return bad ? bad : reference(o, page);
  }
  return Harness(o, page).run();
}
