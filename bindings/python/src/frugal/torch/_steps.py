"""The steps of a trainer, as modules, optimizer and lookahead share them.

A trainer is used by one thread at a time, and a backward may come on another thread than the forward: every call that
takes the trainer is made under the lock. Which call begins and ends a step is said in docs/torch.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import os
import threading
import time
import warnings
import weakref
from typing import (
    Any, Callable, Collection, ContextManager, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple,
    TypeVar, cast,
)  # fmt: skip

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import TensorWeakRef

import frugal

from frugal import _wait
from frugal.errors import FORKED

from . import _native, _ranks
from ._anchor import Anchor, AnchorOfRanks
from ._gradient import Gradient, Part, get_grad

T = TypeVar("T")

# When rows were read: the step, and how often rows had been written outside steps.
Moment = Tuple[int, int]

# Steps of torch's optimizers with gradients of a table before each, until it is said that none of them has the table.
_MOST_WITHOUT = 20
_MOST_BACKWARDS = 500  # where no optimizer makes a step at all

_PAUSE = 0.001  # seconds between two tries to call what has to wait for other ranks

adoptions = 0  # of Parameters by tables


def count_adoption() -> None:
    global adoptions
    adoptions += 1


def is_in_use(value: torch.Tensor) -> bool:
    """Whether a table cannot adopt a Parameter, since others know its memory. (Where autograd has a node for its
    gradient as yet, it can: a backward of such a graph is PyTorch's error.)"""
    if weakref.getweakrefs(value):
        return True
    counted: Any = value
    if counted._use_count() == 1:
        return False
    if not value.requires_grad or counted._use_count() > 2:
        return True
    edge = torch.autograd.graph.get_gradient_edge(value)  # whose node is the second, or one more
    others = bool(counted._use_count() > 2)
    del edge
    return others


optimizer_steps = 0  # that torch's optimizers have made, of whatever parameters


def count_optimizer_step() -> None:
    global optimizer_steps
    optimizer_steps += 1


class Table:
    """A table as the modules of one trainer share it."""

    def __init__(
        self,
        steps: "Steps",
        table: frugal.Table,
        created: bool,
        optimizer: frugal.Optimizer,
        shape: Tuple[int, int],
    ) -> None:
        self.steps = steps
        self.table = table
        self.device = steps.device  # where keys and outputs are; as PyTorch sees it, the table
        self.handle = table.handle
        self.name = table.name
        self.created = created
        self.restored = False  # from a checkpoint, for the module that has opened it last
        self.was_restored = False
        self.info = info = table.describe()  # of then
        # Who wants no rows, or rows of no columns, has an engine's table of one, which is never read or written.
        there = info.capacity, info.dim
        self.capacity, self.dim = shape if _physical(shape) == there else there
        self.empty = (self.capacity, self.dim) != there
        self.hashed: bool = info.key_space == _native.HASHED
        self.optimizer = optimizer  # what the engine has
        self.left_out = False  # other ranks may have set another one since, when this one had no gradient
        self.lacked = False  # this rank had no gradient in a step, and others may have had one
        self.told_of_count = False
        self.said = optimizer  # what the module was made with
        self.made_as = optimizer  # what the engine has made it with, maybe before a checkpoint
        # What of that holds with torch's optimizers, too, which have no word for it.
        self.common = optimizer.mean_ranks, optimizer.clip_value, optimizer.clip_norm, optimizer.weight_bound
        self.made_with: Dict[str, Any] = {}  # what the module that made it has said but the optimizer
        self.written = False  # rows, by the caller
        self.written_at = 0  # the steps' count of writes, when rows were written last
        self.counts = True  # whether backwards find out about writes of rows, see `Kept`
        self.shown: List["weakref.ref[Any]"] = []  # what weight.data has given of all rows
        self.grad_read_at = -1  # the steps' count of writes, when weight.grad was read last
        self.state_floats = 0 if self.empty else info.state_floats
        self.stepped = False  # by an optimizer, or left to one that steps it alone
        self.state_of: Optional["weakref.ref[Any]"] = None  # see `holder`
        self._keeper: Optional["weakref.ref[Any]"] = None  # the frugal.torch.Optimizer, whose tables others leave alone
        self._anchor: Optional["weakref.ref[Anchor]"] = None  # which modules hold: it holds gradients, and they this
        self._warned = False
        self._finalizer: Any = None  # of the anchor
        self.modules: Any = weakref.WeakSet()  # of one table each
        self.goes = False  # with its anchor: the last of its modules, of what has their weight, and of optimizers
        self._without = 0  # steps of optimizers that had no part in this table
        self._backwards = 0  # before the first step
        self._first_at = 0  # the steps' count of writes, when the first of them came
        self._seen = optimizer_steps  # of them all, by the last backward

    @property
    def begins(self) -> bool:
        """Whether the module that has opened it last is the first that has its rows."""
        return self.created or self.restored

    def held_anchor(self) -> Optional[Anchor]:
        """The anchor, if there is one."""
        return None if self._anchor is None else self._anchor()

    @property
    def shape(self) -> Tuple[int, int]:
        """Rows, of a hashed table those that there are, and columns."""
        if not self.hashed:
            return self.capacity, self.dim
        with self.steps.still():
            return self.steps.patiently(self.table.count, self.name), self.dim

    def is_gone(self) -> bool:
        """Whether the table went with the last of its modules, or with its engine."""
        trainer = self.steps._trainer()
        gone = self.goes and self.held_anchor() is None
        return gone or trainer is None or not trainer.engine._finalizer.alive

    @property
    def anchor(self) -> Anchor:
        anchor = self.held_anchor()
        if anchor is None:  # modules, weights and parameters hold it; gradients do not
            raise RuntimeError(
                f"table {self.name!r} went with the last of its modules: keep a module as long as its gradient"
            )
        return anchor

    def make_anchor(self, dtype: torch.dtype, requires_grad: bool, device: torch.device) -> Anchor:
        """The anchor, for a module to hold. The first module says its dtype and its device."""
        anchor = self.held_anchor()
        if anchor is None:
            self.device = device
            anchor = self._new_anchor(dtype, requires_grad)
            self._register(anchor)
        return anchor

    def _new_anchor(self, dtype: torch.dtype, requires_grad: bool) -> Anchor:
        return (AnchorOfRanks if self.steps.world_size > 1 else Anchor)(self, dtype, requires_grad)

    def _register(self, anchor: Anchor) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()  # of the anchor before, without which the table stays
        self._anchor = weakref.ref(anchor)
        if self.goes:
            self._finalizer = weakref.finalize(anchor, _drop, weakref.ref(anchor.trainer), self.table)

    def adopt(self, value: torch.nn.Parameter, dtype: torch.dtype, requires_grad: bool) -> None:
        """Makes a Parameter of PyTorch the table's anchor: the object stays, wherever it is, as in another layer or in
        an optimizer, and loses its memory. The table has its rows already. The anchor of before is none any more."""
        hooks = value._backward_hooks
        if value._post_accumulate_grad_hooks or (hooks and self.steps.world_size > 1):
            raise NotImplementedError(
                f"table {self.name!r}: the Parameter that is to be its weight has a hook that the table's gradient"
                " cannot go through: remove it, or register it with module.weight afterwards"
            )
        anchor = self._new_anchor(dtype, requires_grad)
        try:
            torch.utils.swap_tensors(value, anchor)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                f"table {self.name!r}: the Parameter that is to be its weight is in use, as by the graph of a forward"
                " or a compiled function: assign it before, or delete what has it, or give"
                f" torch.nn.Parameter(value.detach()) ({error})"
            ) from None
        adopted, before = cast(Anchor, value), self.held_anchor()
        if before is not None:
            before.after = adopted  # for another thread, whose forward has the one of before
        self._register(adopted)
        adopted.take_hooks(hooks)
        count_adoption()

    def trains(self) -> bool:
        anchor = self.held_anchor()
        return anchor is not None and anchor.requires_grad

    def get(self, keys: torch.Tensor, rows: torch.Tensor, with_state: bool) -> torch.Tensor:
        """Reads rows outside steps into `rows`. Returns which were found."""
        if self.empty:
            return torch.ones(keys.numel(), dtype=torch.bool, device="cpu")
        if self.steps.muted and (with_state or self.hashed):  # what is made of them is not written
            rows.zero_()
            return torch.ones(keys.numel(), dtype=torch.bool, device="cpu")
        with self.steps.still():
            committed = self.steps.world_size > 1 and not self.hashed
            if committed:
                # As a forward reads them, which waits for other ranks to end the step, and may be in one. The state is
                # read when there is nothing more to wait for: no later step is committed while this rank stays here.
                op = _native.op(
                    self.handle, _native.POOL_NONE, None, keys[:0] if with_state else keys,
                    rows_out=rows.data_ptr(), row_stride=4 * self.dim,
                )  # fmt: skip
                self.steps.read([op])
                if not with_state:
                    return torch.ones(keys.numel(), dtype=torch.bool, device="cpu")
            hashed = self.name if self.hashed else None
            return self.steps.patiently(lambda: _native.get(self.table, keys, rows, with_state, committed), hashed)

    def put(self, keys: torch.Tensor, rows: torch.Tensor, with_state: bool) -> None:
        """Writes rows outside steps."""
        with self.steps.still():
            self.steps.writes += 1
            self.written_at = self.steps.writes
            if not self.empty and not self.steps.muted and not self.awaits_load():
                self.steps.patiently(lambda: _native.put(self.table, keys, rows, with_state))
        if kept and self.counts:
            changed([self])

    def awaits_load(self) -> bool:
        """Whether it has the rows of a checkpoint of which the rest is to come by Checkpoints.load(). What is written
        before, as initial rows by torch.nn.init, a load would overwrite: it is dropped."""
        return self.was_restored and self.steps.shared in unloaded

    @contextlib.contextmanager
    def uncounted(self, uncounted: bool) -> Iterator[None]:
        """Writes in it are not told to backwards, as PyTorch does not count what is written through `data`."""
        with self.steps.still():
            before, self.counts = self.counts, self.counts and not uncounted
            try:
                yield
            finally:
                self.counts = before

    def by_all(self, load: Optional[_ranks.Load] = None) -> ContextManager[None]:
        """For a write to weight, which all ranks make. `load`: it is one."""
        return self.steps.written(self.name, load)

    def load(self) -> Optional[_ranks.Load]:
        """The next load of the table's rows, if several ranks make it."""
        steps = self.steps
        alone = steps.muted is not None or not _ranks.are_told(steps.rank, steps.world_size)
        return None if alone else _ranks.Load(self.name, steps.rank)

    def count_backward(self) -> None:
        """Of a table that no optimizer has stepped: warns if its gradients are not used, though they may be dropped
        before each of the others' steps."""
        if self._warned:
            return
        if not self._backwards:
            self._first_at = self.steps.writes
        self._backwards += 1
        if self._seen != optimizer_steps:
            self._without += 1
            self._seen = optimizer_steps
        if self._without > _MOST_WITHOUT or (self._backwards > _MOST_BACKWARDS and self.written_at <= self._first_at):
            self.warn_if_nobody_steps()

    def warn_if_nobody_steps(self) -> None:
        """One warning for a table whose gradients are not used."""
        by_hand = self.written_at > self.grad_read_at >= 0  # rows were written after weight.grad was read
        if not self.stepped and not self._warned and not by_hand:
            self._warned = True
            warnings.warn(
                f"table {self.name!r}: many backwards, and no optimizer that has its parameter has made a step: its"
                " rows are not trained so far. If no step is to come: give model.parameters() to a torch optimizer, or"
                " the module to frugal.torch.Optimizer, and call step(); or freeze the module",
                stacklevel=2,
            )

    def restore(self, restored: "Restored") -> None:
        """It has come from a checkpoint."""
        self.restored = self.was_restored = True
        self.optimizer, self.made_as = restored.optimizer, restored.made_as
        self.stepped, self.written = restored.stepped, restored.written

    def keep(self, optimizer: Any) -> None:
        """A frugal.torch.Optimizer makes the table's steps from now on."""
        holder = self.holder()
        if holder is not None:
            holder.put_aside()
        self._keeper, self.stepped = weakref.ref(optimizer), True

    def holder(self) -> Any:
        """Of the states that optimizers of torch have of this table in `optimizer.state`, the one whose rows' state the
        table has; or None."""
        return None if self.state_of is None else self.state_of()

    def kept_by(self) -> Any:
        """The frugal.torch.Optimizer that makes the table's steps, or None."""
        return None if self._keeper is None else self._keeper()

    def renew(self, optimizer: frugal.Optimizer) -> None:
        """Gives the table an optimizer, and the state of new rows to all of its rows."""
        self.steps.between(lambda: self.table.set_optimizer(self.steps.next, optimizer, new_state=True))

    def change(self, optimizer: frugal.Optimizer, step: int) -> None:
        """Sets the optimizer from this step on."""
        if optimizer != self.optimizer or self.left_out:
            self.table.set_optimizer(step, optimizer)
            self.optimizer, self.left_out = optimizer, False

    def is_of(self, optimizer: frugal.Optimizer) -> bool:
        """Whether its state is one of this kind of optimizer."""
        return optimizer is self.optimizer or _fixed(optimizer) == _fixed(self.optimizer)

    def choose(self, optimizer: frugal.Optimizer) -> None:
        """Gives the table another kind of optimizer, with the state of new rows."""
        if self.is_of(optimizer):
            return

        def set_it() -> None:
            try:
                self.table.set_optimizer(self.steps.next, optimizer)
            except frugal.InvalidArgument as error:
                if type(optimizer) is type(self.optimizer) or "optimizer.kind" not in error.message:
                    raise  # of a hyper-parameter
                raise frugal.InvalidArgument(
                    f"table {self.name!r} has the optimizer {type(self.optimizer).__name__}, and"
                    f" {type(optimizer).__name__} cannot step it: make the module without optimizer=, or with this one,"
                    " on all ranks, or give it to frugal.torch.Optimizer",
                    error.status,
                ) from None

        if self.steps.world_size == 1:
            self.steps.between(set_it)
        else:
            self.steps.agree(set_it)
        self.has(optimizer)

    def has(self, optimizer: frugal.Optimizer) -> None:
        """It has this kind of optimizer by now."""
        self.optimizer = optimizer
        self.state_floats = 0 if self.empty else self.table.describe().state_floats


