// After a power cut or a kill at any moment the last checkpoint that was acknowledged is restored,
// or a later one.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "support/checkpoint_job.h"
#include "support/child.h"
#include "support/recorded_files.h"

namespace frugal_test::jobs {
namespace {

// --- Power cuts ----------------------------------------------------------------------------------

struct CutCounts {
  uint64_t cuts = 0, nothing = 0, newest = 0, later = 0, went_on = 0;
};

// The folder must have the checkpoint of `acknowledged` steps, or a later one.
void check_folder(const std::string& path, uint64_t acknowledged, bool goes_on,
                  const std::vector<CheckpointJob::State>& known, CutCounts* counts) {
  ++counts->cuts;
  CheckpointJob job;
  CheckpointInfo info;
  if (acknowledged == 0 && !std::filesystem::exists(path)) {
    ++counts->nothing;
    return;
  }
  ASSERT_OK(open_folder(job.engine(), path, 2));
  const int32_t status = restore(job.engine(), nullptr, 0, &info);
  if (status == FRUGAL_ERR_NOT_FOUND && acknowledged == 0) {
    ++counts->nothing;
  } else {
    ASSERT_OK(status);
    ++(steps_of(info) > acknowledged ? counts->later : counts->newest);
  }
  const uint64_t steps = status ? 0 : steps_of(info);
  ASSERT_GE(steps, acknowledged);
  ASSERT_LT(steps, known.size());
  if (status == FRUGAL_OK) CheckpointJob::check_blob(path, info);
  job.start();
  ASSERT_TRUE(job.state() == known[steps]) << "after step " << steps;
  ASSERT_EQ(files_in(path), files_that_belong(path));
  if (!goes_on || steps + 1 >= known.size()) return;
  ++counts->went_on;
  job.step(steps + 1);
  ASSERT_OK(job.checkpoint(&info));
  ASSERT_EQ(files_in(path), files_that_belong(path));
  CheckpointJob next;
  ASSERT_OK(restore(next.engine(), path.c_str(), 0, &info));
  ASSERT_EQ(info.step, steps + 1);
  next.make_tables();
  ASSERT_TRUE(next.state() == known[steps + 1]);
}

TEST(CheckpointCrashes, PowerCuts) {
  constexpr uint64_t kLives = 3, kCheckpoints = 4, kEach = 2;
  const auto known = CheckpointJob::history(kLives * kCheckpoints * kEach * 2 + 2);
  const uint64_t rounds = frugal::test_rounds(1);
  frugal::Random random(frugal::test_seed());
  CutCounts counts;
  TemporaryFolder folder("/dev/shm");
  const std::string path = folder / "job", cut = folder / "cut";
  for (const uint32_t flush_threads : {0, 1}) {
    std::filesystem::remove_all(path);
    RecordedFiles record(path);
    // A process that died has created the folder.
    if (flush_threads) {
      ASSERT_EQ(record.make_folder(AT_FDCWD, path.c_str(), 0700), 0);
    }
    for (uint64_t life = 0; life < kLives; ++life) {
      CheckpointJob job(flush_threads);
      ASSERT_OK(open_folder(job.engine(), path, 2));
      CheckpointInfo info;
      if (life) {
        ASSERT_OK(restore(job.engine(), nullptr, 0, &info));
      }
      job.start();
      uint64_t s = life ? info.step : 0;
      for (uint64_t c = 0; c < kCheckpoints; ++c) {
        for (uint64_t i = 0; i < kEach; ++i) job.step(++s);
        uint64_t sequence = 0;
        ASSERT_OK(frugal_checkpoint(job.engine(), nullptr, &sequence));
        for (uint64_t i = 0; i < kEach; ++i) job.step(++s);
        ASSERT_OK(await_checkpoint(job.engine(), sequence, &info));
        record.mark(info.step);
      }
    }
    frugal::test_file_calls(nullptr);
    uint64_t acknowledged = 0;
    for (size_t n = 0; n <= record.events().size() && !HasFailure(); ++n) {
      if (n && record.events()[n - 1].kind == RecordedFiles::Event::kMark)
        acknowledged = record.events()[n - 1].at;
      using Unsynced = RecordedFiles::Unsynced;
      for (const Unsynced u : {Unsynced::kLost, Unsynced::kKept, Unsynced::kRandom})
        for (uint64_t i = 0; i < (u == Unsynced::kRandom ? rounds : 1) && !HasFailure(); ++i) {
          SCOPED_TRACE("after " + std::to_string(n) + " of " +
                       std::to_string(record.events().size()) + " events, " +
                       (u == Unsynced::kLost   ? "without"
                        : u == Unsynced::kKept ? "with"
                                               : "with some of") +
                       " what is not synced");
          record.rebuild(n, u, random, cut);
          check_folder(cut, acknowledged, random.one_in(4), known, &counts);
        }
    }
  }
  std::printf(
      "%llu power cuts: nothing was there after %llu, the last acknowledged checkpoint "
      "after %llu, a later one after %llu; %llu went on\n",
      static_cast<unsigned long long>(counts.cuts), static_cast<unsigned long long>(counts.nothing),
      static_cast<unsigned long long>(counts.newest), static_cast<unsigned long long>(counts.later),
      static_cast<unsigned long long>(counts.went_on));
}

// --- Kills ---------------------------------------------------------------------------------------

constexpr uint64_t kMostSteps = 40000;
// Of a test. A sanitizer finds faults of memory and of threads in fewer kills.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kKills = 30;
#else
constexpr uint64_t kKills = 150;
#endif

uint64_t hash_of(const CheckpointJob::State& state) {
  uint64_t h = 0;
  for (const auto& table : state) {
    h = h * 0x9e3779b97f4a7c15u + table.size();
    for (const auto& [key, row] : table) {
      h = (h ^ key) * 0x9e3779b97f4a7c15u;
      for (const uint32_t bits : row) h = (h ^ h >> 29 ^ bits) * 0x9e3779b97f4a7c15u;
    }
  }
  return h;
}

// Trains and takes checkpoints until it is killed. Each that is on disk is written to the pipe.
[[noreturn]] void child(const std::string& path, int to, uint32_t flush_threads) {
  CheckpointJob job(flush_threads);
  CheckpointInfo info;
  if (open_folder(job.engine(), path, 2)) _exit(1);
  const int32_t status = restore(job.engine(), nullptr, 0, &info);
  if (status != FRUGAL_OK && status != FRUGAL_ERR_NOT_FOUND) _exit(2);
  job.start();
  uint64_t s = steps_of(info);
  if (status) s = 0;
  for (;;) {
    uint64_t sequence = 0;
    if (frugal_checkpoint(job.engine(), nullptr, &sequence)) _exit(3);
    uint64_t steps = 0;  // while it is written
    for (int32_t waited = FRUGAL_ERR_TIMEOUT; waited != FRUGAL_OK;) {
      const bool trains = steps++ < 12 && s < kMostSteps;
      if (trains) job.step(++s);
      waited = job.checkpoints().wait(sequence, trains ? frugal::now_ns() : UINT64_MAX, &info);
      if (waited != FRUGAL_OK && waited != FRUGAL_ERR_TIMEOUT) _exit(4);
      if (testing::Test::HasFailure()) _exit(5);
    }
    const uint64_t told = steps_of(info);
    if (write(to, &told, sizeof told) != sizeof told) _exit(6);
    // A later checkpoint comes and goes.
    if (sequence % 4 == 0 && s < kMostSteps) {
      job.step(++s);
      if (job.checkpoint(&info) || frugal_checkpoint_delete(job.engine(), info.number)) _exit(7);
    }
  }
}

// A folder that processes write, one after the other. Each is killed.
class KilledJobs {
 public:
  explicit KilledJobs(std::string path) : path_(std::move(path)) { begin(); }

