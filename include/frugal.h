/*
 * frugal.h - the whole public interface of Frugal, an embeddable engine that trains embedding
 * tables larger than the GPU and larger than RAM with the exact result of synchronous training.
 *
 * What is not in this file is not part of the interface. C99 and every later C and C++.
 *
 * The step protocol
 * -----------------
 *     frugal_open -> frugal_table_create -> one frugal_trainer per rank
 *     every trainer, for s = first, first + 1, ...:
 *         frugal_prefetch(s + L, keys)      declare the keys of a later step (asynchronous)
 *         frugal_step_begin(s)              the gate: waits until the rows of s are up to date
 *         frugal_lookup(keys, out)          rows for the forward pass
 *         frugal_push_grad(keys, grads)     gradients of the backward pass
 *         frugal_step_end(s)
 *     frugal_flush / frugal_close
 *
 * With staleness 0 a lookup at step s returns, on every rank, each row after exactly all updates
 * of the steps before s; the final tables are bit for bit those of a one-thread loop, whatever
 * the number of threads, the cache size, the window, and timing. docs/arithmetic.md states the
 * arithmetic down to the order of each addition.
 *
 * Conventions
 * -----------
 * - Every function that can fail returns int32_t: FRUGAL_OK (0), or a negative status whose
 *   value is fixed forever. frugal_last_error() has the message of the calling thread.
 *   A function names the statuses that are its own. Beside them each may answer BAD_HANDLE, FORKED,
 *   INVALID_ARGUMENT (a null pointer, a bad time-out), OUT_OF_MEMORY and INTERNAL; one that works
 *   on an open engine CLOSED and UNHEALTHY, but for those that only tell (frugal_health,
 *   frugal_committed_step, frugal_table_find, frugal_table_next, frugal_table_describe, frugal_get_stats,
 *   frugal_metrics, frugal_trace_start, frugal_trace_stop). A call of a trainer on a GPU may also
 *   answer DEVICE (the GPU has failed: close the trainer, the others go on) and UNSUPPORTED (its
 *   stream is being captured). With a service every call may answer PEER_LOST, and one outside of steps BUSY
 *   where 256 calls of the process wait for the controller. When the controller's
 *   process has ended, in any way, or has closed the engine, the tables that this process has opened can still be read out
 *   as of the last committed step, until it closes the engine itself: frugal_get, frugal_read, frugal_table_count,
 *   frugal_table_keys, frugal_table_describe and frugal_committed_step go on to work (one that takes more than
 *   2 s to stop in good order makes them answer PEER_LOST: call again). Of a frugal_put
 *   or frugal_delete that was under way each row is as before or as after it. They answer PEER_LOST
 *   where something is missing (the message names the step), NOT_FOUND where the table was dropped,
 *   INTERNAL where the memory is damaged. (Needs pidfds: Linux 5.3.) A controller that is stopped is as good
 *   as dead for a call that has waited for it for timeout_ms, or the call's time-out if that is longer, and 5 s.
 * - Handles are typed, opaque and never addresses: a handle that was closed, or never was one,
 *   is answered with FRUGAL_ERR_BAD_HANDLE. Close and drop functions accept NULL.
 * - Parameters come as: handle, inputs, outputs (named *_out). Outputs are written only on
 *   success unless their description says otherwise.
 * - Structs that may grow start with `struct_size`; set it (and every default) with the struct's
 *   _INIT macro or its _init function, which give the same bytes. A struct_size that this
 *   library does not know, and any unknown flag, is an error.
 * - Threads: a `const` handle may be used by any number of threads at once; a call that takes a
 *   trainer as non-const is made by one thread at a time for that trainer. Different trainers
 *   are independent.
 * - Ownership: the caller's buffers are read or written during the call only (those on a GPU: in the
 *   trainer's stream, behind the call); the library keeps no pointer into them. Memory that the
 *   library lends says so.
 * - A call takes at most 2^20 ops. An op, and a call on rows outside steps, takes at most 2^32 - 2 keys.
 * - Every wait has a time-out in milliseconds: FRUGAL_TIMEOUT_DEFAULT takes the engine's (30
 *   minutes unless configured), 0 polls, FRUGAL_TIMEOUT_INFINITE waits for ever. A call that
 *   answers FRUGAL_ERR_TIMEOUT took nothing and can be made again; its message names what it
 *   waited for. Not limited is the wait for what a GPU has been given already, where memory is to be
 *   used again (aborts, closing, calls that fail) or the call has to know its result.
 * - A thread that calls has a stack of at least 64 KiB. No call takes half of it.
 * - A thread is not cancelled (pthread_cancel) in the middle of a call, though that waits: cancellation is
 *   disabled meanwhile, and comes at the thread's next cancellation point after it.
 * - Time-outs are by the steady clock: setting the system's changes none.
 * - A message begins with the table that it is about (of several ops with the op, the first being op 0), and has the
 *   value that was given and what would do.
 * - The library prints nothing, installs no signal handler, never exits, and refuses to work in
 *   a child made by fork() (FRUGAL_ERR_FORKED).
 *
 * Since: all functions below are of version 0.1 unless they say otherwise.
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
 * Status
 * ------------------------------------------------------------------------------------------ */

typedef enum frugal_status {
  FRUGAL_OK = 0,
  FRUGAL_ERR_INVALID_ARGUMENT = -1, /* a null pointer, a value out of its range, an unknown flag */
  FRUGAL_ERR_BAD_HANDLE = -2,       /* closed, never opened, or of another kind */
  FRUGAL_ERR_STRUCT_SIZE = -3,      /* a config struct of a newer or unknown version */
  FRUGAL_ERR_OUT_OF_MEMORY = -4,    /* memory (of a GPU, or that can be pinned or shared, too) or the
                                       engine's host_bytes is exhausted */
  FRUGAL_ERR_KEY_OUT_OF_RANGE = -5, /* an id of a dense table is not in 0..rows-1 */
  FRUGAL_ERR_TABLE_FULL = -6,       /* the new keys of the call do not all fit */
  FRUGAL_ERR_EXISTS = -7,           /* a table of that name, or a trainer of that rank, exists */
  FRUGAL_ERR_STEP_ORDER = -8,       /* the step is not the one that must come now */
  FRUGAL_ERR_STEP_RANGE = -9,       /* a declared step has begun, or lies beyond the ring */
  FRUGAL_ERR_NOT_IN_STEP = -10,     /* the call belongs between step_begin and step_end */
  FRUGAL_ERR_STEP_ABORTED = -11,    /* the step was aborted by another rank; begin it again */
  FRUGAL_ERR_BUSY = -12,            /* a rank is inside a step, or ranks have ended different ones; or a process
                                       has more open than it may */
  FRUGAL_ERR_TIMEOUT = -13,         /* the message names what was waited for; call again */
  FRUGAL_ERR_NAN = -14,             /* a gradient has a NaN and the table rejects them */
  FRUGAL_ERR_FORKED = -15,          /* the engine belongs to the parent of this process */
  FRUGAL_ERR_UNSUPPORTED = -16,     /* well formed, but this build or machine cannot do it */
  FRUGAL_ERR_NOT_FOUND = -17,       /* no such table or batch */
  FRUGAL_ERR_UNHEALTHY = -18,       /* a background failure; frugal_health() tells which */
  FRUGAL_ERR_CLOSED = -19,          /* the object was closed while the call waited */
  FRUGAL_ERR_OVERFLOW = -20,        /* an output buffer is too small; the needed size is told */
  FRUGAL_ERR_INTERNAL = -21,        /* a bug of the library; please report the message */
  FRUGAL_ERR_DEVICE = -22,          /* no such GPU, or it failed: frugal_error.device_code tells */
  FRUGAL_ERR_PEER_LOST = -23        /* a trainer process or the controller is gone; the message says
                                       which */
} frugal_status;

