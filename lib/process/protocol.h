// What goes through a channel (channel.h) between a trainer process and the controller.
//
// Each request is answered by one message with its type and sequence, whose status is that of the
// call. An answer that is no success has a Failure and its text as payload. Numbers of tables,
// batches and parts, counts and shared addresses are checked by the controller: they come from
// another process. Structs lie in the payload as they are: both sides are the same version of the
// library on the same machine.
#pragma once
#include <cstddef>
#include <cstdint>

#include "arith/optimizer.h"

namespace frugal {

enum class Call : uint32_t {
  // Of a trainer. The payload begins with the numbers of parts (uint32_t, args[4] of them) that
  // were looked
  // up or pushed since the last request: their rows exist from now on.
  kPrefetch = 1,  // args: step, ops, number of the batch, 1: the trainer does not wait for the
                  // answer, so that what has
  // undone its step is for another. OpHead[ops], keys, of a dense table their slots (uint32_t):
  // they
  // follow, or lie in staging memory until their shared address is released
  kCancel,     // args: number of the batch
  kStepBegin,  // args: step, time-out in ns, refreshes that were carried out, a table for whose
               // lines there is no
  // memory (or 0). Answer's args: is a trace recorded, parts, number of the refresh, its tables;
  // PartAddress[parts], CachedRowsAddress[tables], each followed by its updates
  kAccess,   // args: ops, parts that the trainer has, ops of its call. OpHead[ops], keys.
             // Answer: PartAddress[], numbered behind those
  kStepEnd,  // args: step, flags, pushes, events. Counts, PushAddress[pushes], TraceEvent[events]
  kAbort,    // args: 1: its device has failed
  kHere,     // nothing: its process lives, and waits for its device. Only of a rank that has one
  kInside,   // whether the trainer is inside a step, or what has undone it
  kMapped,   // it has mapped its staging memory. From now on sums may lie there, and others read
             // them
  // Of a trainer, or (without used parts) of a process.
  kRead,  // args: ops, time-out in ns. ReadHead[ops], then of each keys, offsets, weights
  // Of a process.
  kCount = 32,  // args: table. Answer's args: rows
  kKeys,        // args: table, cursor, capacity. Answer's args: cursor, keys; the keys
  kGet,         // args: table, keys, flags. Keys. Answer: a byte for each: found; the rows that are
  kPut,         // args: table, keys, flags. Keys, rows
  kDelete,      // args: table, keys. Keys. Answer's args: rows deleted
  kSetOptimizer,  // args: table, first step. frugal_optimizer
  kDescribe,      // args: table. Answer: frugal_table_info
  kFlush,         // args: time-out in ns
  kMetrics,       // Answer: the text
  kTraceStart,    // args: events
  kTraceStop,     // args: whether a path follows. The path
  kNextTable,     // args: cursor. Answer's args: cursor; the table's name, or nothing
};

struct Failure {
  int32_t system_code, device_code;
};

struct OpHead {
  uint64_t table;
  uint64_t batch;        // its number, which its trainer has given it; or 0
  uint64_t keys;         // their number
  uint64_t padding_key;
  uint32_t part;
  uint32_t flags;        // FRUGAL_OP_*
  // keys follow, or are at `shm_address`; else those of the batch's part are meant
  uint32_t given;
  uint32_t number;       // of the op in its call, which may ask for some of them only
  uint64_t shm_address;  // of declared keys in staging memory; or kNoShmAddress
};

struct ReadHead {
  OpHead op;
  uint64_t bags;
  int32_t pooling;
  uint32_t has;          // kHas*
};
constexpr uint32_t kHasWeights = 1, kHasFound = 2;

// A part's arrays in the arena: shared addresses (base/region_publisher.h), kNoShmAddress for those
// that are not there.
struct PartAddress {
  uint64_t batch;        // the number of the declaration it is of, or 0
  uint64_t table;
  uint64_t n, distinct, occurrences;
  uint64_t slots, pairs, rows, start, keys;
  uint64_t sources,
      cached_values;     // where the trainer's cache has its rows, if it has rows of the table
  uint64_t cached;       // keys of rows that are in it
  uint64_t stale;        // keys of rows that had updates pending
  uint64_t padding;
  uint32_t index;        // of the part in its batch
  uint32_t flags;        // kPart*
};
constexpr uint32_t kPartPadding = 1;  // has a padding key
constexpr uint32_t kPartWhole = 2;    // a declaration, resolved
constexpr uint32_t kPartUpToDate = 4;  // its rows are up to date
constexpr uint32_t kPartCached = 8;   // the trainer caches rows of the table

// What a step's refresh does to the lines of a table, which are in memory of the trainer's device.
struct CachedRowsAddress {
  uint64_t table;
  uint64_t cache_slots;  // that there are
  // shared addresses of uint32_t[count]: rows that come in, and their lines
  uint64_t admitted, to;
  uint64_t count, updates;  // so many UpdateAddress follow
};

// An update of lines: before rows come in those that are `now`, the others while the step is
// computed.
struct UpdateAddress {
  arith::StepScalars scalars;
  uint64_t cache_slots, start,
      // shared addresses of uint32_t[count], uint32_t[count + 1], CachedRowUpdate::Term[term_count]
      terms;
  uint64_t count, term_count, now;
  uint64_t stride, ranks;        // so many SumsAddress follow
};

// Where a rank's sums are: in staging memory or the arena.
struct SumsAddress {
  uint64_t shm_address, bytes;
};

constexpr uint64_t kMostPath = 4096;      // bytes of the path of a file
constexpr uint32_t kMostEvents = 64;  // of a trainer's calls in a step, for a trace
// Of the first parts of a step: in the up region's counters there is a bit for each that was looked
// up or pushed, before the controller is told. Who wants to know which rows exist looks there.
constexpr size_t kMarkedParts = 8192;

constexpr uint32_t kJoined = UINT32_MAX;  // no part of the step: rows of several pushes

// Sums in the channel's staging memory, one a row.
struct PushAddress {
  uint64_t table;
  uint64_t sums;
  uint64_t rows;         // kJoined: the list of rows, ascending slots
  uint64_t distinct;     // and their number
  uint32_t part;         // whose rows they are, or kJoined
  uint32_t whole;        // exactly the declared keys were pushed
};

}  // namespace frugal
