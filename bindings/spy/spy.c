/*
 * A library with the functions of frugal.h. It notes the addresses that a binding passes, and then
 * calls the real library. Tests of "no copies" load it instead of the real one.
 *
 *     cc -shared -fPIC -O1 -Iinclude bindings/spy/spy.c -o libspy.so -ldl
 *
 * spy_open(PATH) names the real library before the first call; without it the environment variable
 * FRUGAL_SPY_REAL does. The spy notes the calls that take arrays: frugal_prefetch, lookup,
 * push_grad, read, get, put, delete and table_keys. spy_last(&note) gives the last such call.
 * spy_calls() returns the number of calls of all functions since spy_open or spy_reset().
 * One thread at a time may use the spy.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frugal.h"

#define SPY_MAX_OPS 16

/* The last call with arrays: the name of the function, and its ops unchanged. get, put, delete and
 * table_keys are noted as one op: table, keys, count, rows_out or grads, row_stride, found_out. */
typedef struct spy_note {
  char function[32];
  uint64_t op_count;
  frugal_op ops[SPY_MAX_OPS]; /* the first ones */
} spy_note;

static spy_note last;
static uint64_t calls;
static void *real;

FRUGAL_API int spy_open(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return -1;
  real = library;
  memset(&last, 0, sizeof last);
  calls = 0;
  return 0;
}

FRUGAL_API void spy_last(spy_note *out) { *out = last; }
FRUGAL_API uint64_t spy_calls(void) { return calls; }
FRUGAL_API void spy_reset(void) {
  memset(&last, 0, sizeof last);
  calls = 0;
}

static void *find(const char *name) {
  void *symbol;
  if (real == NULL) {
    const char *path = getenv("FRUGAL_SPY_REAL");
    if (path == NULL || spy_open(path) != 0) {
      fprintf(stderr, "spy: no real library: spy_open(PATH) or FRUGAL_SPY_REAL=PATH; %s\n",
              path != NULL ? dlerror() : "neither was given");
      abort();
    }
  }
  symbol = dlsym(real, name);
  if (symbol == NULL) {
    fprintf(stderr, "spy: %s\n", dlerror());
    abort();
  }
  ++calls;
  return symbol;
}

static void note(const char *function, const frugal_op *ops, size_t count) {
  const size_t kept = count < SPY_MAX_OPS ? count : SPY_MAX_OPS;
  memset(&last, 0, sizeof last);
  snprintf(last.function, sizeof last.function, "%s", function);
  last.op_count = count;
  if (ops != NULL) memcpy(last.ops, ops, kept * sizeof *ops);
}

