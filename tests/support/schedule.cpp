#include "support/schedule.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/thread.h"
#include "support/mix.h"

namespace frugal {
namespace {

constexpr uint64_t kMostPoints = 200000;  // of a run: beyond it nothing moves any more
constexpr size_t kKeptPoints = 400;       // that a failure prints

// Whose turn it is. Not by the library's waits, which are the schedule's, and not by those of
// std::atomic: they first yield the processor, to other programs, too.
struct Turn {
  std::atomic<uint32_t> mine{0};
  void go() {
    mine.store(1);
    syscall(SYS_futex, &mine, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
  void wait() {
    while (mine.load() == 0) syscall(SYS_futex, &mine, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
    mine.store(0);
  }
};
static_assert(sizeof(Turn) == sizeof(uint32_t));
Turn g_caller;  // of run()

// A thread that runs what it is given, run after run.
struct Worker : Turn {
  std::function<Turn*()> body;  // returns the next thread
  Thread thread;
};

// They live as long as the process.
Worker* workers() {
  static Worker* all = [] {
    auto* made = new Worker[Schedule::kMostThreads];
    for (uint32_t i = 0; i < Schedule::kMostThreads; ++i)
      made[i].thread = Thread([w = &made[i]] {
        for (;;) {
          w->wait();
          w->body()->go();
        }
      });
    return made;
  }();
  return all;
}

const char* g_name = "";
uint64_t g_seed = 0;
const Schedule* g_running = nullptr;

std::string command() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  std::ostringstream out;
  out << "FRUGAL_SCHEDULE=" << g_name << ":" << g_seed << " "
      << std::string(path, n > 0 ? static_cast<size_t>(n) : 0);
  if (test) out << " --gtest_filter=" << test->test_suite_name() << "." << test->name();
  return out.str();
}

void tell_failure(const Schedule* schedule) {
  if (schedule) schedule->print();
  if (!*g_name) return;  // of no exploration
  std::fprintf(stderr,
               "\nTo repeat it:\n  %s\nTo keep it, a line of tests/schedules.txt:\n  %s %llu\n",
               command().c_str(), g_name, static_cast<unsigned long long>(g_seed));
  std::ofstream(FRUGAL_FAILED_SCHEDULES, std::ios::app) << g_name << " " << g_seed << "\n";
}

// By an assertion of the library, or an exception.
void died(int) { tell_failure(g_running); }

std::vector<uint64_t> kept_seeds(const char* name) {
  std::vector<uint64_t> seeds;
  std::unordered_set<uint64_t> seen;
  for (const char* path : {FRUGAL_KEPT_SCHEDULES, FRUGAL_FAILED_SCHEDULES}) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string of;
      uint64_t seed;
      if (words >> of >> seed && of == name && seen.insert(seed).second) seeds.push_back(seed);
    }
  }
  return seeds;
}

}  // namespace

struct Schedule::State {
  enum Kind : uint8_t { kReady, kLocking, kWaiting, kSleeping, kDone };
  struct Thread {
    const char* name = "";
    std::function<void()> body;
    Kind kind = kReady;
    const void* mutex = nullptr;  // that it locks, or gave up to wait
    const void* condition = nullptr;
    uint64_t until = 0;
    int64_t priority = 0;
  };
  struct Point {
    uint8_t thread;
    const char* what;
    const void* object;
    uint64_t a, b;
  };

  uint64_t seed;
  Random random;
  Thread threads[kMostThreads];
  uint32_t n = 0;
  int running = -1;
  uint64_t clock = 1000000000;
  uint64_t points = 0, choices = 0;
  uint32_t keep_of = 0;  // of so many points all but one keep the thread; 0: by priorities
  std::vector<uint64_t>
      changes;  // points at which the running thread's priority becomes the lowest
  int64_t lowest = 0;
  std::unordered_map<const void*, int> holders;
  Point last[kKeptPoints];
  uint64_t told = 0;

