// Rows of a table that has a store behind its memory (far_store.h): how places are found for rows
// that have none, and which rows leave theirs.
//
// A call gets places for all of its keys or for none, so nobody holds some and waits for the rest.
// What it finds here it holds before the first row leaves, and a row comes back only when all have
// their places: no two calls push each other's rows out without an end.
#include <algorithm>
#include <cstring>
#include <optional>

#include "base/assert.h"
#include "storage/rows.h"

namespace frugal {

std::atomic<FarRows (*)(const frugal_table_config&)> g_make_far_rows{nullptr};

namespace {

constexpr size_t kSome = 64;     // rows that are brought in, or put out, at a time
constexpr size_t kFarChunk = 8192;  // as kChunk in rows.cpp

}  // namespace

// --- Who holds a place ---------------------------------------------------------------------------

void Rows::become_idle() {
  ++idle_;
  tell_room();
}

void Rows::tell_room() {
  if (!lacking_.load(std::memory_order_relaxed)) return;
  lacking_.store(false);
  room_();
}

void Rows::hold_place(uint32_t s) {
  const bool idle = flags()[s] == kExists && !holders_.held(s);
  holders_.hold(s);
  idle_ -= idle;
  if (flags()[s] == kLeaving) flags()[s] = kExists;  // it stays
}

void Rows::release(uint32_t s, uint64_t times) {
  FRUGAL_ASSERT(flags()[s] != 0);
  if (holders_.let_go(s, times)) return;
  if (flags()[s] == kExists) return become_idle();
  if (flags()[s] != kReserved) return;  // it is loading, or a step's that is not committed
  free_place(s);
  tell_room();
}

void Rows::hold_far(const uint32_t* slots, size_t n) {
  size_t held = 0;
  try {
    for (size_t at = 0; at < n; at += kFarChunk) {
      Lock lock(mu_);
      for (; held < std::min(n, at + kFarChunk); ++held)
        if (slots[held] < kMissingSlot) hold_place(slots[held]);
    }
  } catch (const std::bad_alloc&) {
    let_go(slots, held);
    throw;
  }
}

// --- Places --------------------------------------------------------------------------------------

// A call that has found no places lets go of those that it holds. There were `could` for others
// before it began: where there are no more now, nobody is told, for that would be the call itself,
// for ever.
void Rows::give_back(uint32_t* slots, size_t n, uint64_t could) {
  lacking_.store(false);
  for (size_t i = 0; i < n; ++i)
    if (slots[i] < kMissingSlot) release(slots[i], 1);
  std::fill_n(slots, n, KeyIndex::kNone);
  if (within_reach() > could) room_();
  lacking_.store(true);
}

// Places for keys that have none; all of them, or (*lacking) none. Others that are found are held.
Status Rows::take_places(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t could,
                         uint32_t* slots, uint64_t* lacking) {
  *lacking = 0;
  Vector<uint64_t> absent;
  Lock lock(mu_);
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != KeyIndex::kNone || (padding && keys[i] == *padding)) continue;
    const uint32_t s = index_.find(keys[i]);
    if (s == KeyIndex::kNone) {
      absent.push_back(keys[i]);
      continue;
    }
    hold_place(s);
    slots[i] = s;
  }
  std::sort(absent.begin(), absent.end());
  absent.erase(std::unique(absent.begin(), absent.end()), absent.end());
  const uint64_t wanted = absent.size(), free = capacity_ - index_.size();
  if (wanted > free) {
    *lacking = wanted - free;
    if (idle_ >= *lacking) return FRUGAL_OK;
    Vector<uint32_t> here;
    for (size_t i = 0; i < n; ++i)
      if (slots[i] != KeyIndex::kNone) here.push_back(slots[i]);
    std::sort(here.begin(), here.end());
    here.erase(std::unique(here.begin(), here.end()), here.end());
    const uint64_t all = wanted + here.size();
    if (all > capacity_)
      return fail(FRUGAL_ERR_TABLE_FULL,
                  "%llu rows at a time, and the memory has room for %llu of the table's",
                  static_cast<unsigned long long>(all), static_cast<unsigned long long>(capacity_));
    far_->refused.fetch_add(*lacking - idle_, std::memory_order_relaxed);
    give_back(slots, n, could);
    return FRUGAL_ERR_BUSY;
  }
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != KeyIndex::kNone || (padding && keys[i] == *padding)) continue;
    uint32_t s = index_.find(keys[i]);
    if (s == KeyIndex::kNone) FRUGAL_TRY(add_key(keys[i], &s));
    hold_place(s);
    slots[i] = s;
  }
  return FRUGAL_OK;
}

