#include "checkpoint/table_files.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace frugal {
namespace {

constexpr uint64_t kSlotsAtOnce = uint64_t{1} << 16;        // slots per hold of the locks
constexpr size_t kMostFilesAtOnce = (size_t{1} << 20) - 1;  // numbers of files in a directory

}  // namespace

// --- Directory -----------------------------------------------------------------------------------

Directory::Place Directory::at(uint64_t slot) const {
  uint64_t packed = 0;
  std::memcpy(&packed, packed_.base() + slot * kBytes, kBytes);
  return {static_cast<uint32_t>(packed >> 20), static_cast<uint32_t>(packed & 0xfffff)};
}

void Directory::set(uint64_t slot, Place place) {
  FRUGAL_ASSERT(place.file <= kMostFilesAtOnce && place.record < kMostRecords);
  const uint64_t packed = uint64_t{place.file} << 20 | place.record;
  std::memcpy(packed_.base() + slot * kBytes, &packed, kBytes);
}

uint64_t Directory::flagged(uint64_t first, uint64_t n, const char* flags) const {
  FRUGAL_ASSERT(0 < n && n <= 64);
  // No slab ends between two slots whose slabs are the same, and slabs have more than 64 slots.
  const bool all = committed(first) && committed(first + n - 1);
  uint64_t bits = 0;
  for (uint64_t i = 0; i < n; ++i)
    if (all || committed(first + i)) bits |= uint64_t{flags[at(first + i).file] != 0} << i;
  return bits;
}

// --- Files ---------------------------------------------------------------------------------------

Status TableFiles::open(Rows& rows, RowTracker& tracker, uint64_t number, int32_t optimizer,
                        FolderWriter* to, MemoryBudget* budget) {
  rows_ = &rows;
  tracker_ = &tracker;
  optimizer_ = optimizer;
  number_ = number;
  to_ = to;
  Lock lock(mu_);
  files_.resize(1);
  cleaning_.resize(1);
  return directory_.reserve(rows.capacity(), budget);
}

RowFormat TableFiles::format() const {
  // Records have rows as they are exported.
  const RowFormat f = RowFormat::of(rows_->layout().dim, ElementType::kFloat32, optimizer_);
  FRUGAL_ASSERT(f.row_bytes() == rows_->layout().exported_bytes(true));
  return f;
}

Status TableFiles::new_file(uint32_t* file) {
  for (size_t i = 1; i < files_.size(); ++i)
    if (!files_[i].listed) {
      *file = static_cast<uint32_t>(i);
      return FRUGAL_OK;
    }
  if (files_.size() > kMostFilesAtOnce)
    return fail(FRUGAL_ERR_UNSUPPORTED, "table %llu has %zu parameter files",
                static_cast<unsigned long long>(number_), files_.size());
  make_room(cleaning_, 1);
  files_.emplace_back();
  cleaning_.push_back(0);
  *file = static_cast<uint32_t>(files_.size() - 1);
  return FRUGAL_OK;
}

Status TableFiles::add_file(const ParameterFileInfo& info, uint32_t* file) {
  Lock lock(mu_);
  FRUGAL_TRY(new_file(file));
  FileState& f = files_[*file];
  f = {};
  f.info = info;
  f.old = info.records;  // until set()
  f.listed = f.needed = true;
  return FRUGAL_OK;
}

void TableFiles::now_old(uint32_t file) {
  if (file == Directory::kNone) return;
  FRUGAL_ASSERT(files_[file].old < files_[file].info.records);
  ++files_[file].old;
}

void TableFiles::set(const uint32_t* slots, size_t n, Directory::Place first) {
  Lock lock(mu_);
  for (size_t i = 0; i < n; ++i) {
    now_old(directory_.at(slots[i]).file);
    directory_.set(slots[i], {first.file, first.record + static_cast<uint32_t>(i)});
    --files_[first.file].old;
  }
}

// --- Saving --------------------------------------------------------------------------------------

void TableFiles::begin(uint64_t sequence) noexcept {
  Lock lock(mu_);
  FRUGAL_ASSERT(writing_.empty());
  sequence_ = sequence;
  error_ = {};
  // Records of rows that were deleted before the snapshot.
  for (Deletion& d : deleted_) {
    now_old(d.file);
    d.file = Directory::kNone;
  }
  deletions_.splice(deletions_.end(), deleted_);
}

void TableFiles::failed() noexcept {
  if (error_.status == FRUGAL_OK) error_ = recorded_error();
}

Status TableFiles::open_writer(std::unique_ptr<Writing>* out) {
  auto made = std::make_unique<Writing>();
  FRUGAL_TRY(made->writer.open(to_->folder.get(), to_->next_file.fetch_add(1), number_, sequence_,
                               format(), to_->direct, to_->queue, to_->buffers));
  *out = std::move(made);
  return FRUGAL_OK;
}

