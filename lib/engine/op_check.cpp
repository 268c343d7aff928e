#include "engine/op_check.h"

#include <cmath>
#include <cstdio>

#include "device/pointers.h"
#include "engine/session.h"

namespace frugal {

Status host_memory(const void* p, const char* what) {
  if (!device::only_on_device(p)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT,
              "%s is memory of a GPU: give host memory, or use a trainer on that GPU", what);
}

Status host_memory(const frugal_op* ops, size_t n) {
  auto look = [](const frugal_op& op) -> Status {
    FRUGAL_TRY(host_memory(op.keys, "frugal_op.keys"));
    FRUGAL_TRY(host_memory(op.rows_out, "frugal_op.rows_out"));
    FRUGAL_TRY(host_memory(op.grads, "frugal_op.grads"));
    FRUGAL_TRY(host_memory(op.found_out, "frugal_op.found_out"));
    if (op.pooling == FRUGAL_POOL_NONE) return FRUGAL_OK;
    FRUGAL_TRY(host_memory(op.offsets, "frugal_op.offsets"));
    FRUGAL_TRY(host_memory(op.weights, "frugal_op.weights"));
    return host_memory(op.weight_grads_out, "frugal_op.weight_grads_out");
  };
  if (!device::any_only_on_device()) return FRUGAL_OK;
  for (size_t i = 0; i < n; ++i)
    FRUGAL_TRY(in_op(look(ops[i]), i, n, static_cast<const char*>(nullptr)));
  return FRUGAL_OK;
}

Status check_step(uint64_t step) {
  if (step < kNoStep - kRing) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT,
              "step %llu: steps are numbered up to %llu (2^64 - 66): begin with a lower one",
              static_cast<unsigned long long>(step),
              static_cast<unsigned long long>(kNoStep - kRing - 1));
}

Status check_stride(size_t stride, size_t row_bytes, size_t rows) {
  if (stride && (stride < row_bytes || stride % sizeof(float)))
    return fail(
        FRUGAL_ERR_INVALID_ARGUMENT,
        "row_stride %s: give 0, or a multiple of 4 from %zu on, which are the bytes of a row",
        number_text(uint64_t{stride}).c_str(), row_bytes);
  // No system gives a process more addresses. (This refuses one row, too: its stride has no use, so
  // it is a mistake.)
  constexpr size_t kAddresses = size_t{1} << 57;
  if (rows && stride && stride > kAddresses / rows)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "row_stride %s: %zu rows so far apart exceed the address space: give less",
                number_text(uint64_t{stride}).c_str(), rows);
  return FRUGAL_OK;
}

Status in_op(Status status, size_t i, size_t n, const char* table) {
  if (n > 1 && table) return fail_in(status, "op %zu of %zu (table '%s')", i, n, table);
  if (n > 1) return fail_in(status, "op %zu of %zu", i, n);
  return table ? fail_in(status, "table '%s'", table) : status;
}

Status no_streams(uint32_t rank) {
  return fail(FRUGAL_ERR_UNSUPPORTED,
              "rank %u runs on the cpu device, which has no streams: join on \"cuda:N\" for one",
              rank);
}

Status closes_already() {
  return fail(FRUGAL_ERR_BAD_HANDLE,
              "the trainer is being closed by another thread: leave that to it");
}

Status engine_closed() {
  return fail(FRUGAL_ERR_CLOSED, "the engine was closed: open one to go on");
}

Status no_open_table(const frugal_op& op) {
  if (!op.table) return fail(FRUGAL_ERR_BAD_HANDLE, "frugal_op.table is NULL: give an open table");
  return fail(FRUGAL_ERR_BAD_HANDLE,
              "frugal_op.table %p is no open table: it was dropped, or never was one",
              static_cast<const void*>(op.table));
}

Status check_form(const frugal_op& op, Use use) {
  auto bad = [](const char* what) { return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%s", what); };
  if (op.struct_size != sizeof(frugal_op))
    return fail(FRUGAL_ERR_STRUCT_SIZE,
                "frugal_op.struct_size is %zu, expected %zu: use FRUGAL_OP_INIT", op.struct_size,
                sizeof(frugal_op));
  if (op.flags & ~FRUGAL_OP_PADDING)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "unknown flags 0x%x in frugal_op: give 0 or FRUGAL_OP_PADDING", op.flags);
  if (op.reserved)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "frugal_op.reserved is %u: use FRUGAL_OP_INIT, which makes it 0", op.reserved);
  if (use == Use::kRead && op.batch) return bad("a read takes keys: frugal_op.batch must be NULL");
  if (!op.keys && op.count && (!op.batch || use == Use::kDeclare))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "frugal_op.keys is NULL and count %zu: give the keys, or count 0", op.count);
  if (op.count >= UINT32_MAX && (op.keys || !op.batch))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%zu keys in one op: at most 2^32 - 2", op.count);
  if (use == Use::kDeclare) return FRUGAL_OK;
  if (op.pooling < FRUGAL_POOL_NONE || op.pooling > FRUGAL_POOL_MEAN)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown pooling %d: give one of FRUGAL_POOL_*",
                op.pooling);
  if (op.pooling != FRUGAL_POOL_NONE && !op.offsets)
    return bad("pooling needs offsets: frugal_op.offsets is NULL, give bags + 1 of them");
  if (op.pooling != FRUGAL_POOL_NONE && op.bags >= UINT32_MAX)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%zu bags in one op: at most 2^32 - 2", op.bags);
  if (op.weights && op.pooling != FRUGAL_POOL_SUM)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "weights need FRUGAL_POOL_SUM, and pooling is %d",
                op.pooling);
  if (op.weight_grads_out && !op.weights)
    return bad("weight_grads_out needs weights: frugal_op.weights is NULL");
  return FRUGAL_OK;
}

