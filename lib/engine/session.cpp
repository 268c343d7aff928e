#include "engine/session.h"

#include "engine/op_check.h"

namespace frugal {

Deadline Session::deadline(int64_t timeout_ms) const {
  if (timeout_ms == FRUGAL_TIMEOUT_DEFAULT) timeout_ms = config_.timeout_ms;
  return {after_ns(ns_of_ms(timeout_ms))};
}

static Status elsewhere() {
  return fail(FRUGAL_ERR_UNSUPPORTED,
              "the engine is another process's, which alone writes and restores its checkpoints: "
              "call it there");
}

Status Session::open_folder(const char*, const frugal_folder_config&) { return elsewhere(); }
Status Session::close_folder() { return elsewhere(); }
Status Session::checkpoint(const frugal_checkpoint_config&, uint64_t*) { return elsewhere(); }
Status Session::await_checkpoint(uint64_t, Deadline, frugal_checkpoint_info*) {
  return elsewhere();
}
Status Session::cancel_checkpoint(uint64_t) { return elsewhere(); }
Status Session::delete_checkpoint(uint64_t) { return elsewhere(); }
Status Session::checkpoint_due(AnyTrainer&, bool*) { return elsewhere(); }
Status Session::give_blob(AnyTrainer&, const void*, size_t) { return elsewhere(); }
Status Session::restore(const frugal_restore_config&, frugal_checkpoint_info*) {
  return elsewhere();
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