Status Rows::resolve_far(const uint64_t* keys, size_t n, const uint64_t* padding, bool leaves,
                         uint32_t* slots) {
  std::fill_n(slots, n, KeyIndex::kNone);
  std::optional<Lock> one;  // two would keep from each other what they need
  if (!leaves) one.emplace(admit_);
  uint64_t could;
  {
    Lock lock(mu_);
    could = within_reach();
  }
  static_assert(KeyIndex::kNone == kNoSlot);  // which nobody holds
  Status status = FRUGAL_OK;
  try {
    for (size_t at = 0; at < n; at += kFarChunk) {
      const size_t to = std::min(n, at + kFarChunk);
      Lock lock(mu_);
      index_.find(keys + at, to - at, slots + at);
      size_t i = at;
      try {
        for (; i < to; ++i) {
          const uint32_t s = slots[i];
          slots[i] = KeyIndex::kNone;
          if (s == KeyIndex::kNone || (padding && keys[i] == *padding)) continue;
          if (leaves && !(flags()[s] & kExists)) continue;
          hold_place(s);
          slots[i] = s;
        }
      } catch (const std::bad_alloc&) {
        std::fill(slots + i, slots + to, KeyIndex::kNone);  // found, and not held
        throw;
      }
    }
    for (uint64_t lacking = 1; !leaves && lacking && status == FRUGAL_OK;) {
      status = take_places(keys, n, padding, could, slots, &lacking);
      uint64_t gone = 1;
      for (uint64_t left = lacking; left && gone && status == FRUGAL_OK; left -= gone)
        status = leave(left, &gone);
    }
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "no memory to find rows: free memory of the machine and call again");
  }
  if (status != FRUGAL_OK) let_go(slots, n);
  for (size_t i = 0; leaves && i < n; ++i)
    if (slots[i] == KeyIndex::kNone && !(padding && keys[i] == *padding)) slots[i] = kMissingSlot;
  return status;
}

Status Rows::find_places(const uint64_t* keys, size_t n, uint32_t* slots, uint64_t* promised) {
  Vector<uint64_t> fresh;
  if (promised) fresh.reserve(n);
  Lock lock(mu_);
  index_.find(keys, n, slots);
  for (size_t i = 0; promised && i < n; ++i)
    if (slots[i] == KeyIndex::kNone && !far_->has(keys[i])) fresh.push_back(keys[i]);
  std::sort(fresh.begin(), fresh.end());
  fresh.erase(std::unique(fresh.begin(), fresh.end()), fresh.end());
  if (fresh.size() > most_rows_ - taken())
    return fail(FRUGAL_ERR_TABLE_FULL, "no room for %zu new keys: the table has its %llu rows",
                fresh.size(), static_cast<unsigned long long>(most_rows_));
  size_t i = 0;
  try {
    for (; i < n; ++i)
      if (slots[i] == KeyIndex::kNone)
        slots[i] = kMissingSlot;
      else
        hold_place(slots[i]);
  } catch (const std::bad_alloc&) {
    while (i-- != 0)
      if (slots[i] != kMissingSlot) release(slots[i], 1);
    throw;
  }
  promised_ += fresh.size();
  if (promised) *promised = fresh.size();
  return FRUGAL_OK;
}

