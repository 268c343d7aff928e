#include "storage/stored_rows.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace frugal {

std::atomic<Tier (*)(const frugal_table_config&)> g_make_tier{nullptr};

namespace {

constexpr size_t kSome = 64;     // rows that are loaded, or leave, at a time
constexpr size_t kLooked = 256;  // keys that are enumerated in one hold of the lock

}  // namespace

// --- Holders -------------------------------------------------------------------------------------

void StoredRows::become_idle(uint32_t s) {
  idle_.add(s);
  tell_room();
}

void StoredRows::tell_room() {
  if (!lacking_.load(std::memory_order_relaxed)) return;
  lacking_.store(false);
  room_();
}

void StoredRows::hold_slot(uint32_t s) {
  const bool idle = slots_.flag(s) == SlotMap::kExists && !slots_.holders.held(s);
  slots_.holders.hold(s);
  if (idle) idle_.remove(s);
  if (slots_.flag(s) == SlotMap::kLeaving) slots_.mark(s, 0);  // its row stays in memory
}

void StoredRows::release(uint32_t s, uint64_t times) {
  FRUGAL_ASSERT(slots_.flag(s) != 0);
  if (slots_.holders.release_hold(s, times)) return;
  if (slots_.flag(s) == SlotMap::kExists) return become_idle(s);
  // The slot is loading, or its row is uncommitted.
  if (slots_.flag(s) != SlotMap::kReserved) return;
  slots_.free(s);
  tell_room();
}

void StoredRows::hold(const uint32_t* slots, size_t n) {
  size_t held = 0;
  try {
    for (size_t at = 0; at < n; at += SlotMap::kAtOnce) {
      Lock lock(slots_.mu);
      for (; held < std::min(n, at + SlotMap::kAtOnce); ++held)
        if (slots[held] < kMissingSlot) hold_slot(slots[held]);
    }
  } catch (const std::bad_alloc&) {
    release_hold(slots, held);
    throw;
  }
}

void StoredRows::release_hold(const uint32_t* slots, size_t n, const uint32_t* start) {
  for (size_t at = 0; at < n; at += SlotMap::kAtOnce) {
    Lock lock(slots_.mu);
    for (size_t i = at; i < std::min(n, at + SlotMap::kAtOnce); ++i)
      if (slots[i] < kMissingSlot) release(slots[i], start ? start[i + 1] - start[i] : 1);
  }
}

void StoredRows::committed(SlotMap& slots, uint32_t s) {
  are_mine(slots);
  if (!slots_.holders.held(s)) become_idle(s);
}

void StoredRows::removed(SlotMap& slots, uint32_t s) {
  are_mine(slots);
  store_->forget(slots_.key_of(s));
  if (slots_.holders.held(s)) return;
  slots_.free(s);
  tell_room();
}

uint64_t StoredRows::stored(SlotMap& slots) const {
  are_mine(slots);
  return stored_;
}

uint64_t StoredRows::memory_bytes(SlotMap& slots) const {
  are_mine(slots);
  return idle_.memory_bytes() + (list_ ? list_->keys.capacity() * sizeof(uint64_t) : 0);
}

uint64_t StoredRows::being_written(SlotMap& slots) const {
  are_mine(slots);
  return leaving_;
}

// --- Slots ---------------------------------------------------------------------------------------

// A call that found too few slots releases those that it holds. Before it began, `could` slots were
// available to others. It calls room_ only if more are available now. Otherwise the call would
// notify itself, without end.
void StoredRows::give_back(uint32_t* slots, size_t n, uint64_t could) {
  lacking_.store(false);
  for (size_t i = 0; i < n; ++i)
    if (slots[i] < kMissingSlot) release(slots[i], 1);
  std::fill_n(slots, n, KeyIndex::kNone);
  if (idle_.size() + free() > could) room_();
  lacking_.store(true);
}

