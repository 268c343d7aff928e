/*
 * Replays an op script (docs/bindings.md) on frugal.h alone and prints its hashes.
 *   run_c SCRIPT
 */
#define _POSIX_C_SOURCE 200809L /* getline */

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frugal.h"

enum { kMaxTables = 64, kMaxRanks = 64 };

/* The keys of each part of a declaration are counted for ops that do not repeat them. */
typedef struct declaration {
  frugal_batch *batch;
  size_t *part_keys;
  size_t parts;
} declaration;

static frugal_engine *engine;
static frugal_table *tables[kMaxTables];
static uint32_t dims[kMaxTables], row_floats[kMaxTables]; /* without and with state */
static size_t table_count;
static frugal_trainer *trainers[kMaxRanks];
static declaration *declarations;
static size_t declaration_count;

static unsigned line_number;
static uint64_t outputs = UINT64_C(14695981039346656037);
static unsigned hashes;

static void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "line %u: ", line_number);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  exit(1);
}

static void add_bytes(uint64_t *hash, const void *data, size_t bytes) {
  const unsigned char *p = data;
  for (size_t i = 0; i < bytes; ++i) *hash = (*hash ^ p[i]) * UINT64_C(1099511628211);
}

/* Memory that is freed after the line. */
static void *line_memory[4096];
static size_t line_memory_count;

static void *take(size_t count, size_t size) {
  /* Never NULL, for in an op that says something else than an empty array. */
  void *memory = calloc(count + 1, size);
  if (memory == NULL || line_memory_count == sizeof(line_memory) / sizeof(*line_memory)) {
    die("out of memory");
  }
  return line_memory[line_memory_count++] = memory;
}

static void free_line_memory(void) {
  while (line_memory_count > 0) free(line_memory[--line_memory_count]);
}

/* --- JSON: a field that is left out leaves the default as it is --- */

static json_t *field(json_t *object, const char *name, json_type type) {
  json_t *value = json_object_get(object, name);
  if (value != NULL && json_typeof(value) != type) die("\"%s\" is of another type", name);
  return value;
}

static uint64_t parse_big(json_t *value) {
  char *end = NULL;
  const char *text = json_string_value(value);
  if (text == NULL || *text == 0) die("a decimal string was expected");
  const uint64_t number = strtoull(text, &end, 10);
  if (*end != 0) die("\"%s\" is no number", text);
  return number;
}

static float parse_float(json_t *value) {
  float result;
  const uint32_t bits = (uint32_t)json_integer_value(value);
  memcpy(&result, &bits, sizeof(result));
  return result;
}

static void get_big(json_t *object, const char *name, uint64_t *out) {
  json_t *value = field(object, name, JSON_STRING);
  if (value != NULL) *out = parse_big(value);
}

static int64_t number_or(json_t *object, const char *name, int64_t otherwise) {
  json_t *value = field(object, name, JSON_INTEGER);
  return value != NULL ? json_integer_value(value) : otherwise;
}

static void get_u32(json_t *object, const char *name, uint32_t *out) {
  *out = (uint32_t)number_or(object, name, *out);
}

static void get_i32(json_t *object, const char *name, int32_t *out) {
  *out = (int32_t)number_or(object, name, *out);
}

static void get_float(json_t *object, const char *name, float *out) {
  json_t *value = field(object, name, JSON_INTEGER);
  if (value != NULL) *out = parse_float(value);
}

static uint64_t *bigs(json_t *list, size_t *count) {
  *count = json_array_size(list);
  uint64_t *result = take(*count, sizeof(*result));
  for (size_t i = 0; i < *count; ++i) result[i] = parse_big(json_array_get(list, i));
  return result;
}

static uint64_t *numbers(json_t *list, size_t *count) {
  *count = json_array_size(list);
  uint64_t *result = take(*count, sizeof(*result));
  for (size_t i = 0; i < *count; ++i) {
    result[i] = (uint64_t)json_integer_value(json_array_get(list, i));
  }
  return result;
}

static float *floats(json_t *list, size_t *count) {
  *count = json_array_size(list);
  float *result = take(*count, sizeof(*result));
  for (size_t i = 0; i < *count; ++i) result[i] = parse_float(json_array_get(list, i));
  return result;
}

