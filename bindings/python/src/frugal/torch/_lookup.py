"""Forward and backward. A forward is one call of the library; a backward keeps what the optimizer's step will push.

An output that is to be trained is made by an operation of PyTorch's own on the anchors, and the engine writes rows over
what that computed. So autograd reaches the anchors by nodes of its own, and Python has no part in a backward but a hook
that gets the output's gradient.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import torch

from . import _inputs, _native
from ._anchor import ACCUMULATED, NOT_ASKED, Anchor, use_of
from ._computed import SHAPE
from ._gradient import Held, as_itself
from ._steps import Moment, Steps, Table

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_is_grad_enabled = torch.is_grad_enabled
_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_op, _add, _float32 = _native.op, torch.add, torch.float32
_CHUNK = 16384  # keys whose rows are held at once where gradients of weights are computed here
_FEW = 16384  # elements of an output that an addition has written sooner than an indexed write has begun

# Of each feature: a tensor of keys, one of offsets (else None), one of factors of keys (else None).
Tensors = Sequence[Any]


class Feature(NamedTuple):
    """What the calls of a module say of a table each time."""

    table: Table
    pooling: int
    padding: Optional[int]
    column: int  # of the output, where its rows begin

    @property
    def hidden(self) -> Optional[int]:
        """The key whose row lookups show as zeros. torch.nn.Embedding shows what was written there."""
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
        # The last output's shape, a tensor of that shape and one element, whether to add to it.
        self._like: Optional[Tuple[Sequence[int], torch.Tensor, bool, torch.device]] = None

    @property
    def device(self) -> torch.device:
        """Where keys and outputs are."""
        return self.tables[0].device

    def by_frequency(self) -> "Lookup":
        """The same, but the gradient of a key is divided by how often the key is in the input."""
        same = type(self)(self.steps, self.features, self.width)
        pooled = [feature._replace(pooling=_native.POOL_SUM) for feature in self.features]
        same.weighted = type(self)(self.steps, pooled, self.width)
        return same

    @classmethod
    def rows_of(cls, table: Table) -> "Lookup":
        """Rows of a table, one for each key, and no key is padding."""
        return cls(table.steps, [Feature(table, _native.POOL_NONE, None, 0)], table.dim)

    def _ops(self, out: torch.Tensor, tensors: Tensors) -> List[bytes]:
        """Ops that write rows."""
        base, stride = out.data_ptr(), 4 * self.width
        ops = []
        i = 0
        for feature in self.features:
            table, pooling, padding, column = feature
            if padding is not None:
                padding = feature.hidden
            ops.append(
                _op(
                    table.handle, pooling, padding, tensors[i], tensors[i + 1], tensors[i + 2],
                    base + 4 * column, 0, stride,
                )
            )  # fmt: skip
            i += 3
        return ops

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def look_up(self, out: torch.Tensor, tensors: Tensors) -> Moment:
        """Writes rows in a step. Returns when they were read."""
        return self.steps.lookup(self._ops(out, tensors))

    def lookup(self, shape: Sequence[int], tensors: Tensors) -> torch.Tensor:
        """Rows in a step. `shape`: of the output, whose last dimension is the width."""
        out = self._empty(shape)
        self.look_up(out, tensors)
        return out

    def read(self, shape: Sequence[int], tensors: Tensors) -> Tuple[torch.Tensor, Moment]:
        """Rows as they are, creating none, and when they were read."""
        out = self._empty(shape)
        return out, self.steps.read(self._ops(out, tensors))

    def train(self, source: torch.Tensor, shape: Sequence[int], tensors: Tensors, mine: int) -> Any:
        """Rows in a step, whose gradient is held for the step of an optimizer that has the anchors, and when they were
        read. `source`: of the anchors, see source_of. `mine`: a bit for each tensor that is not the caller's."""
        known = self._like
        device = self.device
        wanted, shape = shape, shape if len(shape) > 1 else (1, *shape)  # one that an anchor's extends to
        if known is None or known[0] != shape or known[3] is not device:
            like = torch.zeros((), dtype=torch.float32, device=device).expand(shape)
            known = self._like = shape, like, like.numel() <= _FEW, device
        if known[2]:
            out = _add(known[1], source)
        else:  # none of its elements are written
            none = torch.empty(0, dtype=torch.int64, device=device)
            out = self._empty(shape).index_put_((none,), source)
        node = out.grad_fn
        if node is not None:  # as there is none in torch.inference_mode()
            backward = _Backward(self, tensors, mine, node.next_functions[1][0], len(self.tables))
            backward.views = wanted is not shape
            node.register_prehook(backward)
        moment = self.look_up(out, tensors)
        return out if wanted is shape else out.squeeze_(0), moment  # which is no view

    def backward(
        self,
        keys: Optional[torch.Tensor],
        ends: Optional[torch.Tensor],
        weights: Optional[torch.Tensor],
        version: int,
        leaf: Any,
    ) -> "_Backward":
        """The backward of a forward that was made in C++ (see _usual). `version`: of the keys and weights, at the
        forward; None in the keys' place: they are freed. `leaf`: the anchor's node."""
        backward = _Backward(self, [] if keys is None else [keys, ends, weights], 2, leaf, 1)
        backward.versions = version
        if keys is None:
            backward.tensors = None
        return backward

    def weighted_rows(self, rows: torch.Tensor, moment: Moment, *tensors: Optional[torch.Tensor]) -> torch.Tensor:
        """The same rows, which were read at that moment, with gradients of weights."""
        out: torch.Tensor = _weighted_rows(rows, self, moment, *tensors)
        return out

    def add_pushes(
        self, ops: List[bytes], held: Held, features: Sequence[int], factor: float
    ) -> torch.Tensor:
        """Adds the ops that push the gradients of a backward. Returns the tensor that they point into."""
        held.check()
        grad = held.grad if factor == 1.0 else held.grad * factor
        base, stride, tensors = grad.data_ptr(), _inputs.row_stride(grad), held.tensors
        for i in features:
            table, pooling, padding, column = self.features[i]
            keys, offsets, weights = tensors[3 * i], tensors[3 * i + 1], tensors[3 * i + 2]
            at = base + 4 * column
            ops.append(_op(table.handle, pooling, padding, keys, offsets, weights, 0, at, stride))
        return grad

    def factors(self, tensors: Tensors) -> Tensors:
        """What `weighted` takes for these tensors: in the place of pooling and counts a factor for each key. None of it
        is the caller's memory."""
        out: List[Optional[torch.Tensor]] = []
        for i, feature in enumerate(self.features):
            keys, offsets, weights = tensors[3 * i : 3 * i + 3]
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
        grad = grad[:, feature.column : feature.column + feature.table.dim]
        one = type(self)(self.steps, [feature._replace(pooling=_native.POOL_NONE, column=0)], feature.table.dim)
        out = torch.empty_like(weights)
        flat_keys, flat_out = keys.view(-1), out.view(-1)
        for begin in range(0, flat_keys.numel(), _CHUNK):
            part = flat_keys[begin : begin + _CHUNK]
            rows, _ = one.read((part.numel(), one.width), (part, None, None))
            places = torch.arange(begin, begin + part.numel(), device=offsets.device)
            bags = torch.searchsorted(offsets, places, right=True) - 1
            torch.sum(rows * grad[bags], 1, out=flat_out[begin : begin + part.numel()])
        keep = _counted(feature, flat_keys.view(torch.int64))
        if keep is not None:
            flat_out.masked_fill_(~keep, 0.0)  # bags leave padding out, whatever its row is
        return out


