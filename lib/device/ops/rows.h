// Reading rows on a device: docs/cuda.md, section 5.
#ifndef FRUGAL_DEVICE_OPS_ROWS_H_
#define FRUGAL_DEVICE_OPS_ROWS_H_

#include "device/simt.h"

namespace frugal::device {

// Rows of a table in host memory (by slot) or in device memory (lines, staged rows; by index).
struct RowsPtr {
  Ptr<float> values;
  uint64_t stride;  // floats, a multiple of 4
};

// The keys of a part, sorted by row: distinct row i has slot slots[i] and stands at positions[start[i]]
// .. positions[start[i + 1] - 1] of the batch. Behind them are `zeros` positions that read as zeros
// (padding, rows that are missing).
struct PartPtr {
  Ptr<uint32_t> slots;
  Ptr<uint32_t> start;
  Ptr<uint32_t> positions;
  uint32_t distinct, zeros;
};

inline constexpr uint32_t kHbm = 0x80000000u;  // bit of a source
inline constexpr uint32_t kRun = 32;           // positions of an item; the run of fold32

// A run of positions of a row: its row, and which run of the row.
struct Item {
  uint32_t row, run;
};

struct GatherArgs {
  PartPtr part;
  RowsPtr host, hbm;
  Ptr<uint32_t> source;  // of distinct rows; null: all are host rows
  Ptr<Item> items;       // host rows' first; null: item i is row i, each with one run
  uint32_t host_items, hbm_items;
  uint32_t host_blocks;  // blocks of the first group; the others take HBM rows
  uint32_t dim;
  Ptr<float> out;
  uint64_t out_stride;   // bytes, a multiple of 4
};

struct StageArgs {
  PartPtr part;
  RowsPtr host, hbm;
  Ptr<uint32_t> rows;    // distinct rows to copy into HBM
  Ptr<uint32_t> to;      // their places there
  uint32_t count;
  uint32_t dim;
};

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_ROWS_H_