static size_t index_of(json_t *object, const char *name, size_t limit) {
  const int64_t index = number_or(object, name, -1);
  if (index < 0 || (uint64_t)index >= limit) die("\"%s\" is missing or out of range", name);
  return (size_t)index;
}

static uint64_t step_of(json_t *line) {
  uint64_t step = 0;
  get_big(line, "step", &step);
  return step;
}

static frugal_optimizer optimizer_of(json_t *line) {
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  json_t *json = field(line, "optimizer", JSON_OBJECT);
  get_i32(json, "kind", &o.kind);
  get_float(json, "lr", &o.lr);
  get_float(json, "eps", &o.eps);
  get_float(json, "momentum", &o.momentum);
  get_float(json, "dampening", &o.dampening);
  get_float(json, "beta1", &o.beta1);
  get_float(json, "beta2", &o.beta2);
  get_float(json, "rho", &o.rho);
  get_float(json, "ftrl_lambda1", &o.ftrl_lambda1);
  get_float(json, "ftrl_lambda2", &o.ftrl_lambda2);
  get_float(json, "ftrl_beta", &o.ftrl_beta);
  get_float(json, "initial_accumulator", &o.initial_accumulator);
  get_float(json, "weight_decay_l2", &o.weight_decay_l2);
  get_float(json, "weight_decay", &o.weight_decay);
  get_float(json, "clip_value", &o.clip_value);
  get_float(json, "clip_norm", &o.clip_norm);
  get_float(json, "weight_bound", &o.weight_bound);
  get_float(json, "grad_scale", &o.grad_scale);
  get_u32(json, "flags", &o.flags);
  return o;
}

/* --- Ops --- */

typedef struct op_list {
  frugal_op *ops;
  size_t *tables, *keys, *rows;
  size_t count;
} op_list;

static op_list ops_of(json_t *line) {
  json_t *list = field(line, "ops", JSON_ARRAY);
  op_list result;
  result.count = json_array_size(list);
  result.ops = take(result.count, sizeof(*result.ops));
  result.tables = take(result.count, sizeof(*result.tables));
  result.keys = take(result.count, sizeof(*result.keys));
  result.rows = take(result.count, sizeof(*result.rows));
  for (size_t i = 0; i < result.count; ++i) {
    json_t *json = json_array_get(list, i);
    frugal_op *op = &result.ops[i];
    frugal_op_init(op);
    const size_t table = index_of(json, "table", table_count);
    op->table = tables[table];
    json_t *keys = field(json, "keys", JSON_ARRAY);
    if (keys != NULL) op->keys = bigs(keys, &op->count);
    size_t count = op->count;
    if (json_object_get(json, "batch") != NULL) {
      const declaration *declared = &declarations[index_of(json, "batch", declaration_count)];
      op->batch = declared->batch;
      get_u32(json, "part", &op->part);
      if (op->part >= declared->parts) die("the declaration has no such part");
      if (keys == NULL) count = declared->part_keys[op->part];
    }
    get_i32(json, "pooling", &op->pooling);
    size_t ignored;
    json_t *offsets = field(json, "offsets", JSON_ARRAY);
    if (offsets != NULL) {
      op->offsets = numbers(offsets, &op->bags);
      --op->bags;
    }
    json_t *weights = field(json, "weights", JSON_ARRAY);
    if (weights != NULL) op->weights = floats(weights, &ignored);
    if (json_is_true(json_object_get(json, "weight_grads"))) {
      op->weight_grads_out = take(count, sizeof(float));
    }
    json_t *grads = field(json, "grads", JSON_ARRAY);
    if (grads != NULL) op->grads = floats(grads, &ignored);
    if (json_object_get(json, "padding_key") != NULL) {
      get_big(json, "padding_key", &op->padding_key);
      op->flags |= FRUGAL_OP_PADDING;
    }
    result.tables[i] = table;
    result.keys[i] = count;
    result.rows[i] = op->pooling == FRUGAL_POOL_NONE ? count : op->bags;
  }
  return result;
}

static void give_rows(op_list *list, int with_found) {
  for (size_t i = 0; i < list->count; ++i) {
    list->ops[i].rows_out = take(list->rows[i] * dims[list->tables[i]], sizeof(float));
    if (with_found) list->ops[i].found_out = take(list->keys[i], 1);
  }
}