  // A new folder.
  void begin() {
    std::filesystem::remove_all(path_);
    acknowledged_ = 0;
  }
  // Starts a process, which calls of(end of the pipe) in the end.
  template <class Of>
  void start(Of of) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork_child();
    if (pid_ == 0) {
      ::close(ends[0]);
      of(ends[1]);
    }
    ASSERT_GT(pid_, 0);
    ::close(ends[1]);
    from_ = ends[0];
  }
  // Awaits an acknowledgement. False: the process is gone.
  bool read_one() {
    uint64_t told;
    if (::read(from_, &told, sizeof told) != sizeof told) return false;
    EXPECT_GE(told, acknowledged_);
    acknowledged_ = told;
    ++acknowledgements;
    return true;
  }
  void kill_it() { ASSERT_EQ(kill(pid_, SIGKILL), 0); }
  // The process is dead, or is about to be. What it has acknowledged is in the folder.
  void check() {
    int how = 0;
    while (read_one()) {
    }
    ::close(from_);
    ASSERT_EQ(waitpid(pid_, &how, 0), pid_);
    ASSERT_TRUE(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL) << how;
    ++kills;
    if (!std::filesystem::exists(path_)) return;
    // A new engine can write the folder at once, and removes what the old one has left.
    if (files_in(path_) != files_that_belong(path_)) ++strays;
    CheckpointJob job;
    ASSERT_OK(open_folder(job.engine(), path_, 2));
    CheckpointInfo info;
    const int32_t status = restore(job.engine(), nullptr, 0, &info);
    if (acknowledged_ || status != FRUGAL_ERR_NOT_FOUND) {
      ASSERT_OK(status);
    }
    if (status == FRUGAL_OK) CheckpointJob::check_blob(path_, info);
    const uint64_t steps = status ? 0 : steps_of(info);
    ASSERT_GE(steps, acknowledged_);
    ++(steps > acknowledged_ ? later : newest);
    ASSERT_LE(steps, kMostSteps);
    job.start();
    if (known_.size() <= steps) {
      known_.clear();
      CheckpointJob whole;
      whole.start();
      known_.push_back(hash_of(whole.state()));
      for (uint64_t s = 1; s <= steps * 2 && s <= kMostSteps; ++s) {
        whole.step(s);
        known_.push_back(hash_of(whole.state()));
      }
    }
    ASSERT_EQ(hash_of(job.state()), known_[steps]) << "after step " << steps;
    ASSERT_EQ(files_in(path_), files_that_belong(path_));
    acknowledged_ = steps;
  }
  void print() const {
    std::printf(
        "%llu kills, %llu checkpoints acknowledged; %llu times the last acknowledged checkpoint "
        "was there, %llu times a later one; stray files %llu times\n",
        static_cast<unsigned long long>(kills), static_cast<unsigned long long>(acknowledgements),
        static_cast<unsigned long long>(newest), static_cast<unsigned long long>(later),
        static_cast<unsigned long long>(strays));
  }

