"""`module.weight`: a table's rows as a tensor that has no memory of its own."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, NoReturn, Optional, Sequence, Tuple, cast

import torch

from . import _default, _state
from ._anchor import (
    ACCUMULATED, NOT_ASKED, RETURNED, Anchor, AnchorOfRanks, Copied, broadcast, is_of_a_parameter, use_of,
)  # fmt: skip
from ._computed import (
    OF_TORCH, SHAPE, NoAnswer, OfGradient, call_with, each_of, flat, in_place, is_foreach, no_memory, refuse_memory,
    without_writes,
)  # fmt: skip
from ._gradient import Gradient
from ._lookup import held
from ._steps import Kept, Table

_CHUNK = 65536  # rows that are held at once where a table is written
_LEAST = 16  # and not fewer at the end: normal_() of a tensor with fewer elements draws other numbers

_HOW = (
    "use assignments (weight[ids] = rows), weight.copy_(), functions of torch.nn.init, or load_state_dict() to write"
    " rows, and the module's forward to train them"
)


def write(table: Table, source: torch.Tensor) -> None:
    """Makes `source` the table's rows, whose optimizer state stays."""
    if tuple(source.shape) != table.shape:
        raise ValueError(
            f"weight has shape {tuple(source.shape)}, the table {table.name!r} {table.shape}, which it keeps: make"
            " another module of the new shape, as by from_pretrained(weight, freeze=False)"
        )
    if isinstance(source, Weight):
        source = source.read()
    with table.by_all():
        _state.load_rows(table.steps, table, source, _state.keys(table) if table.hashed else None)


