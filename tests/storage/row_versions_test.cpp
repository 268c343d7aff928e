// Concurrent reads return a row as before or after a write, and wait for a vanished writer no
// longer than their limit.
#include "storage/row_versions.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "support/inside.h"

namespace frugal::row_versions_test {

Status always() { return FRUGAL_OK; }

struct alignas(64) Row {
  static constexpr size_t kFloats = 1023;
  float at[kFloats + 1];
};

void write(VersionWord& word, Row* row, float value) {
  Row next;
  std::fill_n(next.at, Row::kFloats + 1, value);
  begin_write(word);
  store_shared(row->at, next.at, Row::kFloats);
  end_write(word);
}

bool whole(const Row& row) {
  return std::all_of(row.at, row.at + Row::kFloats, [&](float f) { return f == row.at[0]; });
}

TEST(RowVersions, EachWriteIsANewVersion) {
  VersionWord word{6};
  begin_write(word);
  EXPECT_EQ(word.load(), 7u) << "odd while the row is written";
  end_write(word);
  EXPECT_EQ(word.load(), 8u);
  word.store(UINT32_MAX - 1);
  begin_write(word);
  end_write(word);
  EXPECT_EQ(word.load(), 0u);
}

TEST(RowVersions, RowsOfATableShareFewWords) {
  std::set<size_t> words;
  for (uint32_t slot = 0; slot < 100000; ++slot) words.insert(version_of(77, slot));
  EXPECT_EQ(*words.rbegin(), kVersionWords - 1);
  EXPECT_EQ(words.size(), kVersionWords);
  EXPECT_NE(version_of(1, 5), version_of(2, 5));
}

// All floats are copied, also odd numbers of them, and none after them but the one that makes the
// number even.
TEST(RowVersions, WhatIsCopied) {
  for (const size_t n : {1, 2, 3, 16, 33}) {
    alignas(8) float from[64], to[64];
    for (size_t i = 0; i < 64; ++i) from[i] = static_cast<float>(i + 1);
    for (const bool load : {false, true}) {
      std::fill_n(to, 64, 0.0f);
      if (load)
        load_shared(from, to, n);
      else
        store_shared(to, from, n);
      for (size_t i = 0; i < 64; ++i) {
        ASSERT_EQ(to[i], i < (n + 1) / 2 * 2 ? from[i] : 0) << n << " " << i;
      }
    }
  }
}

// A row that changes between a reader's two loads of its word is copied again. The reader's own
// go_on() makes the change. The reader calls it for the write that it finds first.
TEST(RowVersions, ALookThatMissesIsRepeated) {
  VersionWord word{0};
  Row row, copy;
  write(word, &row, 1);
  begin_write(word);
  int asked = 0;
  ASSERT_OK(read_row(word, row.at, Row::kFloats, copy.at, [&] {
    if (++asked == 3) {
      Row next;
      std::fill_n(next.at, Row::kFloats + 1, 2.0f);
      store_shared(row.at, next.at, Row::kFloats);
      end_write(word);
    }
    return Status{FRUGAL_OK};
  }));
  EXPECT_EQ(asked, 3);
  EXPECT_TRUE(whole(copy));
  EXPECT_EQ(copy.at[0], 2);
  EXPECT_EQ(word.load(), 4u) << "a reader leaves the word alone";
}

// Two rows of one word, a writer for each, and concurrent readers: every copy is whole, and no
// reader returns to an earlier write.
TEST(RowVersions, ReadersBesideWriters) {
  auto rows = std::make_unique<Row[]>(2);
  VersionWord word{0};
  for (int r = 0; r < 2; ++r) write(word, &rows[r], 0);
  const uint32_t writes = static_cast<uint32_t>(test_rounds(20000));
  std::atomic<int> writing{2};
  std::atomic<uint64_t> torn{0}, backwards{0}, reads{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      for (uint32_t i = 1; i <= writes; ++i) write(word, &rows[r], static_cast<float>(i % 1000000));
      --writing;
    });
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      float last = 0;
      for (bool more = true; more;) {
        more = writing.load() != 0;
        Row copy;
        if (read_row(word, rows[r].at, Row::kFloats, copy.at, always) != FRUGAL_OK) ++torn;
        if (!whole(copy)) ++torn;
        if (copy.at[0] < last) ++backwards;
        last = copy.at[0];
        ++reads;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(torn.load(), 0u) << "of " << reads.load();
  EXPECT_EQ(backwards.load(), 0u);
  EXPECT_EQ(word.load(), 2 * (2 + 2 * writes)) << "each write is a version";
  for (int r = 0; r < 2; ++r) EXPECT_EQ(rows[r].at[0], static_cast<float>(writes % 1000000));
}

// A process that is killed during a write leaves the word odd for good. A reader decides how long
// it waits.
TEST(RowVersions, AWriterThatDies) {
  struct Shared {
    Row row;
    VersionWord word;
  };
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* shared = new (memory) Shared{};
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    write(shared->word, &shared->row, 5);
    Row next;
    std::fill_n(next.at, Row::kFloats + 1, 6.0f);
    begin_write(shared->word);
    store_shared(shared->row.at, next.at, Row::kFloats / 2);
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  Row copy{};
  int asked = 0;
  const auto go_on = [&] {
    return ++asked < 1200 ? Status{FRUGAL_OK} : fail(FRUGAL_ERR_PEER_LOST, "it is gone");
  };
  EXPECT_EQ(read_row(shared->word, shared->row.at, Row::kFloats, copy.at, go_on),
            FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(asked, 1200);
  EXPECT_EQ(LastMessage(), "it is gone");
  munmap(memory, sizeof(Shared));
}

}  // namespace frugal::row_versions_test
