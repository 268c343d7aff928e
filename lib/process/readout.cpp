#include "process/readout.h"

#include <algorithm>
#include <cstring>

#include "engine/engine.h"
#include "window/apply.h"

namespace frugal {
namespace {

constexpr uint64_t kMostUpdates = 1 << 20;  // of a table: more is a list that does not end

Status damaged(const char* what) {
  return fail(FRUGAL_ERR_INTERNAL,
              "the tables cannot be read out: the controller left %s in disorder; restore them",
              what);
}

}  // namespace

// An update of the ledger, as the engine had it.
struct TableReadout::Unwritten {
  StepUpdate update;
  Vector<uint32_t> rows;  // of its list, as indices, that are not written
  uint64_t shm_address = 0;
};

Status ControllerMemory::committed(uint64_t* step) const {
  if (!root || root->magic != LedgerRoot::kMagic) return damaged("its ledger");
  *step = root->committed.load();
  return FRUGAL_OK;
}

// What is at shared addresses of the arena. It stays mapped as long as this object.
class TableReadout::Reach {
 public:
  explicit Reach(const ControllerMemory& controller_memory)
      : regions_(*controller_memory.regions) {}
  // `count` items of T. Null: they are not there, and missing() returns why.
  template <class T>
  const T* at(uint64_t shm_address, uint64_t count = 1) {
    const char* found = nullptr;
    if (shm_address % alignof(T) || count > UINT64_MAX / sizeof(T)) return nullptr;
    const Status s = regions_.find(shm_address, count * sizeof(T), &reads_, &found);
    if (s != FRUGAL_OK && s != FRUGAL_ERR_INTERNAL) failed_ = s;
    return reinterpret_cast<const T*>(found);
  }
  Status missing(const char* what) const {
    if (failed_ != FRUGAL_ERR_PEER_LOST) return failed_ == FRUGAL_OK ? damaged(what) : failed_;
    return fail(failed_,
                "it cannot be read out: parts of %s lie in memory that this process has not mapped",
                what);
  }

