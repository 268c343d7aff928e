#include "checkpoint/blobs.h"

#include <algorithm>
#include <cstring>

#include "format/names.h"

namespace frugal {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;

// Calls of(offset, bytes) for pieces of `size` bytes, in their order.
template <class Of>
Status each_piece(size_t size, Of of) {
  for (size_t at = 0; at < size; at += kPieceBytes)
    FRUGAL_TRY(of(at, std::min(kPieceBytes, size - at)));
  return FRUGAL_OK;
}

Status write_file(Folder& folder, const char* name, const Vector<const Blob*>& blobs, Manifest* m) {
  File file;
  FRUGAL_TRY(folder.create(name, false, &file));
  for (size_t i = 0; i < blobs.size(); ++i) {
    ManifestBlob& told = m->blobs[i];
    const char* const bytes = blobs[i]->bytes->data();
    RunningChecksum sum(blob_seed(m->sequence, told.rank));
    FRUGAL_TRY(each_piece(told.bytes, [&](size_t from, size_t n) -> Status {
      sum.add(bytes + from, n);
      return file.write(told.at + from, bytes + from, n);
    }));
    told.checksum = sum.value();
  }
  return file.sync();
}

}  // namespace

Status Blob::set(uint32_t of_rank, const void* from, size_t n, BufferPool& pool) {
  char* to;
  FRUGAL_TRY(open(of_rank, n, pool, &to));
  if (n) std::memcpy(to, from, n);
  return FRUGAL_OK;
}

Status Blob::open(uint32_t of_rank, size_t n, BufferPool& pool, char** to) {
  auto memory = std::allocate_shared<Buffer>(HeapAllocator<Buffer>());
  if (n) FRUGAL_TRY(pool.get(n, memory.get()));
  rank = of_rank;
  size = n;
  *to = memory->data();
  bytes = std::move(memory);
  return FRUGAL_OK;
}

Status write_blobs(Folder& folder, const Blobs& all, Manifest* m) {
  Vector<const Blob*> blobs;
  for (const Blob& b : all.of_ranks) blobs.push_back(&b);
  std::sort(blobs.begin(), blobs.end(),
            [](const Blob* a, const Blob* b) { return a->rank < b->rank; });
  m->blobs.clear();
  m->blob_bytes = 0;
  for (const Blob* b : blobs) {
    m->blobs.push_back(
        {b->rank, m->blob_bytes, b->size, checksum(nullptr, 0, blob_seed(m->sequence, b->rank))});
    m->blob_bytes += b->size;
  }
  if (m->blob_bytes == 0) return FRUGAL_OK;
  const String name = blob_name(m->sequence);
  // A writer of the folder may have died with this sequence number, before its manifest.
  FRUGAL_TRY(folder.remove(name.c_str()));
  const Status status = write_file(folder, name.c_str(), blobs, m);
  if (status == FRUGAL_OK) return status;
  const KeepError keep;
  folder.remove(name.c_str());
  return status;
}

Status load_blobs(const Folder& folder, const Manifest& m, uint32_t ranks, BufferPool& pool,
                  BlobsRef* out) try {
  BlobsRef blobs;
  for (const ManifestBlob& b : m.blobs) {
    if (b.rank >= ranks) continue;
    if (!blobs) blobs = std::allocate_shared<Blobs>(HeapAllocator<Blobs>());
    Blob blob;
    char* to;
    FRUGAL_TRY(blob.open(b.rank, b.bytes, pool, &to));
    FRUGAL_TRY(read_blob(folder, m, b.rank, to, b.bytes, &blob.size));
    blobs->of_ranks.push_back(std::move(blob));
  }
  *out = std::move(blobs);
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the blobs of checkpoint %llu",
              static_cast<unsigned long long>(m.sequence));
}

Status read_blob(const Folder& folder, const Manifest& m, uint32_t rank, void* out, size_t capacity,
                 size_t* size) {
  const auto at = std::find_if(m.blobs.begin(), m.blobs.end(),
                               [&](const ManifestBlob& b) { return b.rank == rank; });
  if (at == m.blobs.end())
    return fail(FRUGAL_ERR_NOT_FOUND,
                "rank %u has given no blob for checkpoint %llu of '%s': choose another one", rank,
                static_cast<unsigned long long>(m.sequence), folder.path());
  *size = at->bytes;
  if (capacity < at->bytes)
    return fail(FRUGAL_ERR_OVERFLOW,
                "the blob of rank %u has %llu bytes, and capacity is %zu: give that many", rank,
                static_cast<unsigned long long>(at->bytes), capacity);
  RunningChecksum sum(blob_seed(m.sequence, rank));
  const String name = blob_name(m.sequence);
  if (at->bytes > 0) {
    File file;
    FRUGAL_TRY(folder.open_file(name.c_str(), false, &file));
    char* const bytes = static_cast<char*>(out);
    FRUGAL_TRY(each_piece(at->bytes, [&](size_t from, size_t n) -> Status {
      FRUGAL_TRY(file.read(at->at + from, bytes + from, n));
      sum.add(bytes + from, n);
      return FRUGAL_OK;
    }));
  }
  if (sum.value() == at->checksum) return FRUGAL_OK;
  return fail(FRUGAL_ERR_DAMAGED, "%s/%s: the blob of rank %u at offset %llu has a wrong checksum",
              folder.path(), name.c_str(), rank, static_cast<unsigned long long>(at->at));
}

}  // namespace frugal
