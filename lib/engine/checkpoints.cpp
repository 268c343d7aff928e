#include "engine/checkpoints.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/assert.h"
#include "checkpoint/stored_checkpoints.h"

namespace frugal {
namespace {

constexpr uint32_t kIoThreads = 2;
constexpr uint32_t kPiecesAtOnce = 16;
constexpr uint64_t kPauseNs = 200'000;  // between two polls

std::atomic<uint64_t> g_pause{0};
std::atomic<uint64_t> g_budget{uint64_t{32} << 20};  // of bytes of copies

// The first step that a snapshot does not have.
uint64_t step_after(uint64_t snapshot) { return snapshot == kNoStep ? 0 : snapshot + 1; }

Status was_closed() {
  return fail(FRUGAL_ERR_CLOSED, "the engine was closed before the checkpoint was on disk");
}

}  // namespace

void checkpoint_test_pause(uint64_t ns) { g_pause.store(ns); }
void checkpoint_test_budget(uint64_t bytes) { g_budget.store(bytes); }

bool Checkpoints::within_budget() { return buffers_.within(g_budget.load()); }

void Checkpoints::await_room() noexcept {
  while (!within_budget()) sleep_ns(kPauseNs);
}

Checkpoints::~Checkpoints() { stop(); }

void Checkpoints::stop() noexcept {
  stopping_.store(true);
  {
    Lock lock(mu_);
    if (state_ == State::kRequested) {
      was_closed();
      end(recorded_error());
    }
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  kept_.close();
}

// --- The folder ----------------------------------------------------------------------------------

Status Checkpoints::open(const char* path, const frugal_folder_config& config) {
  if (opened())
    return fail(FRUGAL_ERR_EXISTS, "the engine writes its checkpoints to '%s': close that first",
                to_.folder->path());
  std::shared_ptr<Folder> folder;
  FRUGAL_TRY(Folder::open(path, Folder::Use::kCreate, &folder));
  auto queue = std::make_unique<IoQueue>();
  FRUGAL_TRY(queue->open(kIoThreads));
  queue_ = std::move(queue);
  to_.folder = std::move(folder);
  to_.queue = queue_.get();
  to_.buffers = &buffers_;
  to_.direct = true;
  KeptCheckpoints::Next next;
  Status status = kept_.open(to_.folder, config.keep, &next);
  to_.next_file.store(next.file);
  next_table_.store(next.table);
  {
    Lock lock(mu_);
    next_number_ = next.sequence;
    number_ = 0;
    for (Result& r : results_) r.number = 0;
    schedule_ = {};
    schedule_.every_steps = config.every_steps;
    schedule_.every_ns =
        config.every_ms
            ? ns_of_ms(static_cast<int64_t>(std::min<uint64_t>(config.every_ms, INT64_MAX)))
            : 0;
    schedule_.since = now_ns();
    scheduled_.store(config.every_steps || config.every_ms);
  }
  opening_.store(++openings_);  // a table that is created from here on is tracked by its creator
  for (const TableRef& t : of_.tables.now()) {
    if (status != FRUGAL_OK) break;
    if (t->tracked) continue;  // by its creator
    int32_t kind;
    {
      ControlLock lock(of_.mu);
      kind = t->schedule.begin()->second.kind;
    }
    status = track(*t, kind, false, 0);
  }
  if (status == FRUGAL_OK && !thread_.joinable()) {
    try {
      thread_ = Thread([this] { main(); });
    } catch (...) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no thread for checkpoints can be started");
    }
  }
  if (status != FRUGAL_OK) {
    const KeepError keep_error;
    close();
    return status;
  }
  Lock lock(mu_);
  accepting_ = true;
  return FRUGAL_OK;
}

Status Checkpoints::close() {
  if (!opened()) return no_folder();
  {
    Lock lock(mu_);
    FRUGAL_TRY(may_displace());
    accepting_ = false;
    wanted_.store(kNoStep);
    scheduled_.store(false);
    state_ = State::kIdle;
    opening_.store(0);
    to_.folder.reset();  // blobs of the last step stay, for another folder
    number_ = 0;
    for (Result& r : results_) r.number = 0;
  }
  changed_.notify_all();
  for (const TableRef& t : of_.tables.now())
    if (t->tracked) {
      t->tracked->tracker.close();
      t->tracked.reset();
    }
  queue_.reset();
  kept_.close();
  return FRUGAL_OK;
}

Status Checkpoints::track_new(Table& table, int32_t kind, uint64_t number, uint64_t* opening) {
  *opening = opening_.load();
  return *opening ? track(table, kind, true, number) : FRUGAL_OK;
}

Status Checkpoints::track(Table& table, int32_t kind, bool unchanged, uint64_t number) {
  if (table.rows.tier())
    return fail(FRUGAL_ERR_UNSUPPORTED, "rows of table '%s' may be stored elsewhere",
                table.name.c_str());
  auto tracked = std::make_unique<TrackedTable>();
  MemoryBudget* budget = &of_.memory.budget;
  if (!number) number = next_table_.fetch_add(1);
  // open() may have failed to read the manifest that the number is from.
  for (uint64_t next = next_table_.load();
       next <= number && !next_table_.compare_exchange_weak(next, number + 1);) {
  }
  FRUGAL_TRY(tracked->files.open(table.rows, tracked->tracker, number, kind, &to_, budget));
  FRUGAL_TRY(tracked->tracker.open(table.rows, &tracked->files, budget, unchanged));
  table.tracked = std::move(tracked);
  return FRUGAL_OK;
}

// OK: there is no checkpoint, or one that is due by itself and has not begun.
Status Checkpoints::may_displace() const {
  if (state_ == State::kIdle || (state_ == State::kRequested && by_itself_)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_BUSY, "checkpoint %llu is being written: wait for it, or cancel it",
              static_cast<unsigned long long>(number_));
}

// --- Tickets -------------------------------------------------------------------------------------

Status Checkpoints::request(const frugal_checkpoint_config& config, uint64_t* number) {
  BlobsRef blobs;
  if (config.blob) {
    blobs = std::allocate_shared<Blobs>(HeapAllocator<Blobs>());
    blobs->of_ranks.resize(1);
    FRUGAL_TRY(blobs->of_ranks[0].set(config.blob_rank, config.blob, config.blob_size,
                                      of_.memory.unread()));
  }
  ControlLock lock(of_.mu);
  const bool now = config.step == kNoStep;
  if (now) {
    // No step is committed meanwhile, and no row changes outside of steps.
    if (!of_.phase.await(lock, Phase::kGet)) return was_closed();
    of_.phase.begin(Phase::kGet);
  }
  struct End {
    Phase& phase;
    const bool begun;
    ~End() {
      if (begun) phase.end(Phase::kGet);
    }
  } end_phase{of_.phase, now};
  Lock mine(mu_);
  if (!accepting_) return no_folder();
  FRUGAL_TRY(to_.folder->may_write());
  const uint64_t last = of_.ranks.committed();
  if (!now && last != kNoStep && config.step <= last)
    return fail(FRUGAL_ERR_STEP_RANGE, "step %llu is committed already: choose a later one",
                static_cast<unsigned long long>(config.step));
  if (stopping_.load()) return was_closed();
  FRUGAL_TRY(may_displace());
  if (state_ == State::kRequested && of_.ranks.begun() > wanted_.load())
    return fail(FRUGAL_ERR_BUSY,
                "a rank is inside of step %llu, which will be checkpoint %llu: call again after it",
                static_cast<unsigned long long>(wanted_.load()),
                static_cast<unsigned long long>(number_));
  if (state_ == State::kRequested) {
    fail(FRUGAL_ERR_CLOSED,
         "checkpoint %llu was due by itself, and a call began another one: use that",
         static_cast<unsigned long long>(number_));
    end(recorded_error());
  }
  if (blobs && blobs_)
    for (const Blob& b : blobs_->of_ranks)
      if (b.rank != config.blob_rank) blobs->of_ranks.push_back(b);
  if (!blobs) blobs = blobs_;
  begin(config.step, config.name ? config.name : "", false);
  *number = number_;
  if (now) take(std::move(blobs));
  return FRUGAL_OK;
}

void Checkpoints::begin(uint64_t step, const char* name, bool by_itself) {
  name_ = name;
  number_ = next_number_++;
  by_itself_ = by_itself;
  cancelled_.store(false);
  state_ = State::kRequested;
  wanted_.store(step);
  changed_.notify_all();  // threads that wait for the former one
}

// The present checkpoint has ended.
void Checkpoints::end(const CallError& error) {
  Result& result = results_[number_ % kResults];
  result.number = number_;
  result.error = error;
  wanted_.store(kNoStep);
  state_ = State::kIdle;
  changed_.notify_all();
  if (error.status != FRUGAL_OK)
    of_.meters.counters.checkpoints_failed.fetch_add(1, std::memory_order_relaxed);
}

Status Checkpoints::wait(uint64_t number, uint64_t until, frugal_checkpoint_info* info) {
  UniqueLock lock(mu_);
  if (number == 0) number = number_;
  const auto ended = [&]() REQUIRES(mu_) { return number != number_ || state_ == State::kIdle; };
  const bool in_time = changed_.wait_until(lock, until, ended);
  if (!in_time)
    return fail(FRUGAL_ERR_TIMEOUT, "checkpoint %llu is not on disk yet%s; call again",
                static_cast<unsigned long long>(number),
                state_ == State::kRequested ? ", its step is not committed" : "");
  const Result& result = results_[number % kResults];
  if (number == 0 || result.number != number)
    return fail(FRUGAL_ERR_NOT_FOUND,
                number ? "checkpoint %llu is none of the last %llu that were begun since the "
                         "engine opened its folder"
                       : "no checkpoint was begun since the engine opened its folder",
                static_cast<unsigned long long>(number), static_cast<unsigned long long>(kResults));
  if (result.error.status) return fail_as(result.error);
  if (info) *info = result.info;
  return FRUGAL_OK;
}

Status Checkpoints::await_idle(uint64_t until) {
  UniqueLock lock(mu_);
  if (changed_.wait_until(lock, until, [&]() REQUIRES(mu_) { return state_ != State::kTaken; }))
    return FRUGAL_OK;
  return fail(FRUGAL_ERR_TIMEOUT, "waited for checkpoint %llu to be on disk; call again",
              static_cast<unsigned long long>(number_));
}

Status Checkpoints::cancel(uint64_t number) {
  Lock lock(mu_);
  if (state_ == State::kIdle || (number != 0 && number != number_))
    return fail(FRUGAL_ERR_NOT_FOUND,
                "checkpoint %llu is not being written: frugal_checkpoint_wait gives its result",
                static_cast<unsigned long long>(number));
  if (state_ == State::kTaken) {
    cancelled_.store(true);
    return FRUGAL_OK;
  }
  fail(FRUGAL_ERR_CLOSED, "checkpoint %llu was cancelled: begin another one",
       static_cast<unsigned long long>(number_));
  end(recorded_error());
  return FRUGAL_OK;
}

Status Checkpoints::remove(uint64_t number) { return kept_.remove(number); }

// --- The snapshot --------------------------------------------------------------------------------

bool Checkpoints::Schedule::due(uint64_t step) const {
  return (every_steps && step - next_step + 1 >= every_steps) ||
         (every_ns && now_ns() - since >= every_ns);
}

void Checkpoints::beginning(uint64_t step) noexcept {
  if (!scheduled_.load(std::memory_order_relaxed)) return;
  Lock lock(mu_);
  if (schedule_.next_step == kNoStep) schedule_.next_step = step;
  if (state_ != State::kIdle || !accepting_ || stopping_.load() || !schedule_.due(step)) return;
  const KeepError keep_error;
  if (to_.folder->may_write() == FRUGAL_OK) begin(step, "", true);
}

void Checkpoints::restored(BlobsRef blobs) {
  Lock lock(mu_);
  blobs_.swap(blobs);
  has_blobs_.store(blobs_ != nullptr);
}

void Checkpoints::committed(uint64_t step, BlobsRef* blobs) noexcept {
  const uint64_t wanted = wanted_.load(std::memory_order_relaxed);
  if (step < wanted && !*blobs && !has_blobs_.load(std::memory_order_relaxed)) return;
  Lock lock(mu_);
  blobs_.swap(*blobs);
  has_blobs_.store(blobs_ != nullptr);
  if (step < wanted || state_ != State::kRequested) return;
  if (step == wanted) return take(blobs_);
  fail(FRUGAL_ERR_STEP_RANGE,
       "the steps begin after step %llu, of which the checkpoint was to be: choose a later one",
       static_cast<unsigned long long>(wanted));
  end(recorded_error());
}

// The tables are as they are to be on disk. What memory it takes is for names.
void Checkpoints::take(BlobsRef blobs) noexcept {
  const uint64_t last = of_.ranks.committed(), next = step_after(last);
  try {
    Manifest m;
    m.sequence = number_;
    m.step = last;
    m.seed = of_.config.seed;
    m.world_size = of_.ranks.size();
    m.name = name_;
    snapshot_.clear();
    for (const TableRef& t : of_.tables)
      if (t->tracked) snapshot_.push_back(t);
    // A manifest lists tables by number. Threads may add tables in another order than they took
    // the numbers.
    const auto number_of = [](const TableRef& t) { return t->tracked->files.number(); };
    std::sort(snapshot_.begin(), snapshot_.end(),
              [&](const TableRef& a, const TableRef& b) { return number_of(a) < number_of(b); });
    for (const TableRef& t : snapshot_) {
      m.tables.emplace_back();
      ManifestTable& to = m.tables.back();
      to.number = number_of(t);
      to.name = t->name;
      to.config = t->config;
      to.config.name = nullptr;
      to.has_state = t->has_state.load();
      to.optimizer = t->optimizer_at(next);
      for (auto at = t->schedule.upper_bound(next); at != t->schedule.end(); ++at)
        to.later.push_back({at->first, at->second});
    }
    manifest_ = std::move(m);
  } catch (const std::bad_alloc&) {
    snapshot_.clear();
    fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to begin the checkpoint");
    return end(recorded_error());
  }
  for (const TableRef& t : snapshot_) {
    t->tracked->files.begin(number_);
    t->tracked->tracker.begin(next);
  }
  snapshot_blobs_ = std::move(blobs);
  of_.pacing.saving(true);
  schedule_.next_step = next;
  schedule_.since = now_ns();
  wanted_.store(kNoStep);
  state_ = State::kTaken;
  changed_.notify_all();
}

// --- Writing -------------------------------------------------------------------------------------

void Checkpoints::main() {
  os_background_thread();
  UniqueLock lock(mu_);
  for (;;) {
    changed_.wait(lock,
                  [&]() REQUIRES(mu_) { return state_ == State::kTaken || stopping_.load(); });
    if (state_ != State::kTaken) return;
    Manifest manifest = std::exchange(manifest_, {});
    const Vector<TableRef> tables = std::exchange(snapshot_, {});
    BlobsRef blobs = std::exchange(snapshot_blobs_, nullptr);
    lock.unlock();
    TraceSpan span(of_.meters.trace, SpanKind::kCheckpoint);
    span.step(manifest.step);
    Status status;
    try {
      status = write(tables, blobs, &manifest);
    } catch (const std::bad_alloc&) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to write the checkpoint");
    }
    const CallError error = status == FRUGAL_OK ? CallError() : recorded_error();
    for (const TableRef& t : tables) {
      t->tracked->tracker.end(status == FRUGAL_OK);
      t->tracked->files.end(status == FRUGAL_OK);
    }
    if (status == FRUGAL_OK) {
      kept_.add();
      for (const TableRef& t : tables) t->tracked->files.clean();
      count_time();
    } else {
      kept_.drop();
      if (manifest.blob_bytes > 0) to_.folder->remove(blob_name(manifest.sequence).c_str());
    }
    of_.pacing.saving(false);
    span.more(count(tables, manifest, status == FRUGAL_OK));
    blobs.reset();
    of_.workers.progress();
    lock.lock();
    if (status == FRUGAL_OK) results_[number_ % kResults].info = info_of(manifest);
    const bool told = by_itself_ && status != FRUGAL_OK && status != FRUGAL_ERR_CLOSED;
    end(error);
    lock.unlock();
    if (told) of_.log(0, error.message);
    lock.lock();
  }
}

