"""What a table shows to PyTorch: a parameter of one element, whose gradient stands for the table's.

Optimizers, GradScaler, clip_grad_norm_, zero_grad, requires_grad_ and DistributedDataParallel know parameters and their
gradients. A table has no tensor of its rows, so it gives them an `Anchor`, which has one element for PyTorch's C++, and
whose shape and values in Python are those of `module.weight`. Its gradient is a `Gradient`.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence, Tuple, cast

import torch
from torch.utils.hooks import RemovableHandle

from . import _usual
from ._computed import (
    SHAPE, TRANSFORM, call_with, flat, in_place, is_of_torch, no_memory, no_number, refusal, refuse_values,
)  # fmt: skip
from ._gradient import (
    Gradient, Held, Shown, add, as_itself, get_grad, graph_task, is_distributed, is_of_a_bucket, is_shared,
    of_a_reducer, set_grad,
)  # fmt: skip

if TYPE_CHECKING:
    from ._steps import Table

_aten = torch.ops.aten

_enabled: Callable[[], Any] = torch._C._EnableTorchFunction
_undispatched: Callable[[], Any] = torch._C._DisableTorchDispatch
_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active

broadcast: Any = torch.ops.c10d.broadcast_.default if torch.distributed.is_available() else None

# What a backward that runs has for an input.
NOT_ASKED, ACCUMULATED, RETURNED = 0, 1, 2


def use_of(node: Any) -> int:
    """What the backward that runs does with the gradient of a leaf: nothing, adds it to the leaf's, or returns it, as
    torch.autograd.grad() does."""
    if node is None:
        return NOT_ASKED
    try:
        return ACCUMULATED if torch._C._will_engine_execute_node(node) else NOT_ASKED
    except RuntimeError as error:
        return RETURNED if "leaf node" in str(error) else NOT_ASKED


def is_of_a_parameter() -> bool:
    """Whether torch.nn.Parameter() or Buffer() calls the function that asks."""
    return sys._getframe(2).f_globals.get("__name__") == torch.nn.parameter.__name__


class Copied(torch.Tensor):
    """Of which torch.nn.Parameter() and Buffer() have a copy. They want their argument's class, and then set it."""

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = torch.nn.Parameter  # type: ignore[assignment]

    @property
    def _is_buffer(self) -> bool:
        return False

    @_is_buffer.setter
    def _is_buffer(self, value: bool) -> None:
        self.__class__ = torch.Tensor  # type: ignore[assignment]
        self._is_buffer = value


_OURS = 3  # references to what an anchor alone has: its own, a variable's, and that of the function that counts them
_tensor: Any = torch.Tensor  # whose properties have types of their values


