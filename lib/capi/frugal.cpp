// The C interface: handles become objects, arguments are checked, exceptions become a status.
#include "frugal.h"

#include <cmath>
#include <cstring>

#include "capi/calls.h"
#include "checkpoint/stored_checkpoints.h"
#include "engine/config_check.h"
#include "engine/engine.h"
#include "process/client.h"

namespace frugal {
namespace {

// The status that a trainer's call returns: its session checks whether the trainer's GPU has
// failed.
Status told(AnyTrainer& t, Status status) { return t.session->told(t, status); }

Status open_session(const frugal_config& config, SessionRef* out) {
  if (config.service) {
    std::shared_ptr<Client> client;
    FRUGAL_TRY(Client::open(config, &client));
    *out = std::move(client);
    return FRUGAL_OK;
  }
  auto engine = std::allocate_shared<Engine>(HeapAllocator<Engine>(), config);
  FRUGAL_TRY(engine->start());
  *out = std::move(engine);
  return FRUGAL_OK;
}

Status end_trainer(frugal_trainer* trainer, bool abandoned) {
  return guard([&]() -> Status {
    if (!trainer) return FRUGAL_OK;
    return having<AnyTrainer>(
        trainer, [&](const AnyTrainerRef& t) { return t->session->close_trainer(t, abandoned); });
  });
}

}  // namespace
}  // namespace frugal

using namespace frugal;

extern "C" {

const char* frugal_status_name(int32_t status) { return status_name(status); }

void frugal_last_error(frugal_error* error_out) { last_error(error_out); }

const char* frugal_version(void) { return "0.1.0"; }

void frugal_config_init(frugal_config* config) {
  if (!config) return;
  frugal_config c = FRUGAL_CONFIG_INIT;
  std::memcpy(config, &c, sizeof c);
}

void frugal_optimizer_init(frugal_optimizer* optimizer) {
  if (!optimizer) return;
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  std::memcpy(optimizer, &o, sizeof o);
}

void frugal_table_config_init(frugal_table_config* config) {
  if (!config) return;
  frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
  std::memcpy(config, &c, sizeof c);
}

void frugal_trainer_config_init(frugal_trainer_config* config) {
  if (!config) return;
  frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
  std::memcpy(config, &c, sizeof c);
}

void frugal_folder_config_init(frugal_folder_config* config) {
  if (!config) return;
  frugal_folder_config c = FRUGAL_FOLDER_CONFIG_INIT;
  std::memcpy(config, &c, sizeof c);
}

void frugal_checkpoint_config_init(frugal_checkpoint_config* config) {
  if (!config) return;
  frugal_checkpoint_config c = FRUGAL_CHECKPOINT_CONFIG_INIT;
  std::memcpy(config, &c, sizeof c);
}

void frugal_restore_config_init(frugal_restore_config* config) {
  if (!config) return;
  frugal_restore_config c = FRUGAL_RESTORE_CONFIG_INIT;
  std::memcpy(config, &c, sizeof c);
}

void frugal_op_init(frugal_op* op) {
  if (!op) return;
  frugal_op o = FRUGAL_OP_INIT;
  std::memcpy(op, &o, sizeof o);
}

int32_t frugal_open(const frugal_config* config, frugal_engine** engine_out) {
  return guard([&]() -> Status {
    if (!engine_out) return null("engine_out");
    frugal_config c = FRUGAL_CONFIG_INIT;
    if (config) {
      FRUGAL_TRY(check_size(config, "frugal_config"));
      c = *config;
    }
    FRUGAL_TRY(check_config(c));
    SessionRef session;
    FRUGAL_TRY(open_session(c, &session));
    const uint64_t handle = handle_of<Session>(session);
    if (!handle) {
      session->shutdown();
      return FRUGAL_ERR_OUT_OF_MEMORY;
    }
    *engine_out = reinterpret_cast<frugal_engine*>(handle);
    return FRUGAL_OK;
  });
}

int32_t frugal_close(frugal_engine* engine) {
  return guard([&]() -> Status {
    if (!engine) return FRUGAL_OK;
    return having<Session>(engine, [&](const SessionRef& e) -> Status {
      if (!handle_remove(Session::kHandle, reinterpret_cast<uint64_t>(engine)))
        return fail(FRUGAL_ERR_BAD_HANDLE,
                    "the engine is being closed by another thread: leave that to it");
      e->close_ranks();
      // Before the shutdown, so that attached processes are notified; and after it, for a thread
      // that began to serve the engine meanwhile.
      stop_serving(*e);
      e->shutdown();
      stop_serving(*e);
      return FRUGAL_OK;
    });
  });
}

int32_t frugal_health(const frugal_engine* engine) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status { return e->health(); });
}

