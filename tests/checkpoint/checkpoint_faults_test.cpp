// The n-th call on files, or for memory, fails while checkpoints are taken or restored: training
// goes on, and what was acknowledged is restored.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/checkpoint_job.h"
#include "support/file_calls.h"

namespace frugal_test::jobs {
namespace {

using frugal::TestFileCalls;

// Each call on files fails in turn. ThreadSanitizer finds races, and takes each fifth of them.
#if defined(__SANITIZE_THREAD__)
constexpr int64_t kEach = 5;
#else
constexpr int64_t kEach = 1;
#endif

constexpr uint64_t kCheckpoints = 4, kFaultSteps = 4 * kCheckpoints + 8;

const std::vector<CheckpointJob::State>& known() {
  static const auto all = CheckpointJob::history(kFaultSteps + 2);
  return all;
}

bool is_named(int32_t status) {
  return status == FRUGAL_ERR_IO || status == FRUGAL_ERR_NO_SPACE ||
         status == FRUGAL_ERR_OUT_OF_MEMORY;
}

// Restores the newest checkpoint into a new engine, which then takes one more.
void restore_newest(const std::string& path, const CheckpointInfo& acknowledged) {
  CheckpointJob job;
  ASSERT_OK(open_folder(job.engine(), path, 2));
  CheckpointInfo info;
  const int32_t status = restore(job.engine(), nullptr, 0, &info);
  if (acknowledged.number || status != FRUGAL_ERR_NOT_FOUND) {
    ASSERT_OK(status);
  }
  ASSERT_GE(info.number, acknowledged.number);
  job.start();
  const uint64_t steps = status ? 0 : steps_of(info);
  ASSERT_GE(steps, acknowledged.number ? steps_of(acknowledged) : 0);
  ASSERT_TRUE(job.state() == known()[steps]) << "after step " << steps;
  // It has none if the folder was opened after its step.
  if (status == FRUGAL_OK && info.blobs > 0) CheckpointJob::check_blob(path, info);
  job.step(steps + 1);
  ASSERT_OK(job.checkpoint(&info));
  ASSERT_EQ(info.step, steps + 1);
  ASSERT_EQ(files_in(path), files_that_belong(path));
}

void restore_to(const std::string& path, uint64_t steps) {
  CheckpointJob job;
  CheckpointInfo info;
  ASSERT_OK(restore(job.engine(), path.c_str(), 0, &info));
  ASSERT_EQ(steps_of(info), steps);
  job.make_tables();
  ASSERT_TRUE(job.state() == known()[steps]);
  CheckpointJob::check_blob(path, info);
}

// Steps 1 to 8 of a job, with a checkpoint of each, of which two are kept.
void take_eight(const std::string& path) {
  CheckpointJob job;
  ASSERT_OK(open_folder(job.engine(), path, 2));
  job.start();
  for (uint64_t s = 1; s <= 8; ++s) {
    job.step(s);
    ASSERT_OK(job.checkpoint());
  }
}

struct Fault {
  int code = 0;  // 0: none
  bool forever = false;
  uint32_t flush_threads = 0;
};

struct Seen {
  uint64_t failures = 0, runs = 0, poisoned = 0, failed_checkpoints = 0, failed_opens = 0,
           newer = 0;
};

// The job; its n-th call on files fails. `*more`: a later one can fail.
void one_fault(const Fault& fault, int64_t n, bool* more, Seen* seen) {
  SCOPED_TRACE("call " + std::to_string(n) + ", errno " + std::to_string(fault.code) +
               (fault.forever ? ", for ever" : ", once"));
  TemporaryFolder folder("/dev/shm");
  const std::string path = folder / "a", other = folder / "b";
  const size_t descriptors = open_descriptors();
  CheckpointInfo acknowledged;
  {
    TestFileCalls calls;
    CheckpointJob job(fault.flush_threads);
    job.start();
    calls.fail(n, fault.code, fault.forever);
    const auto check = [&](int32_t status) {
      const std::string said = LastMessage();
      EXPECT_TRUE(is_named(status)) << status << ": " << said;
      EXPECT_TRUE(fault.code != ENOSPC || status != FRUGAL_ERR_OUT_OF_MEMORY);
      EXPECT_NE(said.find(folder.path()), std::string::npos) << said;
    };
    uint64_t s = 0;
    bool opened = false;
    std::string first_failure;
    for (uint64_t c = 0; c < kCheckpoints; ++c) {
      for (int i = 0; i < 2; ++i) job.step(++s);
      if (!opened) {
        const int32_t status = open_folder(job.engine(), path, 2);
        opened = status == FRUGAL_OK;
        if (!opened) {
          check(status);
          ++seen->failed_opens;
        }
      }
      uint64_t sequence = 0;
      CheckpointInfo info;
      int32_t status =
          opened ? frugal_checkpoint(job.engine(), nullptr, &sequence) : int32_t{FRUGAL_ERR_IO};
      const bool requested = status == FRUGAL_OK;
      if (opened && !requested) check(status);
      const uint64_t at = s;
      for (int i = 0; i < 2; ++i) job.step(++s);
      if (!requested) continue;
      status = await_checkpoint(job.engine(), sequence, &info);
      if (status == FRUGAL_OK) {
        EXPECT_EQ(info.step, at);
        acknowledged = info;
      } else {
        check(status);
        ++seen->failed_checkpoints;
      }
      if (opened && job.checkpoints().folder()->may_write() == FRUGAL_OK && status != FRUGAL_OK &&
          !fault.forever) {
        // Nothing of it stays, though no other checkpoint has been written since.
        EXPECT_EQ(files_in(path), files_that_belong(path));
      }
      if (opened && job.checkpoints().folder()->may_write()) {
        const std::string said = LastMessage();
        if (first_failure.empty()) first_failure = said;
        EXPECT_EQ(first_failure, said);
        EXPECT_NE(said.find("could not be synced"), std::string::npos) << said;
      }
    }
    *more = calls.failed() > 0;
    seen->failures += static_cast<uint64_t>(calls.failed());
    ++seen->runs;
    calls.fail(0, 0);
    if (!opened) {
      ASSERT_OK(open_folder(job.engine(), path, 2));
    }
    job.step(++s);
    CheckpointInfo info;
    if (job.checkpoints().folder()->may_write() == FRUGAL_OK) {
      ASSERT_OK(job.checkpoint(&info));
      acknowledged = info;
    } else {
      ++seen->poisoned;
      uint64_t sequence;
      EXPECT_EQ(frugal_checkpoint(job.engine(), nullptr, &sequence), FRUGAL_ERR_IO);
      EXPECT_EQ(LastMessage(), first_failure);
      ASSERT_OK(frugal_folder_close(job.engine()));
      ASSERT_OK(open_folder(job.engine(), other, 2));
      ASSERT_OK(job.checkpoint(&info));
      restore_to(other, s);
    }
    EXPECT_EQ(steps_of(info), s);
    ASSERT_TRUE(job.state() == known()[s]) << "training";
  }
  ASSERT_EQ(open_descriptors(), descriptors);
  restore_newest(path, acknowledged);
  ASSERT_EQ(open_descriptors(), descriptors);
}

TEST(CheckpointFaults, EachCallOnFilesFails) {
  Seen seen;
  for (const Fault fault : {Fault{EIO, false, 0}, Fault{ENOSPC, false, 1}, Fault{EIO, true, 1},
                            Fault{ENOSPC, true, 0}}) {
    bool more = true;
    for (int64_t n = 1; more && !HasFailure(); n += kEach) {
      one_fault(fault, n, &more, &seen);
    }
  }
  std::printf(
      "%llu runs, %llu calls failed; %llu checkpoints failed, %llu openings; %llu folders "
      "were written no more\n",
      static_cast<unsigned long long>(seen.runs), static_cast<unsigned long long>(seen.failures),
      static_cast<unsigned long long>(seen.failed_checkpoints),
      static_cast<unsigned long long>(seen.failed_opens),
      static_cast<unsigned long long>(seen.poisoned));
}

// Interrupted calls and short counts are gone on with.
TEST(CheckpointFaults, InterruptedAndShort) {
  for (const size_t bytes : {size_t{100}, size_t{4096}})
    for (const uint32_t flush_threads : {0, 1}) {
      TemporaryFolder folder;
      const std::string path = folder / "a";
      CheckpointInfo info;
      {
        TestFileCalls calls;
        calls.refuse_direct(bytes % 512 != 0);
        calls.shorten(bytes);
        calls.interrupt(2);
        CheckpointJob job(flush_threads);
        ASSERT_OK(open_folder(job.engine(), path, 2));
        job.start();
        for (uint64_t s = 1; s <= 8; ++s) {
          job.step(s);
          ASSERT_OK(job.checkpoint(&info));
        }
        EXPECT_EQ(info.step, 8u);
        restore_to(path, 8);
      }
      restore_newest(path, info);
    }
}

// The n-th call on files fails while a checkpoint is restored: nothing is there, and the next
// attempt restores all.
TEST(CheckpointFaults, EachCallOfARestoreFails) {
  TemporaryFolder folder("/dev/shm");
  ASSERT_NO_FATAL_FAILURE(take_eight(folder.path()));
  for (const bool own : {false, true})
    for (const bool forever : {false, true}) {
      int64_t n = 0;
      for (bool more = true; more && !HasFailure();) {
        SCOPED_TRACE("call " + std::to_string(n += kEach));
        const size_t descriptors = open_descriptors();
        {
          TestFileCalls calls;
          CheckpointJob job;
          if (own) {
            ASSERT_OK(open_folder(job.engine(), folder.path(), 2));
          }
          const size_t with_folder = open_descriptors();
          const char* const path = own ? nullptr : folder.path().c_str();
          calls.fail(n, EIO, forever);
          CheckpointInfo info;
          const int32_t status = restore(job.engine(), path, 0, &info);
          more = calls.failed() > 0;
          calls.fail(0, 0);
          if (status != FRUGAL_OK) {
            EXPECT_EQ(status, FRUGAL_ERR_IO);
            EXPECT_NE(LastMessage().find(folder.path()), std::string::npos) << LastMessage();
            EXPECT_EQ(open_descriptors(), with_folder);
            ASSERT_OK(restore(job.engine(), path, 0, &info));
          }
          EXPECT_EQ(info.step, 8u);
          job.start();
          ASSERT_TRUE(job.state() == known()[8]);
        }
        ASSERT_EQ(open_descriptors(), descriptors);
      }
      std::printf("%lld calls\n", static_cast<long long>(n));
    }
}

// A checkpoint fails after it has saved a row anew. Then the row is deleted, and its old record
// does not come back.
TEST(CheckpointFaults, ADeletionAfterAFailedCheckpoint) {
  uint64_t failures = 0;
  for (int64_t n = 1;; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    TemporaryFolder folder("/dev/shm");
    TestFileCalls calls;
    Engine engine;
    frugal_table* const table = engine.Table("t", FRUGAL_HASHED, 10, 2);
    const std::vector<float> rows(6, 1);
    const std::vector<uint64_t> keys = {1, 2, 3};
    const auto checkpoint = [&] {
      uint64_t number = 0;
      FRUGAL_TRY(frugal_checkpoint(engine, nullptr, &number));
      return await_checkpoint(engine, number, nullptr);
    };
    ASSERT_OK(open_folder(engine, folder.path(), 2));
    ASSERT_OK(frugal_put(table, keys.data(), 3, 0, rows.data(), 0));
    ASSERT_OK(checkpoint());
    ASSERT_OK(frugal_put(table, keys.data(), 2, 0, rows.data(), 0));
    calls.fail(n, EIO);
    const int32_t status = checkpoint();
    const bool more = calls.failed() > 0;
    calls.fail(0, 0);
    const uint64_t gone = 1;
    ASSERT_OK(frugal_delete(table, &gone, 1, nullptr));
    const int32_t next = checkpoint();
    if (next == FRUGAL_OK) {
      failures += status != FRUGAL_OK ? 1 : 0;
      Engine again;
      ASSERT_OK(restore(again, folder.path().c_str(), 0, nullptr));
      frugal_table* restored = nullptr;
      uint64_t count = 0;
      ASSERT_OK(frugal_table_find(again, "t", &restored));
      ASSERT_OK(frugal_table_count(restored, &count));
      EXPECT_EQ(count, 2);
    }
    if (!more) break;
  }
  EXPECT_GT(failures, 3);
}

// Writes of records wait, as on a slow disk.
class SlowWrites : public frugal::FileCalls {
 public:
  SlowWrites() { frugal::test_file_calls(this); }
  ~SlowWrites() override { frugal::test_file_calls(nullptr); }
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const override {
    while (slow_) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return FileCalls::write(fd, from, bytes, at);
  }
  void end() { slow_ = false; }

