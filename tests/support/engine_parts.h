// What an engine's commits and flush threads work on, without an engine: ranks, tables whose rows
// show how often they were updated, and their writers.
#pragma once
#include <algorithm>
#include <vector>

#include "engine/abort.h"
#include "engine/commit.h"
#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"
#include "support/trainers.h"

namespace frugal {

struct EngineParts {
  explicit EngineParts(uint32_t world_size = 1, int32_t flush_mode = FRUGAL_FLUSH_AUTO)
      : config(config_of(world_size, flush_mode)) {
    optimizer.lr = 1;
  }
  static frugal_config config_of(uint32_t world_size, int32_t flush_mode) {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.world_size = world_size;
    c.flush_mode = flush_mode;
    return c;
  }
  // Rows begin as zeros.
  TableRef add_table(uint64_t rows, uint32_t dim = 4, bool hashed = false) {
    TableRef table = std::allocate_shared<Table>(HeapAllocator<Table>());
    table->name = text("t%zu", tables.size());
    table->config = FRUGAL_TABLE_CONFIG_INIT;
    table->schedule[0] = optimizer;
    Rows::Config c = rows_config(rows, dim, FRUGAL_SGD, hashed);
    c.init = arith::init_spec(FRUGAL_INIT_CONSTANT, 0, 0, rows, dim, 1, FRUGAL_SGD, 0);
    EXPECT_OK(table->rows.open(c, nullptr));
    EXPECT_OK(hashed ? FRUGAL_OK : table->rows.initialize_range(0, rows));
    tables.expect();
    tables.add(table);
    return table;
  }
  TrainerRef join(uint32_t rank, bool cached = false) {
    TrainerRef t = trainer_of(rank);
    t->has_cache.store(cached);
    t->next_step = ranks.next_commit();
    ranks.join(t, 0);
    return t;
  }
  void begin(const TrainerRef& t, uint64_t step) {
    ASSERT_OK(ranks.may_begin(*t, step));
    if (ranks.next_commit() == kNoStep) ranks.start(step);
    ranks.begin(*t, step);
  }
  // Each row of a part becomes 1 more.
  RankGradients gradients(const TableRef& table, const PartRef& part) {
    RankGradients h;
    h.rank = part->rank;
    h.part = part;
    h.stride = table->rows.layout().sums_stride;
    EXPECT_OK(pool.get(h.rows() * table->rows.layout().sums_bytes(), &h.sums));
    std::fill_n(h.sums.as<float>(), h.rows() * h.stride, -1.0f);
    return h;
  }
  RankGradients gradients(const TableRef& table, uint64_t step, uint32_t rank, const Slots& slots) {
    return gradients(table, resolved_part(pool, step, rank, slots));
  }
  // The update of what ranks submit, each for its slots.
  UpdateRef update(const TableRef& table, uint64_t step, const std::vector<Slots>& of_ranks) {
    UpdateRef u = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
    u->step = step;
    for (const Slots& slots : of_ranks)
      u->ranks.push_back(gradients(table, step, static_cast<uint32_t>(u->ranks.size()), slots));
    for (const RankGradients& h : u->ranks) u->bytes += h.bytes();
    u->scalars = arith::step_scalars(table->optimizer_at(step), step, ranks.size(),
                                     FRUGAL_NAN_REJECT, table->rows.layout().dim);
    pacing.add(u.get());
    return u;
  }
  // How often gradients have come to the row.
  static int times(const TableRef& table, uint32_t slot) {
    const auto* row = table->rows.values(slot);
    const uint32_t dim = table->rows.layout().dim;
    EXPECT_TRUE(std::all_of(row, row + dim, [&](float x) { return x == row[0]; })) << slot;
    return static_cast<int>(row[0]);
  }

  BufferPool pool;
  frugal_config config;
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  Meters meters{1};  // nothing here counts by rank
  Counters& counters = meters.counters;
  Workers workers{0, {[] { return false; }, [] { return false; }, [] {}}, &meters.trace};
  ControlMutex mu;
  Pacing pacing{config, 2, &counters.pending_bytes_peak};
  Ranks ranks{config.world_size, mu};
  Tables tables{config, mu, ranks};
  Phase phase{mu, workers};
  StepRecords records{mu, ranks};
  Flusher flusher{tables, ranks, workers, meters};
};

// And what commits their steps, or undoes them.
struct CommitParts : EngineParts {
  explicit CommitParts(uint32_t world_size, int32_t flush_mode)
      : EngineParts(world_size, flush_mode) {
    EXPECT_OK(memory.open(false, false));
  }
  // The rank ends the step that it is inside of, having pushed that.
  void submit_gradients(const TrainerRef& t, const TableRef& table, RankGradients&& pushed) {
    Lock lock(mu);
    StepRecord::TableGradients& to = records.of(t->step).rank_gradients[table.get()];
    to.table = table;
    to.add(std::move(pushed));
    ranks.end(*t);
  }
  void end(const TrainerRef& t, const TableRef& table, const Slots& slots) {
    submit_gradients(t, table, gradients(table, t->step, t->rank, slots));
  }
  // What ranks, in order, have declared for a step is prepared ahead. It is the window's next.
  UpdateRef prepare(const TableRef& table, uint64_t step, const std::vector<PartRef>& declared) {
    EXPECT_OK(tables.open_window(*table));
    for (const PartRef& p : declared) {
      EXPECT_TRUE(table->window.link(p, 0, p->distinct, false, Window::Urgency::kUrgent));
      p->linked = true;
    }
    const UpdateRef u = make_update(pool, step, declared);
    u->make_list();
    table->window.add(u);
    EXPECT_TRUE(table->window.prepare(*u, true, SIZE_MAX, Window::Urgency::kUrgent));
    Lock lock(mu);
    records.of(step).prepared[table.get()] = {table, u, true};
    return u;
  }
  // All that is committed is in the rows.
  void write_all() {
    while (workers.help(true) || flusher.write(UINT64_MAX)) {
    }
  }

  EngineMemory memory{UINT64_MAX};
  Declarations declarations;
  Checkpoints checkpoints{{config, mu, phase, ranks, tables, flusher, workers, pacing, memory,
                           meters, [](int, const char*) {}}};
  Committer committer{mu,           phase,   records, ranks,  pacing, tables,
                      declarations, flusher, workers, memory, meters, checkpoints};
  Aborter aborter{mu, phase, records, ranks, committer, declarations, workers, meters};
};

}  // namespace frugal