/* The name of a status, as "FRUGAL_ERR_TIMEOUT". Returns: a static string, never NULL;
 * "FRUGAL_UNKNOWN" for other values. Threads: any. */
FRUGAL_API const char *frugal_status_name(int32_t status);

/* What went wrong in the calling thread's last call that failed. */
typedef struct frugal_error {
  int32_t status;      /* of that call; FRUGAL_OK if none failed yet */
  int32_t system_code; /* errno of the system call behind it, or 0 */
  int32_t device_code; /* CUDA error behind it, or 0 */
  int32_t reserved;
  const char *message; /* what was wrong and what to do; never NULL */
} frugal_error;

/* Tells the calling thread's last failure. Returns: nothing; `error_out` is filled (NULL is
 * ignored). Ownership: the message is the library's, valid until this thread's next failing
 * call. Threads: any; each thread has its own. */
FRUGAL_API void frugal_last_error(frugal_error *error_out);

/* The library's version as "major.minor.patch". Returns: a static string. Threads: any. */
FRUGAL_API const char *frugal_version(void);

/* ---------------------------------------------------------------------------------------------
 * Handles and constants
 * ------------------------------------------------------------------------------------------ */

typedef struct frugal_engine frugal_engine;   /* an opened instance */
typedef struct frugal_table frugal_table;     /* rows of one dimension with optimizer state */
typedef struct frugal_trainer frugal_trainer; /* one rank of synchronous training */
typedef struct frugal_batch frugal_batch;     /* keys declared for one step */

#define FRUGAL_TIMEOUT_DEFAULT ((int64_t)-1)
#define FRUGAL_TIMEOUT_INFINITE ((int64_t)-2)
#define FRUGAL_STALENESS_ASYNC UINT64_MAX /* staleness without bound (ASP) */
#define FRUGAL_NO_STEP UINT64_MAX         /* "no step committed yet" */
#define FRUGAL_MAX_LOOKAHEAD 40           /* largest engine-wide lookahead */

/* How updates reach the host rows (contract: P2F; FRUGAL section 3.3). */
typedef enum frugal_flush_mode {
  FRUGAL_FLUSH_AUTO = 0,         /* the engine chooses between the next two by measured idle time; what little a
                                    small step writes, below 256 KiB of rows, the step_end that commits it writes */
  FRUGAL_FLUSH_AT_ONCE = 1,      /* applied after the step's end by all threads, trainers included */
  FRUGAL_FLUSH_DEFERRED = 2,     /* priority-based proactive flushing, two-level queue */
  FRUGAL_FLUSH_WRITE_THROUGH = 3,/* baseline FRUGAL-SYNC: everything is written at step end, before the
                                    next begins; as yet in the same way as at once */
  FRUGAL_FLUSH_TREE_HEAP = 4     /* baseline: deferred, the queue is a heap with a lock per node */
} frugal_flush_mode;

typedef enum frugal_backing {
  FRUGAL_BACKING_PRIVATE = 0, /* anonymous memory with transparent huge pages */
  FRUGAL_BACKING_SHM = 1      /* shared memory without a name (memfd) */
} frugal_backing;

/* A log line. `level`: 0 error, 1 warning, 2 information. The text is valid during the call. The
 * hook may be called from any thread of the engine and must not call the library; what it throws is
 * dropped. */
typedef void (*frugal_log_fn)(void *context, int32_t level, const char *text);

/* ---------------------------------------------------------------------------------------------
 * Engine
 * ------------------------------------------------------------------------------------------ */

typedef struct frugal_config {
  size_t struct_size;
  uint32_t world_size;        /* ranks, 1..4096; default 1 */
  uint32_t lookahead;         /* largest number of future steps that may be declared: the ring
                                 holds the current step + lookahead; 0..FRUGAL_MAX_LOOKAHEAD;
                                 default 10 */
  uint32_t flush_threads;     /* background threads, 0..256; with 0 the waiters flush; default 1 */
  int32_t flush_mode;         /* frugal_flush_mode; default FRUGAL_FLUSH_AUTO */
  uint64_t staleness;         /* tau: 0 synchronous (default), FRUGAL_STALENESS_ASYNC, or between; a
                                 finite bound above 19 means 19. A rank runs at most 19 steps ahead of
                                 the first that is not committed, or 61 with FRUGAL_STALENESS_ASYNC */
  uint64_t pending_bytes;     /* budget of memory for updates not yet in the host rows: while more
                                 than this waits no step begins and the gates write; they do so
                                 earlier, from 4 MiB on, when a backlog of steps shows that flushing
                                 does not keep up. One step's updates may exceed it. 0 writes
                                 through; default 1 GiB */
  uint64_t host_bytes;        /* limit of memory for tables; UINT64_MAX (default) for none. Memory
                                 that the engine keeps for later counts, too, and gives way to
                                 tables. Shared memory that lies beside buffers in use does not
                                 give way: tables have that much less */
  int64_t timeout_ms;         /* what FRUGAL_TIMEOUT_DEFAULT means; default 1,800,000 */
  int32_t backing;            /* frugal_backing; default private */
  uint32_t flags;             /* 0 or FRUGAL_OBSERVE */
  uint64_t seed;              /* of all initializers; default 0 */
  frugal_log_fn log;          /* NULL: no log */
  void *log_context;
  const char *service;        /* address of a controller to attach to; NULL (default): the engine is
                                 this process's own. Not copied beyond the call */
} frugal_config;

#define FRUGAL_OBSERVE 1u /* with a service only: attach to the engine that is there as it is, to look at it; the
                             other fields are ignored. What would change the engine is UNSUPPORTED from here: to
                             join, create or drop a table, put or delete rows, set an optimizer */

