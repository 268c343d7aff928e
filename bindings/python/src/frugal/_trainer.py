"""Trainers, which make the calls of a step, and the batches that they declare."""

from __future__ import annotations

import atexit
import os
import re
import sys
import warnings
import weakref
from ctypes import addressof, byref, c_bool, c_void_p, create_string_buffer
from types import TracebackType
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Type, Union, overload

from . import _abi
from ._buffers import AnyArray, Array, Pins, Place, integers, new_rows
from ._buffers import rows as _rows
from ._lib import lib
from ._ops import LOOKUP, PREFETCH, PUSH, Op, pack, uint64
from ._single import Single
from ._table import Table
from ._wait import milliseconds, wait
from .errors import FORKED, Closed, Error, Forked, check, last_error

if TYPE_CHECKING:
    from ._engine import Engine
    from ._table import FloatArray

_lookup = lib.frugal_lookup
_push_grad = lib.frugal_push_grad
_prefetch = lib.frugal_prefetch
_step_begin = lib.frugal_step_begin
_step_end = lib.frugal_step_end

_OP_SIZE = _abi.OP.size
_pack_into = _abi.OP.pack_into
_pack_batch_op = _abi.BATCH_OP.pack_into


class Batch(Single):
    """Keys that Trainer.prefetch declared for one step. The library releases them when the step ends."""

    __slots__ = ("_counts", "_handle", "_tables", "step")

    def __init__(self, handle: int, step: int, tables: Tuple[Table, ...], counts: Tuple[int, ...]) -> None:
        self._handle = handle
        self._tables = tables
        self._counts = counts
        self.step = step
        """The step that the batch was declared for."""

    @property
    def handle(self) -> int:
        """The handle of the ABI."""
        return self._handle

    @property
    def counts(self) -> Tuple[int, ...]:
        """The number of keys of each part, in the order of the ops of the prefetch call."""
        return self._counts

    def __len__(self) -> int:
        return sum(self._counts)

    def __bool__(self) -> bool:
        return True  # also without keys

    def _only(self) -> Tuple[Table, int]:
        if len(self._counts) != 1:
            raise ValueError(f"the batch has {len(self._counts)} parts: give an Op for each, with `batch` and `part`")
        return self._tables[0], self._counts[0]


def _close(handle: int, pid: int, engine: weakref.finalize[Any, Any]) -> None:
    """Finalizes a trainer. In a forked child, or after the engine was closed, it does nothing."""
    if engine.alive and os.getpid() == pid:
        check(lib.frugal_trainer_abandon(handle) if _program_failed else lib.frugal_trainer_close(handle))


def failed(kind: Optional[Type[BaseException]], error: Optional[BaseException]) -> bool:
    """Whether an exception that left a `with` block is a failure. An exit with status 0 is none."""
    return kind is not None and not (isinstance(error, SystemExit) and not error.code)


_program_failed = False


def _at_exit() -> None:
    global _program_failed
    # The interpreter sets last_type when it prints an uncaught exception. At a prompt (ps1), a failed line sets it too.
    _program_failed = getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1")


# _at_exit must run before the finalizers. atexit runs the last function first, and _engine.py registers theirs earlier.
def watch_exit() -> None:
    """At the exit of a program that failed, makes the finalizers abandon the trainers instead of closing them."""
    atexit.register(_at_exit)