// Counts what was written; returns how many records.
uint64_t Checkpoints::count(const Vector<TableRef>& tables, const Manifest& m, bool kept) {
  Counters& to = of_.meters.counters;
  uint64_t copies = 0, records = 0, bytes = 0;
  for (const TableRef& t : tables) copies += t->tracked->new_copies();
  to.checkpoint_copies.fetch_add(copies, std::memory_order_relaxed);
  if (!kept) return 0;
  for (const ManifestTable& t : m.tables)
    for (const ManifestFile& f : t.files)
      if (f.info.sequence == m.sequence) {
        records += f.info.records;
        bytes += f.info.length;
      }
  to.checkpoint_rows.fetch_add(records, std::memory_order_relaxed);
  to.checkpoint_bytes.fetch_add(bytes + m.blob_bytes, std::memory_order_relaxed);
  to.checkpoints.fetch_add(1, std::memory_order_relaxed);
  return records;
}

// Flush threads come before this one, so the time that it saves rows is no reason not to defer
// updates.
void Checkpoints::count_time() noexcept {
  const uint64_t now = thread_cpu_ns();
  of_.pacing.spared(now - std::exchange(cpu_ns_, now));
}

// Whether it is still wanted.
Status Checkpoints::going_on() {
  if (stopping_.load()) return was_closed();
  if (cancelled_.load())
    return fail(FRUGAL_ERR_CLOSED, "the checkpoint of the engine was cancelled: begin another one");
  return of_.workers.healthy();
}

