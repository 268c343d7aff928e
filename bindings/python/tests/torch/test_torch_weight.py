"""`module.weight`: read, written, set and refused, each compared with the same module of torch.nn."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward and of the functions of torch.nn.init.

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from torch_support import DIM, ROWS, integers, sgd, snapshot

import frugal
import frugal.torch as ft

Pair = Tuple[ft.Embedding, torch.nn.Embedding]


@pytest.fixture
def pair(trainer: frugal.Trainer) -> Pair:
    weight = integers(ROWS, DIM, low=-50, high=50)
    return (
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer, optimizer=sgd()),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()),
    )


def same(pair: Any) -> bool:
    ours, theirs = pair
    return torch.equal(ours.weight, theirs.weight.detach()) and torch.equal(
        ours.state_dict()["weight"], theirs.state_dict()["weight"]
    )


def mask() -> torch.Tensor:
    return torch.arange(ROWS) % 3 == 0


INDEXES: Dict[str, Any] = {
    "int": 3,
    "last": -1,
    "NumPy's": np.int64(4),
    "0-d": torch.tensor(5),
    "slice": slice(2, 9),
    "steps": slice(50, None, 4),
    "negative": slice(-4, None),
    "nothing": slice(9, 2),
    "all": slice(None),
    "list": [4, 4, -2],
    "empty list": [],
    "tensor": torch.tensor([7, 0, -1]),
    "int32": torch.tensor([7, 0], dtype=torch.int32),
    "2-D tensor": torch.tensor([[7, 0], [1, 1]]),
    "array": np.array([3, 1]),
    "mask": mask(),
    "mask of NumPy": mask().numpy(),
    "mask in a list": mask().tolist(),
    "mask of elements": (torch.arange(ROWS * DIM) % 7 == 0).view(ROWS, DIM),
    "ellipsis": ...,
    "none": None,
    "empty tuple": (),
    "element": (3, 2),
    "row and columns": (3, slice(1, 4)),
    "column": (slice(None), 2),
    "block": (slice(2, 5), slice(None, None, 2)),
    "last column": (..., -1),
    "first": (0, ...),
    "rows, column": ([1, 2], 3),
    "rows, columns": (torch.tensor([1, 2]), slice(2, 4)),
    "pairs": ([1, 2, 5], [0, 3, 3]),
    "tensors": (torch.tensor([[1], [2]]), torch.tensor([0, 3])),
    "mask, column": (mask(), 1),
    "new axis": (2, None),
    "true": True,
}


@pytest.mark.parametrize("case", list(INDEXES))
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("form", ["weight", "data", "detach"])
def test_indexes_read_as_torch_s(pair: Pair, case: str, grad: bool, form: str) -> None:
    index = INDEXES[case]
    with torch.set_grad_enabled(grad):
        weights: List[Any] = [module.weight for module in pair]
        if form == "data":
            weights = [weight.data for weight in weights]
        elif form == "detach":
            weights = [weight.detach() for weight in weights]
        mine, expected = weights[0][index], weights[1][index]
        assert torch.equal(mine, expected) and mine.shape == expected.shape and mine.dtype == expected.dtype
        if grad:  # in torch a view of a leaf requires a gradient also under no_grad()
            assert mine.requires_grad == expected.requires_grad


@pytest.mark.parametrize("case", list(INDEXES))
@pytest.mark.parametrize("form", ["no_grad", "data"])
def test_indexes_write_as_torch_s(pair: Pair, case: str, form: str) -> None:
    index = INDEXES[case]
    shape = torch.zeros(ROWS, DIM)[index].shape
    values: List[Any] = [7.0, integers(*shape)]
    if case in ("list", "2-D tensor"):
        values = values[:1]  # which of two values a row gets is not said
    for value in values:
        for module in pair:
            if form == "data":
                module.weight.data[index] = value
            else:
                with torch.no_grad():
                    module.weight[index] = value
        assert same(pair)


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, [0, ROWS], torch.tensor([ROWS]), torch.zeros(3, dtype=torch.bool)])
def test_indexes_out_of_range(pair: Pair, index: Any) -> None:
    before = snapshot(pair[0])
    for module in pair:
        with pytest.raises(IndexError):
            module.weight[index]
        with pytest.raises(IndexError), torch.no_grad():
            module.weight[index] = 0.0
    assert torch.equal(pair[0].weight, before)


@pytest.mark.parametrize("index", [1.5, torch.tensor([0.5]), "a", slice(None, None, -1)])
def test_indexes_of_no_sense(pair: Pair, index: Any) -> None:
    for module in pair:
        with pytest.raises((IndexError, TypeError, ValueError)):
            module.weight[index]
        with pytest.raises((IndexError, TypeError, ValueError)), torch.no_grad():
            module.weight[index] = 0.0
    assert same(pair)


# --- Views ---

VIEWS: Dict[str, Callable[[Any], Any]] = {
    "row": lambda w: w[3],
    "row's element": lambda w: w[3][2],
    "row of a slice": lambda w: w[2:8][1],
    "slice": lambda w: w[2:8],
    "column": lambda w: w[:, 1],
    "element": lambda w: w[1, 1],
    "transposed": lambda w: w.t(),
    "T": lambda w: w.T,
    "flat": lambda w: w.view(-1),
    "flattened": lambda w: w.flatten()[5:9],
    "reshaped": lambda w: w.reshape(-1, 4)[1],
    "narrow": lambda w: w.narrow(0, 2, 3),
    "select": lambda w: w.select(0, 1),
    "unbind": lambda w: w.unbind(0)[5],
    "split": lambda w: w.split(20)[1],
    "chunk": lambda w: w.chunk(3)[2],
    "iterated": lambda w: next(iter(w)),
    "unsqueezed": lambda w: w.unsqueeze(0)[0, 2:4],
    "data of a row": lambda w: w[3].data,
    "detached row": lambda w: w[3].detach(),
    "diagonal": lambda w: w.diagonal(),
    "the same type": lambda w: w.float(),
    "contiguous": lambda w: w.contiguous(),
}
CHANGES: Dict[str, Callable[[Any], Any]] = {
    "fill": lambda v: v.fill_(4.0),
    "zero": lambda v: v.zero_(),
    "copy": lambda v: v.copy_(torch.full(tuple(v.shape), 5.0)),
    "mul": lambda v: v.mul_(2.0),
    "add": lambda v: v.add_(torch.ones(tuple(v.shape)), alpha=3),
    "setitem": lambda v: v.__setitem__(..., 6.0),
    "out": lambda v: torch.neg(v.clone(), out=v),
    "foreach": lambda v: torch._foreach_add_([v], 2.0),
    "constant": lambda v: torch.nn.init.constant_(v, 2.5),
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("change", list(CHANGES))
def test_views_are_written_through(pair: Pair, view: str, change: str) -> None:
    with torch.no_grad():
        for module in pair:
            CHANGES[change](VIEWS[view](module.weight))
            CHANGES[change](VIEWS[view](module.weight.data))
    assert same(pair)


@pytest.mark.parametrize("view", [*VIEWS, "all"])
def test_a_kept_view_is_of_the_rows_as_they_are(pair: Pair, view: str) -> None:
    """What is trained and written meanwhile is seen, and stays where it is not written."""
    take: Callable[[Any], Any] = VIEWS.get(view, lambda w: w[:])
    with torch.no_grad():
        kept = [[take(module.weight), take(module.weight.data)] for module in pair]
    optimizers = [torch.optim.Adagrad(module.parameters(), lr=0.5) for module in pair]

    def alike() -> bool:
        return all(torch.equal(mine, theirs) for mine, theirs in zip(*kept)) and torch.allclose(
            pair[0].weight, pair[1].weight.detach(), rtol=1e-6, atol=1e-6
        )

    for turn in range(2):
        for module, made in zip(pair, optimizers):
            made.zero_grad()
            (module(torch.arange(ROWS)) * integers(1, DIM)).sum().backward()
            made.step()
        with torch.no_grad():  # the two worlds' rows, exactly
            pair[1].weight.copy_(snapshot(pair[0]))
        assert alike()
        for change in ("mul", "setitem", "out"):
            with torch.no_grad():
                for views in kept:
                    CHANGES[change](views[turn])
            assert alike() and same(pair)
        for module in pair:
            module.weight.data[3] = 9.0
        assert alike() and same(pair)


@pytest.mark.parametrize("use", [lambda v: 2 * v, lambda v: v * v])
def test_a_kept_view_in_a_graph_is_of_the_rows_as_they_are(pair: Pair, use: Callable[[Any], Any]) -> None:
    """What PyTorch has kept of it for a gradient is as it was, or an error."""
    found: List[List[Any]] = []
    for module in pair:
        weight = module.weight
        row, part = weight[3], weight[2:8].t()
        before, other = use(part).sum(), use(row).sum()
        module(torch.arange(ROWS)).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.5).step()
        of_both = torch.autograd.grad(use(row + part[:, 1]).sum(), weight)[0]
        found.append([before, other, row.clone(), part.sum(), of_both])
        for loss in (before, other):
            try:
                found[-1].append(torch.autograd.grad(loss, weight)[0])
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                found[-1].append(torch.empty(0))
        with torch.no_grad():
            row.mul_(3.0)
        found[-1].append(part.clone())
    for mine, expected in zip(*found):
        assert torch.equal(mine, expected)
    assert same(pair)


def test_a_kept_view_of_a_hashed_table_is_of_its_keys(trainer: frugal.Trainer) -> None:
    """Wherever rows that come later stand in weight."""
    module = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer, optimizer=sgd())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

    def train(*ids: int) -> None:
        module(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train(5, -7)
    row, key = module.weight.data[1], int(module.state_dict()["keys"][1])
    module.load_state_dict({"weight": torch.ones(1, DIM), "keys": torch.tensor([key])})
    train(*range(20, 40))
    row.mul_(3.0)
    saved = module.state_dict()
    here = saved["keys"] == key
    assert torch.equal(saved["weight"][here], torch.full((1, DIM), 3.0)) and torch.equal(row, saved["weight"][here][0])
    assert len(saved["keys"]) == 21 and not saved["weight"][~here].eq(3.0).any()


@pytest.mark.parametrize("view", ["row", "slice", "transposed", "flat", "unbind"])
def test_views_are_not_written_while_gradients_are_computed(pair: Pair, view: str) -> None:
    before = snapshot(pair[0])
    for module in pair:
        with pytest.raises(RuntimeError, match="in-place|inplace"):
            VIEWS[view](module.weight).fill_(1.0)
    assert torch.equal(pair[0].weight, before) and same(pair)


def test_copies_are_copies(pair: Pair) -> None:
    for module in pair:
        with torch.no_grad():
            for part in (
                module.weight.clone(),
                module.weight[[1, 2]],
                module.weight[mask()],
                module.weight + 0,
                module.weight.double(),
                copy.deepcopy(module.weight)[3],
                module.weight[3].clone(),
                module.weight[3] * 1,
                copy.deepcopy(module.weight.detach()[3]),
            ):
                part.zero_()
    assert same(pair) and type(pair[0].weight[3].clone()) is torch.Tensor


def test_numpy_s_arrays_cannot_be_written(pair: Pair) -> None:
    ours, theirs = pair
    for array in (ours.weight.detach().numpy(), np.asarray(ours.weight.detach()), ours.weight.data[3].numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    assert np.array_equal(ours.weight.detach().numpy(), theirs.weight.detach().numpy())
    assert np.array_equal(ours.weight.detach().cpu().numpy()[3], theirs.weight.detach().numpy()[3])
    with pytest.raises(RuntimeError, match="detach"):
        ours.weight.numpy()


# --- Reading ---

READS: Dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(0),
    "norm": lambda w: w.norm(dim=1),
    "add": lambda w: w + 1,
    "radd": lambda w: 1 - w,
    "two": lambda w: w * w,
    "matmul": lambda w: torch.ones(3, DIM) @ w.t(),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, DIM), w),
    "embedding": lambda w: torch.nn.functional.embedding(torch.tensor([1, 2]), w),
    "cosine": lambda w: torch.nn.functional.cosine_similarity(w[0:1], w),
    "normalize": lambda w: torch.nn.functional.normalize(w),
    "topk": lambda w: w[:, 0].topk(3).values,
    "cat": lambda w: torch.cat([w, w[:2]]),
    "stack": lambda w: torch.stack([w, w]),
    "cdist": lambda w: torch.cdist(w[:2], w),
    "eq": lambda w: w == 0,
    "gather": lambda w: w.gather(0, torch.zeros(1, DIM, dtype=torch.int64)),
    "index_select": lambda w: torch.index_select(w, 0, torch.tensor([3, 1])),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "abs": abs,
    "double": lambda w: w.double(),
    "to": lambda w: w.to(torch.bfloat16),
    "clone": lambda w: w.clone(),
    "cpu": lambda w: w.cpu(),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "item": lambda w: torch.tensor(w[2, 3].item()),
    "len": lambda w: torch.tensor(len(w)),
    "list": lambda w: torch.stack(list(w)),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
}


@pytest.mark.parametrize("case", list(READS))
def test_reading_is_torch_s(pair: Pair, case: str) -> None:
    results = [READS[case](module.weight) for module in pair]
    assert torch.equal(results[0], results[1]) and results[0].dtype == results[1].dtype
    results = [READS[case](module.weight.data) for module in pair]
    assert torch.equal(results[0], results[1]) and not results[0].requires_grad
    assert same(pair)


def test_what_a_weight_is(pair: Pair) -> None:
    ours, theirs = (module.weight for module in pair)
    assert isinstance(ours, torch.nn.Parameter) and isinstance(ours, torch.Tensor)
    assert ours.shape == theirs.shape and ours.size(1) == DIM and ours.dim() == 2 and ours.numel() == ROWS * DIM
    assert (ours.dtype, ours.device, ours.layout) == (theirs.dtype, theirs.device, theirs.layout)
    assert ours.requires_grad and ours.is_leaf and ours.grad is None and ours.grad_fn is None
    assert not ours.data.requires_grad and not isinstance(ours.data, torch.nn.Parameter)
    assert ours.is_floating_point() and not ours.is_sparse and ours.element_size() == 4
    assert "embedding_0" in repr(ours) and str((ROWS, DIM)) in repr(ours)
    assert repr(ours.detach()[3]) == repr(theirs.detach()[3])
    assert torch.is_tensor(ours) and bool((ours == theirs).all())
    with pytest.raises(RuntimeError, match=r"no memory.*clone\(\)"):
        ours.data.data_ptr()
    torch.testing.assert_close(ours, theirs)
    (parameter,) = pair[0].parameters()
    assert ours is parameter and pair[0].weight is parameter
    assert ours.as_subclass(torch.Tensor).sum() == theirs.sum()


def test_a_weight_shows_rows_as_they_are(pair: Pair) -> None:
    """As torch's parameter does, and not as they were when it was asked for."""
    kept = [module.weight for module in pair]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in pair]
    batch = torch.tensor([1, 5])
    for step in range(2):
        for module in pair:
            module(batch).sum().backward()
        assert torch.equal(kept[0], kept[1])  # between backward and step
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(kept[0], kept[1]) and same(pair)


