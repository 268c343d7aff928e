"""Calls of the library that take addresses of tensors, on what the core package has for its own calls."""

from __future__ import annotations

import weakref
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Type

import torch

import frugal
from frugal import _abi
from frugal._lib import lib
from frugal._wait import SLICE_MS, wait
from frugal.errors import check

HASHED = _abi.FRUGAL_HASHED
INVALID_ARGUMENT = _abi.STATUS["FRUGAL_ERR_INVALID_ARGUMENT"]
KEY_OUT_OF_RANGE = _abi.STATUS["FRUGAL_ERR_KEY_OUT_OF_RANGE"]
POOL_NONE, POOL_SUM, POOL_MEAN = _abi.FRUGAL_POOL_NONE, _abi.FRUGAL_POOL_SUM, _abi.FRUGAL_POOL_MEAN

_SIZE = _abi.OP.size
_pack = _abi.OP.pack


class InvalidArgument(frugal.InvalidArgument, RuntimeError):
    """Of bad offsets, for which torch.nn raises RuntimeError."""


class KeyOutOfRange(frugal.KeyOutOfRange, RuntimeError):
    """Of bad keys, for which torch.nn.Embedding raises IndexError, torch.nn.EmbeddingBag RuntimeError."""


_CLASSES: Dict[Type[frugal.Error], Type[frugal.Error]] = {
    frugal.InvalidArgument: InvalidArgument, frugal.KeyOutOfRange: KeyOutOfRange,
}  # fmt: skip


def _of_torch(error: frugal.Error) -> frugal.Error:
    return _CLASSES[type(error)](error.message, error.status, error.system_code, error.device_code)


def op(
    table: int,
    pooling: int,
    padding: Optional[int],
    keys: torch.Tensor,
    offsets: Optional[torch.Tensor] = None,
    weights: Optional[torch.Tensor] = None,
    rows_out: int = 0,
    grads: int = 0,
    row_stride: int = 0,
) -> bytes:
    """An op of the table with this handle. The tensors must live until the call that gets it
    returns."""
    return _pack(
        _SIZE,
        table,
        0,  # no batch: the library finds what was declared by the keys
        0,
        pooling,
        keys.data_ptr(),
        keys.numel(),
        0 if offsets is None else offsets.data_ptr(),
        0 if offsets is None else offsets.numel() - 1,
        0 if weights is None else weights.data_ptr(),
        0,
        rows_out,
        grads,
        row_stride,
        0,
        padding or 0,
        0 if padding is None else _abi.FRUGAL_OP_PADDING,
        0,
    )


class Batch(NamedTuple):
    """Keys declared for a step."""

    handle: int
    step: int


