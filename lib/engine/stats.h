// Every counter of frugal_stats, in its order: what Engine::stats fills, and what Engine::metrics
// writes.
//
// Counters has those of COUNTED, and RankCounters those of BY_RANK. Those of GATHERED are put
// together on request. Kinds: kCount only grows; kTime the same, in nanoseconds, with a name that
// ends in _ns. kGauge goes up and down, or is a peak. The text is the HELP line of the metric, so
// it has no quotes, backslashes or line ends.
#pragma once
#include "frugal.h"

#define FRUGAL_STATS(COUNTED, BY_RANK, GATHERED)                                                 \
  COUNTED(steps_committed, kCount, "Steps that all ranks have ended.")                           \
  COUNTED(steps_aborted, kCount, "Steps that were aborted.")                                     \
  COUNTED(keys_declared, kCount, "Keys of declarations.")                                        \
  BY_RANK(keys_looked_up, kCount, "Keys of lookups.")                                            \
  COUNTED(keys_undeclared, kCount, "Keys looked up or pushed without a declared batch.")         \
  BY_RANK(keys_pushed, kCount, "Keys of pushes.")                                                \
  COUNTED(rows_created, kCount, "Rows created by steps.")                                        \
  COUNTED(rows_updated, kCount, "Updates, of a row in a step, written to host rows.")            \
  COUNTED(rows_deferred, kCount, "Of these, queued when the step after theirs could begin.")     \
  COUNTED(gate_waits, kCount, "Calls of step_begin that had to wait.")                           \
  COUNTED(gate_wait_ns, kTime, "Time that calls of step_begin waited.")                          \
  COUNTED(gate_in_flight, kCount, "Gates that met an update dequeued but unwritten.")            \
  COUNTED(lookup_waits, kCount, "Undeclared keys that had to wait.")                             \
  GATHERED(priority_rises, kCount, "Pending updates that became more urgent.")                   \
  GATHERED(priority_falls, kCount, "Pending updates that became less urgent.")                   \
  GATHERED(enqueued, kCount, "Pending rows put into the queue.")                                 \
  GATHERED(dequeued, kCount, "Pending rows taken out of the queue.")                             \
  COUNTED(back_pressure, kCount, "Times that the budget forced writing.")                        \
  COUNTED(ranks_apart, kCount, "Calls of step_begin while another rank was in an earlier step.") \
  BY_RANK(stale_reads, kCount, "Rows read with a pending update.")                               \
  BY_RANK(cache_hits, kCount, "Keys served from a trainer's cache.")                             \
  BY_RANK(cache_misses, kCount, "Keys that a trainer's cache did not have.")                     \
  COUNTED(cache_admitted, kCount, "Rows taken into caches.")                                     \
  COUNTED(cache_evicted, kCount, "Rows put out of caches.")                                      \
  COUNTED(cache_evicted_dirty, kCount, "Of these, while the host row had pending updates.")      \
  GATHERED(pending_bytes, kGauge, "Memory of updates that are not in the host rows yet.")        \
  COUNTED(pending_bytes_peak, kGauge, "The most that it has been.")                              \
  GATHERED(pending_rows, kGauge, "Rows with pending updates.")                                   \
  GATHERED(active_rows, kGauge, "Rows that have a queue entry.")                                 \
  COUNTED(modes_at_once, kCount, "Steps applied at once.")                                       \
  COUNTED(modes_deferred, kCount, "Steps queued.")                                               \
  BY_RANK(lookup_ns, kTime, "Time inside of lookups, summed over trainers.")                     \
  BY_RANK(push_ns, kTime, "Time inside of pushes, summed over trainers.")                        \
  COUNTED(step_begin_ns, kTime, "Time inside of step_begin, summed over trainers.")              \
  COUNTED(step_end_ns, kTime, "Time inside of step_end, summed over trainers.")                  \
  COUNTED(prefetch_ns, kTime, "Time inside of prefetches, summed over trainers.")                \
  COUNTED(entry_ns, kTime, "Time spent on queue entries and queue, summed over threads.")        \
  COUNTED(apply_ns, kTime, "Time spent applying updates, summed over threads.")                  \
  COUNTED(cache_refreshes, kCount, "Refreshes of caches, one for each table.")                   \
  COUNTED(cache_planned, kCount, "Of these, worked out while the step before was computed.")     \
  COUNTED(checkpoints, kCount, "Checkpoints that were written.")                                 \
  COUNTED(checkpoints_failed, kCount, "Checkpoints that failed or were cancelled.")              \
  COUNTED(checkpoint_rows, kCount, "Rows written to parameter files.")                           \
  COUNTED(checkpoint_bytes, kCount, "Bytes of these files, and of blobs.")                       \
  COUNTED(checkpoint_copies, kCount, "Rows copied for a checkpoint before they changed.")        \
  COUNTED(checkpoint_waits, kCount,                                                              \
          "Calls of step_begin that waited for such copies to be written.")

// The struct, made from the list: a counter that is in one of them alone does not compile.
struct FrugalStatsOfTheList {
  size_t struct_size;
#define X(name, kind, help) uint64_t name;
  FRUGAL_STATS(X, X, X)
#undef X
};
static_assert(sizeof(FrugalStatsOfTheList) == sizeof(frugal_stats),
              "a counter is missing in FRUGAL_STATS");
#define X(name, kind, help)                                                           \
  static_assert(offsetof(FrugalStatsOfTheList, name) == offsetof(frugal_stats, name), \
                "FRUGAL_STATS has another order than frugal_stats: " #name);
FRUGAL_STATS(X, X, X)
#undef X
