"""What is computed of each element of a table's gradient, as by loggers: absolute values, squares, their mean."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import torch

_aten = torch.ops.aten

SHAPE = (1, 1)  # of an anchor: a matrix, as a table is, where parameters are chosen by their dimensions


def no_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The element that stands for something."""
    return torch.full(SHAPE, math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


_INPLACE = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
_NO_VALUES = {"requires_grad_", "rename_", "share_memory_", "detach_"}


def in_place(name: str) -> bool:
    """Whether a function of tensors with this name writes to its first argument."""
    return name in _INPLACE or (name.endswith("_") and not name.endswith("__") and name not in _NO_VALUES)


def flat(values: Sequence[Any]) -> Iterator[Any]:
    """The arguments of a function of tensors, and in the place of a list what is in it."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_FOREACH = "_foreach_"


def is_foreach(func: Callable[..., Any]) -> bool:
    """Whether a function takes lists of tensors, and does the same to each."""
    return getattr(func, "__name__", "").startswith(_FOREACH)


def each_of(func: Callable[..., Any]) -> Optional[Callable[..., Any]]:
    """What a function of lists that writes to the first does to each of its tensors; None: there is no such method."""
    name = func.__name__[len(_FOREACH) :]
    method = getattr(torch.Tensor, name, None) if is_foreach(func) else None
    if method is None or name not in ("addcmul_", "addcdiv_"):
        return method
    return lambda tensor, one, other, value=1: method(tensor, one, other, value=value)


def call_with(
    change: Callable[[Any], Any], func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Any:
    """Calls a function of tensors with what `change` makes of each argument, and of what is in a list."""

    def changed(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return change(value)
        each = [changed(one) for one in value]
        return value if all(map(operator.is_, each, value)) else type(value)(each)

    return func(*map(changed, args), **{name: changed(value) for name, value in kwargs.items()})


# Where PyTorch makes state of parameters, sends them from rank to rank, or compiles: of the rows the engine does that.
# The rest of it gets rows, as averages of models and functional_call do.
OF_TORCH = (
    # optimizers
    *{getattr(kind, "__init__").__module__ for kind in vars(torch.optim).values() if isinstance(kind, type)},
    "torch.distributed.utils", "torch.distributed.checkpoint.state_dict", "torch.distributed.nn.",
    "torch.distributed.optim.apply_optimizer_in_backward",
    "torch.nn.parallel.", "torch._dynamo", "torch._subclasses", "torch.fx.",
    *["torch._functorch." + name for name in (
        "_aot_autograd", "aot_autograd", "apis", "autograd_function", "compile_utils", "compilers", "eager_transforms",
        "partitioners", "predispatch", "pyfunctorch",
    )],
)  # fmt: skip

TRANSFORM = (
    "a transform of torch.func of a function of the parameter, whose rows the engine has: give it a tensor of them,"
    " module.weight.clone()"
)
_SHARD = (
    "ranks share its rows, of which each would get a part: leave the parameter out, as by"
    " fully_shard(model, ignored_params=set(module.parameters()))"
)
# Where PyTorch would do something to the parameter for which a table is of no use, and what is to be done instead.
_REFUSED = {
    "torch._functorch.vmap": TRANSFORM,  # it asks for a dimension, and then makes batches of the element in C++
    "torch.distributed.fsdp.": _SHARD,
    "torch.distributed.tensor": _SHARD,
    "torch.distributed.algorithms.model_averaging.": (
        "ranks share its rows, and the step averages their gradients, so that there is nothing to average: leave the"
        " parameter out, as by an optimizer of its own for tables"
    ),
}


def refusal() -> Optional[str]:
    """What is said to the caller's caller, if it is there."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return next((why for module, why in _REFUSED.items() if name.startswith(module)), None)


TORCH = ("torch.",)  # all of it


def is_of_torch(depth: int = 2, names: Tuple[str, ...] = OF_TORCH) -> bool:
    """Whether the caller's caller, or a function so many calls above, is there, and wants the element."""
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.startswith(names)


def has_more(kwargs: Optional[Dict[str, Any]]) -> bool:
    """Whether a function is to write to another tensor, or to round, which the short functions here do not."""
    return kwargs is not None and ("out" in kwargs or "rounding_mode" in kwargs)


_set_message: Any = getattr(torch._C, "_set_storage_access_error_msg", None)  # which older ones have not


def refuse_memory(tensor: torch.Tensor, message: str) -> None:
    """The error where memory is taken that the tensor has not."""
    if _set_message is not None:
        _set_message(tensor, message)


_set_data_message: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)  # which older ones have not