class Trainer:
    """Calls of a trainer, by one thread at a time."""

    def __init__(self, trainer: frugal.Trainer) -> None:
        self._weak = weakref.ref(trainer)  # see Steps
        self._handle = trainer.handle
        self._turn = trainer._turn
        self._engine = trainer.engine
        gpu = trainer._place.gpu
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self.on_gpu = gpu is not None
        self._stream = 0
        self._slice = int(min(SLICE_MS, self._engine._timeout_ms))

    def begin(self, step: int) -> None:
        """The gate of a step. After an interrupt it is not known whether the step has begun."""
        try:
            self._call(lib.frugal_step_begin, self._handle, step, self._slice)
        except frugal.Timeout:
            self._trainer().step_begin(step)  # with words where it waits long

    def end(self, step: int, skip: bool) -> None:
        self._call(lib.frugal_step_end, self._handle, step, _abi.FRUGAL_STEP_SKIP if skip else 0)

    def lookup(self, ops: Sequence[bytes]) -> None:
        self._call_with(ops, lib.frugal_lookup)

    def push(self, ops: Sequence[bytes]) -> None:
        self._call_with(ops, lib.frugal_push_grad)

    def read(self, ops: Sequence[bytes]) -> None:
        engine, tell = self._engine, self._trainer()._tell

        def call(handle: int, packed: bytes, count: int) -> int:
            try:
                wait(lambda ms: lib.frugal_read(engine.handle, handle, packed, count, ms), engine._timeout_ms, tell)
            except tuple(_CLASSES) as error:
                raise _of_torch(error) from None
            return 0

        self._call_with(ops, call)

    def prefetch(self, step: int, ops: Sequence[bytes]) -> Batch:
        batch = c_void_p()
        if self.on_gpu:
            self._use_stream()
        self._call(lib.frugal_prefetch, self._handle, step, b"".join(ops), len(ops), byref(batch))
        return Batch(batch.value or 0, step)

    def cancel(self, batch: Batch) -> None:
        self._call(lib.frugal_prefetch_cancel, self._handle, batch.handle)

    def _call_with(self, ops: Sequence[bytes], call: Callable[..., int]) -> None:
        """A call that the caller's stream waits for."""
        if self.on_gpu:
            self._use_stream()
        self._call(call, self._handle, b"".join(ops), len(ops))

    def _use_stream(self) -> None:
        stream = int(torch.cuda.current_stream(self.device).cuda_stream)
        if stream != self._stream:
            self._trainer().set_stream(stream)
            self._stream = stream

    def _trainer(self) -> frugal.Trainer:
        trainer = self._weak()
        assert trainer is not None, "the caller holds the trainer"
        return trainer

    def _call(self, call: Callable[..., int], *args: Any) -> None:
        # The trainer's own calls take turns in this way.
        try:
            del self._turn[0]
        except IndexError:
            raise self._trainer()._refusal() from None
        try:
            status = call(*args)
            if status:
                self.told(status)
        finally:
            self._turn.append(None)

    @staticmethod
    def told(status: int) -> None:
        """Raises what a status that is not 0 means."""
        try:
            check(status)
        except tuple(_CLASSES) as error:
            raise _of_torch(error) from None


def _host(tensor: torch.Tensor, what: str, dtype: torch.dtype, shape: Tuple[int, ...]) -> int:
    """The address of a tensor that the library can take as it is."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{what} is of {tensor.dtype} and must be {dtype}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"{what} is on {tensor.device}, of layout {tensor.layout}: it must be dense, on the CPU")
    if tensor.shape != shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)} and must have {shape}")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(f"{what} has strides {tensor.stride()} or is a negative view: .resolve_neg().contiguous()")
    return tensor.data_ptr()


def _keys(keys: torch.Tensor) -> Tuple[int, int]:
    count = keys.numel() if isinstance(keys, torch.Tensor) else 0
    return _host(keys, "keys", torch.int64, (count,)), count


def get(
    table: frugal.Table, keys: torch.Tensor, rows: torch.Tensor, with_state: bool, committed: bool = False
) -> torch.Tensor:
    """Reads rows into `rows`; `committed`: in steps, too, as of the last committed one. Returns which were found."""
    address, count = _keys(keys)
    out = _host(rows, "rows", torch.float32, (count, table._width(with_state)))
    found = torch.zeros(count, dtype=torch.bool, device="cpu")
    flags = with_state * _abi.FRUGAL_WITH_STATE | committed * _abi.FRUGAL_COMMITTED
    check(lib.frugal_get(table.handle, address, count, flags, out, 0, found.data_ptr()))
    return found


def put(table: frugal.Table, keys: torch.Tensor, rows: torch.Tensor, with_state: bool) -> None:
    """Writes rows."""
    address, count = _keys(keys)
    values = _host(rows, "rows", torch.float32, (count, table._width(with_state)))
    check(lib.frugal_put(table.handle, address, count, with_state, values, 0))


def delete(table: frugal.Table, keys: torch.Tensor) -> None:
    """Deletes rows."""
    address, count = _keys(keys)
    check(lib.frugal_delete(table.handle, address, count, None))


def table_keys(table: frugal.Table) -> torch.Tensor:
    """All keys, as int64."""
    keys = torch.empty(table.count(), dtype=torch.int64, device="cpu")
    cursor, got, done = c_uint64(0), c_size_t(1), 0
    while done < keys.numel() and got.value:
        address = keys.data_ptr() + 8 * done
        check(lib.frugal_table_keys(table.handle, byref(cursor), address, keys.numel() - done, byref(got)))
        done += got.value
    return keys[:done]