class _Read(torch.autograd.Function):
    """What a computation of `weight` begins with: rows of it, of these keys; None: all. Their gradient is the table's,
    as of a forward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, table: Table, rows: torch.Tensor, keys: Optional[torch.Tensor]
    ) -> torch.Tensor:
        ctx.table, ctx.keys = table, keys
        # The same memory, but no view, which PyTorch would not let be written.
        return rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        use, keys = use_of(ctx.next_functions[0][0]), ctx.keys
        if grad.is_sparse:  # as of another layer with sparse=True that is tied to the table
            grad = grad.coalesce()
            (rows,), grad = grad.indices(), grad.values()
            keys = rows if keys is None else keys.reshape(-1)[rows]
        if keys is None:  # of all rows of a dense table, each of which then has a gradient, as PyTorch's dense one
            keys = torch.arange(ctx.table.capacity, dtype=torch.int64, device="cpu")
        _hold(ctx.table, use, keys.reshape(-1), grad.reshape(-1, ctx.table.dim))
        # In the place of what is returned a hook puts the table's gradient, if there is something.
        return grad.new_zeros(SHAPE) if use == RETURNED else None, None, None, None


def _hold(table: Table, use: int, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """What a backward does with the gradient of rows of these keys."""
    anchor = table.anchor
    if use == NOT_ASKED or (use == ACCUMULATED and not anchor.requires_grad):
        return
    found = held(table, keys, grad)
    if torch.is_grad_enabled():  # create_graph=True
        found.graph, found.live = True, (keys, grad)
    if use == ACCUMULATED:
        anchor.hold(found, (0,))
    else:
        anchor.give(found, (0,), True)


_is_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_read: Callable[..., Any] = _Read.apply  # without types in torch


class Weight(Copied, torch.Tensor):
    """A table's rows. Nothing is read before something is computed; then what was asked for is copied."""

    _table: Table
    _at: Optional[torch.Tensor]  # which rows, None: all
    _detached: bool  # as `weight.data` is, or that of which a computation of the parameter is made
    _anchor: Anchor
    _counts = True  # whether a backward of what was computed of it finds out that rows were written since
    _left: Optional[torch.Tensor] = None  # of `data`: the rows, once the table has got others by an assignment to data

    @staticmethod
    def __new__(cls, table: Table, at: Optional[torch.Tensor] = None, detached: bool = False) -> "Weight":
        shape = table.shape if at is None else (at.numel(), table.dim)
        anchor = table.anchor
        requires_grad = anchor.requires_grad and not detached
        weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=anchor.dtype, device=table.device, requires_grad=requires_grad
        )
        # The error where memory is taken that it has not, as other.data = weight does without a call of anything here.
        refuse_memory(weight, no_memory(table.name))
        return weight

    def __init__(self, table: Table, at: Optional[torch.Tensor] = None, detached: bool = False) -> None:
        self._table = table
        self._anchor = table.anchor  # the table lives as long
        self._at = at
        self._detached = detached

    def parameter(self) -> torch.Tensor:
        """What a function of the parameter returns, which got this in its place."""
        return self if self._detached else self._anchor

    def read(self, at: Optional[torch.Tensor] = None) -> torch.Tensor:
        """A copy of the rows, or of those at these places."""
        if self._left is not None:
            return self._left.clone() if at is None else self._left[at]
        with self._table.steps.still():
            return self._rows(self._keys(at))

    def _rows(self, keys: Optional[torch.Tensor]) -> torch.Tensor:
        self._check_traced()
        table = self._table
        return _rows_of(table, keys).to(device=table.device, dtype=table.anchor.dtype)

    def _check_traced(self) -> None:
        if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting() or _default.in_fake_mode():
            raise RuntimeError(
                f"table {self._table.name!r}: weight cannot be traced or exported, since its rows are not in the"
                " program: make the module that is served of weight.clone()"
            )

    def _keys(self, at: Optional[torch.Tensor] = None) -> Optional[torch.Tensor]:
        """The keys of the rows, or of those at these places; None: all of a dense table."""
        keys = _state.keys(self._table) if self._table.hashed else None
        for places in (self._at, at):
            if places is not None:
                keys = places if keys is None else keys[places]
        return None if keys is None else keys.reshape(-1).contiguous()

    def change(self, function: Callable[[torch.Tensor, slice], Any], begins: bool = False) -> None:
        """Rows are what the function makes of them, some at a time. `begins`: where ranks make what they begin with,
        rank 0 makes it for all, and the others draw what it draws."""
        with self._table.uncounted(not self._counts):
            _change(self._table, self._keys(), function, not (begins and self._table.steps.follows()))

    # What a tensor has that must not be read in memory that is not there.

    @property
    def data(self) -> "Weight":
        weight = self.detach()
        weight._counts = False
        if self._at is None and self._left is None and not self._table.hashed:
            shown = self._table.shown
            shown.append(weakref.ref(weight, shown.remove))
        return weight

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, Weight) and value._table is self._table and value._at is self._at and value._left is None:
            return  # weight.data *= 2 has written already
        if self._at is not None:
            self.copy_(value)
            return
        with self._table.by_all(), self._table.uncounted(True):
            # As in PyTorch, the data of before has the rows of before.
            shown = [weight for reference in list(self._table.shown) if (weight := reference()) is not None]
            if shown:
                left = self.read()
                for weight in shown:
                    weight._left = left
            self._table.shown = []
            write(self._table, value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

    @property
    def requires_grad(self) -> bool:
        return not self._detached and self._anchor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and self._detached:
            raise NotImplementedError(
                f"table {self._table.name!r}: requires_grad of a detached weight is set, whose gradient would be the"
                " table's: requires_grad_() gives a leaf of its own"
            )

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        if is_of_a_parameter():
            return self.copy_as(Weight, requires_grad)
        if not requires_grad:
            return self
        source = self.source()  # for a leaf of its own, of the same rows
        with torch._C.DisableTorchFunctionSubclass():
            return _part(source.rows, source).requires_grad_(True)

    def copy_as(self, kind: type, requires_grad: bool = False) -> torch.Tensor:
        """The rows as a tensor of their own, of this class, for torch.nn.Parameter() or Buffer()."""
        leaf = self.read().requires_grad_(requires_grad)
        leaf.__class__ = kind  # as_subclass() would leave more
        return leaf

    def detach(self) -> "Weight":
        return Weight(self._table, self._at, True)

    def data_ptr(self) -> NoReturn:
        raise RuntimeError(no_memory(self._table.name))

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._left is not None:
            return self._left[index]
        self._check_traced()
        found = self._places(index)
        if found is None:
            source = self.source()
            return cast(torch.Tensor, shared(source.rows[index], [source]))
        at, rest, view = found
        with self._table.steps.still():
            keys = self._keys(at)
            values = self._rows(keys).view(*at.shape, self._table.dim)
        if torch.is_grad_enabled() and self.requires_grad:
            if keys is None:
                keys = at
            values = cast(torch.Tensor, _read(self._table.anchor, self._table, values, keys))
        out = values[(slice(None),) * at.dim() + rest] if rest else values
        if view:
            out = shared(out, [Source(self._table, keys, values, self)])
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._left is not None:
            self._left[index] = value
            return
        self._check_written()
        if isinstance(value, torch.Tensor):
            value = value.detach().to(device="cpu", dtype=torch.float32)
        with self._table.by_all(), self._table.steps.still(), torch.no_grad():
            found = self._places(index)
            if found is None:
                rows = self.read().to(device="cpu", dtype=torch.float32)
                rows[index] = value
                self.change(lambda some, where: some.copy_(rows[where]))
                return
            at, rest, _ = found
            part = Weight(self._table, at.reshape(-1), True)
            part._counts = self._counts
            if self._at is not None:
                part._at = self._at[at.reshape(-1)]
            new = part.read().to(device="cpu", dtype=torch.float32).view(*at.shape, self._table.dim)
            new[(slice(None),) * at.dim() + rest if rest else ...] = value
            flat = new.reshape(-1, self._table.dim)
            part.change(lambda some, where: some.copy_(flat[where]))

    def _places(self, index: Any) -> Optional[Tuple[torch.Tensor, Tuple[Any, ...], bool]]:
        """The rows of an index, what is left of it for their columns, and whether the result is a view; or None, where
        all rows have to be read to say."""
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(rows, (bool, tuple, type(None), type(...))) or not all(_is_basic(part) for part in rest):
            return None
        count = int(self.shape[0])
        if isinstance(rows, slice):
            begin, end, by = rows.indices(count)
            if by < 1:
                raise ValueError("step must be greater than zero")
            return torch.arange(begin, max(begin, end), by, dtype=torch.int64, device="cpu"), rest, True
        if isinstance(rows, list) and not all(isinstance(row, (bool, int)) for row in rows):
            return None
        try:
            at = torch.as_tensor(rows, device="cpu") if rows != [] else torch.zeros(0, dtype=torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            return None
        if at.dtype == torch.bool and at.shape == (count,):
            at = at.nonzero()[:, 0]
        elif at.dtype not in (torch.int64, torch.int32):
            return None
        return _wrapped(at.to(torch.int64), count), rest, at.dim() == 0

    def source(self) -> "Source":
        """All rows, for views of them."""
        with self._table.steps.still():
            keys = self._keys()
            rows = self._rows(keys)
        if torch.is_grad_enabled() and self.requires_grad:
            rows = _read(self._table.anchor, self._table, rows, keys)
        return Source(self._table, keys, rows, self)

    def as_it_was_read(self) -> torch.Tensor:
        """A view of all rows, of which no other operation has been recorded than that which read them."""
        source = self.source()
        view = source.rows
        if view.grad_fn is None:
            return cast(torch.Tensor, shared(view, [source]))
        source = Source(self._table, source.keys, view.detach(), self, source._kept)  # which does not keep the view
        view.__class__ = _Whole  # as_subclass() would be an operation
        cast(_Whole, view)._source = source
        return view

    def _check_written(self) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation: rows are"
                               " written under torch.no_grad(), or to weight.data")

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return cast(torch.Tensor, memo.setdefault(id(self), self.read()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"weight of the table {self._table.name!r}, {shape}: print weight.clone() or weight[ids] for its rows"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(isinstance(value, Weight) and value._left is not None for value in flat([*args, *kwargs.values()])):
            return call_with(_of_before, func, args, kwargs)
        name = getattr(func, "__name__", "")
        target = args[0] if args else None
        init = kwargs.get("tensor")
        if isinstance(init, Weight):  # torch.nn.init's
            return init._init(func, {key: value for key, value in kwargs.items() if key != "tensor"})
        if writes_each(func, target):
            return change_each(func, args, kwargs)
        if isinstance(target, (list, tuple)) and in_place(name) and any(isinstance(w, Weight) for w in target):
            return _change_whole(func, name, args, kwargs)
        if isinstance(target, Weight):
            if name == "copy_":
                return target._copy(args[1])
            if in_place(name) or (name.endswith("_") and not name.endswith("__")):
                return target._change_by(func, name, args[1:], kwargs)
            if name == "__set__":
                raise NotImplementedError(f"table {target._table.name!r}: weight cannot be set to that; {_HOW}")
            if getattr(func, "__module__", "").startswith("torch.distributed"):  # all_reduce(weight)
                raise NotImplementedError(
                    f"table {target._table.name!r}: {name} cannot write weight. Ranks that share a table have the same"
                    f" rows; {_HOW}"
                )
        if isinstance(kwargs.get("out"), Weight):
            return kwargs["out"]._become(func, args, {key: value for key, value in kwargs.items() if key != "out"})
        for weight in flat(args):
            if isinstance(weight, Weight) and name in _MEMORY:
                raise RuntimeError(no_memory(weight._table.name))
        read: List[Source] = []
        refresh(flat([*args, *kwargs.values()]))
        values, named = arguments(args, kwargs, read)
        with torch._C.DisableTorchFunctionSubclass():
            before = [source.version for source in read]
            out = func(*values, **named)
            for source, version in zip(read, before):
                if source.version != version:  # as by the max_norm of torch.nn.functional.embedding
                    source.after_write()
        return without_writes(out) if name in ("numpy", "__array__") else shared(out, read)

    def _copy(self, source: Any) -> "Weight":
        self._check_written()
        if isinstance(source, (Weight, _Part)):
            source = source.read() if isinstance(source, Weight) else source.plain()
        source = torch.as_tensor(source).detach().to("cpu").expand(self.shape)
        with self._table.by_all():
            self.change(lambda rows, part: rows.copy_(source[part]))
        return self

    def _become(self, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> "Weight":
        """Functions with the weight as `out`."""
        self._check_written()
        with self._table.by_all(), self._table.steps.still(), torch.no_grad():
            rows = self.read().to(device="cpu", dtype=torch.float32)
            func(*_here(args), out=rows, **dict(zip(kwargs, _here(tuple(kwargs.values())))))
            if tuple(rows.shape) != tuple(self.shape):
                raise NotImplementedError(
                    f"table {self._table.name!r}: {func.__name__} of weight, which has its shape: {_HOW}"
                )
            self.change(lambda some, part: some.copy_(rows[part]))
        return self

    def _init(self, func: Callable[..., Any], kwargs: Dict[str, Any]) -> "Weight":
        """Functions of torch.nn.init. They draw the numbers that a tensor of this dtype would get, on this device."""
        with self._table.by_all(), torch.no_grad():
            self.change(_drawn(func, kwargs, tuple(self.shape), self.dtype, self.device), True)
        return self

    def _change_by(
        self, func: Callable[..., Any], name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> "Weight":
        """Functions that write. What normal_(), mul_() and others do to an element by itself is done to some rows at a
        time."""
        self._check_written()
        if not in_place(name):
            raise NotImplementedError(f"table {self._table.name!r}: {name} of weight is not possible: {_HOW}")
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if name not in _ELEMENTWISE or any(value.numel() > 1 or isinstance(value, Gradient) for value in values):
            _change_whole(func, name, (self, *args), kwargs)
        else:
            with self._table.by_all():
                self.change(lambda rows, part: func(rows, *args, **kwargs), True)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is broadcast and all(w._table.steps.world_size > 1 for w in args[0] if isinstance(w, Weight)):
            # All ranks have these rows, and something must be sent.
            return func([w._anchor.value if isinstance(w, Weight) else w for w in args[0]], *args[1:], **(kwargs or {}))
        if func._schema.is_mutable and any(isinstance(value, Weight) for value in flat(args[:1])):
            raise NotImplementedError(f"weight cannot be written by {func}: {_HOW}")
        if func.overloadpacket is torch.ops.aten.set_:  # other.set_(weight)
            raise RuntimeError(no_memory(next(value for value in args if isinstance(value, Weight))._table.name))
        values, named = arguments(args, kwargs or {})
        return func(*values, **named)


def _rows_of(table: Table, keys: Optional[torch.Tensor]) -> torch.Tensor:
    """A copy of the rows of these keys, None: of all."""
    if keys is None:
        keys = _state.keys(table)
    rows = torch.empty(keys.numel(), table.dim, dtype=torch.float32, device="cpu")
    table.get(keys, rows, with_state=False)
    return rows


def _change(
    table: Table, keys: Optional[torch.Tensor], function: Callable[[torch.Tensor, slice], Any], writes: bool
) -> None:
    """Rows of these keys, None: of all, are what the function makes of them, some at a time. Their optimizer state
    stays."""
    count = table.capacity if keys is None else keys.numel()
    for part in _parts(count):
        some = torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu") if keys is None else keys[part]
        with table.steps.still():
            _change_rows(table, some, lambda rows, part=part: function(rows, part), writes)  # type: ignore[misc]


def _parts(count: int) -> Iterator[slice]:
    begin = 0
    while begin < count:
        end = begin + _CHUNK
        if count - end < _LEAST:
            end = count
        yield slice(begin, end)
        begin = end


def draw_nothing(table: Table) -> None:
    """Draws what the rows of a new table would be from torch's generator, as the rank does that gives them."""
    draw = _drawn(torch.nn.init.normal_, {}, (table.capacity, table.dim), table.anchor.dtype, table.device)
    for part in _parts(table.capacity):
        draw(torch.empty((part.stop - part.start, table.dim), dtype=torch.float32, device="cpu"), part)


def _drawn(
    func: Callable[..., Any], kwargs: Dict[str, Any], shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor, slice], Any]:
    """What a function of torch.nn.init makes of a tensor, for some rows at a time: on the CPU it draws them when they
    are asked for, if it may, and on a GPU all at once."""
    if device.type == "cpu" and func in _INIT_OF_ELEMENTS:
        return lambda rows, part: rows.copy_(func(rows.to(dtype), **kwargs))  # which may be the same rows
    try:
        all_rows = func(torch.empty(shape, dtype=dtype, device=device), **kwargs)
    except torch.cuda.OutOfMemoryError:  # a GPU's
        all_rows = func(torch.empty(shape, dtype=dtype, device="cpu"), **kwargs)
    return lambda rows, part: rows.copy_(all_rows[part])


def _change_rows(
    table: Table, keys: torch.Tensor, function: Callable[[torch.Tensor], Any], writes: bool = True
) -> None:
    """Rows are what the function makes of them; their optimizer state stays."""
    table.written = True
    both = torch.empty(keys.numel(), table.dim + table.state_floats, dtype=torch.float32, device="cpu")
    table.get(keys, both, with_state=True)
    rows = both[:, : table.dim].contiguous()
    function(rows)
    if not writes:
        return
    if table.state_floats:
        both[:, : table.dim] = rows
        rows = both
    table.put(keys, rows, with_state=table.state_floats > 0)


def _change_whole(func: Callable[..., Any], name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """A function writes to its first argument, a weight or a list in which some are: all rows at once."""
    weights = [weight for weight in flat(args[:1]) if isinstance(weight, Weight)]
    for weight in weights:
        weight._check_written()
    table = weights[0]._table
    with table.by_all(), table.steps.still(), torch.no_grad():
        rows = {id(weight): weight.read().to(device="cpu", dtype=torch.float32) for weight in weights}
        targets = [rows.get(id(value), value) for value in flat(args[:1])]
        first = targets if isinstance(args[0], (list, tuple)) else targets[0]
        out = func(first, *_here(args[1:]), **dict(zip(kwargs, _here(tuple(kwargs.values())))))
        for weight in weights:
            changed = rows[id(weight)]
            if tuple(changed.shape) != tuple(weight.shape):
                raise NotImplementedError(
                    f"table {weight._table.name!r}: {name} of weight, which has its shape: {_HOW}"
                )
            weight.change(lambda some, part, changed=changed: some.copy_(changed[part]))  # type: ignore[misc]
    return out


def writes_each(func: Callable[..., Any], targets: Any) -> bool:
    """Whether a function writes to each tensor of a list in which weights or gradients of tables are."""
    ours = is_foreach(func) and any(isinstance(tensor, (Anchor, Weight, OfGradient, View)) for tensor in targets)
    return ours and in_place(func.__name__) and each_of(func) is not None


def change_each(func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    """One tensor after another, as several may be of one table."""
    method: Any = each_of(func)
    for i, tensor in enumerate(args[0]):
        method(tensor, *[value[i] if isinstance(value, (list, tuple)) else value for value in args[1:]], **kwargs)


def _of_before(value: Any) -> Any:
    """The rows of before in the place of a weight that has such."""
    return value._left if isinstance(value, Weight) and value._left is not None else value


def _here(values: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """The values with what tensors and weights are among them where rows are changed."""
    out = []
    for value in _read_all(values):
        if isinstance(value, (list, tuple)):
            value = type(value)(_here(tuple(value)))
        out.append(value.to("cpu") if isinstance(value, torch.Tensor) else value)
    return tuple(out)


def _is_basic(index: Any) -> bool:
    """Whether it is an index of columns that makes a view."""
    return isinstance(index, (slice, type(None), type(...))) or (isinstance(index, int) and not isinstance(index, bool))


def _wrapped(at: torch.Tensor, count: int) -> torch.Tensor:
    if at.numel() and (int(at.min()) < -count or int(at.max()) >= count):
        raise IndexError(f"index out of range: weight has {count} rows")
    return torch.where(at < 0, at + count, at)


class Source:
    """Rows that were read of a table, for views of them."""

    __slots__ = ("table", "keys", "rows", "_weight", "_kept", "_read_at")

    def __init__(
        self,
        table: Table,
        keys: Optional[torch.Tensor],
        rows: torch.Tensor,
        weight: Optional[Weight] = None,
        kept: Optional[Kept] = None,
    ) -> None:
        self.table = table
        self.keys = keys  # None: all of a dense table
        self.rows = rows
        self._weight = weight  # of which they are a part, None: they are a copy
        self._kept = Kept(rows, table) if kept is None and weight is not None and weight._counts else kept
        self._read_at = self._now()

    def _now(self) -> Tuple[int, int]:
        return self.table.steps.next, self.table.written_at

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a tensor's attributes, as torch.distributed.checkpoint.async_save() makes, is of a tensor that is
        no table's."""

    def detached(self) -> "Source":
        """The same, for views that can be written though the weight requires a gradient."""
        return self if self._weight is None else Source(
            self.table, self.keys, self.rows, self._weight.data, self._kept
        )

    @property
    def version(self) -> int:
        """How often the rows have been written here."""
        if self.rows.is_inference():
            return 0
        return self.rows._version if self._kept is None else self._kept.version(self.rows)

    def before(self, writes: bool) -> None:
        """Comes before a use: a view of a weight shows rows as they are now, and what is written is made of these."""
        if writes and self._weight is not None:
            self._weight._check_written()
        if self._weight is None and self.table.is_gone():
            return
        if (writes or self._weight is not None) and (self._read_at != self._now() or self.table.steps.world_size > 1):
            now = _rows_of(self.table, self.keys).view(self.rows.shape).to(self.rows)
            with torch.no_grad():
                if not torch.equal(self.rows, now):  # a write would be one for backwards, too
                    self.rows.detach().copy_(now)
            self._read_at = self._now()

    def after_write(self) -> None:
        """The table's rows are what has become of these. Of a table that is gone they are a tensor like others."""
        if self._weight is None and self.table.is_gone():
            return
        rows = self.rows.detach().to(device="cpu", dtype=torch.float32).view(-1, self.table.dim)
        _change(self.table, self.keys, lambda some, where: some.copy_(rows[where]), True)
        self._read_at = self._now()


def arguments(
    args: Tuple[Any, ...], kwargs: Dict[str, Any], read: Optional[List[Source]] = None
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Those of a function of tensors with rows in the place of weights, which are noted in `read`."""
    with torch._C.DisableTorchFunctionSubclass():
        return _read_all(args, read), {key: _read_all((value,), read)[0] for key, value in kwargs.items()}


def refresh(values: Iterable[Any]) -> None:
    """Views and gradients among them have the values of now."""
    with torch._C.DisableTorchFunctionSubclass():
        for value in values:
            if isinstance(value, View):
                value.show()


def _read_all(values: Sequence[Any], read: Optional[List[Source]] = None) -> Tuple[Any, ...]:
    """The values with rows in the place of weights, which are noted in `read`."""
    out = []
    for value in values:
        if isinstance(value, Anchor):
            value = value.rows()
        if isinstance(value, Weight):
            source = value.source()
            if read is not None:
                read.append(source)
            value = source.rows
        elif isinstance(value, OfGradient):  # p.sub_(lr * p.grad)
            value = value.whole(NoAnswer("a function of a weight and a gradient"), False)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, (Anchor, Weight, OfGradient)) for v in value):
            value = type(value)(_read_all(value, read))
        out.append(value)
    return tuple(out)


class View(torch.Tensor):
    """A tensor in memory that was made of a table's rows, or of its gradient."""

    def show(self) -> None:
        """Has the values of now from here on."""
        raise NotImplementedError

    def plain(self) -> torch.Tensor:
        """The same memory, which is the table's no more."""
        self.show()
        return self.as_subclass(torch.Tensor)

    def __format__(self, form: str) -> str:
        return format(self.plain(), form)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.plain().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        rows = self.plain().detach()
        if rows.is_sparse or rows.nbytes != rows.untyped_storage().nbytes():
            rows = rows.clone()  # what is pickled is all of a storage
        return rows.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _Part(View):
    """A view of rows that were read, as weight[3], weight.t() or weight.flatten(), or a copy in a state_dict: a
    write to it is one to the table."""

    _source: Source

    def show(self) -> None:
        self._source.before(False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("out"), (Anchor, Weight, OfGradient)):
            return NotImplemented  # it is written in its own way
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        read: List[Source] = []
        args, kwargs = arguments(args, kwargs, read)  # with the graphs of weights
        first = args[0] if args else kwargs.get("tensor")  # the latter of torch.nn.init's functions
        targets = flat([kwargs.get("out"), first if in_place(name) else None])
        written = [part._source for part in targets if isinstance(part, _Part)]
        sources = [part._source for part in flat([*args, *kwargs.values()]) if isinstance(part, _Part)]
        if name == "__dlpack__" and sources:  # (by a storage torch.save() finds what shares memory)
            raise RuntimeError(no_memory(sources[0].table.name))
        with contextlib.ExitStack() as stack:
            if getattr(func, "__module__", "") == "torch.nn.init":
                stack.enter_context(torch.no_grad())
            for source in written:  # what is read, changed and written is one thing for other threads
                stack.enter_context(source.table.by_all())
                stack.enter_context(source.table.steps.still())
            for source in sources:
                source.before(source in written)
            with torch._C.DisableTorchFunctionSubclass():
                before = [source.version for source in sources]
                out = func(*args, **kwargs)
                for source, version in zip(sources, before):
                    if source in written or source.version != version:
                        source.after_write()
        if func in _DETACHES:
            sources = [source.detached() for source in sources]
        return without_writes(out) if name in ("numpy", "__array__") else shared(out, [*sources, *read])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())


def _references(value: Any) -> int:
    return sys.getrefcount(value)


class _Temporary:
    # In Python 3.12 a property of a function alone has other counts, once it is fast.
    references = property(functools.partial(_references))


_TEMPORARY: int = _Temporary().references  # to what is gone when the property is read


def _node_of(whole: Any) -> Any:
    """The node that made a tensor. One in Python goes with its tensor, so asking a temporary one returns another of the
    same parameter, which no backward can come to."""
    if sys.getrefcount(whole) > _TEMPORARY:
        return _tensor.grad_fn.__get__(whole)
    anchor = whole._source.table.anchor
    with torch._C.DisableTorchFunctionSubclass():
        return anchor.view_as(anchor).grad_fn


class _Whole(_Part):
    """All rows of a parameter, as parameter.expand_as(parameter) has them."""

    grad_fn = property(functools.partial(_node_of))


def shared(out: Any, sources: Sequence[Source]) -> Any:
    """The result of a function, as a _Part where it is a view of rows that were read."""
    if isinstance(out, (list, tuple)) and type(out) in (list, tuple):
        return type(out)(shared(part, sources) for part in out)
    if isinstance(out, _Part) and hasattr(out, "_source"):
        return out  # what was written
    if isinstance(out, torch.Tensor) and _is_wrapped(out):  # in a transform of torch.func, where nothing is written
        return out
    if isinstance(out, torch.Tensor) and not isinstance(out, Weight) and out.layout == torch.strided and out.numel():
        with torch._C.DisableTorchFunctionSubclass():
            address = out.untyped_storage().data_ptr()
            for source in sources:
                if source.rows.untyped_storage().data_ptr() == address:
                    return _part(out, source)
            return out.as_subclass(torch.Tensor) if isinstance(out, _Part) else out
    return out


def _part(tensor: torch.Tensor, source: Source) -> torch.Tensor:
    part = tensor.as_subclass(_Part)
    part._source = source
    return part


def saved(table: Table) -> Dict[str, torch.Tensor]:
    """What a state_dict has of a table. Its `weight` is a copy of the rows as they are. A write to it is one to the
    table, as with a state_dict of torch's modules."""
    found = _state.rows(table.steps, table)
    rows = found["weight"]
    if not table.empty and rows.numel():
        found["weight"] = _part(rows, Source(table, found.get("keys"), rows))
    return found


_INIT_OF_ELEMENTS = (torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.constant_)

# Elementwise, so that rows can be changed some at a time.
_ELEMENTWISE = {
    "abs_", "add_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "clip_", "div_", "erfinv_", "exponential_", "fill_",
    "floor_", "mul_", "nan_to_num_", "neg_", "normal_", "random_", "round_", "sub_", "uniform_", "zero_", "__iadd__",
    "__imul__", "__isub__", "__itruediv__",
}  # fmt: skip

# These give memory away, to which others write without a word.
_MEMORY = {"__dlpack__", "untyped_storage", "storage", "typed_storage", "_typed_storage"}

_DETACHES = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]

# Of these nothing is read.
_tensor: Any = torch.Tensor  # whose properties have types of their values
_PLAIN = {
    _tensor.shape.__get__, _tensor.dtype.__get__, _tensor.device.__get__, _tensor.layout.__get__,
    _tensor.requires_grad.__get__, _tensor.ndim.__get__, _tensor.is_cuda.__get__,
    _tensor.is_sparse.__get__, _tensor.is_meta.__get__, _tensor.is_quantized.__get__,
    _tensor.grad_fn.__get__, _tensor.names.__get__, _tensor._base.__get__,
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.__len__,
    torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.get_device,
    torch.Tensor.__hash__, torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel,
}  # fmt: skip


def _with_rows(base: Any) -> Callable[..., Any]:
    """What torch.autograd.Function.apply calls, which goes to C++ without a call of anything here. A Function has a
    gradient of rows, and C++ would sum it to one of the parameter's element. So it gets rows, and its writes to them
    are writes to the table."""

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if not _ANCHORS.isdisjoint(map(type, args)) and not kind.__module__.startswith(_OF_THE_ELEMENT):
            args = tuple([value[...] if type(value) in _ANCHORS else value for value in args])
        return super(base, kind).apply(*args, **kwargs)

    return apply


_ANCHORS = {Anchor, AnchorOfRanks}
_OF_THE_ELEMENT = (f"{__package__}.", *OF_TORCH)  # Functions that want it
_Function: Any = torch.autograd.function._SingleLevelFunction
setattr(_Function, "apply", classmethod(_with_rows(_Function)))