def refuse_values(tensor: torch.Tensor, message: str) -> None:
    """The error where the tensor's memory is read or written. It has one: an operation in C++ may ask which tensors
    share it."""
    if _set_data_message is not None:
        with torch._C.DisableTorchFunctionSubclass():
            _set_data_message(tensor.untyped_storage()._cdata, message)


def no_memory(table: str) -> str:
    return (
        f"table {table!r}: weight has no memory of its own, as a tensor's data, a storage, DLPack, torch.tensor(), a"
        " transform of torch.func and an extension want it: give a copy, module.weight.clone(), or"
        " module.weight.detach().clone()"
    )


def without_writes(array: Any) -> Any:
    """NumPy's view of what is read: a write to it would be lost."""
    flags = getattr(array, "flags", None)
    if flags is not None:
        flags.writeable = False
    return array


class NoAnswer(NotImplementedError):
    """Of what can be computed of a gradient of all rows alone."""

    def because(self, reason: str) -> NotImplementedError:
        """The error, where there is no such gradient, either."""
        return NotImplementedError(f"{self}, which takes a tensor of all rows: {reason}")


HASHED = "a hashed table has none, but sums, norms and scaling of its gradient are possible"


class OfGradient(torch.Tensor):
    """A table's gradient, or something of each of its elements, as a tensor of one element in its place. What is
    computed of it is computed of the rows that have a gradient, or else of a tensor of all rows."""

    # In Python it has its rows' shape.

    def sizes(self) -> Tuple[int, ...]:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.sizes())

    def size(self, dim: Optional[int] = None) -> Any:
        sizes = torch.Size(self.sizes())
        return sizes if dim is None else sizes[dim]

    def numel(self) -> int:
        return math.prod(self.sizes())

    nelement = numel

    def __len__(self) -> int:
        return self.sizes()[0]

    # torch's own are for no class but its own. They have all rows, as a copy.

    def values_of_all(self) -> torch.Tensor:
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        return without_writes(self.values_of_all().numpy(force=force))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        return self.values_of_all().tolist()

    def as_subclass(self, cls: Any) -> Any:
        return self.values_of_all().as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values_of_all().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def whole(self, why: NoAnswer, writes: bool) -> torch.Tensor:
        """All rows, for a function that has no other result, and writes to them or not. Or else the error."""
        raise why

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if is_foreach(func) and not all(issubclass(other, OfGradient) for other in types):
            return NotImplemented  # weights among them are written in their own way
        try:
            by_size = func in _BY_SIZE or "sparse" in name
            if func in _BUCKETS or (by_size and not is_of_torch(3)):  # who calls a subclass's
                raise NoAnswer(f"{name} of the gradient of a table")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except NoAnswer as error:
            why = error
        written = list(flat([kwargs.get("out"), *(args[:1] if in_place(name) else ())]))

        def of_all(value: Any) -> Any:
            return value.whole(why, any(value is one for one in written)) if isinstance(value, OfGradient) else value

        return call_with(of_all, func, args, kwargs)


# They read the size or the layout of the one element before they ask for anything.
_tensor: Any = torch.Tensor  # whose properties have types of their values
_BY_SIZE = {
    *[getattr(_tensor, name) for name in (
        "__getitem__", "__setitem__", "__iter__", "narrow", "stride", "is_contiguous", "expand", "expand_as", "reshape",
        "flatten", "coalesce", "is_coalesced", "indices", "values", "_indices", "_values", "_nnz", "sparse_dim",
        "dense_dim", "to_dense", "sparse_mask", "__dlpack__",
    )],
    *[getattr(_tensor, name) for name in ("view_as", "reshape_as", "unflatten")],
    *[getattr(_tensor, name).__get__ for name in ("nbytes", "T", "mT")],
    torch.narrow, torch.reshape, torch.flatten, torch.numel, torch.Tensor.size, torch.Tensor.numel,
}  # fmt: skip


