"""What this package uses of the core package's ABI: calls that take addresses of tensors."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, NamedTuple, Optional

import torch

import frugal
from frugal import _abi

Ops = Any  # ctypes.Array[_abi.Op]

HASHED = 1
POOL_NONE, POOL_SUM, POOL_MEAN = 0, 1, 2
PADDING = 1
STEP_SKIP = 1
ADAM = 4
_WITH_STATE = 1
_MEAN_RANKS = 2
_SLICE_MS = 100
_OP_BYTES = ctypes.sizeof(_abi.Op)

# Hyper-parameters that may differ from step to step; grad_scale is apart, since a GradScaler has a say in it.
OPTIMIZER_FIELDS = (
    "lr", "eps", "momentum", "dampening", "beta1", "beta2", "rho", "ftrl_lambda1", "ftrl_lambda2", "ftrl_beta",
    "weight_decay_l2", "weight_decay", "clip_value", "clip_norm", "weight_bound",
)  # fmt: skip
lib = _abi.lib
_u64=ctypes.c_uint64
def _check(s): frugal.check(s)

def make_ops(count: int) -> Ops:
    ops = (_abi.Op * count)()
    for op in ops:
        op.struct_size = _OP_BYTES
    return ops


def copy_ops(ops: Ops) -> Ops:
    return type(ops).from_buffer_copy(ops)


def table_handle(table: frugal.Table) -> Any:
    return table.handle


class Batch(NamedTuple):
    handle: Any
    step: int


class Trainer:
    """Calls of a trainer. The caller holds the lock."""

    def __init__(self, trainer: frugal.Trainer) -> None:
        self._handle = trainer.handle
        self._engine = trainer.engine.handle
        name = trainer.device
        self.device = torch.device(name if name.startswith("cuda") else "cpu")
        self._stream: Optional[int] = None

    def _use_stream(self) -> None:
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device).cuda_stream
            if stream != self._stream:
                _check(lib.frugal_set_stream(self._handle, ctypes.c_void_p(stream)))
                self._stream = stream

    def lookup(self, ops: Ops, count: int) -> None:
        self._use_stream()
        _check(lib.frugal_lookup(self._handle, ops, ctypes.c_size_t(count)))

    def push(self, ops: Ops, count: int) -> None:
        self._use_stream()
        _check(lib.frugal_push_grad(self._handle, ops, ctypes.c_size_t(count)))

    def read(self, ops: Ops, count: int) -> None:
        self._use_stream()
        _check(lib.frugal_read(self._engine, self._handle, ops, ctypes.c_size_t(count), ctypes.c_int64(-1)))

    def prefetch(self, step: int, ops: Ops, count: int) -> Batch:
        h=ctypes.c_void_p()
        _check(lib.frugal_prefetch(self._handle, ctypes.c_uint64(step), ops, ctypes.c_size_t(count), ctypes.byref(h)))
        return Batch(h, step)

    def cancel(self, batch):
        _check(lib.frugal_prefetch_cancel(self._handle, batch.handle))


def open_table(steps, name, rows, dim, optimizer, init, hashed, mean_ranks):
    from ._steps import Table
    known = steps.tables.get(name)
    if known is None:
        optimizer = optimizer or frugal.OptimizerConfig()
        c = frugal.make(_abi.TableConfig, 'frugal_table_config_init')
        c.name=name.encode(); c.key_space=int(hashed); c.rows=rows; c.dim=dim; (c.__setattr__('init',2), c.__setattr__('init_b',1.0)) if init is None else (c.__setattr__('init',0), c.__setattr__('init_a',init[1]))
        optimizer.flags |= _MEAN_RANKS if mean_ranks else 0
        c.optimizer=optimizer.c()
        h=ctypes.c_void_p()
        st=lib.frugal_table_create(steps.trainer.engine.handle, ctypes.byref(c), ctypes.byref(h))
        created = st == 0
        if st == -7: t=steps.trainer.engine.find_table(name)
        else:
            _check(st); t=frugal.Table(h)
        known = steps.tables[name] = Table(t, name, created, optimizer)
    return known

def hyper_parameters(o):
    import dataclasses
    d=dataclasses.asdict(o)
    return {f:d[f] for f in (*OPTIMIZER_FIELDS,'grad_scale')}

def set_optimizer(table, step, values):
    c=table.optimizer.c()
    for k,v in values.items(): setattr(c,k,v)
    _check(lib.frugal_table_set_optimizer(table.table.handle,_u64(step),ctypes.byref(c)))

def _p(t): return ctypes.c_void_p(t.data_ptr())
def get(table, keys, rows, with_state):
    found = torch.zeros(keys.numel(), dtype=torch.bool)
    _check(lib.frugal_get(table.handle,_p(keys),ctypes.c_size_t(keys.numel()),ctypes.c_uint32(with_state),_p(rows),ctypes.c_size_t(0),_p(found)))
    return found
def put(table, keys, rows, with_state):
    _check(lib.frugal_put(table.handle,_p(keys),ctypes.c_size_t(keys.numel()),ctypes.c_uint32(with_state),_p(rows),ctypes.c_size_t(0)))
def delete(table, keys):
    _check(lib.frugal_delete(table.handle,_p(keys),ctypes.c_size_t(keys.numel()),None))
def table_keys(table):
    n=_u64(); _check(lib.frugal_table_count(table.handle,ctypes.byref(n)))
    out=torch.empty(n.value,dtype=torch.int64); cur=_u64(0); done=0; got=ctypes.c_size_t(1)
    while done<n.value and got.value:
        _check(lib.frugal_table_keys(table.handle,ctypes.byref(cur),ctypes.c_void_p(out.data_ptr()+8*done),ctypes.c_size_t(n.value-done),ctypes.byref(got)))
        done+=got.value
    return out[:done]