 private:
  Regions& regions_;
  RegionRefs reads_;
  Status failed_ = FRUGAL_OK;
};

Status TableReadout::open(const ControllerMemory& controller_memory, const Source& source,
                          BufferPool& pool, std::unique_ptr<TableReadout>* out) {
  std::unique_ptr<TableReadout> t(new TableReadout);
  FRUGAL_TRY(controller_memory.committed(&t->committed_));
  Reach reach(controller_memory);
  const LedgerTable* record = reach.at<LedgerTable>(source.record);
  if (!record) return reach.missing("a table's record");
  if (record->handle.load() != source.handle) {
    if (controller_memory.root->kinds.load() != source.kinds_seen)
      return fail(FRUGAL_ERR_PEER_LOST,
                  "it cannot be read out here: another process has given it another kind of "
                  "optimizer since this one has begun a step; read it in one that has");
    return fail(FRUGAL_ERR_NOT_FOUND,
                "it had been dropped when the controller died: drop its handle");
  }
  if (const uint64_t lost = record->lost.load(); lost != kNoStep)
    return fail(
        FRUGAL_ERR_PEER_LOST,
        "it cannot be read out: updates of step %llu were lost in a failure of the controller",
        static_cast<unsigned long long>(lost));
  t->name_ = source.name;
  t->layout_ = source.layout;
  t->optimizer_ = source.optimizer;
  t->hashed_ = source.hashed;
  t->lazy_ = source.lazy && !source.hashed;
  t->init_ = record->init;
  // Kernels depend on these numbers.
  if (t->init_.dim != t->layout_.dim ||
      t->init_.state_columns != arith::state_columns(source.optimizer) ||
      t->init_.column_floats != arith::column_floats(source.optimizer, t->layout_.dim))
    return damaged("a table's record");
  const uint64_t n = source.capacity;
  auto array = [&](Rows::Arrays which, size_t stride, auto** to) {
    const Mapping& m = source.arrays[which];
    if (stride && !(m.base && n <= m.bytes / stride)) return false;
    *to = reinterpret_cast<std::remove_reference_t<decltype(*to)>>(m.base);
    return true;
  };
  char *values, *state;
  if (!array(Rows::kValues, source.layout.value_pitch, &values) ||
      !array(Rows::kState, source.layout.state_pitch, &state) ||
      !array(Rows::kKeys, source.hashed ? 8 : 0, &t->keys_) ||
      !array(Rows::kFlags, source.hashed || source.lazy ? 1 : 0, &t->flags_))
    return damaged("a table's memory");
  t->rows_ = source.layout.at(values, state);
  t->slots_ = source.hashed ? record->slots.load() : n;
  if (t->slots_ > n) return damaged("a table's record");
  t->count_ = n;
  if (source.hashed) FRUGAL_TRY(t->index_keys());
  FRUGAL_TRY(t->work_out(reach, *record, pool));
  *out = std::move(t);
  return FRUGAL_OK;
}

// Whether the slot has a row, as of the last committed step.
bool TableReadout::exists(uint32_t slot) const {
  const uint8_t flag = flags_[slot], mark = SlotMap::flag_mark(flag);
  return SlotMap::flag_exists(flag) &&
         (mark == 0 || (committed_ != kNoStep && mark == SlotMap::mark_of(committed_)));
}

Status TableReadout::index_keys() {
  count_ = 0;
  for (uint64_t s = 0; s < slots_; ++s) count_ += exists(static_cast<uint32_t>(s));
  FRUGAL_TRY(index_.open(slots_, &budget_));
  FRUGAL_TRY(index_.make_room(count_));
  for (uint64_t s = 0; s < slots_; ++s)
    if (exists(static_cast<uint32_t>(s))) {
      if (index_.find(keys_[s]) != KeyIndex::kNone) return damaged("a table's keys");
      index_.insert(keys_[s], static_cast<uint32_t>(s));
    }
  return FRUGAL_OK;
}

device::RowsRef TableReadout::copies() const {
  return layout_.at(changed_values_.data(), changed_state_.data());
}

// Takes the rank gradients of a committed update. `seen`: all sums are in memory that is mapped
// here.
Status TableReadout::take_terms(Reach& reach, uint64_t shm_address, const LedgerUpdate& from,
                                Unwritten* u, bool* seen) const {
  const LedgerTerms* terms = reach.at<LedgerTerms>(shm_address + sizeof(LedgerUpdate), from.ranks);
  if (!terms) return reach.missing("a table's updates");
  if (from.scalars.kind != optimizer_ || from.scalars.dim != layout_.dim)
    return damaged("a table's updates");
  u->update.step = from.step;
  u->update.scalars = from.scalars;
  *seen = true;
  for (uint64_t r = 0; r < from.ranks; ++r) {
    const LedgerTerms& t = terms[r];
    RankGradients h;
    h.rank = static_cast<uint32_t>(t.rank);
    h.stride = t.stride;
    h.part = make_part();
    h.part->distinct = t.rows;
    const uint32_t* slots = reach.at<uint32_t>(t.slots, t.rows);
    if (!slots) return reach.missing("a table's updates");
    if (t.stride < layout_.dim || t.stride > layout_.sums_stride)
      return damaged("a table's updates");
    for (uint64_t i = 0; i < t.rows; ++i)
      if (slots[i] >= slots_ || (i && slots[i] <= slots[i - 1]))
        return damaged("a table's updates");
    h.part->rows = Buffer::view(slots, t.rows * sizeof(uint32_t));
    const uint64_t floats = t.rows * t.stride;
    if (t.sums == kNoShmAddress) {
      *seen = false;
    } else {
      const char* sums = reach.at<char>(t.sums, floats * sizeof(float));
      if (!sums) return reach.missing("a table's updates");
      if (t.sums % 64) return damaged("a table's updates");
      h.sums = Buffer::view(sums, floats * sizeof(float));
    }
    u->update.ranks.push_back(std::move(h));
  }
  u->update.make_list();
  return FRUGAL_OK;
}

// Takes which rows of the update are not written.
Status TableReadout::take_rows(Reach& reach, const LedgerUpdate& from, Unwritten* u) const {
  const size_t n = u->update.n;
  if (from.chunks == 0) {
    const uint8_t* marks = reach.at<uint8_t>(from.marks, n);
    if (!marks) return reach.missing("a table's updates");
    if (from.rows != n) return damaged("a table's updates");
    for (uint32_t i = 0; i < n; ++i)
      if (!marks[i]) u->rows.push_back(i);
  } else {
    const uint64_t chunks = from.chunks;
    const uint64_t* bounds =
        chunks < SIZE_MAX ? reach.at<uint64_t>(from.bounds, chunks + 1) : nullptr;
    // (There are so many bounds, so this cannot overflow.)
    const uint64_t* progress =
        bounds ? reach.at<uint64_t>(from.progress, LedgerUpdate::kApart * chunks) : nullptr;
    if (!bounds || !progress) return reach.missing("a table's updates");
    if (bounds[0] != 0) return damaged("a table's updates");
    size_t chunk = 0;
    for (uint32_t i = 0; i < n; ++i) {
      while (chunk + 1 < chunks && u->update.slots[i] >= bounds[chunk + 1]) ++chunk;
      if (u->update.slots[i] >= progress[LedgerUpdate::kApart * chunk]) u->rows.push_back(i);
    }
  }
  return FRUGAL_OK;
}

// Takes the updates that are committed and not wholly written.
Status TableReadout::take_updates(Reach& reach, const LedgerTable& record, Updates* updates) {
  for (uint64_t shm_address = record.first.load(), steps = 0; shm_address != kNoShmAddress;
       ++steps) {
    const LedgerUpdate* from = reach.at<LedgerUpdate>(shm_address);
    if (!from) return reach.missing("a table's updates");
    if (steps > kMostUpdates) return damaged("a table's updates");
    if (committed_ == kNoStep || from->step > committed_) break;
    auto u = std::make_unique<Unwritten>();
    u->shm_address = shm_address;
    bool seen;
    FRUGAL_TRY(take_terms(reach, shm_address, *from, u.get(), &seen));
    FRUGAL_TRY(take_rows(reach, *from, u.get()));
    if (!seen && !u->rows.empty())
      return fail(FRUGAL_ERR_PEER_LOST,
                  "it cannot be read out: gradients of step %llu, which is committed, lie in "
                  "memory that this "
                  "process has not mapped",
                  static_cast<unsigned long long>(from->step));
    for (uint32_t i : u->rows) changed_.push_back(u->update.slots[i]);
    shm_address = from->next.load();
    updates->push_back(std::move(u));
  }
  return FRUGAL_OK;
}

// Takes the rows in the middle of their write.
Status TableReadout::take_before_images(Reach& reach, const LedgerTable& record,
                                        const Updates& updates, Vector<Torn>* torn) {
  if (record.before_image_count > BeforeImage::kMost || record.before_image_rows == 0 ||
      record.before_image_rows > BeforeImage::kMost || record.before_image_bytes == 0 ||
      record.before_image_bytes % 64)
    return damaged("a table's images");
  for (uint64_t i = 0; i < record.before_image_count; ++i) {
    const uint64_t shm_address = record.before_images + i * record.before_image_bytes;
    const BeforeImage* before_image = reach.at<BeforeImage>(shm_address);
    if (!before_image || !reach.at<char>(shm_address, record.before_image_bytes))
      return reach.missing("a table's images");
    const uint64_t update = before_image->update.load();
    if (update == kNoShmAddress) continue;
    const size_t header = BeforeImage::values_at(record.before_image_rows);
    if (before_image->rows > record.before_image_rows ||
        header + record.before_image_rows * layout_.bytes() > record.before_image_bytes)
      return damaged("a table's images");
    const Unwritten* of = nullptr;
    for (auto& u : updates)
      if (u->shm_address == update) of = u.get();
    if (!of && update != BeforeImage::kOutside) continue;  // it is wholly written
    const uint32_t* slots = reinterpret_cast<const uint32_t*>(before_image + 1);
    const char* values = reinterpret_cast<const char*>(before_image) + header;
    const char* state = values + record.before_image_rows * layout_.value_pitch;
    for (uint64_t k = 0; k < before_image->rows; ++k) {
      if (slots[k] == BeforeImage::kNoRow) continue;
      if (slots[k] >= slots_) return damaged("a table's images");
      auto missing = [&] {
        // Rows of a list ascend by slot.
        const auto& list = of->rows;
        auto at = std::lower_bound(
            list.begin(), list.end(), slots[k],
            [&](uint32_t row, uint32_t slot) { return of->update.slots[row] < slot; });
        return at != list.end() && of->update.slots[*at] == slots[k];
      };
      if (of && !missing()) continue;
      torn->push_back(
          {slots[k], values + k * layout_.value_pitch, state + k * layout_.state_pitch});
      changed_.push_back(slots[k]);
    }
  }
  return FRUGAL_OK;
}

Status TableReadout::work_out(Reach& reach, const LedgerTable& record, BufferPool& pool) {
  Updates updates;
  Vector<Torn> torn;
  FRUGAL_TRY(take_updates(reach, record, &updates));
  FRUGAL_TRY(take_before_images(reach, record, updates, &torn));
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  if (changed_.empty()) return FRUGAL_OK;

  FRUGAL_TRY(pool.get(changed_.size() * layout_.value_pitch, &changed_values_));
  FRUGAL_TRY(pool.get(changed_.size() * layout_.state_pitch, &changed_state_));
  const device::RowsRef to = copies();
  auto index_of = [&](uint32_t slot) {
    return static_cast<uint32_t>(std::lower_bound(changed_.begin(), changed_.end(), slot) -
                                 changed_.begin());
  };
  for (size_t i = 0; i < changed_.size(); ++i) {
    std::memcpy(to.row(i), rows_.row(changed_[i]), to.value_pitch);
    if (to.state_pitch) std::memcpy(to.state_row(i), rows_.state_row(changed_[i]), to.state_pitch);
  }
  for (const Torn& t : torn) {
    const size_t i = index_of(t.slot);
    std::memcpy(to.row(i), t.values, layout_.value_bytes());
    if (to.state_pitch) std::memcpy(to.state_row(i), t.state, to.state_pitch);
  }
  size_t most = 0;
  for (auto& u : updates) most = std::max(most, u->update.ranks.size());
  ApplyScratch scratch(most, 0);
  for (auto& u : updates)
    apply(ApplyTo(to, changed_), u->update, UpdateEntries{u->rows.data(), u->rows.size()},
          &scratch);
  return FRUGAL_OK;
}

size_t TableReadout::keys(uint64_t* cursor, uint64_t* out, size_t capacity) const {
  size_t n = 0;
  while (n < capacity && *cursor < slots_) {
    const uint32_t s = static_cast<uint32_t>((*cursor)++);
    if (!hashed_)
      out[n++] = s;
    else if (exists(s))
      out[n++] = keys_[s];
  }
  return n;
}

void TableReadout::find(const uint64_t* keys, size_t n, const uint64_t* padding,
                        uint32_t* slots) const {
  if (hashed_) index_.find(keys, n, slots);
  for (size_t i = 0; i < n; ++i) {
    if (padding && keys[i] == *padding)
      slots[i] = kNoSlot;
    else if (!hashed_)
      slots[i] = static_cast<uint32_t>(keys[i]);
    else if (slots[i] == KeyIndex::kNone)
      slots[i] = kMissingSlot;
  }
}

TableReadout::Row TableReadout::row(uint32_t slot, char* scratch) const {
  if (untouched(slot)) {
    const device::RowsRef ref = layout_.at(scratch, scratch + layout_.value_pitch);
    const uint64_t key = slot;
    const uint32_t first = 0;
    device::kernels().initialize(ref, init_, &key, 0, &first, 0, 1);
    return {ref.values, ref.state};
  }
  if (!changed_.empty()) {
    auto at = std::lower_bound(changed_.begin(), changed_.end(), slot);
    if (at != changed_.end() && *at == slot) {
      const size_t i = static_cast<size_t>(at - changed_.begin());
      const device::RowsRef ref = copies();
      return {ref.row(i), ref.state_row(i)};
    }
  }
  return {rows_.row(slot), rows_.state_row(slot)};
}

}  // namespace frugal