# PyTorch's own ask for the size, too, in buckets of gradients.
_BUCKETS = {torch._C._nn.flatten_dense_tensors, torch._C._nn.unflatten_dense_tensors}


class Computed(OfGradient):
    """Something of each element of a gradient. Sums, means and the like of it are tensors like others."""

    some: torch.Tensor  # of the rows that have a gradient
    keys: Optional[torch.Tensor]  # of these rows, None: they are all; those of others are 0
    rows: Optional[int]  # of the table, None: as many as a hashed table may have
    table: str
    rest: bool  # what others are: 0, or true

    @staticmethod
    def __new__(
        cls, values: torch.Tensor, keys: Optional[torch.Tensor], rows: Optional[int], table: str, rest: bool = False
    ) -> "Computed":
        return torch.Tensor._make_wrapper_subclass(cls, SHAPE, dtype=values.dtype, device=values.device)

    def __init__(
        self, values: torch.Tensor, keys: Optional[torch.Tensor], rows: Optional[int], table: str, rest: bool = False
    ) -> None:
        self.some, self.keys, self.rows, self.table, self.rest = values, keys, rows, table, rest
        # The error where memory is taken that it has not, as other.data = computed does without a call of anything
        # here.
        why = f"table {table!r}: what is computed of its gradient has no memory of its own: take [...] of it"
        refuse_memory(self, why)

    def sizes(self) -> Tuple[int, ...]:
        rows, columns = self.some.shape
        return rows if self.rows is None else self.rows, columns

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Computed of the gradient of table {self.table!r}"

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Computed":
        return _copied(None, self)

    def values_of_all(self) -> torch.Tensor:
        return self.whole(NoAnswer(f"table {self.table!r}: all values of what was computed of its gradient"), False)

    def whole(self, why: NoAnswer, writes: bool) -> torch.Tensor:
        if self.rows is None:
            raise why.because(HASHED)
        if self.keys is not None:  # from here on it has all rows, of which there may be views
            all_rows = torch.full(self.sizes(), self.rest, dtype=self.some.dtype, device=self.some.device)
            self.some, self.keys, self.rest = all_rows.index_copy_(0, self.keys, self.some), None, False
        return self.some

    def count(self, what: str) -> int:
        """How many elements there are."""
        if self.rows is None:
            raise NotImplementedError(
                f"table {self.table!r}: {what} of a gradient's elements, of which a hashed table has no number: take"
                " their sum, their norm or their largest"
            )
        return self.numel()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        if func in (torch.isfinite, torch.Tensor.isfinite):  # which is made of operators that want values
            computed = args[0]
            return Computed(torch.isfinite(computed.some), computed.keys, computed.rows, computed.table, True)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        computed = args[0]
        answer = _ANSWERS.get(func.overloadpacket)
        if isinstance(computed, Computed) and computed.rest and answer not in (_any, _all):
            answer = None
        if answer is None or not isinstance(computed, Computed) or has_more(kwargs):
            raise NoAnswer(f"{func} of what was computed of a table's gradient")
        return answer(func, computed, *args[1:], **(kwargs or {}))


def check_whole(func: Any, table: str, dim: Any, keepdim: bool = False) -> None:
    if keepdim:
        raise NoAnswer(f"table {table!r}: {func} of its gradient with keepdim")
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if dims and sorted(each % len(SHAPE) for each in dims) != [0, 1]:
        raise NoAnswer(f"table {table!r}: {func} of its gradient in dimension {dim}")


def is_number(by: Any) -> bool:
    """Whether a factor is one for all elements. (An anchor, which is a Parameter, has one element here.)"""
    if not isinstance(by, torch.Tensor):
        return True
    return by.numel() == 1 and not isinstance(by, (OfGradient, torch.nn.Parameter))


def _each(func: Any, computed: Computed, *args: Any, **kwargs: Any) -> Computed:
    """Of each element, by a function by which 0 stays 0."""
    return Computed(func(computed.some, *args, **kwargs), computed.keys, computed.rows, computed.table)


