// Start and end of an engine, its tables, hyper-parameters and statistics.
#include <algorithm>
#include <cstring>
#include <optional>

#include "base/handles.h"
#include "base/retry.h"
#include "base/thread.h"
#include "engine/config_check.h"
#include "engine/wait.h"

namespace frugal {

constexpr size_t kMostChanges = 4096;  // of a table's optimizer, for steps to come
constexpr int kCommitTries = 10;       // to commit the ended steps before the engine is closed

Engine::Engine(const frugal_config& config)
    : Session(config),
      memory_(config.host_bytes),
      meters_(config.world_size),
      workers_(config.flush_threads,
               {[this] { return pacing_.resting() && !ranks_.caches_exist(); },
                [this] { return pacing_.calls_first(calls_.load(std::memory_order_relaxed)); },
                [this] { log(0, "a background thread failed"); },
                config.flush_mode == FRUGAL_FLUSH_WRITE_THROUGH},
               &meters_.trace),
      pacing_(config_, cpu_count(), &meters_.counters.pending_bytes_peak),
      ranks_(config_.world_size, mu_),
      tables_(config_, mu_, ranks_),
      phase_(mu_, workers_),
      records_(mu_, ranks_),
      flusher_(tables_, ranks_, workers_, meters_),
      pins_(tables_, ranks_, *memory_.pinner),
      committer_(mu_, phase_, records_, ranks_, pacing_, tables_, declarations_, flusher_, workers_,
                 memory_, meters_, checkpoints_),
      aborter_(mu_, phase_, records_, ranks_, committer_, declarations_, workers_, meters_),
      checkpoints_({config_, mu_, phase_, ranks_, tables_, flusher_, workers_, pacing_, memory_,
                    meters_, [this](int level, const char* text) { log(level, text); }}) {
  // Ranks cannot run further apart than the ring is long, so a larger bound changes nothing.
  if (config_.staleness != FRUGAL_STALENESS_ASYNC)
    config_.staleness = std::min<uint64_t>(config_.staleness, Window::kHorizon - 2);
}

Engine::~Engine() {
  const KeepError why;
  shutdown();
}

Status Engine::start() {
  FRUGAL_TRY(memory_.open(config_.backing == FRUGAL_BACKING_SHM, stale()));
  list_work();
  try {
    workers_.start();
  } catch (...) {
    shutdown();
    return no_threads(config_.flush_threads);
  }
  return FRUGAL_OK;
}

// Called first of all in closing: calls of this process's ranks report the close, and not an abort
// by ranks of other processes that end.
void Engine::close_ranks() {
  aborter_.stop_retrying();
  {
    ControlLock lock(mu_);  // for all at once: a notified rank leaves, which undoes others' steps
    for (const TrainerRef& t : ranks_)
      if (t && !t->process.notices.load()) t->closing.store(true);
  }
  workers_.progress();
}

// Ends the threads and releases everything, and takes no memory for it. Long for its order, each
// part of which makes the next one safe. Calls of other threads that are under way notice the
// close. What they use stays alive by their references.
void Engine::shutdown() {
  // Steps that all ranks have ended are to be committed. Memory may be short for a moment.
  retry_for_memory([this] { return await_device_work(deadline(FRUGAL_TIMEOUT_DEFAULT)); },
                   [](int tries) { return tries >= kCommitTries; });
  checkpoints_.stop();
  bool again;
  {
    ControlLock lock(mu_);
    again = phase_.close();
    if (again && !workers_.running() && tables_.size() == 0) return;
  }
  if (!again && committer_.stalled() && health() == FRUGAL_OK)
    log(0, "there is no memory to commit the last step: the engine is closed without it");
  workers_.stop();
  Vector<Thread> reapers;
  {
    ControlLock lock(mu_);
    reapers.swap(reapers_);
  }
  for (Thread& r : reapers) r.join();
  // Calls that are under way write rows, too, and put claimed updates back into queues: they notice
  // the close.
  ranks_.each([](Trainer& t) { Lock call(t.call_mu); });
  workers_.await_nobody();
  // From when all of this is gone, attached processes read the tables out.
  memory_.pool.leave();
  struct End {
    Ledger* ledger;
    ~End() {
      if (ledger) ledger->end();
    }
  } end{tables_.ledger.get()};
  // Committed updates get written, also for processes that have mapped the rows.
  try {
    {
      ControlLock lock(mu_);
      phase_.await(lock, Phase::kWhole);
    }
    while (health() == FRUGAL_OK && (workers_.help(true) || flusher_.write(UINT64_MAX))) {
    }
  } catch (const std::bad_alloc&) {
  }
  Vector<TableRef> tables;
  Map<uint64_t, StepRecord> records;
  {
    ControlLock lock(mu_);
    // Commits, aborts, and operations outside steps use what is taken away here. (The last use the
    // trainers' caches without their call_mu.) None begins now, and those under way notice the
    // close.
    phase_.await(lock, Phase::kEnd);
    tables = tables_.take();
    records = records_.take();
  }
  workers_.forget_jobs();
  declarations_.forget_downloads();
  // Waits here, and not at the release of the last reference to the work: tables end here.
  for (const auto& [step, record] : records) record.await_device_work();
  declarations_.retire(kNoStep);
  for (const TableRef& t : tables) {
    t->dropped.store(true);
    handle_remove(HandleKind::kTable, t->handle);
  }
  ranks_.each([this](Trainer& t) {
    ranks_.leave(t);
    t.closing.store(true);
    handle_remove(HandleKind::kTrainer, t.handle);
    Lock call(t.call_mu);
    if (t.gpu) t.gpu->take_device_work();
    t.parts.clear();
    t.pushes.clear();
    t.created.clear();
    t.blob.reset();
    t.lent.clear();
    t.caches.clear();
  });
}

Status Engine::check() const {
  if (closed()) return engine_closed();
  if (Status s = workers_.health())
    return fail(FRUGAL_ERR_UNHEALTHY,
                "a background failure (%s) stopped the engine; close it and restore the tables",
                status_name(s));
  return FRUGAL_OK;
}

Status Engine::committed(uint64_t* step) {
  try {
    poll_device_work();  // without waiting calls and flush threads, no other thread polls
  } catch (const std::bad_alloc&) {
    // A commit that lacks memory is not made now.
  }
  ControlLock lock(mu_);
  *step = ranks_.committed();
  return FRUGAL_OK;
}

Status Engine::find_table(const char* name, AnyTableRef* out) {
  *out = find_table(name);
  return *out ? FRUGAL_OK
              : fail(FRUGAL_ERR_NOT_FOUND, "no table is named '%.300s': create it first", name);
}

Status Engine::next_table(uint64_t* cursor, String* name) {
  const TableRef table = tables_.from(*cursor);
  if (!table) return FRUGAL_OK;
  *name = table->name;
  *cursor = uint64_t{table->number} + 1;
  return FRUGAL_OK;
}

namespace {

struct InitContext {
  Rows* rows;
  uint64_t total;
  Rows::State* state;  // to be filled; or null: the rows are
  std::atomic<Status> status{FRUGAL_OK};
};

void init_chunk(void* context, size_t chunk) {
  auto* c = static_cast<InitContext*>(context);
  uint64_t n = c->rows->chunk_rows(), from = chunk * n;
  n = std::min(n, c->total - from);
  Status s = c->state ? c->rows->fill_state(c->state, from, n) : c->rows->initialize_range(from, n);
  if (s != FRUGAL_OK) c->status.store(s);
}

}  // namespace

// Each process of a job creates its tables. If another process has created the same table, that one
// is meant.
Status Engine::create_table(const frugal_table_config& config, AnyTableRef* out) {
  TableRef table;
  Status s = create_table(config, &table, true);
  if (s == FRUGAL_ERR_EXISTS && table && !table->created_here.exchange(true)) s = FRUGAL_OK;
  if (s == FRUGAL_OK) *out = std::move(table);
  return s;
}

static Status is_there(const TableRef& table, const frugal_table_config& config, TableRef* out) {
  FRUGAL_TRY(meant_table(*table, config));
  *out = table;
  return table_exists();
}

// A table and its rows, which no other thread sees yet.
Status Engine::open_table(const frugal_table_config& config, bool here, bool blank, TableRef* out) {
  auto table = std::allocate_shared<Table>(HeapAllocator<Table>());
  table->session = shared_from_this();
  table->name = config.name;
  table->dim = config.dim;
  table->any_key = config.key_space == FRUGAL_HASHED;
  table->keys_are_slots = !table->any_key;
  table->capacity = config.rows;
  table->nan_policy = config.nan_policy;
  table->created_here.store(here);
  table->config = config;
  table->config.name = table->name.c_str();
  Rows::Config rows;
  rows.capacity = config.rows;
  rows.hashed = config.key_space == FRUGAL_HASHED;
  rows.lazy = (config.flags & FRUGAL_TABLE_LAZY) != 0;
  rows.shared = config_.backing == FRUGAL_BACKING_SHM;
  rows.layout = RowLayout::of(config.dim, config.optimizer.kind);
  rows.init =
      arith::init_spec(config.init, config.init_a, config.init_b, config.rows, config.dim,
                       arith::table_hash(config_.seed, config.name, std::strlen(config.name)),
                       config.optimizer.kind, config.optimizer.initial_accumulator);
  rows.pinner = memory_.pinner;
  if (stale()) flusher_.make_room(rows.layout.bytes());
  table->stride = rows.layout.sums_stride;
  Tier tier;
  if (const auto make = g_make_tier.load(); make && rows.hashed) tier = make(config);
  if (tier.store) {
    tier.room = [this] {
      workers_.wake();
      workers_.progress();
    };
    tiered_tables_.fetch_add(1);
  }
  FRUGAL_TRY(table->rows.open(rows, &memory_.budget, std::move(tier)));
  if (!rows.hashed && !rows.lazy) {
    // All of it at once, before the first page of it is touched.
    FRUGAL_TRY(os_check_available(config.rows * rows.layout.bytes()));
  }
  if (!rows.hashed && !rows.lazy && !blank) {
    InitContext context{&table->rows, config.rows, nullptr, {}};
    size_t chunk = table->rows.chunk_rows();
    Status done = workers_.parallel((config.rows + chunk - 1) / chunk, init_chunk, &context);
    if (Status s = done ? done : context.status.load())
      // The message may be that of a worker's thread: this thread gives its own.
      return fail(s,
                  "the memory of %llu rows of %u cannot be had: %smemory or "
                  "host_bytes is exhausted (%s are left of host_bytes, the machine has %llu "
                  "bytes): drop a table, or "
                  "create a smaller one",
                  static_cast<unsigned long long>(config.rows), config.dim,
                  memory_.pinner->any() ? "memory that can be pinned, or " : "",
                  memory_.budget.left_text().c_str(),
                  static_cast<unsigned long long>(available_bytes()));
  }
  *out = std::move(table);
  return FRUGAL_OK;
}

Status Engine::create_table(const frugal_table_config& config, TableRef* out, bool here,
                            uint64_t number, bool blank) {
  FRUGAL_TRY(check());
  {
    ControlLock lock(mu_);
    if (const TableRef t = tables_.find(config.name)) return is_there(t, config, out);
    for (const TrainerRef& t : ranks_)
      if (t && t->in_step)
        return fail(FRUGAL_ERR_BUSY, "rank %u is inside step %llu: create tables outside steps",
                    t->rank, static_cast<unsigned long long>(t->step));
  }
  TableRef table;
  FRUGAL_TRY(open_table(config, here, blank, &table));
  uint64_t opening;
  FRUGAL_TRY(checkpoints_.track_new(*table, config.optimizer.kind, number, &opening));
  ControlLock lock(mu_);
  if (checkpoints_.opening() != opening)
    return fail(FRUGAL_ERR_BUSY,
                "the folder of checkpoints was opened or closed meanwhile: call again");
  // If the engine was closed meanwhile, the closing thread has taken the tables away: no thread
  // would free this one.
  FRUGAL_TRY(check());
  if (const TableRef t = tables_.find(config.name)) return is_there(t, config, out);
  // A trainer on a GPU that joined meanwhile has not seen this table.
  for (bool any = true; any;) FRUGAL_TRY(table->rows.pin_next(&any));
  table->schedule[0] = config.optimizer;
  tables_.expect();
  table->handle = handle_of<AnyTable>(table);
  if (!table->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
  struct Unmade {
    uint64_t handle;
    ~Unmade() {
      if (handle) handle_remove(HandleKind::kTable, handle);
    }
  } unmade{table->handle};
  if (stale()) table->rows.read_beside(memory_.versions(), table->handle);
  if (tables_.ledger) {
    const Rows& rows = table->rows;
    FRUGAL_TRY(ledger()->add_table(table->handle, rows.layout(), rows.init(), &table->ledger));
    table->ledger->watch(table->rows);
  }
  tables_.add(table);
  unmade.handle = 0;
  if (meters_.trace.on()) meters_.trace.name_table(table->number, table->name);
  *out = table;
  return FRUGAL_OK;
}

Status Engine::drop_table(const AnyTableRef& any) {
  const TableRef table = std::static_pointer_cast<Table>(any);
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  return remove_table(table);
}

// Nothing in it needs memory, so the table is dropped whole, or not at all.
Status Engine::remove_table(const TableRef& table) {
  {
    ControlLock lock(mu_);
    if (!tables_.has(table))
      return fail(FRUGAL_ERR_BAD_HANDLE, "it was dropped already: the handle is closed");
    // Background work on its declarations must have ended.
    table->dropped.store(true);
    declarations_.close_table(*table);
    workers_.await(lock, [&] { return declarations_.drop_table(*table); });
    tables_.remove(table);
    if (table->ledger) table->ledger->forget();
  }
  ranks_.each([&](Trainer& t) {
    // Not under call_mu: its holder may be at the gate, waiting for this thread. No rank is inside
    // a step, so no other thread uses a cache.
    drop_cache(t, *table);
    ControlLock lock(mu_);
    std::erase_if(t.backlog, [&](const Trainer::Late& late) { return late.table == table; });
  });
  handle_remove(HandleKind::kTable, table->handle);
  return FRUGAL_OK;
}

Status Engine::first_step_allowed(uint64_t first_step) const {
  const uint64_t committed = ranks_.committed();
  if (committed != kNoStep && first_step <= committed)
    return fail(FRUGAL_ERR_STEP_RANGE, "first_step %llu is committed: give %llu or a later one",
                static_cast<unsigned long long>(first_step),
                static_cast<unsigned long long>(committed + 1));
  if ((!phase_.may(Phase::kWhole) || committer_.stalled()) && first_step <= ranks_.next_commit())
    return fail(FRUGAL_ERR_STEP_RANGE,
                "first_step %llu has been ended by all ranks: give a later one",
                static_cast<unsigned long long>(first_step));
  return FRUGAL_OK;
}

Status Engine::describe(AnyTable& table, frugal_table_info* out) {
  Table& t = own(table);
  frugal_table_info i;
  std::memset(&i, 0, sizeof i);
  i.struct_size = sizeof i;
  i.rows = t.rows.count();
  i.capacity = t.rows.most_rows();
  i.value_bytes = t.rows.layout().value_bytes();
  i.state_floats = t.rows.state_floats();
  i.memory_bytes = t.rows.memory_bytes();
  i.dim = t.rows.layout().dim;
  i.key_space = t.config.key_space;
  i.page_bytes = static_cast<uint32_t>(kHugePage);
  {
    ControlLock lock(mu_);
    i.optimizer = t.schedule.begin()->second.kind;
  }
  *out = i;
  return FRUGAL_OK;
}

Status Engine::set_optimizer(AnyTable& any, uint64_t first_step, const frugal_optimizer& wanted) {
  Table& table = own(any);
  FRUGAL_TRY(check());
  frugal_optimizer o = wanted;
  const bool renew = o.flags & FRUGAL_OPT_NEW_STATE;
  o.flags &= ~FRUGAL_OPT_NEW_STATE;
  for (std::optional<OutsideScope> scope;;) {
    {
      ControlLock lock(mu_);
      FRUGAL_TRY(check_step(first_step));
      FRUGAL_TRY(first_step_allowed(first_step));
      const frugal_optimizer was = of_its_kind(table.schedule.begin()->second);
      const float accumulator = of_its_kind(o).initial_accumulator;
      const bool same = o.kind == was.kind && std::memcmp(&accumulator, &was.initial_accumulator,
                                                          sizeof accumulator) == 0;
      if (same && !renew) {
        // Entries that held before the last committed step have no use any more.
        if (ranks_.committed() != kNoStep) {
          auto now = table.schedule.upper_bound(ranks_.next_commit());
          if (now != table.schedule.begin())
            table.schedule.erase(table.schedule.begin(), std::prev(now));
        }
        if (table.schedule.size() > kMostChanges && !table.schedule.count(first_step))
          return fail(
              FRUGAL_ERR_INVALID_ARGUMENT,
              "%zu changes of the optimizer wait for later steps: at most %zu; give this one when "
              "some of those steps are committed",
              table.schedule.size() - 1, kMostChanges);
        table.schedule[first_step] = o;
        return FRUGAL_OK;
      }
      if (table.has_state.load() && !renew)
        return fail(
            FRUGAL_ERR_INVALID_ARGUMENT,
            "optimizer.kind is %d and initial_accumulator %.9g: the table's, %d and %.9g, are "
            "fixed since its first update, or since rows were put with state; FRUGAL_OPT_NEW_STATE "
            "gives up that state",
            o.kind, double{accumulator}, was.kind, double{was.initial_accumulator});
    }
    const bool pending =
        workers_.applying() || (table.window.opened() && table.window.any_pending());
    if (scope && !pending) return change_kind(table, o);
    scope.reset();
    if (table.has_state.load()) FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
    scope.emplace(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
    FRUGAL_TRY(scope->status());
  }
}

// Called outside of steps. Rows keep their values; their state becomes that of new rows. A process
// that has mapped the former state reads the tables out of it, as they were, until the ledger
// forgets its former record.
Status Engine::change_kind(Table& table, const frugal_optimizer& o) {
  const frugal_table_config& c = table.config;
  FRUGAL_TRY(checkpoints_.await_idle(deadline(FRUGAL_TIMEOUT_DEFAULT).at));
  Rows& rows = table.rows;
  Rows::State state;
  state.layout = RowLayout::of(c.dim, o.kind);
  state.init = arith::init_spec(c.init, c.init_a, c.init_b, c.rows, c.dim, rows.init().table,
                                o.kind, o.initial_accumulator);
  Map<uint64_t, frugal_optimizer> schedule;
  schedule[0] = o;
  if (stale()) flusher_.make_room(state.layout.bytes());
  FRUGAL_TRY(rows.open_state(&state));
  if (!rows.lazy()) {
    const size_t bytes = c.rows * state.layout.state_pitch;
    FRUGAL_TRY(os_check_available(bytes));
    InitContext context{&rows, c.rows, &state, {}};
    const size_t chunk = rows.chunk_rows();
    const Status done = workers_.parallel((c.rows + chunk - 1) / chunk, init_chunk, &context);
    if (Status s = done ? done : context.status.load())
      return fail(s,
                  "no memory for the state of optimizer.kind %d: memory or host_bytes is "
                  "exhausted (%s are left of host_bytes); its optimizer is what it was",
                  o.kind, memory_.budget.left_text().c_str());
  }
  std::shared_ptr<TableLedger> ledger;
  if (const auto& all = tables_.ledger)
    FRUGAL_TRY(all->add_table(table.handle, state.layout, state.init, &ledger));
  ranks_.each([&](Trainer& t) { drop_cache(t, table); });
  Lock told(table.kind_mu);
  FRUGAL_TRY(rows.take_state(&state));
  if (table.tracked) table.tracked->files.change_kind(o.kind);
  table.has_state.store(false);
  ControlLock lock(mu_);
  table.schedule.swap(schedule);
  if (!ledger) return FRUGAL_OK;
  ledger->watch(rows, table.ledger.get());
  table.ledger.swap(ledger);
  ledger->forget();
  ++table.kinds;
  tables_.ledger->another_kind();
  return FRUGAL_OK;
}

Status Engine::stats(frugal_stats* out) {
  frugal_stats s;
  std::memset(&s, 0, sizeof s);
  s.struct_size = sizeof s;
#define COUNTED(name, kind, help) s.name = meters_.counters.name.load(std::memory_order_relaxed);
#define BY_RANK(name, kind, help) s.name = meters_.of_ranks.sum(&RankCounters::name);
#define SKIP(name, kind, help)
  FRUGAL_STATS(COUNTED, BY_RANK, SKIP)
#undef COUNTED
#undef BY_RANK
#undef SKIP
  for (const TableRef& t : tables_.now()) {
    if (!t->window.opened()) continue;
    WindowStats w = t->window.stats();
    s.priority_rises += w.rises;
    s.priority_falls += w.falls;
    s.enqueued += w.enqueued;
    s.dequeued += w.dequeued;
    s.pending_rows += w.pending;
    s.active_rows += w.active;
  }
  s.pending_bytes = pacing_.pending();
  *out = s;
  return FRUGAL_OK;
}

}  // namespace frugal