int32_t frugal_flush(const frugal_engine* engine, int64_t timeout_ms) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    FRUGAL_TRY(check_timeout(timeout_ms));
    return e->flush(e->deadline(timeout_ms));
  });
}

int32_t frugal_committed_step(const frugal_engine* engine, uint64_t* step_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!step_out) return null("step_out");
    return e->committed(step_out);
  });
}

int32_t frugal_serve(frugal_engine* engine, const char* address) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!address) return null("address");
    if (const std::shared_ptr<Engine> here = e->here()) return serve(here, address);
    return fail(FRUGAL_ERR_UNSUPPORTED, "the engine is another process's: call it there");
  });
}

int32_t frugal_table_create(frugal_engine* engine, const frugal_table_config* config,
                            frugal_table** table_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!config) return null("config");
    if (!table_out) return null("table_out");
    FRUGAL_TRY(check_name(*config));
    FRUGAL_TRY(in_table(check_table(*config), config->name));
    AnyTableRef table;
    FRUGAL_TRY(in_table(e->create_table(*config, &table), config->name));
    *table_out = reinterpret_cast<frugal_table*>(table->handle);
    return FRUGAL_OK;
  });
}

int32_t frugal_table_drop(frugal_table* table) {
  return guard([&]() -> Status {
    if (!table) return FRUGAL_OK;
    return having<AnyTable>(table, [&](const AnyTableRef& t) {
      return in_table(t->session->drop_table(t), t->name.c_str());
    });
  });
}

int32_t frugal_table_find(const frugal_engine* engine, const char* name, frugal_table** table_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!name) return null("name");
    if (!table_out) return null("table_out");
    FRUGAL_TRY(check_name(name, FRUGAL_ERR_NOT_FOUND));
    AnyTableRef t;
    FRUGAL_TRY(e->find_table(name, &t));
    *table_out = reinterpret_cast<frugal_table*>(t->handle);
    return FRUGAL_OK;
  });
}

int32_t frugal_table_next(const frugal_engine* engine, uint64_t* cursor, char* name_out,
                          size_t capacity, size_t* size_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!cursor) return null("cursor");
    if (!size_out) return null("size_out");
    if (!name_out && capacity) return null("name_out");
    uint64_t next = *cursor;
    String name;
    FRUGAL_TRY(e->next_table(&next, &name));
    const size_t size = name.empty() ? 0 : name.size() + 1;  // no table is without a name
    *size_out = size;
    if (capacity < size)
      return fail(
          FRUGAL_ERR_OVERFLOW,
          "table '%s': its name takes %zu bytes, and capacity is %zu: give 256, enough for any",
          name.c_str(), size, capacity);
    if (size) std::memcpy(name_out, name.c_str(), size);
    *cursor = next;
    return FRUGAL_OK;
  });
}

int32_t frugal_table_describe(const frugal_table* table, frugal_table_info* info_out) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!info_out) return null("info_out");
    FRUGAL_TRY(check_size(info_out, "frugal_table_info"));
    return t->session->describe(*t, info_out);
  });
}

int32_t frugal_table_count(const frugal_table* table, uint64_t* count_out) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!count_out) return null("count_out");
    return t->session->count(*t, count_out);
  });
}

int32_t frugal_table_keys(const frugal_table* table, uint64_t* cursor, uint64_t* keys_out,
                          size_t capacity, size_t* count_out) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!cursor) return null("cursor");
    if (!count_out) return null("count_out");
    if (!keys_out && capacity) return null("keys_out");
    FRUGAL_TRY(on_host({{keys_out, "keys_out"}}));
    return t->session->keys(*t, cursor, keys_out, capacity, count_out);
  });
}

int32_t frugal_table_set_optimizer(frugal_table* table, uint64_t first_step,
                                   const frugal_optimizer* optimizer) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!optimizer) return null("optimizer");
    FRUGAL_TRY(check_optimizer(*optimizer));
    return t->session->set_optimizer(*t, first_step, *optimizer);
  });
}