def _power(func: Any, computed: Computed, exponent: Any) -> Computed:
    if not float(exponent) > 0.0:
        raise NoAnswer(f"table {computed.table!r}: power {exponent} of its gradient, most of which is 0")
    return _each(func, computed, exponent)


def _scaled(func: Any, computed: Computed, by: Any) -> Computed:
    if not is_number(by):
        raise NoAnswer(f"table {computed.table!r}: {func} of its gradient and a tensor")
    return _each(func, computed, float(by))


def _any(func: Any, computed: Computed, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    check_whole(func, computed.table, dim, keepdim)
    found = computed.some.any()
    return torch.full_like(found, True) if computed.rest and computed.keys is not None else found


def _all(func: Any, computed: Computed, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    check_whole(func, computed.table, dim, keepdim)
    return computed.some.all() if computed.rest or computed.keys is None else torch.zeros_like(computed.some.all())


def _itself(func: Any, computed: Computed, *args: Any, **kwargs: Any) -> Computed:
    return computed


def _copied(func: Any, computed: Computed, *args: Any, **kwargs: Any) -> Computed:
    return Computed(computed.some.clone(), computed.keys, computed.rows, computed.table, computed.rest)


def _sum(func: Any, computed: Computed, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    check_whole(func, computed.table, dim, keepdim)
    return computed.some.sum(dtype=dtype)


def _mean(func: Any, computed: Computed, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    mean = _sum(func, computed, dim, keepdim, dtype=torch.float64) / computed.count("the mean")
    return mean.to(dtype or computed.some.dtype)


def _extreme(func: Any, computed: Computed, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    check_whole(func, computed.table, dim, keepdim)
    some = computed.some.reshape(-1)
    if computed.keys is not None:
        some = torch.cat([some, some.new_zeros(1)])
    found: torch.Tensor = some.amax() if func.overloadpacket in (_aten.max, _aten.amax) else some.amin()
    return found


def _variance(
    func: Any, computed: Computed, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
    correction: Any = None,
) -> torch.Tensor:
    if isinstance(dim, bool):  # the form without a dimension
        dim, unbiased = None, dim
    check_whole(func, computed.table, dim, keepdim)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    count, values = computed.count("the variance"), computed.some.to(torch.float64)
    mean = values.sum() / count
    squares = (values - mean).square_().sum() + (count - values.numel()) * mean**2
    found: torch.Tensor = squares / max(count - correction, 0)
    return (found if func.overloadpacket is _aten.var else found.sqrt()).to(computed.some.dtype)


def _nonzero(func: Any, computed: Computed, dim: Any = None) -> torch.Tensor:
    check_whole(func, computed.table, dim)
    return torch.count_nonzero(computed.some)


def _norm(
    func: Any, computed: Computed, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    check_whole(func, computed.table, dim, keepdim)
    if not float(order) > 0.0:
        raise NoAnswer(f"table {computed.table!r}: a norm of order {order} of a gradient")
    values = computed.some
    norm: torch.Tensor = torch.linalg.vector_norm(values, order) if values.numel() else values.new_zeros(())
    return norm


# Of a gradient's elements, and of what was computed of them.
REDUCED: Dict[Any, Callable[..., Any]] = {
    _aten.max: _extreme,
    _aten.min: _extreme,
    _aten.amax: _extreme,
    _aten.amin: _extreme,
    _aten.std: _variance,
    _aten.var: _variance,
    _aten.count_nonzero: _nonzero,
    _aten.abs: _each,
    _aten.pow: _power,
}

_ANSWERS: Dict[Any, Callable[..., Any]] = {
    **REDUCED,
    _aten.sum: _sum,
    _aten.mean: _mean,
    _aten.linalg_vector_norm: _norm,
    _aten.norm: _norm,
    _aten.isnan: _each,
    _aten.isinf: _each,
    _aten.any: _any,
    _aten.all: _all,
    _aten.sqrt: _each,
    _aten.neg: _each,
    _aten._to_copy: _each,
    _aten.mul: _scaled,
    _aten.div: _scaled,
    _aten.detach: _itself,
    _aten.alias: _itself,
    _aten.clone: _copied,
}