#define FRUGAL_CONFIG_INIT                                                                      \
  { sizeof(frugal_config), 1, 10, 1, FRUGAL_FLUSH_AUTO, 0, (uint64_t)1 << 30, UINT64_MAX,       \
    1800000, FRUGAL_BACKING_PRIVATE, 0, 0, NULL, NULL, NULL }

/* Sets every default. Returns: nothing. Threads: any. */
FRUGAL_API void frugal_config_init(frugal_config *config);

/* Opens an engine and starts its threads; with `service` set it attaches to the engine of another
 * process (frugal_serve) and all calls are the same. Of its configuration `config` must ask for the same
 * world_size, lookahead, staleness and seed (else INVALID_ARGUMENT). timeout_ms is of this process's calls, also of this
 * one, which waits for so long where nobody serves the address yet; log is not called; the rest is as that
 * engine has it, which the first to attach to a frugal-controller decides: with the timeout_ms after which a rank that
 * says nothing is lost. Where the controller does not answer, any call may answer TIMEOUT or PEER_LOST; where it was
 * stopped or has ended, PEER_LOST, but for those that read out the tables when it has ended. A call outside
 * of steps waits for those that other threads of the process have under way, whatever its own time-out.
 * Returns: FRUGAL_OK, INVALID_ARGUMENT, STRUCT_SIZE, OUT_OF_MEMORY, UNSUPPORTED (this build, or this
 * system, cannot attach, or has no shared memory as the engine needs it), PEER_LOST (nobody serves that
 * address, or who does is stopping), NOT_FOUND (FRUGAL_OBSERVE, and no engine has been opened there), BUSY (this
 * process has 32 engines of that controller open).
 * Ownership: the caller closes *engine_out. Threads: any. `config` NULL means all defaults. */
FRUGAL_API int32_t frugal_open(const frugal_config *config, frugal_engine **engine_out);

/* Stops the threads, writes what is pending, and frees everything, the tables, too (which attached processes can
 * read out all the same); trainers, tables and batches of the engine become closed handles; a step that some rank is
 * inside of is lost. So is one that all ranks have ended, if there is no memory to commit it: the
 * log tells (a frugal-controller: its standard error). NULL is accepted.
 * Needs no memory, but for the first call of a thread (OUT_OF_MEMORY: nothing has happened, call
 * again). Returns: FRUGAL_OK or BAD_HANDLE; in a forked child FRUGAL_ERR_FORKED, and nothing happens.
 * Threads: any; calls of other threads that wait answer FRUGAL_ERR_CLOSED. */
FRUGAL_API int32_t frugal_close(frugal_engine *engine);

/* The sticky health of the engine: FRUGAL_OK, or the status of the first background failure,
 * which every later call reports as FRUGAL_ERR_UNHEALTHY. Memory of the host that runs out is none: what is to be
 * done for a step is done when there is memory. Threads: any. */
FRUGAL_API int32_t frugal_health(const frugal_engine *engine);

/* Waits until every update of every committed step is in the host rows. Returns: FRUGAL_OK,
 * TIMEOUT, BAD_HANDLE, UNHEALTHY. Threads: any; a caller helps with the work. */
FRUGAL_API int32_t frugal_flush(const frugal_engine *engine, int64_t timeout_ms);

/* Tells the last step that all ranks have ended; FRUGAL_NO_STEP if none. Returns: FRUGAL_OK,
 * BAD_HANDLE. Threads: any. */
FRUGAL_API int32_t frugal_committed_step(const frugal_engine *engine, uint64_t *step_out);

/* Lets other processes attach to this engine by frugal_config.service until it is closed. `address` is
 * the path of a Unix-domain socket, which is made there for processes of the same user (0600). Needs
 * FRUGAL_BACKING_SHM. To be called between steps. Returns: FRUGAL_OK, INVALID_ARGUMENT (the path, or
 * the backing), EXISTS (a living process serves that address, or this engine is served), BUSY (a rank
 * is inside a step, or ranks are apart), TIMEOUT (updates are still being written: call again),
 * OUT_OF_MEMORY, UNSUPPORTED (this build, or this system, cannot serve, or the engine is itself attached
 * to another).
 * Threads: any. Since: 0.1. */
FRUGAL_API int32_t frugal_serve(frugal_engine *engine, const char *address);

/* ---------------------------------------------------------------------------------------------
 * Optimizers. Equations and sources: docs/arithmetic.md.
 * ------------------------------------------------------------------------------------------ */

typedef enum frugal_optimizer_kind {
  FRUGAL_SGD = 0,             /* no state */
  FRUGAL_MOMENTUM = 1,        /* dim floats of state; momentum, dampening, nesterov */
  FRUGAL_ADAGRAD = 2,         /* dim floats */
  FRUGAL_ROWWISE_ADAGRAD = 3, /* 1 float */
  FRUGAL_ADAM = 4,            /* lazy Adam, 2 x dim floats; bias correction by step number + 1, or the caller's */
  FRUGAL_RMSPROP = 5,         /* dim floats */
  FRUGAL_FTRL = 6             /* 2 x dim floats: z and n */
} frugal_optimizer_kind;

/* Hyper-parameters. The kind is the table's, and fixed by its first update. Everything else may
 * change for any step that is not committed yet. All are finite. Bounds are of those that a kind
 * looks at; others are INVALID_ARGUMENT. */
typedef struct frugal_optimizer {
  size_t struct_size;
  int32_t kind;               /* frugal_optimizer_kind; default SGD */
  float lr;                   /* learning rate, 0 or more, FTRL: above 0; default 0.01 */
  float eps;                  /* Adagrad, row-wise Adagrad, Adam, RMSProp, above 0; default 1e-8.
                                 0 with an initial_accumulator above 0 */
  float momentum;             /* momentum: mu, 0 or more; default 0.9 */
  float dampening;            /* momentum: 0..1; default 0 */
  float beta1;                /* Adam, [0, 1); default 0.9 */
  float beta2;                /* Adam, [0, 1); default 0.999 */
  float rho;                  /* RMSProp: alpha, 0..1; default 0.99 */
  float ftrl_lambda1;         /* FTRL: L1, 0 or more; default 0 */
  float ftrl_lambda2;         /* FTRL: L2, 0 or more; default 0 */
  float ftrl_beta;            /* FTRL: 0 or more; default 1 */
  float initial_accumulator;  /* Adagrad, row-wise Adagrad, FTRL n: state of a new row, 0 or more; default 0;
                                 fixed as the kind is */
  float weight_decay_l2;      /* adds l2 * w to the gradient; 0 or more; default 0 */
  float weight_decay;         /* decoupled: w -= lr * weight_decay * w after the update; 0 or more; default 0 */
  float clip_value;           /* each element to [-c, c]; 0 (default): off */
  float clip_norm;            /* the row's gradient to L2 norm at most c; 0 (default): off */
  float weight_bound;         /* each weight to [-b, b] after the update; 0 (default): off */
  float grad_scale;           /* multiplies the summed gradient; any, default 1 */
  uint32_t flags;             /* FRUGAL_OPT_* */
} frugal_optimizer;