  explicit State(uint64_t s) : seed(s), random(mix(s ^ 0x5ced)) {
    constexpr uint32_t kKeep[] = {2, 8};
    if (random.one_in(2)) {
      keep_of = kKeep[random.below(2)];
    } else {
      const uint64_t length = uint64_t{32} << random.below(6);
      for (uint64_t d = random.below(4); d-- > 0;) changes.push_back(random.below(length));
    }
  }

  void tell(const char* what, const void* object = nullptr, uint64_t a = 0, uint64_t b = 0) {
    last[told++ % kKeptPoints] = {static_cast<uint8_t>(running), what, object, a, b};
  }
  Thread& me() { return threads[running]; }

  bool can_go_on(int i) const {
    const Thread& t = threads[i];
    return t.kind == kReady || (t.kind == kLocking && holders.find(t.mutex) == holders.end());
  }
  bool timed(int i) const {
    const Thread& t = threads[i];
    return t.kind == kSleeping || (t.kind == kWaiting && t.until != UINT64_MAX);
  }
  // The wait of a thread ends.
  void wake(Thread& t) { t.kind = t.kind == kSleeping ? kReady : kLocking; }

  void goes_on(int i) {
    Thread& t = threads[i];
    if (t.kind == kLocking) {
      holders[t.mutex] = i;
      t.kind = kReady;
    }
    choices = mix(choices ^ static_cast<uint64_t>(i + 1));
    running = i;
  }