// Creates the next file while the present one is not full yet: a writer of rows that fills it does
// not wait for that. If it cannot be created, that writer tries again.
void TableFiles::prepare() noexcept try {
  const KeepError keep;
  {
    Lock lock(mu_);
    if (next_ || writing_.empty() || writing_.back()->writer.records() < kMostRecords / 2) return;
  }
  std::unique_ptr<Writing> made;
  if (open_writer(&made) != FRUGAL_OK) return;
  Lock lock(mu_);
  next_ = std::move(made);
} catch (const std::bad_alloc&) {
}

Status TableFiles::next_writer() try {
  uint32_t file;
  FRUGAL_TRY(new_file(&file));
  writing_.reserve(writing_.size() + 1);
  std::unique_ptr<Writing> made = std::move(next_);
  if (!made) FRUGAL_TRY(open_writer(&made));
  made->file = file;
  files_[file] = {};
  files_[file].info.number = made->writer.number();
  files_[file].listed = true;
  writing_.push_back(std::move(made));
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for a parameter file");
}

void TableFiles::save(const uint32_t* slots, size_t n) noexcept {
  FRUGAL_ASSERT(n <= RowTracker::kMostRows);
  const KeepError keep;
  struct {
    ParameterFileWriter::Record record;
    Writing* of;
  } places[RowTracker::kMostRows];
  size_t placed = 0;
  // All loads are under way before the first is awaited, and none is awaited with the lock held.
  const device::RowsView rows = rows_->ref();
  for (size_t i = 0; i < n; ++i) {
    directory_.prefetch(slots[i]);
    prefetch_row(rows, slots[i], true);
  }
  {
    Lock lock(mu_);
    for (; placed < n && error_.status == FRUGAL_OK; ++placed) {
      const uint32_t slot = slots[placed];
      auto& place = places[placed];
      if ((writing_.empty() || writing_.back()->writer.is_full()) && next_writer() != FRUGAL_OK) {
        failed();
        break;
      }
      place.of = writing_.back().get();
      if (place.of->writer.add(rows_->key_of(slot), sequence_, &place.record) != FRUGAL_OK) {
        failed();
        break;
      }
      place.of->unsealed.fetch_add(1, std::memory_order_relaxed);
      now_old(directory_.at(slot).file);
      directory_.set(slot, {place.of->file, place.record.index});
      ++files_[place.of->file].info.records;
    }
  }
  const RowLayout& layout = rows_->layout();
  for (size_t i = 0; i < placed; ++i) {
    // A record's row has no padding; each starts at a multiple of 8 bytes.
    layout.export_row(rows_->values(slots[i]), rows_->state(slots[i]),
                      reinterpret_cast<float*>(places[i].record.bytes));
    places[i].of->writer.seal(places[i].record);
    places[i].of->unsealed.fetch_sub(1, std::memory_order_release);
  }
}

Status TableFiles::expect_deletions(size_t n) {
  Lock lock(mu_);
  while (spare_.size() < n) spare_.push_back({});
  return FRUGAL_OK;
}

void TableFiles::deleted(uint32_t slot) noexcept {
  Lock lock(mu_);
  const uint32_t file = directory_.at(slot).file;
  // No file has a record of the key, unless an earlier deletion is recorded that concerns it.
  if (file == Directory::kNone && !lost_places_) return;
  FRUGAL_ASSERT(!spare_.empty());
  spare_.front() = {rows_->key_of(slot), file};
  deleted_.splice(deleted_.end(), spare_, spare_.begin());
  directory_.set(slot, {});
}

// No record is a row's newest any more: the next checkpoint has these rows, and no older file.
void TableFiles::new_state() noexcept {
  Lock lock(mu_);
  FRUGAL_ASSERT(writing_.empty());
  for (uint64_t s = 0; s < rows_->capacity(); ++s) {
    if (!directory_.committed(s) || directory_.at(s).file == Directory::kNone) continue;
    now_old(directory_.at(s).file);
    directory_.set(s, {});
    tracker_->mark_changed(s);
  }
}

Status TableFiles::collect() {
  Lock lock(mu_);
  for (const auto& w : writing_)
    if (!w->finished && error_.status == FRUGAL_OK && w->writer.collect() != FRUGAL_OK) failed();
  return error_.status ? fail_as(error_) : FRUGAL_OK;
}

Status TableFiles::finish_one(Writing& w) {
  ParameterFileInfo info;
  FRUGAL_TRY(w.writer.finish(&info));
  w.finished = true;
  Lock lock(mu_);
  FRUGAL_ASSERT(files_[w.file].info.records == info.records);
  files_[w.file].info = info;
  return FRUGAL_OK;
}

