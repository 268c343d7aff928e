/*
 * frugal.h - the whole public interface of Frugal.
 *
 * Frugal is an embeddable engine for training embedding tables. Tables may be larger than the
 * memory of a GPU. The result is exactly that of synchronous training.
 *
 * This file is C99, and valid in every later C and C++. What is not in it is not interface.
 *
 * The step protocol
 *
 *     frugal_open -> frugal_table_create -> one frugal_trainer per rank
 *     every trainer, for s = first, first + 1, ...:
 *         frugal_prefetch(s + L, keys)      declares the keys of a later step (asynchronous),
 *                                           L at most frugal_config.lookahead
 *         frugal_step_begin(s)              the gate: waits until the rows of s are up to date
 *         frugal_lookup(keys, out)          rows for the forward pass
 *         frugal_push_grad(keys, grads)     gradients of the backward pass
 *         frugal_step_end(s)
 *     frugal_read of each rank              waits until its last step has committed
 *     frugal_flush / frugal_close
 *
 * With staleness 0 a lookup at step s returns, on every rank, each row after exactly all updates
 * of the steps before s. The final tables are bit for bit those of a one-thread loop. Neither the
 * number of threads, the cache size, the window nor timing changes them. docs/arithmetic.md states
 * the arithmetic down to the order of each addition.
 *
 * Sections: 0 Conventions, 1 Status and error, 2 Engine, 3 Table, 4 Rows between steps, 5 Trainer,
 * 6 Op and batch, 7 Step, 8 Processes, 9 GPU, 10 Observation, 11 Checkpoint. Each begins with the
 * life of what it is about.
 *
 * ---------------------------------------------------------------------------------------------
 * 0. Conventions
 * ---------------------------------------------------------------------------------------------
 *
 * Comments     The comment of a function is one sentence, then facts, then a list. The list has
 *              Returns (statuses without FRUGAL_ERR_), Waits, Threads, Owner and Since.
 * Since        A function without the entry Since is of version 0.1.
 * Status       A function that can fail returns int32_t: FRUGAL_OK (0), or a negative status.
 *              The value of a status is fixed forever.
 * Message      frugal_last_error gives the message of the calling thread's last failure.
 *              A message begins with the table that it is about.
 *              Of several ops it names the op first; the first is op 0.
 *              It has the value that was given, and what would do.
 * Handle       Handles are typed, opaque and never addresses. A handle that is closed, or never
 *              was one, is BAD_HANDLE. Functions that close or drop accept NULL.
 * Parameters   The order is: handle, inputs, outputs. Outputs are named *_out.
 *              They are written only on success, unless the function says otherwise.
 * struct_size  Structs that may grow begin with it. The struct's INIT macro and its init function
 *              set it and every default, and give the same bytes. Structs that only describe
 *              have no such macro: the caller sets struct_size alone, to the struct's sizeof.
 *              A struct_size that this library does not know is an error, and so is an unknown
 *              flag.
 * Threads      Any number of threads may use a `const` handle at once.
 *              A call with a trainer that is not const: one thread at a time for that trainer,
 *              which need not be the thread that created it.
 *              Different trainers are independent.
 *              "any" in a comment: any number of threads may make the call at once.
 * Memory       The library reads and writes the caller's buffers during the call only, and keeps
 *              no pointer into them. For buffers on a GPU see section 9.
 *              A function that lends memory of the library says so.
 * Time-out     Every wait has a time-out in milliseconds. 0 polls.
 *              FRUGAL_TIMEOUT_DEFAULT is the engine's frugal_config.timeout_ms.
 *              FRUGAL_TIMEOUT_INFINITE waits forever.
 *              A call that returns TIMEOUT took nothing and can be made again. Its message names
 *              what it waited for.
 *              Time-outs use the steady clock: setting the system's clock changes none.
 *              Waits for work that a GPU already has may have no limit. The call must know its
 *              result, or its memory is to be used again (aborts, closing, failed calls).
 * Cancelling   pthread_cancel does not interrupt a call, though the call may wait. The thread ends
 *              at its next cancellation point after the call.
 * Process      The library prints nothing, installs no signal handler and never exits.
 *              In a child made by fork() every call on the parent's engine returns FORKED.
 *
 * Statuses that every function may return, so that no list of Returns repeats them:
 *
 *     BAD_HANDLE        the handle is closed, or never was one
 *     INVALID_ARGUMENT  a null pointer or an invalid time-out
 *     OUT_OF_MEMORY     no memory for the call itself
 *     FORKED            the engine belongs to the parent of this process
 *     INTERNAL          a bug of the library
 *     CLOSED            the engine, or the trainer, was closed while the call waited
 *     UNHEALTHY         a background failure stopped the engine: frugal_health
 *     DEVICE            of a trainer on a GPU: section 9
 *     UNSUPPORTED       of a trainer on a GPU, whose stream is being captured: section 9
 *     PEER_LOST         with a service: section 8
 *
 * CLOSED and UNHEALTHY are of calls on an open engine. These return neither, since they only
 * report: frugal_health, frugal_committed_step, frugal_table_find, frugal_table_next,
 * frugal_table_describe, frugal_get_stats, frugal_metrics, frugal_trace_start, frugal_trace_stop.
 *
 * Limits:
 *
 *     ops of a call                                    2^20
 *     keys of an op, or of a call between steps        2^32 - 2
 *     bags of an op                                    2^32 - 2
 *     rows of a table                                  1..2^32 - 2
 *     elements of a row                                1..65536
 *     bytes of a table's name                          1..255
 *     bytes of a checkpoint's name                     0..255
 *     checkpoints whose results are known              64
 *     ranks (world_size)                               1..4096
 *     flush threads                                    0..256
 *     lookahead                                        0..FRUGAL_MAX_LOOKAHEAD
 *     number of a step                                 at most 2^64 - 66
 *     finite staleness                                 above 19 it counts as 19
 *     steps that a rank is past the next commit        at most staleness; ASYNC: 61
 *     batches that a trainer declares for one step     4096; 8192 with its rank's former trainers
 *     optimizer changes that wait for later steps      4096 of a table
 *     pending updates before all gates flush           pending_bytes; or 5/4 of the last step's,
 *                                                      but at least 4 MiB, if that is less
 *     step that its commit writes (mode AUTO)          below 256 KiB of rows
 *     events of a trace                                1..2^26; with FRUGAL_OBSERVE 2^19
 *     engines that a process has open at a controller  32
 *     trainers that lost their ranks, not closed       16 of a process
 *     delay of a controller's reply                    the time-out and 5 s
 *     read-out while a controller stops                waits 2 s; needs Linux 5.3
 *     stack of a thread that calls                     at least 64 KiB; no call takes half of it
 *     lookups that lookup_ns measures                  1 of 17, if they are small
 */
#ifndef FRUGAL_H
#define FRUGAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define FRUGAL_API __attribute__((visibility("default")))
#else
#define FRUGAL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FRUGAL_VERSION_MAJOR 0
#define FRUGAL_VERSION_MINOR 1
#define FRUGAL_VERSION_PATCH 0

/* ---------------------------------------------------------------------------------------------
 * 1. Status and error
 * ---------------------------------------------------------------------------------------------
 *
 * Error   Every failing call sets the calling thread's error. frugal_last_error reads it.
 *         The message is valid until this thread's next failing call.
 *         Each thread has its own.
 */

typedef enum frugal_status {
  FRUGAL_OK = 0,
  /* A null pointer, a value out of its range, or an unknown flag. */
  FRUGAL_ERR_INVALID_ARGUMENT = -1,
  /* A handle that is closed, was never opened, or is of another kind. */
  FRUGAL_ERR_BAD_HANDLE = -2,
  /* A config struct of a newer or unknown version. */
  FRUGAL_ERR_STRUCT_SIZE = -3,
  /* Memory, or the engine's host_bytes, is exhausted. Memory may also be that of a GPU, or memory
   * that can be pinned or shared. */
  FRUGAL_ERR_OUT_OF_MEMORY = -4,
  /* An id of a dense table is not in 0..rows-1. */
  FRUGAL_ERR_KEY_OUT_OF_RANGE = -5,
  /* The new keys of the call do not all fit. */
  FRUGAL_ERR_TABLE_FULL = -6,
  /* A table of that name, or a trainer of that rank, exists. */
  FRUGAL_ERR_EXISTS = -7,
  /* The step is not the one that must come now. */
  FRUGAL_ERR_STEP_ORDER = -8,
  /* A declared step has begun, or lies beyond the ring. */
  FRUGAL_ERR_STEP_RANGE = -9,
  /* The call belongs between frugal_step_begin and frugal_step_end. */
  FRUGAL_ERR_NOT_IN_STEP = -10,
  /* Another rank aborted the step: begin it again. */
  FRUGAL_ERR_STEP_ABORTED = -11,
  /* A rank is inside a step, or ranks have ended different steps. Also: a process has more open
   * than it may. */
  FRUGAL_ERR_BUSY = -12,
  /* The time-out has passed. The message names what the call waited for: call again. */
  FRUGAL_ERR_TIMEOUT = -13,
  /* A gradient has a NaN and the table rejects them. */
  FRUGAL_ERR_NAN = -14,
  /* The engine belongs to the parent of this process. */
  FRUGAL_ERR_FORKED = -15,
  /* The call is well formed, but this build or machine cannot do it. */
  FRUGAL_ERR_UNSUPPORTED = -16,
  /* There is no such table, engine or trace. */
  FRUGAL_ERR_NOT_FOUND = -17,
  /* A background failure: frugal_health returns which. */
  FRUGAL_ERR_UNHEALTHY = -18,
  /* The object was closed while the call waited. */
  FRUGAL_ERR_CLOSED = -19,
  /* An output buffer is too small; the call reports the size that it needs. */
  FRUGAL_ERR_OVERFLOW = -20,
  /* A bug of the library: please report the message. */
  FRUGAL_ERR_INTERNAL = -21,
  /* There is no such GPU, or it failed: see frugal_error.device_code. */
  FRUGAL_ERR_DEVICE = -22,
  /* A trainer process or the controller is gone; the message says which. */
  FRUGAL_ERR_PEER_LOST = -23,
  /* A disk, a quota or the limit of a file's size is full. The message names the file. */
  FRUGAL_ERR_NO_SPACE = -24,
  /* A read, a write or a sync of a file failed. The message names the file. */
  FRUGAL_ERR_IO = -25,
  /* Bytes of a file are not what was written there. The message names file and offset. */
  FRUGAL_ERR_DAMAGED = -26,
  /* A later version of the library wrote the file; use that version. */
  FRUGAL_ERR_TOO_NEW = -27
} frugal_status;

