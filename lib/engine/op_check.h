// Whether ops are well formed: what can be told without looking for their keys.
#pragma once
#include <cstdint>

#include "base/status.h"
#include "frugal.h"

namespace frugal {

// In a call, and so in a request to a controller: far more than any program needs.
constexpr uint64_t kMostOps = 1u << 20;

enum class Use { kLookup, kPush, kRead, kDeclare };

// Is it memory of the host? `what` names it where it is not.
Status host_memory(const void* p, const char* what);
// The same for all that ops of a rank on the cpu device point to.
Status host_memory(const frugal_op* ops, size_t n);

// Whether steps that follow `step` have numbers, too.
Status check_step(uint64_t step);

// Bytes from a row to the next in the caller's memory, which says them, or 0: packed.
inline size_t stride_of(size_t stride, size_t dim) { return stride ? stride : dim * sizeof(float); }

// Whether rows of so many bytes can lie `stride` bytes apart (0: packed).
Status check_stride(size_t stride, size_t row_bytes, size_t rows);

// An op by itself, before anything that it points to is looked at.
Status check_form(const frugal_op& op, Use use);
// What follows from its table, and from the number of its keys. `offsets_on_device`: on a device,
// where kernels will look at them.
Status check_op(const frugal_op& op, uint32_t dim, size_t keys, Use use,
                bool offsets_on_device = false);

// A push of step `step` is refused: gradients of the op have a NaN, of rows of `dim`. Looks for the
// first one, to name it.
Status nan_refused(const frugal_op& op, uint32_t dim, uint64_t step);

// What op `i` of a call's `n` has met: the message begins with the op, if there are several, and
// its table.
Status in_op(Status status, size_t i, size_t n, const char* table);
template <class TableRef>
Status in_op(Status status, size_t i, size_t n, const TableRef& table) {
  return status == FRUGAL_OK ? status : in_op(status, i, n, table ? table->name.c_str() : nullptr);
}
// Which of a call's ops another process asks for: messages say so.
struct OpNumbers {
  Vector<uint32_t> at;
  size_t of = 0;
};

// frugal_op.table is not the handle of one.
Status no_open_table(const frugal_op& op);
// A rank on the cpu device is asked for its stream; another thread closes the trainer; an engine is
// closed.
Status no_streams(uint32_t rank);
Status closes_already();
Status engine_closed();

class Session;
// The first thing that every call does with its ops.
Status check_ops(const Session& session, const frugal_op* ops, size_t n, Use use);

}  // namespace frugal
