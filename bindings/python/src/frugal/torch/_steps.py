"""The steps of a trainer, as modules, optimizer and lookahead share them.

A trainer is used by one thread at a time, and a backward may come on another thread than the forward: every call that
takes the trainer is made under the lock. Which call begins and ends a step is said in docs/torch.md.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional

import torch

import frugal

from frugal.errors import FORKED

from . import _native
from ._native import Ops


class Table:
    """A table as the modules of one trainer share it."""

    def __init__(self, table: frugal.Table, created: bool, optimizer: frugal.Optimizer) -> None:
        self.table = table
        self.handle = table.handle
        self.name = table.name
        self.created = created
        self.optimizer = optimizer
        info = table.describe()
        self.capacity: int = info.capacity
        self.dim: int = info.dim
        self.state_floats: int = info.state_floats
        self.hashed: bool = info.key_space == _native.HASHED
        # Outputs depend on it, so that autograd runs although no input requires a gradient. Its gradient is the factor
        # that the pushed gradients of the step are to be multiplied with: 1, unless a GradScaler unscales it; infinite,
        # if gradients were. It is no Parameter: other optimizers, clipping and DistributedDataParallel would take it
        # for one.
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), requires_grad=True)


class _Lock:
    """An RLock that a forked child does not wait for: whoever held it at the fork is not there."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise frugal.Forked("the trainer is the parent's; open an engine after fork()", FORKED)
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def try_acquire(self) -> bool:
        return os.getpid() == self._pid and self._lock.acquire(blocking=False)


class Shared:
    """What the ranks of an engine that are in this process must say alike."""

    def __init__(self) -> None:
        self._lock = _Lock()
        self._optimizers: Dict[str, frugal.Optimizer] = {}
        self._said: Dict[int, Dict[int, Dict[str, Dict[str, float]]]] = {}  # by step, rank, table

    def knows(self, name: str) -> bool:
        """Whether a module of some rank here has the table."""
        with self._lock:
            return name in self._optimizers

    def made(self, name: str, optimizer: frugal.Optimizer, new: bool) -> None:
        """A module of some rank has a table with this optimizer."""
        with self._lock:
            known = optimizer if new else self._optimizers.setdefault(name, optimizer)
            self._optimizers[name] = known
            if known != optimizer:
                raise ValueError(f"table {name!r} exists with the optimizer {known}, wanted is {optimizer}")

    def say(self, step: int, rank: int, tables: Dict[str, Dict[str, float]]) -> None:
        """Hyper-parameters that a rank wants for a step: those of the other ranks."""
        with self._lock:
            for old in [number for number in self._said if number < step - 1]:
                del self._said[old]  # committed
            ranks = self._said.setdefault(step, {})
            for other, theirs in ranks.items():
                for name in tables.keys() & theirs.keys() if other != rank else ():
                    for what, value in tables[name].items():
                        if value != theirs[name][what]:
                            raise ValueError(
                                f"table {name!r}, step {step}: rank {rank} says {what}={value}, rank {other}"
                                f" {what}={theirs[name][what]}; all ranks must say the same (a GradScaler's scale"
                                " is in grad_scale)"
                            )
            ranks[rank] = tables

    def forget(self, step: int, rank: int) -> None:
        """The rank's step was undone."""
        with self._lock:
            self._said.get(step, {}).pop(rank, None)