int32_t frugal_memory_needed(const frugal_config* engine_config,
                             const frugal_table_config* table_config, uint64_t cache_rows,
                             frugal_memory* memory_out) {
  return guard([&]() -> Status {
    if (!table_config) return null("table_config");
    if (!memory_out) return null("memory_out");
    frugal_config c = FRUGAL_CONFIG_INIT;
    if (engine_config) {
      FRUGAL_TRY(check_size(engine_config, "frugal_config"));
      c = *engine_config;
    }
    FRUGAL_TRY(check_config(c));
    FRUGAL_TRY(check_size(table_config, "frugal_table_config"));
    FRUGAL_TRY(in_table(check_table(*table_config), table_config->name));
    RowLayout l = RowLayout::of(table_config->dim, table_config->optimizer.kind);
    auto slabs = [&](size_t stride) {
      uint64_t slab = SlabArray::slab_bytes(table_config->rows, stride);
      return stride ? (table_config->rows * stride + slab - 1) / slab * slab : 0;
    };
    frugal_memory m;
    std::memset(&m, 0, sizeof m);
    m.values = slabs(l.value_pitch);
    m.state = slabs(l.state_pitch);
    if (table_config->key_space == FRUGAL_HASHED)
      m.index = slabs(8) + slabs(1) + slabs(Holders::kSlotBytes) +
                KeyIndex::peak_bytes(table_config->rows);
    else if (table_config->flags & FRUGAL_TABLE_LAZY)
      m.index = slabs(1);
    bool deferred =
        (c.flush_mode != FRUGAL_FLUSH_AT_ONCE && c.flush_mode != FRUGAL_FLUSH_WRITE_THROUGH) ||
        c.staleness != 0;
    if (deferred || cache_rows) m.window = table_config->rows * 8;
    m.cache = RowCache::bytes_for(l, std::min<uint64_t>(cache_rows, table_config->rows));
    m.total = m.values + m.state + m.index + m.window + m.cache;
    *memory_out = m;
    return FRUGAL_OK;
  });
}

int32_t frugal_get(const frugal_table* table, const uint64_t* keys, size_t count, uint32_t flags,
                   float* rows_out, size_t row_stride, uint8_t* found_out) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!keys && count) return null("keys");
    FRUGAL_TRY(check_count(count, "keys"));
    if (!rows_out && count) return null("rows_out");
    if (flags & ~(FRUGAL_WITH_STATE | FRUGAL_COMMITTED))
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "unknown flags 0x%x: give 0 or FRUGAL_WITH_STATE, FRUGAL_COMMITTED", flags);
    FRUGAL_TRY(on_host({{keys, "keys"}, {rows_out, "rows_out"}, {found_out, "found_out"}}));
    return t->session->get(*t, keys, count, flags, rows_out, row_stride, found_out);
  });
}

int32_t frugal_put(frugal_table* table, const uint64_t* keys, size_t count, uint32_t flags,
                   const float* rows, size_t row_stride) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!keys && count) return null("keys");
    FRUGAL_TRY(check_count(count, "keys"));
    if (!rows && count) return null("rows");
    if (flags & ~FRUGAL_WITH_STATE)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x: give 0 or FRUGAL_WITH_STATE",
                  flags);
    FRUGAL_TRY(on_host({{keys, "keys"}, {rows, "rows"}}));
    return t->session->put(*t, keys, count, flags, rows, row_stride);
  });
}

int32_t frugal_delete(frugal_table* table, const uint64_t* keys, size_t count,
                      uint64_t* deleted_out) {
  return with_table(table, [&](const AnyTableRef& t) -> Status {
    if (!keys && count) return null("keys");
    FRUGAL_TRY(check_count(count, "keys"));
    FRUGAL_TRY(on_host({{keys, "keys"}}));
    return t->session->remove(*t, keys, count, deleted_out);
  });
}

int32_t frugal_trainer_create(frugal_engine* engine, const frugal_trainer_config* config,
                              frugal_trainer** trainer_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!config) return null("config");
    if (!trainer_out) return null("trainer_out");
    FRUGAL_TRY(check_trainer(*config, e->config().world_size));
    FRUGAL_TRY(check_device(config->device));
    AnyTrainerRef trainer;
    FRUGAL_TRY(e->create_trainer(*config, &trainer));
    *trainer_out = reinterpret_cast<frugal_trainer*>(trainer->handle);
    return FRUGAL_OK;
  });
}

int32_t frugal_trainer_close(frugal_trainer* trainer) { return end_trainer(trainer, false); }

int32_t frugal_trainer_abandon(frugal_trainer* trainer) { return end_trainer(trainer, true); }

