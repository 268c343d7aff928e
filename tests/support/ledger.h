// A table that a ledger records, and an update of it.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "engine/ledger.h"
#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"

namespace frugal {

struct TableWithLedger : testing::Test {
  static constexpr uint64_t kStep = 7;
  // What each rank names it has pushed gradients of 0.25 for.
  void make(uint64_t n, uint32_t dim, const std::vector<Slots>& ranks) {
    ASSERT_OK(arena.open(64 << 20));
    pool.cut_from(&arena);
    ASSERT_OK(Ledger::open(pool, arena, kStep - 1, &ledger));
    Rows::Config config = rows_config(n, dim, FRUGAL_ADAGRAD);
    config.shared = true;
    ASSERT_OK(rows.open(config, nullptr));
    ASSERT_OK(rows.initialize_range(0, n));
    ASSERT_OK(ledger->add_table(1, rows.layout(), rows.init(), &table));
    for (const Slots& rank : ranks)
      parts.push_back(resolved_part(pool, kStep, static_cast<uint32_t>(parts.size()), rank));
    update = make_update(pool, kStep, parts, dim);
    for (RankGradients& h : update->ranks)
      std::fill_n(h.sums.as<float>(), h.rows() * h.stride, 0.25f);
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = FRUGAL_ADAGRAD;
    update->scalars =
        arith::step_scalars(o, kStep, static_cast<uint32_t>(ranks.size()), FRUGAL_NAN_REJECT, dim);
  }
  void TearDown() override {
    parts.clear();
    update.reset();
    table.reset();
    ledger.reset();
  }

  Arena arena;
  BufferPool pool;
  Rows rows;
  std::shared_ptr<Ledger> ledger;
  std::shared_ptr<TableLedger> table;
  std::vector<PartRef> parts;
  UpdateRef update;
};

}  // namespace frugal
