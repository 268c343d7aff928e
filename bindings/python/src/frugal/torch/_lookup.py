"""Forward and backward. A forward is one call of the library; a backward keeps what the optimizer's step will push."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, cast

import torch
from torch.autograd.function import once_differentiable

from . import _inputs, _native
from ._anchor import ACCUMULATED, Gradient, Held, use_of
from ._steps import Moment, Steps, Table

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_CHUNK = 16384  # keys whose rows are held at once where gradients of weights are computed here

# Of each feature: keys, offsets (pooled), factors of keys.
Tensors = Sequence[Optional[torch.Tensor]]


class Feature(NamedTuple):
    """What the calls of a module say of a table each time."""

    table: Table
    pooling: int
    padding: Optional[int]
    column: int  # of the output, where its rows begin

    @property
    def hidden(self) -> Optional[int]:
        """The key whose row lookups show as zeros. torch.nn.Embedding shows what somebody has written there."""
        written = self.pooling == _native.POOL_NONE and self.table.written and not self.table.hashed
        return None if written else self.padding


class Lookup:
    """The calls of a module: its features' rows side by side, one call for all."""

    def __init__(self, steps: Steps, features: Sequence[Feature], width: int) -> None:
        self.steps = steps
        self.features = tuple(features)
        self.width = width
        self.tables: List[Table] = list(dict.fromkeys(feature.table for feature in features))
        # Of each table, which features are its.
        self.places = [
            tuple(i for i, feature in enumerate(features) if feature.table is table) for table in self.tables
        ]
        # What gradients go through whose keys have a factor each.
        self.weighted: Optional[Lookup] = None

    def by_frequency(self) -> "Lookup":
        """The same, but the gradient of a key is divided by how often the key is in the input."""
        same = type(self)(self.steps, self.features, self.width)
        pooled = [feature._replace(pooling=_native.POOL_SUM) for feature in self.features]
        same.weighted = type(self)(self.steps, pooled, self.width)
        return same

    def rows_of(self, table: Table) -> "Lookup":
        """Rows of a table, one for each key, and no key is padding."""
        return type(self)(self.steps, [Feature(table, _native.POOL_NONE, None, 0)], table.dim)

    def _output(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, _native.Ops]:
        """A new tensor, and ops that write it."""
        out = torch.empty((rows, self.width), dtype=torch.float32, device=self.steps.device)
        base, stride = out.data_ptr(), 4 * self.width
        ops = _native.Ops(len(self.features))
        for i, feature in enumerate(self.features):
            keys, offsets, weights = tensors[3 * i : 3 * i + 3]
            assert keys is not None
            padding = feature.padding if feature.padding is None else feature.hidden
            ops.add(
                feature.table.handle, feature.pooling, padding, keys, offsets, weights,
                rows_out=base + 4 * feature.column, row_stride=stride,
            )  # fmt: skip
        return out, ops

    def lookup(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, Moment]:
        """Rows in a step, and when they were read."""
        out, ops = self._output(rows, tensors)
        return out, self.steps.lookup(ops)

    def read(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, Moment]:
        """Rows as they are, creating none, and when they were read."""
        out, ops = self._output(rows, tensors)
        return out, self.steps.read(ops)

    def add_pushes(self, ops: _native.Ops, held: Held, features: Sequence[int], factor: float) -> torch.Tensor:
        """Adds the ops that push the gradients of a backward. Returns the tensor that they point into."""
        held.check()
        grad = held.grad if factor == 1.0 else held.grad * factor
        base, stride = grad.data_ptr(), _inputs.row_stride(grad)
        for i in features:
            table, pooling, padding, column = self.features[i]
            keys, offsets, weights = held.tensors[3 * i : 3 * i + 3]
            assert keys is not None
            ops.add(
                table.handle, pooling, padding, keys, offsets, weights, grads=base + 4 * column, row_stride=stride
            )
        return grad

    def factors(self, tensors: Tensors) -> Tensors:
        """What `weighted` takes for these tensors: in the place of pooling and counts a factor for each key. None of it is
        the caller's memory."""
        out: List[Optional[torch.Tensor]] = []
        for i, feature in enumerate(self.features):
            keys, offsets, weights = tensors[3 * i : 3 * i + 3]
            assert keys is not None
            keys = keys.reshape(-1).view(torch.int64)
            _, at, counts = torch.unique(keys, return_inverse=True, return_counts=True)
            scale = counts[at].to(torch.float64).reciprocal_()  # as PyTorch computes it
            if offsets is None:
                offsets = torch.arange(keys.numel() + 1, dtype=torch.int64, device=keys.device)
            elif feature.pooling == _native.POOL_MEAN:
                bags = _bags(offsets)
                scale.div_(_sizes(feature, keys, offsets, bags).clamp_(min=1)[bags])
            if weights is not None:
                scale.mul_(weights.reshape(-1))
            out += [keys.clone(), offsets.clone(), scale.to(torch.float32)]
        return out

    def spread(self, i: int, held: Held, chunk: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        """Keys of a feature, without padding, and the gradient of each, `chunk` keys at a time."""
        feature = self.features[i]
        keys, offsets, weights = held.tensors[3 * i : 3 * i + 3]
        assert keys is not None
        grad, dim = held.grad, feature.table.dim
        if grad.shape[1] != dim:
            grad = grad[:, feature.column : feature.column + dim]
        keys = keys.reshape(-1).view(torch.int64)
        keep = _counted(feature, keys)
        if offsets is None and weights is None and keep is None and keys.numel() <= chunk:
            yield keys, grad
            return
        bags = counts = None
        if offsets is not None:
            bags = _bags(offsets)
            if feature.pooling == _native.POOL_MEAN:
                counts = _sizes(feature, keys, offsets, bags)
        for begin in range(0, keys.numel(), chunk):
            part = slice(begin, begin + chunk)
            rows = grad[part] if bags is None else grad[bags[part]]
            if counts is not None and bags is not None:
                rows = rows / counts[bags[part], None]
            if weights is not None:
                rows = rows * weights.reshape(-1)[part, None]
            if keep is not None:
                yield keys[part][keep[part]], rows[keep[part]]
            else:
                yield keys[part], rows

    def weight_grads(
        self, grad: torch.Tensor, tensors: Tensors, wanted: Sequence[bool]
    ) -> List[Optional[torch.Tensor]]:
        """Gradients of the weights that are `wanted`."""
        return [self._weight_grad(i, grad, tensors) if wanted[i] else None for i in range(len(self.features))]

    def _weight_grad(self, i: int, grad: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        feature = self.features[i]
        keys, offsets, weights = tensors[3 * i : 3 * i + 3]
        assert keys is not None and offsets is not None and weights is not None
        grad = grad[:, feature.column : feature.column + feature.table.dim]
        one = type(self)(self.steps, [feature._replace(pooling=_native.POOL_NONE, column=0)], feature.table.dim)
        out = torch.empty_like(weights)
        flat_keys, flat_out = keys.view(-1), out.view(-1)
        for begin in range(0, flat_keys.numel(), _CHUNK):
            part = flat_keys[begin : begin + _CHUNK]
            rows, _ = one.read(part.numel(), (part, None, None))
            places = torch.arange(begin, begin + part.numel(), device=offsets.device)
            bags = torch.searchsorted(offsets, places, right=True) - 1
            torch.sum(rows * grad[bags], 1, out=flat_out[begin : begin + part.numel()])
        return out


class EmptyLookup(Lookup):
    """Of a table without rows, or of rows without columns: the engine is asked for nothing."""

    def lookup(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, Moment]:
        return self.read(rows, tensors)

    def read(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, Moment]:
        (table,) = self.tables
        keys = tensors[0]
        assert keys is not None
        keys = keys.view(torch.int64)
        bad = keys[(keys < 0) | (keys >= table.capacity)]
        if bad.numel():
            raise _native.KeyOutOfRange(
                f"key {int(bad[0])} of the table {table.name!r}, which has {table.capacity} rows", _native.KEY_OUT_OF_RANGE
            )
        out = torch.zeros((rows, self.width), dtype=torch.float32, device=self.steps.device)
        return out, (self.steps.next, self.steps.writes)

    def add_pushes(self, ops: _native.Ops, held: Held, features: Sequence[int], factor: float) -> torch.Tensor:
        return held.grad


class TrainingLookup(torch.autograd.Function):
    """Rows in a step. Its backward holds the gradient for the step of an optimizer that has the anchors."""

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, rows: int, mine: int, *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        # `inputs`: the anchors of lookup.tables, which make autograd run, and the tensors; `mine`: see _kept.
        tensors = inputs[len(lookup.tables) :]
        ctx.mine = mine
        out, ctx.moment = lookup.lookup(rows, tensors)
        ctx.lookup = lookup
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        if _is_batched(grad) or _is_wrapped(grad):
            raise NotImplementedError(
                "a backward of a table in a transform, as by is_grads_batched or vectorize: call backward for each gradient"
            )
        # What the decorator does is wanted for create_graph=True alone, and takes its time.
        if not torch.is_grad_enabled():
            return _held(ctx, grad)
        ctx.graph = True
        try:
            return cast(Tuple[Optional[torch.Tensor], ...], _held_once(ctx, grad))
        finally:
            ctx.graph = False  # the next backward of this graph may be another


def _held(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
    lookup: Lookup = ctx.lookup
    tensors = ctx.saved_tensors
    needed = ctx.needs_input_grad
    count = len(lookup.tables)
    grad = _inputs.gradient(grad)
    wanted = needed[3 + count + 2 :: 3]
    weight_grads = _weight_grads(ctx, lookup, grad, tensors, wanted) if True in wanted else None
    held, nodes = None, ctx.next_functions
    returned: List[Optional[torch.Tensor]] = []
    for i, table in enumerate(lookup.tables):
        use = needed[3 + i] and use_of(nodes[i][0])
        if not use or (use == ACCUMULATED and not table.anchor.requires_grad):
            continue  # a leaf that has been frozen since the forward takes no gradient
        if held is None:
            number = next(lookup.steps.backwards)
            if lookup.weighted is None:
                held = Held(lookup, _kept(tensors, ctx.mine), grad, number)
            else:
                held = Held(lookup.weighted, lookup.factors(tensors), grad, number)
            held.graph = getattr(ctx, "graph", False)
        if use == ACCUMULATED:
            table.anchor.hold(held, lookup.places[i])
        else:
            if getattr(ctx, "graph", False):
                raise NotImplementedError(
                    f"table {table.name!r}: create_graph=True of its gradient: a backward of a backward is not possible"
                )
            returned += [None] * (i - len(returned)) + [Gradient.of(table.anchor, held, lookup.places[i])]
    if weight_grads is None and not returned:
        return (None,) * len(needed)
    returned += [None] * (count - len(returned))
    return (None, None, None, *returned, *_of_each(weight_grads or [None] * len(lookup.features)))


_held_once: Callable[..., Any] = once_differentiable(_held)


class ReadingLookup(torch.autograd.Function):
    """Rows that are read only; its backward has gradients of weights."""

    @staticmethod
    def forward(
        ctx: Any, lookup: Lookup, rows: int, *tensors: Optional[torch.Tensor]
    ) -> torch.Tensor:
        out, ctx.moment = lookup.read(rows, tensors)
        ctx.lookup = lookup
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        wanted = ctx.needs_input_grad[4::3]
        grads = _weight_grads(ctx, ctx.lookup, _inputs.gradient(grad), ctx.saved_tensors, wanted)
        return (None, None) + _of_each(grads)


def _weight_grads(
    ctx: Any, lookup: Lookup, grad: torch.Tensor, tensors: Tensors, wanted: Sequence[bool]
) -> List[Optional[torch.Tensor]]:
    if not any(wanted):
        return [None] * len(lookup.features)
    step, writes = ctx.moment
    if lookup.steps.next != step and any(table.trains() for table in lookup.tables):
        raise RuntimeError(
            f"the forward was in step {step}, which has ended, and rows have changed since: the gradient of"
            " per_sample_weights needs them; call backward() before the optimizer's step()"
        )
    if lookup.steps.writes != writes and any(table.written_at > writes for table in lookup.tables):
        raise RuntimeError(
            "rows have been written since the forward (by an assignment, or by max_norm in another forward): the gradient"
            " of per_sample_weights needs them as they were; call backward() before"
        )
    return lookup.weight_grads(grad, tensors, wanted)


def _kept(tensors: Tensors, mine: int) -> Tensors:
    """The tensors to keep until the optimizer's step. The caller may use the memory of those that are not ours (a bit of
    `mine` each) again before it; a key is small beside its gradient."""
    return [
        tensor if tensor is None or mine >> i & 1 else tensor.clone() for i, tensor in enumerate(tensors)
    ]


def _counted(feature: Feature, keys: torch.Tensor) -> Optional[torch.Tensor]:
    """Which keys are not padding, None: all."""
    return None if feature.padding is None else keys != int64_of(feature.padding)


def _bags(offsets: torch.Tensor) -> torch.Tensor:
    """The bag of each key."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=offsets.device), lengths)


def _sizes(feature: Feature, keys: torch.Tensor, offsets: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """How many keys each bag has, without padding."""
    lengths, keep = offsets.diff(), _counted(feature, keys)
    return lengths if keep is None else torch.zeros_like(lengths).index_add_(0, bags, keep.to(torch.int64))


def _of_each(grads: List[Optional[torch.Tensor]]) -> Tuple[Optional[torch.Tensor], ...]:
    out: List[Optional[torch.Tensor]] = []
    for grad in grads:
        out += [None, None, grad]
    return tuple(out)


def int64_of(key: int) -> int:
    """The 64 bits of a key as PyTorch's integers have them."""
    return key - (1 << 64) if key >> 63 else key
