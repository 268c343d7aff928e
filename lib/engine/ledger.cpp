#include "engine/ledger.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "base/this_thread.h"

namespace frugal {
namespace {

constexpr size_t kImageBytes = 16 << 10;  // of rows that are written outside of steps

}  // namespace

std::atomic<int64_t> g_ledger_points{0};

void ledger_test_kill_at(int64_t n) { g_ledger_points.store(n); }

void ledger_pass_point(const device::RowsRef* rows, const uint32_t* slots, size_t n) {
  if (g_ledger_points.fetch_sub(1) != 1) return;
  for (size_t i = 0; rows && i < n; ++i) {
    std::memset(rows->row(slots[i]), 0xab, rows->dim * sizeof(device::Element));
    if (rows->state_pitch) std::memset(rows->state_row(slots[i]), 0xab, rows->state_pitch);
  }
  kill(getpid(), SIGKILL);
}

// An update in the list, seen from here.
struct TableLedger::Record : HeapObject {
  std::shared_ptr<TableLedger> of;
  LedgerUpdate* update = nullptr;
  uint64_t* progress = nullptr;
  const uint64_t* bounds = nullptr;
  uint8_t* marks = nullptr;
  Buffer memory;
  bool whole() const {
    if (marks) return std::memchr(marks, 0, update->rows) == nullptr;
    for (uint64_t c = 0; c < update->chunks; ++c)
      if (std::atomic_ref(progress[LedgerUpdate::kApart * c]).load() < bounds[c + 1]) return false;
    return true;
  }
};

// --- Ledger --------------------------------------------------------------------------------------

Status Ledger::open(BufferPool& pool, const Arena& arena, uint64_t committed, std::shared_ptr<Ledger>* out) {
  std::shared_ptr<Ledger> l(new Ledger(pool, arena));
  FRUGAL_TRY(pool.get(sizeof(LedgerRoot), &l->memory_));
  l->root_ = new (l->memory_.data()) LedgerRoot{LedgerRoot::kMagic, {committed}, {0}};
  *out = std::move(l);
  return FRUGAL_OK;
}

void Ledger::add_region(const char* base, size_t bytes, uint32_t number) {
  std::lock_guard<std::mutex> lock(mu_);
  regions_.push_back({base, bytes, number, 0});
}

void Ledger::lent_again(uint32_t number) {
  std::lock_guard<std::mutex> lock(mu_);
  for (Region& r : regions_)
    if (r.number == number) ++r.lent;
}

void Ledger::forget_regions() {
  std::lock_guard<std::mutex> lock(mu_);
  regions_.clear();
}

void Ledger::find(const char* p, uint32_t* region, uint64_t* place, uint64_t* lent) {
  *region = kNoRegion;
  *place = kNoPlace;
  if (lent) *lent = 0;
  if (arena_.holds(p)) {
    *region = LedgerTerms::kArena;
    *place = arena_.offset(p);
    return;
  }
  std::lock_guard<std::mutex> lock(mu_);
  for (const Region& r : regions_)
    if (p >= r.base && p < r.base + r.bytes) {
      *region = r.number;
      *place = static_cast<uint64_t>(p - r.base);
      if (lent) *lent = r.lent;
      return;
    }
}

Status Ledger::add_table(uint64_t handle, Rows& rows, std::shared_ptr<TableLedger>* out) {
  std::shared_ptr<TableLedger> t(new TableLedger);
  t->ledger_ = shared_from_this();
  t->ref_ = &rows.ref();
  const RowLayout& layout = rows.layout();
  const size_t row = layout.bytes();
  t->rows_ = static_cast<uint32_t>(std::clamp<size_t>(kImageBytes / row, 1, LedgerImage::kMost));
  // One for each thread that may be writing: flush threads, and callers that help.
  t->count_ = std::min<uint32_t>(2 * cpu_count() + 4, LedgerImage::kMost);
  const size_t bytes = (LedgerImage::values_at(t->rows_) + t->rows_ * row + 63) / 64 * 64;
  FRUGAL_TRY(pool_.get(sizeof(LedgerTable), &t->memory_));
  FRUGAL_TRY(pool_.get(bytes * t->count_, &t->images_));
  t->busy_ = Vector<std::atomic<bool>>(t->count_);
  t->table_ = new (t->memory_.data()) LedgerTable{};
  t->table_->handle.store(handle);
  t->table_->lost.store(kNoStep);
  t->table_->first.store(kNoPlace);
  t->table_->images = place_of(t->images_.data());
  t->table_->image_bytes = bytes;
  t->table_->image_count = t->count_;
  t->table_->image_rows = t->rows_;
  t->table_->init = rows.init();
  for (uint32_t i = 0; i < t->count_; ++i) new (&t->at(i)) LedgerImage{{kNoPlace}, 0};
  if (rows.hashed()) rows.tell_slots(&t->table_->slots);
  *out = std::move(t);
  return FRUGAL_OK;
}

// --- A table -------------------------------------------------------------------------------------

TableLedger::~TableLedger() = default;

void TableLedger::forget() noexcept {
  table_->handle.store(0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

uint64_t TableLedger::place() const { return ledger_->place_of(table_); }

LedgerImage& TableLedger::at(uint32_t i) const {
  return *reinterpret_cast<LedgerImage*>(images_.data() + i * table_->image_bytes);
}

uint64_t TableLedger::place_of(const void* record) {
  auto* r = static_cast<const Record*>(record);
  return r->of->ledger_->place_of(r->update);
}

TableLedger::Writing::Writing(TableLedger* ledger, const void* record, size_t chunk) {
  if (!record) return;
  auto* r = static_cast<const Record*>(record);
  undo_.progress = progress_ = r->progress + LedgerUpdate::kApart * chunk;
  end_ = r->bounds[chunk + 1];
  begin(ledger, record);
}

TableLedger::Writing::Writing(TableLedger* ledger, const void* record, const uint32_t* rows) {
  if (!record) return;
  undo_.marks = marks_ = static_cast<const Record*>(record)->marks;
  undo_.rows = rows;
  begin(ledger, record);
}

void TableLedger::Writing::begin(TableLedger* ledger, const void* record) {
  ledger_ = ledger;
  image_ = ledger->take();
  LedgerImage& image = ledger->at(image_);
  undo_.slot = slots_of(image);
  undo_.values = ledger->values_of(image);
  const device::RowsRef& rows = *ledger->ref_;
  if (rows.state_pitch) undo_.state = device::behind(undo_.values, ledger->rows_ * rows.value_pitch);
  if (g_ledger_points.load(std::memory_order_relaxed) != 0) {
    undo_.progress = nullptr;
    undo_.marks = nullptr;
    undo_.instead = tell;
    undo_.context = this;
  }
  image.rows = 1;
  *undo_.slot = LedgerImage::kNoRow;
  image.update.store(place_of(record), std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ledger_point();
}

void TableLedger::Writing::tell(const device::Undo& undo, const device::RowsRef&, uint32_t slot, size_t i,
                                bool written) {
  const auto* w = static_cast<const Writing*>(undo.context);
  if (written) w->mark(slot, undo.rows, i);
  else w->name(slot);
}

// The row's copy is whole.
void TableLedger::Writing::name(uint32_t slot) const {
  ledger_point();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::atomic_ref(*undo_.slot).store(slot, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ledger_point(ledger_->ref_, &slot, 1);
}

void TableLedger::Writing::mark(uint32_t slot, const uint32_t* rows, size_t i) const {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ledger_point();
  if (progress_) std::atomic_ref(*progress_).store(slot + uint64_t{1}, std::memory_order_release);
  else std::atomic_ref(marks_[rows[i]]).store(1, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ledger_point();
}

void TableLedger::Writing::before(uint32_t slot) const {
  if (!ledger_) return;
  const device::RowsRef& of = *ledger_->ref_;
  std::memcpy(undo_.values, of.row(slot), of.dim * sizeof(device::Element));
  if (of.state_pitch) std::memcpy(undo_.state, of.state_row(slot), of.state_pitch);
  name(slot);
}

void TableLedger::Writing::after(uint32_t slot, size_t i) const {
  if (ledger_) mark(slot, undo_.rows, i);
}

void TableLedger::Writing::chunk_done() {
  if (progress_) std::atomic_ref(*progress_).store(end_, std::memory_order_release);
  ledger_point();
}

TableLedger::Writing::~Writing() {
  if (!ledger_) return;
  ledger_point();
  ledger_->give(image_);
}

// An image for the calling thread: as a rule the one that it had before, which is in its caches.
uint32_t TableLedger::take() {
  ThisThread* t = this_thread();
  uint32_t any = 0;
  uint32_t& last = t ? t->ledger_image : any;
  for (uint32_t tries = 0;; ++tries, ++last) {
    const uint32_t i = last % count_;
    if (!busy_[i].load(std::memory_order_relaxed) && !busy_[i].exchange(true, std::memory_order_acquire)) return i;
    if (tries % count_ == count_ - 1) std::this_thread::yield();  // all are taken, for a moment
  }
}

void TableLedger::copy(const Rows& rows, LedgerImage* image, size_t n) const {
  const device::Kernels& k = device::kernels();
  const device::RowsRef& ref = rows.ref();
  const uint32_t* slots = slots_of(*image);
  float* values = values_of(*image);
  image->rows = n;
  k.gather(ref, slots, n, values, ref.value_pitch, false);
  if (!ref.state_pitch) return;
  device::RowsRef state{};
  state.values = ref.state;
  state.value_pitch = ref.state_pitch;
  state.dim = static_cast<uint32_t>(ref.state_pitch / sizeof(device::Element));
  k.gather(state, slots, n, device::behind(values, rows_ * ref.value_pitch), ref.state_pitch, false);
}

Status TableLedger::add(const StepUpdate& u, const Vector<uint64_t>* bounds, std::shared_ptr<void>* record) {
  const size_t chunks = bounds ? bounds->size() - 1 : 0;
  const size_t terms = sizeof(LedgerUpdate), arrays = terms + u.ranks.size() * sizeof(LedgerTerms);
  const size_t bytes = arrays + (bounds ? (chunks + 1 + LedgerUpdate::kApart * chunks) * sizeof(uint64_t) : u.n);
  auto r = std::make_unique<Record>();
  FRUGAL_TRY(ledger_->pool_.get(bytes, &r->memory));
  {
    std::lock_guard<std::mutex> lock(mu_);
    records_.reserve(records_.size() + 1);
  }
  r->update = new (r->memory.data()) LedgerUpdate{};
  LedgerUpdate& to = *r->update;
  to.next.store(kNoPlace, std::memory_order_relaxed);
  to.step = u.step;
  to.scalars = u.scalars;
  to.chunks = chunks;
  to.bounds = to.progress = to.marks = kNoPlace;
  to.rows = u.n;
  to.ranks = u.ranks.size();
  auto* term = reinterpret_cast<LedgerTerms*>(r->memory.data() + terms);
  for (const Handover& h : u.ranks) {
    *term = {};
    term->rank = h.rank;
    term->slots = ledger_->place_of(h.slots());
    term->rows = h.rows();
    term->stride = h.stride;
    ledger_->find(h.lent ? nullptr : h.sums.data(), &term->region, &term->sums);
    ++term;
  }
  char* behind = r->memory.data() + arrays;
  if (bounds) {
    std::memcpy(behind, bounds->data(), (chunks + 1) * sizeof(uint64_t));
    r->bounds = reinterpret_cast<const uint64_t*>(behind);
    r->progress = reinterpret_cast<uint64_t*>(behind + (chunks + 1) * sizeof(uint64_t));
    for (size_t c = 0; c < chunks; ++c) r->progress[LedgerUpdate::kApart * c] = (*bounds)[c];
    to.bounds = ledger_->place_of(behind);
    to.progress = ledger_->place_of(r->progress);
  } else {
    r->marks = reinterpret_cast<uint8_t*>(behind);
    std::memset(behind, 0, u.n);
    to.marks = ledger_->place_of(behind);
  }
  r->of = shared_from_this();
  Record* added = r.release();
  std::shared_ptr<void> owner(
      added,
      [](void* p) {
        std::unique_ptr<Record> gone(static_cast<Record*>(p));
        gone->of->remove(gone.get());
      },
      HeapAllocator<Record>());
  std::lock_guard<std::mutex> lock(mu_);
  const uint64_t place = ledger_->place_of(added->update);
  ledger_point();
  (records_.empty() ? table_->first : records_.back()->update->next).store(place, std::memory_order_release);
  ledger_point();
  records_.push_back(added);
  *record = std::move(owner);
  return FRUGAL_OK;
}

void TableLedger::remove(Record* record) noexcept {
  std::lock_guard<std::mutex> lock(mu_);
  auto at = std::find(records_.begin(), records_.end(), record);
  if (at == records_.end()) return;
  // A step that was not committed is nothing to miss.
  const uint64_t committed = ledger_->root_->committed.load(), step = record->update->step;
  if (committed != kNoStep && step <= committed && !record->whole()) {
    uint64_t none = kNoStep;
    table_->lost.compare_exchange_strong(none, step);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  const uint64_t next = record->update->next.load(std::memory_order_relaxed);
  ledger_point();
  (at == records_.begin() ? table_->first : (*std::prev(at))->update->next).store(next, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // its memory, and that of its sums, is others' only now
  ledger_point();
  records_.erase(at);
}

}  // namespace frugal
