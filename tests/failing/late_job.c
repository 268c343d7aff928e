/* A program that loads the library when it is running, as Python does, without the C++ library
 * being there already; made to meet failures (failing.h). Threads make their first calls: one that
 * only queries, one that gives a wrong handle, one that trains. The last one closes the engine,
 * unloads the library, and ends after that.
 *
 *   late_job LIBRARY [--served]   the engine is served, too, and a thread attaches to it and reads;
 *                                 when the library is loaded no pthread key is left for a while
 */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "frugal.h"

#define ROWS 300
#define DIM 4
/* clang-format off */
#define CALLS(X)                                                                                 \
  X(frugal_open) X(frugal_close) X(frugal_health) X(frugal_last_error) X(frugal_status_name)     \
  X(frugal_committed_step) X(frugal_table_create) X(frugal_trainer_create) X(frugal_step_begin)  \
  X(frugal_lookup) X(frugal_push_grad) X(frugal_step_end) X(frugal_get) X(frugal_serve)          \
  X(frugal_table_find)
/* clang-format on */

static struct {
#define POINTER(name) __typeof__(&name) name;
  CALLS(POINTER)
} lib;
static void (*enter)(void), (*leave)(void), (*over)(void);
static uint64_t (*fired)(void);
static void* library;
static frugal_engine* engine;
static uint64_t told;
static char address[64]; /* of the service; empty: it is not served */

static void end(int status, const char* what, const char* call, const char* why) {
  char lock[80];
  snprintf(lock, sizeof lock, "%s.lock", address);
  if (*address) unlink(address), unlink(lock);
  printf("%s %s: %s\n", what, call, why);
  fflush(stdout);
  _exit(status);
}

/* Whether a call is to be made again, as (embedded_job.cpp) programs do. */
static int again(const char* call, int32_t status, int* tries) {
  frugal_error error;
  char why[700];
  lib.frugal_last_error(&error);
  if (status == FRUGAL_OK) return 0;
  ++told;
  snprintf(why, sizeof why, "%s: %s", lib.frugal_status_name(status), error.message);
  if (!fired()) end(1, "wrong without a failure", call, why);
  if (engine && lib.frugal_health(engine) != FRUGAL_OK) end(3, "unhealthy", call, why);
  if (status != FRUGAL_ERR_OUT_OF_MEMORY && !(*address && status == FRUGAL_ERR_UNSUPPORTED))
    end(1, "wrong status of", call, why);
  if (error.status != status || strlen(error.message) < 20)
    end(1, "wrong: no message of", call, why);
  if (++*tries == 3) over();
  if (*tries == 8) end(1, "wrong: never succeeds:", call, why);
  return 1;
}
#define AGAIN(name, ...)                      \
  for (int32_t tries = 0, status;;) {         \
    enter();                                  \
    status = lib.name(__VA_ARGS__);           \
    leave();                                  \
    if (!again(#name, status, &tries)) break; \
  }

static void* asks(void* unused) {
  uint64_t step = 0;
  AGAIN(frugal_committed_step, engine, &step)
  return unused;
}

static void* errs(void* unused) {
  frugal_error error;
  uint64_t step = 0;
  int32_t status;
  for (int tries = 0;; ++tries) {
    enter();
    status = lib.frugal_committed_step((const frugal_engine*)1, &step);
    leave();
    if (status == FRUGAL_ERR_BAD_HANDLE) break;
    if (!again("frugal_committed_step of no engine", status, &tries))
      end(1, "wrong:", "no engine", "it succeeds");
  }
  lib.frugal_last_error(&error);
  if (error.status != FRUGAL_ERR_BAD_HANDLE || !strstr(error.message, "handle"))
    end(1, "wrong message of", "no engine", error.message);
  return unused;
}

static void add(uint64_t* digest, const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    *digest = (*digest ^ ((const unsigned char*)data)[i]) * UINT64_C(0x100000001b3);
}

static void* trains(void* digest) {
  frugal_config config = FRUGAL_CONFIG_INIT;
  frugal_table_config rows = FRUGAL_TABLE_CONFIG_INIT;
  frugal_trainer_config rank = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_table* table = NULL;
  frugal_trainer* trainer = NULL;
  static uint64_t keys[ROWS];
  static float values[ROWS * DIM], grads[ROWS * DIM];
  config.flush_threads = 1;
  if (*address) config.backing = FRUGAL_BACKING_SHM;
  AGAIN(frugal_open, &config, &engine)
  if (*address) AGAIN(frugal_serve, engine, address)
  rows.name = "late";
  rows.rows = ROWS;
  rows.dim = DIM;
  rows.init = FRUGAL_INIT_UNIFORM;
  rows.init_b = 1;
  AGAIN(frugal_table_create, engine, &rows, &table)
  AGAIN(frugal_trainer_create, engine, &rank, &trainer)
  for (uint64_t step = 0; step < 3; ++step) {
    frugal_op op = FRUGAL_OP_INIT;
    for (int i = 0; i < ROWS; ++i) keys[i] = (uint64_t)i * (step + 1) % ROWS;
    for (int i = 0; i < ROWS * DIM; ++i) grads[i] = (float)(i % 7);
    op.table = table;
    op.keys = keys;
    op.count = ROWS;
    op.rows_out = values;
    op.grads = grads;
    AGAIN(frugal_step_begin, trainer, step, FRUGAL_TIMEOUT_DEFAULT)
    AGAIN(frugal_lookup, trainer, &op, 1)
    AGAIN(frugal_push_grad, trainer, &op, 1)
    AGAIN(frugal_step_end, trainer, step, 0)
  }
  for (int i = 0; i < ROWS; ++i) keys[i] = (uint64_t)i;
  AGAIN(frugal_get, table, keys, ROWS, 0, values, 0, NULL)
  add(digest, values, sizeof values);
  return digest;
}

/* What a call of an attached process may return, also for a lost connection: it attaches again. */
static int lost(const char* call, int32_t status) {
  frugal_error error;
  int32_t none = 0;
  if (status != FRUGAL_ERR_PEER_LOST && status != FRUGAL_ERR_TIMEOUT &&
      status != FRUGAL_ERR_UNSUPPORTED) {
    const int more = again(call, status, &none);
    if (more && told >= 3) over();
    return more;
  }
  lib.frugal_last_error(&error);
  if (!fired()) end(1, "wrong without a failure", call, error.message);
  if (++told == 3) over();
  if (told > 40) end(1, "wrong: never succeeds:", call, error.message);
  return 1;
}

static void* looks(void* digest) {
  frugal_config config = FRUGAL_CONFIG_INIT;
  frugal_engine* seen;
  frugal_table* table;
  uint64_t keys[ROWS];
  static float rows[ROWS * DIM];
  int32_t status;
  for (int i = 0; i < ROWS; ++i) keys[i] = (uint64_t)(ROWS - 1 - i);
  config.flags = FRUGAL_OBSERVE;
  config.service = address;
  config.timeout_ms = 3000;
  for (int whole = 0; !whole;) {
    seen = NULL;
    enter();
    status = lib.frugal_open(&config, &seen);
    leave();
    if (lost("frugal_open of a service", status)) continue;
    enter();
    status = lib.frugal_table_find(seen, "late", &table);
    leave();
    if (!lost("frugal_table_find", status)) {
      enter();
      status = lib.frugal_get(table, keys, ROWS, 0, rows, 0, NULL);
      leave();
      whole = !lost("frugal_get", status);
    }
    enter();
    status = lib.frugal_close(seen);
    leave();
    if (status != FRUGAL_OK) end(1, "wrong:", "frugal_close of an attached engine", "it fails");
  }
  add(digest, rows, sizeof rows);
  return digest;
}

static void* closes(void* unused) {
  int32_t tries = 0, status;
  do {
    enter();
    status = lib.frugal_close(engine);
    leave();
    if (status == FRUGAL_OK) engine = NULL;
  } while (again("frugal_close", status, &tries));
  dlclose(library);
  return unused;
}

static void in_a_thread(void* (*run)(void*), void* argument) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, run, argument) != 0)
    end(1, "wrong:", "pthread_create", "it fails");
  pthread_join(thread, NULL);
}