#define FRUGAL_OPT_NESTEROV 1u     /* momentum: Nesterov's form */
#define FRUGAL_OPT_MEAN_RANKS 2u   /* the sum over ranks is divided by world_size */
/* Adam: lr is the rate of the step as it is. The caller counts steps, and has both corrections of
 * its count in lr. */
#define FRUGAL_OPT_NO_BIAS_CORRECTION 4u
/* frugal_table_set_optimizer: all rows get the state of new ones. */
#define FRUGAL_OPT_NEW_STATE 8u

#define FRUGAL_OPTIMIZER_INIT                                                                   \
  { sizeof(frugal_optimizer), FRUGAL_SGD, 0.01f, 1e-8f, 0.9f, 0.0f, 0.9f, 0.999f, 0.99f, 0.0f,   \
    0.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0 }

/* Sets every default. Returns: nothing. Threads: any. */
FRUGAL_API void frugal_optimizer_init(frugal_optimizer *optimizer);

/* ---------------------------------------------------------------------------------------------
 * Tables
 * ------------------------------------------------------------------------------------------ */

typedef enum frugal_key_space {
  FRUGAL_DENSE = 0, /* ids 0..rows-1, every row exists from the start */
  FRUGAL_HASHED = 1 /* any 64-bit key; a row is created on first training use; at most `rows` */
} frugal_key_space;

typedef enum frugal_dtype { FRUGAL_F32 = 0 } frugal_dtype;

typedef enum frugal_init_kind {
  FRUGAL_INIT_CONSTANT = 0,         /* a */
  FRUGAL_INIT_UNIFORM = 1,          /* [a, b), a <= b */
  FRUGAL_INIT_NORMAL = 2,           /* mean a, standard deviation b >= 0 */
  FRUGAL_INIT_TRUNCATED_NORMAL = 3, /* the same, within a +- 2 b */
  FRUGAL_INIT_XAVIER = 4            /* uniform in +- a * sqrt(6 / (fan_in + dim)), a >= 0, fan_in =
                                       b >= 0 or, if b is 0, `rows` */
} frugal_init_kind; /* a and b of which some row could get a value that is not finite are refused */

typedef enum frugal_nan_policy {
  FRUGAL_NAN_REJECT = 0, /* the push answers FRUGAL_ERR_NAN and nothing is taken; of gradients on a GPU
                            step_end does, and the step is undone on all ranks (default) */
  FRUGAL_NAN_SKIP = 1,   /* a row whose summed gradient has a NaN is not touched in that step */
  FRUGAL_NAN_ACCEPT = 2  /* arithmetic goes on; NaNs are stored as 0x7fc00000 */
} frugal_nan_policy;

typedef struct frugal_table_config {
  size_t struct_size;
  const char *name;       /* 1..255 bytes, unique in the engine; part of the initial values' seed */
  int32_t key_space;      /* frugal_key_space; default dense */
  int32_t dtype;          /* frugal_dtype of the rows; default FRUGAL_F32 */
  uint64_t rows;          /* dense: number of ids; hashed: most rows; 1..2^32-2 */
  uint32_t dim;           /* elements of a row, 1..65536 */
  int32_t init;           /* frugal_init_kind; default constant */
  float init_a;           /* default 0 */
  float init_b;           /* default 0 */
  int32_t nan_policy;     /* frugal_nan_policy */
  uint32_t flags;         /* FRUGAL_TABLE_* */
  frugal_optimizer optimizer;
} frugal_table_config;

#define FRUGAL_TABLE_LAZY 1u /* dense: memory and initial values of a row come with its first use */

#define FRUGAL_TABLE_CONFIG_INIT                                                                \
  { sizeof(frugal_table_config), NULL, FRUGAL_DENSE, FRUGAL_F32, 0, 0, FRUGAL_INIT_CONSTANT,    \
    0.0f, 0.0f, FRUGAL_NAN_REJECT, 0, FRUGAL_OPTIMIZER_INIT }

/* Sets every default. Returns: nothing. Threads: any. */
FRUGAL_API void frugal_table_config_init(frugal_table_config *config);

/* Creates a table; its memory is reserved (all of it, or per slab for lazy and hashed tables)
 * and a dense table's rows are initialized in parallel. Where processes share the engine each
 * creates its tables: one that another process has created with the same configuration is meant.
 * Returns: FRUGAL_OK, INVALID_ARGUMENT, STRUCT_SIZE, EXISTS (this process has created a table of that
 * name, or another has with another configuration), OUT_OF_MEMORY, BUSY (a rank is inside a step),
 * UNSUPPORTED (the system refuses shared memory as the engine needs it), with a service TIMEOUT: then call
 * again, and the table that is there by now is meant. Ownership: the engine owns the table; the handle dies
 * with frugal_table_drop or frugal_close. Threads: any. */
FRUGAL_API int32_t frugal_table_create(frugal_engine *engine, const frugal_table_config *config,
                                       frugal_table **table_out);

/* Drops a table and frees its memory; declared batches lose their part of it. NULL is accepted.
 * Returns: FRUGAL_OK, BAD_HANDLE, BUSY, OUT_OF_MEMORY, TIMEOUT (of writing what is pending, or of a
 * service). After these two call again: done is done. A table that another process has dropped is
 * let go of here, too: FRUGAL_OK. Threads: any. */
FRUGAL_API int32_t frugal_table_drop(frugal_table *table);

/* Finds a table by name. Returns: FRUGAL_OK, NOT_FOUND, BAD_HANDLE. Threads: any. */
FRUGAL_API int32_t frugal_table_find(const frugal_engine *engine, const char *name,
                                     frugal_table **table_out);

/* Enumerates tables, those of other processes and languages, too: writes the name of the next one
 * from `*cursor` on (start with 0) and moves the cursor. frugal_table_find gives its handle. The
 * order is that of creation. Tables that are created or dropped meanwhile do not disturb it.
 * `*size_out` is the size of the name with the 0 that ends it; 0 means the end. Names fit in 256
 * bytes. OVERFLOW tells the size, too: capacity was less, and nothing was written or moved.
 * name_out may be NULL if capacity is 0. Returns: FRUGAL_OK, BAD_HANDLE, OVERFLOW. Threads: any.
 * Since: 0.1. */