Status Checkpoints::write(const Vector<TableRef>& tables, const BlobsRef& blobs, Manifest* m) {
  FRUGAL_TRY(await_written(tables, step_after(m->step)));
  for (size_t i = 0; i < tables.size(); ++i) {
    FRUGAL_TRY(save_rows(tables, *tables[i]));
    FRUGAL_TRY(going_on());
    // Before the next table, so that a table's last buffer does not stay.
    FRUGAL_TRY(tables[i]->tracked->files.finish(&m->tables[i]));
  }
  if (blobs) FRUGAL_TRY(write_blobs(*to_.folder, *blobs, m));
  m->created = static_cast<uint64_t>(time(nullptr));
  m->next_table = next_table_.load();
  m->next_file = to_.next_file.load();
  // Before the checkpoint exists, so that nothing fails afterwards.
  FRUGAL_TRY(kept_.expect(*m));
  FRUGAL_TRY(going_on());
  return write_manifest(*to_.folder, *m);
}

// Waits until all updates of steps before `next_step` are written, and writes some itself.
Status Checkpoints::await_written(const Vector<TableRef>& tables, uint64_t next_step) {
  bool jobs = true;  // later jobs do not matter, so each is awaited once
  for (size_t at = 0; jobs || at < tables.size();) {
    FRUGAL_TRY(going_on());
    if (buffers_.complete() > g_budget.load()) FRUGAL_TRY(collect(tables));
    jobs = jobs && of_.workers.applying();
    while (at < tables.size() &&
           !(tables[at]->window.opened() && tables[at]->window.unwritten_before(next_step)))
      ++at;
    if ((jobs || at < tables.size()) && !of_.flusher.write(UINT64_MAX) && !of_.workers.help(false))
      sleep_ns(kPauseNs);
  }
  cpu_ns_ = thread_cpu_ns();  // until here it did what other threads would have had to do
  return FRUGAL_OK;
}