class EmptyLookup(Lookup):
    """Of a table without rows, or of rows without columns: the engine is asked for nothing."""

    def look_up(self, out: torch.Tensor, tensors: Tensors) -> Moment:
        (table,) = self.tables
        keys = tensors[0]
        keys = keys.view(torch.int64)
        bad = keys[(keys < 0) | (keys >= table.capacity)]
        if bad.numel():
            raise _native.KeyOutOfRange(
                f"key {int(bad[0])} of the table {table.name!r}, which has {table.capacity} rows",
                _native.KEY_OUT_OF_RANGE,
            )
        out.detach().zero_()
        return self.steps.next, self.steps.writes

    def read(self, shape: Sequence[int], tensors: Tensors) -> Tuple[torch.Tensor, Moment]:
        out = self._empty(shape)
        return out, self.look_up(out, tensors)

    def add_pushes(
        self, ops: List[bytes], held: Held, features: Sequence[int], factor: float
    ) -> torch.Tensor:
        return held.grad


class _Backward:
    """A hook of the node that made an output: holds the output's gradient for the step of an optimizer."""

    __slots__ = ("lookup", "tensors", "theirs", "versions", "source", "count", "views")

    def __init__(self, lookup: Lookup, tensors: Tensors, mine: int, source: Any, count: int) -> None:
        self.lookup = lookup
        self.tensors: Optional[Tensors] = tensors
        # Those whose memory the caller may use again before the optimizer's step.
        self.theirs = [i for i, tensor in enumerate(tensors) if tensor is not None and not mine >> i & 1]
        self.versions = self._writes(tensors)
        self.source = source  # the node of the anchor, or of what was computed of several
        self.count = count
        self.views = False  # whether gradients come as views of what a caller may have

    def __call__(self, grads: Tuple[Optional[torch.Tensor], ...]) -> Optional[Tuple[None]]:
        references = sys.getrefcount(grads[0])
        grad = grads[0]
        if grad is None:
            return None
        # A caller has it, too, and may use its memory again.
        return self._deliver(grad, self.views or references > _ALONE or _shows_all(grad))

    def _deliver(self, grad: torch.Tensor, shared: bool) -> Optional[Tuple[None]]:
        if _is_batched(grad) or _is_wrapped(grad):
            raise NotImplementedError(
                "a backward of a table in a transform, as by is_grads_batched or vectorize: call backward for each"
                " gradient"
            )
        tensors = self.tensors
        if tensors is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, and the keys of the first are freed: specify"
                " retain_graph=True if you need to backward through the graph a second time"
            )
        lookup, source, asked = self.lookup, self.source, False
        graph = _is_grad_enabled()  # create_graph=True
        if graph:
            grad = grad.detach()
        if grad.dim() != 2:
            grad = grad.reshape(math.prod(grad.shape[:-1]), lookup.width)
        if grad.dtype is not _float32 or not grad.is_contiguous() or grad.is_neg():
            grad = _inputs.gradient(grad)
        if shared:
            grad = grad.detach().clone()
        leaves = (source,) if isinstance(source, _Leaf) else _leaves(source, self.count)
        held = None
        for i, leaf in enumerate(leaves):
            use = use_of(leaf)
            if use == NOT_ASKED:
                continue
            anchor = leaf.variable
            if use == ACCUMULATED and not anchor.requires_grad:
                continue  # a leaf that has been frozen since the forward takes no gradient
            if held is None:
                held = self._hold(grad, tensors, anchor)
                held.graph = graph
            if use == ACCUMULATED:
                anchor.hold(held, lookup.places[i])
            else:
                if graph:
                    raise NotImplementedError(
                        f"table {anchor.table.name!r}: create_graph=True of its gradient: a backward of a backward is"
                        " not possible"
                    )
                anchor.give(held, lookup.places[i], True)
                asked = True  # so that autograd must go on
        if not _keeps_graph():
            self.tensors = None
        return None if asked else _NOTHING

    def unusual(self, grad: torch.Tensor, shared: bool) -> Optional[torch.Tensor]:
        """Calls it from C++. Returns what autograd goes on with."""
        if self._deliver(grad, shared) is not None:
            return None
        # A hook puts the table's gradient in its place.
        return torch.zeros(SHAPE, dtype=torch.float32, device=grad.device)

    def _hold(self, grad: torch.Tensor, tensors: Tensors, anchor: Any) -> Held:
        """What the optimizer's step will push."""
        lookup = self.lookup
        if self._writes(tensors) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                " inplace operation: keys, offsets or per_sample_weights of table"
                f" {anchor.table.name!r}, since the forward"
            )
        number = next(lookup.steps.backwards)
        if lookup.weighted is not None:
            return Held(lookup.weighted, lookup.factors(tensors), grad, number)
        kept = list(tensors)
        for i in self.theirs:
            kept[i] = tensors[i].clone()  # a key is small by its gradient
        return Held(lookup, kept, grad, number)

    def _writes(self, tensors: Tensors) -> int:
        """How often the caller's have been written to in place."""
        total = 0
        try:
            for i in self.theirs:
                total += tensors[i]._version
        except RuntimeError:  # made in inference mode, it has none
            raise RuntimeError(
                "Inference tensors cannot be saved for a backward: make copies of keys, offsets and weights outside of"
                " torch.inference_mode(), by clone()"
            ) from None
        return total