def test_reading_does_not_disturb_a_step(engine: frugal.Engine, pair: Pair) -> None:
    ours, theirs = pair
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in pair]
    batch, grad = torch.tensor([1, 5, 1]), integers(3, DIM)
    outs = [module(batch) for module in pair]
    assert torch.equal(ours.weight[batch], theirs.weight[batch])
    with torch.no_grad():
        for module in pair:
            module.weight[7] = 3.0
    for out in outs[:1]:
        out.backward(grad)
    theirs(batch).backward(grad)  # torch's first graph is stale
    for optimizer in optimizers:
        optimizer.step()
    assert same(pair) and engine.committed_step() == 0


def test_files_and_copies_have_rows(pair: Pair) -> None:
    ours, theirs = pair
    file = io.BytesIO()
    torch.save({"w": ours.weight, "row": ours.weight.detach()[3]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["w"], theirs.weight) and torch.equal(saved["row"], theirs.weight[3])
    assert saved["row"].untyped_storage().nbytes() == DIM * 4
    assert torch.equal(copy.deepcopy(ours.weight), theirs.weight.detach())
    assert torch.equal(pickle.loads(pickle.dumps(ours.weight.detach())), theirs.weight.detach())


# --- Writing ---

WRITES: Dict[str, Callable[[Any], Any]] = {
    "normal": lambda m: torch.nn.init.normal_(m.weight, 1.0, 0.5),
    "uniform": lambda m: torch.nn.init.uniform_(m.weight, -0.5, 0.25),
    "xavier_uniform": lambda m: torch.nn.init.xavier_uniform_(m.weight, gain=2.0),
    "xavier_normal": lambda m: torch.nn.init.xavier_normal_(m.weight),
    "kaiming_uniform": lambda m: torch.nn.init.kaiming_uniform_(m.weight, a=5**0.5),
    "kaiming_normal": lambda m: torch.nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu"),
    "trunc_normal": lambda m: torch.nn.init.trunc_normal_(m.weight, std=0.02),
    "constant": lambda m: torch.nn.init.constant_(m.weight, 0.25),
    "zeros": lambda m: torch.nn.init.zeros_(m.weight),
    "ones": lambda m: torch.nn.init.ones_(m.weight),
    "data normal": lambda m: m.weight.data.normal_(mean=0.0, std=0.02),
    "data uniform": lambda m: m.weight.data.uniform_(-1, 1),
    "data zero": lambda m: m.weight.data.zero_(),
    "data fill": lambda m: m.weight.data.fill_(2),
    "data mul": lambda m: m.weight.data.mul_(0.5),
    "data add": lambda m: m.weight.data.add_(1.0),
    "data div": lambda m: m.weight.data.div_(torch.tensor(4.0)),
    "data clamp": lambda m: m.weight.data.clamp_(-1.0, 2.0),
    "detach": lambda m: m.weight.detach().neg_(),
    "data copy": lambda m: m.weight.data.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM)),
    "copy of a row": lambda m: m.weight.data.copy_(torch.arange(DIM)),
    "copy of doubles": lambda m: m.weight.data.copy_(torch.arange(ROWS * DIM).double().view(ROWS, DIM)),
    "copy of itself": lambda m: m.weight.data.copy_(m.weight * 2),
    "data is": lambda m: setattr(m.weight, "data", torch.arange(ROWS * DIM).float().view(ROWS, DIM)),
    "parameter": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.full((ROWS, DIM), 3.0))),
    "parameter of itself": lambda m: setattr(m, "weight", torch.nn.Parameter(m.weight * 2)),
    "itself": lambda m: setattr(m, "weight", m.weight),
    "from NumPy": lambda m: m.weight.data.copy_(torch.from_numpy(np.ones((ROWS, DIM), dtype=np.float32))),
    "load": lambda m: m.load_state_dict({"weight": torch.full((ROWS, DIM), 3.0)}),
    "imul": lambda m: m.weight.data.__imul__(3.0),
    "augmented": lambda m: exec("m.weight.data *= 2", {"m": m}),
    "augmented row": lambda m: exec("m.weight.data[2] += 2", {"m": m}),
    "reset": lambda m: m.reset_parameters(),
}


