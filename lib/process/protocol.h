// Messages in a channel (channel.h) between a trainer process and the controller.
//
// Each request has one reply, with its type and sequence and the status of the call. The payload of
// a reply that reports a failure is a Failure and its text. The controller checks numbers of
// tables, batches and parts, counts and shared addresses: they come from another process. Structs
// are in the payload as they are in memory: both sides are the same version of the library on the
// same machine.
#pragma once
#include <cstddef>
#include <cstdint>

#include "arith/optimizer.h"

namespace frugal {

enum class Call : uint32_t {
  // --- Of a trainer. The payload begins with the numbers of parts (uint32_t, args[4] of them) that
  // were looked up or pushed since the last request: their rows exist from now on.

  // args: step, ops, number of the batch, 1 if the trainer does not wait for the reply (then
  // another request reports what has undone its step). OpHead[ops], then the keys; of a dense table
  // their slots (uint32_t). The keys follow, or are in staging memory until their address is
  // released.
  kPrefetch = 1,
  kCancel,  // args: number of the batch
  // args: step, time-out in ns, number of the last refresh that was carried out, a table for whose
  // cached rows there is no memory (or 0). Reply's args: is a trace recorded, parts, number of the
  // refresh, its tables; PartAddress[parts], CachedRowsAddress[tables], each followed by its
  // updates.
  kStepBegin,
  // args: ops, parts that the trainer has, ops of its call. OpHead[ops], keys. Reply:
  // PartAddress[]; their numbers follow those of the parts that the trainer has.
  kAccess,
  // args: step, flags, pushes, events. RemoteCounts, PushAddress[pushes], TraceEvent[events].
  kStepEnd,
  kAbort,   // args: 1: its device has failed
  kHere,    // its process lives, and waits for its device. Only of a rank that has one
  kInside,  // whether the trainer is inside a step, or what has undone it
  // It has mapped its staging memory. From now on sums may be there, and other processes read them.
  kMapped,

  // --- Of a trainer, or (without used parts) of a process.
  kRead,  // args: ops, time-out in ns. ReadHead[ops], then of each op keys, offsets, weights

  // --- Of a process.
  kCount = 32,    // args: table. Reply's args: rows
  kKeys,          // args: table, cursor, capacity. Reply's args: cursor, keys; the keys
  kGet,           // args: table, keys, flags. Keys. Reply: a byte for each: found; rows that exist
  kPut,           // args: table, keys, flags. Keys, rows
  kDelete,        // args: table, keys. Keys. Reply's args: rows deleted
  kSetOptimizer,  // args: table, first step. frugal_optimizer
  kDescribe,      // args: table. Reply: frugal_table_info
  kFlush,         // args: time-out in ns
  kMetrics,       // Reply: the text
  kTraceStart,    // args: events
  kTraceStop,     // args: whether a path follows. The path
  kNextTable,     // args: cursor. Reply's args: cursor; the table's name, or nothing
};

struct Failure {
  int32_t system_code, device_code;
};

struct OpHead {
  uint64_t table;
  uint64_t batch;  // its number, which its trainer has given it; or 0
  uint64_t keys;   // their number
  uint64_t padding_key;
  uint32_t part;
  uint32_t flags;  // FRUGAL_OP_*
  // Whether keys follow, or are at `shm_address`. If not, the op means those of the batch's part.
  uint32_t given;
  uint32_t number;       // of the op in its call; a request may have only some ops of a call
  uint64_t shm_address;  // of declared keys in staging memory; or kNoShmAddress
};

struct ReadHead {
  OpHead op;
  uint64_t bags;
  int32_t pooling;
  uint32_t has;  // kHas*
};
constexpr uint32_t kHasWeights = 1, kHasFound = 2;

// The arrays of a part in the arena, as shared addresses (base/region_publisher.h). An array that
// does not exist has kNoShmAddress.
struct PartAddress {
  uint64_t batch;  // number of its declaration, or 0
  uint64_t table;
  uint64_t n, distinct, occurrences;
  uint64_t slots, pairs, rows, start, keys;
  // Where the trainer's cache has its rows, if it caches rows of the table.
  uint64_t sources, cached_values;
  uint64_t cached;  // keys of rows that are in the cache
  uint64_t stale;   // keys of rows that had updates pending
  uint64_t padding;
  uint32_t index;  // of the part in its batch
  uint32_t flags;  // kPart*
};
constexpr uint32_t kPartPadding = 1;   // has a padding key
constexpr uint32_t kPartWhole = 2;     // a declaration, resolved
constexpr uint32_t kPartUpToDate = 4;  // its rows are up to date
constexpr uint32_t kPartCached = 8;    // the trainer caches rows of the table

// What a step's refresh does to cached rows of a table, in memory of the trainer's device.
struct CachedRowsAddress {
  uint64_t table;
  uint64_t cache_slots;  // how many cache slots there are
  // Shared addresses of uint32_t[count]: slots of admitted rows, and their cache slots.
  uint64_t admitted, to;
  uint64_t count, updates;  // so many UpdateAddress follow
};

// An update of cached rows. The first `now` of them get it before rows are admitted, the others
// while the step is computed.
struct UpdateAddress {
  arith::StepScalars scalars;
  // Shared addresses of uint32_t[count], uint32_t[count + 1], CachedRowUpdate::Term[term_count].
  uint64_t cache_slots, start, terms;
  uint64_t count, term_count, now;
  uint64_t stride, ranks;  // so many SumsAddress follow
};

// Where a rank's sums are: in staging memory or the arena.
struct SumsAddress {
  uint64_t shm_address, bytes;
};

constexpr uint64_t kMostPath = 4096;  // bytes of the path of a file
constexpr uint32_t kMostEvents = 64;  // of a trainer's calls in a step, for a trace
// The up region's counters have a bit for each of the first parts of a step. The bit is set when
// the part is looked up or pushed, before the controller is notified. A thread that must know which
// rows exist reads these bits.
constexpr size_t kMarkedParts = 8192;

constexpr uint32_t kJoined = UINT32_MAX;  // no part of the step: rows of several pushes

// Sums in the channel's staging memory, one for each row.
struct PushAddress {
  uint64_t table;
  uint64_t sums;
  uint64_t rows;      // kJoined: the list of rows, ascending slots
  uint64_t distinct;  // and their number
  uint32_t part;      // whose rows they are, or kJoined
  uint32_t whole;     // exactly the declared keys were pushed
};

}  // namespace frugal
