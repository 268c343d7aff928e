"""The gradient of a table, as PyTorch sees it: a tensor of one element, which holds what backwards delivered.

It scales that when it is multiplied, and it computes a norm when it is asked for one. All else is computed of a
gradient of all rows.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, cast

import torch

from ._computed import (
    HASHED, REDUCED, SHAPE, TORCH, Computed, NoAnswer, OfGradient, check_whole, flat, has_more, is_number, is_of_torch,
    no_number, refuse_values,
)  # fmt: skip

if TYPE_CHECKING:
    from ._anchor import Anchor
    from ._lookup import Lookup
    from ._steps import Table

_aten = torch.ops.aten
graph_task: Callable[[], int] = torch._C._current_graph_task_id
_tensor: Any = torch.Tensor  # whose properties have types of their values
_LARGEST = torch.finfo(torch.float32).max

# Backwards that are held one by one; more of them are summed into one, so that memory is bounded by the table's rows.
_MOST_HELD = 64
_SMALL = 16384  # elements of a table that is small
_CHUNK = 65536  # keys whose gradients are spread from bags to keys at once

_is_asked_in_cpp: Callable[[], bool] = torch._C._is_torch_function_enabled  # inside an operator of this package

# In it an anchor is its element.
as_itself: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


class Held:
    """What one backward of a module delivered: the gradient of its output, and the keys of the forward."""

    __slots__ = ("lookup", "tensors", "grad", "number", "version", "graph", "live")

    def __init__(self, lookup: "Lookup", tensors: Sequence[Any], grad: torch.Tensor, number: int) -> None:
        self.lookup = lookup
        self.tensors = tensors
        self.grad = grad
        self.number = number  # backwards are pushed in their order
        self.version = grad._version
        self.graph = False  # whether PyTorch's gradients of this backward have one (create_graph=True)
        # Keys and gradients that have it, where they are known.
        self.live: Optional[Tuple[torch.Tensor, torch.Tensor]] = None

    def move(self, device: torch.device) -> None:
        """To another device, where the table's outputs are now."""
        changed = self.grad._version - self.version
        self.grad = self.grad.to(device)
        self.tensors = [None if tensor is None else tensor.to(device) for tensor in self.tensors]
        self.version = self.grad._version - changed

    def check(self) -> None:
        """An error, if the gradient was written since."""
        if self.grad._version != self.version:
            raise RuntimeError(
                "a gradient that a backward delivered was changed in place before the optimizer's step: give backward()"
                " a copy"
            )


def get_grad(anchor: "Anchor") -> Optional[torch.Tensor]:
    with as_itself():
        return cast(Optional[torch.Tensor], _tensor.grad.__get__(anchor))


def set_grad(anchor: "Anchor", value: Optional[torch.Tensor]) -> None:
    """For what is no caller's tensor."""
    with as_itself():
        _tensor.grad.__set__(anchor, value)


def set_data(grad: torch.Tensor, value: torch.Tensor) -> None:
    """The values of a gradient that is the table's are written: torch's own would give it other memory."""
    if value.shape != grad.shape:
        sizes = f"{tuple(value.shape)}, not {tuple(grad.shape)}"
        raise RuntimeError(f"data of a gradient is set to one of another size: {sizes}")
    with torch.no_grad():
        grad.copy_(value)


def is_distributed() -> bool:
    return False


if torch.distributed.is_available():
    is_distributed = torch.distributed.is_initialized


def is_shared(table: "Table") -> bool:
    """Whether ranks share the table's gradient, or may do so by a reducer."""
    return table.steps.world_size > 1 or is_distributed()


def is_of_a_bucket(value: Any, table: "Table") -> bool:
    """Whether this is what a reducer has put in the gradient's place. Of a table of one element it is a caller's:
    no caller has the reducer's."""
    return getattr(value, "shape", None) == SHAPE != table.shape


_NO_MEMORY = "the gradient of a table has no memory of its own: take module.weight.grad.to_dense()"


@functools.lru_cache(maxsize=None)
def _element(dtype: torch.dtype, device: torch.device, is_seen: bool) -> torch.Tensor:
    """That of all gradients. `is_seen`: a reducer checks whether it has the memory."""
    element = no_number(dtype, device)
    if not is_seen:
        refuse_values(element, _NO_MEMORY)
    return element


class Part:
    """Of one backward: which features of its module are the table's, and the factor of their gradients."""

    __slots__ = ("held", "features", "factor")

    def __init__(self, held: Held, features: Tuple[int, ...], factor: float) -> None:
        self.held = held
        self.features = features
        self.factor = factor