@pytest.mark.parametrize("case", list(WRITES))
def test_writing_is_torch_s(pair: Pair, case: str) -> None:
    """With the same seed also what is drawn."""
    for module in pair:
        torch.manual_seed(11)
        WRITES[case](module)
    assert same(pair)
    assert pair[0].weight.requires_grad and not pair[0].frozen


@pytest.mark.parametrize("rows", [70_000])
def test_many_rows_are_written_in_pieces_as_torch_s(trainer: frugal.Trainer, rows: int) -> None:
    """Above the size that is held at once."""
    ours = ft.Embedding(rows, 4, trainer=trainer)
    with torch.no_grad():
        ours.weight.copy_(torch.arange(rows).float()[:, None])
        ours.weight[rows - 2 :] += 1
        ours.weight.mul_(2)
    expected = torch.arange(rows).float()[:, None].repeat(1, 4)
    expected[rows - 2 :] += 1
    assert torch.equal(ours.weight, expected * 2)
    torch.nn.init.normal_(ours.weight, std=0.5)
    weight = snapshot(ours)
    assert abs(weight.mean()) < 0.01 and abs(weight.std() - 0.5) < 0.01
    assert not torch.equal(weight[:1000], weight[65536 : 65536 + 1000])  # each piece is drawn anew


def test_a_written_row_is_what_a_forward_reads(pair: Pair) -> None:
    batch = torch.tensor([3, 4])
    for module in pair:
        module(batch)  # a step is open
        module.weight.data[3] = 9.0
        out = module(batch)
        assert torch.equal(out[0], torch.full((DIM,), 9.0))
        out.sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert same(pair)