/* Gives the name of a status, as "FRUGAL_ERR_TIMEOUT".
 *
 * Returns:  a static string, never NULL; "FRUGAL_UNKNOWN" for a value that is no status
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API const char *frugal_status_name(int32_t status);

/* What went wrong in the calling thread's last call that failed. */
typedef struct frugal_error {
  /* Of that call; FRUGAL_OK if none failed yet. */
  int32_t status;
  /* errno of the system call that caused it, or 0. */
  int32_t system_code;
  /* CUDA error that caused it, or 0. */
  int32_t device_code;
  int32_t reserved;
  /* What was wrong and what to do; never NULL. */
  const char *message;
} frugal_error;

/* Reports the calling thread's last failure.
 * It ignores NULL.
 *
 * Returns:  nothing; it fills *error_out
 * Waits:    no
 * Threads:  any
 * Owner:    the message is the library's, and valid until this thread's next failing call
 */
FRUGAL_API void frugal_last_error(frugal_error *error_out);

/* Gives the library's version as "major.minor.patch".
 *
 * Returns:  a static string
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API const char *frugal_version(void);

/* A time-out: the engine's frugal_config.timeout_ms. */
#define FRUGAL_TIMEOUT_DEFAULT ((int64_t)-1)
/* A time-out: none. */
#define FRUGAL_TIMEOUT_INFINITE ((int64_t)-2)
/* Instead of a step: none is committed yet. */
#define FRUGAL_NO_STEP UINT64_MAX

/* ---------------------------------------------------------------------------------------------
 * 2. Engine
 * ---------------------------------------------------------------------------------------------
 *
 * Engine   frugal_open starts it, or attaches to a controller. Its threads work until
 *          frugal_close, which writes all committed updates and frees every table.
 *          A process may open several engines. They share nothing.
 */

/* An opened instance: tables, host memory, background threads. */
typedef struct frugal_engine frugal_engine;

/* When pending updates are written to host rows (P2F, priority-based proactive flushing: FRUGAL
 * section 3.3). */
typedef enum frugal_flush_mode {
  /* The engine chooses between the next two by measured idle time. A small step is written by the
   * frugal_step_end that commits it. Small: below 256 KiB of rows. */
  FRUGAL_FLUSH_AUTO = 0,
  /* All threads, trainers included, apply a step's updates directly after its commit. */
  FRUGAL_FLUSH_AT_ONCE = 1,
  /* Updates wait in a two-level queue by priority. */
  FRUGAL_FLUSH_DEFERRED = 2,
  /* The baseline FRUGAL-SYNC: flush threads write all updates at the step's end, and trainers wait
   * for them. Without flush threads the waiting trainers write. */
  FRUGAL_FLUSH_WRITE_THROUGH = 3,
  /* A baseline: deferred, and the queue is a heap with a lock for each item. */
  FRUGAL_FLUSH_TREE_HEAP = 4
} frugal_flush_mode;

typedef enum frugal_backing {
  /* Anonymous memory with transparent huge pages. */
  FRUGAL_BACKING_PRIVATE = 0,
  /* Shared memory without a name (memfd). */
  FRUGAL_BACKING_SHM = 1
} frugal_backing;

/* Receives a log line. `level`: 0 error, 1 warning, 2 information.
 * The text is valid during the call. Any thread of the engine may call the hook.
 * The hook must not call the library. The engine drops an exception that leaves it. */
typedef void (*frugal_log_fn)(void *context, int32_t level, const char *text);

/* Staleness without bound (ASP). */
#define FRUGAL_STALENESS_ASYNC UINT64_MAX
/* The largest lookahead. */
#define FRUGAL_MAX_LOOKAHEAD 40

typedef struct frugal_config {
  size_t struct_size;
  /* Ranks, 1..4096; default 1. */
  uint32_t world_size;
  /* How many steps after its current one a rank may declare, 0..FRUGAL_MAX_LOOKAHEAD; default 10.
   * A rank's current step is the one that it is inside of, else the one that it begins next. */
  uint32_t lookahead;
  /* Background threads, 0..256; default 1. With 0 the threads that wait do the flushing. */
  uint32_t flush_threads;
  /* frugal_flush_mode; default FRUGAL_FLUSH_AUTO. */
  int32_t flush_mode;
  /* tau: how many steps a lookup may lag. 0 is synchronous and the default. A finite value above
   * 19 counts as 19. FRUGAL_STALENESS_ASYNC has no bound. A rank runs at most `staleness` steps
   * ahead of the first step that is not committed; with FRUGAL_STALENESS_ASYNC at most 61. */
  uint64_t staleness;
  /* Memory for pending updates, which are not yet in the host rows; default 1 GiB. While more than
   * this is pending no step begins, and the gates write. They do so earlier, from 4 MiB on, when a
   * backlog of steps shows that flushing does not keep up. One step's updates may exceed the
   * budget. 0 writes through. */
  uint64_t pending_bytes;
  /* Limit of memory for tables; UINT64_MAX (default) for none. Memory that the engine keeps for
   * later counts too, and gives way to tables. Shared memory between buffers in use does not give
   * way: tables have that much less. */
  uint64_t host_bytes;
  /* What FRUGAL_TIMEOUT_DEFAULT means; 0 or more, or FRUGAL_TIMEOUT_INFINITE. Default 1,800,000
   * (30 minutes). */
  int64_t timeout_ms;
  /* frugal_backing; default FRUGAL_BACKING_PRIVATE. */
  int32_t backing;
  /* 0 or FRUGAL_OBSERVE (section 8). */
  uint32_t flags;
  /* Seed of all initializers; default 0. */
  uint64_t seed;
  /* NULL (default): no log. */
  frugal_log_fn log;
  void *log_context;
  /* Address of a controller to attach to (section 8). NULL (default): the engine is this process's
   * own. Not kept beyond the call. */
  const char *service;
} frugal_config;

#define FRUGAL_CONFIG_INIT                                                                         \
  {                                                                                                \
    sizeof(frugal_config), 1, 10, 1, FRUGAL_FLUSH_AUTO, 0, (uint64_t)1 << 30, UINT64_MAX, 1800000, \
        FRUGAL_BACKING_PRIVATE, 0, 0, NULL, NULL, NULL                                             \
  }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_config_init(frugal_config *config);

/* Opens an engine and starts its threads, or attaches to the engine of another process.
 * It attaches if `service` is set (section 8). All later calls are the same in both cases.
 * `config` NULL means all defaults.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: a field is out of its range
 *           STRUCT_SIZE
 *           OUT_OF_MEMORY
 *           UNSUPPORTED: this build or system cannot attach, or has no suitable shared memory
 *           with a service also:
 *           INVALID_ARGUMENT: `config` asks for another engine than that of the controller
 *           PEER_LOST: no controller serves that address, or it is stopping
 *           NOT_FOUND: with FRUGAL_OBSERVE, and no engine has been opened there
 *           BUSY: this process has 32 engines of that controller open
 *           TIMEOUT: the controller did not reply
 * Waits:    no; with a service for a controller at that address, up to timeout_ms
 * Threads:  any
 * Owner:    the caller closes *engine_out with frugal_close
 */
FRUGAL_API int32_t frugal_open(const frugal_config *config, frugal_engine **engine_out);

/* Waits until every update of every committed step is in the host rows.
 * The calling thread helps with the work.
 *
 * Returns:  FRUGAL_OK
 *           TIMEOUT
 * Waits:    up to timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_flush(const frugal_engine *engine, int64_t timeout_ms);

/* Reports the last step that all ranks have ended.
 * It is FRUGAL_NO_STEP if there is none.
 *
 * Returns:  FRUGAL_OK
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_committed_step(const frugal_engine *engine, uint64_t *step_out);

/* Returns the sticky health of the engine.
 * After a background failure every later call on the engine returns UNHEALTHY.
 * Exhausted host memory is no such failure. The work of a step that lacks memory is done later.
 *
 * Returns:  FRUGAL_OK, or the status of the first background failure
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_health(const frugal_engine *engine);

/* Stops the threads, writes what is pending and frees everything, the tables too.
 * Trainers, tables and batches of the engine become closed handles.
 * A step that some rank is inside of is lost.
 * A step that all ranks have ended is lost if there is no memory to commit it. The log reports it.
 * A checkpoint that is not on disk yet is given up: frugal_checkpoint_wait before waits for it.
 * Attached processes can still read the tables (section 8).
 * Closing needs no memory, except in a thread's first call.
 * It accepts NULL.
 *
 * Returns:  FRUGAL_OK
 *           BAD_HANDLE: also where another thread is closing the engine
 *           OUT_OF_MEMORY: of a thread's first call; nothing has happened, call again
 *           FORKED: in a forked child, where nothing happens
 * Waits:    for calls of other threads to end, and for GPUs; without limit
 * Threads:  any; calls of other threads that wait return CLOSED
 */
FRUGAL_API int32_t frugal_close(frugal_engine *engine);

/* ---------------------------------------------------------------------------------------------
 * 3. Table
 * ---------------------------------------------------------------------------------------------
 *
 * Table   frugal_table_create makes it, or finds the one that another process made with the same
 *         configuration. It exists until frugal_table_drop or frugal_close; a handle does not keep
 *         it alive. Its key space, dim and initializer never change; its optimizer can.
 *
 * Row     A dense row exists from the start. A hashed row exists from its first lookup, push or
 *         put. frugal_put and frugal_delete need all ranks between steps; an aborted step takes
 *         back the rows that it created. Its optimizer state lives and dies with it.
 *
 * Example: a hashed table with Adagrad.
 *
 *     frugal_engine *engine;
 *     frugal_config config = FRUGAL_CONFIG_INIT;
 *     config.world_size = 2;
 *     check(frugal_open(&config, &engine));
 *
 *     frugal_table *users;
 *     frugal_table_config users_config = FRUGAL_TABLE_CONFIG_INIT;
 *     users_config.name = "users";
 *     users_config.key_space = FRUGAL_HASHED;
 *     users_config.rows = 1000000; // at most
 *     users_config.dim = 16;
 *     users_config.optimizer.kind = FRUGAL_ADAGRAD;
 *     check(frugal_table_create(engine, &users_config, &users));
 */

/* Rows of one dimension with optimizer state. */
typedef struct frugal_table frugal_table;

typedef enum frugal_key_space {
  /* Ids 0..rows-1. Every row exists from the start. */
  FRUGAL_DENSE = 0,
  /* Any 64-bit key. A row is created on its first use in training; there are at most `rows`. */
  FRUGAL_HASHED = 1
} frugal_key_space;

typedef enum frugal_dtype { FRUGAL_F32 = 0 } frugal_dtype;

