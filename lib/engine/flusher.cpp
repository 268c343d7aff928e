#include "engine/flusher.h"

#include <algorithm>
#include <optional>

#include "base/assert.h"

namespace frugal {
namespace {

constexpr size_t kUrgentRows = 512;  // of a claim that a thread waits for
constexpr size_t kClaimRows = kChunkRows;

}  // namespace

void Scratches::make_room(size_t row_bytes) {
  auto more = std::make_unique<Scratch>(ranks_, row_bytes);
  Lock lock(mu_);
  if (row_bytes <= row_bytes_) return;
  row_bytes_ = row_bytes;
  more->next = std::move(free_);
  free_ = std::move(more);
}

std::unique_ptr<Scratch> Scratches::take() noexcept {
  for (size_t row_bytes;;) {
    {
      Lock lock(mu_);
      while (free_) {
        std::unique_ptr<Scratch> first = std::move(free_);
        free_ = std::move(first->next);
        if (first->row.size() >= row_bytes_) return first;
      }
      row_bytes = row_bytes_;
    }
    try {
      return std::make_unique<Scratch>(ranks_, row_bytes);
    } catch (const std::bad_alloc&) {
      yield_thread();  // other threads have all of them, for a moment
    }
  }
}

// --- Pending rows --------------------------------------------------------------------------------

// Takes the tables in turn, so it finds pending rows of any table soon. If each has few, one unit
// takes rows of several tables.
bool Flusher::write(uint64_t step) {
  size_t written = 0;
  for (size_t looked = 0; written < kUrgentRows;) {
    const TableRef t = tables_.next_pending(step, &looked);
    if (!t) break;
    const Scratches::Lease scratch(scratches_);
    Claim& claim = scratch->claim;
    TraceSpan span(meters_.trace, SpanKind::kFlush);
    {
      Timed timed(meters_.counters.entry_ns);
      size_t rows = step == UINT64_MAX ? kClaimRows : kUrgentRows;
      if (!t->window.claim(step, rows, &claim)) {
        span.drop();
        continue;
      }
    }
    span.table(t->number).count(claim.ids.size());
    if (!claim.runs.empty()) span.step(claim.runs[0].update->step);
    apply_claim(*t, claim, *scratch);
    {
      Timed timed(meters_.counters.entry_ns);
      t->window.finish(claim);
    }
    for (const Claim::Run& run : claim.runs)
      if (run.finished) release_hold(*t, *run.finished);
    written += claim.ids.size();
    claim.runs.clear();  // releases updates that are wholly written
    workers_.progress();
  }
  return written != 0;
}

void Flusher::hold(Table& table, const StepUpdate& update) {
  size_t held = 0;
  try {
    for (; held < update.ranks.size(); ++held)
      table.rows.hold(update.ranks[held].slots(), update.ranks[held].rows());
  } catch (const std::bad_alloc&) {
    while (held-- != 0)
      table.rows.unhold_backed(update.ranks[held].slots(), update.ranks[held].rows());
    throw;
  }
}

void Flusher::release_hold(Table& table, const StepUpdate& update) {
  for (const RankGradients& h : update.ranks) table.rows.unhold_backed(h.slots(), h.rows());
}

void Flusher::apply_claim(Table& table, const Claim& claim, Scratch& scratch) {
  Timed timed(meters_.counters.apply_ns);
  uint64_t begun = ranks_.begun(), deferred = 0;
  FRUGAL_ASSERT(claim.rows.size() == claim.ids.size());
  FRUGAL_ASSERT(!claim.runs.empty() && claim.runs.back().end == claim.ids.size());
  for (const Claim::Run& run : claim.runs) {
    const StepUpdate& u = *run.update;
    FRUGAL_ASSERT(run.begin == (&run == claim.runs.data() ? 0 : (&run)[-1].end));
    const uint32_t* rows = claim.rows.data() + run.begin;
    size_t n = run.end - run.begin;
    TraceSpan span(meters_.trace, SpanKind::kApply);
    span.step(u.step).table(table.number).count(n);
    apply(ApplyTo(table.rows), u, UpdateEntries{rows, n}, &scratch);
    if (u.step + 1 < begun) deferred += n;
  }
  meters_.counters.rows_updated.fetch_add(claim.ids.size(), std::memory_order_relaxed);
  meters_.counters.rows_deferred.fetch_add(deferred, std::memory_order_relaxed);
}

// --- All of an update ----------------------------------------------------------------------------

struct Flusher::Chunks : HeapObject {
  Flusher* flusher = nullptr;
  TableRef table;
  UpdateRef update;
  Vector<uint64_t> bounds;  // in slots

  static void run(void* context, size_t chunk) {
    const auto* of = static_cast<const Chunks*>(context);
    of->flusher->apply_chunk(*of, chunk);
  }
  static void finished(void* context) {
    const auto* of = static_cast<const Chunks*>(context);
    of->update->release_bytes();
    release_hold(*of->table, *of->update);
  }
};

void Flusher::apply_chunk(const Chunks& of, size_t chunk) {
  Timed timed(meters_.counters.apply_ns);
  TraceSpan span(meters_.trace, SpanKind::kApply);
  const StepUpdate& u = *of.update;
  const ApplyTo to(of.table->rows);
  std::optional<Scratches::Lease> scratch;
  if (!is_direct(to, u)) scratch.emplace(scratches_);
  const size_t rows = apply(to, u, UpdateChunk{chunk, of.bounds[chunk], of.bounds[chunk + 1]},
                            scratch ? &**scratch : nullptr);
  span.step(u.step).table(of.table->number).count(rows);
  meters_.counters.rows_updated.fetch_add(rows, std::memory_order_relaxed);
}

JobRef Flusher::job(const TableRef& table, const UpdateRef& update, Vector<uint64_t>&& bounds) {
  FRUGAL_ASSERT(bounds.size() >= 2 && bounds.front() == 0 && bounds.back() == UINT64_MAX);
  FRUGAL_ASSERT(std::is_sorted(bounds.begin(), bounds.end()));
  auto chunks = std::allocate_shared<Chunks>(HeapAllocator<Chunks>());
  chunks->flusher = this;
  chunks->table = table;
  chunks->update = update;
  chunks->bounds = std::move(bounds);
  JobRef job = std::allocate_shared<Job>(HeapAllocator<Job>());
  job->chunks = chunks->bounds.size() - 1;
  job->run = Chunks::run;
  job->finished_hook = Chunks::finished;
  job->context = chunks.get();
  job->keep = std::move(chunks);
  job->apply = true;
  return job;
}

}  // namespace frugal
