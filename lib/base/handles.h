// Handles: typed opaque pointers of the C interface that are numbers, not addresses.
//
// A handle is (index + 1) in the low 20 bits and a generation above. Closing a handle ends its
// generation, so a closed handle differs from every later one. No handle is ever dereferenced.
// Threads: any. A child made by fork() has another process_generation().
#pragma once
#include <cstdint>
#include <memory>

namespace frugal {

enum class HandleKind : uint32_t { kFree, kEngine, kTable, kTrainer, kBatch };

uint64_t handle_add(HandleKind kind,
                    std::shared_ptr<void> object);  // 0: OUT_OF_MEMORY, there are too many
std::shared_ptr<void> handle_get(HandleKind kind, uint64_t handle);  // null if it is not one
std::shared_ptr<void> handle_remove(HandleKind kind, uint64_t handle);

// Differs between a process and its fork() children.
uint32_t process_generation();

}  // namespace frugal