  // Which thread goes on; -1: none can. `leave`: another one, if possible.
  int choose(bool leave) {
    // Time passes, or a wait ends for no reason, though others could go on.
    if (random.one_in(64))
      for (uint32_t i = 0; i < n; ++i)
        if ((threads[i].kind == kWaiting || threads[i].kind == kSleeping) && random.one_in(2)) {
          if (timed(static_cast<int>(i))) clock = std::max(clock, threads[i].until);
          wake(threads[i]);
        }
    for (;;) {
      int able[kMostThreads], m = 0;
      for (uint32_t i = 0; i < n; ++i)
        if (can_go_on(static_cast<int>(i)) && !(leave && static_cast<int>(i) == running))
          able[m++] = static_cast<int>(i);
      if (m) {
        if (keep_of) {
          if (!leave && running >= 0 && can_go_on(running) && random.below(keep_of)) return running;
          return able[random.below(static_cast<uint64_t>(m))];
        }
        int best = able[0];
        for (int i = 1; i < m; ++i)
          if (threads[able[i]].priority > threads[best].priority) best = able[i];
        return best;
      }
      if (leave && running >= 0 && can_go_on(running)) return running;
      // All wait: time goes on to the next moment that one of them waits for.
      int next = -1;
      for (uint32_t i = 0; i < n; ++i)
        if (timed(static_cast<int>(i)) && (next < 0 || threads[i].until < threads[next].until))
          next = static_cast<int>(i);
      if (next < 0) return -1;
      clock = std::max(clock, threads[next].until);
      wake(threads[next]);
    }
  }
};

Schedule::Schedule(uint64_t seed) : state_(new State(seed)), random_(mix(seed)) {}
Schedule::~Schedule() = default;

void Schedule::thread(const char* name, std::function<void()> body) {
  State& s = *state_;
  if (s.n == kMostThreads) fails("too many threads", __FILE__, __LINE__);
  s.threads[s.n].name = name;
  s.threads[s.n].body = std::move(body);
  ++s.n;
}

void Schedule::run() {
  State& s = *state_;
  Worker* all = workers();
  // Distinct priorities in random order.
  for (uint32_t i = 0; i < s.n; ++i) {
    const uint32_t j = static_cast<uint32_t>(s.random.below(i + 1));
    s.threads[i].priority = s.threads[j].priority;
    s.threads[j].priority = i + 1;
  }
  for (uint32_t i = 0; i < s.n; ++i)
    all[i].body = [this, i]() -> Turn* {
      State& state = *state_;
      this_scheduler = this;
      state.tell("begins");
      state.threads[i].body();
      state.tell("ends");
      this_scheduler = nullptr;
      for (const auto& [mutex, holder] : state.holders)
        if (holder == static_cast<int>(i))
          fails("a thread has ended with a mutex held", __FILE__, __LINE__);
      state.me().kind = State::kDone;
      bool any = false;
      for (uint32_t t = 0; t < state.n; ++t) any |= state.threads[t].kind != State::kDone;
      if (!any) return &g_caller;
      const int next = state.choose(false);
      if (next < 0) fails("deadlock: all threads wait", __FILE__, __LINE__);
      state.goes_on(next);
      return &workers()[next];
    };
  if (s.n == 0) return;
  s.goes_on(s.choose(false));
  all[s.running].go();
  g_caller.wait();
  s.running = -1;
}

void Schedule::fails(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
  tell_failure(this);
  std::fflush(nullptr);
  _exit(1);
}

void Schedule::note(const char* format, uint64_t a, uint64_t b) {
  state_->tell(format, nullptr, a, b);
}

uint64_t Schedule::points() const { return state_->points; }
uint64_t Schedule::choices() const { return state_->choices; }

void Schedule::print() const {
  const State& s = *state_;
  std::unordered_map<const void*, size_t> names;
  const uint64_t first = s.told > kKeptPoints ? s.told - kKeptPoints : 0;
  std::fprintf(stderr, "the last %llu points:\n", static_cast<unsigned long long>(s.told - first));
  for (uint64_t i = first; i < s.told; ++i) {
    const State::Point& p = s.last[i % kKeptPoints];
    std::fprintf(stderr, "  %-12s ", p.thread < s.n ? s.threads[p.thread].name : "");
    std::fprintf(stderr, p.what, static_cast<unsigned long long>(p.a),
                 static_cast<unsigned long long>(p.b));
    if (p.object)
      std::fprintf(stderr, " #%zu", names.emplace(p.object, names.size() + 1).first->second);
    std::fputc('\n', stderr);
  }
  constexpr const char* kKinds[] = {"could go on", "locks", "waits", "sleeps", "has ended"};
  for (uint32_t i = 0; i < s.n; ++i) {
    const State::Thread& t = s.threads[i];
    std::fprintf(stderr, "  %-12s %s", t.name,
                 static_cast<int>(i) == s.running ? "runs" : kKinds[t.kind]);
    if (t.kind == State::kLocking || t.kind == State::kWaiting) {
      const auto named = names.find(t.kind == State::kLocking ? t.mutex : t.condition);
      std::fprintf(stderr, " #%zu", named == names.end() ? 0 : named->second);
      const auto holder = s.holders.find(t.mutex);
      if (t.kind == State::kLocking && holder != s.holders.end())
        std::fprintf(stderr, ", which %s has", s.threads[holder->second].name);
    }
    std::fputc('\n', stderr);
  }
}

// --- Points --------------------------------------------------------------------------------------

namespace {
enum Leave : bool { kStay, kLeave };
}

// Chooses a thread, and returns when the calling thread is chosen again.
template <class State>
static void pass(Schedule& schedule, State& s, Leave leave) {
  const int from = s.running;
  if (++s.points > kMostPoints)
    schedule.fails("livelock: nothing moves any more", __FILE__, __LINE__);
  if (!s.keep_of) {
    bool lowers = leave == kLeave;  // a thread that polls gives way to all others
    for (uint64_t at : s.changes) lowers |= at == s.points;
    if (lowers) s.threads[from].priority = --s.lowest;
  }
  const int next = s.choose(leave == kLeave);
  if (next < 0) schedule.fails("deadlock: all threads wait", __FILE__, __LINE__);
  s.goes_on(next);
  if (next == from) return;
  workers()[next].go();
  workers()[from].wait();
}

void Schedule::point() {
  state_->tell("-");
  pass(*this, *state_, kStay);
}

void Schedule::pause() {
  state_->tell("gives way");
  pass(*this, *state_, kLeave);
}

void Schedule::lock(const void* mutex) {
  State& s = *state_;
  s.tell("locks", mutex);
  const auto holder = s.holders.find(mutex);
  if (holder != s.holders.end() && holder->second == s.running)
    fails("a mutex is locked twice", __FILE__, __LINE__);
  s.me().kind = State::kLocking;
  s.me().mutex = mutex;
  pass(*this, s, kStay);
}

bool Schedule::try_lock(const void* mutex) {
  State& s = *state_;
  pass(*this, s, kStay);
  const bool held = !s.holders.emplace(mutex, s.running).second;
  s.tell(held ? "tries without success" : "locks", mutex);
  return !held;
}

void Schedule::unlock(const void* mutex) {
  State& s = *state_;
  s.tell("unlocks", mutex);
  const auto holder = s.holders.find(mutex);
  if (holder == s.holders.end() || holder->second != s.running)
    fails("a mutex is unlocked that the thread has not", __FILE__, __LINE__);
  s.holders.erase(holder);
  pass(*this, s, kStay);
}

void Schedule::wait(const void* condition, const void* mutex, uint64_t until) {
  State& s = *state_;
  s.tell("waits", condition);
  s.holders.erase(mutex);
  State::Thread& t = s.me();
  t.kind = State::kWaiting;
  t.condition = condition;
  t.mutex = mutex;
  t.until = until;
  pass(*this, s, kStay);
}

void Schedule::notify(const void* condition, bool all) {
  State& s = *state_;
  s.tell(all ? "notifies all" : "notifies one", condition);
  uint32_t waiters[kMostThreads], m = 0;
  for (uint32_t i = 0; i < s.n; ++i)
    if (s.threads[i].kind == State::kWaiting && s.threads[i].condition == condition)
      waiters[m++] = i;
  if (m && !all) {
    waiters[0] = waiters[s.random.below(m)];
    m = 1;
  }
  for (uint32_t i = 0; i < m; ++i) s.wake(s.threads[waiters[i]]);
  pass(*this, s, kStay);
}

uint64_t Schedule::now() { return state_->clock += 100; }

void Schedule::sleep(uint64_t ns) {
  State& s = *state_;
  s.tell("sleeps");
  s.me().kind = State::kSleeping;
  s.me().until = s.clock + ns;
  pass(*this, s, kStay);
}

// --- Many ----------------------------------------------------------------------------------------

void explore(const char* name, uint64_t rounds, const std::function<void(Schedule&)>& one) {
  struct sigaction on {
  }, before;
  on.sa_handler = died;
  on.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGABRT, &on, &before);
  const Processors whole = Processors::mine();
  workers();
  // All on one processor, which a switch of threads does not leave. Which one does not matter.
  const int here = os_processor();
  if (here >= 0) {
    Processors::only(here).bind();
    for (uint32_t i = 0; i < Schedule::kMostThreads; ++i)
      Processors::only(here).bind(&workers()[i].thread);
  }
  uint64_t points = 0, most = 0, runs = 0;
  std::unordered_set<uint64_t> distinct;
  auto run = [&](uint64_t seed) {
    g_name = name;
    g_seed = seed;
    Schedule schedule(seed);
    g_running = &schedule;
    one(schedule);
    g_running = nullptr;
    g_name = "";
    points += schedule.points();
    most = std::max(most, schedule.points());
    distinct.insert(schedule.choices());
    ++runs;
  };
  const char* given = std::getenv("FRUGAL_SCHEDULE");
  if (given) {
    const size_t n = std::strlen(name);
    if (std::strncmp(given, name, n) == 0 && given[n] == ':')
      run(std::strtoull(given + n + 1, nullptr, 10));
  } else {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    rounds /= 10;  // threads that take turns have no races to report
#endif
    for (uint64_t seed : kept_seeds(name)) run(seed);
    for (uint64_t i = 0, n = test_rounds(rounds), first = mix(test_seed()); i < n; ++i)
      run(mix(first + i));
  }
  std::printf("%s: %llu schedules, %zu of them distinct; points: %llu on average, %llu at most\n",
              name, static_cast<unsigned long long>(runs), distinct.size(),
              static_cast<unsigned long long>(runs ? points / runs : 0),
              static_cast<unsigned long long>(most));
  whole.bind();
  sigaction(SIGABRT, &before, nullptr);
}

}  // namespace frugal