class Gradient(OfGradient):
    """A table's gradient since the last zero_grad(), as a tensor of one element in the anchor's place.

    To multiply it multiplies the rows' gradients. Its norm is that of the table's gradient. All else is
    computed of a tensor of all rows.
    """

    parts: List[Part]
    table: "Table"
    clip_limit: float  # of each element, 0: off; after the factors
    shown: Sequence["weakref.ref[Shown]"] = ()

    @staticmethod
    def __new__(cls, anchor: Anchor, dtype: Optional[torch.dtype] = None) -> "Gradient":
        return torch.Tensor._make_subclass(cls, _element(dtype or anchor.dtype, anchor.device, is_distributed()))

    def __init__(self, anchor: Anchor, dtype: Optional[torch.dtype] = None) -> None:
        self.table = anchor.table
        self.parts = []
        self.clip_limit = 0.0

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return cast(torch.Tensor, memo.setdefault(id(self), self.clone()))

    # A module with sparse=True has a sparse gradient for its user. PyTorch's own, as GradScaler, take it as it is.

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self._is_sparse() and not is_of_torch(names=TORCH)

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.sparse_coo if self._is_sparse() and not is_of_torch(names=TORCH) else torch.strided

    def is_shared(self) -> bool:
        return False

    def untyped_storage(self) -> Any:  # some of what a storage has ends the process, where there is no memory
        if is_of_torch():
            return super().untyped_storage()
        raise RuntimeError(_NO_MEMORY)

    def _typed_storage(self) -> Any:
        raise RuntimeError(_NO_MEMORY)

    def _is_sparse(self) -> bool:
        anchor = self.table.held_anchor()
        return anchor is not None and anchor.sparse and not self.table.hashed

    def values_of_all(self) -> torch.Tensor:
        return self.whole(NoAnswer(f"table {self.table.name!r}: the values of its gradient"), False)

    def whole(self, why: NoAnswer, writes: bool) -> torch.Tensor:
        table = self.table
        if table.hashed:
            raise why.because(HASHED)
        if writes and table.steps.world_size > 1:
            raise why.because(f"{table.steps.world_size} ranks have a part each")
        if torch.is_grad_enabled():
            live = None if writes else self.with_graph()
            if live is not None:
                return live
            self.check_graph("a computation")
        table.grad_read_at = table.steps.writes
        table.steps.tell_of_part(table.name)
        if table.held_anchor() is None and not writes:  # the module is gone, and with it whose gradient this is
            return self.dense()
        from ._dense import all_of

        return all_of(self)

    def with_graph(self) -> Optional[torch.Tensor]:
        """All rows, as PyTorch differentiates them, where backwards with create_graph=True were of computations of
        `weight` alone; or None."""
        graphs = [part.held.live is not None for part in self.parts if part.held.graph]
        if not graphs or not all(graphs) or self.clip_limit:
            return None
        out = torch.zeros(self.table.capacity, self.table.dim, dtype=self.dtype, device=self.device)
        for part in self.parts:
            for keys, rows in _spread(part) if part.held.live is None else [part.held.live]:
                rows = rows if part.factor == 1.0 else rows * part.factor
                out = out.index_add(0, keys.to(rows.device), rows.to(out.dtype))
        return out

    @classmethod
    def of(cls, anchor: Anchor, held: Held, features: Tuple[int, ...]) -> "Gradient":
        """That of one backward."""
        grad = cls(anchor)
        grad.parts.append(Part(held, features, 1.0))
        return grad

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        table = self.table
        if not table.hashed and table.steps.world_size == 1 and table.capacity * table.dim <= _SMALL:
            return repr(self.dense())
        return f"Gradient of the table {table.name!r}, {table.shape}, of {len(self.parts)} backwards"

    # torch's own would swap memory that this has not.

    @property
    def data(self) -> "Gradient":
        return Shown(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, Shown) and value.shows is self:
            return  # p.grad.data *= 2 has written already
        self.leave()
        for reference in list(self.shown):
            shown = reference()
            if shown is not None:
                shown.leave()
        set_data(self, value)

    def sizes(self) -> Tuple[int, ...]:
        return SHAPE if is_of_torch(3) else self.table.shape

    def hold(self, held: Held, features: Tuple[int, ...]) -> None:
        if self.clip_limit:
            self.fold()
        self.parts.append(Part(held, features, 1.0))
        if len(self.parts) > _MOST_HELD:
            self.table.warn_if_nobody_steps()
            self.fold()

    def origin(self) -> "Gradient":
        """Whose values it has."""
        return self

    def leave(self) -> None:
        """Has values of its own from here on."""

    def become(self, other: "Gradient") -> None:
        """Becomes as the other is."""
        self.clip_limit = other.clip_limit
        self.parts = [Part(part.held, part.features, part.factor) for part in other.parts]

    def fold(self, change: Optional[Callable[[torch.Tensor], Any]] = None) -> None:
        """Sums what is held into one gradient for each row, and clips it, if it is to be, and changes it."""
        if not self.parts:
            self.clip_limit = 0.0
            return
        keys, rows = self.summed()
        if change is not None:
            change(rows)
        last = self.parts[-1].held
        held = Held(last.lookup.rows_of(self.table), (keys, None, None), rows, last.number)
        held.graph = any(part.held.graph for part in self.parts)
        self.parts = [Part(held, (0,), 1.0)]
        self.clip_limit = 0.0

    def rescale(self, factor: float) -> None:
        """Multiplies the gradients of all backwards so far."""
        if factor == 1.0:
            return
        if self.clip_limit:
            self.fold()
        for part in self.parts:
            part.factor *= factor

    def common(self) -> float:
        """The factor of the newest backward, and as a rule of all. One that is no number is left to the rows, of which
        the engine names the first. Ranks may have different factors, and a table has one optimizer, so each of several
        ranks multiplies."""
        factor = self.parts[-1].factor if self.parts and self.table.steps.world_size == 1 else 1.0
        return factor if factor == 1.0 or math.isfinite(factor) else 1.0

    def scales(self) -> bool:
        """Whether its factors are finite: a GradScaler's are not where gradients were not."""
        return all(math.isfinite(part.factor) for part in self.parts)

    def finite(self) -> bool:
        """Whether there is no infinity and no NaN."""
        rows = self.large()
        return rows is None or bool(torch.isfinite(rows).all())

    def large(self) -> Optional[torch.Tensor]:
        """The sums of the gradients of each key, and a row of those without one, as PyTorch's dense gradient has them;
        None: they are finite, as nothing is large enough to be another sum."""
        if sum(map(_most, self.parts)) <= _LARGEST:  # not of a NaN
            return None
        each = [list(_spread(part)) for part in self.parts]
        keys = [some_keys for some in each for some_keys, _ in some] or [self.per_key()[0]]
        distinct, at = torch.unique(torch.cat(keys), return_inverse=True)
        places = iter(at.split([some_keys.numel() for some_keys in keys]))
        shape = min(distinct.numel() + 1, self.table.capacity), self.table.dim
        total = torch.zeros(shape, dtype=torch.float32, device=at.device)
        factors = [*[part.factor for part in self.parts], 1.0]
        for some, factor, after in zip(each, factors, factors[1:]):
            for _, rows in some:
                total.index_add_(0, next(places), rows)
            if factor != after:  # multiplied before the next backward
                total = (total.double() * (factor / after if after else math.nan)).float()
        return total.clamp_(-self.clip_limit, self.clip_limit) if self.clip_limit else total

    def per_key(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """All keys, and the gradient of each, not summed: a sparse gradient's indices and values."""
        keys, rows = [], []
        for part in self.parts:
            for some_keys, some_rows in _spread(part):
                keys.append(some_keys)
                rows.append(_times(some_rows, part.factor))
        if not keys:
            device = self.device
            return (
                torch.empty(0, dtype=torch.int64, device=device),
                torch.empty((0, self.table.dim), dtype=torch.float32, device=device),
            )
        at, values = (keys[0], rows[0]) if len(keys) == 1 else (torch.cat(keys), torch.cat(rows))
        if self.clip_limit:
            at, values = _sum(at, values)
            values.clamp_(-self.clip_limit, self.clip_limit)
        return at, values

    def summed(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Distinct keys, and the sum of the gradients of each."""
        return _sum(*self.per_key())

    def check_graph(self, func: Any) -> None:
        """An error, if a computation of it would be differentiated."""
        if any(part.held.graph for part in self.parts):
            raise NoAnswer(
                f"table {self.table.name!r}: {func} of a gradient of a backward with create_graph=True: a gradient of"
                " it is not possible. Leave frugal's parameters out of the penalty, or compute under torch.no_grad()"
            )

    def norm_of(self, order: float) -> torch.Tensor:
        if not order > 0.0:
            raise NoAnswer(f"table {self.table.name!r}: a norm of order {order} of a gradient")
        rows = self.sums("the norm")
        if not rows.numel():
            return torch.zeros((), dtype=torch.float32, device=self.device)
        norm: torch.Tensor = torch.linalg.vector_norm(rows, order)
        return norm

    def check_alone(self, what: str) -> None:
        """An error, if ranks share the gradient, of which `what` is wanted."""
        if self.table.steps.world_size > 1:
            raise NotImplementedError(
                f"table {self.table.name!r}: {what} of a gradient that {self.table.steps.world_size} ranks share is"
                " not known before the step ends; clip the parameters of the dense layers, and tables by clip_norm of"
                " a frugal optimizer"
            )

    def dense(self) -> torch.Tensor:
        """One of the table's shape."""
        table, dtype = self.table, self.dtype
        if table.hashed:
            raise NotImplementedError(f"table {table.name!r} is hashed: the gradient of its rows has no shape")
        # Sums are float32, for those of bfloat16 soon grow no more.
        keys, rows = self.per_key() if dtype.itemsize >= 4 else self.summed()
        out = torch.zeros(table.capacity, table.dim, dtype=dtype, device=rows.device)
        return out.index_add_(0, keys, rows.to(dtype))

    def elements(self, what: str) -> Computed:
        """Its elements, to make `what` of them."""
        self.check_alone(what)
        (keys, rows), table = self._sums(), self.table
        return Computed(rows.to(self.dtype), keys, None if table.hashed else table.capacity, table.name)

    def sums(self, what: str) -> torch.Tensor:
        """The sum of the gradients of each distinct key, to make `what` of it."""
        self.check_alone(what)
        return self._sums()[1]

    def _sums(self) -> Tuple[Optional[torch.Tensor], torch.Tensor]:
        """Keys, None: all, and the sum of the gradients of each."""
        keys, rows = self.per_key()
        table = self.table
        if not table.hashed and table.capacity * table.dim <= max(_SMALL, 4 * rows.numel()):
            # Rows of zeros add nothing, and to sort the keys would take longer.
            all_rows = torch.zeros(table.capacity, table.dim, dtype=torch.float32, device=rows.device)
            return None, all_rows.index_add_(0, keys, rows)
        return _sum(keys, rows)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        if not kwargs:
            answer = _DIRECT.get(func)
            if answer is not None and isinstance(args[0], Gradient):
                try:
                    return answer(*args)
                except NoAnswer:
                    pass
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        answer = _ANSWERS.get(func.overloadpacket)
        if answer is None or (answer not in (_share, _without_nan) and has_more(kwargs)):
            grad = next(a for a in flat([*args, *(kwargs or {}).values()]) if isinstance(a, Gradient))
            raise _no_answer(func, grad)
        if func.overloadpacket in _VALUES and torch.is_grad_enabled():
            for grad in flat(args):
                if isinstance(grad, Gradient):
                    grad.check_graph(func)
        return answer(func, *args, **(kwargs or {}))


def _no_answer(func: Any, grad: Gradient) -> NotImplementedError:
    if "c10d" in str(func):
        return NotImplementedError(
            f"table {grad.table.name!r}: {func} of its gradient: the engine adds up the gradients of a table's ranks in"
            " the step, so leave the table's parameter (module.weight) out of what is reduced"
        )
    return NoAnswer(f"table {grad.table.name!r}: {func} of its gradient{_BY_HAND if '_foreach_' in str(func) else ''}")


_BY_HAND = (
    " (for a step let torch.optim.SGD or the like make it, in the place of torch.optim.sgd.sgd(), or write to the rows,"
    " as module.weight.add_(module.weight.grad, alpha=-lr) under torch.no_grad())"
)


class Shown(Gradient):
    """What detach() and data of a gradient give: its values, and those of before once its data is assigned."""

    shows: Optional[Gradient]  # None: it has values of its own

    def __init__(self, of: Gradient) -> None:
        self.table = of.table
        self.show(of.origin())

    def show(self, of: Gradient) -> Gradient:
        self.shows = of
        shown = of.shown = list(of.shown)
        shown.append(weakref.ref(self, shown.remove))
        return of

    def origin(self) -> Gradient:
        return self if self.shows is None else self.shows

    def leave(self) -> None:
        of, self.shows = self.shows, None
        if of is not None:
            self.become(of)

    @property
    def parts(self) -> List[Part]:
        return self._parts if self.shows is None else self.shows.parts

    @parts.setter
    def parts(self, value: List[Part]) -> None:
        if self.shows is None:
            self._parts = value
        else:
            self.shows.parts = value

    @property
    def clip_limit(self) -> float:
        return self._clip_limit if self.shows is None else self.shows.clip_limit

    @clip_limit.setter
    def clip_limit(self, value: float) -> None:
        if self.shows is None:
            self._clip_limit = value
        else:
            self.shows.clip_limit = value


def _times(rows: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return rows
    if _LARGEST < abs(factor) < math.inf:
        return (rows.double() * factor).float()  # zeros stay zeros
    return rows * factor


def _sum(keys: torch.Tensor, rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    distinct, at = torch.unique(keys, return_inverse=True)
    out = torch.zeros(distinct.numel(), rows.shape[1], dtype=torch.float32, device=rows.device)
    return distinct, out.index_add_(0, at, rows)


def _spread(part: Part) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """The keys of a backward, and the gradient of each before it was multiplied, some at a time."""
    part.held.check()
    for feature in part.features:
        yield from part.held.lookup.spread(feature, part.held, _CHUNK)


def _most(part: Part) -> float:
    """What no sum of a backward's gradients of a key is above, before or after it is multiplied; NaN, if one may be."""
    held, total = part.held, 0.0
    largest = _magnitude(held.grad) * max(abs(part.factor), 1.0)
    for feature in part.features:
        keys, _, weights = held.tensors[3 * feature : 3 * feature + 3]
        total += largest * keys.numel() * (1.0 if weights is None else _magnitude(weights))
    return total if math.isfinite(part.factor) else math.nan


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value, in one pass without a copy; a NaN comes through."""
    return max([abs(bound.item()) for bound in torch.aminmax(tensor)]) if tensor.numel() else 0.0


# What PyTorch's calls return, by operator.


def _itself(func: Any, grad: Gradient, *args: Any, **kwargs: Any) -> Gradient:
    return grad


def _to(func: Any, grad: Gradient, *args: Any, **kwargs: Any) -> Gradient:
    """A conversion to a wider floating-point dtype, or none."""
    dtype = kwargs.get("dtype") or grad.dtype
    if dtype != grad.dtype and (not dtype.is_floating_point or dtype.itemsize <= grad.dtype.itemsize):
        raise _no_answer(func, grad)
    return _copy_of(func, grad, *args, **kwargs)


def _copy_of(func: Any, grad: Gradient, *args: Any, **kwargs: Any) -> Gradient:
    copied = Gradient.__new__(Gradient, grad, kwargs.get("dtype"))  # type: ignore[arg-type]
    copied.table = grad.table
    copied.become(grad)
    return copied


def add(func: Any, grad: Any, other: Any, *, alpha: Any = 1) -> Gradient:
    """As autograd does where a table's gradient comes from two forwards, or has come already."""
    if not isinstance(grad, Gradient) or not isinstance(other, Gradient):
        mine = grad if isinstance(grad, Gradient) else other
        if isinstance(other, torch.Tensor) and graph_task() >= 0:  # autograd adds it
            raise NoAnswer(*mine.table.anchor.penalty().args)  # or a hook, which gets a result
        raise NoAnswer(f"table {mine.table.name!r}: {func} of its gradient and something else{_BY_HAND}")
    if grad.table is not other.table or alpha != 1:
        raise NoAnswer(f"table {grad.table.name!r}: {func} of its gradient and another")
    total = grad if func.overloadpacket is _aten.add_ else _copy_of(func, grad)
    for clipped in (total, other):
        if clipped.clip_limit:
            clipped.fold()
    total.parts += [Part(part.held, part.features, part.factor) for part in other.parts]
    if len(total.parts) > _MOST_HELD:
        total.fold()
    return total


def _total(func: Any, grad: Gradient, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    check_whole(func, grad.table.name, dim)
    total = grad.sums("the sum").sum().to(dtype or grad.dtype)
    return total.reshape(SHAPE) if keepdim else total


def _mean(func: Any, grad: Gradient, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    if grad.table.hashed:
        raise _no_answer(func, grad)
    mean = _total(func, grad, dim, keepdim, dtype=torch.float64) / (grad.table.capacity * grad.table.dim)
    return mean.to(dtype or grad.dtype)


def _zero(func: Any, grad: Gradient) -> Gradient:
    grad.parts = []
    grad.clip_limit = 0.0
    return grad


def _fill(func: Any, grad: Gradient, value: Any) -> Gradient:
    if float(value) != 0.0:
        raise _no_answer(func, grad)
    return _zero(func, grad)


def _zero_all(func: Any, grads: List[torch.Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _factor_of(func: Any, grad: Gradient, by: Any) -> float:
    if not is_number(by):
        raise _no_answer(func, grad)
    value = float(by)
    if func.overloadpacket not in (_aten.div, _aten.div_, _aten._foreach_div_):
        return value
    return 1.0 / value if value else math.copysign(math.inf, value)


def _scale(func: Any, grad: Any, by: Any, **kwargs: Any) -> Any:
    if isinstance(by, Gradient) and isinstance(grad, Gradient):
        raise _no_answer(func, grad)
    if not isinstance(grad, Gradient):
        raise NoAnswer("a tensor cannot be scaled by the gradient of a table")
    grad.rescale(_factor_of(func, grad, by))
    return grad


def _scale_all(func: Any, grads: List[torch.Tensor], by: Any) -> None:
    each = list(by) if isinstance(by, (list, tuple)) else [by] * len(grads)
    # Before anything is done: it may not be possible.
    each = [_factor_of(func, g, f) if isinstance(g, Gradient) else f for g, f in zip(grads, each)]
    for grad, factor in zip(grads, each):
        if isinstance(grad, Gradient):
            grad.rescale(factor)
        elif func.overloadpacket is _aten._foreach_div_:
            grad.div_(factor)
        else:
            grad.mul_(factor)


def _unscale_all(func: Any, grads: List[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    others = [grad for grad in grads if not isinstance(grad, Gradient)]
    if others:
        func(others, found, inverse)
    for grad in grads:
        if isinstance(grad, Gradient):
            if not grad.finite():
                found.fill_(1.0)
            grad.rescale(float(inverse))


def _norm(
    func: Any, grad: Gradient, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    check_whole(func, grad.table.name, dim)
    norm = grad.norm_of(2.0 if order is None else float(order)).to(dtype or grad.dtype)
    return norm.reshape(SHAPE) if keepdim else norm


def _norms(func: Any, grads: List[torch.Tensor], order: Any = 2, dtype: Any = None) -> List[torch.Tensor]:
    return [
        grad.norm_of(float(order)).to(grad.dtype)
        if isinstance(grad, Gradient)
        else torch.linalg.vector_norm(grad, order, dtype=dtype)
        for grad in grads
    ]


class _Clipped(Held):
    """What a gradient that was clipped to other bounds than the engine's is. It is computed when it is wanted: as
    a rule another bound comes first, for `foreach` clips from below and then from above."""

    __slots__ = ("before", "least", "most")

    def __init__(self, before: Gradient, least: float, most: float) -> None:
        self.before: Optional[Gradient] = before  # until it is computed
        self.least, self.most = least, most

    def __getattr__(self, name: str) -> Any:
        before = self.before
        if before is None:
            raise AttributeError(name)
        before.fold(lambda rows: rows.clamp_(self.least, self.most))
        for each in Held.__slots__:
            setattr(self, each, getattr(before.parts[0].held, each))
        self.before = None
        return getattr(self, name)


def _clip(func: Any, grad: Gradient, low: Any = None, high: Any = None, **kwargs: Any) -> Gradient:
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    if any(isinstance(bound, torch.Tensor) and bound.numel() != 1 for bound in (low, high)):
        raise _no_answer(func, grad)
    least, most = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    if not least <= 0.0 <= most:
        raise NoAnswer(f"table {grad.table.name!r}: its gradient is clipped to [{least}, {most}], without 0")
    held = grad.parts[0].held if len(grad.parts) == 1 and grad.parts[0].factor == 1.0 and not grad.clip_limit else None
    if type(held) is _Clipped and held.before is not None:
        least, most = max(least, held.least), min(most, held.most)
        grad.become(held.before)
    if least == -most and most > 0.0:
        return grad if math.isinf(most) else _clip_to(grad, most)
    _check_clip(grad)
    if grad.parts:
        before = _copy_of(func, grad)
        grad.parts, grad.clip_limit = [Part(_Clipped(before, least, most), (0,), 1.0)], 0.0
    return grad


def _clipped(func: Any, grad: Gradient, *args: Any, **kwargs: Any) -> Gradient:
    return _clip(func, _copy_of(func, grad), *args, **kwargs)


def _check_clip(grad: Gradient) -> None:
    if grad.table.steps.world_size > 1:
        raise NotImplementedError(
            f"table {grad.table.name!r}: the gradient that {grad.table.steps.world_size} ranks share is not known"
            " before the step ends; tables are clipped by clip_value of a frugal optimizer"
        )


def _clip_to(grad: Gradient, limit: float) -> Gradient:
    _check_clip(grad)
    grad.clip_limit = min(limit, grad.clip_limit) if grad.clip_limit else limit
    return grad


def _clip_all(func: Any, grads: List[torch.Tensor], limit: Any) -> None:
    side = "min" if func.overloadpacket is _aten._foreach_clamp_min_ else "max"
    for grad, bound in zip(grads, limit if isinstance(limit, (list, tuple)) else [limit] * len(grads)):
        grad.clamp_(**{side: bound})


def _is(func: Any, grad: Gradient) -> torch.Tensor:
    """Whether each element is a number, or is none; `large` says of all of them without their sums."""
    table, finite = grad.table, func.overloadpacket is _aten.isfinite
    rows = None if table.hashed else table.capacity
    large = grad.large()
    if large is None:
        none = torch.empty((0, table.dim), dtype=torch.bool, device=grad.device)
        return Computed(none, torch.empty(0, dtype=torch.int64, device=grad.device), rows, table.name, finite)
    keys, sums = grad._sums()
    found, last = func(sums), func(large)
    if bool(last.all() if finite else last.any()) == bool(found.all() if finite else found.any()):
        return Computed(found, keys, rows, table.name, finite)
    # A factor that is no number makes one of rows without a gradient, too.
    return torch.full(table.shape, not finite, dtype=torch.bool, device=grad.device)


def _is_of_a_reducer(grad: Gradient, other: torch.Tensor) -> bool:
    """Whether a copy from or to a tensor is a reducer's. It copies in the backward, and where it orders its buckets
    anew. A caller copies after it, and by Python."""
    if other.numel() != 1 or not is_shared(grad.table):
        return False
    return graph_task() >= 0 or (other._base is not None and _is_asked_in_cpp())


def _for_a_reducer(grad: Gradient, to: torch.Tensor) -> float:
    """What DistributedDataParallel sums over ranks, in a place of one element. The engine sums the rows' gradients by
    itself, so that each rank gives 1, or an infinity, which all ranks see then."""
    if not _is_of_a_reducer(grad, to):
        raise NoAnswer(f"table {grad.table.name!r}: a copy of its gradient's values")
    if grad.table.steps.world_size == 1 and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            f"table {grad.table.name!r}: its engine has one rank and torch.distributed"
            f" {torch.distributed.get_world_size()}, so that its gradients would not be averaged: start"
            " frugal-controller ADDRESS, give the address in FRUGAL_SERVICE, and make modules after"
            " torch.distributed.init_process_group()"
        )
    return 1.0 if grad.finite() else math.inf


def of_a_reducer(table: "Table", answer: float) -> float:
    """The factor that a reducer's element is: an infinity of some rank, or what a communication hook has multiplied by.
    Ranks whose graph does not use the table have given 0 for the 1 of others: the engine's mean is over all ranks."""
    ranks = answer * table.steps.world_size
    if 0.5 < ranks < table.steps.world_size + 0.5 and abs(ranks - round(ranks)) < 0.01:
        return 1.0
    return answer


def _share(func: Any, grad: Any, by: Any, *, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    if isinstance(grad, Gradient) and isinstance(by, Gradient):
        if grad is not by or func.overloadpacket is not _aten.mul or out is not None:
            raise _no_answer(func, grad)
        if torch.is_grad_enabled():
            grad.check_graph(func)
        return _of_elements(_aten.pow.Tensor_Scalar, grad, 2)
    if out is None:  # grad * 0.5, which may become the anchor's
        grad, by = (grad, by) if isinstance(grad, Gradient) else (by, grad)
        scaled = _copy_of(func, grad)
        scaled.rescale(_factor_of(func, grad, by))
        return scaled
    if not isinstance(grad, Gradient):
        raise NoAnswer("a tensor cannot be scaled by the gradient of a table")
    return out.fill_(_for_a_reducer(grad, out) * float(by))


def _negative(func: Any, grad: Gradient) -> Gradient:
    out = grad if func.overloadpacket is _aten.neg_ else _copy_of(func, grad)
    out.rescale(-1.0)
    return out


def _copy(func: Any, to: Any, source: torch.Tensor, *args: Any) -> Any:
    if isinstance(to, Gradient):
        to = to.origin()
        if isinstance(source, Gradient):
            if source.table is not to.table:
                raise NoAnswer("the gradient of a table cannot be copied into that of another")
            if source.origin() is not to:
                to.become(source)
            return to
        if not _is_of_a_reducer(to, source):
            if get_grad(to.table.anchor) is not to:
                raise _no_answer(func, to)
            from ._dense import copy

            copy(to, source)
            return to
        to.rescale(of_a_reducer(to.table, float(source)))
        return to
    return to.fill_(_for_a_reducer(cast(Gradient, source), to))


def _scaled(func: Any, grad: Any, by: Any, **kwargs: Any) -> torch.Tensor:
    if not isinstance(grad, Gradient) or kwargs:
        raise NoAnswer("a tensor cannot be divided by the gradient of a table")
    return _share(func, grad, by)


def _value(func: Any, grad: Gradient) -> Any:
    raise RuntimeError(
        f"table {grad.table.name!r}: its gradient, of {grad.numel()} elements, is no number: take its norm"
    )


def _of_elements(func: Any, grad: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not isinstance(grad, Gradient):
        raise NoAnswer(f"{func} of a number and the gradient of a table")
    found: torch.Tensor = REDUCED[func.overloadpacket](func, grad.elements(str(func)), *args, **kwargs)
    return found


def _without_nan(func: Any, grad: Gradient, *values: Any, out: Optional[torch.Tensor] = None, **named: Any) -> Gradient:
    """nan_to_num: of the sum of all backwards, as PyTorch's gradient is."""
    grad.check_alone("the values")
    if out is not None and not (isinstance(out, Gradient) and out.table is grad.table):
        raise _no_answer(func, grad)
    changed = grad if func.overloadpacket is _aten.nan_to_num_ or out is grad else _copy_of(func, grad)
    if not grad.finite():
        changed.fold(lambda rows: rows.nan_to_num_(*values, **named))
    if isinstance(out, Gradient) and out is not grad:
        out.become(changed)
    return changed if out is None else out


def _zeros(func: Any, grad: Gradient, *, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(grad.shape, dtype=dtype or grad.dtype, device=grad.device)


_ANSWERS: Dict[Any, Callable[..., Any]] = {
    _aten.detach: _itself,
    _aten.detach_: _itself,
    _aten.alias: _itself,
    _aten.add: add,
    _aten.add_: add,
    _aten.sum: _total,
    _aten.mean: _mean,
    _aten.clone: _copy_of,
    _aten._to_copy: _to,
    _aten.zero_: _zero,
    _aten.fill_: _fill,
    _aten._foreach_zero_: _zero_all,
    _aten.mul_: _scale,
    _aten.div_: _scale,
    _aten._foreach_mul_: _scale_all,
    _aten._foreach_div_: _scale_all,
    _aten._amp_foreach_non_finite_check_and_unscale_: _unscale_all,
    _aten.linalg_vector_norm: _norm,
    _aten.norm: _norm,
    _aten._foreach_norm: _norms,
    _aten.clamp_: _clip,
    _aten.clamp: _clipped,
    _aten._foreach_clamp_min_: _clip_all,
    _aten._foreach_clamp_max_: _clip_all,
    _aten.isnan: _is,
    _aten.isinf: _is,
    _aten.isfinite: _is,
    _aten.div: _scaled,
    _aten.mul: _share,
    _aten.neg: _negative,
    _aten.neg_: _negative,
    _aten.copy_: _copy,
    _aten._local_scalar_dense: _value,
    _aten.nan_to_num: _without_nan,
    _aten.nan_to_num_: _without_nan,
    _aten.zeros_like: _zeros,
    **dict.fromkeys(REDUCED, _of_elements),
}

# Of these a computation can go on that PyTorch would differentiate.
_VALUES = {_aten.sum, _aten.mean, _aten.linalg_vector_norm, _aten.norm, _aten._foreach_norm, *REDUCED}


def _norm_of(grad: Gradient, *args: Any) -> torch.Tensor:
    if torch.is_grad_enabled():
        grad.check_graph(_aten.linalg_vector_norm)
    return _norm(_aten.linalg_vector_norm, grad, *args)


# What clipping asks of each gradient, without the way through PyTorch's dispatcher; and what is made of operators that
# want values.
_DIRECT: Dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm_of,
    torch.Tensor.detach: Shown,
    torch.detach: Shown,
    torch.Tensor.mul_: functools.partial(_scale, _aten.mul_.Tensor),
    torch.isfinite: functools.partial(_is, _aten.isfinite.default),
    torch.Tensor.isfinite: functools.partial(_is, _aten.isfinite.default),
}