/* Initial values of the elements, from the numbers a (init_a) and b (init_b). Numbers by which some
 * row could get a value that is not finite are INVALID_ARGUMENT. */
typedef enum frugal_init_kind {
  /* a. */
  FRUGAL_INIT_CONSTANT = 0,
  /* [a, b), a <= b. */
  FRUGAL_INIT_UNIFORM = 1,
  /* Mean a, standard deviation b >= 0. */
  FRUGAL_INIT_NORMAL = 2,
  /* The same, within a +- 2 b. */
  FRUGAL_INIT_TRUNCATED_NORMAL = 3,
  /* Uniform in +- a * sqrt(6 / (fan_in + dim)), a >= 0. fan_in is b >= 0, or `rows` if b is 0. */
  FRUGAL_INIT_XAVIER = 4
} frugal_init_kind;

typedef enum frugal_nan_policy {
  /* The default. The push returns NAN and takes nothing. For gradients on a GPU frugal_step_end
   * returns NAN, and the step is undone on all ranks. */
  FRUGAL_NAN_REJECT = 0,
  /* A row whose summed gradient has a NaN is not changed in that step. */
  FRUGAL_NAN_SKIP = 1,
  /* Arithmetic goes on; NaNs are stored as 0x7fc00000. */
  FRUGAL_NAN_ACCEPT = 2
} frugal_nan_policy;

/* Below, g is the summed gradient of a row, w the row, and a square is of each element. The exact
 * order of operations, and the sources, are in docs/arithmetic.md. */
typedef enum frugal_optimizer_kind {
  /* No state. w -= lr * g. */
  FRUGAL_SGD = 0,
  /* dim floats of state: b = momentum * b + (1 - dampening) * g; w -= lr * b. With nesterov
   * w -= lr * (g + momentum * b). */
  FRUGAL_MOMENTUM = 1,
  /* dim floats: a += g^2; w -= lr * g / (sqrt(a) + eps). */
  FRUGAL_ADAGRAD = 2,
  /* 1 float: a += the mean of g^2 over the row's elements; w -= lr / (sqrt(a) + eps) * g. */
  FRUGAL_ROWWISE_ADAGRAD = 3,
  /* Lazy Adam, 2 x dim floats. First m = beta1 * m + (1 - beta1) * g.
   * Then v = beta2 * v + (1 - beta2) * g^2, and w -= alpha * m / (sqrt(v) + eps).
   * alpha is lr with bias correction by step number + 1, or the caller's. */
  FRUGAL_ADAM = 4,
  /* dim floats: v = rho * v + (1 - rho) * g^2; w -= lr * g / (sqrt(v) + eps). */
  FRUGAL_RMSPROP = 5,
  /* 2 x dim floats: z and n, as in FTRL-Proximal. */
  FRUGAL_FTRL = 6
} frugal_optimizer_kind;

/* Hyper-parameters of a table. Its first update fixes the kind and initial_accumulator. All other
 * fields may change for any step that is not committed yet. Every value is finite. A bound holds
 * for the kinds that use the field; a value outside it is INVALID_ARGUMENT. eps and
 * initial_accumulator are 0 or more for every kind. */
typedef struct frugal_optimizer {
  size_t struct_size;
  /* frugal_optimizer_kind; default FRUGAL_SGD. */
  int32_t kind;
  /* Learning rate, 0 or more; FTRL: above 0. Default 0.01. */
  float lr;
  /* Adagrad, row-wise Adagrad, Adam, RMSProp: above 0; default 1e-8. It may be 0 with an
   * initial_accumulator above 0. */
  float eps;
  /* Momentum: mu, 0 or more; default 0.9. */
  float momentum;
  /* Momentum: 0..1; default 0. */
  float dampening;
  /* Adam: [0, 1); default 0.9. */
  float beta1;
  /* Adam: [0, 1); default 0.999. */
  float beta2;
  /* RMSProp: alpha, 0..1; default 0.99. */
  float rho;
  /* FTRL: L1, 0 or more; default 0. */
  float ftrl_lambda1;
  /* FTRL: L2, 0 or more; default 0. */
  float ftrl_lambda2;
  /* FTRL: 0 or more; default 1. */
  float ftrl_beta;
  /* Adagrad, row-wise Adagrad, FTRL's n: state of a new row, 0 or more; default 0. Fixed as the
   * kind is. */
  float initial_accumulator;
  /* Adds l2 * w to the gradient; 0 or more; default 0. */
  float weight_decay_l2;
  /* Decoupled: w -= lr * weight_decay * w after the update; 0 or more; default 0. */
  float weight_decay;
  /* Clips each element to [-c, c]; 0 (default): off. */
  float clip_value;
  /* Clips the row's gradient to L2 norm at most c; 0 (default): off. */
  float clip_norm;
  /* Bounds each weight to [-b, b] after the update; 0 (default): off. */
  float weight_bound;
  /* Multiplies the summed gradient; any value, default 1. */
  float grad_scale;
  /* FRUGAL_OPT_*. */
  uint32_t flags;
} frugal_optimizer;

/* Momentum: Nesterov's form. */
#define FRUGAL_OPT_NESTEROV 1u
/* Divides the sum over ranks by world_size. */
#define FRUGAL_OPT_MEAN_RANKS 2u
/* Adam: lr is the rate of the step as it is. The caller counts steps, and includes both corrections
 * of that count in lr. */
#define FRUGAL_OPT_NO_BIAS_CORRECTION 4u
/* frugal_table_set_optimizer: all rows get the state of new ones. */
#define FRUGAL_OPT_NEW_STATE 8u

#define FRUGAL_OPTIMIZER_INIT                                                                  \
  {                                                                                            \
    sizeof(frugal_optimizer), FRUGAL_SGD, 0.01f, 1e-8f, 0.9f, 0.0f, 0.9f, 0.999f, 0.99f, 0.0f, \
        0.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0                                \
  }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_optimizer_init(frugal_optimizer *optimizer);

typedef struct frugal_table_config {
  size_t struct_size;
  /* 1..255 bytes, unique in the engine. Part of the initial values' seed. */
  const char *name;
  /* frugal_key_space; default FRUGAL_DENSE. */
  int32_t key_space;
  /* frugal_dtype of the rows; default FRUGAL_F32. */
  int32_t dtype;
  /* Dense: the number of ids. Hashed: the most rows. 1..2^32-2. */
  uint64_t rows;
  /* Elements of a row, 1..65536. */
  uint32_t dim;
  /* frugal_init_kind; default FRUGAL_INIT_CONSTANT. */
  int32_t init;
  /* Default 0. */
  float init_a;
  /* Default 0. */
  float init_b;
  /* frugal_nan_policy; default FRUGAL_NAN_REJECT. */
  int32_t nan_policy;
  /* FRUGAL_TABLE_*. */
  uint32_t flags;
  frugal_optimizer optimizer;
} frugal_table_config;

/* Dense: a row gets its memory and initial values at its first use. */
#define FRUGAL_TABLE_LAZY 1u

#define FRUGAL_TABLE_CONFIG_INIT                                                                   \
  {                                                                                                \
    sizeof(frugal_table_config), NULL, FRUGAL_DENSE, FRUGAL_F32, 0, 0, FRUGAL_INIT_CONSTANT, 0.0f, \
        0.0f, FRUGAL_NAN_REJECT, 0, FRUGAL_OPTIMIZER_INIT                                          \
  }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_table_config_init(frugal_table_config *config);

/* Creates a table.
 * The memory of a dense table is taken at once, and its rows are initialized in parallel.
 * The memory of lazy and hashed tables is taken slab by slab.
 * Where processes share the engine, each of them creates its tables.
 * A table of the same configuration that another process or frugal_restore made is then that table.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: a field is out of its range
 *           STRUCT_SIZE
 *           EXISTS: this process has created a table of that name
 *           EXISTS: another process has, with another configuration
 *           OUT_OF_MEMORY
 *           BUSY: a rank is inside a step
 *           UNSUPPORTED: the system has no suitable shared memory
 *           TIMEOUT: with a service; call again, which finds the table if it was made
 * Waits:    for no other thread
 * Threads:  any
 * Owner:    the engine owns the table; the handle ends with frugal_table_drop or frugal_close
 */
FRUGAL_API int32_t frugal_table_create(frugal_engine *engine, const frugal_table_config *config,
                                       frugal_table **table_out);

/* Finds a table by name.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_find(const frugal_engine *engine, const char *name,
                                     frugal_table **table_out);

/* Enumerates tables, also those of other processes and languages.
 * It writes the name of the next table from *cursor on, and moves the cursor; start with 0.
 * The order is that of creation. Tables that are created or dropped meanwhile do not disturb it.
 * *size_out is the size of the name with the 0 that ends it; 0 means the end.
 * Names fit in 256 bytes. name_out may be NULL if capacity is 0.
 * frugal_table_find gives the handle.
 *
 * Returns:  FRUGAL_OK
 *           OVERFLOW: capacity is less than *size_out; no name was written, the cursor is unmoved
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_next(const frugal_engine *engine, uint64_t *cursor, char *name_out,
                                     size_t capacity, size_t *size_out);

typedef struct frugal_table_info {
  /* Set by the caller. */
  size_t struct_size;
  /* Rows that exist now. */
  uint64_t rows;
  /* The configured `rows`. */
  uint64_t capacity;
  /* Bytes of a row's elements: dim * element size. */
  uint64_t value_bytes;
  /* Optimizer state of a row, in floats. */
  uint64_t state_floats;
  /* Memory held now. */
  uint64_t memory_bytes;
  uint32_t dim;
  int32_t key_space;
  int32_t optimizer;
  /* Page size that the rows' memory asks for. */
  uint32_t page_bytes;
} frugal_table_info;

/* Describes a table.
 * info_out->struct_size must be set.
 *
 * Returns:  FRUGAL_OK
 *           STRUCT_SIZE
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_describe(const frugal_table *table, frugal_table_info *info_out);

/* Sets the hyper-parameters from `first_step` on, until the first_step of another change.
 * The order of the calls does not matter. After a change for 10 and then one for 5, that of 5 holds
 * in the steps 5 to 9. Of two changes for the same first_step the later call counts.
 *
 * The kind and initial_accumulator are the table's. Other ones are accepted until a step that
 * updates the table is committed, or a row is put with state. After that they need
 * FRUGAL_OPT_NEW_STATE.
 *
 * Another kind or initial_accumulator, and that flag, are a change between steps, as frugal_put is.
 * Pending updates are written first. Rows keep their values, and all get the state of new ones.
 * Every step that is not committed gets what this call gives; earlier changes for such steps are
 * gone. state_floats changes with the kind. An attached process maps the new state in its next call
 * or step that needs it.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: a value is out of its range, or needs FRUGAL_OPT_NEW_STATE
 *           INVALID_ARGUMENT: 4096 changes of the table wait for steps that are not committed
 *           STRUCT_SIZE
 *           STEP_RANGE: first_step is committed
 *           of a change between steps also, and then the old optimizer holds:
 *           BUSY, TIMEOUT, OUT_OF_MEMORY
 * Waits:    no; a change between steps for pending updates, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_set_optimizer(frugal_table *table, uint64_t first_step,
                                              const frugal_optimizer *optimizer);

/* The bytes that a table with all of its rows takes at most, at any time. `values`, `state` and
 * `index` count against host_bytes; with shared memory, idle buffers count there too. Declared keys
 * and pending updates (pending_bytes) are not included, since they depend on the batches. */
