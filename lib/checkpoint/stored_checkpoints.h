// Checkpoints of a folder, as a reader sees them: no engine is needed, and another process may
// write the folder.
#pragma once
#include <memory>

#include "format/manifest.h"

namespace frugal {

frugal_checkpoint_info info_of(const Manifest& manifest);

// Opens a checkpoint, and keeps it from being deleted until `keep` is closed. `number` 0: the
// newest one, or the newest of that name if `name` is not null. NOT_FOUND: there is none.
Status open_checkpoint(const Folder& folder, uint64_t number, const char* name, Manifest* out,
                       File* keep);

// The first checkpoint above *cursor, which moves to its number. info->number 0: there is none.
Status next_checkpoint(const char* folder, uint64_t* cursor, frugal_checkpoint_info* info);

// As read_blob() (checkpoint/blobs.h). `number` 0: the newest checkpoint.
Status read_stored_blob(const char* folder, uint64_t number, uint32_t rank, void* out,
                        size_t capacity, size_t* size);

// Copies a checkpoint into a folder that has none. EXISTS: it has one. After an error there is no
// copy.
Status copy_checkpoint(const char* folder, uint64_t number, const char* to);

}  // namespace frugal
