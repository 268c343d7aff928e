#include "storage/rows.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace frugal {

namespace {

constexpr size_t kChunk = 8192;  // keys under one lock: other threads get their turn in between

}  // namespace

Status Rows::open(const Config& c, MemoryBudget* budget, FarRows far) {
  capacity_ = c.capacity;
  if (far.store) capacity_ = std::min(c.capacity, far.places);
  hashed_ = c.hashed;
  lazy_ = c.lazy || c.hashed;
  layout_ = c.layout;
  init_ = c.init;
  budget_ = budget;
  pinner_ = c.pinner;
  // (Addresses for all rows: so other processes expect it, who know of no places.)
  FRUGAL_TRY(values_.reserve(c.capacity, layout_.value_pitch, c.shared, budget, c.pinner));
  FRUGAL_TRY(state_.reserve(c.capacity, layout_.state_pitch, c.shared, budget, c.pinner));
  if (lazy_) {
    FRUGAL_TRY(flags_.reserve(c.capacity, 1, c.shared, budget));
  }
  if (hashed_) {
    FRUGAL_TRY(keys_.reserve(c.capacity, 8, c.shared, budget));
    Lock lock(mu_);
    FRUGAL_TRY(holders_.open(capacity_, budget));
    FRUGAL_TRY(index_.open(capacity_, budget));
  }
  ref_ = layout_.at(values_.base(), state_.base());
  FRUGAL_ASSERT(!far.store || hashed_);
  most_rows_ = c.capacity;
  room_ = std::move(far.room);
  far_ = std::move(far.store);
  return FRUGAL_OK;
}

Status Rows::pin_next(bool* any) {
  Lock lock(mu_);
  FRUGAL_TRY(values_.pin_next(any));
  return *any ? FRUGAL_OK : state_.pin_next(any);
}

void Rows::unpin() {
  Lock lock(mu_);
  values_.unpin();
  state_.unpin();
}

uint64_t Rows::chunk_rows() const {
  // Rows after which values and state both stand at the start of a slab of theirs; 2^21 records
  // of a multiple of 4 bytes are a multiple of 8 MiB.
  return uint64_t{1} << 21;
}

Status Rows::ensure_memory(uint64_t first, uint64_t n) {
  FRUGAL_TRY(values_.ensure(first, n));
  FRUGAL_TRY(state_.ensure(first, n));
  if (lazy_) FRUGAL_TRY(flags_.ensure(first, n));
  if (hashed_) FRUGAL_TRY(keys_.ensure(first, n));
  return FRUGAL_OK;
}

Status Rows::initialize_range(uint64_t first, uint64_t n) {
  FRUGAL_TRY(ensure_memory(first, n));
  const RowWrite write(*this, nullptr, 0, {RowWrite::What::kNew});
  device::kernels().initialize(write.in_place(), init_, nullptr, first, nullptr,
                               static_cast<uint32_t>(first), n);
  return FRUGAL_OK;
}

Status Rows::open_state(State* s) const {
  return s->array.reserve(most_rows_, s->layout.state_pitch, values_.fd() >= 0, budget_, pinner_);
}

Status Rows::fill_state(State* s, uint64_t first, uint64_t n) const {
  FRUGAL_TRY(s->array.ensure(first, n));
  const device::RowsRef to = s->layout.at(nullptr, s->array.base());
  for (uint64_t i = first; i < first + n; ++i)
    s->layout.new_state(s->init, to.state_row(i));
  return FRUGAL_OK;
}