typedef struct frugal_memory {
  /* Host rows. */
  uint64_t values;
  /* Optimizer state. */
  uint64_t state;
  /* Hashed: keys, existence bytes, and the hash index at its largest. The index is largest while it
   * is copied to a larger one. Lazy: existence bytes. */
  uint64_t index;
  /* Flat index of rows, 8 bytes a row, where updates can be deferred. They can in any mode but
   * at-once and write-through, with staleness > 0, and with a cache. */
  uint64_t window;
  /* One trainer's device cache, its index included. */
  uint64_t cache;
  uint64_t total;
} frugal_memory;

/* Computes the bytes that a table of an engine would take.
 * It opens and reserves nothing. `engine_config` NULL means all defaults.
 * The table's name may be NULL.
 * `cache_rows` is the number of rows of this table in one trainer's device cache.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: a field is out of its range
 *           STRUCT_SIZE
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_memory_needed(const frugal_config *engine_config,
                                        const frugal_table_config *table_config,
                                        uint64_t cache_rows, frugal_memory *memory_out);

/* Drops a table and frees its memory.
 * Declared batches lose their part of it.
 * If another process has dropped the table, this call releases the handle only.
 * It accepts NULL.
 *
 * Returns:  FRUGAL_OK
 *           BUSY: a rank is inside a step, or ranks have ended different ones
 *           OUT_OF_MEMORY or TIMEOUT: call again; what is done stays done
 * Waits:    for pending updates and other calls between steps, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_drop(frugal_table *table);

/* ---------------------------------------------------------------------------------------------
 * 4. Rows between steps
 * ---------------------------------------------------------------------------------------------
 *
 * These calls see every committed step. They need all ranks between steps: no rank is inside a
 * step, and all that have begun one have ended the same one. Else they return BUSY. Before the
 * first step they are allowed. No step begins during such a call.
 */

/* Rows carry their optimizer state: dim floats, then state_floats. */
#define FRUGAL_WITH_STATE 1u
/* Of frugal_get alone: rows as of the last committed step, at any time. Ranks may be inside steps.
 * A step that they complete meanwhile is committed when the call returns. A hashed row that an
 * uncommitted step has created has its initial values. */
#define FRUGAL_COMMITTED 2u

/* Reads `count` rows.
 * Row i is at byte i * row_stride of rows_out; stride 0 means packed.
 * For a missing row of a hashed table its part of rows_out is left untouched.
 * found_out[i] is 1 if the row exists, else 0; found_out may be NULL.
 * It creates nothing.
 *
 * Returns:  FRUGAL_OK, also when keys are missing
 *           INVALID_ARGUMENT: flags, count or row_stride
 *           KEY_OUT_OF_RANGE
 *           BUSY: not between steps, and flags is without FRUGAL_COMMITTED
 *           TIMEOUT
 * Waits:    for pending updates of these rows, and other calls between steps, up to the engine's
 *           timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_get(const frugal_table *table, const uint64_t *keys, size_t count,
                              uint32_t flags, float *rows_out, size_t row_stride,
                              uint8_t *found_out);

/* Writes `count` rows, and creates those that are missing.
 * Without FRUGAL_WITH_STATE a row gets the optimizer state of a new one.
 * If a key comes twice its last row stays.
 * Cached copies are dropped.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: flags, count or row_stride
 *           KEY_OUT_OF_RANGE
 *           TABLE_FULL or OUT_OF_MEMORY: nothing is written
 *           BUSY, TIMEOUT
 * Waits:    for all pending updates of the engine, up to its timeout_ms; for a checkpoint's disk
 * Threads:  any
 */
FRUGAL_API int32_t frugal_put(frugal_table *table, const uint64_t *keys, size_t count,
                              uint32_t flags, const float *rows, size_t row_stride);

/* Deletes rows.
 * Rows of a dense table return to their initial value and state.
 * Missing keys are ignored. *deleted_out counts the rows that existed; it may be NULL.
 *
 * Returns:  FRUGAL_OK
 *           KEY_OUT_OF_RANGE
 *           BUSY, TIMEOUT
 * Waits:    for all pending updates of the engine, up to its timeout_ms; for a checkpoint's disk
 * Threads:  any
 */
FRUGAL_API int32_t frugal_delete(frugal_table *table, const uint64_t *keys, size_t count,
                                 uint64_t *deleted_out);

/* Counts the rows that exist.
 *
 * Returns:  FRUGAL_OK
 *           BUSY, TIMEOUT
 * Waits:    for other calls between steps, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_count(const frugal_table *table, uint64_t *count_out);

/* Enumerates keys.
 * It writes up to `capacity` keys of existing rows from *cursor on, and moves the cursor; start
 * with 0. With a capacity above 0, *count_out 0 means the end.
 * The order is the rows' internal one. It changes when rows are created or deleted.
 *
 * Returns:  FRUGAL_OK
 *           BUSY, TIMEOUT
 * Waits:    for other calls between steps, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_table_keys(const frugal_table *table, uint64_t *cursor,
                                     uint64_t *keys_out, size_t capacity, size_t *count_out);

/* ---------------------------------------------------------------------------------------------
 * 5. Trainer
 * ---------------------------------------------------------------------------------------------
 *
 * Trainer   frugal_trainer_create joins as a rank. Steps commit only when every rank has joined
 *           once. frugal_trainer_close leaves: other ranks no longer wait for it; a step in
 *           progress is aborted. One thread at a time calls it.
 */

/* One rank of synchronous training. */
typedef struct frugal_trainer frugal_trainer;

typedef struct frugal_trainer_config {
  size_t struct_size;
  /* 0..world_size-1. */
  uint32_t rank;
  /* 0 or FRUGAL_TRAINER_REPLACE (section 8). */
  uint32_t flags;
  /* "cpu" (default, NULL too); "cuda:N" in a build with CUDA. */
  const char *device;
  /* Size of a private cache on the device, for all tables; default 0. It includes rows and state,
   * and the index of them, which is in host memory. */
  uint64_t cache_bytes;
  /* The same as a share of each table's rows, 0..1; default 0. The larger of both counts. */
  double cache_ratio;
} frugal_trainer_config;

#define FRUGAL_TRAINER_CONFIG_INIT \
  { sizeof(frugal_trainer_config), 0, 0, NULL, 0, 0.0 }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_trainer_config_init(frugal_trainer_config *config);

/* Joins as a rank.
 * No step commits until every rank has joined once.
 * A rank that left may join again between steps: no rank is inside a step, and all have ended the
 * same one.
 * For a trainer on a GPU see section 9.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: the rank, the device's name, or a field
 *           STRUCT_SIZE
 *           EXISTS: the rank has a trainer, or another thread of this process is joining as it
 *           BUSY: the rank has left, and the others are not between steps
 *           BUSY: with a service; 16 trainers of this process have lost their ranks: close them
 *           DEVICE: no driver, or no such GPU
 *           OUT_OF_MEMORY: also of memory that can be pinned
 *           TIMEOUT
 *           UNSUPPORTED: FRUGAL_TRAINER_REPLACE without a service
 *           UNSUPPORTED: with a service, and the GPU cannot pin memory mapped to be read
 * Waits:    for GPU work of ended steps, and with a service for the loss of the rank's last
 *           trainer, up to the engine's timeout_ms
 * Threads:  any
 * Owner:    the caller closes *trainer_out with frugal_trainer_close
 */
FRUGAL_API int32_t frugal_trainer_create(frugal_engine *engine, const frugal_trainer_config *config,
                                         frugal_trainer **trainer_out);

/* Leaves the rank.
 * From now on no rank waits for this one.
 * Its declarations are cancelled. A step that it is inside of is aborted on all ranks. A step that
 * it has ended keeps its gradients, and commits when the other ranks have ended it.
 * It accepts NULL.
 *
 * Returns:  FRUGAL_OK
 *           OUT_OF_MEMORY, with a service also TIMEOUT: call again; until then the handle stays
 *           open. If the engine is being closed, that closes the trainer too.
 * Waits:    for a call of this trainer to end, and for its GPU; without limit
 * Threads:  any one; a call of the trainer that waits returns CLOSED
 */
FRUGAL_API int32_t frugal_trainer_close(frugal_trainer *trainer);

/* Names the stream (a cudaStream_t) in which this trainer's calls do their GPU work from now on.
 * NULL, the default, is the default stream of the device.
 * Section 9 says which calls return before their work is done.
 * No call orders itself after what the trainer's earlier calls gave to other streams. The caller's
 * own events do that.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: a stream of another device, or cudaStreamPerThread
 *           UNSUPPORTED: the cpu device has no streams; or the stream is being captured
 * Waits:    no
 * Threads:  one at a time for a trainer
 * Owner:    the caller keeps the stream, which must live until the step is committed
 */
FRUGAL_API int32_t frugal_set_stream(frugal_trainer *trainer, void *stream);

/* ---------------------------------------------------------------------------------------------
 * 6. Op and batch
 * ---------------------------------------------------------------------------------------------
 *
 * Op      A struct on the caller's stack, used during one call.
 *         It names a table, keys or a batch's part, and the buffers for rows or gradients.
 *         One op may be used again in later calls.
 *
 * Batch   frugal_prefetch declares it for one step. It has one part for each op of that call.
 *         frugal_lookup and frugal_push_grad name it by handle, or give any of its keys. It ends
 *         when its step commits, so it outlives an abort. frugal_prefetch_cancel takes it back
 *         before the step begins.
 *
 * Example: one op, declared for step 0. Section 7 looks it up by its batch.
 *
 *     frugal_trainer *rank[2];
 *     frugal_trainer_config rank_config = FRUGAL_TRAINER_CONFIG_INIT;
 *     for (rank_config.rank = 0; rank_config.rank < 2; ++rank_config.rank)
 *       check(frugal_trainer_create(engine, &rank_config, &rank[rank_config.rank]));
 *
 *     uint64_t keys[3] = {7, 999999, 7}; // duplicates are allowed
 *     frugal_op op = FRUGAL_OP_INIT;
 *     op.table = users, op.keys = keys, op.count = 3;
 *     frugal_batch *batch;
 *     check(frugal_prefetch(rank[0], 0, &op, 1, &batch));
 */

