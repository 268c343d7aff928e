"""The engine: options, tables, trainers, and the calls that concern all of them.

close(), the end of a `with` block, the garbage collector and the interpreter's exit close a handle. A child of fork()
closes nothing, because the engine belongs to the parent. Handles are never addresses: a call with a closed one raises
BadHandle, in any order of destruction.
"""

from __future__ import annotations

import errno
import math
import os
import time
import warnings
import weakref
from contextlib import contextmanager
from ctypes import addressof, byref, c_char_p, c_size_t, c_uint64, c_void_p, create_string_buffer, sizeof
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Type, Union, overload

from . import _abi, _wait
from ._buffers import HOST, AnyArray, Array, Pins, Place
from ._checkpoint import NAMES, Checkpoint, CheckpointInfo, c_string, new_info, path_bytes, told
from ._lib import lib
from ._ops import READ, Op, choose, pack, uint32, uint64
from ._single import Single
from ._table import FLUSH_MODES, Table, table_config
from ._trainer import Trainer, as_ops, failed, watch_exit
from ._wait import milliseconds, wait
from .config import SGD, Constant, Initializer, Optimizer
from .errors import Error, NotFound, PeerLost, check, last_error

if TYPE_CHECKING:
    from typing import Literal

    from ._table import FloatArray, FlushMode, NanPolicy

    Backing = Literal["private", "shm"]
    Path = Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]

STALENESS_ASYNC = _abi.FRUGAL_STALENESS_ASYNC
"""Staleness without a bound."""

SERVICE = "FRUGAL_SERVICE"  # environment variable

_BACKINGS: Dict[str, int] = {"private": _abi.FRUGAL_BACKING_PRIVATE, "shm": _abi.FRUGAL_BACKING_SHM}
_STATS = [field[0] for field in _abi.frugal_stats._fields_[1:]]


def _log_callback(log: Callable[[int, str], object]) -> Any:
    def call(context: Optional[int], level: int, text: bytes) -> None:
        log(level, text.decode(errors="replace"))

    # An exception of `log` does not reach the library: ctypes passes it to sys.unraisablehook.
    return _abi.LogFn(call)


def _close(handle: int, pid: int, callback: Any) -> None:
    """Finalizes an engine. The finalizer keeps the log callback alive until the threads that call it have ended."""
    if os.getpid() == pid:
        check(lib.frugal_close(handle))


def _await_controller(config: Any, limit_ms: float) -> None:
    """Waits until a controller listens at the address. It waits in slices, so that Ctrl-C ends the wait."""
    probe = _abi.frugal_config()
    lib.frugal_config_init(addressof(probe))
    probe.service = config.service
    probe.flags = _abi.FRUGAL_OBSERVE
    probe.timeout_ms = 0
    handle = c_void_p()
    begin, pause, told = time.monotonic(), 0.001, False
    while True:
        status = lib.frugal_open(addressof(probe), byref(handle))
        if status == 0:
            check(lib.frugal_close(handle))
        error = last_error(status) if status == _abi.FRUGAL_ERR_PEER_LOST else None
        if error is None or error.system_code not in _NOBODY:
            return  # a controller listens, or the caller's own frugal_open reports what is wrong
        waited = time.monotonic() - begin
        left = limit_ms / 1000 - waited
        where, why = os.fsdecode(config.service), os.strerror(error.system_code)
        if left <= 0:
            raise PeerLost(f"no controller at {where} within {limit_ms:.0f} ms ({why})", status, error.system_code)
        if waited * 1000 >= _wait.WORD_MS and not told:
            told = True
            warnings.warn(f"no controller serves {where} ({why}): start frugal-controller there", stacklevel=3)
        time.sleep(min(pause, left))
        pause = min(pause * 2, 0.05)


_NOBODY = (errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EAGAIN)