FRUGAL_API int32_t frugal_table_next(const frugal_engine *engine, uint64_t *cursor, char *name_out,
                                     size_t capacity, size_t *size_out);

typedef struct frugal_table_info {
  size_t struct_size;      /* set by the caller */
  uint64_t rows;           /* rows that exist now */
  uint64_t capacity;       /* the configured `rows` */
  uint64_t value_bytes;    /* bytes of a row's elements: dim * element size */
  uint64_t state_floats;   /* optimizer state of a row, in floats */
  uint64_t memory_bytes;   /* memory held now */
  uint32_t dim;
  int32_t key_space;
  int32_t optimizer;
  uint32_t page_bytes;     /* page size that the rows' memory asks for */
} frugal_table_info;

/* Describes a table; `info_out->struct_size` must be set. Returns: FRUGAL_OK, BAD_HANDLE,
 * STRUCT_SIZE. Threads: any. */
FRUGAL_API int32_t frugal_table_describe(const frugal_table *table, frugal_table_info *info_out);

/* Counts the rows that exist. Returns: FRUGAL_OK, BAD_HANDLE, BUSY, TIMEOUT. Threads: any. */
FRUGAL_API int32_t frugal_table_count(const frugal_table *table, uint64_t *count_out);

/* Enumerates keys: writes up to `capacity` keys of existing rows from `*cursor` on (start with
 * 0) and moves the cursor; with a capacity above 0, `*count_out` 0 means the end. The order is the rows' internal one and
 * changes when rows are created or deleted. Returns: FRUGAL_OK, BAD_HANDLE, BUSY, TIMEOUT. Threads:
 * any. */
FRUGAL_API int32_t frugal_table_keys(const frugal_table *table, uint64_t *cursor,
                                     uint64_t *keys_out, size_t capacity, size_t *count_out);

/* Sets the hyper-parameters from `first_step` on, until the next first_step of another change,
 * whichever call came first: after 10 and then 5, what was given for 5 holds in the steps 5 to 9.
 * Of two for the same first_step the later call counts. At most 4,096 changes wait for steps that
 * are not committed (one more is INVALID_ARGUMENT). The kind and initial_accumulator are the
 * table's. Others are taken as long as no step that updates the table is committed, and no row was
 * put with state. After that others need FRUGAL_OPT_NEW_STATE. Others, and that flag, are taken
 * between steps, as frugal_put is made: pending updates are written first. Then rows keep their
 * values, and all get the state of new ones. Every step that is not committed has what is given,
 * whatever was set before for some. state_floats changes with the kind. Returns: FRUGAL_OK,
 * INVALID_ARGUMENT, STRUCT_SIZE, STEP_RANGE (first_step is committed); with another kind or
 * initial_accumulator, or the flag, BUSY, TIMEOUT and OUT_OF_MEMORY (the old ones hold). A process
 * that has attached maps the new state in its next call, or step, that needs it.
 * Threads: any. */
FRUGAL_API int32_t frugal_table_set_optimizer(frugal_table *table, uint64_t first_step,
                                              const frugal_optimizer *optimizer);

/* Tells the bytes that a configuration takes before it is opened: the most that a table with all of
 * its rows takes at any time. `cache_rows` is the number of rows that one trainer's device cache
 * would hold for this table. The first three are what counts against host_bytes; with shared memory,
 * idle buffers count there, too. Not counted, for they depend on the batches: declared keys, and the
 * updates that wait (pending_bytes). */
typedef struct frugal_memory {
  uint64_t values;      /* host rows */
  uint64_t state;       /* optimizer state */
  uint64_t index;       /* hashed: keys, existence bytes and the hash index at its largest, which is
                           while it is copied to a larger one; lazy: existence bytes */
  uint64_t window;      /* flat index of rows, 8 bytes a row, where updates can be deferred: any mode
                           but at-once and write-through, staleness > 0, or with a cache */
  uint64_t cache;       /* one trainer's device cache, its index included */
  uint64_t total;
} frugal_memory;

/* Tells the bytes that a table of an engine would take; opens and reserves nothing. `engine_config`
 * NULL means all defaults, and the table's name is not looked at. Returns: FRUGAL_OK,
 * INVALID_ARGUMENT, STRUCT_SIZE. Threads: any. */
FRUGAL_API int32_t frugal_memory_needed(const frugal_config *engine_config,
                                        const frugal_table_config *table_config,
                                        uint64_t cache_rows, frugal_memory *memory_out);

/* ---------------------------------------------------------------------------------------------
 * Rows outside steps. Allowed when no rank is inside a step and all have ended the same one,
 * else FRUGAL_ERR_BUSY. All see every committed step.
 * ------------------------------------------------------------------------------------------ */

#define FRUGAL_WITH_STATE 1u /* rows travel with optimizer state: dim floats, then state_floats */
/* Of frugal_get alone: rows as of the last committed step, at any time. Ranks may be inside steps;
 * a step that they complete meanwhile is committed when the call returns. A row of a hashed table
 * that a step has created which is not committed has its initial values. */
#define FRUGAL_COMMITTED 2u

/* Reads `count` rows into `rows_out` (row i at byte i * row_stride; stride 0 means packed). A
 * missing row of a hashed table leaves its part of rows_out untouched; found_out (may be NULL)
 * tells 1 or 0 for each key. Creates nothing. Returns: FRUGAL_OK (also when keys are missing),
 * INVALID_ARGUMENT, KEY_OUT_OF_RANGE, BUSY, TIMEOUT. Threads: any. */
FRUGAL_API int32_t frugal_get(const frugal_table *table, const uint64_t *keys, size_t count,
                              uint32_t flags, float *rows_out, size_t row_stride,
                              uint8_t *found_out);

/* Writes `count` rows, creating those that are missing; without FRUGAL_WITH_STATE the optimizer
 * state of a row is reset to that of a new one. If a key comes twice its last row stays. Cached
 * copies are dropped. Returns: FRUGAL_OK, INVALID_ARGUMENT, KEY_OUT_OF_RANGE, TABLE_FULL or
 * OUT_OF_MEMORY (nothing is written), BUSY, TIMEOUT. Threads: any. */
FRUGAL_API int32_t frugal_put(frugal_table *table, const uint64_t *keys, size_t count,
                              uint32_t flags, const float *rows, size_t row_stride);

/* Deletes rows; those of a dense table return to their initial value and state. Missing keys are
 * ignored; *deleted_out (may be NULL) counts the rows that were there. Returns: FRUGAL_OK,
 * KEY_OUT_OF_RANGE, BUSY, TIMEOUT. Threads: any. */
FRUGAL_API int32_t frugal_delete(frugal_table *table, const uint64_t *keys, size_t count,
                                 uint64_t *deleted_out);