/* Keys declared for one step. */
typedef struct frugal_batch frugal_batch;

typedef enum frugal_pooling {
  /* A row for each key. */
  FRUGAL_POOL_NONE = 0,
  /* A row for each bag: the (weighted) sum of its rows. */
  FRUGAL_POOL_SUM = 1,
  /* A row for each bag: the sum divided by the bag's number of keys. Padding is not counted. */
  FRUGAL_POOL_MEAN = 2
} frugal_pooling;

/* The keys of one table in a call. A call takes an array of ops, tables in any order. A table may
 * occur more than once. A call without ops (op_count 0; ops may be NULL) has no keys, and is right.
 * The fields are in groups:
 *
 * - which rows: table, batch, part, keys, count; padding_key with a flag
 * - pooling: pooling, offsets, bags, weights
 * - buffers: rows_out, grads, row_stride, weight_grads_out, found_out
 */
typedef struct frugal_op {
  size_t struct_size;
  frugal_table *table;
  /* The declared batch whose part `part` this is, or NULL. */
  const frugal_batch *batch;
  /* Which op of the frugal_prefetch call declared these keys: its index among all ops. */
  uint32_t part;
  /* frugal_pooling. */
  int32_t pooling;
  /* `count` keys. In a lookup or push NULL with a batch means exactly the declared keys. So an op
   * with a batch and no keys has a pointer that is not NULL, and count 0. */
  const uint64_t *keys;
  /* Number of keys; ignored with keys NULL and a batch. */
  size_t count;
  /* `bags` + 1 values: offsets[0] = 0, not decreasing, offsets[bags] = number of keys. Bag b has
   * the keys offsets[b]..offsets[b+1]-1. It may be empty: then its row is zeros. */
  const uint64_t *offsets;
  size_t bags;
  /* Pooled sum: a factor for each key, or NULL. */
  const float *weights;
  /* Push, pooled sum with weights: gradient of each factor, or NULL. */
  float *weight_grads_out;
  /* Lookup and read: the output rows. */
  float *rows_out;
  /* Push: the gradient rows, of keys, or of bags if pooled. */
  const float *grads;
  /* Bytes from row to row in rows_out or grads; 0: packed. */
  size_t row_stride;
  /* frugal_read: 1 or 0 for each key, or NULL. */
  uint8_t *found_out;
  /* With FRUGAL_OP_PADDING: rows of this key read as zeros, take no gradient and are never
   * created. */
  uint64_t padding_key;
  /* 0 or FRUGAL_OP_PADDING. */
  uint32_t flags;
  uint32_t reserved;
} frugal_op;

#define FRUGAL_OP_PADDING 1u

#define FRUGAL_OP_INIT                                                                            \
  {                                                                                               \
    sizeof(frugal_op), NULL, NULL, 0, FRUGAL_POOL_NONE, NULL, 0, NULL, 0, NULL, NULL, NULL, NULL, \
        0, NULL, 0, 0, 0                                                                          \
  }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_op_init(frugal_op *op);

/* Declares keys of a step that this trainer has not begun (FRUGAL section 3.3, MLKV look-ahead).
 * It uses these fields of each op: table, keys, count, padding_key and flags.
 * Several declarations for one step add up. They may come late and in any order.
 * Background threads resolve a copy of the keys. This call does so itself if the keys are few, or
 * there are no flush threads.
 * Rows of a hashed table are reserved, not created. If the table has no room for them, the calls of
 * the step that use them report that.
 * *batch_out names the batch until its step commits, also after an abort. batch_out may be NULL.
 *
 * Returns:  FRUGAL_OK; on an error nothing is declared
 *           KEY_OUT_OF_RANGE
 *           STEP_RANGE: the step has begun, or is more than frugal_config.lookahead steps after
 *           the rank's current one. Before the first step, declared steps may lie that far apart
 *           STEP_ABORTED
 *           STRUCT_SIZE
 *           INVALID_ARGUMENT: a field, or the rank has declared 4096 batches for this step
 * Waits:    no; with a service for keys on a GPU, and between steps for the reply (section 8)
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_prefetch(frugal_trainer *trainer, uint64_t step, const frugal_op *ops,
                                   size_t op_count, frugal_batch **batch_out);

/* Takes a declaration back, before its step begins.
 *
 * Returns:  FRUGAL_OK
 *           BAD_HANDLE: its step has ended, or it was cancelled
 *           STEP_RANGE: its step has begun
 *           STEP_ABORTED
 *           INVALID_ARGUMENT: another rank declared it
 * Waits:    until no background thread uses the batch
 * Threads:  one at a time for the trainer that declared it
 */
FRUGAL_API int32_t frugal_prefetch_cancel(frugal_trainer *trainer, frugal_batch *batch);

/* ---------------------------------------------------------------------------------------------
 * 7. Step
 * ---------------------------------------------------------------------------------------------
 *
 * Step   frugal_step_begin waits until every row of the step is up to date. Any number of lookups
 *        and pushes follow. frugal_step_end submits the rank's gradients; the step commits when the
 *        last rank ends it. frugal_step_abort undoes it on all ranks, and each begins it again.
 *
 * A lookup or push that fails leaves the rank inside the step, with what it pushed before. It may
 * go on, end the step or abort it. Only after STEP_ABORTED and PEER_LOST it is in no step.
 *
 * A trainer that joins an engine with committed steps begins with frugal_committed_step + 1.
 *
 * Example: two ranks, one step, and an abort of it. As a rule each rank is a thread of its own.
 *
 *     float rows[3 * 16], grads[3 * 16] = {0};
 *     for (int again = 0; again < 2; ++again) {
 *       check(frugal_step_begin(rank[0], 0, FRUGAL_TIMEOUT_DEFAULT));
 *       check(frugal_step_begin(rank[1], 0, FRUGAL_TIMEOUT_DEFAULT));
 *       frugal_op use = FRUGAL_OP_INIT;
 *       use.table = users, use.batch = batch; // part 0, exactly the declared keys
 *       use.rows_out = rows, use.grads = grads;
 *       check(frugal_lookup(rank[0], &use, 1));
 *       check(frugal_push_grad(rank[0], &use, 1)); // rank 1 has no keys in this step
 *       if (again == 0) {
 *         check(frugal_step_abort(rank[0])); // the declaration stays
 *         if (frugal_step_end(rank[1], 0, 0) != FRUGAL_ERR_STEP_ABORTED) abort();
 *         continue;
 *       }
 *       check(frugal_step_end(rank[0], 0, 0));
 *       check(frugal_step_end(rank[1], 0, 0)); // commits step 0
 *     }
 */

/* Begins a step on this rank; this is the gate.
 * It waits for each update that a declared row of the step must see, until it is in the host row.
 * Those are the updates of the steps before `step` - staleness (FRUGAL section 3.3). So with
 * staleness 0 it also waits until every rank has ended the step before.
 * The first step is any number up to 2^64 - 66, the same on all ranks. Each later one is the
 * number after it. The first call names the first step, even if it returns TIMEOUT.
 * A waiting thread helps with the work.
 * Where a trainer process is lost, the call waits until a trainer joins as its rank.
 *
 * Returns:  FRUGAL_OK
 *           STEP_ORDER: another step must come now; the message names it
 *           INVALID_ARGUMENT: the step is above 2^64 - 66
 *           TIMEOUT
 *           STEP_ABORTED: steps were undone; the message names the step to begin
 *           PEER_LOST: the same, because a trainer process is lost
 *           OUT_OF_MEMORY: on a GPU; call again
 * Waits:    up to timeout_ms
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_step_begin(frugal_trainer *trainer, uint64_t step, int64_t timeout_ms);

/* Reads rows in a step, and creates rows of hashed tables.
 * Declared keys are fast. Other keys are right too, and may wait.
 * All ops are checked before any row is created or written.
 *
 * Returns:  FRUGAL_OK; after an error rows_out is undefined
 *           NOT_IN_STEP
 *           KEY_OUT_OF_RANGE
 *           TABLE_FULL
 *           OUT_OF_MEMORY
 *           TIMEOUT: of keys that were not declared; their rows exist
 *           STEP_ABORTED
 *           STRUCT_SIZE
 *           INVALID_ARGUMENT
 * Waits:    for pending updates of keys that were not declared, up to the engine's timeout_ms; with
 *           staleness also for rows that another thread is writing
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_lookup(frugal_trainer *trainer, const frugal_op *ops, size_t op_count);

/* Lends memory for gradients, which a push from it takes without a copy where that is faster.
 * It is `bytes` bytes, 64-byte aligned, in huge pages where possible.
 * The caller writes it between frugal_step_begin and the push. After the push the caller neither
 * reads nor writes it. Each step needs a new call, which may give the same memory once its
 * updates are applied. Until then all of it counts against pending_bytes.
 *
 * Returns:  FRUGAL_OK
 *           NOT_IN_STEP
 *           STEP_ABORTED
 *           OUT_OF_MEMORY
 * Waits:    no
 * Threads:  one at a time for a trainer
 * Owner:    the engine; closing the trainer or the engine takes it back
 */
FRUGAL_API int32_t frugal_borrow(frugal_trainer *trainer, size_t bytes, void **memory_out);

/* Submits gradients of the step.
 * A row's gradients are summed over positions, pushes and ranks. The optimizer is applied once,
 * when the step has ended on all ranks.
 * When the call returns the gradients are the engine's, and the buffers may be overwritten. Not
 * so memory of frugal_borrow, which must not be. Buffers on a GPU: overwritten in the stream.
 *
 * Returns:  FRUGAL_OK; on an error nothing is taken
 *           NOT_IN_STEP
 *           KEY_OUT_OF_RANGE
 *           TABLE_FULL
 *           OUT_OF_MEMORY
 *           NAN: a gradient has a NaN and the table rejects them
 *           STEP_ABORTED
 *           STRUCT_SIZE
 *           INVALID_ARGUMENT
 *           TIMEOUT: of weight_grads_out of keys that were not declared, with updates pending
 *           STEP_ORDER: with a service; frugal_step_end has failed and must be called again
 * Waits:    never for another rank; for pending updates only where TIMEOUT is possible
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_push_grad(frugal_trainer *trainer, const frugal_op *ops, size_t op_count);

/* A flag of frugal_step_end: the step commits without any update (an overflow was found). It is
 * enough that one rank gives it. */