class Steps:
    """One for each trainer, see `of`."""

    def __init__(self, trainer: frugal.Trainer) -> None:
        # The registry below holds this object for as long as there is a trainer; a strong reference would be for ever.
        self._trainer = weakref.ref(trainer)
        self.native = _native.Trainer(trainer)
        self.lock = _Lock()
        self.rank: int = trainer.rank
        self.shared = _shared_of(trainer.engine)
        committed = trainer.engine.committed_step()
        self.next = 0 if committed is None else committed + 1  # the step that is open, or that comes next
        self.open = False
        self.pushed = False  # gradients, into the open step
        self.check_inf = False
        self.tables: Dict[str, Table] = {}
        self.optimizer: Optional[Callable[[], Any]] = None  # a weak reference to the newest
        self.lookahead: Optional[Callable[[], Any]] = None  # to the iteration that declares
        self._interrupted = False
        self._cancelled: List[_native.Batch] = []
        self._untold: Optional[frugal.StepAborted] = None  # each is told once, and a destructor cannot raise it
        self._names: Dict[str, int] = {}

    @property
    def trainer(self) -> frugal.Trainer:
        trainer = self._trainer()
        assert trainer is not None, "whoever uses the steps holds the trainer"
        return trainer

    @property
    def device(self) -> torch.device:
        return self.native.device

    def name(self, kind: str) -> str:
        """A name for a table without one: the same on all ranks that make their modules in the same order."""
        number = self._names.get(kind, 0)
        self._names[kind] = number + 1
        return f"{kind}_{number}"

    def table(
        self, name: str, rows: int, dim: int, optimizer: frugal.Optimizer, init: frugal.Initializer, hashed: bool
    ) -> Table:
        """Creates a table, or finds the one of that name."""
        known = self.tables.get(name)
        created = False
        if known is None:
            self.outside()
            engine = self.trainer.engine
            # To create a table that another process has created is no error there: whose rows are new has to be asked.
            there = _exists(engine, name)
            try:
                made = engine.create_table(name, rows, dim, hashed=hashed, init=init, optimizer=optimizer)
                created = not there
                known = Table(made, created, optimizer)
            except frugal.Exists:
                known = Table(engine.find_table(name), False, optimizer)
                if engine.service and not self.shared.knows(name):
                    raise ValueError(
                        f"table {name!r} exists, and another process or create_table() has made it, not with rows={rows},"
                        f" dim={dim}, hashed={hashed}, {init}, {optimizer}: all must say the same, in modules"
                    ) from None
        else:
            known.created = False
        info = known.table.describe()
        have = (info.capacity, info.dim, info.key_space == _native.HASHED, info.optimizer)
        want = (rows, dim, hashed, optimizer._kind)
        if have != want:
            raise ValueError(
                f"table {name!r} exists with (rows, dim, hashed, optimizer kind) {have}, wanted are {want}"
            )
        self.shared.made(name, optimizer, created)
        self.tables[name] = known
        return known

    def undeclared(self) -> int:
        """The first step that keys can be declared for: it has not begun."""
        return self.next + 1 if self.open else self.next

    def begin(self) -> None:
        with self.lock:
            if self.open:
                return
            self.cancel()
            try:
                self._tried(lambda: self.trainer.step_begin(self.next))
            except KeyboardInterrupt:
                self._interrupted = True  # the step may have begun all the same
                raise
            except frugal.StepOrder:
                if not self._interrupted:
                    raise
            self._interrupted = self.pushed = False
            self.open = True

    def end(self, skip: bool) -> None:
        with self.lock:
            try:
                self._tried(lambda: self.trainer.step_end(self.next, skip=skip))
            except KeyboardInterrupt:
                # It may have ended all the same: the second call ends it, or says that there is nothing to end.
                try:
                    self.trainer.step_end(self.next, skip=skip)
                except (frugal.NotInStep, frugal.StepOrder, KeyboardInterrupt):
                    pass
                self.open = self.pushed = False
                self.next += 1
                raise
            self.open = self.pushed = False
            self.next += 1

    def lookup(self, ops: Ops) -> int:
        """Reads rows in the step. Returns the step."""
        with self.lock:
            self.begin()
            self._tried(lambda: self.native.lookup(ops))
            return self.next

    def push(self, ops: Ops, step: Optional[int]) -> None:
        """Hands gradients over; `step`: the one that it must be, since values of then are asked for."""
        with self.lock:
            if step is not None and (step != self.next or not self.open):
                if step == self.next:
                    raise RuntimeError(
                        f"the forward was in step {step}, which was thrown away since (by zero_grad() after another"
                        " backward, by state_dict() or the like, or by an abort): the gradient of per_sample_weights"
                        " needs its rows; run the forward again"
                    )
                raise RuntimeError(
                    f"the forward was in step {step}, which has ended: the gradient of per_sample_weights needs its"
                    " rows; call backward() before Optimizer.step()"
                )
            self.begin()
            before, self.pushed = self.pushed, True  # first: after Ctrl-C it may have been
            try:
                self._tried(lambda: self.native.push(ops))
            except Exception:
                if self.open:
                    self.pushed = before
                raise

    def read(self, ops: Ops) -> int:
        """Reads rows and changes nothing. Returns the number of the step that they are from."""
        with self.lock:
            self._tried(lambda: self.native.read(ops))
            return self.next

    def declare(self, step: int, ops: Ops) -> Optional[_native.Batch]:
        """Declares keys; nothing for a step that has begun."""
        with self.lock:
            if step < self.undeclared() or not ops.count:
                return None
            batch = None

            def prefetch() -> None:
                nonlocal batch
                batch = self.native.prefetch(step, ops)

            self._tried(prefetch)
            return batch

    def cancel_later(self, batches: List[_native.Batch]) -> None:
        """Takes declarations back, at once if nobody is using the trainer, or else before the next step begins."""
        self._cancelled += batches
        if self._cancelled and self.lock.try_acquire():
            try:
                self.cancel()
            except frugal.StepAborted as error:
                self._untold = error
            finally:
                self.lock.__exit__()

    def cancel(self) -> None:
        """Takes back what cancel_later has not."""
        with self.lock:
            while self._cancelled:
                batch = self._cancelled[-1]
                if batch.step >= self.undeclared():
                    try:
                        self._tried(lambda: self.native.cancel(batch))
                    except frugal.StepAborted:
                        raise  # it is declared as before
                    except frugal.Error:
                        pass  # it went with its trainer or engine
                self._cancelled.remove(batch)

    def discard(self) -> None:
        """Throws away what was pushed in the open step."""
        with self.lock:
            if self.open and self.pushed:
                if self.trainer.engine.world_size > 1:
                    raise RuntimeError(
                        "zero_grad() after backward() would throw away gradients that the engine has: with several"
                        " ranks that takes all of them; call step() after backward(), or zero_grad() before it"
                    )
                self._abort()

    def outside(self) -> None:
        """Comes before calls on rows outside steps: a step that holds nothing is no hindrance."""
        with self.lock:
            if not self.open:
                return
            if self.pushed:
                raise RuntimeError("gradients of a step are waiting: call Optimizer.step() first, or zero_grad()")
            if self.trainer.engine.world_size == 1:
                self._abort()

    def _abort(self) -> None:
        self._tried(self.trainer.step_abort)
        self.shared.forget(self.next, self.rank)
        self.open = self.pushed = False

    def _tried(self, call: Callable[[], None]) -> None:
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        try:
            call()
        except (frugal.StepAborted, frugal.NotInStep, frugal.PeerLost):
            # Undone, by another rank, with a process that was lost, or by a call past this object: the step after the
            # last committed one is begun again.
            self.shared.forget(self.next, self.rank)
            self.open = self.pushed = False
            try:
                committed = self.trainer.engine.committed_step()
            except frugal.PeerLost:
                committed = None  # with the controller: no step is begun any more
            if committed is not None:
                self.next = committed + 1
            raise


def _exists(engine: frugal.Engine, name: str) -> bool:
    try:
        engine.find_table(name)
    except frugal.NotFound:
        return False
    return True


_steps: "weakref.WeakKeyDictionary[frugal.Trainer, Steps]" = weakref.WeakKeyDictionary()
_shared: "weakref.WeakKeyDictionary[frugal.Engine, Shared]" = weakref.WeakKeyDictionary()
_steps_lock = threading.RLock()


def _after_fork() -> None:
    global _steps_lock
    _steps_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _shared_of(engine: frugal.Engine) -> Shared:
    with _steps_lock:
        return _shared.setdefault(engine, Shared())


def of(trainer: frugal.Trainer) -> Steps:
    """The steps of a trainer."""
    if not isinstance(trainer, frugal.Trainer):
        raise TypeError(
            f"trainer must be a frugal.Trainer, not {type(trainer).__name__}: engine.create_trainer() makes one"
        )
    with _steps_lock:
        steps = _steps.get(trainer)
        if steps is None:
            steps = _steps[trainer] = Steps(trainer)
        return steps