void Rows::promise_no_more(uint64_t rows) {
  Lock lock(mu_);
  promised_ -= rows;
}

// --- Leaving -------------------------------------------------------------------------------------

// Some rows that nobody holds leave, up to so many. The store holds a place until it has the row:
// so nobody writes the same record beside it.
Status Rows::leave(uint64_t places, uint64_t* gone) {
  *gone = 0;
  RowLayout layout;
  {
    Lock lock(mu_);
    layout = layout_;
  }
  Vector<uint32_t> slots;
  Vector<uint64_t> keys;
  const size_t most = std::min<uint64_t>(places, kSome);
  slots.reserve(most);
  keys.reserve(most);
  Vector<char> bytes(most * layout.bytes() + 64);
  char* const aligned = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
  const device::RowsRef copies = layout.at(aligned, aligned + most * layout.value_pitch);
  {
    Lock lock(mu_);
    // After a take_state the caller looks again.
    if (layout.state_pitch != layout_.state_pitch) return FRUGAL_OK;
    for (uint64_t left = next_slot_; left-- && slots.size() < most && idle_;) {
      const uint32_t s = hand_;
      hand_ = hand_ + 1 < next_slot_ ? hand_ + 1 : 0;
      if (flags()[s] != kExists || holders_.held(s)) continue;
      --idle_;
      holders_.hold(s);
      flags()[s] = kLeaving;
      const size_t i = slots.size();
      std::memcpy(copies.row(i), ref_.row(s), layout.value_pitch);
      if (layout.state_pitch)
        std::memcpy(copies.state_row(i), ref_.state_row(s), layout.state_pitch);
      keys.push_back(key_of(s));
      slots.push_back(s);
    }
    leaving_ += slots.size();
  }
  if (slots.empty()) return FRUGAL_OK;
  Status status;
  try {
    status = far_->store(keys.data(), keys.size(), copies);
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "no memory to write rows that leave: free memory of the machine and call again");
  }
  Lock lock(mu_);
  leaving_ -= slots.size();
  for (const uint32_t s : slots) {
    if (flags()[s] == kLeaving && status == FRUGAL_OK) {
      FRUGAL_ASSERT(holders_.count(s) == 1);
      holders_.clear(s);
      flags()[s] = kReserved;
      reserved_.fetch_add(1, std::memory_order_relaxed);
      free_place(s);
      --existing_;
      ++away_;
      ++*gone;
      continue;
    }
    if (flags()[s] == kLeaving) flags()[s] = kExists;
    // It was deleted meanwhile: what has been stored is a row no more.
    if (!(flags()[s] & kExists)) far_->forget(key_of(s));
    release(s, 1);
  }
  far_->left.fetch_add(*gone, std::memory_order_relaxed);
  tell_room();
  return status;
}

// --- Loading -------------------------------------------------------------------------------------

size_t Rows::first_loading(const uint32_t* slots, size_t from, size_t n) {
  if (!loading()) return n;
  Lock lock(mu_);
  while (from < n && (slots[from] >= kMissingSlot || flags()[slots[from]] != kLoading)) ++from;
  return from;
}

// Room for one more place that is loading, and for those to come back that somebody is about to
// load.
void Rows::expect_to_load() {
  if (load_at_ * 2 > to_load_.size()) skip_loaded();
  const size_t least = load_at_ + loading_.load() + 1;
  if (to_load_.capacity() < least) to_load_.reserve(2 * least);
}

void Rows::skip_loaded() {
  to_load_.erase(to_load_.begin(), to_load_.begin() + static_cast<ptrdiff_t>(load_at_));
  load_at_ = 0;
}