def test_writing_keeps_the_optimizer_s_state(trainer: frugal.Trainer) -> None:
    weight = integers(ROWS, DIM)
    modules: List[Any] = [
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()),
    ]
    optimizers = [torch.optim.Adagrad(module.parameters(), lr=0.5) for module in modules]
    for case in ("data is", "data copy", "data mul", "constant", "augmented row", "load"):
        for module, optimizer in zip(modules, optimizers):
            optimizer.zero_grad()
            module(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            WRITES[case](module)
        torch.testing.assert_close(snapshot(modules[0]), modules[1].weight.detach(), rtol=1e-6, atol=1e-6)


def test_a_parameter_says_dtype_and_requires_grad(pair: Pair) -> None:
    for module in pair:
        module.weight = torch.nn.Parameter(torch.ones(ROWS, DIM, dtype=torch.float64), requires_grad=False)
        assert module.weight.dtype == torch.float64 and not module.weight.requires_grad
        assert module(torch.tensor([1])).dtype == torch.float64
    assert pair[0].frozen
    pair[0].weight.requires_grad = True
    assert not pair[0].frozen and pair[0].weight.requires_grad
    pair[0].weight.requires_grad_(False)
    assert pair[0].frozen


# --- Refusals ---


def test_leaves_are_not_written_while_gradients_are_computed(pair: Pair) -> None:
    ours, theirs = pair
    calls: List[Callable[[Any], Any]] = [
        lambda m: m.weight.fill_(1.0),
        lambda m: m.weight.copy_(torch.ones(ROWS, DIM)),
        lambda m: m.weight.__setitem__(3, 1.0),
        lambda m: m.weight.normal_(),
        lambda m: exec("m.weight += 1", {"m": m}),
    ]
    for call in calls:
        for module in pair:
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                call(module)
    assert same(pair)
    ours.requires_grad_(False)
    theirs.requires_grad_(False)
    for call in calls[:3]:
        for module in pair:
            call(module)
        assert same(pair)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.t_(),
        lambda w: w.transpose_(0, 1),
        lambda w: w.resize_(2, 2),
        lambda w: w.set_(torch.zeros(ROWS, DIM)),
        lambda w: w.add_(torch.ones(ROWS, DIM)),
        lambda w: w.mul_(torch.ones(DIM)),
        lambda w: w.index_fill_(0, torch.tensor([1]), 2.0),
        lambda w: w.scatter_(0, torch.zeros(1, DIM, dtype=torch.int64), 2.0),
        lambda w: torch.zeros(ROWS, DIM, out=w),
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_add_([w], 1.0),
        lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
        lambda w: setattr(w, "grad", torch.zeros(ROWS, DIM)),
        lambda w: torch.nn.init.orthogonal_(w),
        lambda w: w.share_memory_(),
    ],
)
def test_what_cannot_be_written_is_refused_or_done(pair: Pair, call: Callable[[Any], Any]) -> None:
    """Nothing is lost: it is as torch's afterwards, or an error and as before."""
    ours, theirs = pair
    before = snapshot(ours)
    try:
        with torch.no_grad():
            torch.manual_seed(3)
            call(ours.weight)
    except (NotImplementedError, RuntimeError) as error:
        assert "weight" in str(error)
        assert torch.equal(ours.weight, before)
    else:
        with torch.no_grad():
            torch.manual_seed(3)
            call(theirs.weight)
        assert same(pair)