#define FRUGAL_STEP_SKIP 1u

/* Ends the step on this rank.
 * The step commits when the last rank has ended it. Until then another rank may undo it, which the
 * next frugal_step_begin reports. After its last step a rank calls frugal_read, which waits for the
 * commit and reports the same.
 * A commit that lacks memory fails no frugal_step_end. A flush thread, or a call that waits, makes
 * it later.
 *
 * Returns:  FRUGAL_OK: the rank has ended the step
 *           NOT_IN_STEP
 *           STEP_ORDER: the rank is inside another step
 *           STEP_ABORTED
 *           OUT_OF_MEMORY: the rank is still inside the step, nothing pushed is lost: call again
 *           INVALID_ARGUMENT: an unknown flag
 *           on a GPU also, and in the first three cases the step is undone on all ranks:
 *           NAN: found in memory of the GPU
 *           INVALID_ARGUMENT: offsets in memory of the GPU are wrong
 *           DEVICE: the GPU failed
 *           TIMEOUT: the stream took longer than the engine's timeout_ms; call again
 * Waits:    never for another rank; on a GPU it may wait for the stream (section 9)
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_step_end(frugal_trainer *trainer, uint64_t step, uint32_t flags);

/* Undoes every uncommitted step on all ranks.
 * The tables are then as of the last committed step. Rows created since are gone; declarations
 * stay.
 * Each other rank gets one STEP_ABORTED for each abort, also if it has not begun the step or has
 * ended it. Its next call that lists STEP_ABORTED returns it, does nothing, and can be made again.
 * Then all ranks begin frugal_committed_step + 1 again, or the first step if none is committed.
 *
 * Returns:  FRUGAL_OK
 *           NOT_IN_STEP
 *           STEP_ABORTED: another rank aborted first
 * Waits:    for the calls that other ranks are making, and for GPUs; without limit
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_step_abort(frugal_trainer *trainer);

/* Reads rows by their keys for evaluation or serving.
 * It creates no row, declares nothing, and leaves cache policy and declared priorities alone.
 * Updates of these rows that it must see are written first.
 * An unused row of a lazy dense table takes its memory when it is read.
 * Missing keys read as zeros, and found_out reports them. In a mean a missing row counts, as a row
 * of zeros.
 * With a trainer inside a step the call sees what a lookup sees.
 * With a trainer between steps it waits like the next step's gate: until the other ranks have ended
 * theirs, and calls between steps are done.
 * With `trainer` NULL it is a call between steps itself.
 *
 * Returns:  FRUGAL_OK; after an error rows_out and found_out are undefined
 *           KEY_OUT_OF_RANGE
 *           BUSY: `trainer` is NULL, and ranks are not between steps
 *           TIMEOUT
 *           STEP_ABORTED
 *           STRUCT_SIZE
 *           INVALID_ARGUMENT: a field; also an op with a batch
 *           PEER_LOST: the controller has ended, and the trainer's last step was not committed
 * Waits:    up to timeout_ms
 * Threads:  any; with a trainer one at a time for it
 */
FRUGAL_API int32_t frugal_read(const frugal_engine *engine, frugal_trainer *trainer,
                               const frugal_op *ops, size_t op_count, int64_t timeout_ms);

/* ---------------------------------------------------------------------------------------------
 * 8. Processes (service)
 * ---------------------------------------------------------------------------------------------
 *
 * The controller is the process that runs the engine: frugal-controller, or one that calls
 * frugal_serve. Trainers in other processes attach to it: they open an engine with
 * frugal_config.service. docs/processes.md says how it works.
 *
 * What differs with a service:
 * - config must have the engine's world_size, lookahead, staleness and seed, except with
 *   FRUGAL_OBSERVE.
 * - timeout_ms limits the calls of this process. frugal_open itself waits that long for an address
 *   that no controller serves.
 * - log is never called.
 * - flush_threads bounds this process's threads that help with large calls.
 * - All other fields have the values of the engine. Those of a frugal-controller's engine come from
 *   the process that attached first, and so does that engine's own timeout_ms.
 * - A rank is lost when other ranks have waited for it for the engine's timeout_ms, and its process
 *   was unresponsive in that time.
 * - When a rank is lost every uncommitted step is undone. The other ranks' calls return PEER_LOST,
 *   and frugal_step_begin waits until a trainer joins as that rank.
 * - Every call may return PEER_LOST. If the controller does not reply, a call may return TIMEOUT or
 *   PEER_LOST; if it is stopping, PEER_LOST.
 * - A call between steps waits for those of other threads of its process, whatever its time-out.
 * - A call that returned TIMEOUT or OUT_OF_MEMORY may have been done by the controller. Made again,
 *   it finds what it did.
 * - frugal_get with FRUGAL_WITH_STATE returns BUSY if another process has just given the table
 *   another kind of optimizer: call again.
 * - frugal_prefetch inside a step does not wait for the controller. The declaration may fail there:
 *   no memory, its table was dropped by another process, or it is one batch too many. Then an op
 *   that names the batch without keys returns OUT_OF_MEMORY, BAD_HANDLE or INVALID_ARGUMENT: give
 *   the keys.
 * - Some calls wait for the GPU that do not wait without a service (section 9).
 * - When the controller closes the engine, the last commit may lack memory. Its log reports that; a
 *   frugal-controller's log is its standard error.
 *
 * After the controller's end, or its closing of the engine:
 * - A process can still read the tables that it opened, until it closes its own engine. frugal_get,
 *   frugal_read, frugal_table_count, frugal_table_keys, frugal_table_describe and
 *   frugal_committed_step work. They return the state of the last committed step.
 * - A frugal_put or frugal_delete in progress has changed each row wholly or not at all.
 * - PEER_LOST: an update, or memory of the table, is missing in this process. The message names
 *   what, an update by its step.
 * - NOT_FOUND: the table was dropped. INTERNAL: the memory is damaged.
 * - An orderly stop that takes over 2 s returns PEER_LOST: call again.
 * - A controller that is suspended (SIGSTOP) counts as ended for a call that waits for it. That is
 *   5 s after the larger of timeout_ms and the call's time-out.
 * - Reading needs pidfds: Linux 5.3.
 * - Every other call returns PEER_LOST.
 *
 * Example: serve, and attach. The engine has shared memory.
 *
 *     config.backing = FRUGAL_BACKING_SHM;
 *     check(frugal_open(&config, &engine));
 *     check(frugal_serve(engine, "/tmp/frugal.socket"));
 *     // In another process, with the same world_size, lookahead, staleness and seed:
 *     config.service = "/tmp/frugal.socket";
 *     check(frugal_open(&config, &engine));
 */

/* A flag of frugal_config, with a service only: attach to the engine that is there, to observe it.
 * Other fields of the configuration are not used for the engine. Calls that would change it return
 * UNSUPPORTED: to join, create or drop a table, put or delete rows, set an optimizer. */
#define FRUGAL_OBSERVE 1u

/* Lets other processes attach to this engine by frugal_config.service, until it is closed.
 * `address` is the path of a Unix-domain socket, which is made for processes of the same user
 * (0600).
 * The engine needs FRUGAL_BACKING_SHM. Call it between steps.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: the path, or the backing
 *           EXISTS: a living process serves that address, or this engine is served
 *           BUSY: a rank is inside a step, or ranks have ended different ones
 *           TIMEOUT: updates are still being written; call again
 *           OUT_OF_MEMORY
 *           UNSUPPORTED: this build or system cannot serve, or the engine is itself attached
 * Waits:    for pending updates, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_serve(frugal_engine *engine, const char *address);

/* A flag of frugal_trainer_config: take the rank over from a trainer process that does not reply.
 * Without a service it is UNSUPPORTED. */
#define FRUGAL_TRAINER_REPLACE 1u

/* Gives a trainer up, for a program that fails: as if its process had ended.
 * With a service the rank is lost. Every uncommitted step is undone, and the other ranks' calls
 * return PEER_LOST. Their next step waits until a trainer joins as this rank.
 * Without a service it is frugal_trainer_close.
 * It accepts NULL.
 *
 * Returns:  as frugal_trainer_close
 * Waits:    as frugal_trainer_close
 * Threads:  as frugal_trainer_close
 */
FRUGAL_API int32_t frugal_trainer_abandon(frugal_trainer *trainer);

/* ---------------------------------------------------------------------------------------------
 * 9. GPU
 * ---------------------------------------------------------------------------------------------
 *
 * A trainer is on a GPU if frugal_trainer_config.device is "cuda:N" (FRUGAL section 3.2).
 *
 * Rows       They stay in host memory, and kernels read them there. That memory is pinned when the
 *            first such trainer joins, and as it grows. With staleness a GPU has no cache.
 * Pointers   Pointers of this trainer's ops may be to memory of that device, of its primary
 *            context. found_out is host memory. In an op, rows_out, grads, weights and
 *            weight_grads_out are all on the host or all on the device. A trainer on the cpu device
 *            takes host memory only, and so do frugal_get, frugal_put, frugal_delete and
 *            frugal_table_keys. Else they return INVALID_ARGUMENT.
 * Streams    frugal_set_stream names the stream. A call returns when it has given its work to the
 *            stream. rows_out is complete, and grads may be written again, when the stream has
 *            passed that work.
 * Waits      Keys on the device are compared with those of the batch, or copied. Offsets without a
 *            batch are copied. Such a call waits for the stream. With a batch and keys NULL nothing
 *            waits.
 *            frugal_step_end waits for the stream in these cases:
 *            - gradients went to a table with FRUGAL_NAN_REJECT;
 *            - several pushes went to one table;
 *            - offsets are on the device, and the call did not wait for them;
 *            - there is a service.
 *            Else the next frugal_step_begin waits.
 *            With a service these calls return when the work is done: frugal_step_end, lookups
 *            into device memory, pushes with weight_grads_out there, and prefetches of keys there.
 *            All but the last wait for at most the engine's timeout_ms, then return TIMEOUT: call
 *            again.
 * Capture    A call on a stream that is being captured returns UNSUPPORTED: no step can be part of
 *            a graph.
 * Errors     A NaN in memory of the device (FRUGAL_NAN_REJECT) and wrong offsets there are found by
 *            frugal_step_end. It returns NAN or INVALID_ARGUMENT, and the step is undone on all
 *            ranks.
 * Failure    Any call may return DEVICE: the GPU has failed. The step is undone on all ranks. Close
 *            the trainer; the others go on.
 */

/* ---------------------------------------------------------------------------------------------
 * 10. Observation
 * ---------------------------------------------------------------------------------------------
 *
 * Statistics, metrics and traces. None of them changes what is computed.
 */

