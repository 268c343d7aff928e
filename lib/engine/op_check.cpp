#include "engine/op_check.h"

#include "device/pointers.h"

namespace frugal {

Status host_memory(const void* p, const char* what) {
  if (!device::only_on_device(p)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT,
              "%s is memory of a GPU: give host memory, or use a trainer on that GPU", what);
}

Status host_memory(const frugal_op* ops, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = ops[i];
    if (op.struct_size != sizeof(frugal_op)) continue;  // is told where ops are checked
    FRUGAL_TRY(host_memory(op.keys, "frugal_op.keys"));
    FRUGAL_TRY(host_memory(op.rows_out, "frugal_op.rows_out"));
    FRUGAL_TRY(host_memory(op.grads, "frugal_op.grads"));
    FRUGAL_TRY(host_memory(op.found_out, "frugal_op.found_out"));
    if (op.pooling == FRUGAL_POOL_NONE) continue;
    FRUGAL_TRY(host_memory(op.offsets, "frugal_op.offsets"));
    FRUGAL_TRY(host_memory(op.weights, "frugal_op.weights"));
    FRUGAL_TRY(host_memory(op.weight_grads_out, "frugal_op.weight_grads_out"));
  }
  return FRUGAL_OK;
}

Status check_op(const frugal_op& op, const char* table, uint32_t dim, size_t keys, Use use,
                bool offsets_elsewhere) {
  auto bad = [&](const char* what) {
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "table '%s': %s", table, what);
  };
  if (op.flags & ~FRUGAL_OP_PADDING)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x in frugal_op", op.flags);
  if (op.reserved) return bad("frugal_op.reserved is not 0");
  if (keys >= UINT32_MAX) return bad("more than 2^32 - 2 keys in one op");
  if (use == Use::kRead && op.batch) return bad("a read takes keys, not a batch");
  if (!op.keys && op.count && (!op.batch || use == Use::kDeclare))
    return bad("keys is NULL but count is not 0");
  if (use == Use::kDeclare) return FRUGAL_OK;
  if (op.pooling < FRUGAL_POOL_NONE || op.pooling > FRUGAL_POOL_MEAN) return bad("unknown pooling");
  size_t rows = keys;
  if (op.pooling != FRUGAL_POOL_NONE) {
    rows = op.bags;
    if (!op.offsets && !offsets_elsewhere) return bad("pooling needs offsets");
    if (op.bags >= UINT32_MAX) return bad("more than 2^32 - 2 bags in one op");
    if (!offsets_elsewhere) {
      if (op.offsets[0] != 0) return bad("offsets[0] must be 0");
      for (size_t b = 0; b < op.bags; ++b)
        if (op.offsets[b] > op.offsets[b + 1]) return bad("offsets must not decrease");
      if (op.offsets[op.bags] != keys) return bad("the last offset must be the number of keys");
    } else if (op.bags == 0 && keys) {
      return bad("the last offset must be the number of keys");
    }
    if (op.weights && op.pooling != FRUGAL_POOL_SUM) return bad("weights need FRUGAL_POOL_SUM");
  } else if (op.weights) {
    return bad("weights need FRUGAL_POOL_SUM");
  }
  if (op.weight_grads_out && !op.weights) return bad("weight_grads_out needs weights");
  const size_t row_bytes = size_t{dim} * sizeof(float);
  if (op.row_stride && (op.row_stride < row_bytes || op.row_stride % sizeof(float)))
    return bad("row_stride must be 0, or a multiple of 4 that holds a row");
  if (rows && op.row_stride > PTRDIFF_MAX / rows) return bad("row_stride: the rows exceed the address space");
  if (use == Use::kPush) {
    if (rows && !op.grads) return bad("grads is NULL");
  } else if (rows && !op.rows_out) {
    return bad("rows_out is NULL");
  }
  return FRUGAL_OK;
}

}  // namespace frugal