class Kept:
    """Rows that were read of a table, and that computations may have kept for their backward: when the table's rows are
    written, PyTorch's count of writes to them is to grow, by which a backward refuses to compute of old ones."""

    __slots__ = ("rows", "table", "_written")

    def __init__(self, rows: torch.Tensor, table: Table) -> None:
        self.rows = TensorWeakRef(rows)
        self.table: "weakref.ref[Table]" = weakref.ref(table)
        self._written = 0
        with _steps_lock:
            kept[:] = [one for one in kept if one.rows() is not None]
            kept.append(self)

    def version(self, rows: torch.Tensor) -> int:
        """How often others have written them."""
        with _steps_lock:
            return rows._version - self._written

    def write(self) -> None:
        rows = self.rows()
        if rows is not None and not rows.is_inference():
            increment_version(rows)
            self._written += 1


kept: List[Kept] = []


def changed(tables: Collection[Table]) -> None:
    """Rows of these have been written, or a step has moved them."""
    with _steps_lock:
        for one in kept:
            if one.table() in tables:
                one.write()


def take_back_gradients() -> None:
    """Gradients of tables that ranks share take their places again, where a reducer has put its elements there."""
    with _steps_lock:
        shared = [steps for steps in _steps.values() if steps.world_size > 1]
    for table in [table for steps in shared for table in list(steps.tables.values())]:
        anchor = table.held_anchor()
        if anchor is not None:
            _ = anchor.grad  # which does it