/* Defines a function that calls the function of the same name in the real library. */
#define FORWARD(result, name, parameters, arguments) \
  FRUGAL_API result name parameters {                \
    static result(*function) parameters;             \
    *(void **)&function = find(#name);               \
    return function arguments;                       \
  }
#define FORWARD_OPS(name, parameters, arguments) \
  FRUGAL_API int32_t name parameters {           \
    static int32_t(*function) parameters;        \
    *(void **)&function = find(#name);           \
    note(#name, ops, op_count);                  \
    return function arguments;                   \
  }

FORWARD(const char *, frugal_status_name, (int32_t status), (status))
FORWARD(void, frugal_last_error, (frugal_error * error), (error))
FORWARD(const char *, frugal_version, (void), ())
FORWARD(void, frugal_config_init, (frugal_config * config), (config))
FORWARD(int32_t, frugal_open, (const frugal_config *config, frugal_engine **out), (config, out))
FORWARD(int32_t, frugal_close, (frugal_engine * engine), (engine))
FORWARD(int32_t, frugal_health, (const frugal_engine *engine), (engine))
FORWARD(int32_t, frugal_flush, (const frugal_engine *engine, int64_t ms), (engine, ms))
FORWARD(int32_t, frugal_committed_step, (const frugal_engine *engine, uint64_t *out), (engine, out))
FORWARD(void, frugal_optimizer_init, (frugal_optimizer * optimizer), (optimizer))
FORWARD(void, frugal_table_config_init, (frugal_table_config * config), (config))
FORWARD(int32_t, frugal_table_create,
        (frugal_engine * engine, const frugal_table_config *config, frugal_table **out),
        (engine, config, out))
FORWARD(int32_t, frugal_table_drop, (frugal_table * table), (table))
FORWARD(int32_t, frugal_table_find,
        (const frugal_engine *engine, const char *name, frugal_table **out), (engine, name, out))
FORWARD(int32_t, frugal_table_next,
        (const frugal_engine *engine, uint64_t *cursor, char *name, size_t capacity, size_t *size),
        (engine, cursor, name, capacity, size))
FORWARD(int32_t, frugal_table_describe, (const frugal_table *table, frugal_table_info *out),
        (table, out))
FORWARD(int32_t, frugal_table_count, (const frugal_table *table, uint64_t *out), (table, out))
FORWARD(int32_t, frugal_table_set_optimizer,
        (frugal_table * table, uint64_t step, const frugal_optimizer *optimizer),
        (table, step, optimizer))
FORWARD(int32_t, frugal_memory_needed,
        (const frugal_config *engine, const frugal_table_config *table, uint64_t rows,
         frugal_memory *out),
        (engine, table, rows, out))
FORWARD(void, frugal_trainer_config_init, (frugal_trainer_config * config), (config))
FORWARD(int32_t, frugal_trainer_create,
        (frugal_engine * engine, const frugal_trainer_config *config, frugal_trainer **out),
        (engine, config, out))
FORWARD(int32_t, frugal_trainer_close, (frugal_trainer * trainer), (trainer))
FORWARD(int32_t, frugal_trainer_abandon, (frugal_trainer * trainer), (trainer))
FORWARD(int32_t, frugal_set_stream, (frugal_trainer * trainer, void *stream), (trainer, stream))
FORWARD(void, frugal_op_init, (frugal_op * op), (op))
FORWARD(int32_t, frugal_prefetch_cancel, (frugal_trainer * trainer, frugal_batch *batch),
        (trainer, batch))
FORWARD(int32_t, frugal_step_begin, (frugal_trainer * trainer, uint64_t step, int64_t ms),
        (trainer, step, ms))
FORWARD(int32_t, frugal_step_end, (frugal_trainer * trainer, uint64_t step, uint32_t flags),
        (trainer, step, flags))
FORWARD(int32_t, frugal_step_abort, (frugal_trainer * trainer), (trainer))
FORWARD(int32_t, frugal_borrow, (frugal_trainer * trainer, size_t bytes, void **out),
        (trainer, bytes, out))
FORWARD(int32_t, frugal_get_stats, (const frugal_engine *engine, frugal_stats *out), (engine, out))
FORWARD(int32_t, frugal_serve, (frugal_engine * engine, const char *address), (engine, address))
FORWARD(int32_t, frugal_metrics,
        (const frugal_engine *engine, char *out, size_t capacity, size_t *size),
        (engine, out, capacity, size))
FORWARD(int32_t, frugal_trace_start, (frugal_engine * engine, size_t events), (engine, events))
FORWARD(int32_t, frugal_trace_stop, (frugal_engine * engine, const char *path), (engine, path))
FORWARD(void, frugal_folder_config_init, (frugal_folder_config * config), (config))
FORWARD(int32_t, frugal_folder_open,
        (frugal_engine * engine, const char *path, const frugal_folder_config *config),
        (engine, path, config))
FORWARD(int32_t, frugal_folder_close, (frugal_engine * engine), (engine))
FORWARD(void, frugal_checkpoint_config_init, (frugal_checkpoint_config * config), (config))
FORWARD(int32_t, frugal_checkpoint,
        (frugal_engine * engine, const frugal_checkpoint_config *config, uint64_t *out),
        (engine, config, out))
FORWARD(int32_t, frugal_checkpoint_wait,
        (const frugal_engine *engine, uint64_t number, int64_t ms, frugal_checkpoint_info *out),
        (engine, number, ms, out))
FORWARD(int32_t, frugal_checkpoint_cancel, (frugal_engine * engine, uint64_t number),
        (engine, number))
FORWARD(int32_t, frugal_checkpoint_due, (frugal_trainer * trainer, bool *out), (trainer, out))
FORWARD(int32_t, frugal_checkpoint_blob, (frugal_trainer * trainer, const void *bytes, size_t size),
        (trainer, bytes, size))
FORWARD(int32_t, frugal_checkpoint_delete, (frugal_engine * engine, uint64_t number),
        (engine, number))
FORWARD(void, frugal_restore_config_init, (frugal_restore_config * config), (config))
FORWARD(int32_t, frugal_restore,
        (frugal_engine * engine, const frugal_restore_config *config, frugal_checkpoint_info *out),
        (engine, config, out))
FORWARD(int32_t, frugal_checkpoint_next,
        (const char *folder, uint64_t *cursor, frugal_checkpoint_info *out), (folder, cursor, out))
FORWARD(int32_t, frugal_checkpoint_read_blob,
        (const char *folder, uint64_t number, uint32_t rank, void *out, size_t capacity,
         size_t *size),
        (folder, number, rank, out, capacity, size))
FORWARD(int32_t, frugal_checkpoint_copy, (const char *folder, uint64_t number, const char *to),
        (folder, number, to))

FORWARD_OPS(frugal_prefetch,
            (frugal_trainer * trainer, uint64_t step, const frugal_op *ops, size_t op_count,
             frugal_batch **out),
            (trainer, step, ops, op_count, out))
FORWARD_OPS(frugal_lookup, (frugal_trainer * trainer, const frugal_op *ops, size_t op_count),
            (trainer, ops, op_count))
FORWARD_OPS(frugal_push_grad, (frugal_trainer * trainer, const frugal_op *ops, size_t op_count),
            (trainer, ops, op_count))
FORWARD_OPS(frugal_read,
            (const frugal_engine *engine, frugal_trainer *trainer, const frugal_op *ops,
             size_t op_count, int64_t ms),
            (engine, trainer, ops, op_count, ms))

FRUGAL_API int32_t frugal_get(const frugal_table *table, const uint64_t *keys, size_t count,
                              uint32_t flags, float *rows, size_t stride, uint8_t *found) {
  int32_t (*function)(const frugal_table *, const uint64_t *, size_t, uint32_t, float *, size_t,
                      uint8_t *);
  frugal_op op = FRUGAL_OP_INIT;
  *(void **)&function = find("frugal_get");
  op.table = (frugal_table *)table;
  op.keys = keys;
  op.count = count;
  op.flags = flags;
  op.rows_out = rows;
  op.row_stride = stride;
  op.found_out = found;
  note("frugal_get", &op, 1);
  return function(table, keys, count, flags, rows, stride, found);
}

FRUGAL_API int32_t frugal_put(frugal_table *table, const uint64_t *keys, size_t count,
                              uint32_t flags, const float *rows, size_t stride) {
  int32_t (*function)(frugal_table *, const uint64_t *, size_t, uint32_t, const float *, size_t);
  frugal_op op = FRUGAL_OP_INIT;
  *(void **)&function = find("frugal_put");
  op.table = table;
  op.keys = keys;
  op.count = count;
  op.flags = flags;
  op.grads = rows;
  op.row_stride = stride;
  note("frugal_put", &op, 1);
  return function(table, keys, count, flags, rows, stride);
}

FRUGAL_API int32_t frugal_delete(frugal_table *table, const uint64_t *keys, size_t count,
                                 uint64_t *deleted) {
  int32_t (*function)(frugal_table *, const uint64_t *, size_t, uint64_t *);
  frugal_op op = FRUGAL_OP_INIT;
  *(void **)&function = find("frugal_delete");
  op.table = table;
  op.keys = keys;
  op.count = count;
  note("frugal_delete", &op, 1);
  return function(table, keys, count, deleted);
}

FRUGAL_API int32_t frugal_table_keys(const frugal_table *table, uint64_t *cursor, uint64_t *keys,
                                     size_t capacity, size_t *count) {
  int32_t (*function)(const frugal_table *, uint64_t *, uint64_t *, size_t, size_t *);
  frugal_op op = FRUGAL_OP_INIT;
  *(void **)&function = find("frugal_table_keys");
  op.table = (frugal_table *)table;
  op.keys = keys;
  op.count = capacity;
  note("frugal_table_keys", &op, 1);
  return function(table, cursor, keys, capacity, count);
}