Status Rows::take_state(State* s) {
  Lock lock(mu_);  // no row is begun
  if (away_ + leaving_ != 0)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "rows of the table that are not in memory have state of its kind");
  if (hashed_) {
    FRUGAL_TRY(fill_state(s, 0, next_slot_));  // free slots have memory, too
  } else if (lazy_) {
    for (uint64_t i = 0; i < capacity_; ++i)
      if (!flags_.committed(i)) i |= SlabArray::kSlab - 1;  // a flag is a byte: the next slab
      else if (flags()[i]) FRUGAL_TRY(fill_state(s, i, 1));
  }
  // Who joins on a GPU from here on finds it here.
  for (bool any = true; any;) FRUGAL_TRY(s->array.pin_next(&any));
  state_.swap(s->array);
  init_ = s->init;
  layout_.state_columns = s->layout.state_columns;
  layout_.state_floats = s->layout.state_floats;
  layout_.state_pitch = s->layout.state_pitch;
  const device::RowsRef to = layout_.at(values_.base(), state_.base());
  ref_.state = to.state;
  ref_.state_pitch = to.state_pitch;
  ref_.state_second = to.state_second;
  for (uint32_t i = 0; i < watcher_count_; ++i) watchers_[i]->new_state();
  return FRUGAL_OK;
}

void Rows::initialize_slot(uint32_t slot, uint64_t key) {
  const RowWrite write(*this, &slot, 1, {RowWrite::What::kNew});
  const device::RowsRef to = write.in_place();
  std::memset(to.row(slot), 0, layout_.value_pitch);
  if (layout_.state_pitch) std::memset(to.state_row(slot), 0, layout_.state_pitch);
  device::kernels().initialize(to, init_, &key, 0, &slot, 0, 1);
}

void Rows::watch(RowWatcher* watcher) {
  Lock lock(mu_);  // rows may be begun just now: the same watchers hear of them before and after
  FRUGAL_ASSERT(watcher_count_ < RowWrite::kMostWatchers);
  watchers_[watcher_count_++] = watcher;
}

void Rows::read_beside(VersionWord* words, uint64_t number) {
  words_ = words;
  number_ = number;
}

Status Rows::check_ids(const uint64_t* keys, size_t n, const uint64_t* padding) const {
  return hashed_ ? FRUGAL_OK : check_dense_ids(keys, n, padding, capacity_);
}

namespace {

// Calls put(i, slot) for each id.
template <class Put>
Status each_slot(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                 Put put) {
  // The highest bit is set if the id is not below the capacity, which is less than 2^63:
  // subtracting is vector code everywhere, comparing 64 bits is not.
  auto beyond = [=](uint64_t id) { return (capacity - 1 - id) | id; };
  uint64_t bad = 0;
  if (!padding) {
    for (size_t i = 0; i < n; ++i) {
      put(i, static_cast<uint32_t>(keys[i]));
      bad |= beyond(keys[i]);
    }
  } else {
    const uint64_t none = *padding;
    for (size_t i = 0; i < n; ++i) {
      put(i, keys[i] == none ? kNoSlot : static_cast<uint32_t>(keys[i]));
      bad |= keys[i] == none ? 0 : beyond(keys[i]);
    }
  }
  if (!(bad >> 63)) return FRUGAL_OK;
  for (size_t i = 0; i < n; ++i)
    if (keys[i] >= capacity && !(padding && keys[i] == *padding))
      return fail(FRUGAL_ERR_KEY_OUT_OF_RANGE,
                  "id %s at position %zu: the table has ids 0..%llu; nothing was taken",
                  number_text(keys[i]).c_str(), i, static_cast<unsigned long long>(capacity - 1));
  return fail(FRUGAL_ERR_KEY_OUT_OF_RANGE,
              "ids changed while they were looked at; nothing was taken");
}

}  // namespace

Status check_dense_ids(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity) {
  return each_slot(keys, n, padding, capacity, [](size_t, uint32_t) {});
}

Status dense_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                   uint32_t* slots) {
  return each_slot(keys, n, padding, capacity, [=](size_t i, uint32_t slot) { slots[i] = slot; });
}

Status Rows::begin_rows(const uint32_t* slots, size_t n) {
  if (hashed_ || !lazy_) return FRUGAL_OK;
  Lock lock(mu_);
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (s == kNoSlot) continue;
    FRUGAL_TRY(flags_.ensure(s, 1));
    if (flags()[s]) continue;
    FRUGAL_TRY(ensure_memory(s, 1));
    initialize_slot(s, s);
    flags()[s] = kExists;
  }
  return FRUGAL_OK;
}