class _References:
    """A hook of a node that counts who has the gradient."""

    seen = 0

    def __call__(self, grads: Tuple[Optional[torch.Tensor], ...]) -> None:
        self.seen = sys.getrefcount(grads[0])


def _references() -> int:
    """Of a gradient that nothing else has, in a hook: PyTorch's versions differ."""
    with torch.enable_grad():
        leaf = torch.zeros(1, device="cpu", requires_grad=True)
        out = torch.zeros(2, device="cpu") + leaf
        hook = _References()
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(hook)
        torch.autograd.grad((out * 2.0).sum(), leaf)
    return hook.seen


_ALONE = _references()
_uses: Any = getattr(torch._C, "_storage_Use_Count", None)  # which some do not have


def _shows_all(grad: torch.Tensor) -> bool:
    """Whether it is a view of all of another tensor that is still there: perhaps the caller's."""
    if _is_batched(grad) or _is_wrapped(grad):
        return False
    storage = grad.untyped_storage()
    return storage.nbytes() == grad.nbytes and (_uses is None or _uses(storage._cdata) > 2)


_NOTHING = (None,)  # is what autograd goes on with


def source_of(anchors: Sequence[Anchor]) -> torch.Tensor:
    """What outputs are computed of in PyTorch's graph, which so knows the anchors: a sum of none of their elements,
    which cannot be read. It serves as long as they are as now, and keeps them, so they must not keep it."""
    with torch.inference_mode(False), torch.enable_grad(), as_itself():
        return torch.cat([anchor.narrow(0, 0, 0) for anchor in anchors]).sum(0, keepdim=True, dtype=_float32)