static void add_rows(const op_list *list) {
  for (size_t i = 0; i < list->count; ++i) {
    const frugal_op *op = &list->ops[i];
    if (op->found_out != NULL) add_bytes(&outputs, op->found_out, list->keys[i]);
    add_bytes(&outputs, op->rows_out, list->rows[i] * dims[list->tables[i]] * sizeof(float));
  }
}

/* --- Lines --- */

static frugal_trainer **rank_of(json_t *line) {
  return &trainers[index_of(line, "rank", kMaxRanks)];
}

static int32_t open_engine(json_t *line) {
  frugal_config config = FRUGAL_CONFIG_INIT;
  get_u32(line, "world_size", &config.world_size);
  get_u32(line, "lookahead", &config.lookahead);
  get_u32(line, "flush_threads", &config.flush_threads);
  get_i32(line, "flush_mode", &config.flush_mode);
  get_big(line, "staleness", &config.staleness);
  get_big(line, "pending_bytes", &config.pending_bytes);
  get_big(line, "seed", &config.seed);
  config.service = getenv("FRUGAL_SERVICE");
  return frugal_open(&config, &engine);
}

static int32_t create_table(json_t *line) {
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = json_string_value(field(line, "name", JSON_STRING));
  get_i32(line, "key_space", &config.key_space);
  get_big(line, "rows", &config.rows);
  get_u32(line, "dim", &config.dim);
  get_i32(line, "init", &config.init);
  get_float(line, "init_a", &config.init_a);
  get_float(line, "init_b", &config.init_b);
  get_i32(line, "nan_policy", &config.nan_policy);
  get_u32(line, "flags", &config.flags);
  config.optimizer = optimizer_of(line);
  frugal_table *table = NULL;
  const int32_t status = frugal_table_create(engine, &config, &table);
  if (status != FRUGAL_OK) return status;
  const size_t number = index_of(line, "table", kMaxTables);
  frugal_table_info info;
  info.struct_size = sizeof(info);
  tables[number] = table;
  dims[number] = config.dim;
  if (frugal_table_describe(table, &info) != FRUGAL_OK) die("the table cannot be described");
  row_floats[number] = config.dim + (uint32_t)info.state_floats;
  table_count = number + 1;
  return FRUGAL_OK;
}

static int32_t create_trainer(json_t *line) {
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  float ratio = 0;
  get_u32(line, "rank", &config.rank);
  get_float(line, "cache_ratio", &ratio);
  config.cache_ratio = ratio;
  return frugal_trainer_create(engine, &config, rank_of(line));
}

static int32_t prefetch(json_t *line) {
  const op_list list = ops_of(line);
  declaration declared = {NULL, NULL, list.count};
  const int32_t status =
      frugal_prefetch(*rank_of(line), step_of(line), list.ops, list.count, &declared.batch);
  if (status != FRUGAL_OK) return status;
  const int64_t number = number_or(line, "batch", -1);
  if (number < 0) die("\"batch\" is missing");
  if ((size_t)number >= declaration_count) {
    declarations = realloc(declarations, ((size_t)number + 1) * sizeof(*declarations));
    if (declarations == NULL) die("out of memory");
    memset(declarations + declaration_count, 0,
           ((size_t)number + 1 - declaration_count) * sizeof(*declarations));
    declaration_count = (size_t)number + 1;
  }
  declared.part_keys = calloc(list.count + 1, sizeof(*declared.part_keys));
  if (declared.part_keys == NULL) die("out of memory");
  memcpy(declared.part_keys, list.keys, list.count * sizeof(*declared.part_keys));
  declarations[number] = declared;
  return FRUGAL_OK;
}

static int32_t lookup(json_t *line) {
  op_list list = ops_of(line);
  give_rows(&list, 0);
  const int32_t status = frugal_lookup(*rank_of(line), list.ops, list.count);
  if (status == FRUGAL_OK) add_rows(&list);
  return status;
}

static int32_t push(json_t *line) {
  const op_list list = ops_of(line);
  const int32_t status = frugal_push_grad(*rank_of(line), list.ops, list.count);
  for (size_t i = 0; status == FRUGAL_OK && i < list.count; ++i) {
    if (list.ops[i].weight_grads_out == NULL) continue;
    add_bytes(&outputs, list.ops[i].weight_grads_out, list.keys[i] * sizeof(float));
  }
  return status;
}

