// Rows that may be in the storage tier (storage/storage_tier.h): which threads load them, how slots
// become free, and how calls outside steps reach rows that have no slot.
//
// Declarations get slots in the order of steps. No later step gets any while an earlier one lacks
// some, and a later step gives up those that it has. So the slots of one step's rows are enough.
//
// Slots become free here, by these means in turn: pending updates are written, later steps give up
// slots, caches do. The rest is held by steps that ranks are inside of, or have ended.
#include <algorithm>
#include <cstring>

#include "engine/wait.h"

namespace frugal {

// Loads some rows whose slots are loading. Returns false if no such rows are left, except for those
// that other threads load.
bool Engine::load_one() {
  if (tiered_tables_.load(std::memory_order_relaxed) == 0) return false;
  Vector<TableRef> tables;
  {
    ControlLock lock(mu_);
    for (const TableRef& t : tables_)
      if (t->rows.tier() && t->rows.tier()->loading()) tables.push_back(t);
  }
  for (const TableRef& t : tables) {
    bool any;
    const Status s = t->rows.tier()->load_some(&any);
    if (s != FRUGAL_OK) workers_.fail(s);
    if (!any) continue;
    workers_.progress();
    return true;
  }
  return false;
}

// Is a row loading that is declared for a step up to `step`?
bool Engine::loading_until(uint64_t step) {
  if (tiered_tables_.load(std::memory_order_relaxed) == 0) return false;
  return std::any_of(tables_.begin(), tables_.end(), [&](const TableRef& t) {
    return t->rows.tier() && t->loading_parts.until(*t->rows.tier(), step);
  });
}

// One unit of the work that may free slots of a table, for the sake of `step`. Returns false if
// other holders have to release theirs first.
bool Engine::free_slots(Table& table, uint64_t step) {
  if (workers_.help(true)) return true;
  // A row that is loading, and that no holder wants any more, leaves when it is loaded.
  if (table.rows.tier()->loading() && load_one()) return true;
  Window& window = table.window;
  if (window.opened() && window.any_pending() && flusher_.write(UINT64_MAX)) return true;
  return revoke_later(table, step) || give_up_cached_rows_of(table);
}

bool Engine::revoke_later(Table& table, uint64_t step) {
  bool any;
  {
    ControlLock lock(mu_);
    // A thread that plans a refresh uses parts.
    if (!phase_.may(Phase::kRevoke)) return false;
    Lock declared(declarations_.mutex());
    // A thread that resolves a part reports it under this lock. A part that lacked slots at the
    // caller's check may have got them since, and its rank may have begun the step.
    if (!table.loading_parts.lacking_until(step, *table.rows.tier())) return false;
    any = declarations_.revoke(table, step, memory_.pool, [&](const Batch& b) {
      mu_.assert_held();
      const TrainerRef& t = ranks_[b.rank];
      return t && (t->next_step == kNoStep || b.step >= t->next_step);
    });
  }
  if (any) workers_.wake();
  return any;
}

// Cached rows hold slots. This gives up a trainer's cache, and the trainer continues with host
// rows. The calling thread has the caches as a thread that plans a refresh has them. No operation
// outside steps and no abort may have begun; those that begin meanwhile wait. choose(&trainer),
// with the lock held, returns the cache, or null.
template <class Choose>
bool Engine::give_up_cache(Choose choose) {
  TrainerRef t;
  TableCache* of;
  {
    ControlLock lock(mu_);
    if (!phase_.may(Phase::kPlan)) return false;
    of = choose(&t);
    if (!of) return false;
    begin_plan(*t, kNoStep);
  }
  of->forget();
  end_plan(*t);
  return true;
}

// Gives up the cache of a trainer that is not in the middle of a refresh.
bool Engine::give_up_cached_rows_of(Table& table) {
  if (!ranks_.caches_exist()) return false;
  return give_up_cache([&](TrainerRef* t) REQUIRES(control) -> TableCache* {
    for (const TrainerRef& r : ranks_) {
      if (!r || !r->refresh.free() || r->closing.load()) continue;
      TableCache* of = cache_in(*r, table);
      if (!of || !of->any()) continue;
      *t = r;
      return of;
    }
    return nullptr;
  });
}

// The same at a gate: the waiting trainer `own` gives up its cache.
bool Engine::give_up_own_cached_rows(const Trainer& own) {
  if (tiered_tables_.load(std::memory_order_relaxed) == 0 || !own.has_cache.load()) return false;
  return give_up_cache([&](TrainerRef* t) REQUIRES(control) -> TableCache* {
    if (ranks_[own.rank].get() != &own) return nullptr;
    *t = ranks_[own.rank];
    for (auto& [raw, of] : (*t)->caches)
      if (raw->rows.tier() && raw->rows.tier()->lacking() && of.any()) return &of;
    return nullptr;
  });
}

// --- Outside steps -------------------------------------------------------------------------------

Status Engine::read_stored(Table& table, const uint64_t* keys, size_t n, const uint32_t* slots,
                           StoredCopies* out) {
  if (!table.rows.tier()) return FRUGAL_OK;
  const RowLayout& l = table.rows.layout();
  const size_t missing = static_cast<size_t>(std::count(slots, slots + n, kMissingSlot));
  out->at.assign(n, kMissingSlot);
  FRUGAL_TRY(memory_.unread().get((missing + 1) * l.bytes(), &out->rows));
  char* const values = out->rows.data();
  const device::RowsRef copies = l.at(values, values + (missing + 1) * l.value_pitch);
  out->ref = copies;
  uint32_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != kMissingSlot) continue;
    bool there;
    const device::RowsRef copy = l.at(copies.row(found), copies.state_row(found));
    FRUGAL_TRY(table.rows.tier()->read(keys[i], copy, &there));
    if (there) out->at[i] = found++;
  }
  return FRUGAL_OK;
}

