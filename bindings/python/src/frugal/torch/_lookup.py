"""Forward and backward. A forward is one call of the library; a backward keeps what the optimizer's step will push."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from . import _inputs, _native
from ._anchor import Held
from ._steps import Steps, Table

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

    def lookup(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, int]:
        """Rows in a step, and the number of the step."""
        out, ops = self._output(rows, tensors)
        return out, self.steps.lookup(ops)

    def read(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, int]:
        """Rows as they are, creating none, and the number of the step that they are from."""
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

    def spread(self, i: int, held: Held, chunk: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        """Keys of a feature, without padding, and the gradient of each, `chunk` keys at a time."""
        feature = self.features[i]
        keys, offsets, weights = held.tensors[3 * i : 3 * i + 3]
        assert keys is not None
        grad = held.grad[:, feature.column : feature.column + feature.table.dim]
        keys = keys.reshape(-1).view(torch.int64)
        keep = None if feature.padding is None else keys != _int64(feature.padding)
        bags = counts = None
        if offsets is not None:
            lengths = offsets.diff()
            bags = torch.repeat_interleave(torch.arange(lengths.numel(), device=keys.device), lengths)
            if feature.pooling == _native.POOL_MEAN:
                counts = lengths
                if keep is not None:
                    counts = torch.zeros_like(lengths).index_add_(0, bags, keep.to(torch.int64))
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
        one = Lookup(self.steps, [feature._replace(pooling=_native.POOL_NONE, column=0)], feature.table.dim)
        out = torch.empty_like(weights)
        flat_keys, flat_out = keys.view(-1), out.view(-1)
        for begin in range(0, flat_keys.numel(), _CHUNK):
            part = flat_keys[begin : begin + _CHUNK]
            rows, _ = one.read(part.numel(), (part, None, None))
            places = torch.arange(begin, begin + part.numel(), device=offsets.device)
            bags = torch.searchsorted(offsets, places, right=True) - 1
            torch.sum(rows * grad[bags], 1, out=flat_out[begin : begin + part.numel()])
        return out


class TrainingLookup(torch.autograd.Function):
    """Rows in a step. Its backward holds the gradient for the step of an optimizer that has the anchors."""

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, rows: int, mine: int, *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        # `inputs`: the anchors of lookup.tables, which make autograd run, and the tensors; `mine`: see _kept.
        tensors = inputs[len(lookup.tables) :]
        ctx.mine = mine
        out, ctx.step = lookup.lookup(rows, tensors)
        ctx.lookup = lookup
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        # What the decorator does is wanted for create_graph=True alone, and takes its time.
        return _held_once(ctx, grad) if torch.is_grad_enabled() else _held(ctx, grad)


def _held(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
    lookup: Lookup = ctx.lookup
    tensors = ctx.saved_tensors
    needed = ctx.needs_input_grad
    count = len(lookup.tables)
    grad = _inputs.gradient(grad)
    wanted = needed[3 + count + 2 :: 3]
    weight_grads = _weight_grads(ctx, lookup, grad, tensors, wanted) if True in wanted else None
    held, nodes = None, ctx.next_functions
    for i, table in enumerate(lookup.tables):
        if needed[3 + i] and _executes(nodes[i][0]):
            if held is None:
                held = Held(lookup, _kept(tensors, ctx.mine), grad, next(lookup.steps.backwards))
            table.anchor.hold(held, lookup.places[i])
    if weight_grads is None:
        return (None,) * len(needed)
    return (None,) * (3 + count) + _of_each(weight_grads)


_held_once: Callable[..., Any] = once_differentiable(_held)


class ReadingLookup(torch.autograd.Function):
    """Rows that are read only; its backward has gradients of weights."""

    @staticmethod
    def forward(
        ctx: Any, lookup: Lookup, rows: int, *tensors: Optional[torch.Tensor]
    ) -> torch.Tensor:
        out, ctx.step = lookup.read(rows, tensors)
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
    if lookup.steps.next != ctx.step and any(table.trains() for table in lookup.tables):
        raise RuntimeError(
            f"the forward was in step {ctx.step}, which has ended, and rows have changed since: the gradient of"
            " per_sample_weights needs them; call backward() before the optimizer's step()"
        )
    return lookup.weight_grads(grad, tensors, wanted)


def _kept(tensors: Tensors, mine: int) -> Tensors:
    """The tensors to keep until the optimizer's step. The caller may use the memory of those that are not ours (a bit of
    `mine` each) again before it; a key is small beside its gradient."""
    return [
        tensor if tensor is None or mine >> i & 1 else tensor.clone() for i, tensor in enumerate(tensors)
    ]


def _executes(node: Any) -> bool:
    """Whether this backward is to give the anchor a gradient. One of torch.autograd.grad() is not, and one that names
    other inputs."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def _of_each(grads: List[Optional[torch.Tensor]]) -> Tuple[Optional[torch.Tensor], ...]:
    out: List[Optional[torch.Tensor]] = []
    for grad in grads:
        out += [None, None, grad]
    return tuple(out)


def _int64(key: int) -> int:
    """The 64 bits of a key as PyTorch's integers have them."""
    return key - (1 << 64) if key >> 63 else key
