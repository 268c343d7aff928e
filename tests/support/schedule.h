// Chosen interleavings: real threads of which one runs at a time. At each point of the scheduler
// interface (base/scheduler.h) a seed decides which thread goes on. So whatever a run does can be
// repeated, and a rare order of two threads is not rare.
//
// Half of the seeds switch at random, often or seldom. The others give the threads priorities,
// which change at a few points of the run: a fault that needs d switches at certain points is met
// by one run in about n k^(d-1), for n threads and k points (Burckhardt et al., "A randomized
// scheduler with probabilistic guarantees of finding bugs"). Time is the run's own: it goes on when
// a thread reads it, and jumps when all threads wait for it. A wait may also end at its time though
// others could go on, or for no reason.
//
// Memory is sequentially consistent here: what needs a weaker order of two atomics to go wrong, no
// schedule shows.
//
// A failure ends the process: waiting threads could not be ended otherwise. It prints the last
// points of the run, its seed, and the command that repeats it; the seed goes to the file of kept
// ones in the build folder, too. Kept seeds run first: of that file, and of tests/schedules.txt.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

#include "base/scheduler.h"
#include "support/inside.h"

namespace frugal {

class Schedule final : public Scheduler {
 public:
  static constexpr uint32_t kMostThreads = 8;

  explicit Schedule(uint64_t seed);
  ~Schedule();

  // What the test draws, in the run's threads or before it.
  Random& random() { return random_; }
  // The body runs in a thread of its own once run() is called. The name is a literal.
  void thread(const char* name, std::function<void()> body);
  // Returns when all threads have ended.
  void run();
  // Told with the points if the run fails. The format is a literal, with two numbers.
  void note(const char* format, uint64_t a = 0, uint64_t b = 0);
  [[noreturn]] void fails(const char* what, const char* file, int line);

  void point() override;
  void pause() override;
  void lock(const void* mutex) override;
  bool try_lock(const void* mutex) override;
  void unlock(const void* mutex) override;
  void wait(const void* condition, const void* mutex, uint64_t until) override;
  void notify(const void* condition, bool all) override;
  uint64_t now() override;
  void sleep(uint64_t ns) override;

  uint64_t points() const;
  uint64_t choices() const;  // a hash of which threads went on
  void print() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  Random random_;
};

// Runs `one` once for each of so many schedules (test_rounds of them), or for that of
// FRUGAL_SCHEDULE in the environment alone. `name` is that of its kept seeds.
void explore(const char* name, uint64_t rounds, const std::function<void(Schedule&)>& one);

}  // namespace frugal

// In a schedule's thread, or after its run.
#define HOLDS(schedule, condition)    \
  ((condition) ? static_cast<void>(0) \
               : (schedule).fails("does not hold: " #condition, __FILE__, __LINE__))