int32_t frugal_set_stream(frugal_trainer* trainer, void* stream) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    return t->session->set_stream(*t, stream);
  });
}

int32_t frugal_prefetch(frugal_trainer* trainer, uint64_t step, const frugal_op* ops,
                        size_t op_count, frugal_batch** batch_out) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    FRUGAL_TRY(check_ops(ops, op_count));
    uint64_t handle = 0;
    FRUGAL_TRY(
        told(*t, t->session->prefetch(*t, step, ops, op_count, batch_out != nullptr, &handle)));
    if (batch_out) *batch_out = reinterpret_cast<frugal_batch*>(handle);
    return FRUGAL_OK;
  });
}

int32_t frugal_prefetch_cancel(frugal_trainer* trainer, frugal_batch* batch) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    const AnyBatchRef b = object_of<AnyBatch>(batch);
    if (!b)
      return fail(FRUGAL_ERR_BAD_HANDLE, "the batch handle is %s",
                  batch ? "closed: its step has ended, or it was cancelled"
                        : "NULL: give one of frugal_prefetch");
    return t->session->cancel(*t, b);
  });
}

int32_t frugal_step_begin(frugal_trainer* trainer, uint64_t step, int64_t timeout_ms) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    FRUGAL_TRY(check_timeout(timeout_ms));
    return told(*t, t->session->step_begin(*t, step, t->session->deadline(timeout_ms)));
  });
}

int32_t frugal_lookup(frugal_trainer* trainer, const frugal_op* ops, size_t op_count) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    FRUGAL_TRY(check_ops(ops, op_count));
    return told(*t, t->session->lookup(*t, ops, op_count));
  });
}

int32_t frugal_push_grad(frugal_trainer* trainer, const frugal_op* ops, size_t op_count) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    FRUGAL_TRY(check_ops(ops, op_count));
    return told(*t, t->session->push(*t, ops, op_count));
  });
}

int32_t frugal_borrow(frugal_trainer* trainer, size_t bytes, void** memory_out) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    if (!memory_out) return null("memory_out");
    return t->session->borrow(*t, bytes, memory_out);
  });
}

int32_t frugal_step_end(frugal_trainer* trainer, uint64_t step, uint32_t flags) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    return told(*t, t->session->step_end(*t, step, flags));
  });
}

int32_t frugal_step_abort(frugal_trainer* trainer) {
  return with<AnyTrainer>(
      trainer, [&](const AnyTrainerRef& t) -> Status { return t->session->abort_call(*t); });
}

int32_t frugal_read(const frugal_engine* engine, frugal_trainer* trainer, const frugal_op* ops,
                    size_t op_count, int64_t timeout_ms) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    FRUGAL_TRY(check_timeout(timeout_ms));
    FRUGAL_TRY(check_ops(ops, op_count));
    if (!trainer) return e->read(nullptr, ops, op_count, e->deadline(timeout_ms));
    return having<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
      if (t->session == e)
        return told(*t, e->read(t.get(), ops, op_count, e->deadline(timeout_ms)));
      return fail(FRUGAL_ERR_BAD_HANDLE,
                  "the trainer belongs to another engine: read with the one that it has joined");
    });
  });
}

int32_t frugal_get_stats(const frugal_engine* engine, frugal_stats* stats_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!stats_out) return null("stats_out");
    FRUGAL_TRY(check_size(stats_out, "frugal_stats"));
    return e->stats(stats_out);
  });
}

int32_t frugal_metrics(const frugal_engine* engine, char* text_out, size_t capacity,
                       size_t* size_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!size_out) return null("size_out");
    if (!text_out && capacity) return null("text_out");
    String text;
    FRUGAL_TRY(e->metrics(&text));
    *size_out = text.size() + 1;
    if (capacity < *size_out)
      return fail(FRUGAL_ERR_OVERFLOW,
                  "the text takes %zu bytes, and capacity is %zu: give some more than it takes",
                  *size_out, capacity);
    std::memcpy(text_out, text.c_str(), *size_out);
    return FRUGAL_OK;
  });
}

int32_t frugal_trace_start(frugal_engine* engine, size_t events) {
  return with<Session>(engine,
                       [&](const SessionRef& e) -> Status { return e->start_trace(events); });
}

int32_t frugal_trace_stop(frugal_engine* engine, const char* path) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status { return e->stop_trace(path); });
}