// Waits until none of these slots is loading.
Status Engine::await_loading(Table& table, const uint32_t* slots, size_t n) {
  const Status s = wait(
      deadline(FRUGAL_TIMEOUT_DEFAULT), nullptr,
      [&] { return table.rows.tier()->first_loading(slots, 0, n) == n; },
      [this] { return load_one(); });
  return s == FRUGAL_ERR_TIMEOUT ? fail(s, "waited for rows to be loaded; call again") : s;
}

namespace {

// Keys of an operation outside steps. It holds the slots of those that have one.
struct HeldSlots {
  explicit HeldSlots(StoredRows& of) : tier(of) {}
  ~HeldSlots() {
    tier.release_hold(there.data(), there.size());
    tier.promise_no_more(promised);
  }
  HeldSlots(const HeldSlots&) = delete;
  // Not called again after a success. `room`: all keys that have no row are to get one.
  Status find(const Vector<uint64_t>& keys, bool room) {
    slots.resize(keys.size());
    there.reserve(keys.size());
    uint64_t* const promise = room ? &promised : nullptr;
    FRUGAL_TRY(tier.find_slots(keys.data(), keys.size(), slots.data(), promise));
    for (const uint32_t s : slots)
      if (s < kMissingSlot) there.push_back(s);
    return FRUGAL_OK;
  }
  StoredRows& tier;
  Vector<uint32_t> slots, there;
  uint64_t promised = 0;  // new rows
};

}  // namespace

// Rows that have a slot are written there, and others to the storage tier: a put needs no slot. If
// a key gets a slot meanwhile, all that is left of its rows is written later, so that the last one
// stays. There is room for all rows before the first is written.
Status Engine::put_stored(Table& t, const uint64_t* keys, size_t n,
                          const std::function<void(size_t, const device::RowsRef&)>& make,
                          uint64_t* created) {
  const RowLayout& l = t.rows.layout();
  Buffer row;
  FRUGAL_TRY(memory_.unread().get(l.bytes(), &row));
  const device::RowsRef made = l.at(row.data(), row.data() + l.value_pitch);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = reinterpret_cast<frugal_table*>(t.handle);
  HeldSlots room(*t.rows.tier());
  FRUGAL_TRY(with_room(&op, 1, [&] { return room.find(Vector<uint64_t>(keys, keys + n), true); }));
  Vector<size_t> all(n), later;
  for (size_t i = 0; i < n; ++i) all[i] = i;
  for (; !all.empty(); all.swap(later), later.clear()) {
    Vector<uint64_t> of(all.size());
    for (size_t k = 0; k < all.size(); ++k) of[k] = keys[all[k]];
    later.reserve(all.size());
    HeldSlots placed(*t.rows.tier());
    FRUGAL_TRY(placed.find(of, false));
    FRUGAL_TRY(await_loading(t, placed.there.data(), placed.there.size()));
    drop_cached(t, placed.there.data(), placed.there.size());
    Vector<uint32_t> made_here;
    made_here.reserve(placed.there.size());
    Vector<size_t> which;
    for (size_t k = 0; k < all.size(); ++k)
      if (placed.slots[k] < kMissingSlot) which.push_back(all[k]);
    const auto rewrite = [&](RowWrite& write, size_t from, size_t to) {
      for (size_t k = from; k < to; ++k) {
        std::memcpy(made.values, t.rows.values(placed.there[k]), l.value_pitch);
        if (l.state_pitch) std::memcpy(made.state, t.rows.state(placed.there[k]), l.state_pitch);
        make(which[k], made);
        write.store(k - from, made.values, made.state);
      }
    };
    t.rows.write_outside(placed.there.data(), placed.there.size(), rewrite);
    t.rows.create_reserved(placed.there.data(), placed.there.size(), &made_here);
    *created += made_here.size();
    for (size_t k = 0; k < all.size(); ++k) {
      if (placed.slots[k] < kMissingSlot) continue;
      std::memset(row.data(), 0, l.bytes());
      make(all[k], made);
      bool has_place, is_new = false;
      FRUGAL_TRY(t.rows.tier()->put(of[k], made, &has_place, &is_new));
      if (has_place) later.push_back(all[k]);
      *created += is_new;
      room.promised -= is_new;
    }
  }
  return FRUGAL_OK;
}

Status Engine::remove_stored(Table& t, Vector<uint64_t> keys, uint64_t* deleted) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (Vector<uint64_t> later; !keys.empty(); keys.swap(later), later.clear()) {
    later.reserve(keys.size());
    HeldSlots placed(*t.rows.tier());
    FRUGAL_TRY(placed.find(keys, false));
    FRUGAL_TRY(await_loading(t, placed.there.data(), placed.there.size()));
    drop_cached(t, placed.there.data(), placed.there.size());
    *deleted += t.rows.uncreate(placed.there.data(), placed.there.size(), true);
    for (size_t k = 0; k < keys.size(); ++k) {
      if (placed.slots[k] < kMissingSlot) continue;
      bool has_place, was;
      t.rows.tier()->forget(keys[k], &has_place, &was);
      if (has_place) later.push_back(keys[k]);
      *deleted += was;
    }
  }
  return FRUGAL_OK;
}

}  // namespace frugal