def _drop(trainer: "weakref.ref[frugal.Trainer]", table: frugal.Table) -> None:
    """Nothing has the table any more. Where it cannot be dropped, the engine's end takes it."""
    alive = trainer()
    if alive is not None:
        of(alive).drop_later(table)


def _physical(shape: Tuple[int, int]) -> Tuple[int, int]:
    """The rows and columns of the engine's table for a table of this shape."""
    return max(shape[0], 1), max(shape[1], 1)


def _fixed(optimizer: frugal.Optimizer) -> Tuple[Any, ...]:
    """What a table's optimizer has for good."""
    return optimizer._kind, getattr(optimizer, "initial_accumulator", 0.0)


class _ParentsLock:
    """What a forked child has in a lock's place: the thread that held the lock at the fork is not there."""

    def __enter__(self) -> NoReturn:
        raise frugal.Forked(
            "the trainer is the parent's: in a child made by fork() make the modules anew, or leave them to the parent",
            FORKED,
        )

    def __exit__(self, *error: object) -> None:
        pass

    def acquire(self, blocking: bool = True) -> bool:
        return False

    def _is_owned(self) -> bool:
        return False


class Restored(NamedTuple):
    """What a checkpoint says of a table, for the module that opens it."""

    optimizer: frugal.Optimizer  # of the last step
    made_as: frugal.Optimizer
    stepped: bool
    written: bool