/* Counters since the engine was opened. Times are in nanoseconds. */
typedef struct frugal_stats {
  /* Set by the caller. */
  size_t struct_size;

  /* --- Steps */
  uint64_t steps_committed;
  /* Aborts. One may undo several steps. */
  uint64_t steps_aborted;

  /* --- Keys */
  uint64_t keys_declared;
  uint64_t keys_looked_up;
  /* Looked up or pushed without a declared batch. */
  uint64_t keys_undeclared;
  uint64_t keys_pushed;

  /* --- Rows */
  uint64_t rows_created;
  /* Updates, of a row in a step, written to host rows. */
  uint64_t rows_updated;
  /* Of these: queued when the step after theirs could begin. */
  uint64_t rows_deferred;

  /* --- Gate and queue */
  /* Calls of frugal_step_begin that had to wait. */
  uint64_t gate_waits;
  uint64_t gate_wait_ns;
  /* Gates that met an update dequeued but unwritten. */
  uint64_t gate_in_flight;
  /* Undeclared keys that had to wait. */
  uint64_t lookup_waits;
  /* Pending updates that became more urgent. */
  uint64_t priority_rises;
  /* Pending updates that became less urgent. */
  uint64_t priority_falls;
  /* Rows with pending updates, put into the queue. */
  uint64_t enqueued;
  /* The same, taken out of the queue. */
  uint64_t dequeued;
  /* Times that the budget forced writing. */
  uint64_t back_pressure;
  /* Calls of frugal_step_begin while another rank was still in an earlier step. */
  uint64_t ranks_apart;
  /* Rows read with a pending update (staleness > 0). For a trainer process: rows that had one when
   * the step began, or when undeclared keys were resolved. */
  uint64_t stale_reads;

  /* --- Cache */
  /* Keys served from a trainer's cache. */
  uint64_t cache_hits;
  uint64_t cache_misses;
  uint64_t cache_admitted;
  uint64_t cache_evicted;
  /* Evicted while the host row had pending updates. */
  uint64_t cache_evicted_dirty;

  /* --- Memory */
  /* Now. */
  uint64_t pending_bytes;
  uint64_t pending_bytes_peak;
  /* Rows with pending updates now. */
  uint64_t pending_rows;
  /* The same: rows that are only read are not counted. */
  uint64_t active_rows;

  /* --- Modes */
  /* Steps applied at once. */
  uint64_t modes_at_once;
  /* Steps queued. */
  uint64_t modes_deferred;

  /* --- Time */
  /* Wall time inside the calls, summed over trainers. Of a trainer's small lookups of declared keys
   * one in 17 is measured, and counts for the 16 before it too. */
  uint64_t lookup_ns;
  uint64_t push_ns;
  uint64_t step_begin_ns;
  uint64_t step_end_ns;
  uint64_t prefetch_ns;
  /* Time spent on bookkeeping of pending updates and on the queue, summed over threads. */
  uint64_t entry_ns;
  /* Time spent applying updates, summed over threads. */
  uint64_t apply_ns;

  /* --- Cache refreshes */
  /* Cache refreshes: changes of a trainer's cache between two steps, one for each table. */
  uint64_t cache_refreshes;
  /* Of these: planned while the step before was computed. */
  uint64_t cache_planned;

  /* --- Checkpoints */
  /* That are on disk. */
  uint64_t checkpoints;
  /* That failed or were cancelled. */
  uint64_t checkpoints_failed;
  /* Records and bytes of parameter files that were written. */
  uint64_t checkpoint_rows;
  uint64_t checkpoint_bytes;
  /* Of these rows: copied by a thread that was about to change them. */
  uint64_t checkpoint_copies;
  /* Calls of frugal_step_begin that waited for the disk, since copies were over their budget. */
  uint64_t checkpoint_waits;
} frugal_stats;

/* Fills *stats_out.
 * stats_out->struct_size must be set.
 *
 * Returns:  FRUGAL_OK
 *           STRUCT_SIZE
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_get_stats(const frugal_engine *engine, frugal_stats *stats_out);

/* Writes the text of a Prometheus scrape (text exposition format 0.0.4).
 * Every counter of frugal_stats is frugal_NAME_total, and a time frugal_NAME_seconds_total. What is
 * pending now is a gauge.
 * There are also frugal_uptime_seconds, frugal_health (0, or the status), frugal_committed_step,
 * and rows and bytes of each table (label `table`). For each rank that has a trainer (label
 * `rank`) there are the step that it has begun last, and whether it is inside.
 * *size_out is the size of the text with the 0 that ends it, also on OVERFLOW. It changes from call
 * to call.
 *
 * Returns:  FRUGAL_OK
 *           OVERFLOW: capacity is less than the size; nothing was written to text_out
 * Waits:    no
 * Threads:  any
 * Owner:    text_out is the caller's; it may be NULL if capacity is 0
 */
FRUGAL_API int32_t frugal_metrics(const frugal_engine *engine, char *text_out, size_t capacity,
                                  size_t *size_out);

/* Begins to record what the engine does when.
 * The spans are prefetch, resolve, link, gate, lookup, push, commit, flush and others. Each has its
 * step, rank, rows and table.
 * The trace keeps the newest `events` of them, 1..2^26; with FRUGAL_OBSERVE at most 2^19. Their
 * memory, 64 bytes each, is taken now. Recording takes no memory and no lock. Without a trace each
 * span costs one load.
 * It may be called at any time, also during steps.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: the number of events
 *           EXISTS: there is a trace that was not stopped
 *           OUT_OF_MEMORY
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_trace_start(frugal_engine *engine, size_t events);

/* Ends the recording and writes it to the file `path`, in the trace event format of Chrome.
 * chrome://tracing and Perfetto read it. NULL discards the recording.
 * The file is readable by its owner alone (0600). It replaces an older file when it is whole.
 * Times are of CLOCK_MONOTONIC, so files of several processes of a machine can be compared.
 * otherData.dropped counts the events that newer ones have displaced.
 * Closing the engine discards the recording.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND: no trace was started
 *           INVALID_ARGUMENT: the path cannot be used, see frugal_error.system_code; call again
 *           NO_SPACE, IO: the file cannot be written; call again
 *           OUT_OF_MEMORY: call again
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_trace_stop(frugal_engine *engine, const char *path);

/* ---------------------------------------------------------------------------------------------
 * 11. Checkpoint
 * ---------------------------------------------------------------------------------------------
 *
 * Checkpoint   The whole engine on disk, as it was after one committed step: all tables with their
 *              optimizer state, and the blobs of the ranks. Training goes on while it is written
 *              (TrainingCXL, batch-aware checkpoint; HierPS appendix E). It is whole or it is not
 *              there, whatever instant the process or the machine dies at.
 *
 * Folder       frugal_folder_open names it. One engine at a time writes a folder; any number of
 *              processes read it meanwhile. The newest checkpoints are kept, and all that have a
 *              name. Only rows that changed since the last checkpoint are written.
 *
 * Blob         Bytes of the caller that belong to a step: dense weights, the place of the data
 *              reader. A rank gives them with frugal_checkpoint_blob inside of the step.
 *
 * Number       A checkpoint has a number in its folder, from 1 on; later ones have greater numbers.
 *              The number is also the ticket by which a caller waits.
 *
 * Processes that attach to an engine cannot use this section yet: their calls return UNSUPPORTED,
 * but for those that take the path of a folder. docs/checkpoints.md says how it works.
 *
 * Example: a program that goes on where it was interrupted. At its first start it finds no
 * checkpoint. `weights` is what it trains besides.
 *
 *     float weights[64] = {0};
 *     frugal_folder_config folder = FRUGAL_FOLDER_CONFIG_INIT;
 *     folder.every_steps = 1000;
 *     check(frugal_folder_open(engine, "checkpoints", &folder));
 *     frugal_checkpoint_info info;
 *     info.struct_size = sizeof info;
 *     uint64_t step = 0;
 *     int32_t restored = frugal_restore(engine, NULL, &info);
 *     if (restored == FRUGAL_OK) {
 *       step = info.step + 1;
 *       check(frugal_checkpoint_read_blob("checkpoints", info.number, 0, weights, sizeof weights,
 *                                         NULL));
 *     } else if (restored != FRUGAL_ERR_NOT_FOUND) {
 *       check(restored);
 *     }
 *     // It creates its tables as ever, and gets those that were restored. Then in each step:
 *     bool due;
 *     check(frugal_step_begin(rank[0], step, FRUGAL_TIMEOUT_DEFAULT));
 *     // Lookups, the model, pushes.
 *     check(frugal_checkpoint_due(rank[0], &due));
 *     if (due) check(frugal_checkpoint_blob(rank[0], weights, sizeof weights));
 *     check(frugal_step_end(rank[0], step, 0));
 */

/* What is kept in a folder, and when a checkpoint is due by itself. */
typedef struct frugal_folder_config {
  size_t struct_size;
  /* How many checkpoints without a name stay, the newest ones; 1 or more, default 2. */
  uint32_t keep;
  /* 0. */
  uint32_t flags;
  /* A checkpoint is due when so many steps were committed since the last one; 0 (default): none
   * is. */
  uint64_t every_steps;
  /* The same for milliseconds; 0 (default): none is. */
  uint64_t every_ms;
} frugal_folder_config;

#define FRUGAL_FOLDER_CONFIG_INIT \
  { sizeof(frugal_folder_config), 2, 0, 0, 0 }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_folder_config_init(frugal_folder_config *config);

/* Opens a folder, to which this engine writes its checkpoints from now on.
 * The last component of the path is created if it is missing. `config` NULL means all defaults.
 * It removes what a writer that has died left unfinished there, and checkpoints beyond `keep`.
 * It is a call between steps. Pending updates are written first.
 * Memory: about 5 bytes and 3 bits a row, and up to 64 MiB while a checkpoint is written.
 *
 * Returns:  FRUGAL_OK
 *           INVALID_ARGUMENT: a field, or the path cannot be used; see frugal_error.system_code
 *           STRUCT_SIZE
 *           NOT_FOUND: the folder that the new one would be in does not exist
 *           EXISTS: the engine has opened a folder
 *           BUSY: another engine writes that folder; or ranks are not between steps
 *           TIMEOUT
 *           NO_SPACE, IO
 *           UNSUPPORTED: this build cannot write checkpoints, or the engine is another process's
 * Waits:    for pending updates, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_folder_open(frugal_engine *engine, const char *path,
                                      const frugal_folder_config *config);

/* Ends the use of the folder, which another engine may write then.
 * It is a call between steps. frugal_close does it, too.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND: the engine has opened no folder
 *           BUSY: a checkpoint is being written, or ranks are not between steps
 *           TIMEOUT
 *           UNSUPPORTED: the engine is another process's
 * Waits:    for pending updates, up to the engine's timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_folder_close(frugal_engine *engine);

/* Which state a checkpoint has, and its name. */
typedef struct frugal_checkpoint_config {
  size_t struct_size;
  /* The step whose state it has. FRUGAL_NO_STEP (default): the last one that is committed. Else one
   * that is not committed yet. */
  uint64_t step;
  /* NULL (default), or 1..255 bytes without a slash: it is kept until it is deleted. */
  const char *name;
  /* Not NULL: the blob of rank `blob_rank`, in the place of one that it has given in the step. Only
   * for the last committed step. It is copied. */
  const void *blob;
  size_t blob_size;
  uint32_t blob_rank;
  /* 0. */
  uint32_t flags;
} frugal_checkpoint_config;

