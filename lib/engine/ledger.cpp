#include "engine/ledger.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/this_thread.h"

namespace frugal {
namespace {

constexpr size_t kBeforeImageBytes = 16 << 10;  // of rows that are written outside of steps

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

// A listed update, as this process sees it.
struct TableLedger::Record final : HeapObject, UpdateRecord {
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

Status Ledger::open(BufferPool& pool, const Arena& arena, uint64_t committed,
                    std::shared_ptr<Ledger>* out) {
  std::shared_ptr<Ledger> l(new Ledger(pool, arena));
  FRUGAL_TRY(pool.get(sizeof(LedgerRoot), &l->memory_));
  l->root_ = new (l->memory_.data()) LedgerRoot{LedgerRoot::kMagic, {committed}, {0}, {0}};
  *out = std::move(l);
  return FRUGAL_OK;
}

uint64_t Ledger::find(const void* p) const {
  const uint64_t shm_address = shm_address_of(p);
  return shm_address == kNoShmAddress ? arena_.region_publisher()->shm_address_of(p) : shm_address;
}

Status Ledger::add_table(uint64_t handle, const RowLayout& layout, const arith::InitSpec& init,
                         std::shared_ptr<TableLedger>* out) {
  std::shared_ptr<TableLedger> t(new TableLedger);
  t->ledger_ = shared_from_this();
  const size_t row = layout.bytes();
  t->rows_ =
      static_cast<uint32_t>(std::clamp<size_t>(kBeforeImageBytes / row, 1, BeforeImage::kMost));
  // One for each thread that may write: flush threads, and callers that help.
  t->count_ = std::min<uint32_t>(2 * cpu_count() + 4, BeforeImage::kMost);
  const size_t bytes = (BeforeImage::values_at(t->rows_) + t->rows_ * row + 63) / 64 * 64;
  FRUGAL_TRY(pool_.get(sizeof(LedgerTable), &t->memory_));
  FRUGAL_TRY(pool_.get(bytes * t->count_, &t->before_images_));
  t->taken_ = Vector<TableLedger::Taken>(t->count_);
  t->table_ = new (t->memory_.data()) LedgerTable{};
  t->table_->handle.store(handle);
  t->table_->lost.store(kNoStep);
  t->table_->first.store(kNoShmAddress);
  t->table_->before_images = shm_address_of(t->before_images_.data());
  t->table_->before_image_bytes = bytes;
  t->table_->before_image_count = t->count_;
  t->table_->before_image_rows = t->rows_;
  t->table_->init = init;
  for (uint32_t i = 0; i < t->count_; ++i) new (&t->at(i)) BeforeImage{{kNoShmAddress}, 0};
  *out = std::move(t);
  return FRUGAL_OK;
}

// --- A table -------------------------------------------------------------------------------------

void TableLedger::watch(Rows& rows, TableLedger* former) {
  if (!rows.keys_are_slots()) rows.tell_slots(&table_->slots);
  rows.watch(this, former);
}

void TableLedger::forget() noexcept {
  table_->handle.store(0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

uint64_t TableLedger::shm_address() const { return ledger_->shm_address_of(table_); }

BeforeImage& TableLedger::at(uint32_t i) const {
  return *reinterpret_cast<BeforeImage*>(before_images_.data() + i * table_->before_image_bytes);
}

uint32_t TableLedger::before(const RowWrite& write, device::Undo* undo) noexcept {
  using What = RowWrite::What;
  const auto* record = static_cast<const Record*>(write.purpose().record);
  switch (write.purpose().what) {
    case What::kNew:
      return kNoBeforeImage;  // a reader skips a row that does not exist
    case What::kUpdate:
      if (!record) return kNoBeforeImage;
      break;
    case What::kOutside:
      break;
  }
  const uint32_t i = take();
  if (record)
    begin_update(write, *record, i, undo);
  else
    begin_outside(write, at(i));
  return i;
}

// Kernels copy each row, and name it, just before they write it.
void TableLedger::begin_update(const RowWrite& write, const Record& record, uint32_t i,
                               device::Undo* undo) {
  BeforeImage& before_image = at(i);
  undo->slot = slots_of(before_image);
  undo->values = values_of(before_image);
  const device::RowsView rows = write.rows();
  if (rows.state_pitch) undo->state = device::behind(undo->values, rows_ * rows.value_pitch);
  undo->rows = write.purpose().entries;
  if (undo->rows)
    undo->marks = record.marks;
  else
    undo->progress = record.progress + LedgerUpdate::kApart * write.purpose().chunk;
  if (g_ledger_points.load(std::memory_order_relaxed) != 0) {
    Taken& taken = taken_[i];
    taken.progress = std::exchange(undo->progress, nullptr);
    taken.marks = std::exchange(undo->marks, nullptr);
    undo->instead = tell;
    undo->context = &taken;
  }
  before_image.rows = 1;
  *undo->slot = BeforeImage::kNoRow;
  before_image.update.store(ledger_->shm_address_of(record.update), std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ledger_point();
}

// Copies all rows, since they are written in any order.
void TableLedger::begin_outside(const RowWrite& write, BeforeImage& before_image) {
  const device::RowsView rows = write.rows();
  const size_t n = write.size();
  FRUGAL_ASSERT(n <= rows_);
  uint32_t* slots = slots_of(before_image);
  device::RowsRef kept{};
  kept.values = values_of(before_image);
  kept.value_pitch = rows.value_pitch;
  kept.state = device::behind(kept.values, rows_ * rows.value_pitch);
  kept.state_pitch = rows.state_pitch;
  for (size_t i = 0; i < n; ++i) slots[i] = write.slot(i);
  before_image.rows = n;
  for (size_t i = 0; i < n; ++i) {
    std::memcpy(kept.row(i), rows.row(slots[i]), rows.dim * sizeof(device::Element));
    if (rows.state_pitch)
      std::memcpy(kept.state_row(i), rows.state_row(slots[i]), rows.state_pitch);
  }
  ledger_point();
  before_image.update.store(BeforeImage::kOutside, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ledger_point(&write.in_place(), slots, n);
}

void TableLedger::after(const RowWrite& write, uint32_t i) noexcept {
  if (i == kNoBeforeImage) return;
  const auto* record = static_cast<const Record*>(write.purpose().record);
  if (write.is_chunk_done()) {
    const size_t chunk = write.purpose().chunk;
    std::atomic_ref(record->progress[LedgerUpdate::kApart * chunk])
        .store(record->bounds[chunk + 1], std::memory_order_release);
    ledger_point();
  }
  ledger_point();
  at(i).update.store(kNoShmAddress, std::memory_order_release);
  taken_[i].busy.store(false, std::memory_order_release);
}

// Does what kernels do: the row's copy is whole, or the row is written.
void TableLedger::tell(const device::Undo& undo, const device::RowsRef& of, uint32_t slot, size_t i,
                       bool written) {
  const auto* t = static_cast<const Taken*>(undo.context);
  ledger_point();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (!written)
    std::atomic_ref(*undo.slot).store(slot, std::memory_order_release);
  else if (t->progress)
    std::atomic_ref(*t->progress).store(slot + uint64_t{1}, std::memory_order_release);
  else
    std::atomic_ref(t->marks[undo.rows[i]]).store(1, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (written)
    ledger_point();
  else
    ledger_point(&of, &slot, 1);
}

// A before-image for the calling thread. Usually the one that it had before, which is in its cache.
uint32_t TableLedger::take() {
  ThisThread* t = this_thread();
  uint32_t any = 0;
  uint32_t& last = t ? t->ledger_image : any;
  for (uint32_t tries = 0;; ++tries, ++last) {
    const uint32_t i = last % count_;
    std::atomic<bool>& busy = taken_[i].busy;
    if (!busy.load(std::memory_order_relaxed) && !busy.exchange(true, std::memory_order_acquire))
      return i;
    // other threads have all of them, for a moment
    if (tries % count_ == count_ - 1) yield_thread();
  }
}

Status TableLedger::add(const StepUpdate& u, const Vector<uint64_t>* bounds,
                        std::shared_ptr<UpdateRecord>* record) {
  const size_t chunks = bounds ? bounds->size() - 1 : 0;
  const size_t terms = sizeof(LedgerUpdate), arrays = terms + u.ranks.size() * sizeof(LedgerTerms);
  const size_t bytes =
      arrays + (bounds ? (chunks + 1 + LedgerUpdate::kApart * chunks) * sizeof(uint64_t) : u.n);
  auto r = std::make_unique<Record>();
  FRUGAL_TRY(ledger_->pool_.get(bytes, &r->memory));
  {
    Lock lock(mu_);
    records_.reserve(records_.size() + 1);
  }
  r->update = new (r->memory.data()) LedgerUpdate{};
  LedgerUpdate& to = *r->update;
  to.next.store(kNoShmAddress, std::memory_order_relaxed);
  to.step = u.step;
  to.scalars = u.scalars;
  to.chunks = chunks;
  to.bounds = to.progress = to.marks = kNoShmAddress;
  to.rows = u.n;
  to.ranks = u.ranks.size();
  auto* term = reinterpret_cast<LedgerTerms*>(r->memory.data() + terms);
  for (const RankGradients& h : u.ranks) {
    *term = {};
    term->rank = h.rank;
    term->slots = ledger_->shm_address_of(h.slots());
    term->rows = h.rows();
    term->stride = h.stride;
    term->sums = ledger_->find(h.lent ? nullptr : h.sums.data());
    ++term;
  }
  char* behind = r->memory.data() + arrays;
  if (bounds) {
    std::memcpy(behind, bounds->data(), (chunks + 1) * sizeof(uint64_t));
    r->bounds = reinterpret_cast<const uint64_t*>(behind);
    r->progress = reinterpret_cast<uint64_t*>(behind + (chunks + 1) * sizeof(uint64_t));
    for (size_t c = 0; c < chunks; ++c) r->progress[LedgerUpdate::kApart * c] = (*bounds)[c];
    to.bounds = ledger_->shm_address_of(behind);
    to.progress = ledger_->shm_address_of(r->progress);
  } else {
    r->marks = reinterpret_cast<uint8_t*>(behind);
    std::memset(behind, 0, u.n);
    to.marks = ledger_->shm_address_of(behind);
  }
  r->of = shared_from_this();
  Record* added = r.release();
  std::shared_ptr<UpdateRecord> owner(
      added,
      [](Record* p) {
        std::unique_ptr<Record> gone(p);
        gone->of->remove(p);
      },
      HeapAllocator<Record>());
  Lock lock(mu_);
  const uint64_t shm_address = ledger_->shm_address_of(added->update);
  ledger_point();
  (records_.empty() ? table_->first : records_.back()->update->next)
      .store(shm_address, std::memory_order_release);
  ledger_point();
  records_.push_back(added);
  *record = std::move(owner);
  return FRUGAL_OK;
}

void TableLedger::remove(Record* record) noexcept {
  Lock lock(mu_);
  auto at = std::find(records_.begin(), records_.end(), record);
  if (at == records_.end()) return;
  // An update of an uncommitted step is no loss.
  const uint64_t committed = ledger_->root_->committed.load(), step = record->update->step;
  if (committed != kNoStep && step <= committed && !record->whole()) {
    uint64_t none = kNoStep;
    table_->lost.compare_exchange_strong(none, step);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  const uint64_t next = record->update->next.load(std::memory_order_relaxed);
  ledger_point();
  (at == records_.begin() ? table_->first : (*std::prev(at))->update->next)
      .store(next, std::memory_order_release);
  std::atomic_thread_fence(
      std::memory_order_seq_cst);  // only now may others use its memory, and that of its sums
  ledger_point();
  records_.erase(at);
}

}  // namespace frugal
