// In chosen interleavings, a reader copies a whole row, never returns to an earlier write, and each
// write is a version.
//
// Two rows share one version word (support/schedule.h). A reader waits for a writer that never ends
// no longer than its own limit.
#include <algorithm>

#include "storage/row_versions.h"
#include "support/schedule.h"

namespace frugal::row_versions_schedules_test {

constexpr size_t kFloats = 5;

struct Row {
  alignas(8) float at[kFloats + 1] = {};
  bool whole() const {
    return std::all_of(at, at + kFloats, [&](float f) { return f == at[0]; });
  }
};

TEST(RowVersionsSchedules, ReadersBesideWriters) {
  explore("row_versions.readers", 10000, [](Schedule& s) {
    VersionWord word{static_cast<uint32_t>(s.random().below(2)) ? 0 : UINT32_MAX - 3};
    const uint32_t first = word.load();
    Row rows[2];
    uint32_t written = 0;
    constexpr const char* kWriters[] = {"writer 0", "writer 1"};
    constexpr const char* kReaders[] = {"reader 0", "reader 1"};
    for (size_t r = 0; r < 2; ++r) {
      const uint32_t writes = 1 + static_cast<uint32_t>(s.random().below(3));
      written += writes;
      s.thread(kWriters[r], [&rows, &word, r, writes] {
        for (uint32_t i = 1; i <= writes; ++i) {
          Row next;
          std::fill_n(next.at, kFloats + 1, static_cast<float>(i));
          begin_write(word);
          store_shared(rows[r].at, next.at, kFloats);
          end_write(word);
        }
      });
      s.thread(kReaders[r], [&s, &rows, &word, r] {
        float last = 0;
        for (int i = 0; i < 3; ++i) {
          Row copy;
          HOLDS(s, read_row(word, rows[r].at, kFloats, copy.at, [] { return Status{FRUGAL_OK}; }) ==
                       FRUGAL_OK);
          HOLDS(s, copy.whole() && copy.at[0] >= last);
          last = copy.at[0];
        }
      });
    }
    s.run();
    HOLDS(s, word.load() == first + 2 * written);
  });
}

// A writer that stops in the middle of a row: a reader gives up at its own limit, and an earlier
// reader has its copy.
TEST(RowVersionsSchedules, AWriterThatNeverEnds) {
  explore("row_versions.unended", 10000, [](Schedule& s) {
    VersionWord word{0};
    Row row;
    s.thread("writer", [&] {
      Row next;
      std::fill_n(next.at, kFloats + 1, 1.0f);
      begin_write(word);
      store_shared(row.at, next.at, kFloats - 1);
    });
    s.thread("reader", [&] {
      Row copy;
      int asked = 0;
      const Status got = read_row(word, row.at, kFloats, copy.at, [&] {
        return ++asked < 5 ? Status{FRUGAL_OK} : Status{FRUGAL_ERR_PEER_LOST};
      });
      HOLDS(s, got == FRUGAL_OK ? copy.whole() && copy.at[0] == 0
                                : got == FRUGAL_ERR_PEER_LOST && asked == 5 && (word.load() & 1));
    });
    s.run();
  });
}

}  // namespace frugal::row_versions_schedules_test