def test_shapes_that_do_not_fit_are_refused(pair: Pair) -> None:
    ours, _ = pair
    before = snapshot(ours)
    for call in (
        lambda: setattr(ours, "weight", torch.nn.Parameter(torch.ones(2, DIM))),
        lambda: setattr(ours.weight, "data", torch.ones(ROWS, DIM + 1)),
        lambda: ours.weight.data.copy_(torch.ones(ROWS, DIM + 1)),
        lambda: ours.weight.data.__setitem__(3, torch.ones(DIM + 1)),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    with pytest.raises(TypeError, match="torch.Tensor"):
        ours.weight = [1.0]  # type: ignore[assignment]
    with pytest.raises((AttributeError, TypeError, NotImplementedError)):
        del ours.weight
    assert torch.equal(ours.weight, before)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: (torch.ones(2, DIM) @ w.t()).sum(),
        lambda w: torch.nn.functional.linear(torch.ones(2, DIM), w).sum(),
        lambda w: w.sum(),
        lambda w: torch.nn.functional.embedding(torch.tensor([1]), w).sum(),
        lambda w: w.norm(),
    ],
)
def test_a_gradient_of_all_of_weight_trains_all_rows(pair: Pair, use: Callable[[Any], Any]) -> None:
    """As of a decoder that uses it, or of a penalty; with forwards of the module in between."""
    ours, theirs = pair
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in pair]
    for _ in range(2):
        for module, optimizer in zip(pair, optimizers):
            loss = use(module.weight) + module(torch.tensor([1, 5, 1])).sum()
            assert loss.requires_grad
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())
    assert not use(ours.weight.detach()).requires_grad
    ours.requires_grad_(False)
    assert not use(ours.weight).requires_grad


USES: Dict[str, Callable[[Any], Any]] = {
    "embedding": lambda w: torch.nn.functional.embedding(torch.tensor([[1, 2], [2, 2]]), w),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, DIM), w),
    "norm": lambda w: w.norm(),
    "rows": lambda w: w[[3, 3, -1]].pow(2),
    "row": lambda w: w[4] * w[4, 2:3],
    "slice": lambda w: w[2:9:2, 1:3].exp(),
    "mask": lambda w: w[mask()] * 2,
}


@pytest.mark.parametrize("use", list(USES))
def test_autograd_grad_of_weight_is_torch_s(pair: Pair, use: str) -> None:
    """It has the gradient of all rows, and trains nothing."""
    for module in pair:
        torch.nn.init.normal_(module.weight, std=0.25)
    pair[1].weight.data.copy_(pair[0].weight)
    for same_object in (True, False):
        got = []
        for module in pair:
            weight = module.weight
            out = USES[use](weight)
            asked = [weight if same_object else module.weight]
            grads = torch.autograd.grad(out.sum(), asked, create_graph=True)
            got.append((grads[0].detach(), torch.autograd.grad(grads[0].sum(), asked, allow_unused=True)[0] if
                        grads[0].requires_grad else None))
        for mine, expected in zip(*got):
            assert (mine is None) == (expected is None)
            if mine is not None:
                torch.testing.assert_close(mine, expected)
        assert pair[0].weight.grad is None and list(pair[0].parameters())[0].grad is None
    assert pair[0].weight is pair[0].weight and same(pair)


def test_weight_stays_one_object(pair: Pair) -> None:
    for module in pair:
        weight: Any = module.weight
        for requires_grad in (False, True):
            module.requires_grad_(requires_grad)
            assert module.weight is weight and weight.requires_grad == requires_grad
            weight.requires_grad_(not requires_grad)
            assert module.weight is weight and (weight * 2).requires_grad != requires_grad


def test_gradcheck_through_weight(pair: Pair) -> None:
    """Rows are float32, so that its steps are larger than for doubles."""
    torch.nn.init.uniform_(pair[0].weight, -0.5, 0.5)
    ids = torch.tensor([[0, 1, 1], [3, 5, 7]])
    for fast in (False, True):
        assert torch.autograd.gradcheck(
            lambda w: torch.nn.functional.embedding(ids, w), (pair[0].weight,), eps=1e-2, atol=1e-3, fast_mode=fast
        )