Status TableFiles::finish_full() {
  prepare();
  for (size_t i = 0;; ++i) {
    Writing* w;
    {
      Lock lock(mu_);
      if (i + 1 >= writing_.size()) return FRUGAL_OK;  // the last one takes records
      w = writing_[i].get();
    }
    if (!w->finished && w->unsealed.load(std::memory_order_acquire) == 0)
      FRUGAL_TRY(finish_one(*w));
  }
}

Status TableFiles::add_deletions() {
  Lock lock(mu_);
  for (const Deletion& d : deletions_) {
    if (writing_.empty() || writing_.back()->writer.is_full()) FRUGAL_TRY(next_writer());
    FRUGAL_TRY(writing_.back()->writer.add_deletion(d.key, sequence_));
  }
  return FRUGAL_OK;
}

Status TableFiles::finish(ManifestTable* out) {
  FRUGAL_TRY(collect());
  FRUGAL_TRY(add_deletions());
  size_t n;
  std::unique_ptr<Writing> unused;  // is removed without the lock
  {
    Lock lock(mu_);
    unused = std::move(next_);
    n = writing_.size();
  }
  for (size_t i = 0; i < n; ++i) {
    Writing* w;
    {
      Lock lock(mu_);  // no thread adds to the list, but the analysis cannot know that
      w = writing_[i].get();
    }
    if (!w->finished) FRUGAL_TRY(finish_one(*w));
    FRUGAL_TRY(w->writer.sync());
  }
  Lock lock(mu_);
  // In the order of their numbers. A file without live records is needed only for its deletions,
  // and these only while an earlier file has an old record, which they could concern.
  Vector<uint32_t> order;
  for (uint32_t i = 1; i < files_.size(); ++i)
    if (files_[i].listed) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    mu_.assert_held();
    return files_[a].info.number < files_[b].info.number;
  });
  out->number = number_;
  out->format = format();
  out->live_rows = 0;
  out->files.clear();
  bool old = false;
  for (const uint32_t i : order) {
    FileState& f = files_[i];
    const uint64_t live = f.info.records - f.old;
    f.needed = live != 0 || (f.info.entries > f.info.records && old);
    if (!f.needed) continue;
    out->files.push_back({f.info, live});
    out->live_rows += live;
    old |= f.old != 0;
  }
  return FRUGAL_OK;
}

void TableFiles::end(bool kept) noexcept {
  Vector<std::unique_ptr<Writing>> writing;
  std::unique_ptr<Writing> unused;
  {
    Lock lock(mu_);
    writing.swap(writing_);
    unused = std::move(next_);
    if (!kept) deleted_.splice(deleted_.begin(), deletions_);
    deletions_.clear();
  }
  if (kept) {
    Lock lock(mu_);
    lost_places_ = false;  // these rows have been saved, or their deletions
    for (FileState& f : files_) f.listed = f.listed && f.needed;
    return;
  }
  // Rows whose newest record was to be in these files have none now. They are changed, so the next
  // checkpoint has them.
  for (uint64_t from = 0; from < rows_->capacity(); from += kSlotsAtOnce)
    rows_->locked([&] {
      Lock lock(mu_);
      for (uint64_t s = from; s < std::min(rows_->capacity(), from + kSlotsAtOnce); ++s)
        if (directory_.committed(s))
          for (const auto& w : writing)
            if (directory_.at(s).file == w->file) {
              directory_.set(s, {});
              lost_places_ = true;
            }
    });
  for (const auto& w : writing) w->writer.abandon();
  Lock lock(mu_);
  for (const auto& w : writing) {
    files_[w->file].listed = false;
    for (Deletion& d : deleted_)
      if (d.file == w->file) d.file = Directory::kNone;
  }
}

void TableFiles::clean() noexcept {
  bool any = false;
  {
    Lock lock(mu_);
    // Files may be there for their deletions alone, since others have old records. If that is most
    // of the table's files, there are to be no old records.
    uint64_t live = 0, entries = 0;
    for (const FileState& f : files_) {
      if (!f.listed) continue;
      live += f.info.records - f.old;
      entries += f.info.entries;
    }
    const bool wasteful = entries > 2 * live;
    for (size_t i = 1; i < files_.size(); ++i) {
      FileState& f = files_[i];
      const bool some = f.old != 0 && f.old != f.info.records;
      const bool clean =
          f.listed && !f.cleaned && some && (wasteful || 2 * f.old >= f.info.records);
      cleaning_[i] = clean;
      f.cleaned |= clean;
      any |= clean;
    }
  }
  if (!any) return;
  const uint64_t end = rows_->capacity();
  for (uint64_t from = 0; from < end; from += kSlotsAtOnce)
    rows_->locked([&] {
      Lock lock(mu_);
      for (uint64_t s = from; s < std::min(end, from + kSlotsAtOnce); s += 64) {
        const uint64_t rows =
            directory_.flagged(s, std::min(end - s, uint64_t{64}), cleaning_.data());
        if (rows) tracker_->mark_changed(s, rows);
      }
    });
}

}  // namespace frugal