// Gives a slot to a key without one: reserved, or loading.
Status StoredRows::add(uint64_t key, uint32_t* slot) {
  const bool stored = store_->has(key);
  if (!stored && taken() >= memory_.most_rows())
    return fail(FRUGAL_ERR_TABLE_FULL,
                "no room for key %s: the table has its %llu rows; create it with more, or delete "
                "some",
                number_text(key).c_str(), static_cast<unsigned long long>(memory_.most_rows()));
  const uint64_t next = slots_.handed_out();
  if (next < slots_.capacity()) FRUGAL_TRY(idle_.ensure(static_cast<uint32_t>(next)));
  if (!stored) return slots_.add(key, slot);
  // Room for one more loading slot, and for slots that a thread is loading and may put back.
  if (load_at_ * 2 > to_load_.size()) skip_loaded();
  const size_t least = load_at_ + loading_.load() + 1;
  if (to_load_.capacity() < least) to_load_.reserve(2 * least);
  FRUGAL_TRY(slots_.add(key, slot));
  slots_.load(*slot);
  loading_.fetch_add(1);
  to_load_.push_back(*slot);
  return FRUGAL_OK;
}

// Gives slots to all keys without one, or (*lacking) to none. Slots that are found are held.
Status StoredRows::take_slots(const uint64_t* keys, size_t n, const uint64_t* padding,
                              uint64_t could, uint32_t* slots, uint64_t* lacking) {
  *lacking = 0;
  Vector<uint64_t> absent;
  Lock lock(slots_.mu);
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != KeyIndex::kNone || (padding && keys[i] == *padding)) continue;
    const uint32_t s = slots_.index().find(keys[i]);
    if (s == KeyIndex::kNone) {
      absent.push_back(keys[i]);
      continue;
    }
    hold_slot(s);
    slots[i] = s;
  }
  std::sort(absent.begin(), absent.end());
  absent.erase(std::unique(absent.begin(), absent.end()), absent.end());
  const uint64_t wanted = absent.size(), there = free();
  if (wanted > there) {
    *lacking = wanted - there;
    if (idle_.size() >= *lacking) return FRUGAL_OK;
    Vector<uint32_t> here;
    for (size_t i = 0; i < n; ++i)
      if (slots[i] != KeyIndex::kNone) here.push_back(slots[i]);
    std::sort(here.begin(), here.end());
    here.erase(std::unique(here.begin(), here.end()), here.end());
    const uint64_t all = wanted + here.size();
    if (all > slots_.capacity())
      return fail(FRUGAL_ERR_TABLE_FULL,
                  "%llu rows at a time, and the memory has room for %llu of the table's",
                  static_cast<unsigned long long>(all),
                  static_cast<unsigned long long>(slots_.capacity()));
    store_->refused.fetch_add(*lacking - idle_.size(), std::memory_order_relaxed);
    give_back(slots, n, could);
    return FRUGAL_ERR_BUSY;
  }
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != KeyIndex::kNone || (padding && keys[i] == *padding)) continue;
    uint32_t s = slots_.index().find(keys[i]);
    if (s == KeyIndex::kNone) FRUGAL_TRY(add(keys[i], &s));
    hold_slot(s);
    slots[i] = s;
  }
  return FRUGAL_OK;
}

Status StoredRows::resolve(const uint64_t* keys, size_t n, const uint64_t* padding, bool leaves,
                           uint32_t* slots) {
  std::fill_n(slots, n, KeyIndex::kNone);
  std::optional<Lock> one;  // two calls would block each other
  if (!leaves) one.emplace(admit_);
  uint64_t could;
  {
    Lock lock(slots_.mu);
    could = idle_.size() + free();
  }
  static_assert(KeyIndex::kNone == kNoSlot);  // no call holds it
  Status status = FRUGAL_OK;
  try {
    for (size_t at = 0; at < n; at += SlotMap::kAtOnce) {
      const size_t to = std::min(n, at + SlotMap::kAtOnce);
      Lock lock(slots_.mu);
      slots_.index().find(keys + at, to - at, slots + at);
      size_t i = at;
      try {
        for (; i < to; ++i) {
          const uint32_t s = slots[i];
          slots[i] = KeyIndex::kNone;
          if (s == KeyIndex::kNone || (padding && keys[i] == *padding)) continue;
          if (leaves && !slots_.exists(s)) continue;
          hold_slot(s);
          slots[i] = s;
        }
      } catch (const std::bad_alloc&) {
        std::fill(slots + i, slots + to, KeyIndex::kNone);  // found, and not held
        throw;
      }
    }
    for (uint64_t lacking = 1; !leaves && lacking && status == FRUGAL_OK;) {
      status = take_slots(keys, n, padding, could, slots, &lacking);
      uint64_t gone = 1;
      for (uint64_t left = lacking; left && gone && status == FRUGAL_OK; left -= gone)
        status = leave(left, &gone);
    }
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "no memory to find rows: free memory of the machine and call again");
  }
  if (status != FRUGAL_OK) release_hold(slots, n);
  for (size_t i = 0; leaves && i < n; ++i)
    if (slots[i] == KeyIndex::kNone && !(padding && keys[i] == *padding)) slots[i] = kMissingSlot;
  return status;
}