class Shared:
    """What the ranks of an engine that are in this process must say alike."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._optimizers: Dict[str, frugal.Optimizer] = {}
        self._made: Dict[str, Optional[int]] = {}  # tables of modules here, and the step that was committed last then
        self._said: Dict[int, Dict[int, _ranks.Said]] = {}  # by step and rank
        self.restored: Dict[str, Restored] = {}  # tables that no module has opened yet

    def knows(self, name: str) -> bool:
        """Whether a module of some rank here has the table."""
        with self._lock:
            return name in self._optimizers

    def made(self, name: str, optimizer: frugal.Optimizer, new: bool, committed: Optional[int]) -> None:
        """A module of some rank has a table with this optimizer."""
        with self._lock:
            if new:
                self._made[name] = committed
            known = optimizer if new else self._optimizers.setdefault(name, optimizer)
            self._optimizers[name] = known
            if known != optimizer:
                raise ValueError(f"table {name!r} exists with the optimizer {known}, wanted is {optimizer}")

    def has_made(self, name: str) -> bool:
        """Whether a module here has created the table."""
        with self._lock:
            return name in self._made

    def made_after(self, name: str) -> Optional[int]:
        """The step that was committed last when it did."""
        with self._lock:
            return self._made[name]

    def say(self, step: int, rank: int, said: _ranks.Said) -> None:
        """Hyper-parameters that a rank wants for a step: those of the other ranks."""
        with self._lock:
            for old in [number for number in self._said if number < step - 1]:
                del self._said[old]  # committed
            ranks = self._said.setdefault(step, {})
            for other, theirs in ranks.items():
                if other != rank:
                    _ranks.compare(step, rank, said, other, theirs)
            ranks[rank] = said

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
        self.number = next(_counter)  # by which an optimizer of several takes them in turn
        self.device = self.native.device  # which has the trainer
        self.lock: Any = threading.RLock()
        self.rank: int = trainer.rank
        self.shared = shared_of(trainer.engine)
        committed = trainer.engine.committed_step()
        self.next = 0 if committed is None else committed + 1  # the step that is open, or that comes next
        self.open = False
        self.writes = 0  # of rows outside steps, by this package
        self.world_size: int = trainer.engine.world_size
        # Tables that may be trained: others that another process has made come with the modules of its rank.
        self.found = frozenset(trainer.engine.tables() if self.next else ())
        self.tables: Dict[str, Table] = {}
        self.backwards = itertools.count()  # their numbers: gradients are pushed in this order
        self.lookahead: Optional[Callable[[], Any]] = None  # to the iteration that declares
        self.trials: Dict[Any, Any] = {}  # what Lookaheads have found about the loop of now
        self._interrupted = False
        self._told_of_wait = self._told_of_part = self._told_of_rates = False
        # What this rank has said last, of which tables' optimizers, and where ranks in processes compare it.
        self._said: Tuple[List[Any], _ranks.Said, bytes] = [], {}, b""
        self._board: Optional[_ranks.Board] = None
        self._has_board = False  # or has found that there can be none
        self.muted: Optional[bool] = None  # in `muting`: whether another rank writes for this one
        self._cancelled: List[_native.Batch] = []
        self._dropped: List[frugal.Table] = []
        self._untold: Optional[frugal.StepAborted] = None  # each is raised once, and not by a destructor
        self._names: Dict[str, int] = {}

    def can_move(self) -> bool:
        """Whether the trainer can go to another device: no other rank would go on meanwhile."""
        return self.world_size == 1 and not self.trainer.engine.service

    def check_device(self, device: torch.device, who: str) -> None:
        """An error, if keys and outputs of modules cannot be on this device."""
        if device == self.device or device.type == "cpu":
            return
        if device.type != "cuda" or not self.can_move():
            raise ValueError(
                f"{who} cannot be on {device}: keys and rows are on the CPU or where the trainer is, which is on"
                f" {self.device}. One of several ranks, or of a controller, stays there: make it, or the first module,"
                " on that GPU"
            )

    def move(self, tables: Sequence[Table], device: torch.device) -> None:
        """Keys and outputs of tables are on another device from now on. The trainer goes with them to a GPU, with all
        tables that are on another one, and leaves a GPU with the last."""
        with self.lock:
            held = [table for table in self.tables.values() if table.held_anchor() is not None]
            if device.type == "cuda" and device != self.device:
                self.move_to(str(device))
                tables = [*tables, *(table for table in held if table.device.type == "cuda" and table not in tables)]
            anchors = [(table, anchor) for table in tables if (anchor := table.held_anchor()) is not None]
            grads = [get_grad(anchor) for _, anchor in anchors]
            parts = [part for grad in grads if isinstance(grad, Gradient) for part in grad.parts]
            for some in {id(part.held): part.held for part in parts}.values():
                some.move(device)
            for (table, anchor), grad in zip(anchors, grads):
                table.device = device
                anchor.become(anchor.dtype, grad)
            left = self.device.type == "cuda" and tables and all(table.device.type == "cpu" for table in held)
            if left and self.can_move():
                self.move_to("cpu")

    def move_to(self, name: str) -> None:
        """The trainer goes to the engine's device of that name. What is declared is taken back."""
        with self.lock:
            self.outside()
            running = None if self.lookahead is None else self.lookahead()
            if running is not None:
                running.moved()
            self.trials.clear()
            self.cancel()
            trainer = self.trainer
            try:
                trainer._move(name)
            finally:
                self.native = _native.Trainer(trainer)
                self.device = self.native.device

    @property
    def trainer(self) -> frugal.Trainer:
        trainer = self._trainer()
        assert trainer is not None, "the user of the steps holds the trainer"
        return trainer

    def name(self, kind: str) -> str:
        """A name for a table without one: the same on all ranks that make their modules in the same order."""
        with self.lock:
            number = self._names.get(kind, 0)
            self._names[kind] = number + 1
        return f"{kind}_{number}"

    def table(
        self,
        name: str,
        rows: int,
        dim: int,
        optimizer: frugal.Optimizer,
        init: frugal.Initializer,
        hashed: bool,
        nan_policy: Any,
        lazy: bool,
    ) -> Table:
        """Creates a table, or finds the one of that name."""
        with self.lock:
            known = self.tables.get(name)
            created = False
            if known is None:
                self.outside()
                engine = self.trainer.engine
                # To create a table that another process has created, or that was restored, is no error there: whether
                # it is there has to be asked.
                there = _exists(engine, name)
                restored = self.shared.restored.get(name) if there else None
                if restored is not None and type(restored.made_as) is not type(optimizer):
                    raise ValueError(
                        f"table {name!r}: the checkpoint has it of a module with the optimizer"
                        f" {type(restored.made_as).__name__}, and this one has {type(optimizer).__name__}"
                    )
                shape = rows, dim
                create = functools.partial(
                    engine.create_table, name, *_physical(shape), hashed=hashed, init=init,
                    optimizer=optimizer if restored is None else restored.made_as, nan_policy=nan_policy, lazy=lazy,
                )  # fmt: skip
                try:
                    made = self._create(create, name)
                    created = not there
                    known = Table(self, made, created, optimizer, shape)
                    if restored is not None:
                        known.restore(self.shared.restored.pop(name))
                except frugal.Exists:
                    if restored is not None:
                        raise ValueError(
                            f"table {name!r}: the checkpoint has it, not with rows={rows}, dim={dim}, hashed={hashed},"
                            f" {init}, nan_policy={nan_policy!r}, lazy={lazy}: make its module as before, or give it"
                            " another name"
                        ) from None
                    known = Table(self, engine.find_table(name), False, optimizer, shape)
                    if engine.service and not self.shared.knows(name):
                        raise ValueError(
                            f"table {name!r} exists, and another process or create_table() has made it, not with"
                            f" rows={rows}, dim={dim}, hashed={hashed}, {init}, {optimizer}: all must say the same, in"
                            " modules"
                        ) from None
            else:
                known.created = known.restored = False
            info = known.info if created else known.table.describe()
            have = (known.capacity, known.dim, info.key_space == _native.HASHED)
            want = (rows, dim, hashed)
            if have != want:
                raise ValueError(f"table {name!r} exists with (rows, dim, hashed) {have}, wanted are {want}")
            # A table that modules have made has the optimizer that they say, or one that a step has chosen since.
            if not self.shared.knows(name) and not known.restored and info.optimizer != optimizer._kind:
                raise ValueError(
                    f"table {name!r} exists with an optimizer of kind {info.optimizer}, wanted is {optimizer._kind}"
                )
            new = known.begins
            self.shared.made(name, optimizer, new, self.trainer.engine.committed_step() if new else None)
            self.tables[name] = known
            return known

    def _create(self, create: Callable[[], frugal.Table], name: str) -> frugal.Table:
        """Creates a table. Ranks that are still inside the step that this one has ended are waited for."""
        begin = time.monotonic()
        while True:
            in_next = self._all_have_come()
            try:
                return create()
            except frugal.Busy as error:
                waits = not self.open and not in_next and _ranks.are_told(self.rank, self.world_size)
                if not waits or not self._pause(error, begin):
                    raise frugal.Busy(
                        f"table {name!r}: {error.message}. A forward begins a step, and optimizer.step() on all ranks"
                        " ends it: make modules before the first forward, or after step()",
                        error.status,
                    ) from None

    def trained(self, table: Table) -> bool:
        """Whether a table that a module finds may have trained rows."""
        engine = self.trainer.engine
        committed = engine.committed_step()
        if committed is None:
            return False
        if self.shared.has_made(table.name):
            return committed != self.shared.made_after(table.name)
        return not engine.service or table.name in self.found

    def undeclared(self) -> int:
        """The first step that keys can be declared for: it has not begun."""
        return self.next + 1 if self.open else self.next

    def begin(self) -> None:
        with self.lock:
            if self.open:
                return
            if self._cancelled:
                self.cancel()
            if self._dropped:
                self._drop()
            try:
                self._tried(self.native.begin, self.next)
            except KeyboardInterrupt:
                self._interrupted = True  # the step may have begun all the same
                raise
            except frugal.StepOrder:
                if not self._interrupted:
                    raise
            self._interrupted = False
            self.open = True

    def end(self, skip: bool) -> None:
        with self.lock:
            try:
                self._tried(self.native.end, self.next, skip)
            except KeyboardInterrupt:
                # It may have ended all the same: the second call ends it, or says that there is nothing to end.
                try:
                    self.native.end(self.next, skip)
                except (frugal.NotInStep, frugal.StepOrder, KeyboardInterrupt):
                    pass
                self.open = False
                self.next += 1
                raise
            self.open = False
            self.next += 1

    def lookup(self, ops: Sequence[bytes]) -> Moment:
        """Reads rows in the step. Returns when."""
        with self.lock:
            if not self.open:
                self.begin()
            self._tried(self.native.lookup, ops)
            return self.next, self.writes

    def refused(self, status: int) -> None:
        """Raises what the status of a call means that was made under the lock in C++ (see _usual)."""
        self._tried(self.native.told, status)

    def refused_step(self, status: int) -> None:
        """The same, of a push or of the end of the step, of which nothing is left."""
        try:
            self.refused(status)
        except frugal.Error:
            if self.open and self.world_size == 1:
                self._abort()
            raise

    def apply(
        self,
        updates: Sequence[Update],
        skip: bool = False,
        others: Sequence[Tuple["Steps", Sequence[Update]]] = (),
    ) -> None:
        """One step of the engine: the gradients of these tables, with these optimizers. All of it is done, or nothing:
        so are steps of `others`, which are made between what this one pushes and its end."""
        with self.lock:
            for table, _, optimizer, _ in updates:
                if optimizer is not table.optimizer:
                    table.choose(optimizer)
            if not self.open:
                self.begin()
            pushing = False
            try:
                some = [update for update in updates if update.gradient is not None and update.gradient.parts]
                for table, gradient, optimizer, _ in updates if self.world_size > 1 else ():
                    # Another rank sets what this one, which has no gradient, does not.
                    if not (gradient is not None and gradient.parts) and optimizer != table.optimizer:
                        table.left_out = True
                if self.world_size > 1 and not skip:
                    self._say(updates)
                if some and not skip:
                    ops, alive = _pushes(some)
                    for table, _, optimizer, _ in some:
                        if optimizer is not table.optimizer or table.left_out:
                            table.change(optimizer, self.next)
                    pushing = True
                    self._tried(self.native.push, ops)
                    del alive
                if others:
                    (steps, theirs), *rest = others
                    steps.apply(theirs, skip, rest)
                self.end(skip)
                if kept and not skip:
                    changed([update.table for update in (updates if self.world_size > 1 else some)])
            except BaseException:
                # Also an interrupt. Nothing that was pushed stays for another step, and other ranks, which may have
                # ended this one, get the error that it is undone.
                if self.open and pushing:
                    self._abort()
                raise

    def _say(self, updates: Sequence["Update"]) -> None:
        """An error, where this rank and another have other hyper-parameters for the step. The engine takes those that
        come last."""
        if not self._has_board:
            self._has_board = True
            if _ranks.are_told(self.rank, self.world_size) and hasattr(os, "memfd_create"):
                self._board = _ranks.Board(str(self.trainer.engine.service), self.rank, self.world_size)
        now = [(u.table, u.optimizer, bool(u.gradient.parts), u.counted) for u in updates if u.gradient is not None]
        before, said, written = self._said
        if now != before:
            groups: Dict[Tuple[frugal.Optimizer, bool, int], List[str]] = {}
            for table, optimizer, whole, counted in now:
                groups.setdefault((optimizer, whole, counted), []).append(table.name)
            each = [(_numbers(*what), names) for what, names in groups.items()]
            said, written = {name: numbers for numbers, names in each for name in names}, _ranks.write(each)
            self._said = now, said, written
            if before and self._board is None and self.trainer.engine.service:
                self._tell_of_rates()
        self.shared.say(self.next, self.rank, said)
        if self._board is not None:
            self._board.say(self.next, said, written)

    def _tell_of_rates(self) -> None:
        """One warning, where ranks in processes have no way to compare what they say."""
        if not self._told_of_rates:
            self._told_of_rates = True
            warnings.warn(
                f"rank {self.rank} changes hyper-parameters of tables, and nothing compares them with those of the"
                " other ranks, which torch.distributed does not know: set the same on all ranks, or call"
                " init_process_group() before the first step",
                stacklevel=2,
            )

    def _forget(self) -> None:
        """The step was undone."""
        self.shared.forget(self.next, self.rank)
        if self._board is not None:
            self._board.forget()

    def read(self, ops: Sequence[bytes]) -> Moment:
        """Reads rows and changes nothing. Returns when."""
        with self.lock:
            self._tried(self.native.read, ops)
            return self.next, self.writes

    def declare(self, step: int, ops: Sequence[bytes]) -> Optional[_native.Batch]:
        """Declares keys; nothing for a step that has begun."""
        with self.lock:
            if step < self.undeclared() or not ops:
                return None
            batch = None

            def prefetch() -> None:
                nonlocal batch
                batch = self.native.prefetch(step, ops)

            self._tried(prefetch)
            return batch

    def cancel_later(self, batches: List[_native.Batch]) -> None:
        """Takes declarations back, at once if the trainer is free, or else before the next step begins."""
        self._cancelled += batches
        if self._cancelled and self.lock.acquire(blocking=False):
            try:
                self.cancel()
            except frugal.StepAborted as error:
                self._untold = error
            finally:
                self.lock.release()

    def drop_later(self, table: frugal.Table) -> None:
        """Drops a table, at once if the trainer is free, or else before the next step begins. The collector calls
        this, in any thread and in the middle of anything."""
        self._dropped.append(table)
        if not self.lock._is_owned() and self.lock.acquire(blocking=False):
            try:
                self.outside()
                self._drop()
            except frugal.Error:
                pass  # it went with its engine
            finally:
                self.lock.release()

    def _drop(self) -> None:
        while self._dropped:
            table = self._dropped.pop()
            self.tables.pop(table.name, None)
            try:
                table.drop()
            except frugal.Error:
                pass  # it went with its engine

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

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """For calls on rows outside steps: other threads that would use the trainer's steps wait for the block's
        end."""
        with self.lock:
            self.outside()
            yield

    def outside(self) -> None:
        """Comes before calls on rows outside steps: a step is open only for what forwards read, and begins again."""
        with self.lock:
            if self.open and self.world_size == 1:
                self._abort()

    def between(self, call: Callable[[], None]) -> None:
        """Makes a call between steps that all ranks make: a rank inside a step ends it, empty, and waits for the others
        to do so."""
        with self.lock:
            self.outside()
            if self.open:
                self.end(False)
            self.patiently(call)

    def agree(self, call: Callable[[], None]) -> None:
        """Makes a call that all ranks make before what they push next. The first call has to be made between steps.
        Later ones are allowed inside a step, too. If a rank is inside a step when the first call is made, all ranks end
        that step, empty. They make the call after it."""
        with self.lock:
            began = time.monotonic()
            in_next = False  # a call was refused, and a rank was inside the step that comes next here
            while True:
                ended = self._all_have_ended()
                try:
                    return call()
                except frugal.Busy as error:
                    # While a rank is inside a step, no rank can make the call for the first time.
                    if self.open or in_next:
                        break
                    # A rank that is still inside the step before may make it when it has ended that step. One that is
                    # inside the next step may have made it just before: then the second call here is allowed.
                    in_next = ended
                    if not self._pause(error, began):
                        raise
            if not self.open:
                self.begin()
            self.between(call)

    def follows(self) -> bool:
        """Whether rows begin as rank 0 writes them, as DistributedDataParallel gives all ranks those of rank 0."""
        return self.rank != 0 and self.next == 0 and _ranks.are_told(self.rank, self.world_size)

    @contextlib.contextmanager
    def once(self, what: str, has: str, advice: str, load: Optional[_ranks.Load] = None) -> Iterator[None]:
        """A block that all ranks of torch.distributed enter, and in which rank 0 writes for all. Before it each of them
        ends a step, empty: what they push comes in the one after it."""

        def tell() -> None:
            warnings.warn(
                f"rank {self.rank} {has} {what} and waits for the other ranks to do so: {advice}", stacklevel=2
            )

        with self.lock:
            _ranks.meet(what, self.world_size, tell, load)
            if not self.open:
                self.begin()
            self.end(False)
            with self.muting(self.rank != 0):
                if self.rank == 0:
                    _ranks.meet(f"{what}, read", self.world_size, tell)
                    with _ranks.in_turn(what, self.rank, self.world_size):
                        yield
                    return
                # Where it fails here, rank 0 fails, too: what is raised here says why.
                failed: ContextManager[None] = contextlib.suppress(RuntimeError)
                try:
                    yield
                    failed = contextlib.nullcontext()
                finally:
                    _ranks.meet(f"{what}, read", self.world_size, tell)
                    with failed, _ranks.in_turn(what, self.rank, self.world_size):
                        pass

    @contextlib.contextmanager
    def muting(self, muted: bool) -> Iterator[None]:
        """In it writes to rows are made, or are another rank's; ranks do not wait for each other at each of them."""
        before, self.muted = self.muted, muted
        try:
            yield
        finally:
            self.muted = before

    @contextlib.contextmanager
    def written(self, name: str, load: Optional[_ranks.Load] = None) -> Iterator[None]:
        """For a write to a table's weight. In PyTorch each rank has a copy, and all of them write. Here rank 0 does it
        for them, when all have come; before the first step it waits for no rank, as it may give the others what it
        has."""
        with self.lock:
            if self.muted is not None or not _ranks.are_told(self.rank, self.world_size):
                yield
            elif self.next == 0 and not self.open:
                with _ranks.in_turn(f"first weight of table {name!r}", self.rank, self.world_size, load):
                    with self.muting(self.rank != 0):
                        yield
            else:
                what = f"weight of table {name!r}"
                advice = "write to weight on all ranks, as to their copies in PyTorch"
                with self.once(what, "writes to the", advice, load):
                    yield

    def patiently(self, call: Callable[[], T], hashed: Optional[str] = None) -> T:
        """Makes a call outside steps. Where other ranks are inside one, waits for them to end it. `hashed`: the call
        reads the state of this table, for which no rank may be inside a step."""
        begin = time.monotonic()
        while True:
            in_next = hashed is not None and self._all_have_come()
            try:
                return call()
            except frugal.Busy as error:
                if in_next and not self.open:
                    raise frugal.Busy(
                        f"table {hashed!r}: rank {self.rank} reads the state of a hashed table, and another rank has"
                        f" begun step {self.next}, in which it waits for this one: call torch.distributed.barrier() on"
                        f" all ranks before and after state_dict() ({error.message})",
                        error.status,
                    ) from None
                if self.world_size == 1 or self.open or not self._pause(error, begin):
                    raise

    def _pause(self, error: frugal.Busy, begin: float) -> bool:
        """A pause of a wait for other ranks to end their step, which this error is of. False, without a pause: the wait
        has been long enough."""
        waited_ms = (time.monotonic() - begin) * 1000
        if waited_ms > self.trainer.engine._timeout_ms:
            return False
        if waited_ms >= _wait.WORD_MS and not self.trainer._tell(error.message):
            self._tell_of_wait(error.message)
        time.sleep(_PAUSE)
        return True

    def _all_have_ended(self) -> bool:
        """Whether all ranks have ended the steps that this one has ended. One that is inside a step is then in the
        next one, which cannot end without this rank."""
        committed = self.trainer.engine.committed_step()
        return (0 if committed is None else committed + 1) == self.next

    def _all_have_come(self) -> bool:
        """The same, of ranks in processes."""
        return self._all_have_ended() and _ranks.are_told(self.rank, self.world_size)

    def _tell_of_wait(self, message: str) -> None:
        """One warning, where others may wait for this rank in the step that it waits for."""
        if not self._told_of_wait:
            self._told_of_wait = True
            warnings.warn(
                f"rank {self.rank} waits between steps, to read or write rows or to change an optimizer, for all ranks"
                f" to end their step ({message}): make such calls, as load_state_dict() or state_dict() of a hashed"
                " table, where no rank is between its forward and its step(), as between two calls of"
                " torch.distributed.barrier()",
                stacklevel=2,
            )

    def tell_of_part(self, name: str) -> None:
        """One warning, where a caller may take a gradient of this rank for that of all ranks."""
        if not self._told_of_part and _ranks.are_told(self.rank, self.world_size):
            self._told_of_part = True
            warnings.warn(
                f"table {name!r}: weight.grad has the gradients of rank {self.rank} alone. Those of"
                " DistributedDataParallel are means over all ranks, which the engine makes in the step",
                stacklevel=4,
            )

    def _abort(self) -> None:
        self._tried(self.trainer.step_abort)
        self._forget()
        self.open = False

    def _tried(self, call: Callable[..., None], *args: Any) -> None:
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        try:
            call(*args)
        except (frugal.StepAborted, frugal.NotInStep, frugal.PeerLost):
            # Undone, by another rank, with a process that was lost, or by a call past this object: the step after the
            # last committed one is begun again.
            self._forget()
            self.open = False
            try:
                committed = self.trainer.engine.committed_step()
            except frugal.PeerLost:
                committed = None  # with the controller: no step is begun any more
            if committed is not None:
                self.next = committed + 1
            raise