Status Rows::add_key(uint64_t key, uint32_t* slot) {
  const bool away = far_ && far_->has(key);
  if (far_ && !away && taken() >= most_rows_)
    return fail(FRUGAL_ERR_TABLE_FULL,
                "no room for key %s: the table has its %llu rows; create it with more, or delete "
                "some",
                number_text(key).c_str(), static_cast<unsigned long long>(most_rows_));
  if (away) expect_to_load();
  uint32_t s = free_;
  if (s == kNoSlot) {
    if (next_slot_ >= capacity_)
      return fail(FRUGAL_ERR_TABLE_FULL,
                  "no room for key %s: all of its %llu rows are taken; create it with more rows, "
                  "or delete some",
                  number_text(key).c_str(), static_cast<unsigned long long>(capacity_));
    FRUGAL_TRY(ensure_memory(next_slot_, 1));
    FRUGAL_TRY(holders_.ensure(next_slot_, 1));
    s = static_cast<uint32_t>(next_slot_);
  }
  FRUGAL_TRY(index_.make_room(1));
  if (free_ != kNoSlot)
    free_ = static_cast<uint32_t>(keys()[s]);
  else
    ++next_slot_;
  begin_place(s, key);
  if (slots_told_) slots_told_->store(next_slot_, std::memory_order_release);
  reserved_.fetch_add(1, std::memory_order_relaxed);
  if (away) {
    flags()[s] = kLoading;
    loading_.fetch_add(1);
    to_load_.push_back(s);
  }
  *slot = s;
  return FRUGAL_OK;
}

// The one function by which a free place becomes a row's. It begins clean. Who still looks there
// for the row before takes nothing of this one for it:
// - Values, state and what lies between their columns: all bytes are new. The row before was
//   deleted between steps, or undone when no call that had found it was under way; or it has left
//   (rows_far.cpp), when nobody held its place: nobody reads it.
// - Version word (staleness): it is shared with other rows and only counts on, so no copy of a row
//   is taken for whole that was begun before.
// - Flag byte: 0 while the place is free, and no mark is left. Who reads the flags alone, in
//   another process, finds no row until this one exists, and finds its key then, which was there
//   before.
// - Word of the window: its reads are those of declarations, which hold the place, so a free one
//   has none of steps to come. Updates in it are written, or forgotten by an abort; where rows may
//   leave, updates that are not written hold the place. Its bit of the cache went with the line.
// - Lines of caches: dropped before a row is deleted. Young rows have none. Where rows may leave,
//   a line holds the place.
void Rows::begin_place(uint32_t slot, uint64_t key) {
  FRUGAL_ASSERT(flags()[slot] == 0 && !holders_.held(slot));
  index_.insert(key, slot);
  keys()[slot] = key;
  initialize_slot(slot, key);
  flags()[slot] = kReserved;
}

// A place that is reserved only, and held by nobody. Takes no memory.
void Rows::free_place(uint32_t slot) {
  FRUGAL_ASSERT(flags()[slot] == kReserved && !holders_.held(slot));
  FRUGAL_ASSERT(index_.find(key_of(slot)) == slot);
  index_.erase(key_of(slot));
  flags()[slot] = 0;
  keys()[slot] = free_;
  free_ = slot;
  reserved_.fetch_sub(1, std::memory_order_relaxed);
}