static int32_t read_rows(json_t *line) {
  op_list list = ops_of(line);
  give_rows(&list, 1);
  frugal_trainer *trainer = json_object_get(line, "rank") != NULL ? *rank_of(line) : NULL;
  const int32_t status = frugal_read(engine, trainer, list.ops, list.count, FRUGAL_TIMEOUT_DEFAULT);
  if (status == FRUGAL_OK) add_rows(&list);
  return status;
}

static int32_t get(json_t *line) {
  const size_t table = index_of(line, "table", table_count);
  uint32_t flags = 0;
  get_u32(line, "flags", &flags);
  size_t count;
  const uint64_t *keys = bigs(field(line, "keys", JSON_ARRAY), &count);
  const size_t width = flags & FRUGAL_WITH_STATE ? row_floats[table] : dims[table];
  float *rows = take(count * width, sizeof(float));
  uint8_t *found = take(count, 1);
  const int32_t status = frugal_get(tables[table], keys, count, flags, rows, 0, found);
  if (status != FRUGAL_OK) return status;
  add_bytes(&outputs, found, count);
  for (size_t i = 0; i < count; ++i) {
    if (found[i]) add_bytes(&outputs, rows + i * width, width * sizeof(float));
  }
  return FRUGAL_OK;
}

static int32_t put(json_t *line) {
  const size_t table = index_of(line, "table", table_count);
  uint32_t flags = 0;
  get_u32(line, "flags", &flags);
  size_t count, floats_count;
  const uint64_t *keys = bigs(field(line, "keys", JSON_ARRAY), &count);
  const float *rows = floats(field(line, "rows", JSON_ARRAY), &floats_count);
  return frugal_put(tables[table], keys, count, flags, rows, 0);
}

static int32_t delete_rows(json_t *line) {
  size_t count;
  const uint64_t *keys = bigs(field(line, "keys", JSON_ARRAY), &count);
  return frugal_delete(tables[index_of(line, "table", table_count)], keys, count, NULL);
}

static int32_t set_optimizer(json_t *line) {
  const frugal_optimizer optimizer = optimizer_of(line);
  uint64_t first_step = 0;
  get_big(line, "first_step", &first_step);
  return frugal_table_set_optimizer(tables[index_of(line, "table", table_count)], first_step,
                                    &optimizer);
}

