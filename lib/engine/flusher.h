// Writes the rows of committed updates. Pending rows go first by urgency; a job writes a whole
// update, in chunks that threads share.
#pragma once
#include <memory>

#include "engine/counters.h"
#include "engine/ranks.h"
#include "engine/tables.h"
#include "engine/workers.h"
#include "window/apply.h"
#include "window/window.h"

namespace frugal {

// The working memory of a thread that writes rows.
struct Scratch : HeapObject, ApplyScratch {
  Scratch(size_t ranks, size_t row_bytes) : ApplyScratch(ranks, row_bytes) {
    claim.reserve(kChunkRows);
  }
  Claim claim;
  std::unique_ptr<Scratch> next;
};

// There is at least one, so rows can be written without free memory.
class Scratches {
 public:
  explicit Scratches(size_t ranks) : ranks_(ranks), free_(std::make_unique<Scratch>(ranks, 0)) {}
  void make_room(size_t row_bytes);
  // For one piece of work. Its thread must not wait for a thread that has one.
  class Lease {
   public:
    explicit Lease(Scratches& of) noexcept : of_(of), is_(of.take()) {}
    ~Lease() { of_.give(std::move(is_)); }
    Scratch* operator->() const { return is_.get(); }
    Scratch& operator*() const { return *is_; }

   private:
    Scratches& of_;
    std::unique_ptr<Scratch> is_;
  };

 private:
  std::unique_ptr<Scratch> take() noexcept;
  void give(std::unique_ptr<Scratch> scratch) noexcept {
    Lock lock(mu_);
    scratch->next = std::move(free_);
    free_ = std::move(scratch);
  }
  Mutex mu_;
  const size_t ranks_;
  size_t row_bytes_ GUARDED_BY(mu_) = 0;
  // One for row_bytes_ is always here or leased. take() drops smaller ones.
  std::unique_ptr<Scratch> free_ GUARDED_BY(mu_);
};

class Flusher {
 public:
  Flusher(Tables& tables, const Ranks& ranks, Workers& workers, Meters& meters)
      : tables_(tables),
        ranks_(ranks),
        workers_(workers),
        meters_(meters),
        scratches_(ranks.size()) {}

  // From now on written rows have at most so many bytes. Throws if there is no memory.
  void make_room(size_t row_bytes) { scratches_.make_room(row_bytes); }
  // Claims, writes and finishes some pending rows that are needed until `step`. False: there are
  // none.
  bool write(uint64_t step);
  // A job that writes a whole update, in chunks between `bounds` (StepUpdate::cut).
  JobRef job(const TableRef& table, const UpdateRef& update, Vector<uint64_t>&& bounds);
  // With a storage tier, an update holds its rows until all are written or it is undone. Throws if
  // there is no memory; then it holds nothing.
  static void hold(Table& table, const StepUpdate& update);
  static void release_hold(Table& table, const StepUpdate& update);

 private:
  struct Chunks;
  void apply_claim(Table& table, const Claim& claim, Scratch& scratch);
  void apply_chunk(const Chunks& of, size_t chunk);

  Tables& tables_;
  const Ranks& ranks_;
  Workers& workers_;
  Meters& meters_;
  Scratches scratches_;
};

}  // namespace frugal