Status StoredRows::find_slots(const uint64_t* keys, size_t n, uint32_t* slots, uint64_t* promised) {
  Vector<uint64_t> fresh;
  if (promised) fresh.reserve(n);
  Lock lock(slots_.mu);
  slots_.index().find(keys, n, slots);
  for (size_t i = 0; promised && i < n; ++i)
    if (slots[i] == KeyIndex::kNone && !store_->has(keys[i])) fresh.push_back(keys[i]);
  std::sort(fresh.begin(), fresh.end());
  fresh.erase(std::unique(fresh.begin(), fresh.end()), fresh.end());
  if (fresh.size() > memory_.most_rows() - taken())
    return fail(FRUGAL_ERR_TABLE_FULL, "no room for %zu new keys: the table has its %llu rows",
                fresh.size(), static_cast<unsigned long long>(memory_.most_rows()));
  size_t i = 0;
  try {
    for (; i < n; ++i)
      if (slots[i] == KeyIndex::kNone)
        slots[i] = kMissingSlot;
      else
        hold_slot(slots[i]);
  } catch (const std::bad_alloc&) {
    while (i-- != 0)
      if (slots[i] != kMissingSlot) release(slots[i], 1);
    throw;
  }
  promised_ += fresh.size();
  if (promised) *promised = fresh.size();
  return FRUGAL_OK;
}

void StoredRows::promise_no_more(uint64_t rows) {
  Lock lock(slots_.mu);
  promised_ -= rows;
}

// --- Leaving -------------------------------------------------------------------------------------

// Up to `wanted` rows without holders leave memory. The call holds each slot until its record is
// written, so no other thread writes the same record concurrently.
Status StoredRows::leave(uint64_t wanted, uint64_t* gone) {
  *gone = 0;
  RowLayout layout;
  {
    Lock lock(slots_.mu);
    layout = memory_.layout();
  }
  Vector<uint32_t> slots;
  Vector<uint64_t> keys;
  const size_t most = std::min<uint64_t>(wanted, kSome);
  slots.reserve(most);
  keys.reserve(most);
  Vector<char> bytes(most * layout.bytes() + 64);
  char* const aligned = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
  const device::RowsRef copies = layout.at(aligned, aligned + most * layout.value_pitch);
  {
    Lock lock(slots_.mu);
    // After a take_state the caller tries again.
    if (layout.state_pitch != memory_.layout().state_pitch) return FRUGAL_OK;
    while (slots.size() < most && idle_.size()) {
      const uint32_t s = idle_.oldest();
      FRUGAL_ASSERT(slots_.flag(s) == SlotMap::kExists && !slots_.holders.held(s));
      hold_slot(s);
      slots_.leave(s);
      const size_t i = slots.size();
      std::memcpy(copies.row(i), memory_.values(s), layout.value_pitch);
      if (layout.state_pitch)
        std::memcpy(copies.state_row(i), memory_.state(s), layout.state_pitch);
      keys.push_back(slots_.key_of(s));
      slots.push_back(s);
    }
    leaving_ += slots.size();
  }
  if (slots.empty()) return FRUGAL_OK;
  Status status;
  try {
    status = store_->store(keys.data(), keys.size(), copies);
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "no memory to write rows that leave: free memory of the machine and call again");
  }
  Lock lock(slots_.mu);
  leaving_ -= slots.size();
  for (const uint32_t s : slots) {
    if (slots_.flag(s) == SlotMap::kLeaving && status == FRUGAL_OK) {
      FRUGAL_ASSERT(slots_.holders.count(s) == 1);
      slots_.holders.clear(s);
      slots_.remove(s);
      slots_.free(s);
      ++stored_;
      ++*gone;
      continue;
    }
    if (slots_.flag(s) == SlotMap::kLeaving) slots_.mark(s, 0);
    // The row was deleted meanwhile: its record is no row any more.
    if (!slots_.exists(s)) store_->forget(slots_.key_of(s));
    release(s, 1);
  }
  store_->left.fetch_add(*gone, std::memory_order_relaxed);
  tell_room();
  return status;
}

