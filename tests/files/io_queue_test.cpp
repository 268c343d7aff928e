// Batches of reads and writes are done whole, or report their first failure.
//
// Also: they can be canceled, submitted again, and waited for in any order.
#include "files/io_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "support/file_calls.h"
#include "support/inside.h"
#include "support/temporary_folder.h"

namespace frugal::io_queue_test {

constexpr size_t kBlock = 4096;

struct Files {
  Files() {
    EXPECT_OK(Folder::open((place / "f").c_str(), Folder::Use::kCreate, &folder));
    EXPECT_OK(folder->create("a", false, &file));
  }
  TemporaryFolder place;
  std::shared_ptr<Folder> folder;
  File file;
};

void fill(char* bytes, uint64_t block, uint64_t seed) {
  for (size_t i = 0; i < kBlock; i += 8) {
    const uint64_t word = (block << 32) + i + (seed << 20);
    std::memcpy(bytes + i, &word, 8);
  }
}

// Random batches of blocks, several at once, waited for in any order. The file is what a plain
// array of the same writes is.
TEST(IoQueue, BatchesInAnyOrder) {
  Files files;
  std::mt19937_64 random(test_seed());
  constexpr size_t kBlocks = 64, kBatches = 4;
  std::vector<uint64_t> seeds(kBlocks, 0);  // of what is in each block
  std::vector<char> memory(kBatches * kBlocks * kBlock);
  ASSERT_OK(files.file.resize(kBlocks * kBlock));
  for (const uint32_t threads : {1u, 4u}) {
    IoQueue queue;
    ASSERT_OK(queue.open(threads));
    IoBatch batches[kBatches];
    for (int round = 0; round < 30; ++round) {
      // Batches that run together have other blocks.
      std::vector<size_t> blocks(kBlocks);
      for (size_t i = 0; i < kBlocks; ++i) blocks[i] = i;
      std::shuffle(blocks.begin(), blocks.end(), random);
      std::vector<bool> reads(kBatches);
      for (size_t b = 0; b < kBatches; ++b) {
        batches[b].requests.clear();
        reads[b] = random() % 2;
        for (size_t i = b; i < kBlocks; i += kBatches) {
          if (random() % 4 == 0) continue;
          char* at = &memory[(b * kBlocks + blocks[i]) * kBlock];
          if (!reads[b]) {
            seeds[blocks[i]] = 1 + random() % 1000;
            fill(at, blocks[i], seeds[blocks[i]]);
          }
          batches[b].requests.push_back(
              {reads[b] ? IoRequest::Kind::kRead : IoRequest::Kind::kWrite, &files.file,
               blocks[i] * kBlock, at, kBlock});
        }
        queue.submit(&batches[b]);
      }
      std::vector<size_t> order = {0, 1, 2, 3};
      std::shuffle(order.begin(), order.end(), random);
      for (size_t b : order) {
        ASSERT_OK(queue.wait(&batches[b]));
        EXPECT_TRUE(queue.is_done(&batches[b]));
        ASSERT_OK(queue.wait(&batches[b]));  // once more
        for (const IoRequest& r : batches[b].requests) {
          const size_t block = r.at / kBlock;
          std::vector<char> expected(kBlock, 0);
          if (seeds[block]) fill(expected.data(), block, seeds[block]);
          ASSERT_EQ(std::memcmp(r.bytes, expected.data(), kBlock), 0) << "block " << block;
        }
      }
    }
  }
}

TEST(IoQueue, TheFirstFailureOfABatchIsReported) {
  Files files;
  TestFileCalls calls;
  IoQueue queue;
  ASSERT_OK(queue.open(1));
  std::vector<char> bytes(kBlock, 'x');
  IoBatch batch, sync;
  for (size_t i = 0; i < 10; ++i)
    batch.requests.push_back(
        {IoRequest::Kind::kWrite, &files.file, i * kBlock, bytes.data(), kBlock});
  sync.requests.push_back({IoRequest::Kind::kSync, &files.file});
  calls.fail(4, ENOSPC);
  queue.submit(&batch);
  EXPECT_EQ(queue.wait(&batch), FRUGAL_ERR_NO_SPACE);
  EXPECT_NE(LastMessage().find("f/a' cannot be written at byte 12288"), std::string::npos)
      << LastMessage();
  uint64_t size = 0;
  ASSERT_OK(files.file.size(&size));
  EXPECT_EQ(size, 3 * kBlock);  // later requests were left out
  // The batch can be submitted again, and others are not touched by it.
  queue.submit(&batch);
  ASSERT_OK(queue.wait(&batch));
  queue.submit(&sync);
  ASSERT_OK(queue.wait(&sync));
  ASSERT_OK(files.file.size(&size));
  EXPECT_EQ(size, 10 * kBlock);
  calls.fail(1, EIO);
  queue.submit(&sync);
  EXPECT_EQ(queue.wait(&sync), FRUGAL_ERR_IO);
  queue.submit(&batch);
  EXPECT_EQ(queue.wait(&batch), FRUGAL_ERR_IO);  // the folder is poisoned
  EXPECT_NE(LastMessage().find("could not be synced"), std::string::npos) << LastMessage();
}

// A call that waits until the test lets it go on.
class Held : public FileCalls {
 public:
  Held() { test_file_calls(this); }
  ~Held() override { test_file_calls(nullptr); }
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const override {
    UniqueLock lock(mu_);
    ++begun_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    return FileCalls::write(fd, from, bytes, at);
  }
  void await_begun(int n) {
    UniqueLock lock(mu_);
    changed_.wait(lock, [&] { return begun_ >= n; });
  }
  void open_all() {
    Lock lock(mu_);
    open_ = true;
    changed_.notify_all();
  }
  int begun() const { return begun_; }

 private:
  mutable Mutex mu_;
  mutable Condition changed_;
  mutable int begun_ = 0;
  bool open_ = false;
};

TEST(IoQueue, ACanceledBatchEndsWithWhatHasBegun) {
  Files files;
  Held held;
  IoQueue queue;
  ASSERT_OK(queue.open(2));
  std::vector<char> bytes(kBlock, 'x');
  IoBatch batch, next, never, empty;
  for (size_t i = 0; i < 10; ++i)
    for (IoBatch* b : {&batch, &next})
      b->requests.push_back(
          {IoRequest::Kind::kWrite, &files.file, i * kBlock, bytes.data(), kBlock});
  queue.submit(&batch);
  queue.submit(&next);
  queue.submit(&empty);
  ASSERT_OK(queue.wait(&empty));
  ASSERT_OK(queue.wait(&never));
  queue.cancel(&never);
  held.await_begun(2);
  EXPECT_FALSE(queue.is_done(&batch));
  queue.cancel(&batch);
  EXPECT_FALSE(queue.is_done(&batch));  // two are under way
  queue.cancel(&next);
  EXPECT_TRUE(queue.is_done(&next));
  EXPECT_EQ(queue.wait(&next), FRUGAL_ERR_CLOSED);
  held.open_all();
  EXPECT_EQ(queue.wait(&batch), FRUGAL_ERR_CLOSED);
  EXPECT_EQ(held.begun(), 2);
  queue.submit(&next);
  ASSERT_OK(queue.wait(&next));
  EXPECT_EQ(held.begun(), 12);
}

}  // namespace frugal::io_queue_test
