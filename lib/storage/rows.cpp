#include "storage/rows.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace frugal {

namespace {

constexpr size_t kChunk = 8192;  // keys under one lock: other threads get their turn in between

}  // namespace

RowLayout RowLayout::of(uint32_t dim, int32_t optimizer) {
  RowLayout l;
  l.dim = dim;
  // Small rows never straddle a cache line; larger ones start on one. A stride that is a multiple
  // of 128 bytes keeps rows on the 128-byte lines of a GPU's link where dim allows it.
  const size_t bytes = l.value_bytes();
  l.value_pitch = 16;
  if (bytes <= 128)
    while (l.value_pitch < bytes) l.value_pitch *= 2;
  else
    l.value_pitch = (bytes + 63) / 64 * 64;
  l.sums_stride = l.value_pitch / sizeof(float);
  switch (optimizer) {
    case FRUGAL_SGD:
      break;
    case FRUGAL_ROWWISE_ADAGRAD:
      l.state_floats = 1;
      l.state_pitch = sizeof(device::Element);
      break;
    case FRUGAL_ADAM:
    case FRUGAL_FTRL:
      l.state_columns = 2;
      break;
    default:
      l.state_columns = 1;
  }
  if (l.state_columns) {
    l.state_floats = l.state_columns * dim;
    l.state_pitch = l.state_columns * l.value_pitch;
  }
  return l;
}

device::RowsRef RowLayout::at(void* values, void* state) const {
  device::RowsRef ref{};
  ref.values = static_cast<device::Element*>(values);
  ref.value_pitch = value_pitch;
  ref.state = static_cast<device::Element*>(state);
  ref.state_pitch = state_pitch;
  ref.state_second = state_columns == 2 ? value_pitch : 0;
  ref.dim = dim;
  return ref;
}

Status Rows::open(const Config& c, MemoryBudget* budget) {
  capacity_ = c.capacity;
  hashed_ = c.hashed;
  lazy_ = c.lazy || c.hashed;
  layout_ = c.layout;
  init_ = c.init;
  budget_ = budget;
  pinner_ = c.pinner;
  FRUGAL_TRY(values_.reserve(capacity_, layout_.value_pitch, c.shared, budget, c.pinner));
  FRUGAL_TRY(state_.reserve(capacity_, layout_.state_pitch, c.shared, budget, c.pinner));
  if (lazy_) {
    FRUGAL_TRY(flags_.reserve(capacity_, 1, c.shared, budget));
  }
  if (hashed_) {
    FRUGAL_TRY(keys_.reserve(capacity_, 8, c.shared, budget));
    Lock lock(mu_);
    FRUGAL_TRY(holders_.open(capacity_, budget));
    FRUGAL_TRY(index_.open(capacity_, budget));
  }
  ref_ = layout_.at(values_.base(), state_.base());
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
  device::kernels().initialize(write.in_place(), init_, nullptr, first, nullptr, static_cast<uint32_t>(first), n);
  return FRUGAL_OK;
}

Status Rows::open_state(State* s) const {
  return s->array.reserve(capacity_, s->layout.state_pitch, values_.fd() >= 0, budget_, pinner_);
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
  return FRUGAL_OK;
}

void Rows::initialize_slot(uint32_t slot, uint64_t key) {
  const RowWrite write(*this, &slot, 1, {RowWrite::What::kNew});
  device::kernels().initialize(write.in_place(), init_, &key, 0, &slot, 0, 1);
}

void Rows::watch(RowWatcher* watcher) {
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

// A key as its caller may have written it: most have signed ones.
String key_text(uint64_t key) {
  const auto number = static_cast<unsigned long long>(key);
  return key >> 63 ? text("%lld (unsigned %llu)", static_cast<long long>(key), number) : text("%llu", number);
}

// Calls put(i, slot) for each id.
template <class Put>
Status each_slot(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity, Put put) {
  // The highest bit is set if the id is not below the capacity, which is less than 2^63: subtracting is vector code
  // everywhere, comparing 64 bits is not.
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
                  "id %s at position %zu: the table has ids 0..%llu; nothing was taken", key_text(keys[i]).c_str(), i,
                  static_cast<unsigned long long>(capacity - 1));
  return fail(FRUGAL_ERR_KEY_OUT_OF_RANGE, "ids changed while they were looked at; nothing was taken");
}

}  // namespace

Status check_dense_ids(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity) {
  return each_slot(keys, n, padding, capacity, [](size_t, uint32_t) {});
}