// --- Loading -------------------------------------------------------------------------------------

size_t StoredRows::first_loading(const uint32_t* slots, size_t from, size_t n) {
  if (!loading()) return n;
  Lock lock(slots_.mu);
  const auto loads = [&](uint32_t s) {
    return s < kMissingSlot && slots_.flag(s) == SlotMap::kLoading;
  };
  while (from < n && !loads(slots[from])) ++from;
  return from;
}

void StoredRows::skip_loaded() {
  to_load_.erase(to_load_.begin(), to_load_.begin() + static_cast<ptrdiff_t>(load_at_));
  load_at_ = 0;
}

Status StoredRows::load_some(bool* any) {
  *any = false;
  if (!loading()) return FRUGAL_OK;
  uint32_t slots[kSome];
  uint64_t keys[kSome];
  size_t n = 0;
  {
    Lock lock(slots_.mu);
    for (; load_at_ < to_load_.size() && n < kSome; ++n) {
      slots[n] = to_load_[load_at_++];
      keys[n] = slots_.key_of(slots[n]);
    }
    if (load_at_ == to_load_.size()) skip_loaded();
  }
  if (n == 0) return FRUGAL_OK;
  *any = true;
  Status status = FRUGAL_OK;
  bool memory = true;
  try {
    const RowWrite write(memory_, slots, n, {RowWrite::What::kNew});
    status = store_->load(keys, slots, n, write.in_place());
  } catch (const std::bad_alloc&) {
    memory = false;
  }
  Lock lock(slots_.mu);
  if (!memory || status != FRUGAL_OK) {
    // A later call loads them; the list has room.
    skip_loaded();
    to_load_.insert(to_load_.end(), slots, slots + n);
    if (!memory) throw std::bad_alloc();
    return status;
  }
  for (size_t i = 0; i < n; ++i) {
    FRUGAL_ASSERT(slots_.flag(slots[i]) == SlotMap::kLoading);
    slots_.create(slots[i], 0);
    --stored_;
    loading_.fetch_sub(1);
    if (!slots_.holders.held(slots[i])) become_idle(slots[i]);
  }
  store_->loaded.fetch_add(n, std::memory_order_relaxed);
  return FRUGAL_OK;
}

// --- Outside steps -------------------------------------------------------------------------------

Status StoredRows::read(uint64_t key, const device::RowsRef& out, bool* there) {
  {
    Lock lock(slots_.mu);
    *there = store_->has(key);
    // A row that was deleted while it was leaving may have a record that is still being written. A
    // row that was loaded since the caller found no slot equals its record.
    const uint32_t s = *there ? slots_.index().find(key) : KeyIndex::kNone;
    if (s != KeyIndex::kNone && slots_.flag(s) == SlotMap::kReserved) *there = false;
  }
  const uint32_t first = 0;
  return *there ? store_->load(&key, &first, 1, out) : FRUGAL_OK;
}

// Holds the lock during a slow write, so that the key's row cannot be loaded meanwhile. No step is
// under way.
Status StoredRows::put(uint64_t key, const device::RowsView& row, bool* placed, bool* created) {
  Lock lock(slots_.mu);
  *placed = slots_.index().find(key) != KeyIndex::kNone;
  if (*placed) return FRUGAL_OK;
  *created = !store_->has(key);
  FRUGAL_ASSERT(!*created || promised_ != 0);
  FRUGAL_TRY(store_->store(&key, 1, row));
  if (*created) this->created(slots_);
  stored_ += *created;
  promised_ -= *created;
  return FRUGAL_OK;
}

