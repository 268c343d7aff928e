"""A table's gradient as a tensor of all rows, for what is not computed of the gradient itself."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, cast

import torch

from ._anchor import Anchor
from ._computed import OfGradient, flat, in_place, without_writes
from ._gradient import Gradient, set_data
from ._lookup import held
from ._steps import Table
from ._weight import Source, View, Weight, arguments, change_each, shared, writes_each

_tensor: Any = torch.Tensor  # whose properties have types of their values


def all_of(gradient: Gradient) -> torch.Tensor:
    """All rows: a write to them is one to the gradient."""
    source = _Source(gradient)
    return _view(source.whole, source)


def take(anchor: Anchor, value: torch.Tensor) -> None:
    """The table's gradient is a tensor of a caller's from now on; one of before that was kept stays as it was."""
    shape = anchor.table.shape
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    if value is anchor:
        raise RuntimeError("can't assign Variable as its own grad")
    if tuple(value.shape) != shape:
        raise RuntimeError(f"assigned grad has data of a different size: {tuple(value.shape)}, not {shape}")
    if value.dtype != anchor.dtype:
        raise RuntimeError(f"assigned grad has data of a different type: {value.dtype}, not {anchor.dtype}")
    if isinstance(value, _View) and value._source.is_all(value):
        return  # p.grad += x has written already
    _check_written(anchor.table, "an assignment")
    gradient = of_rows(anchor, value, anchor.gradient())
    made = anchor.begin(Gradient(anchor))  # not one that a caller has kept
    anchor.grad = made
    made.become(gradient)


def copy(gradient: Gradient, value: torch.Tensor) -> None:
    """The gradient becomes this, which may be one element for all."""
    _check_written(gradient.table, "copy_")
    gradient.become(of_rows(gradient.table.anchor, value.detach().expand(gradient.table.shape), gradient))


def of_rows(anchor: Anchor, rows: torch.Tensor, before: Optional[Gradient]) -> Gradient:
    """A gradient of the rows that are not zero, and of those that had one before."""
    if isinstance(rows, OfGradient):  # what was computed of one
        rows = rows.values_of_all()
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if rows.is_sparse and rows.sparse_dim() > 1:
            rows = rows.to_dense()
        if rows.is_sparse:
            keys, values = rows._indices()[0], rows._values()
        else:
            there = (rows != 0).any(dim=1)
            if before is not None:
                there[before.per_key()[0]] = True
            keys = there.nonzero()[:, 0]
            values = rows[keys]
        return Gradient.of(anchor, held(anchor.table, keys, values), (0,))


class _View(View):
    """All of a gradient, and views of it: a write to it is one to the gradient."""

    _source: "_Source"  # of all of the gradient, whose memory this has

    def show(self) -> None:
        self._source.before(self, None)

    @property
    def data(self) -> torch.Tensor:
        return cast(torch.Tensor, _tensor.data.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        set_data(self, value)

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
        if args and writes_each(func, args[0]):
            return change_each(func, args, kwargs)
        name = getattr(func, "__name__", "")
        read: List[Source] = []
        args, kwargs = arguments(args, kwargs, read)  # with the graphs of weights
        targets = flat([kwargs.get("out"), *(args[:1] if in_place(name) else ())])
        written = [copy for copy in targets if isinstance(copy, _View)]
        copies = [copy for copy in flat([*args, *kwargs.values()]) if isinstance(copy, _View)]
        if name == "__dlpack__":
            raise RuntimeError(
                "a gradient gives no memory away, where a write would be lost: give DLPack a copy,"
                " weight.grad[...].clone()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for copy in copies:
                copy._source.before(copy, name if any(copy is one for one in written) else None)
            before = [copy.is_inference() or copy._version for copy in copies]
            out = func(*args, **kwargs)
            for copy, version in zip(copies, before):  # as by torch.nn.functional.relu(inplace=True), too
                if any(copy is one for one in written) or (not copy.is_inference() and copy._version != version):
                    copy._source.after_write(copy)
        sources = [copy._source for copy in copies]
        return without_writes(out) if name in ("numpy", "__array__") else shared(_views_of(out, sources), read)


class _Source:
    """A gradient as a tensor of all rows, for views of it."""

    __slots__ = ("gradient", "whole", "_read_at")

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.whole = _all_rows(gradient)
        self._read_at = self._now()

    def _now(self) -> Tuple[Any, ...]:
        gradient = self.gradient
        return gradient.clip_limit, *[(part.held, part.factor) for part in gradient.parts]

    def is_all(self, view: torch.Tensor) -> bool:
        """Whether the tensor is the table's gradient as it is, and no view of it."""
        with torch._C.DisableTorchFunctionSubclass():
            same = view.is_sparse or (view.shape == self.whole.shape and view.stride() == self.whole.stride())
        return same and self.gradient.table.anchor.grad is self.gradient

    def _whole(self, view: torch.Tensor) -> torch.Tensor:
        return view if view.is_sparse else self.whole  # a sparse tensor's memory is another one's when it is written

    def before(self, view: torch.Tensor, writes: Optional[str]) -> None:
        """Comes before a use: the tensor has what has been added since."""
        if writes is not None:
            _check_written(self.gradient.table, writes)
        now = self._now()
        if now == self._read_at:
            return
        whole = self._whole(view)
        if whole is not view and whole.is_sparse:
            if writes is not None:
                raise NotImplementedError(
                    f"table {self.gradient.table.name!r}: {writes} of values of its gradient, which has changed since:"
                    " take them anew"
                )
            return
        with torch.no_grad():
            whole.copy_(_all_rows(self.gradient))
        self._read_at = now

    def after_write(self, view: torch.Tensor) -> None:
        """The gradient is what has become of the tensor."""
        self.gradient.become(of_rows(self.gradient.table.anchor, self._whole(view), self.gradient))
        self._read_at = self._now()


