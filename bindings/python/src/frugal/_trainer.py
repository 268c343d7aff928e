"""Trainers, which make the calls of the step protocol, and the batches that they declare."""

from __future__ import annotations

import atexit
import os
import re
import sys
import warnings
import weakref
from ctypes import addressof, byref, c_void_p, create_string_buffer
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
    """Keys that Trainer.prefetch declared for one step; the library forgets them when the step ends."""

    __slots__ = ("_counts", "_handle", "_tables", "step")

    def __init__(self, handle: int, step: int, tables: Tuple[Table, ...], counts: Tuple[int, ...]) -> None:
        self._handle = handle
        self._tables = tables
        self._counts = counts
        self.step = step
        """The step that it was declared for."""

    @property
    def handle(self) -> int:
        """The handle of the ABI."""
        return self._handle

    @property
    def counts(self) -> Tuple[int, ...]:
        """The number of keys of each part, in the order of the ops that declared them."""
        return self._counts

    def __len__(self) -> int:
        return sum(self._counts)

    def __bool__(self) -> bool:
        return True  # also one without keys: it is there

    def _only(self) -> Tuple[Table, int]:
        if len(self._counts) != 1:
            raise ValueError(f"the batch has {len(self._counts)} parts: give an Op for each, with `batch` and `part`")
        return self._tables[0], self._counts[0]


def _close(handle: int, pid: int, engine: weakref.finalize[Any, Any]) -> None:
    """Of a trainer's finalizer. In a forked child, and when the engine has been closed, there is nothing to do."""
    if engine.alive and os.getpid() == pid:
        check(lib.frugal_trainer_abandon(handle) if _program_failed else lib.frugal_trainer_close(handle))


def failed(kind: Optional[Type[BaseException]], error: Optional[BaseException]) -> bool:
    """Whether a `with` block was left by an exception that is a failure: an exit with status 0 is none."""
    return kind is not None and not (isinstance(error, SystemExit) and not error.code)


_program_failed = False


def _at_exit() -> None:
    global _program_failed
    # The interpreter sets it where it prints an exception that nobody has caught; so does each line typed at a prompt.
    _program_failed = getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1")


# Before finalizers, which were registered earlier (Engine's module sees to that).
def watch_exit() -> None:
    """Makes what is closed by the end of a program that has failed be abandoned."""
    atexit.register(_at_exit)