Status Rows::resolve(const uint64_t* keys, size_t n, const uint64_t* padding, Missing missing,
                     uint32_t* slots, Vector<uint32_t>* created) {
  if (!hashed_) {
    FRUGAL_TRY(dense_slots(keys, n, padding, capacity_, slots));
    return begin_rows(slots, n);
  }
  if (far_) {
    FRUGAL_ASSERT(missing != Missing::kCreate);
    return resolve_far(keys, n, padding, missing == Missing::kLeave, slots);
  }
  size_t i = 0;  // places of slots[0, i) are held
  Status status = FRUGAL_OK;
  for (size_t at = 0; at < n && status == FRUGAL_OK; at += kChunk) try {
    const size_t end = std::min(n, at + kChunk);
    Lock lock(mu_);
    index_.find(keys + at, end - at, slots + at);
    for (; i < end; ++i) {
      uint32_t& s = slots[i];
      if (padding && keys[i] == *padding) {
        s = kNoSlot;
      } else if (missing == Missing::kLeave) {
        if (s == KeyIndex::kNone || !(flags()[s] & kExists)) s = kMissingSlot;
      } else {
        // A duplicate within the chunk may have added it just now.
        if (s == KeyIndex::kNone) s = index_.find(keys[i]);
        if (s == KeyIndex::kNone && (status = add_key(keys[i], &s)) != FRUGAL_OK) break;
        // Few tables have rows that are reserved only: nobody looks for them there.
        if (has_reserved() && flags()[s] == kReserved) holders_.hold(s);
      }
    }
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to count who holds rows: free memory of the machine and call again");
  }
  if (missing == Missing::kLeave) return status;
  if (status != FRUGAL_OK) {
    let_go(slots, i);
    return status;
  }
  if (missing == Missing::kReserve) return FRUGAL_OK;
  struct Held {
    Rows& rows;
    const uint32_t* slots;
    size_t n;
    ~Held() { rows.let_go(slots, n); }
  } held{*this, slots, n};
  create_reserved(slots, n, created);
  return FRUGAL_OK;
}

void Rows::let_go(const uint32_t* slots, size_t n, const uint32_t* start) {
  for (size_t at = 0; at < n && (far_ || has_reserved()); at += kChunk) {
    Lock lock(mu_);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      const uint32_t s = slots[i];
      if (s >= kMissingSlot) continue;
      if (far_) {
        release(s, start ? start[i + 1] - start[i] : 1);
        continue;
      }
      if (flags()[s] != kReserved) continue;
      if (!holders_.let_go(s, start ? start[i + 1] - start[i] : 1)) free_place(s);
    }
  }
}

void Rows::create(uint32_t s, uint8_t mark) {
  FRUGAL_ASSERT(s < next_slot_ && flags()[s] == kReserved && holders_.held(s) && mark <= kMarks);
  if (!far_) holders_.clear(s);
  flags()[s] = static_cast<uint8_t>(kExists | mark << kMarkAt);
  ++existing_;
  young_ += mark != 0;
  reserved_.fetch_sub(1, std::memory_order_relaxed);
}

void Rows::create_reserved(const uint32_t* slots, size_t n, Vector<uint32_t>* created) {
  if (!hashed_) return;
  Lock lock(mu_);
  if (created) {
    // Room for the list first: no row exists that is not in it.
    size_t most = 0;
    for (size_t i = 0; i < n; ++i)
      most += slots[i] < kMissingSlot && !(flags()[slots[i]] & kExists);
    created->reserve(created->size() + most);
  }
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (s >= kMissingSlot || (flags()[s] & kExists)) continue;
    create(s, 0);
    if (created) created->push_back(s);
  }
}