int32_t frugal_folder_open(frugal_engine* engine, const char* path,
                           const frugal_folder_config* config) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!path) return null("path");
    frugal_folder_config c = FRUGAL_FOLDER_CONFIG_INIT;
    if (config) c = *config;
    FRUGAL_TRY(check_folder_config(c));
    return e->open_folder(path, c);
  });
}

int32_t frugal_folder_close(frugal_engine* engine) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status { return e->close_folder(); });
}

int32_t frugal_checkpoint(frugal_engine* engine, const frugal_checkpoint_config* config,
                          uint64_t* number_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    if (!number_out) return null("number_out");
    frugal_checkpoint_config c = FRUGAL_CHECKPOINT_CONFIG_INIT;
    if (config) c = *config;
    FRUGAL_TRY(check_checkpoint_config(c, e->config().world_size));
    FRUGAL_TRY(on_host({{c.blob, "frugal_checkpoint_config.blob"}}));
    return e->checkpoint(c, number_out);
  });
}

int32_t frugal_checkpoint_wait(const frugal_engine* engine, uint64_t number, int64_t timeout_ms,
                               frugal_checkpoint_info* info_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    FRUGAL_TRY(check_timeout(timeout_ms));
    if (info_out) FRUGAL_TRY(check_size(info_out, "frugal_checkpoint_info"));
    return e->await_checkpoint(number, e->deadline(timeout_ms), info_out);
  });
}

int32_t frugal_checkpoint_cancel(frugal_engine* engine, uint64_t number) {
  return with<Session>(engine,
                       [&](const SessionRef& e) -> Status { return e->cancel_checkpoint(number); });
}

int32_t frugal_checkpoint_due(frugal_trainer* trainer, bool* due_out) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    if (!due_out) return null("due_out");
    return t->session->checkpoint_due(*t, due_out);
  });
}

int32_t frugal_checkpoint_blob(frugal_trainer* trainer, const void* bytes, size_t size) {
  return with<AnyTrainer>(trainer, [&](const AnyTrainerRef& t) -> Status {
    if (!bytes && size) return null("bytes");
    FRUGAL_TRY(on_host({{bytes, "bytes"}}));
    return t->session->give_blob(*t, bytes, size);
  });
}

int32_t frugal_checkpoint_delete(frugal_engine* engine, uint64_t number) {
  return with<Session>(engine,
                       [&](const SessionRef& e) -> Status { return e->delete_checkpoint(number); });
}

int32_t frugal_restore(frugal_engine* engine, const frugal_restore_config* config,
                       frugal_checkpoint_info* info_out) {
  return with<Session>(engine, [&](const SessionRef& e) -> Status {
    frugal_restore_config c = FRUGAL_RESTORE_CONFIG_INIT;
    if (config) c = *config;
    FRUGAL_TRY(check_size(&c, "frugal_restore_config"));
    if (!c.tables && c.table_count) return null("frugal_restore_config.tables");
    for (size_t i = 0; i < c.table_count; ++i)
      if (!c.tables[i]) return null("an element of frugal_restore_config.tables");
    if (info_out) FRUGAL_TRY(check_size(info_out, "frugal_checkpoint_info"));
    return e->restore(c, info_out);
  });
}

int32_t frugal_checkpoint_next(const char* folder, uint64_t* cursor,
                               frugal_checkpoint_info* info_out) {
  return guard([&]() -> Status {
    if (!folder) return null("folder");
    if (!cursor) return null("cursor");
    if (!info_out) return null("info_out");
    FRUGAL_TRY(check_size(info_out, "frugal_checkpoint_info"));
    return next_checkpoint(folder, cursor, info_out);
  });
}

int32_t frugal_checkpoint_read_blob(const char* folder, uint64_t number, uint32_t rank,
                                    void* bytes_out, size_t capacity, size_t* size_out) {
  return guard([&]() -> Status {
    if (!folder) return null("folder");
    if (!bytes_out && capacity) return null("bytes_out");
    FRUGAL_TRY(on_host({{bytes_out, "bytes_out"}}));
    size_t size = 0;
    const Status status = read_stored_blob(folder, number, rank, bytes_out, capacity, &size);
    if (size_out && (status == FRUGAL_OK || status == FRUGAL_ERR_OVERFLOW)) *size_out = size;
    return status;
  });
}

int32_t frugal_checkpoint_copy(const char* folder, uint64_t number, const char* to) {
  return guard([&]() -> Status {
    if (!folder) return null("folder");
    if (!to) return null("to");
    return copy_checkpoint(folder, number, to);
  });
}

}  // extern "C"