 private:
  std::atomic<bool> slow_{true};
};

// Puts and deletions while a checkpoint is written wait for its disk: their copies have a budget.
TEST(CheckpointFaults, CopiesOfAPutHaveABudget) {
  constexpr uint64_t kRows = 40'000;
  constexpr uint32_t kDim = 64;
  for (const bool deletes : {false, true}) {
    TemporaryFolder folder("/dev/shm");
    Engine engine;
    frugal_table* table = engine.Table("t", FRUGAL_HASHED, kRows, kDim);
    std::vector<uint64_t> keys(kRows);
    for (uint64_t i = 0; i < kRows; ++i) keys[i] = i * 7;
    std::vector<float> rows(kRows * kDim, 1);
    ASSERT_OK(open_folder(engine, folder.path(), 1));
    ASSERT_OK(frugal_put(table, keys.data(), kRows, 0, rows.data(), 0));
    std::atomic<bool> done{false};
    SlowWrites writes;
    frugal::checkpoint_test_budget(0);
    frugal::checkpoint_test_pause(1'000'000);  // the checkpoint's thread leaves rows to the call
    uint64_t number = 0;
    ASSERT_OK(frugal_checkpoint(engine, nullptr, &number));
    std::thread caller([&] {
      if (deletes) {
        EXPECT_OK(frugal_delete(table, keys.data(), kRows, nullptr));
      } else {
        EXPECT_OK(frugal_put(table, keys.data(), kRows, 0,
                             std::vector<float>(kRows * kDim, 2).data(), 0));
      }
      done = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_FALSE(done);
    writes.end();
    caller.join();
    frugal::checkpoint_test_pause(0);
    ASSERT_OK(await_checkpoint(engine, number, nullptr));
    frugal::checkpoint_test_budget(uint64_t{32} << 20);
    Engine again;
    ASSERT_OK(restore(again, folder.path().c_str(), 0, nullptr));
    frugal_table* restored = nullptr;
    ASSERT_OK(frugal_table_find(again, "t", &restored));
    std::vector<float> got(kRows * kDim);
    ASSERT_OK(frugal_get(restored, keys.data(), kRows, 0, got.data(), 0, nullptr));
    EXPECT_EQ(got, rows) << "as they were";
  }
}

// The n-th call on files, or the n-th allocation, fails while a checkpoint is copied: there is no
// copy, and the next attempt makes it.
TEST(CheckpointFaults, EachCallOfACopyFails) {
  TemporaryFolder folder("/dev/shm"), elsewhere("/tmp");
  ASSERT_NO_FATAL_FAILURE(take_eight(folder.path()));
  const std::string copies[] = {folder / "copy", elsewhere / "copy"};
  for (const std::string& to : copies)
    for (const int code : {EIO, ENOSPC, 0}) {
      int64_t n = 0;
      for (bool more = true; more && !HasFailure();) {
        SCOPED_TRACE(to + ", call " + std::to_string(++n) + " fails with " + std::to_string(code));
        const size_t descriptors = open_descriptors();
        std::filesystem::remove_all(to);
        TestFileCalls calls;
        const auto copy = [&] {
          return frugal_checkpoint_copy(folder.path().c_str(), 0, to.c_str());
        };
        int32_t status;
        if (code) {
          calls.fail(n, code);
          status = copy();
          more = calls.failed() > 0;
          calls.fail(0, 0);
        } else {
          const frugal::HeapFails fails(n);
          status = copy();
          more = status != FRUGAL_OK;
        }
        ASSERT_EQ(open_descriptors(), descriptors);
        if (status != FRUGAL_OK) {
          EXPECT_TRUE(is_named(status)) << status << ": " << LastMessage();
          // After the last sync has failed the copy is whole.
          if (copy() != FRUGAL_OK) {
            EXPECT_EQ(copy(), FRUGAL_ERR_EXISTS);
          }
        }
        restore_to(to, 8);
      }
      std::printf("%lld calls\n", static_cast<long long>(n));
    }
}

// Likewise while a folder is opened again, restored, and written: each call can be made again.
TEST(CheckpointFaults, EachCallOfASecondLifeFails) {
  int64_t n = 0;
  uint64_t poisoned = 0;
  for (bool more = true; more && !HasFailure();) {
    SCOPED_TRACE("call " + std::to_string(n += kEach));
    TemporaryFolder folder("/dev/shm");
    CheckpointInfo info;
    {
      CheckpointJob job;
      ASSERT_OK(open_folder(job.engine(), folder.path(), 1));
      job.start();
      for (uint64_t s = 1; s <= 6; ++s) {
        job.step(s);
        ASSERT_OK(job.checkpoint(&info));
      }
    }
    // What a process that died has left.
    folder.Write("100.rows", "half a file");
    folder.Write("7.checkpoint.new", "half a manifest");
    {
      TestFileCalls calls;
      CheckpointJob job;
      calls.fail(n, EIO);
      for (int i = 0; open_folder(job.engine(), folder.path(), 1) != FRUGAL_OK; ++i)
        ASSERT_LT(i, 1) << LastMessage();
      for (int i = 0; restore(job.engine(), nullptr, 0, &info) != FRUGAL_OK; ++i)
        ASSERT_LT(i, 1) << LastMessage();
      ASSERT_EQ(info.step, 6u);
      frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
      config.name = "more";
      config.rows = 10;
      config.dim = 1;
      frugal_table* table = nullptr;
      ASSERT_OK(frugal_table_create(job.engine(), &config, &table));
      job.start();
      for (uint64_t s = 7; s <= 9; ++s) {
        job.step(s);
        if (job.checkpoint(&info) == FRUGAL_OK) continue;
        ASSERT_NE(LastMessage().find(folder.path()), std::string::npos) << LastMessage();
        if (job.checkpoints().folder()->may_write()) break;
        ASSERT_OK(job.checkpoint(&info));
      }
      more = calls.failed() > 0;
      poisoned += job.checkpoints().folder()->may_write() != FRUGAL_OK;
    }
    restore_newest(folder.path(), info);
  }
  std::printf("%lld calls, %llu folders were written no more\n", static_cast<long long>(n),
              static_cast<unsigned long long>(poisoned));
}

// Likewise the n-th allocation.
TEST(CheckpointFaults, EachAllocationOfARestoreFails) {
  TemporaryFolder folder("/dev/shm");
  ASSERT_NO_FATAL_FAILURE(take_eight(folder.path()));
  for (const bool own : {false, true}) {
    int64_t n = 0;
    for (int32_t status = FRUGAL_ERR_OUT_OF_MEMORY; status != FRUGAL_OK && !HasFailure();) {
      SCOPED_TRACE("allocation " + std::to_string(++n));
      CheckpointJob job;
      if (own) {
        ASSERT_OK(open_folder(job.engine(), folder.path(), 2));
      }
      const char* const path = own ? nullptr : folder.path().c_str();
      CheckpointInfo info;
      try {
        const frugal::HeapFails fails(n);
        status = restore(job.engine(), path, 0, &info);
      } catch (const std::bad_alloc&) {
        status = FRUGAL_ERR_OUT_OF_MEMORY;  // as the C ABI reports it
      }
      if (status != FRUGAL_OK) {
        ASSERT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
        ASSERT_OK(restore(job.engine(), path, 0, &info));
      }
      ASSERT_EQ(info.step, 8u);
      job.start();
      ASSERT_TRUE(job.state() == known()[8]);
    }
    std::printf("%lld allocations\n", static_cast<long long>(n));
  }
}

// The n-th allocation fails while a checkpoint is taken and written. The next one works.
TEST(CheckpointFaults, EachAllocationOfACheckpointFails) {
  for (const uint32_t flush_threads : {0, 1}) {
    int64_t n = 0, failed = 0;
    for (bool more = true; more && !HasFailure();) {
      SCOPED_TRACE("allocation " + std::to_string(++n));
      TemporaryFolder folder("/dev/shm");
      CheckpointInfo info;
      {
        CheckpointJob job(flush_threads);
        ASSERT_OK(open_folder(job.engine(), folder.path(), 2));
        job.start();
        for (uint64_t s = 1; s <= 6; ++s) {
          job.step(s);
          if (s % 2 == 0) {
            ASSERT_OK(job.checkpoint(&info));
          }
        }
        job.step(7);
        int32_t status;
        {
          const frugal::HeapFails fails(n);
          uint64_t sequence = 0;
          try {
            status = frugal_checkpoint(job.engine(), nullptr, &sequence);
          } catch (const std::bad_alloc&) {
            status = FRUGAL_ERR_OUT_OF_MEMORY;
          }
          // (A waiter that has no memory asks again.)
          for (bool again = status == FRUGAL_OK; again;) {
            again = false;
            try {
              status = await_checkpoint(job.engine(), sequence, &info);
            } catch (const std::bad_alloc&) {
              again = true;
            }
          }
          more = frugal::heap_test_fail_after(0) <= 0;
        }
        if (status != FRUGAL_OK) {
          ++failed;
          ASSERT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
        } else {
          ASSERT_EQ(info.step, 7u);
        }
        ASSERT_TRUE(job.state() == known()[7]);
        restore_to(folder.path(), status ? 6 : 7);
        job.step(8);
        ASSERT_OK(job.checkpoint(&info));
        ASSERT_EQ(info.step, 8u);
        restore_to(folder.path(), 8);
        ASSERT_EQ(files_in(folder.path()), files_that_belong(folder.path()));
      }
      restore_newest(folder.path(), info);
    }
    std::printf("%lld allocations, %lld checkpoints failed\n", static_cast<long long>(n),
                static_cast<long long>(failed));
  }
}

// Likewise while it is written and steps are trained, which are tried again. What a checkpoint
// copies before a write is part of them.
TEST(CheckpointFaults, EachAllocationOfAStepDuringACheckpointFails) {
  for (const uint32_t flush_threads : {0, 1}) {
    uint64_t failed = 0, repeated = 0;
    int64_t n = 0;
    for (bool more = true; more && !HasFailure();) {
      SCOPED_TRACE("allocation " + std::to_string(++n));
      TemporaryFolder folder("/dev/shm");
      CheckpointJob job(flush_threads);
      ASSERT_OK(open_folder(job.engine(), folder.path(), 2));
      job.start();
      uint64_t s = 0;
      CheckpointInfo info;
      for (int i = 0; i < 4; ++i) job.step(++s);
      ASSERT_OK(job.checkpoint(&info));
      for (int i = 0; i < 3; ++i) job.step(++s);
      uint64_t sequence = 0;
      ASSERT_OK(frugal_checkpoint(job.engine(), nullptr, &sequence));
      {
        const frugal::HeapFails fails(n);
        for (int i = 0; i < 2; ++i) job.step(++s, &repeated);
        more = frugal::heap_test_fail_after(0) <= 0;
      }
      const int32_t status = await_checkpoint(job.engine(), sequence, &info);
      if (status) {
        ++failed;
        ASSERT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
      } else {
        ASSERT_EQ(info.step, 7u);
      }
      ASSERT_TRUE(job.state() == known()[s]);
      restore_to(folder.path(), status ? 4 : 7);
      ASSERT_OK(job.checkpoint(&info));
      restore_to(folder.path(), s);
    }
    std::printf("%lld allocations, %llu checkpoints failed, %llu calls were repeated\n",
                static_cast<long long>(n), static_cast<unsigned long long>(failed),
                static_cast<unsigned long long>(repeated));
  }
}

}  // namespace
}  // namespace frugal_test::jobs
