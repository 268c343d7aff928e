#include "window/part.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "device/cpu/sort.h"

namespace frugal {

Status Part::expect_keys(size_t count, bool padded, uint64_t padding_key) {
  if (count >= UINT32_MAX)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%zu keys in one op: at most 2^32 - 2", count);
  n = count;
  has_padding = padded;
  padding = padding_key;
  state.store(kDownloading);
  return FRUGAL_OK;
}

Status Part::take_keys(BufferPool& pool, const Rows& table, const uint64_t* from, size_t count,
                       bool padded, uint64_t padding_key) {
  FRUGAL_TRY(expect_keys(count, padded, padding_key));
  state.store(kDeclared);
  if (table.keys_are_slots()) {
    FRUGAL_TRY(pool.get(n * sizeof(uint32_t), &slots));
    return dense_slots(from, n, has_padding ? &padding : nullptr, table.capacity(),
                       slots.as<uint32_t>());
  }
  FRUGAL_TRY(pool.get(n * sizeof(uint64_t), &keys));
  if (n) std::memcpy(keys.data(), from, n * sizeof(uint64_t));
  return FRUGAL_OK;
}

Status Part::adopt_keys(const Rows& table, Buffer&& copy, size_t count, bool padded,
                        uint64_t padding_key) {
  FRUGAL_TRY(expect_keys(count, padded, padding_key));
  state.store(kDeclared);
  if (copy.is_lent())
    lent = std::move(copy);
  else if (!table.keys_are_slots())
    keys = std::move(copy);
  else
    return take_slots(table, std::move(copy));
  return FRUGAL_OK;
}

Status Part::take_slots(const Rows& table, Buffer&& copy) {
  const uint32_t* s = copy.as<uint32_t>();
  const uint64_t capacity = table.capacity();
  const uint32_t last = static_cast<uint32_t>(capacity - 1);
  uint32_t bad = 0;
  if (!has_padding)
    for (size_t i = 0; i < n; ++i) bad |= s[i] > last;
  else
    for (size_t i = 0; i < n; ++i) bad |= (s[i] > last) & (s[i] != kNoSlot);
  if (bad)
    return fail(FRUGAL_ERR_KEY_OUT_OF_RANGE,
                "a row beyond the %llu of the table; nothing was taken",
                static_cast<unsigned long long>(capacity));
  slots = std::move(copy);
  return FRUGAL_OK;
}

Status Part::take_lent(BufferPool& pool, const Rows& table) {
  if (!lent) return FRUGAL_OK;
  const size_t bytes = n * (table.keys_are_slots() ? sizeof(uint32_t) : sizeof(uint64_t));
  Buffer copy;
  FRUGAL_TRY(pool.get(bytes, &copy));
  std::memcpy(copy.data(), lent.data(), bytes);
  if (!table.keys_are_slots())
    keys = std::move(copy);
  else
    FRUGAL_TRY(take_slots(table, std::move(copy)));
  lent.reset();
  return FRUGAL_OK;
}

Status Part::take_keys(BufferPool& pool, const Part& from) {
  FRUGAL_TRY(expect_keys(from.n, from.has_padding, from.padding));
  state.store(kDeclared);
  const bool by_key = static_cast<bool>(from.keys);
  const Buffer& given = by_key ? from.keys : from.slots;
  const size_t bytes = n * (by_key ? sizeof(uint64_t) : sizeof(uint32_t));
  Buffer& taken = by_key ? keys : slots;
  FRUGAL_TRY(pool.get(bytes, &taken));
  if (n) std::memcpy(taken.data(), given.data(), bytes);
  return FRUGAL_OK;
}

Status Part::find_slots(BufferPool& pool, Rows& table, Rows::Missing missing,
                        Vector<uint32_t>* created) {
  FRUGAL_TRY(take_lent(pool, table));
  if (slots) return table.begin_rows(slots.as<uint32_t>(), n);
  FRUGAL_TRY(pool.get(n * sizeof(uint32_t), &slots));
  return table.resolve(keys.as<uint64_t>(), n, has_padding ? &padding : nullptr, missing,
                       slots.as<uint32_t>(), created);
}

Status Part::resolve(BufferPool& pool, Rows& table, Rows::Missing missing,
                     Vector<uint32_t>* created) {
  FRUGAL_TRY(find_slots(pool, table, missing, created));
  const Status s = sort_rows(pool, table);
  if (s != FRUGAL_OK) {
    if (missing == Rows::Missing::kReserve) release_hold(table);
    return s;
  }
  if (table.keys_are_slots()) keys.reset();
  // The thread that has marked the part as being resolved reports the end.
  if (state.load() != kResolving) state.store(kResolved, std::memory_order_release);
  return FRUGAL_OK;
}

Status Part::sort_rows(BufferPool& pool, const Rows& table) {
  Buffer sorted, scratch;
  FRUGAL_TRY(pool.get(n * sizeof(uint64_t), &sorted));
  FRUGAL_TRY(pool.get(device::sort_scratch(n, table.capacity()), &scratch));
  occurrences = device::sort_pairs(slots.as<uint32_t>(), n, 0, table.capacity(),
                                   sorted.as<uint64_t>(), scratch.data());
  pairs = std::move(sorted);
  FRUGAL_TRY(pool.get((occurrences + RowFinder::kPadding) * sizeof(uint32_t), &rows));
  FRUGAL_TRY(pool.get((occurrences + 1) * sizeof(uint32_t), &start));
  distinct = device::distinct_slots(pairs.as<uint64_t>(), occurrences, rows.as<uint32_t>(),
                                    start.as<uint32_t>());
  std::fill_n(rows.as<uint32_t>() + distinct, RowFinder::kPadding, UINT32_MAX);
  return FRUGAL_OK;
}

void Part::release_hold(Rows& table) const {
  if (resolved())
    table.release_hold(row_slots(), distinct, row_start());
  else
    table.release_hold(slots.as<uint32_t>(), n);
}

bool Part::same_keys(const uint64_t* other, size_t count) const {
  if (count != n) return false;
  if (keys) return n == 0 || std::memcmp(keys.data(), other, n * sizeof(uint64_t)) == 0;
  const uint32_t* s = slots.as<uint32_t>();
  uint64_t differ = 0;
  if (!has_padding)
    for (size_t i = 0; i < n; ++i) differ |= other[i] ^ s[i];
  else
    for (size_t i = 0; i < n; ++i) differ |= other[i] ^ (s[i] == kNoSlot ? padding : s[i]);
  return differ == 0;
}

Status RowFinder::build(BufferPool& pool, const uint32_t* slots, size_t n) {
  if (n == 0) return FRUGAL_OK;
  // About eight rows a range: a cache line holds them twice.
  int bits = std::bit_width(slots[n - 1]),
      wanted = std::max(0, static_cast<int>(std::bit_width(n)) - 3);
  shift_ = std::max(0, bits - wanted);
  uint32_t ranges = static_cast<uint32_t>(uint64_t{slots[n - 1]} >> shift_) + 1;
  FRUGAL_TRY(pool.get((size_t{ranges} + 1) * sizeof(uint32_t), &starts_));
  uint32_t* starts = starts_.as<uint32_t>();
  size_t next = 0;
  for (size_t i = 0; i < n; ++i)
    for (size_t b = uint64_t{slots[i]} >> shift_; next <= b; ++next)
      starts[next] = static_cast<uint32_t>(i);
  starts[ranges] = static_cast<uint32_t>(n);
  ranges_ = ranges;
  return FRUGAL_OK;
}

bool Part::contains(uint32_t slot) const {
  return std::binary_search(row_slots(), row_slots() + distinct, slot);
}

}  // namespace frugal