class Update(NamedTuple):
    """What a step does to a table."""

    table: Table
    gradient: Optional[Gradient]
    optimizer: frugal.Optimizer  # of this step; without the gradient's factor
    counted: int = 0  # the step of the table that this is under torch's optimizer, from 1; 0: what it is does not say


def _pushes(updates: Sequence[Update]) -> Tuple[List[bytes], List[Any]]:
    """The ops of all gradients, in the order of their backwards, and what has to live until they are pushed, also if
    another thread's backward sums what a table's gradient holds. The factor that a table's gradients share is its
    optimizer's grad_scale (see `scaled`); the rest is multiplied here."""
    parts: List[Tuple[int, Part, float]] = []
    for _, gradient, *_ in updates:
        if gradient is not None:
            common = gradient.common()
            for part in gradient.parts:
                parts.append((part.held.number, part, 1.0 if part.factor == common else part.factor / common))
    if len(parts) > 1:
        parts.sort(key=operator.itemgetter(0))
    ops: List[bytes] = []
    alive = [(part, part.held.lookup.add_pushes(ops, part.held, part.features, factor)) for _, part, factor in parts]
    return ops, alive


def scaled(optimizer: frugal.Optimizer, gradient: Optional[Gradient]) -> frugal.Optimizer:
    """The optimizer with what PyTorch has done to the gradient."""
    if gradient is None or (gradient.common() == 1.0 and not gradient.clip_limit):
        return optimizer
    clip = gradient.clip_limit
    if optimizer.clip_value:
        clip = min(clip or math.inf, optimizer.clip_value)
    return dataclasses.replace(optimizer, grad_scale=optimizer.grad_scale * gradient.common(), clip_value=clip)