void Rows::use(const uint32_t* slots, size_t n, uint64_t step, uint64_t base,
               Vector<uint32_t>* created, Vector<uint32_t>* earlier) {
  if (!hashed_) return;
  Lock lock(mu_);
  if (!has_reserved() && young_ == 0) return;
  const uint8_t mark = mark_of(step);
  // Marks are those of uncommitted steps: by how many steps they are behind the first of these.
  auto age = [first = mark_of(base)](uint8_t m) { return (m + kMarks - first) % kMarks; };
  auto is_later = [&](uint8_t flag) {
    return flag_mark(flag) != 0 && age(flag_mark(flag)) > age(mark);
  };
  // Room for the lists first: no row changes that is not in one.
  size_t most_created = 0, most_earlier = 0;
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] >= kMissingSlot) continue;
    const uint8_t flag = flags()[slots[i]];
    most_created += !(flag & kExists);
    most_earlier += is_later(flag);
  }
  created->reserve(created->size() + most_created);
  earlier->reserve(earlier->size() + most_earlier);
  for (size_t i = 0; i < n && most_created + most_earlier != 0; ++i) {
    const uint32_t s = slots[i];
    if (s >= kMissingSlot) continue;
    if (!(flags()[s] & kExists)) {
      create(s, mark);
      created->push_back(s);
    } else if (is_later(flags()[s])) {
      flags()[s] = static_cast<uint8_t>(kExists | mark << kMarkAt);
      earlier->push_back(s);
    }
  }
}

void Rows::settle(const uint32_t* slots, size_t n, uint64_t step) {
  if (!hashed_) return;
  Lock lock(mu_);
  for (size_t i = 0; i < n; ++i) {
    uint8_t& flag = flags()[slots[i]];
    if (!(flag & kExists) || flag_mark(flag) != mark_of(step)) continue;
    flag = kExists;
    --young_;
    if (far_ && !holders_.held(slots[i])) become_idle();
  }
}

void Rows::undo(const uint32_t* slots, size_t n) {
  if (!hashed_) return;
  Lock lock(mu_);
  for (size_t i = 0; i < n; ++i)
    if (flags()[slots[i]] & kExists && flag_mark(flags()[slots[i]]) != 0) remove(slots[i]);
}

void Rows::tell_slots(std::atomic<uint64_t>* elsewhere) {
  Lock lock(mu_);
  slots_told_ = elsewhere;
  if (elsewhere) elsewhere->store(next_slot_);
}

// A row that exists does so no longer.
void Rows::remove(uint32_t s) {
  FRUGAL_ASSERT(flags()[s] & kExists);
  young_ -= flag_mark(flags()[s]) != 0;
  flags()[s] = kReserved;
  --existing_;
  reserved_.fetch_add(1, std::memory_order_relaxed);
  if (far_) {
    far_->forget(key_of(s));
    if (holders_.held(s)) return;
    free_place(s);
    tell_room();
    return;
  }
  holders_.forget(s);
  try {
    unsure_.push_back(s);
  } catch (const std::bad_alloc&) {
    ++unlisted_;
  }
  any_unsure_.store(true);
}

// Ascending, and each once. Throws where there is no memory; then it is made another time.
void Rows::list_unsure() {
  if (unlisted_ == 0) {
    std::sort(unsure_.begin(), unsure_.end());
    unsure_.erase(std::unique(unsure_.begin(), unsure_.end()), unsure_.end());
    return;
  }
  unsure_.reserve(unsure_.size() + unlisted_);  // all are gone over only where there is room
  unsure_.clear();
  for (uint32_t s = 0; s < next_slot_; ++s)
    if (flags()[s] == kReserved && holders_.unknown(s)) unsure_.push_back(s);
  unlisted_ = 0;
}

namespace {

// The first place of an ascending list, from `at` on, whose slot is not below `slot`; n if there is
// none. In growing strides, for one list may be much longer than the other.
size_t gallop(const uint32_t* list, size_t at, size_t n, uint32_t slot) {
  size_t stride = 1;
  for (; at + stride < n && list[at + stride] < slot; stride *= 2) at += stride;
  const uint32_t* end = list + std::min(n, at + stride);
  return static_cast<size_t>(std::lower_bound(list + at, end, slot) - list);
}

}  // namespace

// Adds how often each slot of an ascending list is held by who holds `slots`, which ascend, too.
// The shorter of the two lists makes the work.
void Rows::count_holds(const Vector<uint32_t>& of, const uint32_t* slots, size_t n,
                       const uint32_t* start, Vector<uint64_t>* counts) {
  for (size_t i = 0, at = 0; i < of.size();) {
    at = gallop(slots, at, n, of[i]);
    if (at == n) return;
    if (slots[at] == of[i]) {
      (*counts)[i] += start[at + 1] - start[at];
      ++i;
    } else {
      i = gallop(of.data(), i, of.size(), slots[at]);
    }
  }
}