static int compare_keys(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

static int32_t hash(void) {
  uint64_t all = UINT64_C(14695981039346656037);
  for (size_t t = 0; t < table_count; ++t) {
    uint64_t count, cursor = 0;
    int32_t status = frugal_table_count(tables[t], &count);
    if (status != FRUGAL_OK) return status;
    uint64_t *keys = take(count, sizeof(*keys));
    size_t n = 1;
    for (size_t done = 0; done < count && n > 0; done += n) {
      status = frugal_table_keys(tables[t], &cursor, keys + done, count - done, &n);
      if (status != FRUGAL_OK) return status;
    }
    if (n == 0) die("table %zu has fewer keys than it counts", t);
    qsort(keys, count, sizeof(*keys), compare_keys);
    float *rows = take(count * row_floats[t], sizeof(*rows));
    status = frugal_get(tables[t], keys, count, FRUGAL_WITH_STATE, rows, 0, NULL);
    if (status != FRUGAL_OK) return status;
    add_bytes(&all, &count, sizeof(count));
    for (size_t i = 0; i < count; ++i) {
      add_bytes(&all, &keys[i], sizeof(keys[i]));
      add_bytes(&all, rows + i * row_floats[t], row_floats[t] * sizeof(*rows));
    }
  }
  printf("hash %u %016llx %016llx\n", hashes++, (unsigned long long)outputs,
         (unsigned long long)all);
  return FRUGAL_OK;
}

static int32_t step_begin(json_t *line) {
  return frugal_step_begin(*rank_of(line), step_of(line),
                           number_or(line, "timeout_ms", FRUGAL_TIMEOUT_DEFAULT));
}

static int32_t step_end(json_t *line) {
  uint32_t flags = 0;
  get_u32(line, "flags", &flags);
  return frugal_step_end(*rank_of(line), step_of(line), flags);
}

static int32_t cancel(json_t *line) {
  frugal_batch *batch = declarations[index_of(line, "batch", declaration_count)].batch;
  return frugal_prefetch_cancel(*rank_of(line), batch);
}

static int32_t step_abort(json_t *line) { return frugal_step_abort(*rank_of(line)); }

static int32_t close_trainer(json_t *line) { return frugal_trainer_close(*rank_of(line)); }

static int32_t flush(json_t *line) {
  (void)line;
  return frugal_flush(engine, FRUGAL_TIMEOUT_DEFAULT);
}

static int32_t hash_line(json_t *line) {
  (void)line;
  return hash();
}

/* Another engine goes on from a checkpoint of this one. */
static int32_t resume(json_t *line) {
  static int has_folder;
  const char *folder = getenv("FRUGAL_FOLDER");
  if (folder == NULL) die("FRUGAL_FOLDER is not set");
  uint64_t number;
  int32_t status = has_folder ? FRUGAL_OK : frugal_folder_open(engine, folder, NULL);
  if (status == FRUGAL_OK) status = frugal_checkpoint(engine, NULL, &number);
  if (status == FRUGAL_OK) {
    status = frugal_checkpoint_wait(engine, number, FRUGAL_TIMEOUT_INFINITE, NULL);
  }
  if (status == FRUGAL_OK) status = frugal_close(engine);
  if (status == FRUGAL_OK) status = open_engine(line);
  if (status == FRUGAL_OK) status = frugal_folder_open(engine, folder, NULL);
  has_folder = 1;
  if (status == FRUGAL_OK) status = frugal_restore(engine, NULL, NULL);
  uint64_t cursor = 0;
  for (size_t i = 0; status == FRUGAL_OK && i < table_count; ++i) {
    char name[256];
    size_t size;
    status = frugal_table_next(engine, &cursor, name, sizeof(name), &size);
    if (status == FRUGAL_OK) status = frugal_table_find(engine, name, &tables[i]);
  }
  return status;
}

static int32_t close_engine(json_t *line) {
  (void)line;
  return frugal_close(engine);
}

static const struct {
  const char *name;
  int32_t (*call)(json_t *line);
} calls[] = {
    {"open", open_engine},
    {"table", create_table},
    {"trainer", create_trainer},
    {"set_optimizer", set_optimizer},
    {"prefetch", prefetch},
    {"cancel", cancel},
    {"begin", step_begin},
    {"lookup", lookup},
    {"push", push},
    {"read", read_rows},
    {"end", step_end},
    {"abort", step_abort},
    {"get", get},
    {"put", put},
    {"delete", delete_rows},
    {"flush", flush},
    {"hash", hash_line},
    {"resume", resume},
    {"close_trainer", close_trainer},
    {"close", close_engine},
};

static void run_line(const char *text) {
  json_error_t error;
  json_t *line = json_loads(text, 0, &error);
  if (line == NULL) die("%s", error.text);
  const char *what = json_string_value(json_object_get(line, "do"));
  const char *expected = json_string_value(json_object_get(line, "status"));
  if (expected == NULL) expected = "FRUGAL_OK";
  size_t i = 0;
  const size_t count = sizeof(calls) / sizeof(*calls);
  while (i < count && (what == NULL || strcmp(what, calls[i].name) != 0)) ++i;
  if (i == count) die("\"%s\" is nothing to do", what == NULL ? "" : what);
  const int32_t status = calls[i].call(line);
  if (strcmp(frugal_status_name(status), expected) != 0) {
    frugal_error last;
    frugal_last_error(&last);
    die("%s returned %s, expected %s%s%s", what, frugal_status_name(status), expected,
        status != FRUGAL_OK ? ": " : "", status != FRUGAL_OK ? last.message : "");
  }
  json_decref(line);
  free_line_memory();
}

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s SCRIPT\n", argv[0]);
    return 2;
  }
  FILE *script = fopen(argv[1], "r");
  if (script == NULL) {
    perror(argv[1]);
    return 2;
  }
  char *text = NULL;
  size_t capacity = 0;
  while (getline(&text, &capacity, script) >= 0) {
    ++line_number;
    run_line(text);
    if (getenv("FRUGAL_TURNS") != NULL) {
      puts("done");
      fflush(stdout);
    }
  }
  free(text);
  fclose(script);
  for (size_t i = 0; i < declaration_count; ++i) free(declarations[i].part_keys);
  free(declarations);
  return 0;
}