#define FRUGAL_CHECKPOINT_CONFIG_INIT \
  { sizeof(frugal_checkpoint_config), UINT64_MAX, NULL, NULL, 0, 0, 0 }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_checkpoint_config_init(frugal_checkpoint_config *config);

/* Begins a checkpoint.
 * `config` NULL means all defaults. Ranks may be inside of steps, and go on.
 * One that was due by itself makes way for it, unless a rank is inside of its step.
 * *number_out is the checkpoint's number, by which frugal_checkpoint_wait waits.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND: the engine has opened no folder
 *           BUSY: another one is being written, or a rank is inside of a step that is due: wait
 *           with number 0
 *           STEP_RANGE: the step is committed already
 *           INVALID_ARGUMENT: a field
 *           STRUCT_SIZE
 *           OUT_OF_MEMORY: also for the blob
 *           IO: a sync has failed before; the folder is written no more by this engine
 *           UNSUPPORTED: the engine is another process's
 * Waits:    for a commit, or a call between steps, that is being made
 * Threads:  any
 */
FRUGAL_API int32_t frugal_checkpoint(frugal_engine *engine, const frugal_checkpoint_config *config,
                                     uint64_t *number_out);

/* What a checkpoint is. */
typedef struct frugal_checkpoint_info {
  /* Set by the caller. */
  size_t struct_size;
  /* In its folder, from 1 on. */
  uint64_t number;
  /* The last step that it has; FRUGAL_NO_STEP: it is from before the first. */
  uint64_t step;
  /* When it was written, in seconds since 1970. */
  uint64_t created;
  /* Of its files. Checkpoints share files. */
  uint64_t bytes;
  uint64_t tables;
  /* Ranks of the engine that wrote it. */
  uint32_t world_size;
  /* How many of them have given a blob. */
  uint32_t blobs;
  /* Empty: it has none. */
  char name[256];
} frugal_checkpoint_info;

/* Waits until a checkpoint is on disk.
 * `number` 0 means the one that was begun last. info_out may be NULL.
 * The results of the last 64 checkpoints are known.
 *
 * Returns:  FRUGAL_OK: no crash of the process or the machine takes it back
 *           TIMEOUT: it is not there yet; with timeout_ms 0 the call polls
 *           NOT_FOUND: no such checkpoint was begun since the folder was opened
 *           CLOSED: it was cancelled, or the engine is being closed
 *           NO_SPACE, IO, OUT_OF_MEMORY: it failed. The one before stays; another can be begun. But
 *           after a failed sync the folder is written no more, which the message says
 *           STEP_RANGE: its step will never come
 *           STRUCT_SIZE
 *           UNSUPPORTED: the engine is another process's
 * Waits:    up to timeout_ms
 * Threads:  any
 */
FRUGAL_API int32_t frugal_checkpoint_wait(const frugal_engine *engine, uint64_t number,
                                          int64_t timeout_ms, frugal_checkpoint_info *info_out);

/* Gives up a checkpoint that is not on disk yet.
 * `number` 0 means the one that was begun last. What was written of it is removed. It may still
 * come to be whole: frugal_checkpoint_wait says whether it did.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND: it is not being written
 *           UNSUPPORTED: the engine is another process's
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API int32_t frugal_checkpoint_cancel(frugal_engine *engine, uint64_t number);

/* Reports whether the step that the rank is inside of will be a checkpoint.
 * It will if a call has named it, or if a checkpoint was due by itself (frugal_folder_config) when
 * the first rank began the step and none was being written. All ranks get the same result, unless
 * a call names the step when ranks are inside of it.
 *
 * Returns:  FRUGAL_OK
 *           NOT_IN_STEP
 *           STEP_ABORTED
 *           UNSUPPORTED: the engine is another process's
 * Waits:    no
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_checkpoint_due(frugal_trainer *trainer, bool *due_out);

/* Gives the rank's blob of the step that it is inside of.
 * A checkpoint of this step has it. A later call in the step replaces it; an abort drops it.
 * It is copied. Its memory counts against host_bytes until a later step commits, or the checkpoint
 * is on disk. Without a folder the call does nothing. Blobs that a restore finds belong to the last
 * committed step, too. Those of ranks that a smaller world lacks stay in the old checkpoint alone.
 *
 * Returns:  FRUGAL_OK; on an error the rank's earlier blob of the step stays
 *           NOT_IN_STEP
 *           STEP_ABORTED
 *           OUT_OF_MEMORY
 *           UNSUPPORTED: the engine is another process's
 * Waits:    no
 * Threads:  one at a time for a trainer
 */
FRUGAL_API int32_t frugal_checkpoint_blob(frugal_trainer *trainer, const void *bytes, size_t size);

/* Deletes a checkpoint of the folder that the engine writes.
 *
 * Returns:  FRUGAL_OK: it is gone, also after a crash
 *           NOT_FOUND: there is no such checkpoint, or the engine has opened no folder
 *           BUSY: a process reads it
 *           IO
 *           UNSUPPORTED: the engine is another process's
 * Waits:    for the disk
 * Threads:  any
 */
FRUGAL_API int32_t frugal_checkpoint_delete(frugal_engine *engine, uint64_t number);

/* Which checkpoint is restored, and which of its tables. */
typedef struct frugal_restore_config {
  size_t struct_size;
  /* NULL (default): the folder that frugal_folder_open opened. Else another one, which
   * its writer may be writing. */
  const char *folder;
  /* 0 (default): the newest, or the one that has `name`. */
  uint64_t number;
  /* NULL (default): any. Else the newest one of that name. */
  const char *name;
  /* Names of the tables to restore; NULL (default): all. */
  const char *const *tables;
  size_t table_count;
} frugal_restore_config;

#define FRUGAL_RESTORE_CONFIG_INIT \
  { sizeof(frugal_restore_config), NULL, 0, NULL, NULL, 0 }

/* Sets every default.
 *
 * Returns:  nothing
 * Waits:    no
 * Threads:  any
 */
FRUGAL_API void frugal_restore_config_init(frugal_restore_config *config);

/* Creates the tables of a checkpoint, with their rows, state and hyper-parameters.
 * frugal_committed_step is then the checkpoint's step, and the next step is the one after it.
 * `config` NULL means all defaults.
 * The engine may have another world_size, lookahead, staleness, flush mode, backing, caches and
 * devices than the one that wrote the checkpoint. Its seed must be the same.
 * Call it before trainers join. frugal_table_create with the same configuration then gives the
 * restored table; frugal_table_set_optimizer changes its hyper-parameters.
 * info_out may be NULL.
 *
 * Returns:  FRUGAL_OK; on an error nothing has changed
 *           NOT_FOUND: no folder is open or named; no such checkpoint, or no such table in it
 *           EXISTS: the engine has a table of that name
 *           BUSY: trainers have joined, or steps were begun
 *           INVALID_ARGUMENT: a field; or the engine has another seed
 *           STRUCT_SIZE
 *           DAMAGED, TOO_NEW, IO: the message names file and offset
 *           OUT_OF_MEMORY, TIMEOUT
 *           UNSUPPORTED: this build cannot read checkpoints, or the engine is another process's
 * Waits:    for the disk
 * Threads:  any
 */
FRUGAL_API int32_t frugal_restore(frugal_engine *engine, const frugal_restore_config *config,
                                  frugal_checkpoint_info *info_out);

/* Enumerates the checkpoints of a folder, in the order of their numbers.
 * It fills *info_out with the first checkpoint whose number is above *cursor, and sets *cursor to
 * that number; start with 0. A `number` of 0 means the end.
 * No engine is needed, and another process may write the folder.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND: there is no such folder
 *           DAMAGED, TOO_NEW: of that checkpoint's manifest; *cursor has moved past it
 *           IO, STRUCT_SIZE
 *           UNSUPPORTED: this build cannot read checkpoints
 * Waits:    for the disk
 * Threads:  any
 */
FRUGAL_API int32_t frugal_checkpoint_next(const char *folder, uint64_t *cursor,
                                          frugal_checkpoint_info *info_out);

/* Reads the blob that a rank has given for a checkpoint.
 * `number` 0 means the newest one. *size_out, which may be NULL, is its size, also on OVERFLOW. No
 * engine is needed.
 *
 * Returns:  FRUGAL_OK
 *           NOT_FOUND: there is no such folder, checkpoint or blob
 *           OVERFLOW: capacity is less than the size; nothing was written to bytes_out
 *           DAMAGED, TOO_NEW, IO
 *           UNSUPPORTED: this build cannot read checkpoints
 * Waits:    for the disk
 * Threads:  any
 * Owner:    bytes_out is the caller's; it may be NULL if capacity is 0
 */
FRUGAL_API int32_t frugal_checkpoint_read_blob(const char *folder, uint64_t number, uint32_t rank,
                                               void *bytes_out, size_t capacity, size_t *size_out);

/* Copies a checkpoint into another folder, which then needs nothing of the first one.
 * `number` 0 means the newest one.
 * That folder is created if it is missing, and may have no checkpoint. On one file system the files
 * share their bytes where that is possible. Lengths and headers of files are checked, and records
 * are not: frugal-fsck checks these. No engine is needed.
 *
 * Returns:  FRUGAL_OK: the copy is on disk; on an error there is none
 *           NOT_FOUND: there is no such folder or checkpoint
 *           EXISTS: the folder `to` has checkpoints
 *           BUSY: an engine writes the folder `to`
 *           DAMAGED, TOO_NEW, IO, NO_SPACE
 *           UNSUPPORTED: this build cannot read checkpoints
 * Waits:    for the disk
 * Threads:  any
 */
FRUGAL_API int32_t frugal_checkpoint_copy(const char *folder, uint64_t number, const char *to);

#ifdef __cplusplus
}
#endif

#endif /* FRUGAL_H */