/* ---------------------------------------------------------------------------------------------
 * Trainers
 * ------------------------------------------------------------------------------------------ */

typedef struct frugal_trainer_config {
  size_t struct_size;
  uint32_t rank;          /* 0..world_size-1 */
  uint32_t flags;         /* FRUGAL_TRAINER_* */
  const char *device;     /* "cpu" (default, NULL too); "cuda:N" in a build with CUDA */
  uint64_t cache_bytes;   /* private cache for rows, state and their index, over all tables, on the
                             device (the index on the host); default 0 */
  double cache_ratio;     /* the same as a share of each table's rows, 0..1; the larger counts */
} frugal_trainer_config;

#define FRUGAL_TRAINER_REPLACE 1u /* take the rank over from a trainer process that does not answer. It
                                     has a meaning with a service only: else UNSUPPORTED */

#define FRUGAL_TRAINER_CONFIG_INIT \
  { sizeof(frugal_trainer_config), 0, 0, NULL, 0, 0.0 }

/* Sets every default. Returns: nothing. Threads: any. */
FRUGAL_API void frugal_trainer_config_init(frugal_trainer_config *config);

/* Joins as a rank. Nobody's step commits until every rank has joined once. A rank that left may
 * join again when no rank is inside a step and all have ended the same one. Returns: FRUGAL_OK,
 * INVALID_ARGUMENT, STRUCT_SIZE, EXISTS (the rank is taken, or another thread of this process is joining as
 * it), BUSY, DEVICE (no driver, no such GPU),
 * OUT_OF_MEMORY (of memory that can be pinned, too), TIMEOUT, UNSUPPORTED (FRUGAL_TRAINER_REPLACE
 * without a service; with one a GPU that cannot pin memory mapped to be read).
 * Ownership: the caller closes *trainer_out. Threads: any.
 * On a GPU (FRUGAL section 3.2) rows stay in host memory, which is pinned when the first such trainer
 * joins and as it grows, and kernels read them there. Pointers of its ops, but found_out, may be to
 * memory of that device, of its primary context (rows, grads, weights and weight_grads_out of an op on one side). Keys on the
 * device are compared with those of the batch, or copied, and so are offsets without a batch: such a call
 * waits for the stream. With a batch and keys NULL nothing waits (with a service see frugal_set_stream); what is
 * wrong with offsets on the device is then told by step_end (INVALID_ARGUMENT), and the step is undone on all
 * ranks. With staleness a GPU has no cache. A rank on the cpu device takes host memory only (else
 * INVALID_ARGUMENT). */
FRUGAL_API int32_t frugal_trainer_create(frugal_engine *engine,
                                         const frugal_trainer_config *config,
                                         frugal_trainer **trainer_out);

/* Leaves: from now on nobody waits for this rank. Its declarations are cancelled; a step that it
 * is inside of is aborted for all. NULL is accepted. Returns: FRUGAL_OK, BAD_HANDLE, FORKED,
 * OUT_OF_MEMORY, with a service also TIMEOUT. After these two call again: until then the handle stays
 * (unless the engine is being closed: that closes the trainer, too).
 * Threads: any one; a call of the trainer that waits answers FRUGAL_ERR_CLOSED. */
FRUGAL_API int32_t frugal_trainer_close(frugal_trainer *trainer);

/* Gives a trainer up, for a program that fails: as if its process had ended. With a service every
 * uncommitted step is undone, the other ranks' calls answer PEER_LOST, and somebody who joins as this rank
 * is waited for; without one it is frugal_trainer_close. NULL is accepted. Returns and threads: as
 * frugal_trainer_close. Since: 0.1. */
FRUGAL_API int32_t frugal_trainer_abandon(frugal_trainer *trainer);

/* Names the stream (a cudaStream_t) in which this trainer's calls do their work on the GPU from now on;
 * NULL, the default, is the default stream of the device. Calls return when their work has been given to the
 * stream (with a service step_end, lookup and weight_grads_out into memory of the device, and prefetch of keys
 * there, when it is done; the first two for at most the engine's timeout_ms: then TIMEOUT, call again): rows_out
 * is complete, and grads may be written again, when the stream has come past it. Each call orders itself behind
 * what the trainer's earlier calls gave to other streams only through the caller's own events.
 * Returns: FRUGAL_OK, INVALID_ARGUMENT (a stream of another device, cudaStreamPerThread), UNSUPPORTED (the cpu
 * device has no streams; the stream is being captured: no call of a step can be), DEVICE.
 * Ownership: the stream stays the caller's, and must live until the step is committed. Threads: one at a time
 * for a trainer. Since: 0.1. */
FRUGAL_API int32_t frugal_set_stream(frugal_trainer *trainer, void *stream);

/* ---------------------------------------------------------------------------------------------
 * Steps
 * ------------------------------------------------------------------------------------------ */

typedef enum frugal_pooling {
  FRUGAL_POOL_NONE = 0, /* a row for each key */
  FRUGAL_POOL_SUM = 1,  /* a row for each bag: the (weighted) sum of its rows */
  FRUGAL_POOL_MEAN = 2  /* the sum divided by the bag's number of keys, padding not counted */
} frugal_pooling;

/* The keys of one table in a call. A call takes an array of these, tables in any order, a table
 * more than once if wanted. */
typedef struct frugal_op {
  size_t struct_size;
  frugal_table *table;
  const frugal_batch *batch; /* declared batch whose part `part` this is, or NULL */
  uint32_t part;             /* index of this table's op in the frugal_prefetch call */
  int32_t pooling;           /* frugal_pooling */
  const uint64_t *keys;      /* `count` keys; lookup, push: NULL with a batch: exactly the declared
                                keys (so give a pointer that is not NULL for no keys) */
  size_t count;              /* number of keys; with keys NULL ignored */
  const uint64_t *offsets;   /* pooled: `bags` + 1 values, offsets[0] = 0, not decreasing,
                                offsets[bags] = number of keys; bag b has the keys
                                offsets[b]..offsets[b+1]-1 and may be empty (its row is zeros) */
  size_t bags;
  const float *weights;      /* pooled sum: a factor for each key, or NULL */
  float *weight_grads_out;   /* push, pooled sum with weights: gradient of each factor, or NULL */
  float *rows_out;           /* lookup and read: the output rows */
  const float *grads;        /* push: the gradient rows (of keys, or of bags if pooled) */
  size_t row_stride;         /* bytes from row to row in rows_out or grads; 0: packed */
  uint8_t *found_out;        /* frugal_read: 1 or 0 for each key, or NULL */
  uint64_t padding_key;      /* with FRUGAL_OP_PADDING: rows of this key read as zeros, take no
                                gradient and are never created */
  uint32_t flags;            /* FRUGAL_OP_* */
  uint32_t reserved;
} frugal_op;

