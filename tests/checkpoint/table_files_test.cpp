// The parameter files of a table, from inside.
#include "checkpoint/table_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "support/file_calls.h"
#include "support/inside.h"
#include "support/rows.h"
#include "support/temporary_folder.h"

namespace frugal {
namespace {

class Creations : public TestFileCalls {
 public:
  int open(int folder, const char* name, int flags, mode_t mode) const override {
    if (flags & O_CREAT) ++count;
    return TestFileCalls::open(folder, name, flags, mode);
  }
  mutable std::atomic<int> count{0};
};

// A table with more rows than a file has records.
struct World {
  World() {
    EXPECT_OK(Folder::open(folder.path().c_str(), Folder::Use::kCreate, &to.folder));
    EXPECT_OK(queue.open(1));
    to.queue = &queue;
    to.buffers = &buffers;
    EXPECT_OK(rows.open(rows_config(kRows, 1, FRUGAL_SGD), &budget));
    EXPECT_OK(rows.initialize_range(0, kRows));
    EXPECT_OK(files.open(rows, tracker, 1, FRUGAL_SGD, &to, &budget));
    EXPECT_OK(tracker.open(rows, &files, &budget, false));
    files.begin(1);
    tracker.begin(0);
  }
  // Saves rows until so many are saved.
  void save(uint64_t until) {
    while (saved < until && tracker.save_some()) saved += RowTracker::kMostRows;
  }
  std::vector<std::string> row_files() const {
    std::vector<std::string> found;
    for (const std::string& name : folder.Files())
      if (name.ends_with(".rows")) found.push_back(name);
    return found;
  }
  static constexpr uint64_t kRows = kMostRecords + 10000;
  TemporaryFolder folder;
  Creations calls;
  FolderWriter to;
  IoQueue queue;
  RecordBuffers buffers{0};
  MemoryBudget budget;
  Rows rows;
  RowTracker tracker;
  TableFiles files;
  uint64_t saved = 0;
};

// The thread of checkpoints creates the next file, and not who saves the row that fills one.
TEST(TableFiles, TheNextFileIsThereBeforeOneIsFull) {
  World w;
  w.save(kMostRecords / 2 - 1000);
  ASSERT_OK(w.files.finish_full());
  EXPECT_EQ(w.row_files().size(), 1u);
  w.save(kMostRecords / 2 + 1000);
  ASSERT_OK(w.files.finish_full());
  EXPECT_EQ(w.row_files().size(), 2u);
  const int created = w.calls.count;
  w.save(World::kRows);
  EXPECT_EQ(w.calls.count, created);
  w.tracker.stop_saving();
  ManifestTable listed;
  ASSERT_OK(w.files.finish(&listed));
  ASSERT_EQ(listed.files.size(), 2u);
  EXPECT_EQ(listed.files[0].info.records, kMostRecords);
  EXPECT_EQ(listed.files[1].info.records, World::kRows - kMostRecords);
  w.tracker.end(true);
  w.files.end(true);
}

// One that was not needed goes, and one that cannot be created is created when it is needed.
TEST(TableFiles, TheNextFileThatIsNotNeeded) {
  World w;
  w.save(kMostRecords / 2 + 1000);
  do {  // what is being written would be the call that fails
    ASSERT_OK(w.files.collect());
    yield_thread();
  } while (w.buffers.complete() > 0);
  w.calls.fail(1, ENOSPC);
  ASSERT_OK(w.files.finish_full());
  EXPECT_EQ(w.calls.failed(), 1);
  EXPECT_EQ(w.row_files().size(), 1u);
  ASSERT_OK(w.files.finish_full());
  EXPECT_EQ(w.row_files().size(), 2u);
  w.tracker.stop_saving();
  ManifestTable listed;
  ASSERT_OK(w.files.finish(&listed));
  EXPECT_EQ(listed.files.size(), 1u);
  EXPECT_EQ(w.row_files().size(), 1u);
  w.tracker.end(false);
  w.files.end(false);
  EXPECT_TRUE(w.row_files().empty());
}

}  // namespace
}  // namespace frugal