Status Checkpoints::save_rows(const Vector<TableRef>& tables, Table& table) {
  RowTracker& tracker = table.tracked->tracker;
  for (uint32_t pieces = 0; tracker.save_some(); ++pieces) {
    if (const uint64_t ns = g_pause.load(std::memory_order_relaxed)) sleep_ns(ns);
    yield_thread();  // to flush threads: a gate may wait for them
    if (pieces % kPiecesAtOnce != 0) continue;
    FRUGAL_TRY(table.tracked->files.finish_full());
    count_time();
    FRUGAL_TRY(going_on());
    FRUGAL_TRY(table.tracked->files.collect());
    // Writers of rows can always copy what they are about to change: this thread leaves them most
    // of the budget. It also reuses few buffers, which stay in the processor's cache.
    while (buffers_.complete() > g_budget.load() / 8) {
      sleep_ns(kPauseNs);
      FRUGAL_TRY(collect(tables));
    }
  }
  tracker.stop_saving();
  return table.tracked->files.finish_full();
}

// Gives back memory that is on disk.
Status Checkpoints::collect(const Vector<TableRef>& tables) {
  FRUGAL_TRY(going_on());
  for (const TableRef& t : tables) FRUGAL_TRY(t->tracked->files.collect());
  return FRUGAL_OK;
}

}  // namespace frugal