void Rows::settle_unsure(const Vector<uint64_t>& counts) {
  size_t left = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const uint32_t s = unsure_[i];
    // Others exist again, or have been free since.
    if (flags()[s] != kReserved || !holders_.unknown(s)) continue;
    holders_.clear(s);
    if (counts[i] == 0) {
      free_place(s);
      continue;
    }
    try {
      holders_.hold(s, counts[i]);
    } catch (const std::bad_alloc&) {
      holders_.forget(s);
      unsure_[left++] = s;
    }
  }
  unsure_.resize(left);
  any_unsure_.store(left != 0);
}

uint64_t Rows::uncreate(const uint32_t* slots, size_t n, bool reinitialize) {
  Lock lock(mu_);
  uint64_t were = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (hashed_ && !(flags()[s] & kExists)) continue;
    ++were;
    const uint64_t key = key_of(s);
    if (hashed_) remove(s);
    if (hashed_ && reinitialize) initialize_slot(s, key);
  }
  // Rows of a dense table are there all the time.
  if (reinitialize && !hashed_)
    write_outside(slots, n, [&](RowWrite& write, size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        const uint64_t key = slots[i];
        device::kernels().initialize(write.in_place(), init_, &key, 0, &slots[i], 0, 1);
      }
    });
  return were;
}

bool Rows::exists(uint32_t slot) {
  if (!hashed_) return true;
  Lock lock(mu_);
  return flags()[slot] & kExists;
}

void Rows::collect_new(const uint32_t* slots, size_t n, Vector<uint32_t>* reserved,
                       Vector<uint32_t>* young) {
  if (!hashed_) return;
  for (size_t at = 0; at < n; at += kChunk) {
    Lock lock(mu_);
    if (!has_reserved() && young_ == 0) continue;
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      if (slots[i] >= kMissingSlot) continue;
      const uint8_t flag = flags()[slots[i]];
      if (flag & kReserved) reserved->push_back(slots[i]);
      if (flag_mark(flag) != 0) young->push_back(slots[i]);
    }
  }
}

bool Rows::any_reserved(const uint32_t* slots, size_t n) {
  if (!hashed_ || !has_reserved()) return false;
  Lock lock(mu_);
  return std::any_of(slots, slots + n, [this](uint32_t s) {
    return s < kMissingSlot && (flags()[s] & kReserved);
  });
}

uint64_t Rows::count() {
  if (!hashed_) return capacity_;
  Lock lock(mu_);
  return existing_ + away_;
}

size_t Rows::enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity) {
  if (far_) return enumerate_far(cursor, keys, capacity);
  size_t n = 0;
  Lock lock(mu_);
  uint64_t end = hashed_ ? next_slot_ : capacity_;
  while (n < capacity && *cursor < end) {
    uint32_t s = static_cast<uint32_t>((*cursor)++);
    if (!hashed_ || (flags()[s] & kExists)) keys[n++] = key_of(s);
  }
  return n;
}

uint32_t Rows::mappings(Vector<int>* descriptors) const {
  const SlabArray* arrays[kArrays] = {&values_, &state_, &keys_, &flags_};
  uint32_t there = 0;
  for (uint32_t i = 0; i < kArrays; ++i) {
    if (arrays[i]->fd() < 0) continue;
    descriptors->push_back(arrays[i]->fd());
    there |= 1u << i;
  }
  return there;
}

uint64_t Rows::memory_bytes() {
  Lock lock(mu_);
  return values_.committed_bytes() + state_.committed_bytes() + keys_.committed_bytes() +
         flags_.committed_bytes() + holders_.memory_bytes() + index_.memory_bytes();
}

}  // namespace frugal
