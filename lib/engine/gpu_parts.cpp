// Uploads to a trainer's GPU ahead of their use: arrays of parts, where their rows are cached, and
// lists of cache refreshes.
#include <algorithm>
#include <cstring>

#include "engine/gpu.h"

namespace frugal {

using device::Ptr;
using device::Result;
using device::Source;

// --- Parts ---------------------------------------------------------------------------------------

Status Gpu::room(size_t bytes, OnDevice* out) {
  out->gpu = shared_from_this();
  FRUGAL_TRY(memory_->get(bytes, &out->memory));
  return pinned_.get(bytes, &out->staging);
}

Status Gpu::send(size_t bytes, OnDevice* out) {
  if (bytes == 0) return FRUGAL_OK;
  FRUGAL_TRY(create_event(&out->sent));
  Result r = runtime_->copy(out->memory.as<char>(), device::Runtime::visible(out->staging.data()),
                            bytes, upload_);
  if (r.ok()) r = runtime_->record(out->sent, upload_);
  if (r.ok()) return FRUGAL_OK;
  drain(upload_);
  give_back(out->sent);
  out->sent = {};
  return noted(r, "lists to the device");
}

namespace {

// Arrays one after the other in one block of memory, each aligned to 16 bytes.
class Pieces {
 public:
  size_t add(size_t bytes) {
    const size_t from = bytes_;
    bytes_ += (bytes + 15) / 16 * 16;
    return from;
  }
  template <class T>
  size_t of(size_t n) {
    return add(n * sizeof(T));
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

template <class T>
T* here(const OnDevice& d, size_t at) {
  return reinterpret_cast<T*>(d.staging.data() + at);
}
template <class T>
Ptr<T> there(const OnDevice& d, size_t at) {
  return {d.memory.as<char>().address + at};
}

}  // namespace

// Long, because it lays out all arrays of a part in one block and sends them at once.
Status Gpu::upload(Part& part, PartOnDevice** out) {
  // A rank that has left and joined again may find its declarations on another device. Nothing of
  // the old one is in flight any more.
  auto known = [&] {
    *out = static_cast<PartOnDevice*>(part.on_device.get());
    return *out && (*out)->gpu.get() == this;
  };
  {
    Lock lock(upload_mu_);
    if (known()) return FRUGAL_OK;
  }
  // Without the lock: calls of a step find existing parts while those of later steps are made.
  if (part.distinct > Source::kMost)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "%zu distinct rows in one op: on a GPU at most 2^30 - 2; make several of it",
                part.distinct);
  auto made = std::allocate_shared<PartOnDevice>(HeapAllocator<PartOnDevice>());
  PartOnDevice& d = *made;
  const size_t n = part.distinct;
  const uint32_t* start = part.row_start();
  d.runs = frequent_rows(part, &d.frequent);
  if (!d.frequent.empty()) d.item_count = static_cast<uint32_t>(n - d.frequent.size() + d.runs);
  Pieces pieces;
  const size_t slots_at = pieces.of<uint32_t>(n), start_at = pieces.of<uint32_t>(n + 1),
               positions_at = pieces.of<uint32_t>(part.n),
               items_at = pieces.of<device::Item>(d.item_count),
               source_at = pieces.of<Source>(d.item_count ? n : 0),
               staged_at = pieces.of<uint32_t>(d.frequent.size()),
               frequent_at = pieces.of<device::FrequentRow>(d.frequent.size());
  if (const Status s = room(pieces.bytes(), &d)) {
    Lock lock(upload_mu_);
    return known() ? FRUGAL_OK : s;  // a thread that was faster has the memory
  }
  std::memcpy(here<char>(d, slots_at), part.row_slots(), n * sizeof(uint32_t));
  std::memcpy(here<char>(d, start_at), start, (n + 1) * sizeof(uint32_t));
  auto* positions = here<uint32_t>(d, positions_at);
  const uint64_t* pairs = part.pairs.as<uint64_t>();
  for (size_t i = 0; i < part.occurrences; ++i) positions[i] = static_cast<uint32_t>(pairs[i]);
  const uint32_t* slots = part.slots.as<uint32_t>();
  size_t zeros = part.occurrences;
  if (zeros != part.n)
    for (size_t i = 0; i < part.n; ++i)
      if (slots[i] == kNoSlot) positions[zeros++] = static_cast<uint32_t>(i);
  d.part.slots = there<uint32_t>(d, slots_at);
  d.part.start = there<uint32_t>(d, start_at);
  d.part.positions = there<uint32_t>(d, positions_at);
  d.part.distinct = static_cast<uint32_t>(n);
  d.part.zeros = static_cast<uint32_t>(part.n - part.occurrences);
  if (d.item_count) {
    // Rows with one run, which kernels read in host memory; then the runs of rows to stage.
    auto* item = here<device::Item>(d, items_at);
    for (uint32_t i = 0; i < n; ++i)
      if (start[i + 1] - start[i] <= device::kRun) *item++ = {i, 0};
    auto* source = here<Source>(d, source_at);
    auto* staged = here<uint32_t>(d, staged_at);
    std::fill_n(source, n, Source{});
    std::memcpy(here<char>(d, frequent_at), d.frequent.data(),
                d.frequent.size() * sizeof(device::FrequentRow));
    uint32_t k = 0;
    for (const device::FrequentRow& f : d.frequent) {
      const uint32_t runs = (start[f.row + 1] - start[f.row] + device::kRun - 1) / device::kRun;
      for (uint32_t r = 0; r < runs; ++r) *item++ = {f.row, r};
      source[f.row] = Source::staged(k);
      staged[k++] = f.row;
    }
    d.items = there<device::Item>(d, items_at);
    d.source = there<Source>(d, source_at);
    d.staged = there<uint32_t>(d, staged_at);
    d.frequent_list = there<device::FrequentRow>(d, frequent_at);
  }
  Lock lock(upload_mu_);
  if (known()) return FRUGAL_OK;  // another thread was faster
  FRUGAL_TRY(send(pieces.bytes(), &d));
  part.on_device = std::move(made);
  *out = &d;
  return FRUGAL_OK;
}

// --- Caches --------------------------------------------------------------------------------------

Status Gpu::upload_sources(Part& part, PartOnDevice** out) {
  PartOnDevice* d;
  FRUGAL_TRY(upload(part, &d));
  if (out) *out = d;
  return cached_sources(part, *d);
}

// One thread at a time uses a part's sources: the planning one, or the rank's calls.
Status Gpu::cached_sources(Part& part, PartOnDevice& d) {
  if (d.cached) return FRUGAL_OK;
  auto made = std::allocate_shared<SourcesOnDevice>(HeapAllocator<SourcesOnDevice>());
  SourcesOnDevice& s = *made;
  const size_t n = part.distinct, items = d.item_count ? d.item_count : n;
  const uint32_t* start = part.row_start();
  const Source* known = part.sources.as<Source>();
  Pieces pieces;
  const size_t items_at = pieces.of<device::Item>(items), source_at = pieces.of<Source>(n),
               host_at = pieces.of<uint32_t>(n);
  FRUGAL_TRY(room(pieces.bytes(), &s));
  auto* item = here<device::Item>(s, items_at);
  auto* source = here<Source>(s, source_at);
  auto* host = here<uint32_t>(s, host_at);
  Vector<uint32_t> frequent;  // not cached
  size_t last = items;        // items of rows in device memory, from the end
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t runs = (start[i + 1] - start[i] + device::kRun - 1) / device::kRun;
    source[i] = known[i];
    if (!source[i].is_own() && runs > 1) {
      source[i] = Source::staged(static_cast<uint32_t>(frequent.size()));
      frequent.push_back(i);
    }
    if (!source[i].is_own()) {
      host[s.host_items] = i;
      item[s.host_items++] = {i, 0};
      continue;
    }
    for (uint32_t r = 0; r < runs; ++r) item[--last] = {i, r};
  }
  // Every row has its runs, so the two ends meet.
  std::copy(frequent.begin(), frequent.end(), host + s.host_items);
  s.staged = static_cast<uint32_t>(frequent.size());
  s.hbm_items = static_cast<uint32_t>(items - last);
  s.source = there<Source>(s, source_at);
  s.items = there<device::Item>(s, items_at);
  s.host_rows = there<uint32_t>(s, host_at);
  {
    Lock lock(upload_mu_);
    FRUGAL_TRY(send(pieces.bytes(), &s));
  }
  d.cached = std::move(made);
  return FRUGAL_OK;
}

void Gpu::forget_sources(Part& part) {
  std::shared_ptr<SourcesOnDevice> gone;
  Lock lock(upload_mu_);
  auto* d = static_cast<PartOnDevice*>(part.on_device.get());
  if (d) gone = std::move(d->cached);
}

Status DeviceCachedRows::send_lists(const CachedRowUpdate& u,
                                    std::shared_ptr<CachedUpdateOnDevice>* out) {
  static_assert(sizeof(CachedRowUpdate::Term) == sizeof(device::Term));
  auto made = std::allocate_shared<CachedUpdateOnDevice>(HeapAllocator<CachedUpdateOnDevice>());
  CachedUpdateOnDevice& l = *made;
  l.count = u.cache_slots.size();
  if (l.count) {
    Pieces pieces;
    const size_t cache_slots_at = pieces.of<uint32_t>(l.count),
                 start_at = pieces.of<uint32_t>(l.count + 1),
                 terms_at = pieces.of<device::Term>(u.terms.size());
    FRUGAL_TRY(gpu_.room(pieces.bytes(), &l));
    std::memcpy(here<char>(l, cache_slots_at), u.cache_slots.data(), l.count * sizeof(uint32_t));
    std::memcpy(here<char>(l, start_at), u.start.data(), (l.count + 1) * sizeof(uint32_t));
    std::memcpy(here<char>(l, terms_at), u.terms.data(), u.terms.size() * sizeof(device::Term));
    l.cache_slots = there<uint32_t>(l, cache_slots_at);
    l.start = there<uint32_t>(l, start_at);
    l.terms = there<device::Term>(l, terms_at);
    Lock lock(gpu_.upload_mu_);
    FRUGAL_TRY(gpu_.send(pieces.bytes(), &l));
  }
  *out = std::move(made);
  return FRUGAL_OK;
}

Status DeviceCachedRows::send_plan(const CachePlan& plan) {
  if (plan_) return FRUGAL_OK;
  auto made = std::allocate_shared<PlanOnDevice>(HeapAllocator<PlanOnDevice>());
  PlanOnDevice& p = *made;
  p.count = plan.admitted.size();
  FRUGAL_TRY(send_lists(plan.update, &p.update));
  if (p.count) {
    Pieces pieces;
    const size_t slots_at = pieces.of<uint32_t>(p.count), to_at = pieces.of<uint32_t>(p.count);
    FRUGAL_TRY(gpu_.room(pieces.bytes(), &p));
    std::memcpy(here<char>(p, slots_at), plan.admitted.data(), p.count * sizeof(uint32_t));
    std::memcpy(here<char>(p, to_at), plan.to.data(), p.count * sizeof(uint32_t));
    p.slots = there<uint32_t>(p, slots_at);
    p.to = there<uint32_t>(p, to_at);
    Lock lock(gpu_.upload_mu_);
    FRUGAL_TRY(gpu_.send(pieces.bytes(), &p));
  }
  plan_ = std::move(made);
  return FRUGAL_OK;
}

}  // namespace frugal