class Engine(Single):
    """An opened instance: tables, host memory, background threads.

    world_size: the number of ranks.
    lookahead: the largest number of future steps that a trainer may declare.
    flush_threads: the number of background threads; with 0 the waiting threads flush.
    flush_mode: how updates reach the host rows.
    staleness: 0 is synchronous, STALENESS_ASYNC is without a bound, a number between is a bound in steps.
    pending_bytes: the memory budget for updates that are not yet in the host rows.
    host_bytes: the memory limit for tables; None is no limit.
    timeout: seconds that a call without a time-out of its own waits; math.inf waits for ever.
    backing: the memory of the rows, "private" or "shm".
    seed: the seed of all initial values.
    log: called with a level (0 error, 1 warning, 2 information) and a text, from any thread. It must not call this
    library. An exception that it raises goes to sys.unraisablehook.
    service: the address of the controller to attach to, or "" for an engine in this process. None takes the address
    from the environment variable FRUGAL_SERVICE. The other options must equal those of the controller's engine.

    Any thread may use an engine. Closing it frees its tables and all its other memory.
    """

    def __init__(
        self,
        *,
        world_size: int = 1,
        lookahead: int = 10,
        flush_threads: int = 1,
        flush_mode: FlushMode = "auto",
        staleness: int = 0,
        pending_bytes: int = 1 << 30,
        host_bytes: Optional[int] = None,
        timeout: float = 1800.0,
        backing: Backing = "private",
        seed: int = 0,
        log: Optional[Callable[[int, str], object]] = None,
        service: Optional[Path] = None,
    ) -> None:
        if log is not None and not callable(log):
            raise TypeError(f"log must be a callable or None, not {type(log).__name__}")
        config = _abi.frugal_config()
        lib.frugal_config_init(addressof(config))
        config.world_size = uint32(world_size, "world_size")
        config.lookahead = uint32(lookahead, "lookahead")
        config.flush_threads = uint32(flush_threads, "flush_threads")
        config.flush_mode = choose(FLUSH_MODES, flush_mode, "flush_mode")
        config.staleness = uint64(staleness, "staleness")
        config.pending_bytes = uint64(pending_bytes, "pending_bytes")
        if host_bytes is not None:
            config.host_bytes = uint64(host_bytes, "host_bytes")
        self.world_size: int = config.world_size
        """The number of ranks."""
        self.lookahead: int = config.lookahead
        """The largest number of future steps that a trainer may declare."""
        self._timeout_ms = milliseconds(timeout)
        endless = self._timeout_ms == math.inf
        config.timeout_ms = _abi.FRUGAL_TIMEOUT_INFINITE if endless else int(min(self._timeout_ms, 2**62))
        config.backing = choose(_BACKINGS, backing, "backing")
        config.seed = uint64(seed, "seed")
        callback = None
        if log is not None:
            callback = config.log = _log_callback(log)
        address = path_bytes(os.environ.get(SERVICE, "") if service is None else service, "service")
        if address:
            config.service = address  # the struct keeps it alive
        self.service: str = os.fsdecode(address)
        """The address of the controller that this process is attached to, or ""."""
        if self.service:
            _await_controller(config, self._timeout_ms)
        handle = c_void_p()
        check(lib.frugal_open(addressof(config), byref(handle)))
        self._trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self._handle: int = handle.value or 0
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._handle, self._pid, callback)

    @property
    def handle(self) -> int:
        """The handle of the ABI."""
        return self._handle

    def __repr__(self) -> str:
        handle = getattr(self, "_finalizer", None)  # missing if opening failed
        if handle is None or not handle.alive:
            return "<frugal.Engine, closed>"
        service = f", service {self.service!r}" if self.service else ""
        parent = "" if os.getpid() == self._pid else ", of the parent process"
        return f"<frugal.Engine, world_size {self.world_size}, lookahead {self.lookahead}{service}{parent}>"

    def close(self) -> None:
        """Stops the threads, writes the pending updates, and frees all memory. Closing twice is no error.

        Waiting calls of other threads raise Closed. In a forked child close() does nothing.
        """
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        for trainer in list(self._trainers) if failed(kind, error) else []:
            try:
                trainer.abandon()
            except Error:
                pass  # the exception that left the block says more
        self.close()

    def create_table(
        self,
        name: str,
        rows: int,
        dim: int,
        *,
        hashed: bool = False,
        lazy: bool = False,
        init: Initializer = Constant(),
        optimizer: Optimizer = SGD(),
        nan_policy: NanPolicy = "reject",
    ) -> Table:
        """Creates a table of float32 rows. The engine owns the table until drop().

        hashed: keys are any 64 bits, and a row is created on its first use in training, up to `rows` rows. Without it
        the table is dense: its ids are 0..rows-1.
        lazy: a dense row gets its memory on its first use.
        nan_policy: what a gradient with a NaN does. "reject": the push raises NanGradient. "skip": the row is left
        as it is. "accept": the optimizer computes with it.
        """
        config = table_config(rows, dim, hashed, lazy, init, optimizer, nan_policy)
        config.name = c_string(name, "name")
        handle = c_void_p()
        check(lib.frugal_table_create(self._handle, addressof(config), byref(handle)))
        return Table(self, handle.value or 0, name)

    def find_table(self, name: str) -> Table:
        """Finds a table by name, or raises NotFound."""
        handle = c_void_p()
        check(lib.frugal_table_find(self._handle, c_string(name, "name"), byref(handle)))
        return Table(self, handle.value or 0, name)

    def tables(self) -> Dict[str, Table]:
        """Returns all tables by name, in the order of their creation, including those of other processes."""
        tables: Dict[str, Table] = {}
        memory, cursor, size = create_string_buffer(256), c_uint64(0), c_size_t()
        while True:
            check(lib.frugal_table_next(self._handle, byref(cursor), memory, len(memory), byref(size)))
            if not size.value:
                return tables
            name = memory.value.decode(errors=NAMES)
            try:
                tables[name] = self.find_table(name)
            except NotFound:
                pass  # another thread has dropped it

    def create_trainer(
        self,
        rank: int = 0,
        *,
        device: str = "cpu",
        cache_bytes: int = 0,
        cache_ratio: float = 0.0,
        replace: bool = False,
    ) -> Trainer:
        """Joins as a rank. No step commits until every rank has joined once.

        device: "cpu", or "cuda:N".
        cache_bytes: the size of the trainer's private cache, over all tables.
        cache_ratio: the same as a share of each table's rows, 0..1. The larger of the two counts.
        replace: takes the rank over from an unresponsive trainer process; only with a service.
        """
        handle = c_void_p()
        self._join(handle, rank, device, cache_bytes, cache_ratio, replace)
        trainer = Trainer(self, handle, rank, device, cache_bytes, cache_ratio)
        self._trainers.add(trainer)
        return trainer

    def _join(
        self, handle: c_void_p, rank: int, device: str, cache_bytes: int, cache_ratio: float, replace: bool
    ) -> None:
        config = _abi.frugal_trainer_config()
        lib.frugal_trainer_config_init(addressof(config))
        config.rank = uint32(rank, "rank")
        config.device = c_string(device, "device")
        config.cache_bytes = uint64(cache_bytes, "cache_bytes")
        config.cache_ratio = cache_ratio
        if replace:
            config.flags = _abi.FRUGAL_TRAINER_REPLACE
        check(lib.frugal_trainer_create(self._handle, addressof(config), byref(handle)))

    def health(self) -> int:
        """Returns 0, or the status of the first background failure. Every call after one raises Unhealthy."""
        return int(lib.frugal_health(self._handle))

    def flush(self, timeout: Optional[float] = None) -> None:
        """Waits until every update of every committed step is in the host rows. The calling thread helps.

        timeout: seconds; the default is the engine's. Ctrl-C ends the wait.
        """
        limit = self._timeout_ms if timeout is None else milliseconds(timeout)
        wait(lambda ms: lib.frugal_flush(self._handle, ms), limit)

    def committed_step(self) -> Optional[int]:
        """Returns the last step that all ranks have ended, or None."""
        step = c_uint64()
        check(lib.frugal_committed_step(self._handle, byref(step)))
        return None if step.value == _abi.FRUGAL_NO_STEP else step.value

    @overload
    def read(
        self,
        source: Table,
        keys: Array,
        rows: None = None,
        *,
        found: Optional[Array] = None,
        trainer: Optional[Trainer] = None,
        timeout: Optional[float] = None,
    ) -> FloatArray: ...
    @overload
    def read(
        self,
        source: Table,
        keys: Array,
        rows: AnyArray,
        *,
        found: Optional[Array] = None,
        trainer: Optional[Trainer] = None,
        timeout: Optional[float] = None,
    ) -> AnyArray: ...
    @overload
    def read(self, source: Op, *, trainer: Optional[Trainer] = None, timeout: Optional[float] = None) -> Any: ...
    @overload
    def read(
        self, source: Sequence[Op], *, trainer: Optional[Trainer] = None, timeout: Optional[float] = None
    ) -> List[Any]: ...

    def read(
        self,
        source: Union[Table, Op, Sequence[Op]],
        keys: Optional[Array] = None,
        rows: Optional[Array] = None,
        *,
        found: Optional[Array] = None,
        trainer: Optional[Trainer] = None,
        timeout: Optional[float] = None,
    ) -> Any:
        """Reads rows by their keys, for evaluation or serving. It creates no row and declares nothing.

        Returns the output rows: `rows` if given, else a new NumPy array. For several ops it returns a list. A missing
        key reads as zeros, and `found` marks the keys that have rows. With a trainer inside a step, read() sees what
        lookup() sees. With a trainer between steps it waits, like the gate, until the other ranks have ended their
        steps. Ctrl-C ends the wait. Any thread may call it, but only one thread at a time may use `trainer`.
        """
        limit = self._timeout_ms if timeout is None else milliseconds(timeout)
        ops = (Op(source, keys, rows=rows, found=found),) if isinstance(source, Table) else as_ops(source)
        if trainer is None:
            outputs = self._read(ops, 0, HOST, limit)
        elif not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a frugal.Trainer or None, not {type(trainer).__name__}")
        else:
            try:
                del trainer._turn[0]
            except IndexError:
                raise trainer._refusal() from None
            try:
                outputs = self._read(ops, trainer._handle, trainer._place, limit)
            finally:
                trainer._turn.append(None)
        return outputs if isinstance(source, (list, tuple)) else outputs[0]

    def _read(self, ops: Sequence[Op], trainer: int, place: Place, limit: float) -> List[Any]:
        memory = create_string_buffer(max(len(ops), 1) * _abi.OP.size)
        pins: Pins = []
        try:
            outputs, _ = pack(memory, ops, READ, pins, place)
            engine, address, count = self._handle, addressof(memory), len(ops)
            wait(lambda ms: lib.frugal_read(engine, trainer, address, count, ms), limit)
        finally:
            pins.clear()
        return outputs

    def stats(self) -> Dict[str, int]:
        """Returns counters since the engine was opened, by their names in frugal_stats. Times are in nanoseconds."""
        stats = _abi.frugal_stats()
        stats.struct_size = sizeof(stats)
        check(lib.frugal_get_stats(self._handle, addressof(stats)))
        return {name: getattr(stats, name) for name in _STATS}

    def metrics(self) -> str:
        """Returns metrics for Prometheus, in text exposition format 0.0.4.

        They are all counters of stats(), the pending updates, health, and the last committed step. For each table they
        have rows and bytes, for each rank its step.
        """
        size = c_size_t(16384)
        while True:
            # The text may grow between two calls.
            text = create_string_buffer(size.value + 1024)
            status = lib.frugal_metrics(self._handle, text, len(text), byref(size))
            if status != _abi.FRUGAL_ERR_OVERFLOW:
                check(status)
                return text.raw[: size.value - 1].decode()

    def trace_start(self, events: int = 1 << 17) -> None:
        """Starts to record time spans of the engine's work. It keeps the newest `events` spans, 64 bytes each.

        Raises Exists if a trace is already running. trace() records a `with` block.
        """
        check(lib.frugal_trace_start(self._handle, uint64(events, "events")))

    def trace_stop(self, path: Optional[Path]) -> None:
        """Ends the recording and writes it to a file in Chrome's trace event format, for chrome://tracing and Perfetto.

        The path None discards the recording. Raises NotFound if no trace was started. Raises InvalidArgument, with the
        cause in system_code, if the file cannot be written; then the events are kept for another call.
        """
        check(lib.frugal_trace_stop(self._handle, None if path is None else path_bytes(path, "path")))

    @contextmanager
    def trace(self, path: Path, events: int = 1 << 17) -> Iterator[None]:
        """Records a `with` block. At its end, also after an exception, it writes the trace to a file."""
        name = path_bytes(path, "path")
        self.trace_start(events)
        try:
            yield
        except BaseException:
            # The exception of the block is reported, not one of this call.
            if lib.frugal_trace_stop(self._handle, name) != _abi.FRUGAL_OK:
                lib.frugal_trace_stop(self._handle, None)
            raise
        status = lib.frugal_trace_stop(self._handle, name)
        if status != _abi.FRUGAL_OK:
            error = last_error(status)
            lib.frugal_trace_stop(self._handle, None)
            raise error

    def open_folder(
        self, path: Path, *, keep: int = 2, every_steps: int = 0, every_seconds: float = 0.0
    ) -> None:
        """Opens a folder, to which this engine writes its checkpoints from now on. It is created if it is missing.

        keep: how many checkpoints without a name stay, the newest ones.
        every_steps, every_seconds: a checkpoint is due by itself when so much has passed since the last one; 0: never.
        Call it between steps. One engine at a time writes a folder; any number of processes read it meanwhile.
        """
        config = _abi.frugal_folder_config()
        lib.frugal_folder_config_init(addressof(config))
        config.keep = uint32(keep, "keep")
        config.every_steps = uint64(every_steps, "every_steps")
        if not 0 <= every_seconds < math.inf:
            raise ValueError(f"every_seconds is {every_seconds}, and must be a number of seconds, 0 or more")
        config.every_ms = math.ceil(every_seconds * 1000)
        check(lib.frugal_folder_open(self._handle, path_bytes(path, "path"), addressof(config)))

    def close_folder(self) -> None:
        """Ends the use of the folder, which another engine may write then. Call it between steps."""
        check(lib.frugal_folder_close(self._handle))

    def checkpoint(
        self, name: Optional[str] = None, *, step: Optional[int] = None, blob: Optional[bytes] = None, rank: int = 0
    ) -> Checkpoint:
        """Begins a checkpoint of all tables, and returns its ticket. Ranks may be inside of steps, and go on.

        name: with one it is kept until delete_checkpoint().
        step: the step whose state it has, one that is not committed yet; None: the last committed one.
        blob: bytes of `rank` that belong to the last committed step, instead of those that it has given in the step
        with Trainer.checkpoint_blob(). frugal.read_blob reads them.
        """
        config = _abi.frugal_checkpoint_config()
        lib.frugal_checkpoint_config_init(addressof(config))
        if name is not None:
            config.name = c_string(name, "name")
        if step is not None:
            config.step = uint64(step, "step")
        if blob is not None:
            config.blob, config.blob_size, config.blob_rank = blob, len(blob), uint32(rank, "rank")
        number = c_uint64()
        check(lib.frugal_checkpoint(self._handle, addressof(config), byref(number)))
        return Checkpoint(self, number.value)

    def delete_checkpoint(self, number: int) -> None:
        """Deletes a checkpoint of the engine's folder. Raises Busy while a process reads it."""
        check(lib.frugal_checkpoint_delete(self._handle, uint64(number, "number")))

    def restore(
        self,
        folder: Optional[Path] = None,
        *,
        number: int = 0,
        name: Optional[str] = None,
        tables: Optional[Sequence[str]] = None,
    ) -> CheckpointInfo:
        """Creates the tables of a checkpoint, with their rows, state and hyper-parameters.

        folder: another one, which its writer may be writing; None: the folder of open_folder().
        number: which checkpoint; 0: the newest one, or the newest that has `name`.
        tables: the names of the tables to restore; None: all.
        Call it before trainers join. create_table() with the same configuration then returns the restored table. The
        next step is the one after the checkpoint's. Raises NotFound without a checkpoint.
        """
        config = _abi.frugal_restore_config()
        lib.frugal_restore_config_init(addressof(config))
        if folder is not None:
            config.folder = path_bytes(folder, "folder")
        config.number = uint64(number, "number")
        if name is not None:
            config.name = c_string(name, "name")
        if tables is not None:
            if isinstance(tables, str):
                raise TypeError("tables must be a list of names, not a str")
            names = (c_char_p * max(len(tables), 1))(*(c_string(t, "a table's name") for t in tables))
            config.tables, config.table_count = addressof(names), len(tables)
        info = new_info()
        check(lib.frugal_restore(self._handle, addressof(config), addressof(info)))
        return told(info)

    def serve(self, address: Path) -> None:
        """Lets other processes of this user attach to this engine, with Engine(service=address), until it is closed.

        `address` is the path of the socket that this call creates. The engine needs backing="shm".
        """
        check(lib.frugal_serve(self._handle, path_bytes(address, "address")))


# The first finalizer ever made registers weakref's atexit function. Making one here puts it before the functions that
# the program registers after this import: atexit runs those first, so they find their engines open.
weakref.finalize(Engine, int).detach()
watch_exit()
