#include "engine/checkpoints.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/assert.h"

namespace frugal {
namespace {

constexpr uint32_t kIoThreads = 2;
constexpr uint32_t kPiecesAtOnce = 16;
constexpr uint64_t kPauseNs = 200'000;  // between two polls

std::atomic<uint64_t> g_pause{0};

// The first step that a snapshot does not have.
uint64_t step_after(uint64_t snapshot) { return snapshot == kNoStep ? 0 : snapshot + 1; }

Status was_closed() {
  return fail(FRUGAL_ERR_CLOSED, "the engine was closed before the checkpoint was on disk");
}

}  // namespace

void checkpoint_test_pause(uint64_t ns) { g_pause.store(ns); }

Checkpoints::~Checkpoints() { stop(); }

void Checkpoints::stop() noexcept {
  stopping_.store(true);
  {
    Lock lock(mu_);
    if (state_ == State::kRequested) {
      state_ = State::kEnded;
      result_ = {};
      result_.status = FRUGAL_ERR_CLOSED;
    }
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// --- The folder ----------------------------------------------------------------------------------

Status Checkpoints::open(const char* path, uint32_t keep) {
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
  keep_ = keep;
  Status status = look_at_folder();
  opened_.store(true);  // a table that is created from here on is tracked by its creator
  for (const TableRef& t : of_.tables.now()) {
    if (status != FRUGAL_OK) break;
    int32_t kind;
    {
      ControlLock lock(of_.mu);
      kind = t->schedule.begin()->second.kind;
    }
    status = track(*t, kind, false);
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
  }
  return status;
}

Status Checkpoints::close() {
  {
    Lock lock(mu_);
    if (state_ == State::kRequested || state_ == State::kTaken)
      return fail(FRUGAL_ERR_BUSY, "checkpoint %llu is being written: wait for it, or cancel it",
                  static_cast<unsigned long long>(sequence_));
    state_ = State::kIdle;
  }
  opened_.store(false);
  for (const TableRef& t : of_.tables.now())
    if (t->tracked) {
      t->tracked->tracker.close();
      t->tracked.reset();
    }
  queue_.reset();
  to_.folder.reset();
  kept_.clear();
  return FRUGAL_OK;
}

Checkpoints::Kept Checkpoints::kept_of(const Manifest& m) {
  Kept kept;
  kept.name = m.name;
  for (const ManifestTable& t : m.tables)
    for (const ManifestFile& f : t.files) kept.files.push_back(f.info.number);
  return kept;
}

// What is in the folder: its checkpoints, and what an engine has left that is none.
Status Checkpoints::look_at_folder() {
  Folder& folder = *to_.folder;
  Vector<String> names;
  FRUGAL_TRY(folder.list(&names));
  Vector<uint64_t> sequences;
  FRUGAL_TRY(list_manifests(folder, &sequences));
  uint64_t next_file = 1, next_table = 1;
  kept_.clear();
  all_known_ = true;
  for (const uint64_t s : sequences) {
    Manifest m;
    File held;
    const Status status = read_manifest(folder, s, &m, &held);
    if (status == FRUGAL_ERR_OUT_OF_MEMORY) return status;
    if (status != FRUGAL_OK) {
      all_known_ = false;  // no file is removed that it may need
      continue;
    }
    kept_[s] = kept_of(m);
    next_file = std::max(next_file, m.next_file);
    next_table = std::max(next_table, m.next_table);
  }
  for (const String& name : names) {
    uint64_t number;
    if (parse_name(name.c_str(), &number) == FileKind::kRows)
      next_file = std::max(next_file, number + 1);
  }
  to_.next_file.store(next_file);
  next_table_.store(next_table);
  {
    Lock lock(mu_);
    next_sequence_ = sequences.empty() ? 1 : sequences.back() + 1;
  }
  remove_old();
  return FRUGAL_OK;
}

// Removes checkpoints beyond those that are kept, and files that no checkpoint has.
void Checkpoints::remove_old() noexcept try {
  const KeepError keep_error;
  Folder& folder = *to_.folder;
  uint32_t unnamed = 0;
  for (auto at = kept_.end(); at != kept_.begin();) {
    --at;
    if (!at->second.name.empty() || ++unnamed <= std::max(keep_, 1u)) continue;
    bool in_use = false;
    if (delete_manifest(folder, at->first, &in_use) == FRUGAL_OK && !in_use) at = kept_.erase(at);
  }
  if (!all_known_) return;
  Vector<uint64_t> needed;
  for (const auto& [s, k] : kept_) needed.insert(needed.end(), k.files.begin(), k.files.end());
  std::sort(needed.begin(), needed.end());
  Vector<String> names;
  if (folder.list(&names) != FRUGAL_OK) return;
  for (const String& name : names) {
    uint64_t number;
    const FileKind kind = parse_name(name.c_str(), &number);
    const bool old =
        kind == FileKind::kNew ||
        (kind == FileKind::kRows && !std::binary_search(needed.begin(), needed.end(), number)) ||
        (kind == FileKind::kBlob && !kept_.count(number));
    if (old) folder.remove(name.c_str());
  }
} catch (const std::bad_alloc&) {
}

Status Checkpoints::track(Table& table, int32_t kind, bool unchanged, uint64_t number) {
  FRUGAL_ASSERT(to_.folder);
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

// --- Tickets -------------------------------------------------------------------------------------

Status Checkpoints::request(const CheckpointConfig& config, uint64_t* sequence) {
  if (!opened())
    return fail(FRUGAL_ERR_NOT_FOUND, "the engine has no folder for checkpoints: open one first");
  FRUGAL_TRY(to_.folder->may_write());
  const String name = config.name;
  if (name.size() > kMostCheckpointName || name.find('/') != String::npos)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "a checkpoint's name has at most %zu bytes, and no slash: '%.64s'",
                kMostCheckpointName, name.c_str());
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
  } end{of_.phase, now};
  const uint64_t last = of_.ranks.committed();
  if (!now && last != kNoStep && config.step <= last)
    return fail(FRUGAL_ERR_STEP_RANGE, "step %llu is committed already: name a later one",
                static_cast<unsigned long long>(config.step));
  Lock mine(mu_);
  if (stopping_.load()) return was_closed();
  if (state_ == State::kRequested || state_ == State::kTaken)
    return fail(FRUGAL_ERR_BUSY, "checkpoint %llu is being written: wait for it, or cancel it",
                static_cast<unsigned long long>(sequence_));
  last_ = {};
  last_.name = name;
  sequence_ = next_sequence_++;
  result_ = {};
  cancelled_.store(false);
  state_ = State::kRequested;
  changed_.notify_all();  // threads that wait for the former one
  *sequence = sequence_;
  if (now)
    take();
  else
    wanted_.store(config.step);
  return FRUGAL_OK;
}

Status Checkpoints::wait(uint64_t sequence, uint64_t until, CheckpointInfo* info) {
  UniqueLock lock(mu_);
  const auto ended = [&]() REQUIRES(mu_) {
    return sequence != sequence_ || state_ == State::kIdle || state_ == State::kEnded;
  };
  const bool in_time = changed_.wait_until(lock, until, ended);
  if (sequence != sequence_ || state_ == State::kIdle)
    return fail(FRUGAL_ERR_NOT_FOUND, "%llu is not the last checkpoint that was begun",
                static_cast<unsigned long long>(sequence));
  if (!in_time)
    return fail(FRUGAL_ERR_TIMEOUT, "checkpoint %llu is not on disk yet%s; call again",
                static_cast<unsigned long long>(sequence),
                state_ == State::kRequested ? ", its step is not committed" : "");
  if (result_.status == FRUGAL_ERR_CLOSED && !result_.message[0]) return was_closed();
  if (result_.status) return fail_as(result_);
  if (info) *info = last_;
  return FRUGAL_OK;
}

Status Checkpoints::await_idle(uint64_t until) {
  UniqueLock lock(mu_);
  if (changed_.wait_until(lock, until, [&]() REQUIRES(mu_) { return state_ != State::kTaken; }))
    return FRUGAL_OK;
  return fail(FRUGAL_ERR_TIMEOUT, "waited for checkpoint %llu to be on disk; call again",
              static_cast<unsigned long long>(sequence_));
}

Status Checkpoints::cancel(uint64_t sequence) {
  UniqueLock lock(mu_);
  if (sequence != sequence_ || state_ == State::kIdle || state_ == State::kEnded)
    return fail(FRUGAL_ERR_NOT_FOUND, "checkpoint %llu is not being written",
                static_cast<unsigned long long>(sequence));
  cancelled_.store(true);
  if (state_ == State::kTaken) return FRUGAL_OK;
  wanted_.store(kNoStep);
  fail(FRUGAL_ERR_CLOSED, "the checkpoint was cancelled");
  result_ = recorded_error();
  state_ = State::kEnded;
  changed_.notify_all();
  return FRUGAL_OK;
}

// --- The snapshot --------------------------------------------------------------------------------

void Checkpoints::committed(uint64_t step) noexcept {
  const uint64_t wanted = wanted_.load(std::memory_order_relaxed);
  if (step < wanted) return;
  Lock lock(mu_);
  wanted_.store(kNoStep);
  if (state_ != State::kRequested) return;
  if (step == wanted) return take();
  fail(FRUGAL_ERR_STEP_RANGE, "the steps begin after step %llu: its checkpoint cannot be taken",
       static_cast<unsigned long long>(wanted));
  result_ = recorded_error();
  state_ = State::kEnded;
  changed_.notify_all();
}

// The tables are as they are to be on disk. What memory it takes is for names.
void Checkpoints::take() noexcept {
  const uint64_t last = of_.ranks.committed(), next = step_after(last);
  try {
    Manifest m;
    m.sequence = sequence_;
    m.step = last;
    m.seed = of_.config.seed;
    m.world_size = of_.ranks.size();
    m.name = last_.name;
    snapshot_.clear();
    for (const TableRef& t : of_.tables) {
      if (!t->tracked) continue;
      snapshot_.push_back(t);
      m.tables.emplace_back();
      ManifestTable& to = m.tables.back();
      to.number = t->tracked->files.number();
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
    result_ = recorded_error();
    state_ = State::kEnded;
    changed_.notify_all();
    return;
  }
  for (const TableRef& t : snapshot_) {
    t->tracked->files.begin(sequence_);
    t->tracked->tracker.begin(next);
  }
  state_ = State::kTaken;
  changed_.notify_all();
}

// --- Writing -------------------------------------------------------------------------------------

void Checkpoints::main() {
  UniqueLock lock(mu_);
  for (;;) {
    changed_.wait(lock,
                  [&]() REQUIRES(mu_) { return state_ == State::kTaken || stopping_.load(); });
    if (state_ != State::kTaken) return;
    Manifest manifest = std::exchange(manifest_, {});
    const Vector<TableRef> tables = std::exchange(snapshot_, {});
    lock.unlock();
    Status status;
    try {
      status = write(tables, &manifest);
    } catch (const std::bad_alloc&) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to write the checkpoint");
    }
    const CallError error = status == FRUGAL_OK ? CallError() : recorded_error();
    for (const TableRef& t : tables) {
      t->tracked->tracker.end(status == FRUGAL_OK);
      t->tracked->files.end(status == FRUGAL_OK);
    }
    if (status == FRUGAL_OK) {
      kept_.merge(newest_);
      remove_old();
      for (const TableRef& t : tables) t->tracked->files.clean();
    }
    of_.workers.progress();
    lock.lock();
    result_ = error;
    last_.sequence = manifest.sequence;
    last_.step = manifest.step;
    state_ = State::kEnded;
    changed_.notify_all();
  }
}

// Whether it is still wanted.
Status Checkpoints::going_on() {
  if (stopping_.load()) return was_closed();
  if (cancelled_.load()) return fail(FRUGAL_ERR_CLOSED, "the checkpoint was cancelled");
  return of_.workers.healthy();
}

Status Checkpoints::write(const Vector<TableRef>& tables, Manifest* m) {
  FRUGAL_TRY(await_written(tables, step_after(m->step)));
  for (const TableRef& t : tables) FRUGAL_TRY(save_rows(tables, *t));
  for (size_t i = 0; i < tables.size(); ++i) {
    FRUGAL_TRY(going_on());
    FRUGAL_TRY(tables[i]->tracked->files.finish(&m->tables[i]));
  }
  m->created = static_cast<uint64_t>(time(nullptr));
  m->next_table = next_table_.load();
  m->next_file = to_.next_file.load();
  // Before the checkpoint exists, so that nothing fails afterwards.
  newest_.clear();
  newest_[m->sequence] = kept_of(*m);
  FRUGAL_TRY(going_on());
  return write_manifest(*to_.folder, *m);
}

// Waits until all updates of steps before `next_step` are written, and writes some itself.
Status Checkpoints::await_written(const Vector<TableRef>& tables, uint64_t next_step) {
  bool jobs = true;  // later jobs do not matter, so each is awaited once
  for (size_t at = 0; jobs || at < tables.size();) {
    FRUGAL_TRY(going_on());
    if (!within_budget()) FRUGAL_TRY(collect(tables));
    jobs = jobs && of_.workers.applying();
    while (at < tables.size() &&
           !(tables[at]->window.opened() && tables[at]->window.unwritten_before(next_step)))
      ++at;
    if ((jobs || at < tables.size()) && !of_.flusher.write(UINT64_MAX) && !of_.workers.help(false))
      sleep_ns(kPauseNs);
  }
  return FRUGAL_OK;
}

Status Checkpoints::save_rows(const Vector<TableRef>& tables, Table& table) {
  RowTracker& tracker = table.tracked->tracker;
  for (uint32_t pieces = 0; tracker.save_some(); ++pieces) {
    if (const uint64_t ns = g_pause.load(std::memory_order_relaxed)) sleep_ns(ns);
    if (pieces % kPiecesAtOnce != 0) continue;
    FRUGAL_TRY(table.tracked->files.finish_full());
    FRUGAL_TRY(going_on());
    FRUGAL_TRY(table.tracked->files.collect());
    // Writers of rows can always copy what they are about to change: this thread leaves them half
    // of the budget.
    while (buffers_.complete() > kMostBytes / 2) {
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
  const bool full = !within_budget();
  for (const TableRef& t : tables) FRUGAL_TRY(t->tracked->files.collect());
  if (full) of_.workers.progress();
  return FRUGAL_OK;
}

}  // namespace frugal