Status Rows::load_some(bool* any) {
  *any = false;
  if (!loading()) return FRUGAL_OK;
  uint32_t slots[kSome];
  uint64_t keys[kSome];
  size_t n = 0;
  {
    Lock lock(mu_);
    for (; load_at_ < to_load_.size() && n < kSome; ++n) {
      slots[n] = to_load_[load_at_++];
      keys[n] = key_of(slots[n]);
    }
    if (load_at_ == to_load_.size()) skip_loaded();
  }
  if (n == 0) return FRUGAL_OK;
  *any = true;
  Status status;
  bool memory = true;
  try {
    const RowWrite write(*this, slots, n, {RowWrite::What::kNew});
    status = far_->load(keys, slots, n, write.in_place());
  } catch (const std::bad_alloc&) {
    memory = false;
  }
  Lock lock(mu_);
  if (!memory || status != FRUGAL_OK) {
    // Another time; there is room for them.
    skip_loaded();
    to_load_.insert(to_load_.end(), slots, slots + n);
    if (!memory) throw std::bad_alloc();
    return status;
  }
  for (size_t i = 0; i < n; ++i) {
    FRUGAL_ASSERT(flags()[slots[i]] == kLoading);
    flags()[slots[i]] = kExists;
    ++existing_;
    --away_;
    reserved_.fetch_sub(1, std::memory_order_relaxed);
    loading_.fetch_sub(1);
    if (!holders_.held(slots[i])) become_idle();
  }
  far_->loaded.fetch_add(n, std::memory_order_relaxed);
  return FRUGAL_OK;
}

// --- Outside steps -------------------------------------------------------------------------------

Status Rows::read_far(uint64_t key, const device::RowsRef& out, bool* there) {
  {
    Lock lock(mu_);
    *there = far_->has(key);
    // Of a row that was deleted while it was leaving a record may be being written as yet. One that
    // has come in since the caller found no place has been what its record is.
    const uint32_t s = *there ? index_.find(key) : KeyIndex::kNone;
    if (s != KeyIndex::kNone && flags()[s] == kReserved) *there = false;
  }
  const uint32_t first = 0;
  return *there ? far_->load(&key, &first, 1, out) : FRUGAL_OK;
}

// (Slow with the lock held, so that no row of the key comes in meanwhile. No step is under way.)
Status Rows::put_far(uint64_t key, const device::RowsView& row, bool* placed, bool* created) {
  Lock lock(mu_);
  *placed = index_.find(key) != KeyIndex::kNone;
  if (*placed) return FRUGAL_OK;
  *created = !far_->has(key);
  FRUGAL_ASSERT(!*created || promised_ != 0);
  FRUGAL_TRY(far_->store(&key, 1, row));
  away_ += *created;
  promised_ -= *created;
  return FRUGAL_OK;
}

void Rows::forget_far(uint64_t key, bool* placed, bool* was) {
  Lock lock(mu_);
  *placed = index_.find(key) != KeyIndex::kNone;
  *was = !*placed && far_->has(key);
  if (!*was) return;
  far_->forget(key);
  --away_;
}

// In the order of the keys plus one, for which rows may come and go between two calls: the cursor
// is the next. (So the greatest key but one ends none: it is told again.)
size_t Rows::enumerate_far(uint64_t* cursor, uint64_t* keys, size_t capacity) {
  Vector<uint64_t> all;
  Lock lock(mu_);
  far_->keys(&all);
  // A record of a row that is here is an old one.
  std::erase_if(all, [&](uint64_t key) {
    mu_.assert_held();
    const uint32_t s = index_.find(key);
    return s != KeyIndex::kNone && flags()[s] != kLoading;
  });
  for (uint32_t s = 0; s < next_slot_; ++s)
    if (flags()[s] & kExists) all.push_back(key_of(s));
  std::erase_if(all, [&](uint64_t key) { return key + 1 < *cursor; });
  const size_t n = std::min(capacity, all.size());
  std::partial_sort(all.begin(), all.begin() + static_cast<ptrdiff_t>(n), all.end(),
                    [](uint64_t a, uint64_t b) { return a + 1 < b + 1; });
  std::copy_n(all.begin(), n, keys);
  if (n) *cursor = keys[n - 1] + 2;
  return n;
}

}  // namespace frugal