#define FRUGAL_OP_PADDING 1u

#define FRUGAL_OP_INIT                                                                          \
  { sizeof(frugal_op), NULL, NULL, 0, FRUGAL_POOL_NONE, NULL, 0, NULL, 0, NULL, NULL, NULL,     \
    NULL, 0, NULL, 0, 0, 0 }

/* Sets every default. Returns: nothing. Threads: any. */
FRUGAL_API void frugal_op_init(frugal_op *op);

/* Declares keys of a step that this trainer has not begun (FRUGAL section 3.3, MLKV look-ahead): of
 * each op the fields table, keys, count, padding_key and flags are used. Several declarations for
 * one step add up; they may come late and in any order. Nothing waits: keys are copied and resolved
 * in the background, or, if they are few or there are no flush threads, in this call. With a
 * service keys on a GPU are waited for. Rows of a hashed table are reserved, not created; if the
 * table has no room for them, the calls of the step that use them say so. `*batch_out` (may be
 * NULL) names the batch until its step ends. Returns: FRUGAL_OK, KEY_OUT_OF_RANGE, STEP_RANGE,
 * STEP_ABORTED, STRUCT_SIZE, INVALID_ARGUMENT; on an error nothing is declared. A rank may declare
 * 4,096 batches for a step (one more is INVALID_ARGUMENT), each of any number of keys. With a
 * service the controller is not waited for inside a step. It may have no memory for the
 * declaration, or another process may have dropped a table of it, or it is one too many. Then ops
 * that name the batch without keys get OUT_OF_MEMORY, BAD_HANDLE or INVALID_ARGUMENT: give the keys
 * instead. Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_prefetch(frugal_trainer *trainer, uint64_t step, const frugal_op *ops,
                                   size_t op_count, frugal_batch **batch_out);

/* Takes a declaration back, before its step begins. Returns: FRUGAL_OK, BAD_HANDLE, STEP_RANGE,
 * STEP_ABORTED, INVALID_ARGUMENT (another rank's). Threads: one at a time for the trainer that
 * declared it. */
FRUGAL_API int32_t frugal_prefetch_cancel(frugal_trainer *trainer, frugal_batch *batch);

/* The gate: begins a step on this rank when every update of the steps before `step` - staleness
 * that a declared row needs is in place (FRUGAL section 3.3). The first step is any number up to 2^64 - 66, the
 * same on all ranks; then + 1. The first call names it, even one that answers TIMEOUT. A waiting
 * caller helps. Where a trainer process is lost, somebody who joins as its rank is waited for, too.
 * Returns: FRUGAL_OK, STEP_ORDER, INVALID_ARGUMENT (a step beyond 2^64 - 66), TIMEOUT,
 * STEP_ABORTED (the last step was undone; the message names the step to begin), PEER_LOST (it was
 * undone because a trainer process is lost; the same), CLOSED,
 * UNHEALTHY. Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_step_begin(frugal_trainer *trainer, uint64_t step, int64_t timeout_ms);

/* Reads rows in a step, creating rows of hashed tables. Declared keys are what is fast; others
 * are right too and may wait. All ops are checked before any row is created or written; rows_out
 * is undefined after an error; after TIMEOUT, which only keys that were not declared can meet, the
 * rows exist. Returns: FRUGAL_OK, NOT_IN_STEP, KEY_OUT_OF_RANGE, TABLE_FULL, OUT_OF_MEMORY, TIMEOUT,
 * STEP_ABORTED, STRUCT_SIZE, INVALID_ARGUMENT. Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_lookup(frugal_trainer *trainer, const frugal_op *ops, size_t op_count);

/* Hands over gradients of the step: a row's gradients, over positions, pushes and ranks, are
 * summed and the optimizer is applied once when the step has ended on all ranks. The gradients
 * are the engine's when the call returns: the buffers can be overwritten (but for memory that
 * frugal_borrow lent, which must not be; on a GPU: overwritten in the stream). Never waits for another
 * rank. Returns: FRUGAL_OK, NOT_IN_STEP, KEY_OUT_OF_RANGE, TABLE_FULL, OUT_OF_MEMORY, NAN,
 * STEP_ABORTED, STRUCT_SIZE, INVALID_ARGUMENT, TIMEOUT (weight_grads_out of keys that were not
 * declared: their rows may have updates that are not written yet), STEP_ORDER (with a service: step_end has
 * failed and is to be called again); on an error nothing is taken.
 * Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_push_grad(frugal_trainer *trainer, const frugal_op *ops,
                                    size_t op_count);

/* Memory for gradients that the engine lends: `bytes` bytes, 64-byte aligned, huge pages where
 * possible, which a push from it takes without a copy where that is faster. The caller writes it
 * between step_begin and the push, neither reads nor writes it after the push, and asks again each
 * step (the same memory may come back when its updates are applied). All of it counts against
 * pending_bytes until then. Returns: FRUGAL_OK,
 * NOT_IN_STEP, STEP_ABORTED, OUT_OF_MEMORY. Ownership: the engine's; closing the trainer or the
 * engine takes it back. Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_borrow(frugal_trainer *trainer, size_t bytes, void **memory_out);

#define FRUGAL_STEP_SKIP 1u /* the step commits without any update (an overflow was found); one
                               rank's word is enough */

/* Ends the step on this rank. The step commits when the last rank has ended it. Never waits for
 * another rank. On a GPU it waits for the stream if gradients were pushed to a table with
 * FRUGAL_NAN_REJECT, or several times to one table, or with a service; else step_begin does.
 * A commit that lacks memory fails no step_end: a flush thread, or a call that waits, makes it later.
 * Returns: FRUGAL_OK (the rank has ended the step),
 * NOT_IN_STEP, STEP_ORDER (it is another step's turn), NAN (found on a GPU: the step is undone on
 * all ranks), DEVICE (the GPU failed: the same), STEP_ABORTED, OUT_OF_MEMORY (the rank is still inside
 * the step, and what was pushed is not lost: call again), TIMEOUT (of the wait for the stream, after the
 * engine's timeout_ms: call again), INVALID_ARGUMENT. Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_step_end(frugal_trainer *trainer, uint64_t step, uint32_t flags);

/* Undoes every uncommitted step on all ranks: the tables stand at the last committed step, rows
 * created since are gone, declarations stay. Each other rank is told of each abort once: its next
 * call of the step protocol answers FRUGAL_ERR_STEP_ABORTED; then all begin the step after the last
 * committed one again. Returns: FRUGAL_OK, NOT_IN_STEP, STEP_ABORTED (another rank was first).
 * Threads: one at a time for a trainer. */
FRUGAL_API int32_t frugal_step_abort(frugal_trainer *trainer);