class Trainer(Single):
    """One rank of synchronous training. Engine.create_trainer makes it; close() leaves the rank.

        trainer.prefetch(s + L, table, keys)    declares the keys of a later step
        trainer.step_begin(s)                   waits until the rows of s are up to date
        trainer.lookup(batch, rows)
        trainer.push_grad(batch, grads)
        trainer.step_end(s)

    One thread at a time may use it: a call raises RuntimeError while another thread is in one. Any thread may call
    close().
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_cache",
        "_device",
        "_engine",
        "_finalizer",
        "_handle",
        "_left",
        "_memory",
        "_place",
        "_told",
        "_turn",
        "rank",
    )

    def __init__(
        self, engine: Engine, handle: c_void_p, rank: int, device: str, cache_bytes: int, cache_ratio: float
    ) -> None:
        self._engine = engine  # lives as long as its trainers
        self.rank = rank
        """The rank."""
        self._cache = cache_bytes, cache_ratio
        self._left = False  # for good
        self._told = engine.world_size == 1  # warned of ranks that no trainer has joined as
        self._joined(handle, device)
        # Each call writes its ops here.
        self._memory = create_string_buffer(_OP_SIZE)
        self._address = addressof(self._memory)
        # A lock: a call deletes the only element and appends one at its end. The deletion is one bytecode. It is done
        # or raises, and no signal handler runs between it and the `try` that follows, as one could after a call.
        self._turn: List[None] = [None]

    def _joined(self, joined: c_void_p, device: str) -> None:
        gpu = re.fullmatch(r"cuda:(\d+)", device)
        self._handle = joined.value or 0
        self._finalizer = weakref.finalize(self, _close, self._handle, os.getpid(), self._engine._finalizer)
        self._device, self._place = device, Place(int(gpu[1]) if gpu else None)
        joined.value = None  # the finalizer closes the handle from now on

    def _move(self, device: str) -> None:
        """Leaves, and joins again on another device or, if that fails, on the old one. Declarations are cancelled.

        No other rank may be in the engine: it would continue without this rank meanwhile."""
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            if not self._finalizer.alive:
                raise Closed(
                    f"rank {self.rank} has left: its trainer cannot go to {device}", _abi.STATUS["FRUGAL_ERR_CLOSED"]
                )
            self._finalizer()
            handle = c_void_p()
            try:
                self._engine._join(handle, self.rank, device, *self._cache, False)
                self._joined(handle, device)
            except BaseException:  # also an interrupt
                if handle.value:
                    check(lib.frugal_trainer_close(handle))
                handle = c_void_p()
                self._engine._join(handle, self.rank, self._device, *self._cache, False)
                self._joined(handle, self._device)
                raise
            finally:
                if self._left:  # meanwhile, in another thread
                    self._finalizer()
        finally:
            self._turn.append(None)

    @property
    def handle(self) -> int:
        """The handle of the ABI."""
        return self._handle

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    def __repr__(self) -> str:
        engine = self._engine
        if not (self._finalizer.alive and engine._finalizer.alive):
            return f"<frugal.Trainer of rank {self.rank}, closed>"
        parent = "" if os.getpid() == engine._pid else ", of the parent process"
        return f"<frugal.Trainer of rank {self.rank}, world_size {engine.world_size}, on {self._device}{parent}>"

    def _tell(self, message: str) -> bool:
        """Warns once if a long wait is for ranks that no trainer has joined as. Returns whether there are any."""
        missing = re.findall(r"(\d+) \(not joined\)", message)
        if missing and not self._told:
            self._told = True
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
            warnings.warn(
                f"rank {self.rank} waits for {ranks}: no trainer has joined as such. world_size is"
                f" {self._engine.world_size}: start these ranks, each with its create_trainer(rank) or under torchrun,"
                " or open the engine with the world_size that there is",
                stacklevel=4,
            )
        return bool(missing)

    def _refusal(self) -> Exception:
        if os.getpid() != self._engine._pid:
            return Forked("the trainer was in a call of the parent; open an engine after fork()", FORKED)
        return RuntimeError("the trainer is in another call: one thread at a time can use it")

    def _room(self, count: int) -> None:
        if len(self._memory) < count * _OP_SIZE:
            self._memory = create_string_buffer(count * _OP_SIZE)
            self._address = addressof(self._memory)

    def close(self) -> None:
        """Leaves the rank: no rank waits for it from now on. A step that it is inside of is aborted on all ranks.

        Declarations are cancelled. Closing twice is no error. In a forked child close() does nothing. If an exception
        leaves the `with` block, abandon() is called instead; so it is after an uncaught exception ends the program.
        """
        self._left = True
        self._finalizer()

    def abandon(self) -> None:
        """Gives the rank up, as if this process had ended.

        With a service all uncommitted steps are undone, and calls of the other ranks raise PeerLost. Their next step
        waits until a trainer joins as this rank. Without a service it is close().
        """
        self._left = True
        ended = self._finalizer.detach()
        if ended is not None and self._engine._finalizer.alive and os.getpid() == self._engine._pid:
            check(lib.frugal_trainer_abandon(self._handle))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if not failed(kind, error):
            return self.close()
        try:
            self.abandon()
        except Error:
            pass  # the exception that left the block says more

    def set_stream(self, stream: int) -> None:
        """Names the cudaStream_t, as an integer, in which this trainer's calls work from now on. 0 is the default.

        The caller keeps the stream, which must live until the step is committed.
        """
        stream = uint64(stream, "stream")
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            check(lib.frugal_set_stream(self._handle, stream))
            self._place = Place(self._place.gpu, stream)
        finally:
            self._turn.append(None)

    # --- Declaring ---

    @overload
    def prefetch(self, step: int, source: Table, keys: Array) -> Batch: ...
    @overload
    def prefetch(self, step: int, source: Union[Op, Sequence[Op]]) -> Batch: ...

    def prefetch(self, step: int, source: Union[Table, Op, Sequence[Op]], keys: Optional[Array] = None) -> Batch:
        """Declares keys of a step that this trainer has not begun; returns the batch.

        Of each op it uses table, keys and padding_key. It copies the keys and does not wait. Several declarations for
        one step add up. They may come late and in any order.
        """
        step = uint64(step, "step")
        handle = c_void_p()
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        pins: Pins = []
        try:
            if type(source) is Table:
                if keys is None:
                    raise ValueError("prefetch of a table needs keys")
                address, count = integers(pins, keys, "keys", self._place)
                _pack_into(
                    self._memory, 0, _OP_SIZE, source._handle, 0, 0, 0, address, count, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
                )
                tables: Tuple[Table, ...] = (source,)
                counts: Tuple[int, ...] = (count,)
            else:
                ops = as_ops(source)
                self._room(len(ops))
                packed = pack(self._memory, ops, PREFETCH, pins, self._place)
                tables, counts = tuple(packed[0]), tuple(packed[1])
            status = _prefetch(self._handle, step, self._address, len(counts), byref(handle))
        finally:
            self._turn.append(None)
            pins.clear()
        if status:
            raise last_error(status)
        return Batch(handle.value or 0, step, tables, counts)

    def prefetch_cancel(self, batch: Batch) -> None:
        """Takes a declaration back, before its step begins."""
        if not isinstance(batch, Batch):
            raise TypeError(f"a Batch is needed, not {type(batch).__name__}")
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            check(lib.frugal_prefetch_cancel(self._handle, batch._handle))
        finally:
            self._turn.append(None)

    # --- Steps ---

    def step_begin(self, step: int, timeout: Optional[float] = None) -> None:
        """Begins a step; this is the gate. It waits for each earlier update that a declared row of the step must see.

        The first step is any number up to 2**64 - 66, the same on all ranks. Each later one is the number after it.
        timeout: seconds; 0 polls, math.inf waits for ever; the default is the engine's.
        Raises Timeout, StepOrder, or StepAborted, whose message names the step to begin.
        Ctrl-C ends the wait. If it comes too late, the step has begun, and step_abort() undoes it.
        """
        step = uint64(step, "step")
        limit = self._engine._timeout_ms if timeout is None else milliseconds(timeout)
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            handle = self._handle
            wait(lambda ms: _step_begin(handle, step, ms), limit, None if self._told else self._tell)
        finally:
            self._turn.append(None)

    @overload
    def lookup(self, source: Batch, rows: None = None) -> FloatArray: ...
    @overload
    def lookup(self, source: Batch, rows: AnyArray) -> AnyArray: ...
    @overload
    def lookup(self, source: Table, keys: Array, rows: None = None) -> FloatArray: ...
    @overload
    def lookup(self, source: Table, keys: Array, rows: AnyArray) -> AnyArray: ...
    @overload
    def lookup(self, source: Op) -> Any: ...
    @overload
    def lookup(self, source: Sequence[Op]) -> List[Any]: ...

    # The second argument has another name for each kind of source, which mypy does not like.
    def lookup(self, source: Any, keys: Any = None, rows: Any = None) -> Any:  # type: ignore[misc]
        """Reads rows in a step, and creates rows of hashed tables.

        It takes a batch of one table, any keys of a table, or ops. Returns the output rows: `rows` if given, else a
        new NumPy array. For several ops it returns a list. After an error the contents are undefined.
        """
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        pins: Pins = []
        try:
            if type(source) is Batch:
                table, count = source._only()
                out = rows if keys is None else keys
                if out is None:
                    out = new_rows(count, table.dim)
                address, stride = _rows(pins, out, count, table.dim, "rows", self._place, True)
                _pack_batch_op(self._memory, 0, _OP_SIZE, table._handle, source._handle, address, 0, stride)
                number = 1
            else:
                ops = (Op(source, keys, rows=rows),) if isinstance(source, Table) else as_ops(source)
                self._room(len(ops))
                out = pack(self._memory, ops, LOOKUP, pins, self._place)[0]
                number = len(ops)
                if not isinstance(source, (list, tuple)):
                    out = out[0]
            status = _lookup(self._handle, self._address, number)
        finally:
            self._turn.append(None)
            pins.clear()
        if status:
            raise last_error(status)
        return out

    @overload
    def push_grad(self, source: Batch, grads: Array) -> None: ...
    @overload
    def push_grad(self, source: Table, keys: Array, grads: Array) -> None: ...
    @overload
    def push_grad(self, source: Union[Op, Sequence[Op]]) -> None: ...

    def push_grad(self, source: Any, keys: Any = None, grads: Any = None) -> None:  # type: ignore[misc]
        """Submits gradients of the step: of a batch of one table, of any keys of a table, or of ops.

        A row's gradients are summed over positions, pushes and ranks. The optimizer is applied once, when the step has
        ended on all ranks. When the call returns, the buffers may be overwritten; on a GPU, in the stream.
        """
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        pins: Pins = []
        try:
            if type(source) is Batch:
                table, count = source._only()
                rows = grads if keys is None else keys
                address, stride = _rows(pins, rows, count, table.dim, "grads", self._place)
                _pack_batch_op(self._memory, 0, _OP_SIZE, table._handle, source._handle, 0, address, stride)
                number = 1
            else:
                ops = (Op(source, keys, grads=grads),) if isinstance(source, Table) else as_ops(source)
                self._room(len(ops))
                pack(self._memory, ops, PUSH, pins, self._place)
                number = len(ops)
            status = _push_grad(self._handle, self._address, number)
        finally:
            self._turn.append(None)
            pins.clear()
        if status:
            raise last_error(status)

    def step_end(self, step: int, *, skip: bool = False) -> None:
        """Ends the step on this rank. The step commits when the last rank has ended it.

        skip: the step commits without any update (an overflow was found). One rank that gives it is enough.
        """
        step = uint64(step, "step")
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            status = _step_end(self._handle, step, _abi.FRUGAL_STEP_SKIP if skip else 0)
        finally:
            self._turn.append(None)
        if status:
            raise last_error(status)

    def step_abort(self) -> None:
        """Undoes every uncommitted step on all ranks; declarations stay. Calls of the other ranks raise StepAborted."""
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            check(lib.frugal_step_abort(self._handle))
        finally:
            self._turn.append(None)

    def checkpoint_due(self) -> bool:
        """Whether the step that the rank is inside of will be a checkpoint: then give its blob."""
        due = c_bool()
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            check(lib.frugal_checkpoint_due(self._handle, byref(due)))
        finally:
            self._turn.append(None)
        return due.value

    def checkpoint_blob(self, blob: Union[bytes, bytearray, memoryview]) -> None:
        """Gives bytes that belong to the step: dense weights, the place of the data reader.

        A checkpoint of this step has them, and frugal.read_blob reads them. A later call in the step replaces them; an
        abort drops them. The library copies them.
        """
        memory = bytes(blob)
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            check(lib.frugal_checkpoint_blob(self._handle, memory, len(memory)))
        finally:
            self._turn.append(None)

    def step(self, step: int, timeout: Optional[float] = None) -> _Step:
        """Returns a `with` block that begins the step and ends it, or aborts it if an exception leaves the block.

        Ctrl-C while the step begins aborts it too. A second Ctrl-C during the abort may leave the step begun; then
        call step_abort().
        """
        return _Step(self, step, timeout)


class _Step:
    __slots__ = ("_step", "_timeout", "_trainer")

    def __init__(self, trainer: Trainer, step: int, timeout: Optional[float]) -> None:
        self._trainer = trainer
        self._step = step
        self._timeout = timeout

    def __enter__(self) -> None:
        # Like step_begin, but an exception of a signal handler undoes the step: the block is not entered, so the
        # caller could not know that the step has begun. After an Error of the library no step has begun.
        trainer = self._trainer
        step = uint64(self._step, "step")
        limit = trainer._engine._timeout_ms if self._timeout is None else milliseconds(self._timeout)
        called = False
        try:
            try:
                del trainer._turn[0]
            except IndexError:
                raise trainer._refusal() from None
            try:
                called = True
                handle = trainer._handle
                wait(lambda ms: _step_begin(handle, step, ms), limit, None if trainer._told else trainer._tell)
            finally:
                trainer._turn.append(None)
        except Error:
            raise
        except BaseException:
            if called:
                try:
                    trainer.step_abort()
                except (Error, RuntimeError):
                    pass  # it had not begun, or another thread has the trainer
            raise

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if kind is None:
            self._trainer.step_end(self._step)
            return
        try:
            self._trainer.step_abort()
        except Error:
            pass  # the step is undone already, or lost with its engine; the exception that left the block says more


def as_ops(source: Any) -> Tuple[Op, ...]:
    """Returns the ops of a call as a tuple, because a list may change while its arrays export their memory."""
    if isinstance(source, Op):
        ops: Tuple[Op, ...] = (source,)
    elif isinstance(source, (list, tuple)):
        ops = tuple(source)
    else:
        raise TypeError(f"a Table, a Batch, an Op, or a list or tuple of ops is needed, not {type(source).__name__}")
    for op in ops:
        if not isinstance(op, Op):
            raise TypeError(f"an Op is needed in a list of ops, not {type(op).__name__}")
        if not isinstance(op.table, Table):
            raise TypeError(f"the table of an Op must be a frugal.Table, not {type(op.table).__name__}")
        if op.batch is not None and not isinstance(op.batch, Batch):
            raise TypeError(f"the batch of an Op must be a frugal.Batch or None, not {type(op.batch).__name__}")
    return ops