def _all_rows(gradient: Gradient) -> torch.Tensor:
    """In the form that the module has said."""
    table = gradient.table
    if not table.anchor.sparse or table.hashed:
        return gradient.dense()
    dtype = table.anchor.dtype
    keys, rows = gradient.per_key() if dtype.itemsize >= 4 else gradient.summed()
    rows = rows.to(dtype)
    rows = rows.clone() if gradient.parts and rows is gradient.parts[0].held.grad else rows
    return torch.sparse_coo_tensor(keys[None], rows, table.shape, check_invariants=False)


def _check_written(table: Table, how: str) -> None:
    """Whether a gradient of all rows can be written. Ranks must scale it alike, which GradScaler does."""
    ranks = table.steps.world_size
    if ranks > 1 and how != "_amp_foreach_non_finite_check_and_unscale_":
        raise NotImplementedError(
            f"table {table.name!r}: {how} of its gradient, of which {ranks} ranks have a part each: scale it by a"
            " number"
        )
    if table.hashed:
        raise NotImplementedError(f"table {table.name!r}: {how} of the gradient of rows of a hashed table")


def _view(tensor: torch.Tensor, source: _Source) -> torch.Tensor:
    view = torch.Tensor._make_subclass(_View, tensor)
    view._source = source
    return view


def _views_of(out: Any, sources: Sequence[_Source]) -> Any:
    """The result of a function, as a _View where it has the memory of one."""
    if isinstance(out, (list, tuple)) and type(out) in (list, tuple):
        return type(out)(_views_of(part, sources) for part in out)
    if not isinstance(out, torch.Tensor) or hasattr(out, "_source"):  # what was written
        return out
    with torch._C.DisableTorchFunctionSubclass():
        for source in sources:
            if _address(out) == _address(source.whole) != 0:
                return _view(out, source)
        return out.as_subclass(torch.Tensor) if isinstance(out, _View) else out


def _address(tensor: torch.Tensor) -> int:
    """Of the memory of its values; 0: it has none."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