/* Reads rows by their keys (an op with a batch is refused) for evaluation or serving: creates no
 * row, declares nothing, leaves cache policy and declared priorities alone; updates of these rows
 * that it has to see are written first. Rows of a lazy dense table that nobody has used take their
 * memory when they are read. Keys that are missing read as zeros and are told in found_out. With a
 * trainer inside a step it sees what lookup sees; with a trainer between steps it waits, like
 * the next step's gate, for the other ranks to end theirs and for operations outside steps; with
 * `trainer` NULL it is one itself. rows_out and found_out are undefined after an error. Returns:
 * FRUGAL_OK, KEY_OUT_OF_RANGE, BUSY, TIMEOUT, STEP_ABORTED,
 * STRUCT_SIZE, INVALID_ARGUMENT, PEER_LOST (the controller has ended, and the trainer has begun a step that was not
 * committed). In a mean a missing row counts, as a row of zeros. Threads: any (trainer: one at a time). */
FRUGAL_API int32_t frugal_read(const frugal_engine *engine, frugal_trainer *trainer,
                               const frugal_op *ops, size_t op_count, int64_t timeout_ms);

/* ---------------------------------------------------------------------------------------------
 * Statistics: counters since open; times in nanoseconds.
 * ------------------------------------------------------------------------------------------ */

typedef struct frugal_stats {
  size_t struct_size;            /* set by the caller */
  uint64_t steps_committed;
  uint64_t steps_aborted;
  uint64_t keys_declared;
  uint64_t keys_looked_up;
  uint64_t keys_undeclared;      /* looked up or pushed without a declared batch */
  uint64_t keys_pushed;
  uint64_t rows_created;
  uint64_t rows_updated;         /* (row, step) updates written to host rows */
  uint64_t rows_deferred;        /* of these: queued when the step after theirs could begin */
  uint64_t gate_waits;           /* step_begin calls that had to wait */
  uint64_t gate_wait_ns;
  uint64_t gate_in_flight;       /* gates that met an update dequeued but unwritten */
  uint64_t lookup_waits;         /* undeclared keys that had to wait */
  uint64_t priority_rises;       /* a pending update became more urgent */
  uint64_t priority_falls;       /* a pending update became less urgent */
  uint64_t enqueued;             /* g-entries put into the queue */
  uint64_t dequeued;
  uint64_t back_pressure;        /* times that the budget forced writing */
  uint64_t ranks_apart;          /* step_begin calls while another rank was still in an earlier step */
  uint64_t stale_reads;          /* rows read with a pending update (staleness > 0); of a trainer process those that had
                                    one when the step began, or when undeclared keys were resolved */
  uint64_t cache_hits;           /* keys served from a trainer's cache */
  uint64_t cache_misses;
  uint64_t cache_admitted;
  uint64_t cache_evicted;
  uint64_t cache_evicted_dirty;  /* evicted while the host row had pending updates */
  uint64_t pending_bytes;        /* now */
  uint64_t pending_bytes_peak;
  uint64_t pending_rows;         /* g-entries with pending updates now */
  uint64_t active_rows;          /* the same: g-entries of rows that are only read are not counted */
  uint64_t modes_at_once;        /* steps applied at once */
  uint64_t modes_deferred;       /* steps queued */
  uint64_t lookup_ns;            /* wall time inside the calls, summed over trainers. Of a trainer's small lookups of
                                    declared keys one in 17 is measured, and counts for the 16 before it, too */
  uint64_t push_ns;
  uint64_t step_begin_ns;
  uint64_t step_end_ns;
  uint64_t prefetch_ns;
  uint64_t entry_ns;             /* time spent on g-entries and queue */
  uint64_t apply_ns;             /* time spent applying updates, over threads */
  uint64_t cache_refreshes;          /* refreshes of trainers' caches, one for each table */
  uint64_t cache_planned;        /* of these: worked out while the step before was computed */
} frugal_stats;

/* Fills `stats_out`, whose struct_size must be set. Returns: FRUGAL_OK, BAD_HANDLE, STRUCT_SIZE.
 * Threads: any. */
FRUGAL_API int32_t frugal_get_stats(const frugal_engine *engine, frugal_stats *stats_out);

/* ---------------------------------------------------------------------------------------------
 * Observation. Neither changes what is computed.
 * ------------------------------------------------------------------------------------------ */

/* Writes what a scrape of Prometheus wants (text exposition format 0.0.4): every counter of
 * frugal_stats as frugal_NAME_total (of times: frugal_NAME_seconds_total), what is pending as gauges,
 * frugal_uptime_seconds, frugal_health (0, or the status), frugal_committed_step, rows and bytes of each table (label `table`),
 * and for each rank that has a trainer the step that it has begun last and whether it is inside (label
 * `rank`). `*size_out` is the size of the text with the 0 that ends it, also on OVERFLOW: capacity
 * was less, and nothing was written to text_out, which may be NULL if capacity is 0. The size changes
 * from call to call. Returns: FRUGAL_OK, BAD_HANDLE, OVERFLOW. Threads: any. Since: 0.1. */
FRUGAL_API int32_t frugal_metrics(const frugal_engine *engine, char *text_out, size_t capacity,
                                  size_t *size_out);

/* Begins to record what the engine does when: prefetch, resolve, link, gate, lookup, push, commit,
 * flush and so on, each with its step, rank, rows and table. The newest `events` of them, 1..2^26, are
 * kept, in 64 bytes each that are taken now; recording one takes no memory and no lock. Without a
 * trace it costs a load for each. With FRUGAL_OBSERVE at most 2^19. May be called at any time, also
 * during steps. Returns: FRUGAL_OK, INVALID_ARGUMENT, EXISTS (there is a trace that was not
 * stopped), OUT_OF_MEMORY. Threads: any. Since: 0.1. */
FRUGAL_API int32_t frugal_trace_start(frugal_engine *engine, size_t events);

/* Ends the recording and writes it to the file `path` in the trace event format of Chrome, for
 * chrome://tracing and Perfetto; NULL forgets it. The file is the owner's alone (0600), and takes the
 * place of one that was there when it is whole. Times are of CLOCK_MONOTONIC, so that files of several
 * processes of a machine can be laid side by side; otherData.dropped counts the events that gave way to
 * newer ones. Returns: FRUGAL_OK, NOT_FOUND (no trace was started), INVALID_ARGUMENT (the file cannot
 * be written: frugal_error.system_code tells why), OUT_OF_MEMORY; after these two the events are kept:
 * call again. Closing the engine forgets them. Threads: any. Since: 0.1. */
FRUGAL_API int32_t frugal_trace_stop(frugal_engine *engine, const char *path);

#ifdef __cplusplus
}
#endif

#endif /* FRUGAL_H */