@pytest.mark.parametrize("sparse", [False, True])
def test_autograd_grad_of_weight_has_what_forwards_leave(trainer: frugal.Trainer, sparse: bool) -> None:
    weight = integers(ROWS, DIM)
    modules: List[Any] = [
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer, sparse=sparse),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone(), sparse=sparse),
    ]
    batch, grad = torch.tensor([1, 5, 1]), integers(3, DIM)
    for tied in (False, True):
        got = []
        for module in modules:
            other = torch.ones(1, requires_grad=True)
            loss = (module(batch) * grad).sum() * other + (module.weight.pow(2).sum() if tied and not sparse else 0)
            mine, factor = torch.autograd.grad(loss, [module.weight, other], retain_graph=True)
            assert mine.is_sparse is sparse
            got.append((mine.to_dense() if sparse else mine, factor))
            with pytest.raises(RuntimeError, match="not have been used"):
                torch.autograd.grad(loss, [module.weight, torch.ones(1, requires_grad=True)], retain_graph=True)
            with pytest.raises(RuntimeError, match="not have been used"):
                torch.autograd.grad(other.sum(), [module.weight])
            (nothing,) = torch.autograd.grad(other.sum(), module.weight, allow_unused=True)
            assert nothing is None
            (zeros,) = torch.autograd.grad(other.sum(), [module.weight], materialize_grads=True)
            assert zeros.shape == (ROWS, DIM) and not zeros.any()
        assert all(torch.equal(a, b) for a, b in zip(*got))
    assert modules[0].weight.grad is None and same(modules)


def test_backward_to_a_named_weight(pair: Pair) -> None:
    """What forwards of the module leave, and no more, is trained."""
    batch, grad = torch.tensor([1, 5, 1]), integers(3, DIM)
    for module in pair:
        other = torch.ones(1, requires_grad=True)
        torch.autograd.backward([(module(batch) * grad * other).sum()], inputs=[module.weight])
        assert other.grad is None and module.weight.grad is not None
        (module(batch) * grad).sum().backward(inputs=module.weight)
        torch.optim.SGD(module.parameters(), lr=0.5).step()
        module.zero_grad()
    assert same(pair)
    for module in pair:
        module.weight.sum().backward(inputs=[module.weight])
    assert pair[0].weight.grad is not None and torch.equal(pair[0].weight.grad, torch.ones(ROWS, DIM))


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_decoder_that_shares_the_weight_trains_it(pair: Pair, kind: str) -> None:
    ours, theirs = pair
    models = []
    for module in pair:
        decoder = torch.nn.Linear(DIM, ROWS, bias=False)
        decoder.weight = module.weight
        model = torch.nn.Sequential(module, decoder)
        models.append((model, getattr(torch.optim, kind)(model.parameters(), lr=0.05)))
    batch, label = torch.tensor([1, 5, 1]), torch.tensor([5, 1, 2])
    for _ in range(5):
        losses = []
        for model, optimizer in models:
            optimizer.zero_grad()
            losses.append(torch.nn.functional.cross_entropy(model(batch), label))
            losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())


def test_a_module_of_torch_takes_the_weight(pair: Pair) -> None:
    ours, theirs = pair
    assert torch.equal(torch.nn.Embedding(ROWS, DIM, _weight=ours.weight).weight, theirs.weight)
    own = ours.weight.detach().requires_grad_()  # a leaf of its own
    own[1].sum().backward()
    assert own.grad is not None and own.grad[1].eq(1).all() and ours.weight.grad is None
    assert not ours.frozen and same(pair)


# --- Gradients ---


@pytest.mark.parametrize("sparse", [False, True])
def test_grad_is_torch_s(trainer: frugal.Trainer, sparse: bool) -> None:
    weight = integers(ROWS, DIM)
    weight[2] = 0
    modules: List[Any] = [
        ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, sparse=sparse, padding_idx=2, trainer=trainer),
        torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight.clone(), sparse=sparse, padding_idx=2),
    ]
    batch = torch.randint(0, 6, (5, 3))
    for _ in range(2):
        grad = integers(5, DIM)
        for module in modules:
            module(batch).backward(grad)
        mine, expected = (module.weight.grad for module in modules)
        assert mine.layout == expected.layout and mine.shape == expected.shape and mine.dtype == expected.dtype
        if sparse:
            mine, expected = mine.coalesce().to_dense(), expected.coalesce().to_dense()
        assert torch.equal(mine, expected)
        torch.testing.assert_close(mine.norm(), expected.norm())
    with torch.no_grad():
        modules[0].weight.grad.sum()
    modules[0].weight.grad = None
    assert modules[0].weight.grad is None
    before = snapshot(modules[0])
    torch.optim.SGD(modules[0].parameters(), lr=0.5).step()
    assert torch.equal(modules[0].weight, before)


@pytest.mark.parametrize("sparse", [False, True])
def test_grad_of_many_keys_is_summed_before_it_is_rounded(trainer: frugal.Trainer, sparse: bool) -> None:
    """A sum of ones in bfloat16 stops at 256."""
    module = ft.Embedding(3, DIM, dtype=torch.bfloat16, sparse=sparse, trainer=trainer)
    module(torch.ones(1024, dtype=torch.int64)).sum().backward()
    grad = module.weight.grad
    assert grad is not None and grad.dtype == torch.bfloat16 and grad.is_sparse is sparse
    assert bool((grad.to_dense() if sparse else grad)[1].eq(1024).all())


def test_grad_is_scaled_and_clipped(pair: Pair) -> None:
    batch = torch.tensor([1, 2, 1])
    for module in pair:
        module(batch).backward(torch.arange(3 * DIM).float().view(3, DIM))
    for module in pair:
        torch.nn.utils.clip_grad_value_(module.parameters(), 8.0)
    mine, expected = (module.weight.grad for module in pair)
    assert mine is not None and expected is not None and torch.equal(mine, expected)
    for module in pair:
        module.zero_grad()
        module(batch).backward(torch.arange(3 * DIM).float().view(3, DIM))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    mine, expected = (module.weight.grad for module in pair)
    assert mine is not None and expected is not None
    torch.testing.assert_close(mine, expected)


# --- Hashed tables ---


