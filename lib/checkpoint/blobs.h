// Blobs: bytes of the ranks that belong to a step, and the file that a checkpoint has of them.
#pragma once
#include <memory>

#include "base/buffer.h"
#include "base/heap.h"
#include "format/manifest.h"

namespace frugal {

struct Blob {
  uint32_t rank = 0;
  size_t size = 0;
  std::shared_ptr<const Buffer> bytes;  // shared by checkpoints of the same step
  // Takes a copy of the bytes.
  Status set(uint32_t of_rank, const void* from, size_t n, BufferPool& pool);
  // The caller writes the bytes, at *to.
  Status open(uint32_t of_rank, size_t n, BufferPool& pool, char** to);
};

// Those of a step.
struct Blobs : HeapObject {
  Vector<Blob> of_ranks;
};
using BlobsRef = std::shared_ptr<Blobs>;

// Writes and syncs the blob file of a checkpoint, and adds what the manifest says of it. Without
// blobs there is no file.
Status write_blobs(Folder& folder, const Blobs& blobs, Manifest* manifest);

// Reads the blobs of ranks below `ranks`; null: there are none.
Status load_blobs(const Folder& folder, const Manifest& manifest, uint32_t ranks, BufferPool& pool,
                  BlobsRef* out);

// Reads and checks a blob of a checkpoint. OVERFLOW with *size set: it does not fit. NOT_FOUND: the
// rank has none.
Status read_blob(const Folder& folder, const Manifest& manifest, uint32_t rank, void* out,
                 size_t capacity, size_t* size);

}  // namespace frugal
