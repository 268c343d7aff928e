#include "engine/session.h"

#include "engine/op_check.h"

namespace frugal {

Deadline Session::deadline(int64_t timeout_ms) const {
  if (timeout_ms == FRUGAL_TIMEOUT_DEFAULT) timeout_ms = config_.timeout_ms;
  return {after_ns(ns_of_ms(timeout_ms))};
}

Status Session::op_table(const frugal_op& op, AnyTableRef* out) const {
  AnyTableRef table = object_of<AnyTable>(op.table);
  if (!table) return no_open_table(op);
  if (table->session.get() != this)
    return fail(FRUGAL_ERR_BAD_HANDLE,
                "table '%s' belongs to another engine: give one of this engine",
                table->name.c_str());
  *out = std::move(table);
  return FRUGAL_OK;
}

}  // namespace frugal
