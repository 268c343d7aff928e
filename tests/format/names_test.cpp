// Names of a folder's files: each file has one, and others are foreign.
#include "format/names.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace frugal::names_test {

TEST(Names, AreParsedAsTheyAreMade) {
  for (const uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{10}, uint64_t{4096}, kNamesEnd - 1}) {
    const struct {
      String name;
      FileKind kind;
    } all[] = {{rows_name(n), FileKind::kRows},
               {blob_name(n), FileKind::kBlob},
               {manifest_name(n), FileKind::kManifest},
               {new_name(rows_name(n)), FileKind::kNew},
               {deleted_name(n), FileKind::kDeleted},
               {new_name(blob_name(n)), FileKind::kNew},
               {new_name(manifest_name(n)), FileKind::kNew}};
    for (const auto& one : all) {
      uint64_t number = ~n;
      EXPECT_EQ(parse_name(one.name.c_str(), &number), one.kind) << one.name;
      EXPECT_EQ(number, n) << one.name;
    }
  }
  EXPECT_EQ(rows_name(7), "7.rows");
  EXPECT_EQ(blob_name(8), "8.blob");
  EXPECT_EQ(new_name(manifest_name(UINT64_MAX)), "18446744073709551615.checkpoint.new");
}

TEST(Names, OthersAreForeign) {
  for (const char* name : {"",
                           "lock",
                           ".rows",
                           "rows",
                           "1",
                           "1.",
                           "1.row",
                           "1.rowss",
                           "01.rows",
                           "00.rows",
                           "+1.rows",
                           "-1.rows",
                           " 1.rows",
                           "1 .rows",
                           "1.ROWS",
                           "0x1.rows",
                           "1.rows.",
                           "1.rows.new.new",
                           "1.new",
                           ".new",
                           "x.new",
                           "1.rows.neww",
                           "1.5.rows",
                           "18446744073709551616.rows",
                           "18446744073709551615.checkpoint",
                           "2305843009213693952.rows",
                           "99999999999999999999999.blob",
                           "1.checkpoint~",
                           "a1.checkpoint"}) {
    uint64_t number = 77;
    EXPECT_EQ(parse_name(name, &number), FileKind::kForeign) << name;
    EXPECT_EQ(number, 77u) << name;
  }
}

}  // namespace frugal::names_test
