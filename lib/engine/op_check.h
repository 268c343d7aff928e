// Checks of ops that need no search for their keys.
#pragma once
#include <cstdint>

#include "base/status.h"
#include "frugal.h"

namespace frugal {

// In a call, and so in a request to a controller: far more than any program needs.
constexpr uint64_t kMostOps = 1u << 20;

enum class Use { kLookup, kPush, kRead, kDeclare };

// OK if `p` is memory of the host; `what` names it in the message.
Status host_memory(const void* p, const char* what);
// The same for all pointers of ops of a rank on the cpu device.
Status host_memory(const frugal_op* ops, size_t n);

// Whether the steps that follow `step` have numbers, too.
Status check_step(uint64_t step);

// Bytes from a row to the next in the caller's memory: `stride`, or if that is 0 a packed row's.
inline size_t stride_of(size_t stride, size_t dim) { return stride ? stride : dim * sizeof(float); }

// Whether rows of so many bytes can lie `stride` bytes apart (0: packed).
Status check_stride(size_t stride, size_t row_bytes, size_t rows);

// Checks an op by itself, before anything that it points to is read.
Status check_form(const frugal_op& op, Use use);
// Checks what follows from the op's table and from the number of its keys. `offsets_on_device`:
// kernels will check the offsets.
Status check_op(const frugal_op& op, uint32_t dim, size_t keys, Use use,
                bool offsets_on_device = false);

// Refuses a push of step `step`: the gradients of `op`, for rows of `dim`, have a NaN. Searches for
// the first one, to name it.
Status nan_refused(const frugal_op& op, uint32_t dim, uint64_t step);

// Puts the op before the message of a failure: its number `i`, if the call has several, and its
// table.
Status in_op(Status status, size_t i, size_t n, const char* table);
template <class TableRef>
Status in_op(Status status, size_t i, size_t n, const TableRef& table) {
  return status == FRUGAL_OK ? status : in_op(status, i, n, table ? table->name.c_str() : nullptr);
}
// The numbers of the ops that another process asks for, among all `of` ops of a call. Messages name
// them.
struct OpNumbers {
  Vector<uint32_t> at;
  size_t of = 0;
};

// frugal_op.table is not the handle of an open table.
Status no_open_table(const frugal_op& op);
// A rank on the cpu device is asked for its stream; another thread closes the trainer; the engine
// is closed.
Status no_streams(uint32_t rank);
Status closes_already();
Status engine_closed();

class Session;
// The first thing that every call does with its ops.
Status check_ops(const Session& session, const frugal_op* ops, size_t n, Use use);

}  // namespace frugal
