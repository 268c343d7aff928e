// Handles: what they name, when they end, and calls of several threads that use them meanwhile.
#include "base/handles.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "support/inside.h"

namespace frugal::handles_test {

std::shared_ptr<void> object(uint64_t value) { return std::make_shared<uint64_t>(value); }

uint64_t value_of(const std::shared_ptr<void>& object) {
  return *static_cast<const uint64_t*>(object.get());
}

TEST(Handles, NameOneObjectOfTheirKindUntilTheyAreRemoved) {
  const uint64_t one = handle_add(HandleKind::kTable, object(7));
  ASSERT_NE(one, 0u);
  EXPECT_EQ(value_of(handle_get(HandleKind::kTable, one)), 7u);
  EXPECT_EQ(handle_get(HandleKind::kBatch, one), nullptr);
  EXPECT_EQ(handle_remove(HandleKind::kBatch, one), nullptr) << "it is a table";
  EXPECT_EQ(value_of(handle_remove(HandleKind::kTable, one)), 7u);
  EXPECT_EQ(handle_get(HandleKind::kTable, one), nullptr);
  EXPECT_EQ(handle_remove(HandleKind::kTable, one), nullptr);
  // The place is used again, by a handle that is another.
  const uint64_t next = handle_add(HandleKind::kTable, object(8));
  EXPECT_NE(next, one);
  EXPECT_EQ(handle_get(HandleKind::kTable, one), nullptr);
  EXPECT_EQ(value_of(handle_remove(HandleKind::kTable, next)), 8u);
}

TEST(Handles, NumbersThatNeverWereOne) {
  for (const uint64_t wrong : {uint64_t{0}, uint64_t{1} << 20, uint64_t{0xfffff}, ~uint64_t{0}})
    for (const HandleKind kind : {HandleKind::kEngine, HandleKind::kTable}) {
      EXPECT_EQ(handle_get(kind, wrong), nullptr) << wrong;
      EXPECT_EQ(handle_remove(kind, wrong), nullptr) << wrong;
    }
}

TEST(Handles, ManyAtATime) {
  std::vector<uint64_t> open;
  for (uint64_t i = 0; i < 5000; ++i) open.push_back(handle_add(HandleKind::kBatch, object(i)));
  for (uint64_t i = 0; i < open.size(); ++i)
    ASSERT_EQ(value_of(handle_get(HandleKind::kBatch, open[i])), i);
  for (const uint64_t handle : open) ASSERT_NE(handle_remove(HandleKind::kBatch, handle), nullptr);
}

// Each object is removed once, by whichever thread. A thread that has got it has it whole.
TEST(Handles, ThreadsThatUseAndRemoveTheSame) {
  constexpr uint64_t kRounds = 2000;
  std::atomic<uint64_t> shown{0}, removed{0}, wrong{0};
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int k = 0; k < 3; ++k)
    threads.emplace_back([&, k] {
      uint64_t last = 0;
      while (!done.load()) {
        const uint64_t handle = shown.load();
        const std::shared_ptr<void> got = handle_get(HandleKind::kTrainer, handle);
        if (got && (value_of(got) == 0 || value_of(got) > kRounds)) ++wrong;
        if (handle != last && k == 0 && handle_remove(HandleKind::kTrainer, handle)) ++removed;
        last = handle;
      }
    });
  for (uint64_t i = 1; i <= kRounds; ++i) {
    const uint64_t handle = handle_add(HandleKind::kTrainer, object(i));
    shown.store(handle);
    if (i % 3 == 0) std::this_thread::yield();
    if (const auto mine = handle_remove(HandleKind::kTrainer, handle)) {
      EXPECT_EQ(value_of(mine), i);
      ++removed;
    }
  }
  done.store(true);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(removed.load(), kRounds);
  EXPECT_EQ(wrong.load(), 0u);
}

TEST(Handles, AChildIsToldApart) {
  const uint64_t handle = handle_add(HandleKind::kEngine, object(5));
  std::atomic<bool> done{false};
  std::thread busy([&] {  // which holds the slot's lock when it is forked, now and then
    while (!done.load()) handle_get(HandleKind::kEngine, handle);
  });
  const uint32_t mine = process_generation();
  int wrong = 0;
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const bool found = handle_get(HandleKind::kEngine, handle) != nullptr;
      _exit(found && process_generation() != mine ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    wrong += status != 0;
  }
  done.store(true);
  busy.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_NE(handle_remove(HandleKind::kEngine, handle), nullptr);
}

}  // namespace frugal::handles_test
