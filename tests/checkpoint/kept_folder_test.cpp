// A folder that the first version of the formats has written stays readable.
//
//     kept_folder_test                 reads tests/checkpoint/folder-1
//     FRUGAL_MAKE=FOLDER kept_folder_test    makes such a folder, for a new version
#include <gtest/gtest.h>

#include <cstdlib>

#include "support/checkpoint_job.h"

namespace frugal_test::jobs {
namespace {

constexpr uint64_t kSteps = 8;

// Checkpoints of the steps 2, 4, 6 and 8. The one of step 4 has a name, so it stays with the last.
void make(const std::string& path) {
  CheckpointJob job;
  ASSERT_OK(open_folder(job.engine(), path, 1));
  job.start();
  for (uint64_t s = 1; s <= kSteps; ++s) {
    job.step(s);
    if (s % 2) continue;
    frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
    if (s == 4) config.name = "four";
    uint64_t number = 0;
    ASSERT_OK(frugal_checkpoint(job.engine(), &config, &number));
    ASSERT_OK(await_checkpoint(job.engine(), number, nullptr));
  }
}

TEST(KeptFolder, StaysReadable) {
  if (const char* const path = std::getenv("FRUGAL_MAKE")) return make(path);
  const std::string path = FRUGAL_KEPT_FOLDER;
  const auto known = CheckpointJob::history(kSteps);
  for (const uint64_t number : {uint64_t{2}, uint64_t{0}}) {
    CheckpointJob job;
    CheckpointInfo info;
    ASSERT_OK(restore(job.engine(), path.c_str(), number, &info));
    EXPECT_EQ(info.step, number ? 4 : kSteps);
    EXPECT_STREQ(info.name, number ? "four" : "");
    job.start();
    EXPECT_TRUE(job.state() == known[info.step]);
    CheckpointJob::check_blob(path, info);
    // It goes on, too.
    CheckpointJob other;
    other.start();
    for (uint64_t s = 1; s <= kSteps + 2; ++s) {
      other.step(s);
      if (s > info.step) job.step(s);
    }
    EXPECT_TRUE(job.state() == other.state());
  }
}

}  // namespace
}  // namespace frugal_test::jobs