def _leaves(source: Any, count: int) -> List[Any]:
    """The nodes of the anchors of a source."""
    leaves = []
    for node, _ in source.next_functions[0][0].next_functions:
        while node is not None and not isinstance(node, _Leaf):
            node = node.next_functions[0][0]
        leaves.append(node)
    assert len(leaves) == count
    return leaves


class WeightedRows(torch.autograd.Function):
    """The same rows; its backward has gradients of weights."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, lookup: Lookup, moment: Moment, *tensors: Optional[torch.Tensor]
    ) -> torch.Tensor:
        ctx.lookup, ctx.moment = lookup, moment
        ctx.save_for_backward(*tensors)
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        wanted = ctx.needs_input_grad[5::3]
        if _is_batched(grad):
            grads = _for_each(
                grad, lambda one: _weight_grads(ctx, ctx.lookup, _inputs.gradient(one), ctx.saved_tensors, wanted)
            )
            return (grad if ctx.needs_input_grad[0] else None, None, None, *_of_each(grads))
        with torch.no_grad():
            grads = _weight_grads(ctx, ctx.lookup, _inputs.gradient(grad.detach()), ctx.saved_tensors, wanted)
        if _is_grad_enabled():  # create_graph=True
            grads = [None if each is None else _once(each, grad, *ctx.saved_tensors) for each in grads]
        return (grad if ctx.needs_input_grad[0] else None, None, None, *_of_each(grads))


_weighted_rows: Callable[..., Any] = WeightedRows.apply  # without types in torch


def _for_each(
    batched: torch.Tensor, function: Callable[[torch.Tensor], List[Optional[torch.Tensor]]]
) -> List[Optional[torch.Tensor]]:
    """Of each gradient of a backward of several, as of a vectorized jacobian."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    each = torch._remove_batch_dim(batched, level, 1, 0)
    if _is_batched(each):
        raise NotImplementedError("a gradient of per_sample_weights of a table in a transform of a transform")
    with torch.no_grad():
        found = zip(*[function(one) for one in each])
        return [None if some[0] is None else torch._add_batch_dim(torch.stack(some), 0, level) for some in found]


class _Once(torch.autograd.Function):
    """A gradient of weights, whose own gradients are an error: of all that it was computed of, so that one of these
    alone is an error, too."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *computed_of: Optional[torch.Tensor]) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise NotImplementedError(
            "a derivative of the gradient of per_sample_weights of a table: it has one derivative, as PyTorch's has"
        )


_once: Callable[..., Any] = _Once.apply  # without types in torch


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
            "rows have been written since the forward (by an assignment, or by max_norm in another forward): the"
            " gradient of per_sample_weights needs them as they were; call backward() before"
        )
    return lookup.weight_grads(grad, tensors, wanted)


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


def held(table: Table, keys: torch.Tensor, rows: torch.Tensor) -> Held:
    """Gradients of keys, as a backward would have delivered them."""
    lookup = Lookup.rows_of(table)
    with torch.inference_mode(False):  # a training step is going to use it
        rows = rows.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
        keys = keys.clone()
    return Held(lookup, (keys.to(rows.device), None, None), rows, next(table.steps.backwards))


def int64_of(key: int) -> int:
    """The 64 bits of a key as PyTorch's integers have them."""
    return key - (1 << 64) if key >> 63 else key