class Trainer(Single):
    """One rank of synchronous training; made by Engine.create_trainer. It leaves when it is closed.

        trainer.prefetch(s + L, table, keys)    declares the keys of a later step
        trainer.step_begin(s)                   waits until the rows of s are up to date
        trainer.lookup(batch, rows)
        trainer.push_grad(batch, grads)
        trainer.step_end(s)

    Threads: one at a time; a call while another thread is in one raises RuntimeError. close() is for any thread.
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
        self._told = engine.world_size == 1  # of ranks that nobody has joined as
        self._joined(handle, device)
        # The ops of a call, written anew by each.
        self._memory = create_string_buffer(_OP_SIZE)
        self._address = addressof(self._memory)
        # Whose turn it is: a call takes the only element and puts one back. To delete it is one bytecode: it is
        # done or raises, and no signal comes between it and the `try` behind it, as one could after a call.
        self._turn: List[None] = [None]

    def _joined(self, joined: c_void_p, device: str) -> None:
        gpu = re.fullmatch(r"cuda:(\d+)", device)
        self._handle = joined.value or 0
        self._finalizer = weakref.finalize(self, _close, self._handle, os.getpid(), self._engine._finalizer)
        self._device, self._place = device, Place(int(gpu[1]) if gpu else None)
        joined.value = None  # from here on it is the finalizer's

    def _move(self, device: str) -> None:
        """Leaves, and joins again on another device; where that fails, on the one of before. Declarations are cancelled.
        Nobody else may be in the engine: others would go on without this rank meanwhile."""
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            if not self._finalizer.alive:
                raise Closed(f"rank {self.rank} has left: its trainer cannot go to {device}", _abi.STATUS["FRUGAL_ERR_CLOSED"])
            self._finalizer()
            handle = c_void_p()
            try:
                self._engine._join(handle, self.rank, device, *self._cache, False)
                self._joined(handle, device)
            except BaseException:  # an interrupt, too
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
        """Warns, once, of ranks that a long wait is for and that nobody has joined as. Returns whether there are some."""
        missing = re.findall(r"(\d+) \(not joined\)", message)
        if missing and not self._told:
            self._told = True
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
            warnings.warn(
                f"rank {self.rank} waits for {ranks}, and nobody has joined as such: world_size is"
                f" {self._engine.world_size}. Start these ranks, each with its create_trainer(rank) or under torchrun,"
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
        """Leaves: nobody waits for this rank any more; a step that it is inside of is aborted for all.

        Declarations are cancelled. Closing twice is no error. In a forked child nothing happens. At the end of a `with`
        block that an exception leaves it is abandon() that is called, and so at the end of a program that no one has
        caught an exception of.
        """
        self._left = True
        self._finalizer()

    def abandon(self) -> None:
        """Gives the rank up as if this process had ended: with a service all uncommitted steps are undone, the others
        are told by PeerLost, and somebody who joins as this rank is waited for. Without a service: close().
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
            pass  # what left the block says more

    def set_stream(self, stream: int) -> None:
        """Names the cudaStream_t, as an integer, in which this trainer's calls work from now on; 0 is the default.

        The stream stays the caller's, and must live until the step is committed.
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

        Of ops the fields table, keys and padding_key are used. Keys are copied; nothing waits. Several
        declarations for a step add up, and may come late and in any order.
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
        """The gate: begins a step when every update of earlier steps that a declared row needs is in place.

        The first step is any number up to 2**64 - 66, the same on all ranks; then + 1. timeout: seconds, 0 polls,
        math.inf waits for ever; the engine's if left out. Raises Timeout, StepOrder, StepAborted (the message names the
        step to begin). Ctrl-C ends the wait; if it came too late for that, the step has begun, and step_abort() undoes it.
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
        """Reads rows in a step, creating those of hashed tables.

        Of a batch of one table, of any keys of a table, or of ops. Returns the output rows: `rows` if given, else a
        new NumPy array; of several ops a list. The contents are undefined after an error.
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
        """Hands over gradients of the step: of a batch of one table, of any keys of a table, or of ops.

        A row's gradients are summed over positions, pushes and ranks, and the optimizer is applied once when the
        step has ended on all ranks. They are the engine's when the call returns (on a GPU: in the stream).
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
        """Ends the step on this rank; it commits when the last rank has ended it.

        skip: the step commits without any update (an overflow was found); one rank's word is enough.
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
        """Undoes every uncommitted step on all ranks; declarations stay. The others are told by StepAborted."""
        try:
            del self._turn[0]
        except IndexError:
            raise self._refusal() from None
        try:
            check(lib.frugal_step_abort(self._handle))
        finally:
            self._turn.append(None)

    def step(self, step: int, timeout: Optional[float] = None) -> _Step:
        """A step as a `with` block: begins it, and ends it or, if an exception leaves the block, aborts it.

        So does Ctrl-C while it begins. A second one, while the step is undone, may leave it begun: step_abort().
        """
        return _Step(self, step, timeout)


class _Step:
    __slots__ = ("_step", "_timeout", "_trainer")

    def __init__(self, trainer: Trainer, step: int, timeout: Optional[float]) -> None:
        self._trainer = trainer
        self._step = step
        self._timeout = timeout

    def __enter__(self) -> None:
        # As step_begin. But here nobody learns of a step that has begun when an exception of a signal handler
        # comes, for the block is not entered: it is undone. What the library itself refused has begun nothing.
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
            pass  # the step is undone already, or lost with its engine; what left the block says more


def as_ops(source: Any) -> Tuple[Op, ...]:
    """The ops of a call that takes one or several; a list may change while its arrays are asked for their memory."""
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