class Anchor(Copied, torch.nn.Parameter):
    """The one element by which PyTorch knows a table. Its value means nothing: what is computed of the parameter is
    computed of the table's rows. Its dtype is that of outputs."""

    table: "Table"
    sparse: bool  # whether its gradient is shown as a sparse tensor, see `module.sparse`
    _dtype: torch.dtype
    _requires_grad: bool
    after: Optional["Anchor"]  # what took its place
    seen: int  # the value's version that is known to be ours
    given: Dict[int, Tuple[Gradient, bool]]  # of backwards that run, and whether they return it, see `give`
    hooks: "OrderedDict[int, Callable[..., Any]]"  # a caller's
    begun: Optional[Gradient]  # the newest; used again when nothing else has it
    reduced = False  # by DistributedDataParallel, for which all ranks have a gradient where one has
    aside: Optional[Gradient]  # while an optimizer's step has it hidden; backwards of other threads add to it

    def __new__(cls, table: "Table", dtype: torch.dtype, requires_grad: bool) -> "Anchor":
        with torch.inference_mode(False):
            anchor = super().__new__(cls, no_number(dtype, table.device), requires_grad)
        anchor._dtype, anchor._requires_grad = dtype, requires_grad
        refuse_values(anchor, no_memory(table.name))
        return anchor

    def __init__(self, table: "Table", dtype: torch.dtype, requires_grad: bool) -> None:
        self.table = table
        self.sparse = False
        self.trainer = table.steps.trainer  # lives as long
        self.given = {}
        self.adding = threading.Lock()  # of backwards in several threads
        self.hooks = OrderedDict()
        self._delivers = False
        self.begun = self.aside = self.after = None
        self.seen = self._version

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.rows())

    def rows(self) -> Any:
        """The rows, for a computation."""
        from ._weight import Weight

        self.check_current()
        return Weight(self.table)

    def check_current(self) -> None:
        """An error, if another Parameter has taken this one's place (Table.adopt)."""
        if self.table.held_anchor() is not self:
            raise RuntimeError(
                f"table {self.table.name!r}: its module was assigned another Parameter, which has the rows now, and"
                " this one has none: take module.weight, and make optimizers after the assignment"
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _grads(*args, **kwargs)
        if func in _BACKWARDS:
            tensors = kwargs.pop("tensors") if "tensors" in kwargs else args[0]
            args = _computed_of(tensors), *args[1:]
            with as_itself():
                return func(*args, **kwargs)
        if func in _OF_THE_ELEMENT or is_of_torch() or (func is _VIEW_AS and is_of_torch(names=_FINDS_NODES)):
            if func not in _OF_THE_ELEMENT and in_place(getattr(func, "__name__", "")) and is_of_torch(names=_STEPS):
                _refuse_step(args[0])
            with as_itself():
                return func(*args, **kwargs)
        if func in _FIND_NODES and len({id(value) for value in (*args, *kwargs.values())}) == 1:
            return args[0].rows().as_it_was_read()
        why = TRANSFORM if _in_transform() else refusal()
        if why is not None:
            anchor = next(value for value in flat([*args, *kwargs.values()]) if isinstance(value, Anchor))
            raise NotImplementedError(f"table {anchor.table.name!r}: {why}")
        out = call_with(lambda value: value.rows() if isinstance(value, Anchor) else value, func, args, kwargs)
        return _parameter_of(out)

    # Every step asks for these, and torch's own would ask `__torch_function__`.

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._dtype

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with as_itself():
            _tensor.requires_grad.__set__(self, value)
        self._requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> "Anchor":
        self.requires_grad = requires_grad
        return self

    def is_written(self) -> bool:
        """Whether the element was written since `check`."""
        with as_itself():
            return self._version != self.seen

    def __getitem__(self, index: Any) -> torch.Tensor:
        return cast(torch.Tensor, self.rows()[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.rows()[index] = value

    @property
    def value(self) -> torch.Tensor:
        """An element with memory, to change its dtype, or to send it from rank to rank."""
        return no_number(self._dtype, self.table.device)

    def become(self, dtype: torch.dtype, grad: Optional[torch.Tensor]) -> None:
        """Of this dtype, where the table's outputs are, and with this gradient."""
        device = self.table.device
        set_grad(self, None)
        with as_itself():
            _tensor.data.__set__(self, no_number(dtype, device))
        refuse_values(self, no_memory(self.table.name))
        self._dtype = dtype
        self.seen = self._version
        if isinstance(grad, Gradient) and grad.device != device:
            moved = Gradient(self)
            moved.become(grad)
            grad, self.begun = moved, None
        if grad is not None:
            self.grad = grad if grad.dtype == dtype else grad.to(dtype)
        self.begun = None  # it has a dtype

    @property
    def data(self) -> torch.Tensor:
        """The rows: a write to it is one to the table."""
        return cast(torch.Tensor, self.rows().data)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.rows().data = value
        if value.dtype != self._dtype and value.dtype.is_floating_point:
            self.become(value.dtype, self.grad)

    # torch's own do not ask `__torch_function__`.

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cast(torch.Tensor, self.rows().set_(*args, **kwargs))

    def as_subclass(self, cls: Any) -> Any:
        return self.rows()[...].as_subclass(cls)

    def detach(self) -> torch.Tensor:
        if is_of_torch():
            return self.value
        if is_of_a_parameter():
            return cast(torch.Tensor, self.rows().copy_as(Anchor))
        return cast(torch.Tensor, self.rows().detach())

    def _take_grad(self, value: Optional[torch.Tensor]) -> None:
        if value is None:
            set_grad(self, None)
            self.aside = None
            if self.given and graph_task() < 0:
                self.given.clear()  # of backwards that have failed
            begun: Any = self.begun
            if begun is not None:
                if sys.getrefcount(begun) == _OURS and begun._use_count() == 1:
                    begun.parts, begun.clip_limit = [], 0.0
                else:
                    self.begun = None
            return
        if isinstance(value, Shown):
            value = value.show(cast(Gradient, value.clone())) if value.shows is None else value.shows
        if isinstance(value, Gradient) and value.table is not self.table:
            value = value.dense()  # as a worker's is given to a copy of the model
        if isinstance(value, Gradient):
            set_grad(self, value)
            self.begun = value
        elif getattr(value, "shape", None) == SHAPE and is_of_torch():
            # Zeros, for a step by which an optimizer makes its state.
            if float(value) != 0.0:
                raise self.penalty()
            set_grad(self, self.begin())
        elif is_shared(self.table) and is_of_a_bucket(value, self.table):
            set_grad(self, value)
        else:
            from . import _dense

            _dense.take(self, value)

    # The table's gradient since the last zero_grad(), a `Gradient`; or what PyTorch has put in its place.
    grad = _grad = property(
        lambda self: self._shown(get_grad(self)), _take_grad, lambda self: self._take_grad(None)
    )

    def _shown(self, grad: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """The gradient that a caller sees."""
        if grad is None or isinstance(grad, Gradient):
            return grad
        if graph_task() < 0 or not is_shared(self.table):
            return self._restored(grad)
        return grad if self.last is None else self.last  # a reducer wants its own until the end of the backward

    def _restored(self, value: torch.Tensor) -> torch.Tensor:
        """The gradient, which takes its place again: a reducer has put its element there. What that says of ranks
        without a gradient is taken out. An error for a gradient of the element, which is none of the rows."""
        grad, factor = self.last, of_a_reducer(self.table, float(value))
        if self.table.steps.world_size == 1 and value._base is None and (factor != 0.0 or grad is None):
            set_grad(self, None)
            raise self.penalty()
        if (grad is None or not grad.parts) and not math.isfinite(factor):
            return value  # of others, which a GradScaler is to see here
        if grad is None or factor == 0.0:
            grad = self.begin()
        grad.rescale(factor)
        set_grad(self, grad)
        return grad

    def begin(self, left: Optional[Gradient] = None) -> Gradient:
        """The gradient that backwards add to: what is left of another, or one of nothing."""
        grad = self.begun if left is None else left
        if grad is None or (left is None and (grad.parts or grad.clip_limit)):
            grad = Gradient(self)
        self.begun = grad
        return grad

    @property
    def last(self) -> Optional[Gradient]:
        """Where DistributedDataParallel puts a tensor of its own in the gradient's place, the gradient."""
        return self.begun if is_shared(self.table) else None

    def check(self) -> None:
        """An error, if the element was written: rows are as before."""
        self.seen = self._version
        with torch.no_grad(), as_itself():
            torch.Tensor.copy_(self, self.value)
        self.seen = self._version
        raise NotImplementedError(
            f"table {self.table.name!r}: something has written to the memory of the parameter that stands for it, which"
            " changes no row: write rows by module.weight (weight[ids] = rows, weight.data.clamp_(), functions of"
            " torch.nn.init), and train them by an optimizer of torch.optim"
        )

    def penalty(self) -> NotImplementedError:
        """The error of a gradient of the element."""
        return NotImplementedError(
            f"table {self.table.name!r}: a gradient of the one element that stands for it in PyTorch's C++, as a"
            " Function of an extension makes that has got the parameter: give it rows, module.weight.clone()"
        )

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """The hook gets the gradient of each backward, a `Gradient`, and may return one in its place."""
        self._check_alone("register_hook")
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        self._deliver()
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def take_hooks(self, hooks: Any) -> None:
        """Those of the Parameter that this was, whose handles remove them from there."""
        if hooks:
            with as_itself():
                _tensor._backward_hooks.__set__(self, None)  # of the memory of before
            self.hooks = hooks
            self._deliver()

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        self._check_alone("register_post_accumulate_grad_hook")
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _check_alone(self, what: str) -> None:
        if is_shared(self.table):
            raise NotImplementedError(
                f"table {self.table.name!r}: {what} of a gradient that ranks share, which is not known before the step"
                " ends: use clip_norm and clip_value of a frugal optimizer, and step after backward()"
            )

    def _deliver(self) -> None:
        """Registers what autograd calls at the end of a backward, as a rule without a gradient of its own."""
        if self._delivers:
            return
        weak = weakref.ref(self)

        def deliver(computed: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
            anchor = weak()
            given = None if anchor is None else anchor.given.pop(graph_task(), None)
            if anchor is None:
                return None
            if given is None and (computed is not None or not anchor.requires_grad):
                return None
            delivered, returned = given or (None, False)  # nothing, where what is computed of the rows has no gradient
            if computed is not None and not returned:
                raise anchor.penalty()
            grad = anchor._through_hooks(delivered)
            if grad is None or returned:
                return grad
            with anchor.adding:
                had = get_grad(anchor)
                if had is None:
                    had = anchor.aside
                if had is not None and not isinstance(had, Gradient):
                    had = anchor._restored(had)
                if had is None:
                    anchor.begun = cast(Gradient, grad.clone()) if anchor.hooks else grad  # a hook may have kept it
                    set_grad(anchor, anchor.begun)
                else:
                    add(_aten.add_.Tensor, had, grad)
            return None

        super().register_hook(deliver)  # type: ignore[no-untyped-call]
        self._delivers = True

    def _through_hooks(self, grad: Optional[Gradient]) -> Optional[Gradient]:
        shape = torch.Size(self.table.shape if grad is None else grad.shape)
        for hook in list(self.hooks.values()):
            with _enabled():  # also in a backward that a function of the parameter runs
                found = hook(grad)
            if found is None:
                continue
            if not (isinstance(found, Gradient) and found.table is self.table):
                if found.shape != shape:
                    raise RuntimeError(
                        f"table {self.table.name!r}: a hook has changed the size of the gradient: {tuple(found.shape)},"
                        f" not {tuple(shape)}"
                    )
                from . import _dense

                found = _dense.of_rows(self, found, grad)
            grad = found
        return grad

    # That of a torch.Tensor, which an anchor may have been (Table.adopt): an optimizer has state by it.
    def __hash__(self) -> int:
        return id(self)

    # A copy is a parameter of its own, as torch's is.

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        return cast(torch.Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.rows().read(), self.requires_grad)

    def hold(self, held: Held, features: Tuple[int, ...]) -> None:
        """Adds a backward's gradient, of these features of its module, to the anchor's."""
        if not self.table.stepped:
            self.table.count_backward()
        if self.hooks:
            self.give(held, features, False)
            return
        with self.adding:
            grad = get_grad(self)
            if grad is None:
                grad = self.aside
            if type(grad) is not Gradient:
                if grad is not None:
                    grad = self._restored(grad)
                if type(grad) is not Gradient:
                    grad = self.begin()
                    set_grad(self, grad)
            grad.hold(held, features)
        if is_distributed():
            self._await_reducer()

    def _await_reducer(self) -> None:
        """A reducer with gradient_as_bucket_view puts its element in the gradient's place. At the end of the backward
        the gradient takes its place again."""

        def answered() -> None:
            grad = get_grad(self)
            if grad is not None and type(grad) is not Gradient:
                self._restored(grad)

        # What is queued by a call that is queued comes after the reducer's. For a static graph the reducer queues a
        # call in its own.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: queue(answered)))

    def give(self, held: Held, features: Tuple[int, ...], returned: bool) -> None:
        """Adds a backward's gradient to what hooks of the anchor get at its end, or torch.autograd.grad():
        `returned`."""
        task = graph_task()
        given = self.given.get(task)
        if given is None:
            self._deliver()
            given = self.given[task] = Gradient(self), returned
        given[0].hold(held, features)

    def gradient(self) -> Optional[Gradient]:
        """What there is to train the table with, or None. After zero_grad(set_to_none=False) it has no parts: it is one
        of zeros."""
        if self.is_written():
            self.check()
        grad = get_grad(self)
        if grad is None:
            return None
        if not isinstance(grad, Gradient):
            restored = self._restored(grad)
            return restored if isinstance(restored, Gradient) else None
        return grad


class AnchorOfRanks(Anchor):
    """Of a table that ranks share. All of them have its rows, so a broadcast of the parameter sends something else."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        with _undispatched(), as_itself():
            if func is broadcast:
                args = [each.value if isinstance(each, Anchor) else each for each in args[0]], *args[1:]
            return func(*args, **kwargs or {})


if _usual.native is not None:
    setattr(Anchor, "grad", _usual.native.Grad())  # the same
    setattr(Anchor, "_grad", vars(Anchor)["grad"])

# What says what a parameter is, and not what its values are.
_OF_THE_ELEMENT = {
    *[getattr(_tensor, name).__get__ for name in (
        "requires_grad", "grad", "dtype", "device", "layout", "is_leaf", "_version", "grad_fn", "output_nr",
        "retains_grad", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr",
        "is_quantized", "is_nested", "is_mkldnn", "names", "_base", "_backward_hooks", "_post_accumulate_grad_hooks",
        "_cdata", "volatile",
    )],
    *[getattr(_tensor, name).__set__ for name in (
        "requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks",
    )],
    *[getattr(_tensor, name) for name in (
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "detach_",
        "is_floating_point", "is_complex", "is_inference", "is_conj", "is_neg", "element_size", "get_device",
        "data_ptr", "__hash__", "_is_view",
    )],
    torch.is_floating_point, torch.is_complex, torch.is_tensor,
}  # fmt: skip


# By the result's graph programs find the node that accumulates a parameter's gradient: parameter.expand_as(parameter).
_VIEW_AS = torch.Tensor.view_as
_FIND_NODES = {_VIEW_AS, torch.Tensor.expand_as}
_FINDS_NODES = ("torch.autograd.graph",)  # so does register_multi_grad_hook()


_STEPS = ("torch.optim.",)


def _refuse_step(stepped: Any) -> None:
    """An error, if a function of torch.optim steps a table's parameter. In a step of an optimizer the parameter has
    no gradient."""
    for anchor in flat([stepped]):
        if isinstance(anchor, Anchor):
            raise NotImplementedError(
                f"table {anchor.table.name!r}: a function of torch.optim, as torch.optim.sgd.sgd(), or a functional"
                " optimizer of torch.distributed.optim, which calls such a function, cannot step it: give"
                " module.parameters() to"
                " torch.optim.SGD, Adagrad, Adam, AdamW, SparseAdam or RMSprop, or write rows, as by"
                " module.weight.add_(module.weight.grad, alpha=-lr) under torch.no_grad(). If such an optimizer has it:"
                " another thread has zeroed its gradient and made a backward during the step; let one thread at a time"
                " zero, add to and step it"
            )


def _parameter_of(out: Any) -> Any:
    """What a function has returned that got rows in a parameter's place, which it may have written and returned."""
    parameter = getattr(out, "parameter", None)
    return out if parameter is None else parameter()


_BACKWARDS = {torch.autograd.backward, torch.Tensor.backward}


def _computed_of(outputs: Any) -> Any:
    """Outputs of a backward; in the place of a parameter what is computed of its rows, which has their shape."""
    if isinstance(outputs, Anchor):
        return outputs.clone()
    return type(outputs)(map(_computed_of, outputs)) if isinstance(outputs, (list, tuple)) else outputs


def _grads(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    allow_unused: Optional[bool] = None,
    materialize_grads: bool = False,
    **options: Any,
) -> Tuple[Optional[torch.Tensor], ...]:
    """torch.autograd.grad() where parameters of tables are among the inputs."""
    inputs = tuple(flat([inputs]))
    if materialize_grads and allow_unused is None:
        allow_unused = True
    outputs = _computed_of(outputs)
    with as_itself():
        found = list(torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=allow_unused, **options))
    for i, value in enumerate(inputs):
        grad = found[i]
        if isinstance(grad, Gradient):
            live = grad.with_graph()
            found[i] = grad if live is None else live
        if grad is None and materialize_grads:
            found[i] = torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)
    return tuple(found)