  uint64_t kills = 0, acknowledgements = 0, newest = 0, later = 0, strays = 0;

 private:
  const std::string path_;
  pid_t pid_ = 0;
  int from_ = -1;
  uint64_t acknowledged_ = 0;    // steps
  std::vector<uint64_t> known_;  // hashes of the tables after so many steps
};

TEST(CheckpointCrashes, Kills) {
  constexpr uint64_t kOfAFolder = 150;
  TemporaryFolder folder("/dev/shm");
  const std::string path = folder / "job";
  KilledJobs jobs(path);
  const uint64_t rounds = frugal::test_rounds(kKills);
  frugal::Random random(frugal::test_seed());
  for (uint64_t round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE("kill " + std::to_string(round));
    if (round % kOfAFolder == 0) jobs.begin();
    jobs.start([&](int to) { child(path, to, round % 2); });
    // The first acknowledgement shows that it trains. Then any moment will do.
    for (uint64_t n = random.below(6); n && jobs.read_one(); --n) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(6000)));
    jobs.kill_it();
    jobs.check();
  }
  jobs.print();
}

// Counts calls on files by their names, as "rename 3.checkpoint.new" without the number, and dies
// at one of them.
class NamedCalls : public frugal::FileCalls {
 public:
  int open(int folder, const char* name, int flags, mode_t mode) const override {
    const bool creates = flags & O_CREAT;
    if (creates) at("create", name);
    const int fd = FileCalls::open(folder, name, flags, mode);
    if (fd >= 0) {
      const frugal::Lock lock(mu_);
      names_[fd] = name;
    }
    return fd;
  }
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t to) const override {
    // Half of it is there.
    if (dies("write", name_of(fd))) {
      FileCalls::write(fd, from, bytes / 2 / 4096 * 4096, to);
      die();
    }
    return FileCalls::write(fd, from, bytes, to);
  }
  int sync(int fd) const override {
    at("sync", name_of(fd));
    return FileCalls::sync(fd);
  }
  int rename(int folder, const char* from, const char* to) const override {
    at("rename", from);
    const int result = FileCalls::rename(folder, from, to);
    at("renamed", from);
    return result;
  }
  int unlink(int folder, const char* name) const override {
    at("unlink", name);
    return FileCalls::unlink(folder, name);
  }

  std::map<std::string, uint64_t> counts() const {
    const frugal::Lock lock(mu_);
    return counts_;
  }
  // The process is killed at the n-th call of this name from now on.
  void die_at(const std::string& point, uint64_t n) {
    const frugal::Lock lock(mu_);
    counts_.clear();
    point_ = point;
    n_ = n;
  }

 private:
  [[noreturn]] static void die() {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  std::string name_of(int fd) const {
    const frugal::Lock lock(mu_);
    const auto found = names_.find(fd);
    return found == names_.end() ? "folder" : found->second;
  }
  bool dies(const char* call, std::string name) const {
    if (name.find('/') != std::string::npos) name = "folder";
    std::erase_if(name, [](char c) { return c >= '0' && c <= '9'; });
    const std::string point = std::string(call) + " " + name;
    const frugal::Lock lock(mu_);
    return ++counts_[point] == n_ && point == point_;
  }
  void at(const char* call, const std::string& name) const {
    if (dies(call, name)) die();
  }

  mutable frugal::Mutex mu_;
  mutable std::map<int, std::string> names_;
  mutable std::map<std::string, uint64_t> counts_;
  std::string point_;
  uint64_t n_ = 0;
};