Status check_ops(const Session& session, const frugal_op* ops, size_t n, Use use) {
  for (size_t i = 0; i < n; ++i) {
    Status s = check_form(ops[i], use);
    if (s == FRUGAL_OK) continue;
    AnyTableRef table;
    if (s != FRUGAL_ERR_STRUCT_SIZE && (s = session.op_table(ops[i], &table)) == FRUGAL_OK)
      s = check_form(ops[i], use);
    return in_op(s, i, n, table);
  }
  return FRUGAL_OK;
}

Status check_op(const frugal_op& op, uint32_t dim, size_t keys, Use use, bool offsets_on_device) {
  auto last = [&](uint64_t offset) {
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the last of %zu offsets is %llu: it must be %zu, the number of keys", op.bags + 1,
                static_cast<unsigned long long>(offset), keys);
  };
  size_t rows = keys;
  if (op.pooling != FRUGAL_POOL_NONE) {
    rows = op.bags;
    if (offsets_on_device) {
      if (op.bags == 0 && keys) return last(0);
    } else {
      if (op.offsets[0] != 0)
        return fail(FRUGAL_ERR_INVALID_ARGUMENT, "offsets[0] is %s: it must be 0",
                    number_text(uint64_t{op.offsets[0]}).c_str());
      for (size_t b = 0; b < op.bags; ++b)
        if (op.offsets[b] > op.offsets[b + 1])
          return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                      "offsets[%zu] is %s after %s: offsets must not decrease", b + 1,
                      number_text(uint64_t{op.offsets[b + 1]}).c_str(),
                      number_text(uint64_t{op.offsets[b]}).c_str());
      if (op.offsets[op.bags] != keys) return last(op.offsets[op.bags]);
    }
  }
  FRUGAL_TRY(check_stride(op.row_stride, size_t{dim} * sizeof(float), rows));
  if (rows && !(use == Use::kPush ? op.grads : op.rows_out))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "frugal_op.%s is NULL: give memory for %zu rows",
                use == Use::kPush ? "grads" : "rows_out", rows);
  return FRUGAL_OK;
}

Status nan_refused(const frugal_op& op, uint32_t dim, uint64_t step) {
  const bool pooled = op.pooling != FRUGAL_POOL_NONE;
  const size_t stride = stride_of(op.row_stride, dim);
  const bool here = host_memory(op.grads, "grads") == FRUGAL_OK;
  const size_t rows = !here ? 0 : pooled ? op.bags : op.keys ? op.count : 0;
  char where[96] = "";
  for (size_t r = 0; r < rows && !*where; ++r) {
    const float* row =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(op.grads) + r * stride);
    for (uint32_t c = 0; c < dim && !*where; ++c) {
      if (!std::isnan(row[c])) continue;
      const size_t at = pooled ? op.offsets[r] : r;
      if (op.keys && !(pooled && op.offsets[r + 1] == at))
        std::snprintf(where, sizeof where, " in row %zu, column %u, of the key %lld%s", r, c,
                      static_cast<long long>(op.keys[at]),
                      pooled && op.offsets[r + 1] - at > 1 ? " and others" : "");
      else
        std::snprintf(where, sizeof where, " in row %zu, column %u", r, c);
    }
  }
  for (size_t i = 0; op.weights && op.keys && i < (here && pooled ? op.count : 0) && !*where; ++i)
    if (std::isnan(op.weights[i]))
      std::snprintf(where, sizeof where, " in the weight %zu, of the key %lld", i,
                    static_cast<long long>(op.keys[i]));
  return fail(FRUGAL_ERR_NAN,
              "a gradient of step %llu has a NaN%s; nothing of the call was taken (nan_policy skip "
              "or accept would take it)",
              static_cast<unsigned long long>(step), where);
}

}  // namespace frugal
