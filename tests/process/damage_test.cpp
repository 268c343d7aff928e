// A read-out returns a status, and does not crash, where a dead controller has left impossible
// numbers.
#include <sys/socket.h>

#include <cstring>
#include <functional>

#include "process/readout.h"
#include "support/ledger.h"
#include "window/apply.h"

namespace frugal::damage_test {

constexpr uint32_t kDim = 5;
constexpr uint64_t kRows = 100;

// A table whose last update is committed, and not written.
struct DamageTest : TableWithLedger {
  void SetUp() override {
    make(kRows, kDim, {{3, 17, 40}});
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    uint64_t id;
    ASSERT_OK(arena.region_publisher()->add(ends[0], -1, &id));
    regions.open(ends[1]);
    update->make_list();
    ASSERT_OK(table->add(*update, nullptr, &update->record));
    ledger->commit(kStep);
  }
  LedgerTable& record() const {
    return *reinterpret_cast<LedgerTable*>(arena.mapping().base + table->shm_address());
  }
  LedgerUpdate& first() const {
    return *reinterpret_cast<LedgerUpdate*>(arena.mapping().base + record().first.load());
  }
  LedgerTerms& terms() const { return *reinterpret_cast<LedgerTerms*>(&first() + 1); }
  BeforeImage& before_image() const {
    return *reinterpret_cast<BeforeImage*>(arena.mapping().base + record().before_images);
  }
  Status open(std::unique_ptr<TableReadout>* out) {
    ControllerMemory controller_memory;
    controller_memory.regions = &regions;
    controller_memory.root =
        reinterpret_cast<const LedgerRoot*>(arena.mapping().base + ledger->shm_address());
    TableReadout::Source s;
    s.record = table->shm_address();
    s.handle = 1;
    s.layout = rows.layout();
    s.optimizer = FRUGAL_ADAGRAD;
    s.capacity = kRows;
    auto mapped = [](const void* at, size_t pitch) {
      Mapping m;
      m.base = const_cast<char*>(static_cast<const char*>(at));
      m.bytes = kRows * pitch;
      return m;
    };
    s.arrays[Rows::kValues] = mapped(rows.values(0), s.layout.value_pitch);
    s.arrays[Rows::kState] = mapped(rows.state(0), s.layout.state_pitch);
    return TableReadout::open(controller_memory, s, own, out);
  }

  BufferPool own;
  Regions regions;
};

TEST_F(DamageTest, NumbersThatCannotBe) {
  auto& scalars = first().scalars;
  auto& init = record().init;
  struct Damage {
    const char* what;
    std::function<void()> make;
  };
  const Damage all[] = {
      {"a kind of optimizer that there is not", [&] { scalars.kind = FRUGAL_FTRL + 1; }},
      {"a negative kind", [&] { scalars.kind = -1; }},
      {"a kind that has more state", [&] { scalars.kind = FRUGAL_ADAM; }},
      {"a kind that has less state", [&] { scalars.kind = FRUGAL_SGD; }},
      {"another dim", [&] { scalars.dim = kDim + 1; }},
      {"new rows of another dim", [&] { init.dim = UINT32_MAX; }},
      {"new rows with more columns of state", [&] { init.state_columns = 9; }},
      {"columns of state that are too long", [&] { init.column_floats = 1 << 30; }},
      {"more ranks than memory", [&] { first().ranks = UINT64_MAX; }},
      {"marks that are nowhere", [&] { first().marks = UINT64_MAX - 1; }},
      {"more rows than there are", [&] { terms().rows = UINT64_MAX / 4; }},
      {"sums that are nowhere", [&] { terms().sums = UINT64_MAX - 63; }},
      {"rows that are further apart than any", [&] { terms().stride = UINT64_MAX; }},
      {"more images than there may be", [&] { record().before_image_count = UINT64_MAX; }},
      {"an image with more rows than it has",
       [&] {
         before_image().update.store(BeforeImage::kOutside);
         before_image().rows = UINT64_MAX;
       }},
  };
  const std::vector<char> whole(arena.mapping().base, arena.mapping().base + (1 << 20));
  std::unique_ptr<TableReadout> readout;
  for (const Damage& damage : all) {
    ASSERT_OK(open(&readout));
    damage.make();
    EXPECT_EQ(open(&readout), FRUGAL_ERR_INTERNAL) << damage.what;
    std::memcpy(arena.mapping().base, whole.data(), whole.size());
  }
  // As the update makes them.
  ASSERT_OK(open(&readout));
  const std::vector<float> before(rows.values(17), rows.values(17) + kDim);
  const TableReadout::Row row = readout->row(17, nullptr);
  const std::vector<float> read(row.values, row.values + kDim);
  EXPECT_NE(read, before);
  ApplyScratch scratch(1, 0);
  const uint32_t entries[] = {0, 1, 2};
  apply(ApplyTo(rows), *update, UpdateEntries{entries, 3}, &scratch);
  EXPECT_EQ(read, std::vector<float>(rows.values(17), rows.values(17) + kDim));
}

}  // namespace frugal::damage_test
