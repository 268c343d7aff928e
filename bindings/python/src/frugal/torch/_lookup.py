"""Forward and backward: one call of the library each."""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from . import _inputs, _native
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


class Lookup:
    """The calls of a module: its features' rows side by side, one call for all."""

    def __init__(self, steps: Steps, features: Sequence[Feature], width: int) -> None:
        self.steps = steps
        self.features = tuple(features)
        self.width = width

    def _output(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, _native.Ops]:
        """A new tensor, and ops that write it."""
        out = torch.empty((rows, self.width), dtype=torch.float32, device=self.steps.device)
        base, stride = out.data_ptr(), _inputs.row_stride(out)
        ops = _native.Ops(len(self.features))
        for i, (table, pooling, padding, column) in enumerate(self.features):
            keys, offsets, weights = tensors[3 * i : 3 * i + 3]
            assert keys is not None
            ops.add(
                table.handle, pooling, padding, keys, offsets, weights, rows_out=base + 4 * column, row_stride=stride
            )
        return out, ops

    def lookup(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, int]:
        """Rows in a step, and the number of the step."""
        out, ops = self._output(rows, tensors)
        return out, self.steps.lookup(ops)

    def read(self, rows: int, tensors: Tensors) -> Tuple[torch.Tensor, int]:
        """Rows as they are, creating none, and the number of the step that they are from."""
        out, ops = self._output(rows, tensors)
        return out, self.steps.read(ops)

    def push(
        self, grad: torch.Tensor, tensors: Tensors, wanted: Sequence[bool], step: int
    ) -> List[Optional[torch.Tensor]]:
        """Hands the gradient of an output over. Returns the gradients of the weights that are `wanted`."""
        grad = _inputs.gradient(grad)
        if self.steps.check_inf and grad.numel() and not _finite(grad):
            # GradScaler sees an infinity where it looks for gradients, and has the step skipped.
            self._mark(float("inf"))
            return self.weight_grads(grad, tensors, wanted)
        base, stride = grad.data_ptr(), _inputs.row_stride(grad)
        ops = _native.Ops(len(self.features))
        grads: List[Optional[torch.Tensor]] = []
        for i, (table, pooling, padding, column) in enumerate(self.features):
            keys, offsets, weights = tensors[3 * i : 3 * i + 3]
            assert keys is not None
            out = torch.empty_like(weights) if weights is not None and wanted[i] else None
            ops.add(
                table.handle, pooling, padding, keys, offsets, weights, out, grads=base + 4 * column, row_stride=stride
            )
            grads.append(out)
        self.steps.push(ops, step if any(wanted) else None)
        if self.steps.check_inf:
            self._mark(1.0)
        return grads

    def weight_grads(
        self, grad: torch.Tensor, tensors: Tensors, wanted: Sequence[bool]
    ) -> List[Optional[torch.Tensor]]:
        """Gradients of weights where nothing is pushed: of rows that are read only, or with gradients that are not
        finite."""
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

    def _mark(self, factor: float) -> None:
        with self.steps.lock:
            for feature in self.features:
                anchor = feature.table.anchor
                if anchor.grad is None or factor != 1.0:
                    anchor.grad = torch.full((), factor)


def _finite(tensor: torch.Tensor) -> bool:
    # One pass without a copy; a NaN comes through.
    least, most = torch.aminmax(tensor)
    return math.isfinite(least.item()) and math.isfinite(most.item())


class TrainingLookup(torch.autograd.Function):
    """Rows in a step; its backward pushes. `anchor` makes autograd run, see _steps.Table."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, lookup: Lookup, rows: int, *tensors: Optional[torch.Tensor]
    ) -> torch.Tensor:
        out, ctx.step = lookup.lookup(rows, tensors)
        ctx.lookup = lookup
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        lookup: Lookup = ctx.lookup
        wanted = ctx.needs_input_grad[5::3]
        grads = lookup.push(grad, ctx.saved_tensors, wanted, ctx.step)
        return _backward_result(grads)


class ReadingLookup(torch.autograd.Function):
    """Rows as constants; only weights have a gradient."""

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, rows: int, constant: bool, *tensors: Optional[torch.Tensor]) -> torch.Tensor:
        out, ctx.step = lookup.read(rows, tensors)
        ctx.lookup, ctx.constant = lookup, constant
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        lookup: Lookup = ctx.lookup
        if not ctx.constant and lookup.steps.next != ctx.step:
            raise RuntimeError(
                f"the forward was before step {ctx.step} ended, and rows have changed since: the gradient of"
                " per_sample_weights needs them; call backward() before Optimizer.step()"
            )
        wanted = ctx.needs_input_grad[5::3]
        return _backward_result(lookup.weight_grads(_inputs.gradient(grad), ctx.saved_tensors, wanted))


def _backward_result(grads: List[Optional[torch.Tensor]]) -> Tuple[Optional[torch.Tensor], ...]:
    out: List[Optional[torch.Tensor]] = [None, None, None]
    for grad in grads:
        out += [None, None, grad]
    return tuple(out)