void StoredRows::forget(uint64_t key, bool* placed, bool* was) {
  Lock lock(slots_.mu);
  *placed = slots_.index().find(key) != KeyIndex::kNone;
  *was = !*placed && store_->has(key);
  if (!*was) return;
  store_->forget(key);
  --stored_;
}

// Rows may appear and vanish between two calls, so the order is that of key + 1, and the cursor is
// the next value. (After the greatest key but one that is 0, and the enumeration begins anew.)
//
// The first call lists all keys in that order; later ones continue in its list, so an enumeration
// in small pieces is not quadratic. They leave out keys whose rows have gone. A created row ends
// the list, and the next call makes another one.
size_t StoredRows::enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity) {
  if (capacity == 0) return 0;
  const std::shared_ptr<const KeyList> list = list_from(*cursor);
  const uint64_t* const end = list->keys.data() + list->keys.size();
  const uint64_t* at = std::lower_bound(list->keys.data(), end, *cursor,
                                        [](uint64_t key, uint64_t from) { return key + 1 < from; });
  size_t n = 0;
  uint32_t slots[kLooked];
  while (n < capacity && at != end) {
    const size_t some = std::min<size_t>(kLooked, static_cast<size_t>(end - at));
    Lock lock(slots_.mu);
    slots_.index().find(at, some, slots);
    for (size_t i = 0; i < some && n < capacity; ++i, ++at)
      if (is_row(*at, slots[i])) keys[n++] = *at;
  }
  if (n) *cursor = keys[n - 1] + 2;
  if (at != end) return n;
  // The last call, which returns none, will find an empty list.
  std::shared_ptr<KeyList> rest;
  try {
    rest = std::allocate_shared<KeyList>(HeapAllocator<KeyList>());
    rest->from = *cursor;
  } catch (const std::bad_alloc&) {
    // It makes a list of its own.
  }
  Lock lock(slots_.mu);
  if (list_ == list) list_ = std::move(rest);
  return n;
}

bool StoredRows::is_row(uint64_t key, uint32_t s) {
  if (s == KeyIndex::kNone) return store_->has(key);
  return slots_.exists(s) || slots_.flag(s) == SlotMap::kLoading;
}

// The list, if it has the keys from the cursor on; else a new one of all keys. It may have keys
// without rows.
std::shared_ptr<const StoredRows::KeyList> StoredRows::list_from(uint64_t cursor) {
  std::shared_ptr<const KeyList> old;
  uint64_t creations, to;
  {
    Lock lock(slots_.mu);
    if (list_ && list_->from <= cursor) return list_;
    old = std::move(list_);
    creations = creations_;
    to = slots_.handed_out();
  }
  old.reset();
  // Rows may be loaded and leave meanwhile. A row that left before its slot was read has a
  // record by then, which remains.
  auto list = std::allocate_shared<KeyList>(HeapAllocator<KeyList>());
  Vector<uint64_t>& all = list->keys;
  for (uint64_t s = 0; s < to;) {
    make_room(all, SlotMap::kAtOnce);
    Lock lock(slots_.mu);
    for (const uint64_t end = std::min<uint64_t>(to, s + SlotMap::kAtOnce); s < end; ++s)
      if (slots_.exists(static_cast<uint32_t>(s)))
        all.push_back(slots_.key_of(static_cast<uint32_t>(s)));
  }
  store_->keys(&all);
  std::sort(all.begin(), all.end(), [](uint64_t a, uint64_t b) { return a + 1 < b + 1; });
  all.erase(std::unique(all.begin(), all.end()), all.end());
  Lock lock(slots_.mu);
  if (creations == creations_) list_ = list;
  return list;
}

void StoredRows::created(SlotMap& slots) {
  are_mine(slots);
  ++creations_;
  list_.reset();
}

}  // namespace frugal