// Each call on files that checkpoints make, and that deletes old ones, is one at which a process
// dies.
TEST(CheckpointCrashes, KillsAtNamedPoints) {
  TemporaryFolder folder("/dev/shm");
  const std::string path = folder / "job";
  KilledJobs jobs(path);
  frugal::Random random(frugal::test_seed());
  NamedCalls calls;
  frugal::test_file_calls(&calls);
  {
    CheckpointJob job;
    ASSERT_OK(open_folder(job.engine(), path, 2));
    job.start();
    for (uint64_t s = 1; s <= 12; ++s) {
      CheckpointInfo info;
      job.step(s);
      ASSERT_OK(job.checkpoint(&info));
      if (s % 4 == 0) {
        ASSERT_OK(frugal_checkpoint_delete(job.engine(), info.number));
      }
    }
  }
  const std::map<std::string, uint64_t> points = calls.counts();
  const uint64_t each = frugal::test_rounds(2);
  for (const auto& [point, count] : points) {
    if (point.starts_with("create lock") || point.starts_with("create folder")) continue;
    jobs.begin();
    for (uint64_t i = 0; i < each && !HasFailure(); ++i) {
      const uint64_t n = 1 + random.below(count);
      SCOPED_TRACE(point + ", call " + std::to_string(n));
      jobs.start([&](int to) {
        calls.die_at(point, n);
        child(path, to, i % 2);
      });
      jobs.check();
    }
    std::printf("%6llu x %s\n", static_cast<unsigned long long>(each), point.c_str());
  }
  frugal::test_file_calls(nullptr);
  EXPECT_GE(points.size(), 17);
  jobs.print();
}

}  // namespace
}  // namespace frugal_test::jobs
