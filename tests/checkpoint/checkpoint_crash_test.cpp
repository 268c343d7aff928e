// After a power cut or a kill at any moment the last checkpoint that was acknowledged is restored,
// or a later one.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>

#include <chrono>
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
  }
}

TEST(CheckpointCrashes, Kills) {
  std::vector<uint64_t> known;
  {
    CheckpointJob job;
    job.start();
    known.push_back(hash_of(job.state()));
  }
  TemporaryFolder folder("/dev/shm");
  const std::string path = folder / "job";
  const uint64_t rounds = frugal::test_rounds(30);
  frugal::Random random(frugal::test_seed());
  uint64_t acknowledged = 0, acknowledgements = 0, newest = 0, later = 0, strays = 0;
  for (uint64_t round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE("kill " + std::to_string(round));
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = fork_child();
    if (pid == 0) {
      ::close(ends[0]);
      child(path, ends[1], round % 2);
    }
    ASSERT_GT(pid, 0);
    ::close(ends[1]);
    // The first acknowledgement shows that it trains. Then any moment will do.
    const auto read_one = [&] {
      uint64_t told;
      if (::read(ends[0], &told, sizeof told) != sizeof told) return false;
      EXPECT_GE(told, acknowledged);
      acknowledged = told;
      ++acknowledgements;
      return true;
    };
    for (uint64_t n = random.below(6); n && read_one(); --n) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(6000)));
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    int how = 0;
    ASSERT_EQ(waitpid(pid, &how, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL) << how;
    while (read_one()) {
    }
    ::close(ends[0]);
    if (!std::filesystem::exists(path)) continue;
    // A new engine can write the folder at once, and removes what the old one has left.
    if (files_in(path) != files_that_belong(path)) ++strays;
    CheckpointJob job;
    ASSERT_OK(open_folder(job.engine(), path, 2));
    CheckpointInfo info;
    const int32_t status = restore(job.engine(), nullptr, 0, &info);
    if (acknowledged || status != FRUGAL_ERR_NOT_FOUND) {
      ASSERT_OK(status);
    }
    if (status == FRUGAL_OK) CheckpointJob::check_blob(path, info);
    const uint64_t steps = status ? 0 : steps_of(info);
    ASSERT_GE(steps, acknowledged);
    ++(steps > acknowledged ? later : newest);
    ASSERT_LE(steps, kMostSteps);
    job.start();
    if (known.size() <= steps) {
      known.clear();
      CheckpointJob whole;
      whole.start();
      known.push_back(hash_of(whole.state()));
      for (uint64_t s = 1; s <= steps * 2 && s <= kMostSteps; ++s) {
        whole.step(s);
        known.push_back(hash_of(whole.state()));
      }
    }
    ASSERT_EQ(hash_of(job.state()), known[steps]) << "after step " << steps;
    ASSERT_EQ(files_in(path), files_that_belong(path));
    acknowledged = steps;
  }
  std::printf(
      "%llu kills, %llu checkpoints acknowledged, %llu steps; %llu times the last "
      "acknowledged checkpoint was there, %llu times a later one; stray files %llu times\n",
      static_cast<unsigned long long>(rounds), static_cast<unsigned long long>(acknowledgements),
      static_cast<unsigned long long>(acknowledged), static_cast<unsigned long long>(newest),
      static_cast<unsigned long long>(later), static_cast<unsigned long long>(strays));
}

}  // namespace
}  // namespace frugal_test::jobs
