"""The C ABI of include/frugal.h for ctypes: every constant, struct and function.

Handles and pointers are plain integers (c_void_p), so that an address needs no wrapper object.
tests/test_abi.py compares this file with what a C compiler makes of the header.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import (
    CFUNCTYPE,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Dict, List, Tuple

VERSION = (0, 1, 0)

# --- Constants ---

STATUS: Dict[str, int] = {
    "FRUGAL_OK": 0,
    "FRUGAL_ERR_INVALID_ARGUMENT": -1,
    "FRUGAL_ERR_BAD_HANDLE": -2,
    "FRUGAL_ERR_STRUCT_SIZE": -3,
    "FRUGAL_ERR_OUT_OF_MEMORY": -4,
    "FRUGAL_ERR_KEY_OUT_OF_RANGE": -5,
    "FRUGAL_ERR_TABLE_FULL": -6,
    "FRUGAL_ERR_EXISTS": -7,
    "FRUGAL_ERR_STEP_ORDER": -8,
    "FRUGAL_ERR_STEP_RANGE": -9,
    "FRUGAL_ERR_NOT_IN_STEP": -10,
    "FRUGAL_ERR_STEP_ABORTED": -11,
    "FRUGAL_ERR_BUSY": -12,
    "FRUGAL_ERR_TIMEOUT": -13,
    "FRUGAL_ERR_NAN": -14,
    "FRUGAL_ERR_FORKED": -15,
    "FRUGAL_ERR_UNSUPPORTED": -16,
    "FRUGAL_ERR_NOT_FOUND": -17,
    "FRUGAL_ERR_UNHEALTHY": -18,
    "FRUGAL_ERR_CLOSED": -19,
    "FRUGAL_ERR_OVERFLOW": -20,
    "FRUGAL_ERR_INTERNAL": -21,
    "FRUGAL_ERR_DEVICE": -22,
    "FRUGAL_ERR_PEER_LOST": -23,
    "FRUGAL_ERR_NO_SPACE": -24,
    "FRUGAL_ERR_IO": -25,
    "FRUGAL_ERR_DAMAGED": -26,
    "FRUGAL_ERR_TOO_NEW": -27,
}
FRUGAL_OK = 0
FRUGAL_ERR_TIMEOUT = -13
FRUGAL_ERR_OVERFLOW = -20
FRUGAL_ERR_PEER_LOST = -23

FRUGAL_TIMEOUT_DEFAULT = -1
FRUGAL_TIMEOUT_INFINITE = -2
FRUGAL_STALENESS_ASYNC = 2**64 - 1
FRUGAL_NO_STEP = 2**64 - 1
FRUGAL_MAX_LOOKAHEAD = 40

FRUGAL_FLUSH_AUTO = 0
FRUGAL_FLUSH_AT_ONCE = 1
FRUGAL_FLUSH_DEFERRED = 2
FRUGAL_FLUSH_WRITE_THROUGH = 3
FRUGAL_FLUSH_TREE_HEAP = 4

FRUGAL_BACKING_PRIVATE = 0
FRUGAL_BACKING_SHM = 1

FRUGAL_SGD = 0
FRUGAL_MOMENTUM = 1
FRUGAL_ADAGRAD = 2
FRUGAL_ROWWISE_ADAGRAD = 3
FRUGAL_ADAM = 4
FRUGAL_RMSPROP = 5
FRUGAL_FTRL = 6

FRUGAL_OPT_NESTEROV = 1
FRUGAL_OPT_MEAN_RANKS = 2
FRUGAL_OPT_NO_BIAS_CORRECTION = 4
FRUGAL_OPT_NEW_STATE = 8

FRUGAL_DENSE = 0
FRUGAL_HASHED = 1

FRUGAL_F32 = 0

FRUGAL_INIT_CONSTANT = 0
FRUGAL_INIT_UNIFORM = 1
FRUGAL_INIT_NORMAL = 2
FRUGAL_INIT_TRUNCATED_NORMAL = 3
FRUGAL_INIT_XAVIER = 4

FRUGAL_NAN_REJECT = 0
FRUGAL_NAN_SKIP = 1
FRUGAL_NAN_ACCEPT = 2

FRUGAL_TABLE_LAZY = 1
FRUGAL_WITH_STATE = 1
FRUGAL_COMMITTED = 2

FRUGAL_TRAINER_REPLACE = 1
FRUGAL_OBSERVE = 1

FRUGAL_POOL_NONE = 0
FRUGAL_POOL_SUM = 1
FRUGAL_POOL_MEAN = 2

FRUGAL_OP_PADDING = 1
FRUGAL_STEP_SKIP = 1

# --- Structs ---

LogFn = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class frugal_error(ctypes.Structure):
    _fields_ = [
        ("status", c_int32),
        ("system_code", c_int32),
        ("device_code", c_int32),
        ("reserved", c_int32),
        ("message", c_char_p),
    ]


class frugal_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("world_size", c_uint32),
        ("lookahead", c_uint32),
        ("flush_threads", c_uint32),
        ("flush_mode", c_int32),
        ("staleness", c_uint64),
        ("pending_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("timeout_ms", c_int64),
        ("backing", c_int32),
        ("flags", c_uint32),
        ("seed", c_uint64),
        ("log", LogFn),
        ("log_context", c_void_p),
        ("service", c_char_p),
    ]


class frugal_optimizer(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("lr", c_float),
        ("eps", c_float),
        ("momentum", c_float),
        ("dampening", c_float),
        ("beta1", c_float),
        ("beta2", c_float),
        ("rho", c_float),
        ("ftrl_lambda1", c_float),
        ("ftrl_lambda2", c_float),
        ("ftrl_beta", c_float),
        ("initial_accumulator", c_float),
        ("weight_decay_l2", c_float),
        ("weight_decay", c_float),
        ("clip_value", c_float),
        ("clip_norm", c_float),
        ("weight_bound", c_float),
        ("grad_scale", c_float),
        ("flags", c_uint32),
    ]


class frugal_table_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("key_space", c_int32),
        ("dtype", c_int32),
        ("rows", c_uint64),
        ("dim", c_uint32),
        ("init", c_int32),
        ("init_a", c_float),
        ("init_b", c_float),
        ("nan_policy", c_int32),
        ("flags", c_uint32),
        ("optimizer", frugal_optimizer),
    ]


class frugal_table_info(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_uint64),
        ("capacity", c_uint64),
        ("value_bytes", c_uint64),
        ("state_floats", c_uint64),
        ("memory_bytes", c_uint64),
        ("dim", c_uint32),
        ("key_space", c_int32),
        ("optimizer", c_int32),
        ("page_bytes", c_uint32),
    ]


class frugal_memory(ctypes.Structure):
    _fields_ = [
        ("values", c_uint64),
        ("state", c_uint64),
        ("index", c_uint64),
        ("window", c_uint64),
        ("cache", c_uint64),
        ("total", c_uint64),
    ]


class frugal_trainer_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_uint32),
        ("flags", c_uint32),
        ("device", c_char_p),
        ("cache_bytes", c_uint64),
        ("cache_ratio", c_double),
    ]


class frugal_op(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("table", c_void_p),
        ("batch", c_void_p),
        ("part", c_uint32),
        ("pooling", c_int32),
        ("keys", c_void_p),
        ("count", c_size_t),
        ("offsets", c_void_p),
        ("bags", c_size_t),
        ("weights", c_void_p),
        ("weight_grads_out", c_void_p),
        ("rows_out", c_void_p),
        ("grads", c_void_p),
        ("row_stride", c_size_t),
        ("found_out", c_void_p),
        ("padding_key", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class frugal_stats(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("steps_committed", c_uint64),
        ("steps_aborted", c_uint64),
        ("keys_declared", c_uint64),
        ("keys_looked_up", c_uint64),
        ("keys_undeclared", c_uint64),
        ("keys_pushed", c_uint64),
        ("rows_created", c_uint64),
        ("rows_updated", c_uint64),
        ("rows_deferred", c_uint64),
        ("gate_waits", c_uint64),
        ("gate_wait_ns", c_uint64),
        ("gate_in_flight", c_uint64),
        ("lookup_waits", c_uint64),
        ("priority_rises", c_uint64),
        ("priority_falls", c_uint64),
        ("enqueued", c_uint64),
        ("dequeued", c_uint64),
        ("back_pressure", c_uint64),
        ("ranks_apart", c_uint64),
        ("stale_reads", c_uint64),
        ("cache_hits", c_uint64),
        ("cache_misses", c_uint64),
        ("cache_admitted", c_uint64),
        ("cache_evicted", c_uint64),
        ("cache_evicted_dirty", c_uint64),
        ("pending_bytes", c_uint64),
        ("pending_bytes_peak", c_uint64),
        ("pending_rows", c_uint64),
        ("active_rows", c_uint64),
        ("modes_at_once", c_uint64),
        ("modes_deferred", c_uint64),
        ("lookup_ns", c_uint64),
        ("push_ns", c_uint64),
        ("step_begin_ns", c_uint64),
        ("step_end_ns", c_uint64),
        ("prefetch_ns", c_uint64),
        ("entry_ns", c_uint64),
        ("apply_ns", c_uint64),
        ("cache_refreshes", c_uint64),
        ("cache_planned", c_uint64),
        ("checkpoints", c_uint64),
        ("checkpoints_failed", c_uint64),
        ("checkpoint_rows", c_uint64),
        ("checkpoint_bytes", c_uint64),
        ("checkpoint_copies", c_uint64),
        ("checkpoint_waits", c_uint64),
    ]


class frugal_folder_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("keep", c_uint32),
        ("flags", c_uint32),
        ("every_steps", c_uint64),
        ("every_ms", c_uint64),
    ]


class frugal_checkpoint_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("step", c_uint64),
        ("name", c_char_p),
        ("blob", c_char_p),
        ("blob_size", c_size_t),
        ("blob_rank", c_uint32),
        ("flags", c_uint32),
    ]


class frugal_checkpoint_info(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("number", c_uint64),
        ("step", c_uint64),
        ("created", c_uint64),
        ("bytes", c_uint64),
        ("tables", c_uint64),
        ("world_size", c_uint32),
        ("blobs", c_uint32),
        ("name", c_char * 256),
    ]


class frugal_restore_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("folder", c_char_p),
        ("number", c_uint64),
        ("name", c_char_p),
        ("tables", c_void_p),
        ("table_count", c_size_t),
    ]


# Writes all fields of a frugal_op in one call, several times as fast as setting one attribute after another.
# Alignment is native. A NULL pointer is 0.
_CODES: Dict[Any, str] = {c_uint64: "Q", c_size_t: "Q", c_void_p: "P", c_uint32: "I", c_int32: "i"}
OP = struct.Struct("@" + "".join(_CODES[field[1]] for field in frugal_op._fields_))

# The same for an op on a batch alone: struct_size, table, batch, rows_out, grads, row_stride, and zeros between them.
BATCH_OP = struct.Struct("@QPP56xPPQ24x")

# --- Functions: name -> (result, arguments) ---

_P = c_void_p
FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "frugal_status_name": (c_char_p, [c_int32]),
    "frugal_last_error": (None, [_P]),
    "frugal_version": (c_char_p, []),
    "frugal_config_init": (None, [_P]),
    "frugal_open": (c_int32, [_P, _P]),
    "frugal_close": (c_int32, [_P]),
    "frugal_health": (c_int32, [_P]),
    "frugal_flush": (c_int32, [_P, c_int64]),
    "frugal_committed_step": (c_int32, [_P, _P]),
    "frugal_serve": (c_int32, [_P, c_char_p]),
    "frugal_optimizer_init": (None, [_P]),
    "frugal_table_config_init": (None, [_P]),
    "frugal_table_create": (c_int32, [_P, _P, _P]),
    "frugal_table_drop": (c_int32, [_P]),
    "frugal_table_find": (c_int32, [_P, c_char_p, _P]),
    "frugal_table_next": (c_int32, [_P, _P, _P, c_size_t, _P]),
    "frugal_table_describe": (c_int32, [_P, _P]),
    "frugal_table_count": (c_int32, [_P, _P]),
    "frugal_table_keys": (c_int32, [_P, _P, _P, c_size_t, _P]),
    "frugal_table_set_optimizer": (c_int32, [_P, c_uint64, _P]),
    "frugal_memory_needed": (c_int32, [_P, _P, c_uint64, _P]),
    "frugal_get": (c_int32, [_P, _P, c_size_t, c_uint32, _P, c_size_t, _P]),
    "frugal_put": (c_int32, [_P, _P, c_size_t, c_uint32, _P, c_size_t]),
    "frugal_delete": (c_int32, [_P, _P, c_size_t, _P]),
    "frugal_trainer_config_init": (None, [_P]),
    "frugal_trainer_create": (c_int32, [_P, _P, _P]),
    "frugal_trainer_close": (c_int32, [_P]),
    "frugal_trainer_abandon": (c_int32, [_P]),
    "frugal_set_stream": (c_int32, [_P, _P]),
    "frugal_op_init": (None, [_P]),
    "frugal_prefetch": (c_int32, [_P, c_uint64, _P, c_size_t, _P]),
    "frugal_prefetch_cancel": (c_int32, [_P, _P]),
    "frugal_step_begin": (c_int32, [_P, c_uint64, c_int64]),
    "frugal_lookup": (c_int32, [_P, _P, c_size_t]),
    "frugal_push_grad": (c_int32, [_P, _P, c_size_t]),
    "frugal_borrow": (c_int32, [_P, c_size_t, _P]),
    "frugal_step_end": (c_int32, [_P, c_uint64, c_uint32]),
    "frugal_step_abort": (c_int32, [_P]),
    "frugal_read": (c_int32, [_P, _P, _P, c_size_t, c_int64]),
    "frugal_get_stats": (c_int32, [_P, _P]),
    "frugal_metrics": (c_int32, [_P, _P, c_size_t, _P]),
    "frugal_trace_start": (c_int32, [_P, c_size_t]),
    "frugal_trace_stop": (c_int32, [_P, c_char_p]),
    "frugal_folder_config_init": (None, [_P]),
    "frugal_folder_open": (c_int32, [_P, c_char_p, _P]),
    "frugal_folder_close": (c_int32, [_P]),
    "frugal_checkpoint_config_init": (None, [_P]),
    "frugal_checkpoint": (c_int32, [_P, _P, _P]),
    "frugal_checkpoint_wait": (c_int32, [_P, c_uint64, c_int64, _P]),
    "frugal_checkpoint_cancel": (c_int32, [_P, c_uint64]),
    "frugal_checkpoint_due": (c_int32, [_P, _P]),
    "frugal_checkpoint_blob": (c_int32, [_P, _P, c_size_t]),
    "frugal_checkpoint_delete": (c_int32, [_P, c_uint64]),
    "frugal_restore_config_init": (None, [_P]),
    "frugal_restore": (c_int32, [_P, _P, _P]),
    "frugal_checkpoint_next": (c_int32, [c_char_p, _P, _P]),
    "frugal_checkpoint_read_blob": (c_int32, [c_char_p, c_uint64, c_uint32, _P, c_size_t, _P]),
    "frugal_checkpoint_copy": (c_int32, [c_char_p, c_uint64, c_char_p]),
}


def bind(path: str) -> ctypes.CDLL:
    """Loads a library and declares its functions. A call releases the interpreter lock."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