Status dense_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity, uint32_t* slots) {
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
  uint32_t s = free_;
  if (s == kNoSlot) {
    if (next_slot_ >= capacity_)
      return fail(FRUGAL_ERR_TABLE_FULL,
                  "no room for key %s: all of its %llu rows are taken; create it with more rows, or delete some",
                  key_text(key).c_str(), static_cast<unsigned long long>(capacity_));
    FRUGAL_TRY(ensure_memory(next_slot_, 1));
    FRUGAL_TRY(holders_.ensure(next_slot_, 1));
    s = static_cast<uint32_t>(next_slot_);
  }
  FRUGAL_TRY(index_.make_room(1));
  if (free_ != kNoSlot)
    free_ = static_cast<uint32_t>(keys()[s]);
  else
    ++next_slot_;
  FRUGAL_ASSERT(flags()[s] == 0 && !holders_.held(s));  // nobody's
  index_.insert(key, s);
  keys()[s] = key;
  initialize_slot(s, key);
  flags()[s] = kReserved;
  if (slots_told_) slots_told_->store(next_slot_, std::memory_order_release);
  reserved_.fetch_add(1, std::memory_order_relaxed);
  *slot = s;
  return FRUGAL_OK;
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
        holders_.hold(s);
      }
    }
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to count who holds rows");
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
  if (!hashed_) return;
  for (size_t at = 0; at < n; at += kChunk) {
    Lock lock(mu_);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      const uint32_t s = slots[i];
      if (s >= kMissingSlot || holders_.let_go(s, start ? start[i + 1] - start[i] : 1)) continue;
      // Most tables have no row that is reserved only: nobody looks for it there.
      if (has_reserved() && flags()[s] == kReserved) free_place(s);
    }
  }
}

void Rows::create_reserved(const uint32_t* slots, size_t n, Vector<uint32_t>* created, uint8_t mark) {
  if (!hashed_) return;
  Lock lock(mu_);
  if (created) {
    // Room for the list first: no row exists that is not in it.
    size_t most = 0;
    for (size_t i = 0; i < n; ++i) most += slots[i] < kMissingSlot && !(flags()[slots[i]] & kExists);
    created->reserve(created->size() + most);
  }
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (s >= kMissingSlot || (flags()[s] & kExists)) continue;
    FRUGAL_ASSERT(s < next_slot_ && flags()[s] == kReserved && holders_.held(s) && mark <= kMarks);
    flags()[s] = static_cast<uint8_t>(kExists | mark << kMarkAt);
    ++existing_;
    reserved_.fetch_sub(1, std::memory_order_relaxed);
    if (created) created->push_back(s);
  }
}

void Rows::mark(const uint32_t* slots, size_t n, uint8_t mark) {
  if (!hashed_) return;
  Lock lock(mu_);
  for (size_t i = 0; i < n; ++i)
    if (flags()[slots[i]] & kExists) flags()[slots[i]] = static_cast<uint8_t>(kExists | mark << kMarkAt);
}

void Rows::tell_slots(std::atomic<uint64_t>* elsewhere) {
  Lock lock(mu_);
  slots_told_ = elsewhere;
  if (elsewhere) elsewhere->store(next_slot_);
}

uint64_t Rows::uncreate(const uint32_t* slots, size_t n, bool reinitialize) {
  Lock lock(mu_);
  uint64_t were = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (hashed_) {
      if (!(flags()[s] & kExists)) continue;
      flags()[s] = kReserved;
      --existing_;
      reserved_.fetch_add(1, std::memory_order_relaxed);
    }
    ++were;
    if (hashed_ && !holders_.held(s))
      free_place(s);
    else if (hashed_ && reinitialize)
      initialize_slot(s, key_of(s));
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

void Rows::collect_reserved(const uint32_t* slots, size_t n, Vector<uint32_t>* out) {
  if (!hashed_) return;
  for (size_t at = 0; at < n; at += kChunk) {
    Lock lock(mu_);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i)
      if (slots[i] < kMissingSlot && (flags()[slots[i]] & kReserved)) out->push_back(slots[i]);
  }
}

bool Rows::any_reserved(const uint32_t* slots, size_t n) {
  if (!hashed_ || !has_reserved()) return false;
  Lock lock(mu_);
  return std::any_of(slots, slots + n, [this](uint32_t s) { return s < kMissingSlot && (flags()[s] & kReserved); });
}

uint64_t Rows::count() {
  if (!hashed_) return capacity_;
  Lock lock(mu_);
  return existing_;
}

size_t Rows::enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity) {
  size_t n = 0;
  Lock lock(mu_);
  uint64_t end = hashed_ ? next_slot_ : capacity_;
  while (n < capacity && *cursor < end) {
    uint32_t s = static_cast<uint32_t>((*cursor)++);
    if (!hashed_ || (flags()[s] & kExists)) keys[n++] = key_of(s);
  }
  return n;
}

void RowLayout::export_state(const device::Element* from, float* out) const {
  if (state_columns == 0) {
    if (state_floats) *out = *from;
    return;
  }
  for (uint32_t c = 0; c < state_columns; ++c)
    std::memcpy(out + c * dim, device::behind(from, c * value_pitch), value_bytes());
}

void RowLayout::import_state(const float* in, device::Element* to) const {
  if (state_columns == 0) {
    if (state_floats) *to = *in;
    return;
  }
  for (uint32_t c = 0; c < state_columns; ++c)
    std::memcpy(device::behind(to, c * value_pitch), in + c * dim, value_bytes());
}

void RowLayout::new_state(const arith::InitSpec& init, device::Element* to) const {
  for (uint32_t c = 0; c < init.state_columns; ++c)
    std::fill_n(device::behind(to, c * value_pitch), init.column_floats, init.state[c]);
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