/* A thread without a key receives an error, and need not load the library again. */
static void* has_no_key(void* unused) {
  uint64_t step;
  frugal_error error;
  if (lib.frugal_committed_step(NULL, &step) != FRUGAL_ERR_OUT_OF_MEMORY)
    end(1, "wrong status", "frugal_committed_step", "no key is left");
  lib.frugal_last_error(&error);
  if (error.status != FRUGAL_ERR_OUT_OF_MEMORY || !strstr(error.message, "no pthread key"))
    end(1, "wrong message where no key is left", "frugal_committed_step", error.message);
  return unused;
}

int main(int argc, char** argv) {
  static pthread_key_t keys[PTHREAD_KEYS_MAX];
  size_t taken = 0;
  uint64_t digest = UINT64_C(0xcbf29ce484222325);
  *(void**)&enter = dlsym(RTLD_DEFAULT, "failing_enter");
  *(void**)&leave = dlsym(RTLD_DEFAULT, "failing_leave");
  *(void**)&over = dlsym(RTLD_DEFAULT, "failing_over");
  *(void**)&fired = dlsym(RTLD_DEFAULT, "failing_fired");
  if (argc == 3 && strcmp(argv[2], "--served") == 0)
    snprintf(address, sizeof address, "/tmp/frugal-late-%d", (int)getpid());
  if (argc != 2 + (*address != 0) || !enter || !leave || !over || !fired)
    end(2, "usage:", "late_job LIBRARY [--served]", "by sweep.py");
  if (dlopen("libstdc++.so.6", RTLD_NOW | RTLD_NOLOAD))
    end(1, "wrong:", "libstdc++", "it is loaded already");
  while (*address && pthread_key_create(&keys[taken], NULL) == 0) ++taken;
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) end(1, "wrong:", "dlopen", dlerror());
#define FIND(name) *(void**)&lib.name = dlsym(library, #name);
  CALLS(FIND)
  if (*address) in_a_thread(has_no_key, NULL);
  while (taken > 0) pthread_key_delete(keys[--taken]);
  in_a_thread(trains, &digest);
  in_a_thread(asks, NULL);
  in_a_thread(errs, NULL);
  if (*address) in_a_thread(looks, &digest);
  in_a_thread(closes, NULL);
  printf("ok %016" PRIx64 " told %" PRIu64 "\n", digest, told);
  fflush(stdout);
  if (*address) unlink(strcat(address, ".lock"));
  return 0;
}
