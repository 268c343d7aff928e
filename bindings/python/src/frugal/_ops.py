"""Ops: the keys of one table in a call, and their conversion to the frugal_op structs of the ABI."""

from __future__ import annotations

import operator
from ctypes import Array as CArray
from ctypes import c_char
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from . import _abi
from ._buffers import Array, Pins, Place, floats, found_flags, integers, new_rows, rows

if TYPE_CHECKING:
    from typing import Literal

    from ._table import Table
    from ._trainer import Batch

    Pooling = Literal["none", "sum", "mean"]

_POOLING: Dict[str, int] = {
    "none": _abi.FRUGAL_POOL_NONE,
    "sum": _abi.FRUGAL_POOL_SUM,
    "mean": _abi.FRUGAL_POOL_MEAN,
}

_SIZE = _abi.OP.size
_pack_into = _abi.OP.pack_into

# The kinds of call that take ops.
PREFETCH, LOOKUP, PUSH, READ = range(4)


def uint64(value: Any, what: str) -> int:
    """Checks a step, seed or count. ctypes would reduce a value that is out of range modulo 2**64."""
    value = operator.index(value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{what} is {value}, and must be in 0..2**64-1")
    return int(value)


def uint32(value: Any, what: str) -> int:
    """As uint64, with 32 bits."""
    value = operator.index(value)
    if not 0 <= value < 1 << 32:
        raise ValueError(f"{what} is {value}, and must be in 0..2**32-1")
    return int(value)


def choose(choices: Dict[str, int], value: str, what: str) -> int:
    """Returns the number of a named choice."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        raise ValueError(f"{what} is {value!r}, and must be one of {', '.join(choices)}") from None


class Op:
    """The keys of one table in a call of prefetch, lookup, push_grad or read, and the call's arrays.

    keys: int64, uint64 or int32, one dimension. With a batch and no keys: exactly the declared keys.
    part: the index of this table's op in the prefetch call that declared the batch.
    pooling: "sum" or "mean" gives a row for each bag, "none" a row for each key.
    offsets: as keys, one more than bags. Bag b has the keys offsets[b] .. offsets[b + 1] - 1.
    weights: a float32 factor for each key (pooling "sum").
    weight_grads: an output of push_grad, the gradient of each weight.
    rows: the output of lookup and read, float32 (rows, dim); without it a new NumPy array.
    grads: the gradient rows of push_grad.
    found: an output of read, uint8 or bool for each key.
    padding_key: rows of this key read as zeros, take no gradient and are never created.

    An op is plain data. A program may change it, and use it in several calls.
    """

    __slots__ = (
        "batch",
        "found",
        "grads",
        "keys",
        "offsets",
        "padding_key",
        "part",
        "pooling",
        "rows",
        "table",
        "weight_grads",
        "weights",
    )

    def __init__(
        self,
        table: Table,
        keys: Optional[Array] = None,
        *,
        batch: Optional[Batch] = None,
        part: int = 0,
        pooling: Pooling = "none",
        offsets: Optional[Array] = None,
        weights: Optional[Array] = None,
        weight_grads: Optional[Array] = None,
        rows: Optional[Array] = None,
        grads: Optional[Array] = None,
        found: Optional[Array] = None,
        padding_key: Optional[int] = None,
    ) -> None:
        self.table = table
        self.keys = keys
        self.batch = batch
        self.part = part
        self.pooling = pooling
        self.offsets = offsets
        self.weights = weights
        self.weight_grads = weight_grads
        self.rows = rows
        self.grads = grads
        self.found = found
        self.padding_key = padding_key


def pack(
    memory: CArray[c_char], ops: Sequence[Op], use: int, pins: Pins, place: Place
) -> Tuple[List[Any], List[int]]:
    """Writes `ops` into `memory`. Returns the output rows (for PREFETCH the tables) and each op's number of keys."""
    outputs: List[Any] = []
    counts: List[int] = []
    at = 0
    for op in ops:
        table = op.table
        batch = op.batch
        handle = part = keys = 0
        if batch is not None:
            handle = batch._handle
            part = operator.index(op.part)
            if not 0 <= part < len(batch._counts):
                raise ValueError(f"part is {part}, and the batch has {len(batch._counts)} parts")
            count = batch._counts[part]
        if op.keys is not None:
            keys, count = integers(pins, op.keys, "keys", place)
        elif batch is None:
            raise ValueError("an op without keys needs a batch")
        counts.append(count)

        flags = padding = 0
        if op.padding_key is not None:
            # A negative key is the same bits as in an array of int64.
            padding = operator.index(op.padding_key)
            if not -(1 << 63) <= padding < 1 << 64:
                raise ValueError(f"padding_key is {padding}, and must be of 64 bits")
            padding &= (1 << 64) - 1
            flags = _abi.FRUGAL_OP_PADDING
        if use == PREFETCH:
            _pack_into(memory, at, _SIZE, table._handle, 0, 0, 0, keys, count, *_NO_ARRAYS, padding, flags, 0)
            outputs.append(table)
            at += _SIZE
            continue

        pooling = choose(_POOLING, op.pooling, "pooling")
        offsets = weights = weight_grads = found = rows_out = grads = bags = 0
        if pooling:
            if op.offsets is None:
                raise ValueError(f'pooling "{op.pooling}" needs offsets')
            offsets, bags = integers(pins, op.offsets, "offsets", place)
            if not bags:
                raise ValueError("offsets: the first is 0 and the last is the number of keys; this has none")
            bags -= 1
            height = bags
        else:
            height = count
            if op.offsets is not None:
                raise ValueError('offsets need pooling "sum" or "mean"')
        if op.weights is not None:
            weights = floats(pins, op.weights, count, "weights", place)
        if use == PUSH:
            if op.grads is None:
                raise ValueError("push_grad needs grads")
            grads, stride = rows(pins, op.grads, height, table.dim, "grads", place)
            if op.weight_grads is not None:
                weight_grads = floats(pins, op.weight_grads, count, "weight_grads", place, output=True)
        else:
            out: Any = op.rows
            if out is None:
                out = new_rows(height, table.dim)
            rows_out, stride = rows(pins, out, height, table.dim, "rows", place, True)
            outputs.append(out)
            if use == READ and op.found is not None:
                found = found_flags(pins, op.found, count, "found")
        _pack_into(
            memory,
            at,
            _SIZE,
            table._handle,
            handle,
            part,
            pooling,
            keys,
            count,
            offsets,
            bags,
            weights,
            weight_grads,
            rows_out,
            grads,
            stride,
            found,
            padding,
            flags,
            0,
        )
        at += _SIZE
    return outputs, counts


_NO_ARRAYS = (0,) * 8  # offsets .. found_out
