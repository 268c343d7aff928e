"""The steps of torch's optimizers, for the tables that they have.

A hook that PyTorch calls before each optimizer's step finds anchors among its parameters, and gives the optimizer
two hooks of its own, the last before the step and the first after it. Between them, around the class's own step, comes
a function that takes the optimizer's hyper-parameters, steps the tables, and hides the anchors' gradients from the
optimizer, which leaves a parameter without a gradient alone. It gives them back also where the step ends by an
exception, after which PyTorch calls no hook: zero_grad() and what clips gradients would miss them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
import math
import operator
import warnings
import weakref
from collections import OrderedDict
from typing import (
    Any, Callable, Dict, ItemsView, Iterator, KeysView, List, NamedTuple, Optional, Sequence, Set, Tuple, Type, TypeVar,
    ValuesView, cast,
)  # fmt: skip

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

import frugal

from . import _ranks, _state, _steps, _usual
from ._anchor import Anchor
from ._computed import SHAPE, flat, in_place, without_writes
from ._gradient import Gradient, get_grad, set_grad
from ._steps import Steps, Table, Update, changed, check_loaded, count_optimizer_step, kept, scaled
from ._weight import arguments, refresh

_STATE, _KEYS, _STEP = "frugal_state", "frugal_keys", "step"

# The engine's optimizer whose rows have the state of one of torch's, and what that one calls it, in the order in which
# a table has it.
_Theirs = Tuple[type, Tuple[str, ...]]
_ADAM: _Theirs = frugal.Adam, ("exp_avg", "exp_avg_sq")
_THEIR_STATE: Dict[Type[torch.optim.Optimizer], _Theirs] = {
    torch.optim.SGD: (frugal.Momentum, ("momentum_buffer",)),
    torch.optim.Adagrad: (frugal.Adagrad, ("sum",)),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SparseAdam: _ADAM,
    torch.optim.RMSprop: (frugal.RMSProp, ("square_avg",)),
}
# Other entries of a state are the caller's.
_OF_ROWS = {_STATE, _KEYS, "max_exp_avg_sq", *[name for _, names in _THEIR_STATE.values() for name in names]}


def _theirs(optimizer: torch.optim.Optimizer) -> _Theirs:
    return next((theirs for kind, theirs in _THEIR_STATE.items() if isinstance(optimizer, kind)), (type(None), ()))


class _Count(int):
    """Steps of a table under an optimizer. It is read as a `_Steps`, where PyTorch has a tensor. torch.compile asks
    where it is."""

    is_cpu = False

    def item(self) -> int:
        return int(self)


class _Own(Dict[str, Any]):
    """What an optimizer has of a table in its `state`: the count of steps, where torch's has one. What it has of each
    row is in the table, and is read there by the names of torch's optimizers, of which each is listed. While another
    optimizer steps the table, or until what a caller has set is the table's, it is here."""

    def __new__(cls, has: Any, anchor: Optional[Anchor] = None, optimizer: Any = None) -> Any:
        # Who makes another of this class of what it has, as Lightning does, gets that alone.
        return super().__new__(cls) if anchor is not None else dict(has)

    def __init__(self, has: Dict[str, Any], anchor: Anchor, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(has)
        self.anchor = anchor
        self.kind, self.names = _theirs(optimizer)
        self.counts_in_tensors = not isinstance(optimizer, (torch.optim.SGD, torch.optim.SparseAdam))
        self.steps: Optional[_Moment] = None  # a _Steps
        self.shown: Dict[str, TensorWeakRef] = {}  # by name, what a caller may have read and kept
        self.new: Optional[float] = None  # what all rows have until the first step
        self.lost = False  # another optimizer has stepped the table, and what this had of the rows is nowhere
        self.given = ""  # what else has got this state; the two would share it
        for name, value in has.items():  # what is kept of another's state that has come here
            seen = _seen(value)
            if seen is not None and seen.own is None:
                seen.own, seen.read_at = self, -1
                self.shown[name] = TensorWeakRef(value)
                if name == _STEP and self.counts_in_tensors:
                    self.steps = _Steps.of(self, _STEP, value)

    def shown_as(self, name: str) -> Optional[torch.Tensor]:
        """What a caller has read by this name, if it is still there."""
        shown = self.shown.get(name)
        return None if shown is None else shown()

    def is_in_table(self) -> bool:
        """Whether the table has what this has of the rows."""
        table = self.anchor.table
        return table.holder() is self and type(table.optimizer) is self.kind

    def __contains__(self, name: object) -> bool:
        here = _here(self)
        return name in here or (name in self.names and (_STATE in here or self.new is not None or self.is_in_table()))

    def __iter__(self) -> Iterator[str]:
        yield from _here(self)
        yield from [name for name in self.names if name not in _here(self) and name in self]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys(self) -> Any:
        return KeysView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if type(value) is not _Count or not self.counts_in_tensors:
            return value
        if self.steps is None:
            rows = _number(value)
            self.steps, self.shown[_STEP] = _Steps.of(self, _STEP, rows), TensorWeakRef(rows)
        return self.steps

    def __setitem__(self, name: str, value: Any) -> None:
        counted = name == _STEP and type(dict.get(self, _STEP)) is _Count
        super().__setitem__(name, _Count(value) if counted else value)

    def __delitem__(self, name: str) -> None:
        if name in self.names and name in self:
            self.take_out()
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def copy(self) -> Dict[str, Any]:
        return dict(self)

    def clear(self) -> None:
        super().clear()
        self._let_go()

    def __missing__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        rows, shown = self.read(name), self.shown_as(name)
        if shown is not None and shown.shape == rows.shape and shown.device == rows.device:
            rows = shown.copy_(rows)
        self.shown[name] = TensorWeakRef(rows)
        return _Moment.of(self, name, rows)

    def read(self, name: str) -> torch.Tensor:
        """What the rows have by this name, as a copy where the table has it."""
        table, names, here = self.anchor.table, self.names, dict.get(self, name)
        if isinstance(here, torch.Tensor):
            return here
        if _STATE in _here(self):
            parts = self[_STATE].tensor_split(len(names), dim=1)
        elif self.new is not None:
            shape = table.capacity, table.dim
            return torch.full(shape, self.new, dtype=torch.float32, device=table.device)
        else:
            parts = _state.moments(table, [table.dim] * len(names))[0]
        return cast(torch.Tensor, parts[names.index(name)].to(table.device))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def of_rows(self) -> Dict[str, Any]:
        """What state_dict() has of the rows: of a dense table what torch's optimizer would have."""
        table, found = self.anchor.table, {}
        if self.new is not None:
            found = {name: self.read(name) for name in self.names}
        elif self.is_in_table() and table.hashed:
            (state,), keys = _state.moments(table, [table.state_floats])
            found = {_STATE: state, _KEYS: keys.view(torch.float32)}
        elif self.is_in_table():
            found = dict(zip(self.names, _state.moments(table, [table.dim] * len(self.names))[0]))
        found.update(dict.items(self))  # of several, a caller has set some
        found.pop(_STEP, None)
        return found

    def for_another(self) -> Dict[str, Any]:
        """The same for another parameter, to which a caller has moved it, in the tensors that a caller has read."""
        found = self.of_rows()
        if _STEP in _here(self):
            count = dict.__getitem__(self, _STEP)
            is_int = type(count) is _Count and not self.counts_in_tensors
            found[_STEP] = int(count) if is_int else torch.tensor(float(count))
        for name, value in found.items():
            shown = self.shown_as(name)
            if shown is not None and shown.shape == value.shape:
                found[name] = shown if shown is value else shown.copy_(value)
        for name in self.shown:
            seen = _seen(self.shown_as(name))
            if seen is not None and seen.own is self:
                seen.own = None  # until another has it
        return found

    def give(self, to: torch.Tensor, state: Dict[str, Any]) -> None:
        """Another parameter has this state from now on. Where this one is still its table's, no step can be of both."""
        self.given = f"table {to.table.name!r}" if isinstance(to, Anchor) else f"a parameter of {tuple(to.shape)}"
        self.update({name: value for name, value in state.items() if name != _STEP})
        self._let_go()

    def check_not_given(self) -> None:
        if self.given:
            raise NotImplementedError(
                f"table {self.anchor.table.name!r}: its state in `optimizer.state` has been given to {self.given}, and"
                " a table's state cannot be that of two parameters: give a copy of its tensors, or delete it here"
            )

    def take_out(self) -> None:
        """What the table has of the rows is here from now on, and no longer the table's."""
        self.update(self.of_rows())
        self._let_go()

    def put_aside(self) -> None:
        """Before another optimizer steps the table, which has one state of each row."""
        if self.anchor.table.steps.world_size == 1:
            self.take_out()
        else:
            self.lost = self.is_in_table()
            self._let_go()

    def _let_go(self) -> None:
        self.new = None
        if self.anchor.table.holder() is self:
            self.anchor.table.state_of = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ({name: self[name] if name in _here(self) else self.read(name) for name in self},)


def _here(state: Dict[str, Any]) -> KeysView[str]:
    """The names of what is in the state itself, and not in a table."""
    return dict.keys(state)


class _Seen:
    """Whose state the views of a tensor show, and before which step it was read."""

    __slots__ = ("own", "read_at", "__weakref__")

    def __init__(self, own: _Own) -> None:
        self.own: Optional[_Own] = own  # None: it is a tensor of a parameter that is no table's
        self.read_at = own.anchor.table.steps.next


_seen_of: Any = WeakTensorKeyDictionary()  # of tensors in which a state was read, a reference to a _Seen


def _seen(tensor: Any) -> Optional[_Seen]:
    reference = _seen_of.get(tensor) if isinstance(tensor, torch.Tensor) else None
    return None if reference is None else cast(Optional[_Seen], reference())


class _Moment(torch.Tensor):
    """A copy of what the rows of a table have for an optimizer, and views of it: what is written to it the table
    has from the next step on, and state_dict() at once."""

    _seen: _Seen  # of all views
    _name: str
    _all: torch.Tensor  # whose memory this has

    @classmethod
    def of(cls, own: _Own, name: str, rows: torch.Tensor) -> "_Moment":
        seen = _seen(rows)
        if seen is None or seen.own is not own:
            seen = _Seen(own)
            _seen_of[rows] = weakref.ref(seen)
        elif name != _STEP:
            seen.read_at = own.anchor.table.steps.next
        return cls._as(rows, seen, name, rows)

    @classmethod
    def _as(cls, view: torch.Tensor, seen: _Seen, name: str, rows: torch.Tensor) -> "_Moment":
        moment = view.as_subclass(cls)
        moment._seen, moment._name, moment._all = seen, name, rows
        return moment

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _before(self) -> None:
        """Comes before whatever is done with it: what was read before a step is read again."""
        seen, name = self._seen, self._name
        own = seen.own
        if own is None or dict.get(own, name) is self._all or name not in own:
            return
        now = own.anchor.table.steps.next
        if seen.read_at == now:
            return
        seen.read_at = now
        rows = own.read(name)
        if rows.shape == self._all.shape:
            self._all.copy_(rows)

    def _after_write(self) -> None:
        pass

    def _before_write(self) -> None:
        own, name = self._seen.own, self._name
        if own is None or dict.get(own, name) is self._all:
            return
        table = own.anchor.table
        if table.hashed:
            raise NotImplementedError(
                f"table {table.name!r}: {name} is a copy of what the hashed table has: load a state_dict into the"
                " optimizer"
            )
        if name in own:  # what others have made of it since
            self._all.copy_(own[name])
            own[name] = self._all

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        refresh(flat([*args, *kwargs.values()]))
        args, kwargs = arguments(args, kwargs)
        name = getattr(func, "__name__", "")
        moments = [value for value in flat([*args, *kwargs.values()]) if isinstance(value, _Moment)]
        with torch._C.DisableTorchFunctionSubclass():
            for moment in moments:
                moment._before()
            written = [
                target
                for target in flat([kwargs.get("out"), *(args[:1] if in_place(name) else ())])
                if isinstance(target, _Moment)
            ]
            for target in written:
                target._before_write()
            out = func(*args, **kwargs)
            for target in written:
                target._after_write()
            if isinstance(out, torch.Tensor) and out.layout == torch.strided and not hasattr(out, "_seen"):
                for moment in moments:
                    if out.untyped_storage().data_ptr() == moment._all.untyped_storage().data_ptr():
                        return cls._as(out, moment._seen, moment._name, moment._all)
                return out.as_subclass(torch.Tensor) if isinstance(out, _Moment) else out
        return without_writes(out) if name in ("numpy", "__array__") else out


class _Steps(_Moment):
    """The steps of a table under an optimizer, as they are: to write to it sets them."""

    def _before(self) -> None:
        own = self._seen.own
        count = None if own is None else dict.get(own, _STEP)
        if type(count) is _Count and own is not None and own.steps is not None and own.steps._all is self._all:
            self._all.fill_(count)

    def _before_write(self) -> None:
        pass

    def _after_write(self) -> None:
        if self._seen.own is not None:
            self._seen.own[_STEP] = self._all.item()


_K = TypeVar("_K")
_V = TypeVar("_V")
_MOST_MADE = 64  # optimizers of the engine that are remembered of a group


class _Entry:
    """An anchor of an optimizer, in one of its groups."""

    __slots__ = ("group", "anchor", "table")

    def __init__(self, group: int, anchor: Anchor) -> None:
        self.group = group
        self.anchor = anchor
        self.table = anchor.table


class _Made:
    """The engine's optimizers that are made of some values of a group: tables that are at the same step share one."""

    def __init__(self, kind: Type[torch.optim.Optimizer], group: Dict[str, Any], values: Dict[str, Any]) -> None:
        self.kind, self.values = kind, values
        self.translator = _translator(kind)
        decays = self.translator is _adagrad and bool(group["lr_decay"])
        self.by_step = self.translator is _adam or decays  # each step has another
        self.counts = self.translator is not _sgd  # steps, in the optimizer's state
        self.stateless = not self.counts and not group["momentum"]  # and has no state of a table, as torch's has none
        self.plain: Dict[Tuple[int, Tuple[bool, float, float, float]], frugal.Optimizer] = {}
        self.scaled: Dict[Tuple[int, float, float], Tuple[frugal.Optimizer, frugal.Optimizer]] = {}


def _remember(made: Dict[_K, _V], key: _K, value: _V) -> _V:
    if len(made) > _MOST_MADE:
        made.clear()
    made[key] = value
    return value


class _Group:
    """What the engine's optimizers of a group's tables are."""

    made: Any = None  # a _Made, from the first look on

    def __init__(self) -> None:
        self.group: Dict[str, Any] = {}
        self.names: Tuple[str, ...] = ()
        # The group's values by these names, where none can change in place.
        self.seen: Tuple[Any, ...] = ()

    def look(self, kind: Type[torch.optim.Optimizer], group: Dict[str, Any]) -> None:
        """Comes before a step: hyper-parameters are as they are now."""
        self.group = group
        seen = self.seen
        if (
            len(seen) == len(group)
            and kind is self.made.kind
            and all(map(operator.is_, group.values(), seen))
            and tuple(group) == self.names
        ):
            return
        values, made = _values(group), self.made
        if made is None or kind is not made.kind or values != made.values:
            self.made = _Made(kind, group, values)
        self.names = tuple(group)
        plain = all(name == "params" or _is_plain(value) for name, value in group.items())
        self.seen = tuple(group.values()) if plain else ()

    def optimizer(self, step: int, common: Tuple[bool, float, float, float]) -> frugal.Optimizer:
        """That of the `step`-th step of a table, from 1. `common`: Table.common."""
        made = self.made
        key = step if made.by_step else 1, common
        found: Optional[frugal.Optimizer] = made.plain.get(key)
        if found is None:
            found = made.translator(_Hyper(self.group, key[0], made.kind.__name__))
            mean_ranks, clip_value, clip_norm, weight_bound = common
            found = dataclasses.replace(
                found, mean_ranks=mean_ranks, clip_value=clip_value, clip_norm=clip_norm, weight_bound=weight_bound
            )
            _remember(made.plain, key, found)
        return found

    def with_scale(self, optimizer: frugal.Optimizer, gradient: Optional[Gradient]) -> frugal.Optimizer:
        """The same with what PyTorch has done to the gradient."""
        common = 1.0 if gradient is None else gradient.common()
        if gradient is None or (common == 1.0 and not gradient.clip_limit):
            return optimizer
        key = id(optimizer), common, gradient.clip_limit
        made: _Made = self.made
        # (What has an id must live.)
        found = made.scaled.get(key) or _remember(made.scaled, key, (optimizer, scaled(optimizer, gradient)))
        return found[1]


def _is_plain(value: Any) -> bool:
    """Whether it cannot change in place."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in (float, int, bool, str, type(None))


class _Known:
    """What the hooks remember of an optimizer."""

    def __init__(self) -> None:
        self.parameters: List[List[Any]] = []  # of each group, when `entries` were made
        self.entries: List[_Entry] = []
        self.groups: List[_Group] = []
        self.rounds: List[List[_Entry]] = []  # the same, none twice in one; as a rule there is one
        self.hidden: List[Tuple[Anchor, torch.Tensor]] = []
        self.due = False  # the tables, which _stepping is to step
        self.inside = False  # _stepping
        self.kind: Optional[type] = None
        self.delegates = False  # as _delegates says of the kind
        self.surrounded = False  # the kind's step, by _stepping
        self.waited = 0  # steps whose class is to call another
        self.adoptions = -1  # there were, when `entries` were made

    def look(self, optimizer: torch.optim.Optimizer) -> List[_Entry]:
        groups = optimizer.param_groups
        if (
            self.adoptions != _steps.adoptions
            or len(groups) != len(self.parameters)
            or not all(map(_same, groups, self.parameters))
        ):
            entries = [_Entry(i, p) for i, group in enumerate(groups) for p in group["params"] if isinstance(p, Anchor)]
            for entry in entries:
                entry.anchor.check_current()
            self.adoptions = _steps.adoptions
            self.rounds = _rounds(entries)
            self.parameters = [list(group["params"]) for group in groups]
            self.groups = [_Group() for _ in groups]
            self.entries = entries
        return self.entries


def _rounds(entries: List[_Entry]) -> List[List[_Entry]]:
    """A table that a group has twice is stepped twice, as PyTorch does. Two groups cannot have it."""
    rounds: List[List[_Entry]] = []
    seen: Dict[Anchor, List[_Entry]] = {}
    for entry in entries:
        before = seen.setdefault(entry.anchor, [])
        if before and before[0].group != entry.group:
            raise ValueError(
                f"some parameters appear in more than one parameter group: those of table {entry.table.name!r}"
            )
        if len(before) == len(rounds):
            rounds.append([])
        rounds[len(before)].append(entry)
        before.append(entry)
    return rounds


def _same(group: Dict[str, Any], parameters: List[Any]) -> bool:
    """Whether a group has these parameters, and no others: by identity, for == of tensors is another thing."""
    now = group["params"]
    return len(now) == len(parameters) and all(map(operator.is_, now, parameters))


# Steps of an optimizer that left a table to others, after which there is a warning where none steps it.
_PATIENCE = 64

_known: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known]" = weakref.WeakKeyDictionary()


def _known_of(optimizer: torch.optim.Optimizer) -> _Known:
    """Also of an optimizer that has another's attributes, and so our hooks, from the beginning."""
    known = _known.get(optimizer)
    if known is None:
        known = _known[optimizer] = _Known()
    return known


_OURS = -1  # the name of our hooks among an optimizer's own, which PyTorch counts from 0


def _before(optimizer: torch.optim.Optimizer, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    """Comes before the optimizer's own hooks. What the caller's hooks do before the step is for the tables, too, and
    those after it see the gradients."""
    if is_dynamo_compiling():
        _uncompiled_before(optimizer, args, kwargs)
        return
    count_optimizer_step()
    before = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
    after = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
    if len(before) == 1 and _OURS in before and next(iter(after), None) == _OURS:
        return  # ours is the next to come
    if not _known_of(optimizer).look(optimizer) or getattr(optimizer, "_frugal", False):
        return
    _put(before, _step_tables, last=True)
    _put(after, _give_back, last=False)


def _put(hooks: "OrderedDict[int, Any]", hook: Callable[..., Any], last: bool) -> None:
    """Ours among an optimizer's hooks, as the last or the first of them."""
    if next(reversed(hooks) if last else iter(hooks), None) != _OURS:
        hooks[_OURS] = hook
        hooks.move_to_end(_OURS, last=last)


def _step_tables(optimizer: torch.optim.Optimizer, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    if is_dynamo_compiling():
        return _uncompiled_step_tables(optimizer, args, kwargs)
    known = _known_of(optimizer)
    if not known.look(optimizer):
        return None
    kind = type(optimizer)
    if kind is not known.kind:
        known.delegates = _delegates(kind)
        known.surrounded = not known.delegates and _surround(kind, hooked=True)
        known.kind = kind
    if known.delegates:
        known.waited += 1
        if known.waited == _PATIENCE:
            for entry in known.entries:
                entry.table.warn_if_nobody_steps()
        return None
    if known.surrounded:
        known.due = True
        return None
    return _begin(optimizer, known, args, kwargs)


# A compiled step breaks its graph at these, and leaves alone what has no gradient then.


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled_before(*args: Any) -> None:
    _before(*args)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled_step_tables(*args: Any) -> Any:
    return _step_tables(*args)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled_give_back(*args: Any) -> None:
    _give_back(*args)


def _begin(optimizer: torch.optim.Optimizer, known: _Known, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Steps the tables, now or after the closure, for which other arguments are returned."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _step(optimizer, known)
        return None

    def closed() -> Any:
        loss = closure()
        _step(optimizer, known)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closed}
    return (args[0], closed, *args[2:]), kwargs


def _give_back(optimizer: torch.optim.Optimizer, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    if is_dynamo_compiling():
        _uncompiled_give_back(optimizer, args, kwargs)
        return
    _show(_known[optimizer])


def _show(known: _Known) -> None:
    if not known.hidden or _usual.show(known):
        return
    for anchor, grad in known.hidden:
        with anchor.adding:
            if get_grad(anchor) is None:
                set_grad(anchor, grad)
            anchor.aside = None
    known.hidden = []


register_optimizer_step_pre_hook(_before)


def _stepping(function: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a class, around which come the tables' steps. PyTorch's hooks are for a class's own step: of an
    optimizer whose step calls this one, the tables are stepped here as often as it is called."""
    if function in _surrounded:
        return function

    def step(optimizer: torch.optim.Optimizer, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        known = _known_of(optimizer)
        inside = known.inside  # also of a step that a closure of the same optimizer makes, which is due
        if not known.due and (inside or not _delegates(type(optimizer))):
            return function(optimizer, *args, **kwargs)
        try:
            known.inside, known.due = True, False
            changed = _begin(optimizer, known, (optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
            out = function(optimizer, *args, **kwargs)
            known.inside = inside
            _show(known)  # Ctrl-C may interrupt it
            return out
        except BaseException:
            known.inside = inside
            _show(known)
            raise

    uncompiled = torch.compiler.disable(step, recursive=False)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def surrounded(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _OURS not in optimizer._optimizer_step_pre_hooks:
            return function(optimizer, *args, **kwargs)  # it has no table
        return (uncompiled if is_dynamo_compiling() else step)(optimizer, args, kwargs)

    _surrounded.add(surrounded)
    return surrounded


_surrounded: "weakref.WeakSet[Callable[..., Any]]" = weakref.WeakSet()  # what _stepping has returned
# Of the function that Optimizer puts around the step of each class, to call the hooks. It has the step in a cell.
_HOOKED = torch.optim.Optimizer.profile_hook_step(_stepping).__code__


def _surround(kind: Type[torch.optim.Optimizer], hooked: bool) -> bool:
    """Puts _stepping around the class's step, and within its hooks. False, if hooks are wanted, and it is not known
    where they are."""
    step: Any = kind.step
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None)
    if step is not None:
        cell = step.__closure__[_HOOKED.co_freevars.index("func")]
        cell.cell_contents = _stepping(cell.cell_contents)
    elif not hooked:
        setattr(kind, "step", _stepping(kind.step))
    return step is not None or not hooked


def _bring_home(optimizer: torch.optim.Optimizer) -> None:
    """Gives a parameter the state of a table, where a caller has moved that in `optimizer.state`."""
    states = optimizer.state
    moved = [(to, own) for to, own in states.items() if type(own) is _Own and own.anchor is not to]
    found = [own.for_another() for _, own in moved]  # before any is another's
    for (to, own), state in zip(moved, found):
        states[to] = state
        own.give(to, state)


def _step(optimizer: torch.optim.Optimizer, known: _Known) -> None:
    if known.hidden:
        _show(known)  # of a step that has failed
    for entry in known.entries if _steps.unloaded else ():
        check_loaded(entry.table.steps.shared)
    if _usual.step(optimizer, known):
        if kept:
            changed([anchor.table for anchor, _ in known.hidden])
        return
    _bring_home(optimizer)
    for entry in known.rounds[1] if len(known.rounds) > 1 else ():
        if optimizer.param_groups[entry.group].get("momentum"):
            raise NotImplementedError(f"table {entry.table.name!r}: a group with momentum has its parameter twice")
    for again, entries in enumerate(known.rounds):
        _step_once(optimizer, known, entries, again > 0)
    known.hidden = []
    for entry in known.entries:
        anchor = entry.anchor
        grad = get_grad(anchor)
        if grad is not None:
            known.hidden.append((anchor, grad))
            with anchor.adding:
                anchor.aside = grad if isinstance(grad, Gradient) else None
                set_grad(anchor, None)


def _step_once(optimizer: torch.optim.Optimizer, known: _Known, entries: List[_Entry], again: bool) -> None:
    """One step of the engine for each trainer whose tables the optimizer has: all of them, or none."""
    by_steps: Dict[Steps, List[Tuple[_Entry, Optional[Gradient]]]] = {}
    for entry in entries:
        gradient = entry.anchor.gradient()
        steps = entry.table.steps
        if (gradient is None and steps.world_size == 1) or entry.table.kept_by() is not None:
            continue  # as PyTorch leaves a parameter without a gradient alone
        by_steps.setdefault(steps, []).append((entry, gradient))
    if by_steps:
        factor, skip = scaling(optimizer)
        kind, groups = type(optimizer), known.groups
        for own, group in zip(groups, optimizer.param_groups):
            own.look(kind, group)
        if again:
            factor = 1.0  # the gradient has it
        made: List[Tuple[Steps, List[Update]]] = []
        for steps, items in by_steps.items():
            updates = [
                _update(optimizer, entry, gradient, groups[entry.group], factor) for entry, gradient in items
            ]
            if steps.world_size > 1 and not skip:
                for entry, gradient in items:
                    _tell_of_count(kind, entry, gradient, groups[entry.group])
            if steps.world_size > 1 or any([gradient is not None and gradient.parts for _, gradient in items]):
                made.append((steps, updates))
            elif not skip:
                for update in updates:
                    update.table.choose(update.optimizer)  # its state is what state_dict() has
        if len(made) > 1:
            # In one order, for they are locked. The last ends first: on a GPU a NaN is found by the end of the step.
            made.sort(key=lambda one: (one[0].device.type != "cpu", one[0].number))
        if made:
            (first, updates), *others = made
            first.apply(updates, skip, others)
        if not skip:
            for items in by_steps.values():
                for entry, gradient in items:  # also one of zeros, as PyTorch counts
                    if gradient is not None and groups[entry.group].made.counts:
                        state = optimizer.state[entry.anchor]
                        state[_STEP] = _Count(dict.get(state, _STEP, 0) + 1)


def _tell_of_count(kind: type, entry: _Entry, gradient: Optional[Gradient], group: _Group) -> None:
    """One warning on a rank that has counted fewer steps of a table than others may have. By a reducer all ranks have
    a gradient where one has."""
    anchor, table = entry.anchor, entry.table
    if gradient is None:
        table.lacked = True
    elif table.lacked and not table.told_of_count and group.made.by_step and not anchor.reduced:
        table.told_of_count = True
        warnings.warn(
            f"table {table.name!r}: rank {table.steps.rank} had no gradient of it in an earlier step, and"
            f" {kind.__name__} counts steps that have one. Where other ranks had one, they count more, and take another"
            " learning rate: train with DistributedDataParallel(find_unused_parameters=True), or use the table in each"
            " forward of each rank",
            stacklevel=2,
        )


def _values(group: Dict[str, Any]) -> Dict[str, Any]:
    """Hyper-parameters as they are now: a rate that is a tensor is changed in place."""
    return {name: _as_now(value) for name, value in group.items() if name != "params"}


def _as_now(value: Any) -> Any:
    """A value that later ones can be compared with. What may change in place unseen, as an array
    does, equals none."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_now, value))
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, float):
        return float(value)  # NumPy's, too
    return value if _is_plain(value) else object()


def _update(
    optimizer: torch.optim.Optimizer, entry: _Entry, gradient: Optional[Gradient], group: _Group, factor: float
) -> Update:
    table, given = entry.table, optimizer.state.get(entry.anchor)
    if given is None:
        given = {}
    counts = group.made.counts
    count = dict.get(given, _STEP, 0) if counts else 0
    made = group.optimizer(int(count) + 1, table.common)
    usual = table.stepped if group.made.stateless else table.holder() is given
    if not usual or len(_here(given)) != counts or not table.is_of(made):
        state = given if type(given) is _Own else _Own(given, entry.anchor, optimizer)
        _settle(optimizer, table, state, made)
        if counts and type(count) is not _Count:
            state[_STEP] = _Count(count)
    if gradient is not None and factor != 1.0:
        gradient.rescale(factor)
    counted = int(count) + 1 if group.made.by_step else 0
    return Update(table, gradient, group.with_scale(made, gradient), counted)


def _has_moments(state: Dict[str, Any]) -> bool:
    """Whether there is a state of rows that the table has not: it is loaded, set by a caller, or aside."""
    return any(name in _OF_ROWS for name in _here(state))


def _settle(optimizer: torch.optim.Optimizer, table: Table, state: _Own, made: frugal.Optimizer) -> None:
    """The table has this state of its rows when an optimizer steps it. What it had of another goes aside. Where there
    is none, it is that of new rows, as PyTorch's optimizers begin."""
    state.check_not_given()
    holder = table.holder()
    if holder is not None and (holder is not state or (state.is_in_table() and not table.is_of(made))):
        # (Its own, where a group's momentum is 0 from now on: PyTorch's buffers stay as they are meanwhile.)
        holder.put_aside()
    if _here(state) - {_STEP}:
        _translate(optimizer, table, state, made)
    loaded = _has_moments(state)
    if table.holder() is not state:
        stateless = type(made) is frugal.SGD
        if table.stepped and (not table.is_of(made) or (table.state_floats and not loaded)):
            if state.lost and not loaded and not stateless:
                raise RuntimeError(
                    f"table {table.name!r}: another optimizer has stepped it since this {type(optimizer).__name__} did,"
                    " and the table has one state of each row: load this optimizer's state_dict, or keep to one"
                    " optimizer"
                )
            _begin_anew(optimizer, table, made)
        table.stepped, table.state_of = True, None if stateless else weakref.ref(state)
        state.new, state.lost = None, False
        if not stateless:
            optimizer.state[state.anchor] = state
    if loaded:
        _load(optimizer, table, state, made)


def _begin_anew(optimizer: torch.optim.Optimizer, table: Table, made: frugal.Optimizer) -> None:
    steps = table.steps
    if steps.world_size > 1 and not _ranks.are_told(steps.rank, steps.world_size):
        raise NotImplementedError(
            f"table {table.name!r}: this {type(optimizer).__name__} has no state of it and would begin with new state,"
            " which ranks that torch.distributed does not know cannot do together: keep one optimizer and its state, or"
            " load a state_dict into it"
        )
    has = f"has a {type(optimizer).__name__} that begins with new"
    _by_rank_0(table, lambda: table.renew(made), has, "make the same optimizers on all ranks")
    table.has(made)


def _translate(
    optimizer: torch.optim.Optimizer, table: Table, state: _Own, made: frugal.Optimizer
) -> None:
    """Completes the state of rows that was loaded or set, in the form of torch's optimizer of a dense weight."""
    theirs = {}
    shape = (table.capacity, table.dim)
    for name in [name for name in _here(state) if name in _OF_ROWS and name not in (_STATE, _KEYS)]:
        if not table.hashed:
            state[name] = _of_all(state[name], shape, made)
        if _says_nothing(state[name], state, shape, made):
            del state[name]
        else:
            theirs[name] = state[name]
    counted = type(dict.get(state, _STEP, _Count())) is _Count
    if not theirs and _STATE not in _here(state) and table.state_floats and not counted:
        # Loaded, of an optimizer of which there is none here.
        theirs = {name: value for name, value in dict.items(state) if getattr(value, "shape", None) == shape}
    if not theirs:
        return
    _, names = _theirs(optimizer)
    for name in names:
        if name not in theirs and name in state:
            theirs[name] = state[name]  # of several, a caller has set some
    if table.hashed or set(theirs) != set(names) or any(getattr(theirs[n], "shape", None) != shape for n in names):
        found = ", ".join(f"{n} {tuple(getattr(v, 'shape', ()))}" for n, v in theirs.items())
        raise ValueError(
            f"table {table.name!r}: the state that {type(optimizer).__name__} has loaded is {found}, and the"
            f" {'hashed' if table.hashed else 'dense'} table of {shape} takes {' and '.join(names) or 'none'} of a"
            " dense table's shape: load a state_dict of the same optimizer and table"
        )
    dict.pop(state, _STATE, None)
    state.update(theirs)


def _of_all(value: Any, shape: Tuple[int, int], made: frugal.Optimizer) -> Any:
    """What was written to the element that Adagrad makes when it is made, every row gets."""
    new = getattr(made, "initial_accumulator", None)
    is_element = isinstance(value, torch.Tensor) and tuple(value.shape) == SHAPE != shape
    return torch.full(shape, float(value)) if is_element and new is not None and bool(value != new) else value


def _says_nothing(value: Any, state: Dict[str, Any], shape: Tuple[int, int], made: frugal.Optimizer) -> bool:
    """Whether it is no state of rows: SGD without momentum saves None, and Adagrad makes state of the anchor itself, of
    its shape, when it is made."""
    if not isinstance(value, torch.Tensor):
        return value is None
    if tuple(value.shape) != shape:
        return value.numel() == 1
    # What Adagrad makes of a weight is a new row's state until the first step.
    new = getattr(made, "initial_accumulator", None)
    begins = type(dict.get(state, _STEP)) is not _Count and not dict.get(state, _STEP, 1)
    return new is not None and begins and bool((value == new).all())


def scaling(optimizer: torch.optim.Optimizer) -> Tuple[float, bool]:
    """What an optimizer that scales by itself, as the fused ones do, has from a GradScaler."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and float(found) != 0.0:
        return 1.0, True
    return (1.0 if scale is None else 1.0 / float(scale)), False


# Optimizer state in state_dict(), by the anchor's number. A dense table's is what torch's optimizer would have saved of
# a weight. A hashed table's has keys, as floats: what loads an optimizer's state may make what it finds floats.


class _Kept:
    """A tensor that an optimizer loads for a table. PyTorch would make it one of the parameter's dtype and device, and
    leaves alone what is no tensor: moments are float32 in host memory, whatever a table's outputs are."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _keep(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Comes last before an optimizer loads."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters):
        if isinstance(parameter, Anchor) and number in states:
            states[number] = {
                name: _Kept(value) if isinstance(value, torch.Tensor) and name != _STEP else value
                for name, value in states[number].items()
            }
    return {**state_dict, "state": states}


def _take(optimizer: torch.optim.Optimizer) -> None:
    """Comes first after it."""
    _, names = _theirs(optimizer)
    for entry in _known_of(optimizer).look(optimizer):
        table, state = entry.table, optimizer.state.get(entry.anchor, {})
        for name, value in state.items():
            if type(value) is _Kept:
                state[name] = value.tensor
        # Once the state of a dense table was saved as that of a hashed one is.
        shape = (table.capacity, len(names) * table.dim)
        if not table.hashed and names and tuple(getattr(state.get(_STATE), "shape", ())) == shape:
            parts = state.pop(_STATE).tensor_split(len(names), dim=1)
            state.update(zip(names, [part.clone() for part in parts]))


def _save(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    groups = zip(optimizer.param_groups, state_dict["param_groups"])
    numbers = {id(p): number for group, saved in groups for p, number in zip(group["params"], saved["params"])}
    for entry in _known_of(optimizer).look(optimizer):
        number = numbers[id(entry.anchor)]
        if _state.are_tables_left_out():
            state_dict["state"].pop(number, None)
            continue
        saved = _saved(optimizer, entry.table, optimizer.state.get(entry.anchor) or {})
        if saved:
            state_dict["state"][number] = saved
        else:
            state_dict["state"].pop(number, None)
    return None


def _saved(optimizer: torch.optim.Optimizer, table: Table, own: Dict[str, Any]) -> Dict[str, Any]:
    """What an optimizer's state_dict has of a table: nothing, if it has never stepped it. Adagrad makes the state of a
    weight before."""
    steps = dict.get(own, _STEP, 0)
    found = own.of_rows() if type(own) is _Own else {name: value for name, value in own.items() if name != _STEP}
    if (table.capacity, table.dim) != SHAPE:
        found = {name: value for name, value in found.items() if getattr(value, "shape", None) != SHAPE}
    if not found or isinstance(optimizer, torch.optim.SGD):
        return found
    return {_STEP: _steps_as_theirs(optimizer, steps), **found}


def _steps_as_theirs(optimizer: torch.optim.Optimizer, steps: Any) -> Any:
    if isinstance(optimizer, torch.optim.SparseAdam):
        return int(steps)
    return steps if isinstance(steps, torch.Tensor) else _number(steps)  # as it was loaded


# What a checkpoint of the engine lacks of an optimizer: its groups, what it has of parameters that are no table's, and
# the steps that it has counted of each table.


def saved_without_tables(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    with _state.without_tables():
        whole = optimizer.state_dict()
    groups = []
    for group, saved in zip(optimizer.param_groups, whole["param_groups"]):
        values = {name: value for name, value in saved.items() if name not in ("params", "param_names")}
        parameters = list(zip(group["params"], saved["params"]))
        groups.append(
            {
                "values": values,
                "dense": [number for p, number in parameters if not isinstance(p, Anchor)],
                "tables": {p.table.name: _of_table(optimizer, p) for p, _ in parameters if isinstance(p, Anchor)},
            }
        )
    others = {name: value for name, value in whole.items() if name not in ("state", "param_groups")}
    return {"state": dict(whole["state"]), "groups": groups, "others": others}


def _of_table(optimizer: torch.optim.Optimizer, anchor: Anchor) -> Optional[Dict[str, Any]]:
    own = optimizer.state.get(anchor)
    if own is None:
        return None
    count = dict.get(own, _STEP)
    return {
        "state": {name: int(value) if value is count and type(count) is _Count else value
                  for name, value in dict.items(own)},
        "counted": type(count) is _Count,
        "own": type(own) is _Own,
        "new": own.new if type(own) is _Own else None,
        "holds": anchor.table.holder() is own,
    }  # fmt: skip


def load_without_tables(optimizer: torch.optim.Optimizer, saved: Dict[str, Any]) -> None:
    groups, kind = saved["groups"], type(optimizer).__name__
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"{kind} was saved with {len(groups)} groups, and has {len(optimizer.param_groups)}")
    # As torch's would be of the parameters of now: tables are found by name, the others by their order.
    state, packed, found = {}, [], {}
    for i, (group, was) in enumerate(zip(optimizer.param_groups, groups)):
        dense = [p for p in group["params"] if not isinstance(p, Anchor)]
        names = {p.table.name for p in group["params"] if isinstance(p, Anchor) and p.table.was_restored}
        if names != was["tables"].keys():
            raise ValueError(
                f"group {i} of {kind} was saved with the tables {sorted(was['tables'])}, and has {sorted(names)} of the"
                " checkpoint's"
            )
        if len(dense) != len(was["dense"]):
            raise ValueError(
                f"group {i} of {kind} was saved with {len(was['dense'])} parameters that are no tables, and has"
                f" {len(dense)}"
            )
        numbers = {id(p): number for p, number in zip(dense, was["dense"])}
        found.update(was["tables"])
        params = [numbers.get(id(p), -1) for p in group["params"]]  # no state has this number
        own = {"param_names": group["param_names"]} if "param_names" in group else {}
        packed.append({**was["values"], **own, "params": params})
    state = {**saved["others"], "state": saved["state"], "param_groups": packed}
    anchors = [entry.anchor for entry in _known_of(optimizer).look(optimizer)]
    new = {anchor: optimizer.state[anchor] for anchor in anchors if anchor in optimizer.state}
    with _state.without_tables():
        optimizer.load_state_dict(state)
    for anchor in anchors:
        if anchor.table.name not in found:
            optimizer.state.update({anchor: new[anchor]} if anchor in new else {})
        elif found[anchor.table.name] is not None:
            _give(optimizer, anchor, found[anchor.table.name])


def _give(optimizer: torch.optim.Optimizer, anchor: Anchor, saved: Dict[str, Any]) -> None:
    state = dict(saved["state"])
    if saved["counted"]:
        state[_STEP] = _Count(state[_STEP])
    if saved["own"]:
        own = _Own(state, anchor, optimizer)
        own.new = saved["new"]
        if saved["holds"]:
            anchor.table.state_of = weakref.ref(own)
        state = own
    optimizer.state[anchor] = state


def _number(steps: int) -> torch.Tensor:
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(float(steps), dtype=dtype, device="cpu")


def _with_tables(name: str) -> None:
    """Lets this method of torch's Optimizer see to tables: also of an optimizer that has made no step."""
    function = getattr(torch.optim.Optimizer, name)

    @functools.wraps(function)
    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        entries = _known_of(optimizer).look(optimizer)
        if entries:
            _bring_home(optimizer)
            hooks: Any = optimizer
            _put(hooks._optimizer_state_dict_post_hooks, _save, last=False)
            _put(hooks._optimizer_load_state_dict_pre_hooks, _keep, last=True)
            _put(hooks._optimizer_load_state_dict_post_hooks, _take, last=False)
        return function(optimizer, *args, **kwargs)

    setattr(torch.optim.Optimizer, name, call)


def _with_state_of_rows(function: Callable[..., None]) -> Callable[..., None]:
    """torch.optim.Adagrad.__init__, which makes state of the anchors: of each row, where it is read."""

    @functools.wraps(function)
    def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        function(optimizer, *args, **kwargs)
        for entry in _known_of(optimizer).look(optimizer):
            state = optimizer.state.get(entry.anchor)
            if type(state) is dict and "sum" in state and not entry.table.hashed:
                own = optimizer.state[entry.anchor] = _Own(state, entry.anchor, optimizer)
                own.new = float(own.pop("sum").flatten()[0])

    return init


setattr(torch.optim.Adagrad, "__init__", _with_state_of_rows(torch.optim.Adagrad.__init__))
_with_tables("state_dict")
_with_tables("load_state_dict")


def _without_tables(function: Callable[..., None]) -> Callable[..., None]:
    """Join.__init__, whose block lets ranks make different numbers of steps. With tables the others would wait."""

    @functools.wraps(function)
    def init(
        join: Any, joinables: Any, enable: bool = True, throw_on_early_termination: bool = False, **options: Any
    ) -> None:
        waits = enable and not throw_on_early_termination
        parameters = [each for joinable in joinables for each in getattr(joinable, "parameters", list)()]
        for parameter in parameters if waits else []:
            if isinstance(parameter, Anchor) and parameter.table.steps.world_size > 1:
                raise NotImplementedError(
                    f"Join: ranks that share the table {parameter.table.name!r} make the same number of steps: give"
                    " them the same number of batches, as torch.utils.data.DistributedSampler does, or say"
                    " throw_on_early_termination=True"
                )
        function(join, joinables, enable, throw_on_early_termination, **options)

    return init


# Communication hooks of PyTorch whose result is no mean over ranks, and those that are made of another.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_NO_MEANS = {f"{_HOOKS}debugging_hooks", f"{_HOOKS}post_localSGD_hook"}
_OF_ANOTHER = {"fp16_compress_wrapper_hook", "bf16_compress_wrapper_hook"}


def _is_no_mean(hook: Any) -> bool:
    module = getattr(hook, "__module__", "")
    if module == f"{_HOOKS}default_hooks" and getattr(hook, "__name__", "") in _OF_ANOTHER:
        return any(_is_no_mean(cell.cell_contents) for cell in hook.__closure__ or ())
    return module in _NO_MEANS


def _for_means(function: Callable[..., None]) -> Callable[..., None]:
    """DistributedDataParallel.register_comm_hook. The step averages a table's gradient, whatever the hook would do."""

    @functools.wraps(function)
    def register(parallel: Any, state: object, hook: Any) -> None:
        ignored = getattr(parallel, "parameters_to_ignore", ())
        for name, parameter in parallel.module.named_parameters() if _is_no_mean(hook) else []:
            if isinstance(parameter, Anchor) and parameter.table.steps.world_size > 1 and name not in ignored:
                raise NotImplementedError(
                    f"table {parameter.table.name!r}: a communication hook that does not average over ranks, as the"
                    " step does with a table's gradient: leave the parameter out, as by"
                    " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) before it is"
                    f" made of the model, with {name!r} among the names"
                )
        function(parallel, state, hook)

    return register


def _with_gradients_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """DistributedDataParallel._pre_forward, which replicate() calls, too. On a rank whose last backward used a table
    nowhere, the reducer's element is still in the gradient's place, and the next backward would add to it."""

    @functools.wraps(function)
    def pre_forward(parallel: Any, *args: Any, **kwargs: Any) -> Any:
        _take_back()
        return function(parallel, *args, **kwargs)

    return pre_forward


_take_back: Callable[[], None] = torch.compiler.disable(_steps.take_back_gradients)  # type: ignore[no-untyped-call]


def _with_gradients(function: Callable[..., None]) -> Callable[..., None]:
    """DistributedDataParallel.__init__. The step averages a table's gradient over all ranks, not over a group."""

    @functools.wraps(function)
    def init(parallel: Any, *args: Any, **kwargs: Any) -> None:
        function(parallel, *args, **kwargs)
        ignored = getattr(parallel, "parameters_to_ignore", ())
        for name, parameter in parallel.module.named_parameters():
            if isinstance(parameter, Anchor) and parameter.table.steps.world_size > 1 and name not in ignored:
                ranks, some = parameter.table.steps.world_size, parallel.process_group.size()
                if some != ranks:
                    raise NotImplementedError(
                        f"table {parameter.table.name!r}: DistributedDataParallel with a group of {some} ranks, and the"
                        f" step averages over the {ranks} ranks that share the table: leave process_group out, or leave"
                        " the parameter out, as by DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
                        f"model, names) before it is made of the model, with {name!r} among the names"
                    )
                parameter.reduced = True

    return init


if torch.distributed.is_available():
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    setattr(Join, "__init__", _without_tables(Join.__init__))
    setattr(DistributedDataParallel, "__init__", _with_gradients(DistributedDataParallel.__init__))
    setattr(DistributedDataParallel, "_pre_forward", _with_gradients_back(DistributedDataParallel._pre_forward))
    setattr(DistributedDataParallel, "register_comm_hook", _for_means(DistributedDataParallel.register_comm_hook))


def _load(optimizer: torch.optim.Optimizer, table: Table, state: Dict[str, Any], made: frugal.Optimizer) -> None:
    """The table takes in what an optimizer has loaded, or has had aside."""
    whole = dict.get(state, _STATE)
    if type(made) is frugal.SGD and (whole is None or whole.shape[-1]):
        return  # momentum's: as PyTorch's buffers, it stays as it is while a group's momentum is 0
    table.choose(made)
    parts = [state[name] for name in _theirs(optimizer)[1]] if whole is None else [whole]
    keys = dict.get(state, _KEYS)
    load = functools.partial(_state.load_moments, table, parts, None if keys is None else keys.view(torch.int64))
    _by_rank_0(table, load, "has loaded the", "load an optimizer's state_dict on all ranks")
    for name in _OF_ROWS.intersection(_here(state)):
        dict.__delitem__(state, name)


def _by_rank_0(table: Table, call: Callable[[], None], has: str, advice: str) -> None:
    """Gives the table other state. All ranks of torch.distributed come here, and rank 0 does it for them. What they
    push comes in the step after this one, which all of them end empty."""
    steps = table.steps
    if not _ranks.are_told(steps.rank, steps.world_size):
        call()
        return
    with steps.once(f"state of table {table.name!r}", has, advice):
        if steps.rank == 0:
            steps.patiently(call)


# Hyper-parameters


class _Hyper(NamedTuple):
    group: Dict[str, Any]
    step: int  # of the table under this optimizer, from 1
    name: str

    def number(self, key: str) -> float:
        return float(self.group[key])

    def refuse(self, *names: str) -> None:
        for name in names:
            if self.group.get(name):
                raise NotImplementedError(
                    f"{self.name}({name}={self.group[name]}): tables train without it: leave it out, or give the tables"
                    " an optimizer of their own, and this one the other parameters"
                )

    def common(self) -> Dict[str, Any]:
        self.refuse("differentiable")
        return {"grad_scale": -1.0 if self.group.get("maximize") else 1.0}


def _sgd(h: _Hyper) -> frugal.Optimizer:
    lr, l2 = h.number("lr"), h.number("weight_decay")
    if not h.number("momentum"):
        _warn_lazy(h, l2, "weight_decay")
        return frugal.SGD(lr=lr, weight_decay_l2=l2, **h.common())
    h.refuse("dampening")
    _warn_lazy(h, True, "momentum")
    return frugal.Momentum(
        lr=lr, weight_decay_l2=l2, momentum=h.number("momentum"), nesterov=bool(h.group["nesterov"]), **h.common()
    )


def _adagrad(h: _Hyper) -> frugal.Optimizer:
    _warn_lazy(h, h.number("weight_decay"), "weight_decay")
    return frugal.Adagrad(
        lr=h.number("lr") / (1.0 + (h.step - 1) * h.number("lr_decay")),
        weight_decay_l2=h.number("weight_decay"),
        eps=h.number("eps"),
        initial_accumulator=h.number("initial_accumulator_value"),
        **h.common(),
    )


def _adam(h: _Hyper) -> frugal.Optimizer:
    h.refuse("amsgrad")
    beta1, beta2 = (_float32(float(beta)) for beta in h.group["betas"])
    root = math.sqrt(1.0 - beta2**h.step)
    rate = h.number("lr") * root / (1.0 - beta1**h.step)
    sparse = "weight_decay" not in h.group  # SparseAdam: eps is added before the bias correction
    eps, decay, l2 = h.number("eps") if sparse else h.number("eps") * root, 0.0, 0.0
    if not sparse:
        _warn_lazy(h, True, "moments")
        if h.group.get("decoupled_weight_decay"):
            # PyTorch decays before the update, the engine after it.
            share = h.number("lr") * h.number("weight_decay")
            if share:
                if share >= 1.0:
                    raise NotImplementedError(f"{h.name}: lr x weight_decay is {share} and must be below 1")
                rate /= 1.0 - share
                decay = share / rate
        else:
            l2 = h.number("weight_decay")
    return frugal.Adam(
        lr=rate, eps=eps, beta1=beta1, beta2=beta2, weight_decay=decay, weight_decay_l2=l2, bias_correction=False,
        **h.common(),
    )  # fmt: skip


def _float32(value: float) -> float:
    """As the engine has it: its moments and their bias correction must mean the same number."""
    return ctypes.c_float(value).value


def adam_at(optimizer: frugal.Adam, step: int) -> frugal.Adam:
    """The same with its bias correction of this step, from 1, in the learning rate."""
    beta1, beta2 = _float32(optimizer.beta1), _float32(optimizer.beta2)
    rate = _float32(optimizer.lr) * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    decay = optimizer.weight_decay * optimizer.lr / rate if rate else 0.0
    return dataclasses.replace(optimizer, lr=rate, weight_decay=decay, bias_correction=False)


def _rmsprop(h: _Hyper) -> frugal.Optimizer:
    h.refuse("momentum", "centered")
    _warn_lazy(h, True, "the mean square")
    return frugal.RMSProp(
        lr=h.number("lr"),
        rho=h.number("alpha"),
        eps=h.number("eps"),
        weight_decay_l2=h.number("weight_decay"),
        **h.common(),
    )


_HAVE: Dict[Type[torch.optim.Optimizer], Callable[[_Hyper], frugal.Optimizer]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SparseAdam: _adam,
    torch.optim.RMSprop: _rmsprop,
}
_translators: "weakref.WeakKeyDictionary[type, Callable[[_Hyper], frugal.Optimizer]]" = weakref.WeakKeyDictionary()


def _translator(kind: Type[torch.optim.Optimizer]) -> Callable[[_Hyper], frugal.Optimizer]:
    """By the step that runs: a class that inherits one of these steps, or whose step calls it, is one of these."""
    found = _translators.get(kind)
    if found is None:
        step = inspect.unwrap(kind.step)
        for known, translator in _HAVE.items():
            if issubclass(kind, known) and inspect.unwrap(known.step) is step:
                found = translator
        if found is None and _delegates(kind):
            found = next((_HAVE[base] for base in kind.__mro__ if base in _HAVE), None)
        if found is None:
            raise NotImplementedError(
                f"{kind.__name__} cannot step a frugal table: those of {', '.join(k.__name__ for k in _HAVE)} can, and"
                " frugal.torch.Optimizer. Give the module's parameters to one of them"
            )
        _translators[kind] = found
    return found


_delegating: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()


def _delegates(kind: Type[torch.optim.Optimizer]) -> bool:
    """Whether the class's step is its own, and calls another: that of the class that it inherits from, or of an
    optimizer that it has. The other one then steps the tables, as often as it is called."""
    found = _delegating.get(kind)
    if found is None:
        step = inspect.unwrap(kind.step)
        own = not any(issubclass(kind, known) and inspect.unwrap(known.step) is step for known in _HAVE)
        found = _delegating[kind] = own and _calls_a_step(getattr(step, "__code__", None))
        if found:
            for base in kind.__mro__:
                if base in _HAVE:
                    _surround(base, hooked=False)
    return found


def _calls_a_step(code: Any) -> bool:
    inner = [const for const in getattr(code, "co_consts", ()) if inspect.iscode(const)]
    return "step" in getattr(code, "co_names", ()) or any(map(_calls_a_step, inner))


_warned: Set[Tuple[str, str]] = set()


def _warn_lazy(h: _Hyper, moves: float, what: str) -> None:
    """One warning of each optimizer that `moves` every row of a dense weight in every step, by `what`."""
    if moves and (h.name, what) not in _warned:
        _warned.add((h.name, what))
        warnings.warn(
            f"{h.name} with {what}: a frugal table's row changes in the steps that have a gradient of it, as with"
            " torch.optim.SparseAdam, and not in every step",
            stacklevel=2,
        )