def test_hashed_tables(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(100, DIM, hashed=True, trainer=trainer, optimizer=frugal.Adagrad(lr=0.5))
    assert module.weight.shape == (0, DIM) and module.weight.numel() == 0
    ids = torch.tensor([5, -7, 2**60])
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.5)
    module(ids).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.sum() == 3 * DIM
    with pytest.raises(NotImplementedError, match="hashed"):
        module.weight.grad.numpy()
    optimizer.step()
    saved = module.state_dict()
    assert module.weight.shape == (3, DIM) and torch.equal(module.weight, saved["weight"])
    state = optimizer.state_dict()["state"][0]["frugal_state"]
    with torch.no_grad():
        module.weight.mul_(2.0)
        module.weight[1] = 3.0
        module.weight[-1, 2:4] = 5.0
    expected = saved["weight"] * 2
    expected[1] = 3.0
    expected[-1, 2:4] = 5.0
    again = module.state_dict()
    assert torch.equal(again["keys"], saved["keys"]) and torch.equal(again["weight"], expected)
    assert torch.equal(module(saved["keys"]), expected)
    assert torch.equal(optimizer.state_dict()["state"][0]["frugal_state"], state) and bool((state > 0).all())
    with pytest.raises(IndexError):
        module.weight[3]


def test_the_weight_of_another_module_is_copied_or_shared(trainer: frugal.Trainer) -> None:
    one, other = (ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd()) for _ in range(2))
    other.weight.data.copy_(one.weight)
    assert torch.equal(snapshot(other), snapshot(one)) and other.table.name != one.table.name
    one.weight.data.add_(1)
    assert torch.equal(snapshot(other) + 1, snapshot(one))
    one.weight = one.weight  # what swaps and gives back does
    other.weight = one.weight
    assert other.table.name == one.table.name
    one.weight.data.add_(1)
    assert torch.equal(snapshot(other), snapshot(one))


def test_a_parameter_of_a_weight_is_a_copy(trainer: frugal.Trainer) -> None:
    bags = ft.EmbeddingBag(ROWS, DIM, trainer=trainer)
    rows = snapshot(bags)
    for made in (torch.nn.Parameter(bags.weight), torch.nn.Parameter(bags.weight.data)):
        assert type(made) is torch.nn.Parameter and made.requires_grad and made.is_leaf
        made.sum().backward()
        torch.optim.SGD([made], lr=1.0).step()
        assert torch.equal(made.detach(), rows - 1.0)
        assert torch.equal(bags.weight, rows)
        assert torch.equal(copy.deepcopy(made), made)
    assert not torch.nn.Parameter(bags.weight, requires_grad=False).requires_grad
    buffer = torch.nn.Buffer(bags.weight)
    assert type(buffer) is torch.Tensor and isinstance(buffer, torch.nn.Buffer) and torch.equal(buffer, rows)
    assert not isinstance(bags.weight, torch.nn.Buffer)
    kept = torch.nn.Embedding.from_pretrained(bags.weight)
    assert list(kept.state_dict()) == ["weight"] and not kept.weight.requires_grad
    assert torch.equal(kept(torch.arange(ROWS)), rows)
    assert isinstance(bags.weight, torch.nn.Parameter) and not isinstance(bags.weight.data, torch.nn.Parameter)


def test_a_tensor_that_has_taken_a_weight_for_its_data_is_an_error(trainer: frugal.Trainer) -> None:
    bags = ft.EmbeddingBag(ROWS, DIM, trainer=trainer)
    before = snapshot(bags)
    head = torch.nn.Linear(DIM, ROWS, bias=False)
    uses: List[Callable[[torch.nn.Linear], Any]] = [
        lambda head: head(torch.ones(1, DIM)), lambda head: head.weight.detach().clone(),
        lambda head: head.weight.data.fill_(0.0),
    ]  # fmt: skip
    head.weight.data = bags.weight.data
    for use in uses:
        with pytest.raises(RuntimeError, match=r"no memory of its own.*module\.weight\.detach\(\)\.clone\(\)"):
            use(head)
    assert torch.equal(bags.weight, before)
    head.weight.data = bags.weight.data.clone()
    assert torch.equal(head.weight, bags.weight)


# --- One object ---


SAME: Dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda one, other: one is other,
    "id": lambda one, other: id(one) == id(other),
    "set": lambda one, other: one in {other},
}