def _numbers(optimizer: frugal.Optimizer, whole: bool, count: int) -> Dict[str, Any]:
    """What ranks must say alike. `whole`: this one has a gradient, and its factor. `count`: see Update."""
    numbers: Dict[str, Any] = {"optimizer": type(optimizer).__name__, _ranks.COUNT: count}
    for field in dataclasses.fields(optimizer):
        if whole or field.name not in ("grad_scale", "clip_value"):
            numbers[field.name] = float(getattr(optimizer, field.name))
    return numbers


def _exists(engine: frugal.Engine, name: str) -> bool:
    try:
        engine.find_table(name)
    except frugal.NotFound:
        return False
    return True


_steps: "weakref.WeakKeyDictionary[frugal.Trainer, Steps]" = weakref.WeakKeyDictionary()
_shared: "weakref.WeakKeyDictionary[frugal.Engine, Shared]" = weakref.WeakKeyDictionary()
_counter: Iterator[int] = itertools.count()
_steps_lock = threading.RLock()


unloaded: List[Shared] = []  # of engines with a checkpoint that Checkpoints.load() has not loaded


def check_loaded(shared: Shared) -> None:
    """An error for a step before Checkpoints.load()."""
    if shared in unloaded:
        raise RuntimeError(
            "the tables are those of a checkpoint, and the rest of it is not loaded: call load() of"
            " frugal.torch.Checkpoints before the first step"
        )


def of_engine(engine: frugal.Engine) -> List[Steps]:
    """Those of trainers of an engine, of which modules have been made."""
    with _steps_lock:
        return [steps for trainer, steps in _steps.items() if trainer.engine is engine]


def _after_fork() -> None:
    global _steps_lock
    _steps_lock = threading.RLock()
    for steps in _steps.values():
        steps.lock = _ParentsLock()
    for shared in _shared.values():
        shared._lock = _ParentsLock()


os.register_at_fork(after_in_child=_after_fork)


def shared_of(engine: frugal.Engine) -> Shared:
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