@pytest.mark.parametrize("how", SAME)
def test_parameters_are_split_by_the_weight(trainer: frugal.Trainer, how: str) -> None:
    """As for an optimizer of the embeddings and one of the rest: each table is stepped once."""
    weight, found = integers(ROWS, DIM), []
    ours = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer)
    for made in (ours, torch.nn.Embedding(ROWS, DIM, _weight=weight.clone())):
        torch.manual_seed(5)
        module: Any = made
        model = torch.nn.Sequential(module, torch.nn.Linear(DIM, 3))
        rest = [p for p in model.parameters() if not SAME[how](p, module.weight)]
        assert len(rest) == 2
        optimizers = [torch.optim.SGD([module.weight], lr=0.5), torch.optim.SGD(rest, lr=0.25)]
        for ids in (torch.tensor([1, 5, 1]), torch.tensor([5, 9])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(ids).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        found.append((module.weight.detach().clone(), rest[0].detach()))
    for mine, expected in zip(*found):
        torch.testing.assert_close(mine, expected)


def test_a_function_that_writes_to_the_weight_returns_it(pair: Pair) -> None:
    for module in pair:
        weight = module.weight
        assert torch.nn.init.zeros_(weight) is weight
        with torch.no_grad():
            assert weight.mul_(2.0) is weight and weight.copy_(torch.ones(ROWS, DIM)) is weight
            assert torch.add(weight, 1.0, out=weight) is weight
        assert module.state_dict(keep_vars=True)["weight"] is weight is module.get_parameter("weight")
        module.weight = weight
        assert module.weight is weight and weight.requires_grad_(False) is weight and not weight.requires_grad
    assert same(pair)


@pytest.mark.parametrize("form", ["weight", "rows", "norm"])
def test_a_penalty_of_a_gradient_that_a_weight_leaves(pair: Pair, form: str) -> None:
    of: Dict[str, Callable[[Any], torch.Tensor]] = {
        "weight": lambda module: module.weight.pow(2).sum(),
        "rows": lambda module: module.weight[torch.tensor([1, 4, 4])].pow(3).sum(),
        "norm": lambda module: module.weight[3:7].norm() + module.weight[5, 2] ** 2,
    }
    for module in pair:
        (gradient,) = torch.autograd.grad(of[form](module), module.weight, create_graph=True)
        gradient.pow(2).sum().backward()
        of[form](module).backward(create_graph=True)
        assert module.weight.grad is not None
        module.weight.grad[2:8].pow(2).sum().backward()
    mine, expected = (module.weight.grad for module in pair)
    assert mine is not None and expected is not None
    torch.testing.assert_close(mine.detach().clone(), expected.detach(), rtol=1e-5, atol=1e-4)
    for module in pair:
        module.weight.grad = None  # which PyTorch holds in a cycle


@pytest.mark.parametrize("pools", [True, False])
def test_a_sparse_gradient_is_one_for_its_user(trainer: frugal.Trainer, pools: bool) -> None:
    kind = "EmbeddingBag" if pools else "Embedding"
    ids = torch.tensor([[1, 5], [1, 9]])
    found: List[Any] = []
    ours = getattr(ft, kind)(ROWS, DIM, sparse=True, trainer=trainer)
    for made in (ours, getattr(torch.nn, kind)(ROWS, DIM, sparse=True)):
        module: Any = made
        module(ids).sum().backward()
        grad = module.weight.grad
        assert grad.is_sparse and grad.layout == torch.sparse_coo and not grad.is_coalesced()
        rows = grad.coalesce()
        found.append((rows.indices(), rows.values(), grad.to_dense(), grad._nnz(), torch.sparse.sum(grad).item()))
        (parameter,) = module.parameters()
        assert parameter.grad is grad
    assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3])) and found[0][3:] == found[1][3:]


def test_a_transform_of_a_function_of_a_weight_gets_rows(pair: Pair) -> None:
    def product(weight: Any) -> Any:
        return torch.vmap(lambda row: row @ weight.t())(torch.ones(2, DIM))

    with pytest.raises(NotImplementedError, match=r"module\.weight\.clone\(\)"):
        product(pair[0].weight)
    assert torch.equal(product(pair[0].weight.clone()), product(pair[1].weight))
    assert torch.equal(product(pair[0].weight.detach()[...]), product(pair[1].weight))


def test_another_parameter_leaves_the_one_of_before_its_rows() -> None:
    """As a moving average that is evaluated for a while."""
    torch.manual_seed(2)
    ids = torch.arange(4)
    module = ft.Embedding(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def step() -> None:
        module(ids[1:3]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    trained, average = module.weight, torch.nn.Parameter(torch.ones(4, 2))
    rows = trained.clone()
    module.weight = average
    assert module.weight is not trained and torch.equal(trained, rows)
    assert torch.equal(module(ids), torch.ones(4, 2)) and torch.equal(module.weight, torch.ones(4, 2))
    module.weight = trained
    assert module.weight is trained and torch.equal(module(ids), rows)
    step()
    rows[1:3] -= 1.0
    assert torch.equal(module.weight, rows)
    # Between a backward and its step: the gradient is of the parameter of before.
    module(ids[:1]).sum().backward()
    module.weight = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer.step()
    rows[0] -= 1.0
    assert torch.equal(trained, rows) and torch.equal(module.weight, torch.zeros(4, 2))
    optimizer.add_param_group({"params": [module.weight]})
    optimizer.zero_grad()
    step()
    assert torch.equal(trained, rows) and module.weight[1:3].sum() == -4.0


def test_another_parameter_parts_modules_that_shared_one() -> None:
    ids = torch.arange(4)
    first, second = ft.Embedding(4, 2), ft.EmbeddingBag(4, 2, mode="sum")
    second.weight = first.weight
    rows = first.weight.clone()
    second.weight = torch.nn.Parameter(torch.zeros(4, 2))
    assert torch.equal(first(ids), rows) and not second(ids[:, None]).any()
    (first(ids).sum() + 2 * second(ids[:, None]).sum()).backward()
    torch.optim.SGD([first.weight, second.weight], lr=1.0).step()
    assert torch.equal(first(ids), rows - 1.0) and torch.equal(second.weight, torch.full((4, 2), -2.0))


def test_another_parameter_of_a_table_with_a_name_is_refused_once_it_is_trained() -> None:
    module = ft.Embedding(4, 2, name="of its own")
    module.weight = torch.nn.Parameter(torch.ones(4, 2))
    module(torch.arange(4)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    with pytest.raises(NotImplementedError, match="data.copy_"):
        module.weight = torch.nn.Parameter(torch.ones(4, 2))
    assert not module.weight.any()


def test_a_parameter_of_another_shape_or_of_inference_mode() -> None:
    module = ft.Embedding(4, 2)
    with torch.inference_mode():
        rows = torch.nn.Parameter(torch.full((4, 2), 2.0), requires_grad=False)
    module.weight = rows
    assert torch.equal(module.weight, torch.full((4, 2), 2.0))
    module.weight.requires_grad_(True)
    module(torch.arange(4)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    before = module.weight
    with pytest.raises(Exception, match="4, 2"):
        module.weight = torch.nn.Parameter(torch.ones(5, 2))
    assert module.weight is before and torch.equal(before, torch.ones(4, 2))
