"""Embedding, EmbeddingBag and EmbeddingBagCollection compared with torch.nn: values, gradients, arguments."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import warnings
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from torch_support import DIM, ROWS, bag_pair, integers, sgd, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _default, _inputs, _steps, _weight
from frugal.torch._anchor import Anchor
from frugal.torch._gradient import Gradient


def other_keys(*shape: int, but: Optional[int]) -> torch.Tensor:
    keys = torch.randint(0, ROWS - 1, shape)
    return keys if but is None else keys + (keys >= but)


def bag_inputs(form: str, padding: Optional[int] = None) -> Dict[str, Any]:
    """Keys in bags of 1, 2, 4 or 8, half of them padding, so that means of multiples of 8 are exact; some bags are
    empty where the form allows it."""
    if form == "2d":
        keys = other_keys(12, 4, but=padding)
        if padding is not None:
            keys[:, ::2] = padding
        return {"input": keys}
    lengths = torch.tensor([1, 2, 0, 4, 8, 0, 1, 8, 8, 8, 4, 2, 2, 0])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    keys = other_keys(int(lengths.sum()), but=padding)
    if padding is not None:
        for begin, length in zip(ends.tolist(), lengths.tolist()):
            keys[begin : begin + length : 2] = padding
    if form == "last":
        return {"input": keys, "offsets": ends}
    return {"input": keys, "offsets": ends[:-1]}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("form", ["offsets", "last", "2d"])
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_bags_equal_torch_bit_for_bit(
    trainer: frugal.Trainer, mode: str, form: str, padding: Optional[int], dtype: torch.dtype
) -> None:
    weight = integers(ROWS, DIM) * 8
    if padding is not None:
        weight[padding] = 0
    ours, theirs = bag_pair(trainer, weight, mode=mode, include_last_offset=form == "last", padding_idx=padding)
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(4):
        inputs = bag_inputs(form, None if padding is None else padding % ROWS)
        inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        out, expected = ours(**inputs), theirs(**inputs)
        assert torch.equal(out, expected)
        grad = integers(*out.shape) * 128  # an eighth of it, times the rate, leaves rows multiples of 8
        dense.zero_grad()
        tables.zero_grad()
        out.backward(grad)
        expected.backward(grad)
        dense.step()
        tables.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_bags_of_any_numbers_equal_torch_nearly(trainer: frugal.Trainer, mode: str, kind: str) -> None:
    configs = {"sgd": frugal.SGD(lr=0.05), "adagrad": frugal.Adagrad(lr=0.05), "adam": frugal.Adam(lr=0.05)}
    ours, theirs = bag_pair(trainer, torch.randn(ROWS, DIM), mode=mode, optimizer=configs[kind])
    makers: Dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
        "adam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
    }
    tables, dense = ft.Optimizer(ours), makers[kind](list(theirs.parameters()))
    for _ in range(10):
        inputs = bag_inputs("offsets")
        out, expected = ours(**inputs), theirs(**inputs)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        grad = torch.randn_like(out)
        dense.zero_grad()
        out.backward(grad)
        expected.backward(grad)
        dense.step()
        tables.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-5, atol=1e-6)


def test_one_step_of_any_numbers_equals_torch_to_1e_6(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, torch.rand(ROWS, DIM) + 1, mode="sum")
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    inputs = bag_inputs("offsets")
    out, expected = ours(**inputs), theirs(**inputs)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
    grad = -torch.rand_like(out)  # no cancellation: the relative error of the rows is that of their sums
    out.backward(grad)
    expected.backward(grad)
    dense.step()
    tables.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 2), (0,)])
@pytest.mark.parametrize("padding", [None, 5])
def test_embedding_equals_torch_bit_for_bit(trainer: frugal.Trainer, shape: Any, padding: Optional[int]) -> None:
    weight = integers(ROWS, DIM)
    if padding is not None:
        weight[padding] = 0
    ours = ft.Embedding(ROWS, DIM, padding, _weight=weight, trainer=trainer, optimizer=sgd())
    # torch 2.11 fails in the backward of one key with padding if the gradient is sparse.
    theirs = torch.nn.Embedding(ROWS, DIM, padding, _weight=weight.clone(), sparse=shape != ())
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        keys = torch.randint(0, 8, shape)
        out, expected = ours(keys), theirs(keys)
        assert out.shape == expected.shape and torch.equal(out, expected)
        grad = integers(*out.shape)
        dense.zero_grad()
        out.backward(grad)
        expected.backward(grad)
        dense.step()
        tables.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("state", ["train", "eval", "frozen"])
@pytest.mark.parametrize("padding", [None, 2])
def test_per_sample_weights_have_torch_s_gradient(trainer: frugal.Trainer, state: str, padding: Optional[int]) -> None:
    weight = integers(ROWS, DIM)
    if padding is not None:
        weight[padding] = 0
    ours, theirs = bag_pair(trainer, weight, mode="sum", padding_idx=padding)
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    ours.train(state != "eval")
    ours.requires_grad_(state != "frozen")
    for _ in range(3):
        inputs = bag_inputs("offsets", padding)
        w = integers(inputs["input"].numel()).requires_grad_()
        v = w.detach().clone().requires_grad_()
        out, expected = ours(**inputs, per_sample_weights=w), theirs(**inputs, per_sample_weights=v)
        assert torch.equal(out, expected)
        grad = integers(*out.shape)
        dense.zero_grad()
        out.backward(grad)
        expected.backward(grad)
        assert w.grad is not None and v.grad is not None
        if padding is not None:
            # torch 2.11 counts padding in the gradient of its weight, though not in the bag.
            v.grad[inputs["input"] == padding] = 0
        assert torch.equal(w.grad, v.grad)
        if state == "train":
            dense.step()
            tables.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


def test_constant_weights_need_no_gradient(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    inputs = bag_inputs("2d")
    weights = integers(*inputs["input"].shape)
    out = ours(**inputs, per_sample_weights=weights)
    assert torch.equal(out, theirs(**inputs, per_sample_weights=weights))
    out.backward(integers(*out.shape))
    assert weights.grad is None


def test_collection_is_its_bags_side_by_side(trainer: frugal.Trainer) -> None:
    tables = [
        ft.TableConfig("a", 30, 4, ["x", "y"], optimizer=sgd()),
        ft.TableConfig("b", 40, 8, ["z"], mode="mean", padding_idx=1, optimizer=sgd()),
    ]
    ours = ft.EmbeddingBagCollection(tables, trainer=trainer)
    a, b = integers(30, 4), integers(40, 8) * 8
    b[1] = 0
    ours.load_state_dict({"embedding_bags.a.weight": a, "embedding_bags.b.weight": b})
    bag_a = torch.nn.EmbeddingBag(30, 4, mode="sum", _weight=a.clone(), sparse=True)
    bag_b = torch.nn.EmbeddingBag(
        40, 8, mode="mean", _weight=b.clone(), padding_idx=1, include_last_offset=True, sparse=True
    )
    optimizer = ft.Optimizer(ours)
    dense = torch.optim.SGD([bag_a.weight, bag_b.weight], lr=0.5)
    x, y = torch.randint(0, 30, (5,)), torch.randint(0, 30, (5, 3))
    z, offsets = torch.randint(2, 40, (8,)), torch.tensor([0, 0, 4, 6, 7, 8])
    z[7] = 1  # padding
    out = ours({"x": x, "y": y, "z": (z, offsets)})
    expected = torch.cat([bag_a(x.view(-1, 1)), bag_a(y), bag_b(z, offsets)], 1)
    assert torch.equal(out, expected)
    lengths = ours({"x": x, "y": y, "z": z}, lengths={"z": offsets.diff()})
    assert torch.equal(lengths, expected)
    parts = ours.split(out)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"x": (5, 4), "y": (5, 4), "z": (5, 8)}
    assert parts["z"].data_ptr() == out.data_ptr() + 4 * 8
    grad = integers(*out.shape) * 8
    out.backward(grad)
    expected.backward(grad)
    dense.step()
    optimizer.step()
    saved = ours.state_dict()
    assert torch.equal(saved["embedding_bags.a.weight"], bag_a.weight.detach())
    assert torch.equal(saved["embedding_bags.b.weight"], bag_b.weight.detach())


def test_collection_takes_one_tensor_of_all_features(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    names = [f"f{i}" for i in range(4)]
    ours = ft.EmbeddingBagCollection([ft.TableConfig("t", 50, 8, names)], trainer=trainer)
    keys = torch.randint(0, 50, (4, 9))
    before = engine.stats()["keys_looked_up"]
    out = ours(keys)
    assert engine.stats()["keys_looked_up"] - before == keys.numel()
    assert torch.equal(out, ours({name: keys[i] for i, name in enumerate(names)}))
    bags = ours(keys.view(4, 3, 3)).view(3, 4, 8)
    torch.testing.assert_close(bags, out.view(3, 3, 4, 8).sum(1))
    with pytest.raises(ValueError, match="must be \\(4, batch\\)"):
        ours(keys.view(9, 4))


def test_collection_weights(trainer: frugal.Trainer) -> None:
    ours = ft.EmbeddingBagCollection(
        [ft.TableConfig("s", 30, 4, ["x"], optimizer=sgd()), ft.TableConfig("m", 30, 4, ["y"], mode="mean")],
        trainer=trainer,
    )
    weight = integers(30, 4)
    ours.load_state_dict({"embedding_bags.s.weight": weight, "embedding_bags.m.weight": weight})
    keys = torch.randint(0, 30, (6, 2))
    factors = integers(6, 2).requires_grad_()
    out = ours({"x": keys, "y": keys}, per_sample_weights={"x": factors})
    grad = integers(6, 8)
    out.backward(grad)
    assert factors.grad is not None
    assert torch.equal(factors.grad, (weight[keys] * grad[:, None, :4]).sum(2))
    with pytest.raises(NotImplementedError, match="'y' need mode 'sum'"):
        ours({"x": keys, "y": keys}, per_sample_weights={"y": factors})
    with pytest.raises(ValueError, match="'y' has 3 bags, those before it 6"):
        ours({"x": keys, "y": keys[:3]})
    with pytest.raises(ValueError, match="wanted"):
        ours({"x": keys})


def test_from_pretrained_is_frozen_unless_told(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    weight = torch.randn(ROWS, DIM)
    for cls in (ft.Embedding, ft.EmbeddingBag):
        module = cls.from_pretrained(weight, trainer=trainer)
        assert module.frozen and torch.equal(module.weight, weight)
        out = module(torch.randint(0, ROWS, (4, 2)))
        assert not out.requires_grad and engine.stats()["steps_committed"] == 0
        with pytest.raises(ValueError, match="embeddings has 1 dimensions"):
            cls.from_pretrained(weight[0], trainer=trainer)
    trained = ft.Embedding.from_pretrained(weight, freeze=False, trainer=trainer, optimizer=sgd(1.0))
    optimizer = ft.Optimizer(trained)
    trained(torch.tensor([4])).sum().backward()
    optimizer.step()
    expected = weight.clone()
    expected[4] -= 1
    assert torch.equal(trained.weight, expected)
    trained.requires_grad_(False)
    assert not trained(torch.tensor([4])).requires_grad


def test_what_is_not_there_is_said(trainer: frugal.Trainer) -> None:
    for cls in (ft.Embedding, ft.EmbeddingBag):
        with pytest.raises(ValueError, match="padding_idx"):
            cls(ROWS, DIM, padding_idx=ROWS, trainer=trainer)
        with pytest.raises(frugal.Error, match="cuda:77"):
            cls(ROWS, DIM, device="cuda:77", trainer=trainer)
        with pytest.raises(TypeError, match="trainer"):
            cls(ROWS, DIM, trainer=object())  # type: ignore[arg-type]
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises(TypeError, match="floating-point"):
                cls(ROWS, DIM, dtype=dtype, trainer=trainer)
        assert cls(ROWS, DIM, norm_type=1.0, trainer=trainer).norm_type == 1.0  # nothing without max_norm
    with pytest.raises(NotImplementedError, match="max"):
        ft.EmbeddingBagCollection([ft.TableConfig("t", ROWS, DIM, ["x"], mode="max")], trainer=trainer)
    with pytest.raises(ValueError, match="mode"):
        ft.EmbeddingBag(ROWS, DIM, mode="median", trainer=trainer)
    bags = ft.EmbeddingBag(ROWS, DIM, mode="mean", trainer=trainer)
    with pytest.raises(NotImplementedError, match="per_sample_weights"):
        bags(torch.zeros(2, 2, dtype=torch.int64), per_sample_weights=torch.ones(2, 2))


# --- max_norm ---

KINDS = ["embedding", "sum", "mean", "max"]


def modules_of(
    trainer: frugal.Trainer, kind: str, weight: torch.Tensor, sparse: bool = True, **arguments: Any
) -> List[Any]:
    """The same module in both worlds."""
    rows, dim = weight.shape
    table: Dict[str, Any] = {key: arguments.pop(key) for key in ("optimizer",) if key in arguments}
    mine, theirs = weight.clone(), weight.clone()
    if kind == "embedding":
        return [
            ft.Embedding(rows, dim, _weight=mine, trainer=trainer, **table, **arguments),
            torch.nn.Embedding(rows, dim, _weight=theirs, sparse=sparse, **arguments),
        ]
    return [
        ft.EmbeddingBag(rows, dim, mode=kind, _weight=mine, trainer=trainer, **table, **arguments),
        torch.nn.EmbeddingBag(rows, dim, mode=kind, _weight=theirs, sparse=sparse and kind != "max", **arguments),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, float("inf")])
@pytest.mark.parametrize("padding", [None, 3])
def test_max_norm_renormalizes_as_torch_does(
    trainer: frugal.Trainer, kind: str, norm_type: float, padding: Optional[int]
) -> None:
    """The same bits, of the rows of the batch alone, whether they are trained or not."""
    weight = torch.randn(ROWS, DIM)
    weight[10:20] *= 1e-3  # which are within it
    limit = float(torch.linalg.vector_norm(weight[5], norm_type))  # and this one is exactly at it
    modules = modules_of(trainer, kind, weight, max_norm=limit, norm_type=norm_type, padding_idx=padding)
    ours, theirs = modules
    for way in ("trained", "no_grad", "frozen", "eval"):
        for module in modules:
            module.requires_grad_(way != "frozen").train(way != "eval")
        keys = torch.randint(0, ROWS, (4, 3))
        keys[0] = torch.tensor([3, 5, 5])
        with torch.set_grad_enabled(way != "no_grad"):
            out, expected = ours(keys), theirs(keys)
        assert torch.equal(ours.weight, theirs.weight.detach())
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        if kind != "max":
            keys[0] = 3 if padding is not None else 4
            torch.testing.assert_close(ours(keys), theirs(keys), rtol=1e-6, atol=1e-6)
    assert not torch.equal(theirs.weight.detach(), weight) and torch.equal(theirs.weight[5].detach(), weight[5])


def step_alike(modules: Any, optimizers: List[Any]) -> None:
    """A step of both, after which their rows are the same."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(modules[0].weight.detach().clone(), modules[1].weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_max_norm_trains_as_torch_does(trainer: frugal.Trainer, kind: str, optimizer: str) -> None:
    """Rows keep the optimizer's state, and what backwards have delivered before is there for the step."""
    modules = modules_of(trainer, kind, torch.randn(ROWS, DIM), max_norm=1.5)
    if kind == "max":
        modules[1].sparse = False
    optimizers = [getattr(torch.optim, optimizer)(list(module.parameters()), lr=0.5) for module in modules]
    for step in range(5):
        for _ in range(2):
            keys = torch.randint(0, 12, (4, 3))
            grad = torch.randn(*modules[1](keys).shape)
            for module in modules:
                module(keys).backward(grad)
        step_alike(modules, optimizers)


def test_max_norm_writes_the_rows_that_change(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.full((ROWS, DIM), 0.01)
    weight[7] = 3.0
    module = ft.Embedding(ROWS, DIM, _weight=weight, max_norm=1.0, trainer=trainer)
    written: List[List[int]] = []
    put = frugal.torch._native.put

    def spy(table: Any, keys: torch.Tensor, *arguments: Any, **more: Any) -> None:
        written.append(keys.tolist())
        put(table, keys, *arguments, **more)

    monkeypatch.setattr(frugal.torch._native, "put", spy)
    for _ in range(2):
        module(torch.tensor([7, 1, 7, 2]))
    assert written == [[7]]
    plain = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer)
    written.clear()
    plain(torch.tensor([7]))
    assert written == []


def test_max_norm_is_read_in_each_forward(trainer: frugal.Trainer) -> None:
    modules = modules_of(trainer, "embedding", torch.ones(ROWS, DIM))
    keys = torch.tensor([[1, 2], [2, 3]])
    for value, order in ((None, 2.0), (2.0, 2.0), (1.0, 1.0), (0, 2.0)):
        for module in modules:
            module.max_norm, module.norm_type = value, order
        assert torch.equal(modules[0](keys), modules[1](keys))
        assert torch.equal(modules[0].weight, modules[1].weight.detach())
    assert "max_norm=0" in repr(modules[0])


@pytest.mark.parametrize("padding", [None, -7])
def test_max_norm_of_hashed_tables(padding: Optional[int]) -> None:
    """Rows are as they would be created, and a forward that reads creates none."""
    keys = torch.tensor([5, -7, 2**60, 5])
    rows = []
    for limit in (None, 1.0):
        with frugal.Engine(seed=3) as engine, engine.create_trainer() as trainer:
            module = ft.Embedding(
                9, DIM, padding, limit, hashed=True, trainer=trainer, name="t", optimizer=frugal.Adagrad(lr=0.5)
            )
            with torch.no_grad():
                assert not module(keys).any() and module.table.count() == 0
            out = module(keys)
            rows.append(out.detach().clone())
            if limit is not None:
                expected = torch.embedding_renorm_(rows[0].clone(), torch.arange(4), limit, 2.0)
                assert torch.equal(rows[1], expected) and not torch.equal(rows[0], rows[1])
                with torch.no_grad():
                    assert torch.equal(module(keys), expected)
                optimizer = torch.optim.Adagrad(module.parameters(), lr=0.5)
                for _ in range(2):
                    out.backward(torch.ones_like(out))
                    optimizer.step()
                    optimizer.zero_grad()
                    out = module(keys)
                state = optimizer.state_dict()["state"][0]["frugal_state"]
                assert state.shape[0] == (2 if padding else 3) and bool((state > 0).all())


def test_max_norm_with_declared_keys(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    modules = modules_of(trainer, "sum", torch.randn(ROWS, DIM), max_norm=1.5, optimizer=sgd())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in modules]
    batches = [torch.randint(0, 20, (4, 3)) for _ in range(8)]
    for keys in ft.Lookahead(batches, lambda batch: {modules[0]: batch}, depth=3, measure=False):
        grad = integers(4, DIM)
        for module in modules:
            module(keys).backward(grad)
        step_alike(modules, optimizers)
    assert engine.stats()["keys_undeclared"] == 0 and engine.stats()["steps_committed"] == len(batches)


def test_max_norm_of_several_ranks_is_refused() -> None:
    with frugal.Engine(world_size=2) as engine, engine.create_trainer(0) as trainer:
        with pytest.raises(NotImplementedError, match="max_norm.*2 ranks"):
            ft.Embedding(ROWS, DIM, max_norm=1.0, trainer=trainer)
        module = ft.EmbeddingBag(ROWS, DIM, trainer=trainer)
        module.max_norm = 1.0
        with pytest.raises(NotImplementedError, match="max_norm.*2 ranks"):
            module(torch.tensor([[1]]))


@pytest.mark.parametrize("how", ["max_norm", "assignment"])
def test_rows_written_before_the_gradient_of_weights_are_noticed(trainer: frugal.Trainer, how: str) -> None:
    modules = modules_of(trainer, "sum", torch.ones(ROWS, DIM), sparse=False, max_norm=5.0)
    other = ft.Embedding(ROWS, DIM, trainer=trainer)
    keys = torch.tensor([[1, 2]])
    for module in modules:
        weights = torch.ones(1, 2, requires_grad=True)
        out = module(keys, per_sample_weights=weights)
        with torch.no_grad():
            other.weight[1] = 9.0  # another table's
        out.sum().backward(retain_graph=True)
        if how == "assignment":
            with torch.no_grad():
                module.weight[1] = 1.0
        else:
            module.max_norm = 1.0
            module(keys)
        with pytest.raises(RuntimeError, match="rows have been written|modified by an inplace operation"):
            out.sum().backward()


# --- scale_grad_by_freq ---


def by_hand(theirs: torch.nn.Embedding, mode: str, padding: Optional[int], inputs: Dict[str, Any]) -> torch.Tensor:
    """A bag of torch.nn.Embedding's rows: torch 2.11's own bags take other keys' counts."""
    keys, offsets = inputs["input"].reshape(-1), inputs.get("offsets")
    if offsets is None:
        offsets = torch.arange(0, keys.numel(), inputs["input"].shape[1])
    rows = theirs(keys)
    if inputs.get("per_sample_weights") is not None:
        rows = rows * inputs["per_sample_weights"].reshape(-1)[:, None]
    out = []
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:] + [keys.numel()]):
        kept = [i for i in range(begin, end) if int(keys[i]) != padding]
        total = rows[kept].sum(0)
        out.append(total / max(len(kept), 1) if mode == "mean" else total)
    return torch.stack(out)


@pytest.mark.parametrize("form", ["2d", "offsets"])
@pytest.mark.parametrize("kind", ["sum", "mean", "weights"])
@pytest.mark.parametrize("padding", [None, 2])
def test_scale_grad_by_freq_of_bags(trainer: frugal.Trainer, kind: str, form: str, padding: Optional[int]) -> None:
    weight = integers(ROWS, DIM)
    if padding is not None:
        weight[padding] = 0
    mode = "mean" if kind == "mean" else "sum"
    ours = ft.EmbeddingBag(
        ROWS, DIM, scale_grad_by_freq=True, mode=mode, _weight=weight, padding_idx=padding, trainer=trainer
    )
    theirs = torch.nn.Embedding(ROWS, DIM, padding, scale_grad_by_freq=True, _weight=weight.clone())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    for step in range(3):
        for _ in range(2):
            inputs: Dict[str, Any] = bag_inputs(form, padding)
            inputs["input"] = inputs["input"] % 7  # so that most come often
            factors = [integers(*inputs["input"].shape).requires_grad_() for _ in range(2)]
            if kind == "weights":
                factors[1].data.copy_(factors[0].detach())
                outs = ours(**inputs, per_sample_weights=factors[0]), by_hand(
                    theirs, mode, padding, {**inputs, "per_sample_weights": factors[1]}
                )
            else:
                outs = ours(**inputs), by_hand(theirs, mode, padding, inputs)
            torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
            grad = integers(*outs[0].shape)
            for out in outs:
                out.backward(grad, retain_graph=True)
            if kind == "weights":
                assert factors[0].grad is not None and factors[1].grad is not None
                torch.testing.assert_close(factors[0].grad, factors[1].grad)
        mine, expected = ours.weight.grad, theirs.weight.grad
        assert mine is not None and expected is not None
        torch.testing.assert_close(mine.as_subclass(torch.Tensor), expected, rtol=1e-6, atol=1e-6)
        totals = [torch.nn.utils.clip_grad_norm_(module.parameters(), 5.0) for module in (ours, theirs)]
        torch.testing.assert_close(totals[0], totals[1], rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.weight.detach().clone(), theirs.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shape", [(40,), (5, 8), (), (0,)])
def test_scale_grad_by_freq_of_embeddings(trainer: frugal.Trainer, padding: Optional[int], shape: Any) -> None:
    modules = modules_of(
        trainer, "embedding", integers(ROWS, DIM), sparse=False, scale_grad_by_freq=True, padding_idx=padding
    )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in modules]
    for step in range(4):
        keys = torch.randint(0, 7, shape)
        grad = integers(*shape, DIM)
        for module in modules:
            module.scale_grad_by_freq = step != 3  # read in each forward
            module(keys).backward(grad)
        if step != 1:  # of two backwards each is divided by its own counts
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(modules[0].weight.detach().clone(), modules[1].weight.detach(), rtol=1e-6, atol=1e-6)
    assert "scale_grad_by_freq" not in repr(modules[0])


def test_scale_grad_by_freq_of_a_maximum_is_refused_as_by_torch(trainer: frugal.Trainer) -> None:
    for module in modules_of(trainer, "max", integers(ROWS, DIM), sparse=False, scale_grad_by_freq=True):
        with pytest.raises(ValueError, match="max mode does not support scaling the gradient by the frequency"):
            module(torch.tensor([[1, 2]]))


# --- Integers, and nothing ---


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_rows_of_integers_are_read_as_torch_s(trainer: frugal.Trainer, dtype: torch.dtype) -> None:
    weight = torch.randint(0, 100, (ROWS, DIM)).to(dtype)
    ours = ft.Embedding.from_pretrained(weight, trainer=trainer)
    theirs = torch.nn.Embedding.from_pretrained(weight.clone())
    keys = torch.randint(0, ROWS, (3, 4))
    out, expected = ours(keys), theirs(keys)
    assert out.dtype == expected.dtype == dtype and torch.equal(out, expected)
    assert ours.weight.dtype == dtype and torch.equal(ours.weight, weight)
    assert ours.frozen and not ours.weight.requires_grad
    for module in (ours.half(), theirs.half()):
        assert module(keys).dtype == dtype
    for make in (ft.Embedding.from_pretrained, torch.nn.Embedding.from_pretrained):
        with pytest.raises(RuntimeError, match="floating.point.* can require gradients"):
            make(weight, freeze=False)
    for module in (ours, theirs):
        with pytest.raises(RuntimeError, match="floating.point.* can require gradients"):
            module.requires_grad_(True)
        module.weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
        assert module(keys).dtype == torch.float32 and module.weight.requires_grad
        module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        assert module(keys).dtype == dtype and not module.weight.requires_grad
    assert torch.equal(ours.weight, weight)


def test_integers_that_rows_cannot_have_are_refused(trainer: frugal.Trainer) -> None:
    weight = torch.zeros(ROWS, DIM, dtype=torch.int64)
    for value in (2**24, 2**40, -(2**63)):
        weight[3, 2] = value
        assert int(ft.Embedding.from_pretrained(weight, trainer=trainer)(torch.tensor(3))[2]) == value
    for value in (2**24 + 1, 2**63 - 1):
        weight[3, 2] = value
        with pytest.raises(ValueError, match="float32, the type of rows, does not have"):
            ft.Embedding.from_pretrained(weight, trainer=trainer)
    with pytest.raises(TypeError, match="outputs are floating-point"):  # torch's bags of integers fail in the forward
        ft.EmbeddingBag.from_pretrained(torch.ones(ROWS, DIM, dtype=torch.int32), trainer=trainer)
    with pytest.raises(TypeError, match="outputs are floating-point"):
        ft.Embedding.from_pretrained(torch.ones(ROWS, DIM, dtype=torch.complex64), trainer=trainer)


@pytest.mark.parametrize("shape", [(0, 0), (10, 0), (0, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:.*of a frugal table's row")
def test_a_table_of_nothing_is_torch_s(
    engine: frugal.Engine, trainer: frugal.Trainer, shape: Any, kind: str, optimizer: str
) -> None:
    modules = modules_of(trainer, kind, torch.zeros(shape), sparse=False, max_norm=1.0)
    model = torch.nn.Linear(2, 1)
    optimizers = [
        getattr(torch.optim, optimizer)([*module.parameters(), *model.parameters()], lr=0.5) for module in modules
    ]
    keys = torch.zeros(0, dtype=torch.int64)
    inputs = [keys] if kind == "embedding" else [keys, torch.tensor([0, 0, 0])]
    for _ in range(3):
        if shape[0]:
            keys = torch.randint(0, shape[0], (3, 4))
            inputs = [keys]
        outs = [module(*inputs) for module in modules]
        assert torch.equal(outs[0], outs[1]) and outs[0].dtype == outs[1].dtype
        for out, module, each in zip(outs, modules, optimizers):
            (out.sum() + model(torch.ones(2)).sum()).backward()
            assert module.weight.grad.shape == module.weight.shape == shape
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            each.step()
            each.zero_grad()
    for bad in (shape[0], -1):
        for module in modules:
            with pytest.raises((IndexError, RuntimeError)):
                module(torch.full((3, 4), bad))
    state = [module.state_dict() for module in modules]
    assert state[0]["weight"].shape == state[1]["weight"].shape
    modules[0].load_state_dict(state[1])
    for each in optimizers[::-1]:
        each.load_state_dict(optimizers[0].state_dict())
    for module, each in zip(modules, optimizers):
        module(*inputs).sum().backward()
        each.step()
    with torch.no_grad():
        modules[0].weight.fill_(2.0)
        torch.nn.init.normal_(modules[0].weight)
    assert torch.equal(modules[0].weight, modules[1].weight.detach())
    for _ in ft.Lookahead([keys], lambda batch: {modules[0]: batch}, measure=False):
        modules[0](*inputs)
    for _ in range(70):  # more than are held one by one
        modules[0](*inputs).sum().backward()
    optimizers[0].step()
    assert tuple(repr(modules[0]).split("(")[1].split(",")[:2]) == (str(shape[0]), f" {shape[1]}")


def test_a_hashed_table_of_nothing_is_refused(trainer: frugal.Trainer) -> None:
    for rows, dim in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="at least"):
            ft.Embedding(rows, dim, hashed=True, trainer=trainer)
        with pytest.raises(ValueError, match="at least"):
            ft.EmbeddingBagCollection([ft.TableConfig("t", rows, dim, ["x"])], trainer=trainer)
    ft.Embedding(0, 3, name="none", trainer=trainer)
    with pytest.raises(ValueError, match="'none' exists"):
        ft.Embedding(1, 3, name="none", trainer=trainer)


# --- Arguments ---


def test_arguments_are_read_in_each_forward(trainer: frugal.Trainer) -> None:
    """As torch.nn's modules read theirs."""
    keys, offsets = torch.randint(0, 9, (12,)), torch.tensor([0, 3, 4, 9, 12])
    modules = modules_of(trainer, "sum", integers(ROWS, DIM), sparse=False)
    changes: List[Dict[str, Any]] = [
        {"mode": "mean"}, {"padding_idx": 3}, {"mode": "max"}, {"padding_idx": ROWS - 1}, {"include_last_offset": True},
        {"mode": "sum", "sparse": True}, {"padding_idx": None},
        {"scale_grad_by_freq": True, "mode": "mean", "sparse": False},
    ]  # fmt: skip
    for change in changes:
        outs = []
        for module in modules:
            for name, value in change.items():
                setattr(module, name, value)
            module.zero_grad()
            outs.append(module(keys, offsets))
            outs[-1].sum().backward()
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)
        if not modules[0].scale_grad_by_freq:
            mine, expected = (module.weight.grad for module in modules)
            assert mine.layout == expected.layout
            mine, expected = (grad.to_dense() for grad in (mine, expected))
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    one = modules_of(trainer, "embedding", integers(ROWS, DIM), sparse=False)
    for padding in (None, 4, -2):
        for module in one:
            module.padding_idx = padding
            module.zero_grad()
            module(torch.arange(ROWS)).sum().backward()
        assert torch.equal(one[0](torch.arange(ROWS)), one[1](torch.arange(ROWS)))
        assert torch.equal(one[0].weight.grad, one[1].weight.grad)
    for name, value in (("mode", "median"), ("padding_idx", ROWS)):
        before = getattr(modules[0], name)
        with pytest.raises(ValueError, match=name):
            setattr(modules[0], name, value)
        assert getattr(modules[0], name) == before


# --- convert ---


def test_convert_keeps_what_modules_are(trainer: frugal.Trainer) -> None:
    shared = torch.nn.Embedding(ROWS, DIM, padding_idx=1, max_norm=1.0, norm_type=1.0, scale_grad_by_freq=True)
    model = torch.nn.ModuleDict(
        {
            "one": shared,
            "again": shared,
            "bags": torch.nn.EmbeddingBag(
                ROWS, DIM, max_norm=2.0, mode="sum", include_last_offset=True, padding_idx=2, scale_grad_by_freq=True
            ),
            "most": torch.nn.EmbeddingBag(ROWS, DIM, mode="max", dtype=torch.float64),
            "whole": torch.nn.Embedding.from_pretrained(torch.randint(0, 99, (ROWS, DIM))),
            "none": torch.nn.Embedding(ROWS, 0),
            "few": torch.nn.Embedding(2, DIM),
            "deep": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(ROWS, DIM)),
        }
    ).eval()
    model["deep"][1].weight.requires_grad_(False)  # type: ignore[index]
    before = copy.deepcopy(model)
    assert ft.convert(model, trainer=trainer, min_rows=3) is model
    assert model["one"] is model["again"] and type(model["few"]) is torch.nn.Embedding
    keys = torch.randint(0, ROWS, (5, 4))
    for name in ("one", "bags", "most", "whole", "none", "deep"):
        both: List[Any] = [model[name], before[name]]
        mine, theirs = [module[1] for module in both] if name == "deep" else both
        assert isinstance(mine, ft.EmbeddingBag if "mode" in vars(theirs) else ft.Embedding) and not mine.training
        # Doubles are rounded to rows.
        torch.testing.assert_close(mine.weight.detach(), theirs.weight.detach(), rtol=1e-7, atol=0)
        assert mine.weight.requires_grad == theirs.weight.requires_grad
        inputs: List[Any] = [keys.view(-1), torch.tensor([0, 4, 20])] if name == "bags" else [keys]
        out, expected = (module(*inputs) for module in (mine, theirs))
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        for what in (
            "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "mode", "include_last_offset"
        ):  # fmt: skip
            assert getattr(mine, what, None) == getattr(theirs, what, None)
    alone: torch.nn.Module = ft.convert(torch.nn.Embedding(ROWS, DIM), trainer=trainer)
    assert isinstance(alone, ft.Embedding)


class Subclass(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def shared(kind: Any, of: Any, **options: Any) -> Any:
    """Two modules that have one weight."""
    first = kind.Embedding(ROWS, DIM, padding_idx=2, **options)
    second = kind.EmbeddingBag(ROWS, DIM, mode="sum", **options)
    with torch.no_grad():
        first.weight.copy_(of)
    second.weight = first.weight
    return torch.nn.ModuleList([first, second])


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_modules_that_share_a_weight_train_it_together(trainer: frugal.Trainer, kind: str, converts: bool) -> None:
    weight = integers(ROWS, DIM)
    theirs = shared(torch.nn, weight, sparse=kind == "SparseAdam")
    ours: Any = ft.convert(copy.deepcopy(theirs), trainer=trainer) if converts else shared(ft, weight, trainer=trainer)
    assert ours[0].weight is not None and ours[0].table.name == ours[1].table.name
    assert len(list(ours.parameters())) == 1
    assert ours[0].padding_idx == 2 and ours[1].padding_idx is None
    both: List[Any] = [ours, theirs]
    optimizers = [getattr(torch.optim, kind)(model.parameters(), lr=0.5) for model in both]
    for step in range(3):
        ids = torch.tensor([1, 2, 2, 5 + step])
        for model, optimizer in zip(both, optimizers):
            optimizer.zero_grad()
            (model[0](ids).pow(2).sum() + model[1](ids, torch.tensor([0, 1, 2, 3])).sum()).backward()
            optimizer.step()
    for model in ours:
        torch.testing.assert_close(model.weight.detach(), theirs[0].weight.detach(), rtol=1e-6, atol=1e-6)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours[1].weight.detach(), theirs[0].weight.detach())


def test_weights_of_another_shape_are_not_shared(trainer: frugal.Trainer) -> None:
    one = ft.Embedding(ROWS, DIM, trainer=trainer)
    for other in (ft.Embedding(ROWS + 1, DIM, trainer=trainer), ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer)):
        with pytest.raises(NotImplementedError, match="another shape"):
            one.weight = other.weight


def test_a_table_goes_when_its_module_takes_anothers(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    one, other = (ft.Embedding(ROWS, DIM, trainer=trainer) for _ in range(2))
    before = len(engine.tables())
    one.weight = other.weight
    gc.collect()
    other(torch.tensor([1]))  # calls drop what has gone
    assert len(engine.tables()) == before - 1
    del other
    gc.collect()
    assert one(torch.tensor([1])).shape == (1, DIM)


def test_convert_keeps_a_decoder_tied(trainer: frugal.Trainer) -> None:
    models: List[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        first, second = torch.nn.Embedding(ROWS, DIM), torch.nn.Linear(DIM, ROWS)
        second.weight = first.weight
        models.append(torch.nn.Sequential(first, second))
    ft.convert(models[1], trainer=trainer)
    assert type(models[1][0]) is ft.Embedding and {*models[1].state_dict()} == {*models[0].state_dict()}
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.tensor([1, 5, 1])).pow(2).sum().backward()
            optimizer.step()
    for theirs, ours in zip(models[0].parameters(), (models[1][1].weight, models[1][1].bias)):
        torch.testing.assert_close(ours.detach(), theirs.detach())


@pytest.mark.parametrize("case", ["subclass", "complex"])
def test_convert_refuses_all_or_nothing(trainer: frugal.Trainer, case: str) -> None:
    first, second = torch.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM)
    if case == "subclass":
        second = Subclass(ROWS, DIM)
    else:
        second = torch.nn.Embedding.from_pretrained(torch.ones(ROWS, DIM, dtype=torch.complex64))
    model = torch.nn.Sequential(first, second)
    with pytest.raises((NotImplementedError, TypeError), match="subclass|complex64"):
        ft.convert(model, trainer=trainer)
    assert model[0] is first and model[1] is second


@pytest.mark.parametrize("kind", [ft.Embedding, ft.EmbeddingBag])
def test_a_subclass_saves_what_it_has_of_its_own(trainer: frugal.Trainer, kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(ROWS, DIM, trainer=trainer)
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("shift", torch.zeros(1))
            self.inner = torch.nn.Linear(DIM, DIM)
            self.extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    first, second = Own(), Own()
    with torch.no_grad():
        first.scale.fill_(3.0)
        first.shift.fill_(5.0)
    first.extra = 7
    saved = first.state_dict()
    assert set(saved) == {"weight", "scale", "shift", "inner.weight", "inner.bias", "_extra_state"}
    second.load_state_dict(saved)
    assert (second.scale.item(), second.shift.item(), second.extra) == (3.0, 5.0, 7)
    assert torch.equal(second.weight, first.weight) and torch.equal(second.inner.weight, first.inner.weight)
    for key in ("weight", "scale", "shift"):
        with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
            second.load_state_dict({name: value for name, value in saved.items() if name != key})
    for key in ("other", "anchor"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{key}"'):
            second.load_state_dict({**saved, key: torch.ones(1)})
    renamed = {"old" if name == "weight" else name: value for name, value in saved.items()}
    second.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.__setitem__(prefix + "weight", state.pop(prefix + "old"))
    )
    second.load_state_dict(renamed)


def test_a_name_is_one_table(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    first = ft.Embedding(ROWS, DIM, name="shared", trainer=trainer)
    second = ft.EmbeddingBag(ROWS, DIM, name="shared", trainer=trainer)
    assert torch.equal(first.weight, second.weight)
    assert len(ft.Optimizer([first, second]).param_groups) == 1
    with pytest.raises(ValueError, match="shared"):
        ft.Embedding(ROWS, DIM + 1, name="shared", trainer=trainer)
    with pytest.raises(ValueError, match="shared"):
        ft.Embedding(ROWS, DIM, name="shared", hashed=True, trainer=trainer)
    with pytest.raises(ValueError, match="exists with the optimizer"):
        ft.Embedding(ROWS, DIM, name="shared", optimizer=frugal.SGD(lr=0.25), trainer=trainer)
    names = {ft.Embedding(3, 2, trainer=trainer).table.name for _ in range(3)}
    assert len(names) == 3


def test_rows_begin_as_torch_s(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(4000, 16, padding_idx=7, trainer=trainer)
    weight = module.weight
    assert abs(weight.mean().item()) < 0.02 and abs(weight.std().item() - 1) < 0.02
    assert torch.equal(weight[7], torch.zeros(16))
    constant = ft.Embedding(10, 4, init=frugal.Constant(0.25), trainer=trainer)
    assert torch.equal(constant.weight, torch.full((10, 4), 0.25))


Make = Callable[[Any], Any]  # a module, by torch.nn or this package


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "make",
    [lambda m, **k: m.Embedding(3, 2, **k), lambda m, **k: m.Embedding(333, 7, padding_idx=5, **k),
     lambda m, **k: m.EmbeddingBag(_weight._CHUNK + 1, 3, padding_idx=-1, **k),
     lambda m, **k: m.Embedding(2 * _weight._CHUNK + 20, 1, **k), lambda m, **k: m.Embedding(0, 4, **k)],
)  # fmt: skip
def test_the_same_seed_gives_the_same_rows(make: Make, dtype: torch.dtype) -> None:
    """As torch.nn's, and what is drawn after them is the same, too."""
    made = []
    for modules in (ft, torch.nn):
        torch.manual_seed(41)
        module = make(modules, dtype=dtype)  # type: ignore[call-arg]
        rows = module.weight.detach().to(torch.float32)  # what a table has
        made.append((rows.to(dtype), torch.rand(5)))
    assert all(torch.equal(*some) for some in zip(*made))


@pytest.mark.parametrize("sparse", [False, True])
def test_modules_and_parameters_are_chosen_as_torch_s_are(sparse: bool, trainer: frugal.Trainer) -> None:
    """By their class, and by their dimensions."""
    for kind, theirs in ((ft.Embedding, torch.nn.Embedding), (ft.EmbeddingBag, torch.nn.EmbeddingBag)):
        module = kind(ROWS, DIM, sparse=sparse, trainer=trainer)
        assert isinstance(module, theirs) and module.sparse is sparse
        assert [p.dim() for p in module.parameters()] == [p.dim() for p in theirs(3, 2).parameters()] == [2]
        for some in torch.nn.Sequential(module).modules():
            if isinstance(some, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                torch.nn.init.constant_(some.weight, 0.5)
        assert bool(module.weight.eq(0.5).all())
    one = ft.Embedding(ROWS, DIM, trainer=trainer)
    out = one(torch.tensor(3))  # of one key, whose output has fewer dimensions than the parameter
    buffer = torch.ones(2, DIM)
    out.backward(buffer[0])
    buffer.numpy().fill(5.0)  # which the backward has copied
    grad = one.weight.grad
    assert out.shape == (DIM,) and grad is not None and torch.equal(grad[3], torch.ones(DIM))


def test_rows_that_others_begin_draw_nothing(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    """Those of a trainer that is given are the engine's, as those of `init`, of hashed and of lazy tables."""
    before = torch.get_rng_state()
    for more in (dict(trainer=trainer), dict(init=frugal.Constant(1.0)), dict(hashed=True), dict(lazy=True)):
        ft.Embedding(ROWS, DIM, **more)
    ft.EmbeddingBag(ROWS, DIM, _weight=torch.zeros(ROWS, DIM))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("device", "default", "name"),
    [(None, "cpu", "cpu"), ("cuda:1", "cpu", "cuda:1"), (None, "cuda:2", "cuda:2"),
     ("cuda", "cpu", "cuda:3"), ("cpu", "cuda:1", "cpu")],
)  # fmt: skip
def test_the_process_s_trainer_is_where_its_first_module_is(
    monkeypatch: pytest.MonkeyPatch, device: Any, default: str, name: str
) -> None:
    asked: List[str] = []

    def create_trainer(self: frugal.Engine, rank: int, *, device: str, replace: bool) -> frugal.Trainer:
        asked.append(device)
        raise frugal.Busy("told enough")

    monkeypatch.setattr(_default, "_trainer", None)
    monkeypatch.setattr(frugal.Engine, "create_trainer", create_trainer)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(default))
    with pytest.raises(frugal.Busy):
        ft.EmbeddingBag(ROWS, DIM, device=device)
    assert asked == [name]


def test_trainers_on_an_imitation_of_a_gpu() -> None:
    """A library of tests has it, in another process."""
    library = pathlib.Path(os.environ.get("FRUGAL_LIBRARY", "")).resolve().parent / "tests" / "sim" / "libfrugal.so.0"
    if not library.exists():
        pytest.skip(f"no {library}")
    cases = pathlib.Path(__file__).with_name("with_sim.py")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=dict(os.environ, FRUGAL_LIBRARY=str(library)), capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0 and "4 passed" in ended.stdout, ended.stdout


def test_what_is_of_a_device_is_made_anew_on_another(trainer: frugal.Trainer) -> None:
    """Which one a tensor is on says torch.device; a meta one has no memory, so that here nothing is moved there."""
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    here, anchor = torch.device("cpu"), module._anchors[0]
    module(torch.arange(8)[::2]).sum().backward()  # by Python, also where there is _usual.native
    like = module._lookup._like
    assert like is not None and like[3] is anchor.table.device
    anchor.table.device = torch.device("meta")
    grad = anchor.grad
    assert isinstance(grad, Gradient)
    batch = torch.arange(4)
    assert _inputs.declared(batch, "keys", anchor.table.device) is batch  # as a loader has them
    with pytest.raises(ValueError, match="keys is on meta, the module on cpu"):
        _inputs.declared(batch.to("meta"), "keys", here)
    anchor.table.device = here
    held = grad.parts[0].held
    held.move(here)
    held.check()
    held.grad.zero_()
    held.move(torch.device("meta"))  # that it was written is known there, too
    assert held.grad.device.type == "meta" and held.tensors[0] is not None and held.tensors[0].device.type == "meta"
    with pytest.raises(RuntimeError, match="changed in place"):
        held.check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_a_module_cannot_be(ranks: int) -> None:
    with frugal.Engine(world_size=ranks) as engine, engine.create_trainer(0) as trainer:
        module = ft.Embedding(ROWS, DIM, device="cpu", trainer=trainer)
        # A trainer alone would go there, but that there is none; of several, the others would go on without this one.
        kind = frugal.Error if ranks == 1 else ValueError
        says = "cuda:77" if ranks == 1 else "Embedding cannot be on cuda:77: .* which is on cpu"
        with pytest.raises(kind, match=says):
            ft.Embedding(ROWS, DIM, device="cuda:77", trainer=trainer)
        with pytest.raises(kind, match=says):
            module._steps.check_device(torch.device("cuda:77"), "Embedding")
            module._steps.move(module._lookup.tables, torch.device("cuda:77"))
        with pytest.raises(ValueError, match="Embedding cannot be on mps"):
            module._steps.check_device(torch.device("mps"), "Embedding")
        assert module.weight.device.type == "cpu" and "on cpu" in repr(trainer)


def test_a_trainer_goes_where_modules_go(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here are no GPUs: how the trainer goes, and that gradients go, is another test's."""
    steps = _steps.of(trainer)
    names: List[str] = []

    def move_to(name: str) -> None:
        names.append(name)
        steps.device = torch.device(name)

    monkeypatch.setattr(steps, "move_to", move_to)
    monkeypatch.setattr(Anchor, "become", lambda *some: None)
    modules = [ft.Embedding(ROWS, DIM, device="cpu", trainer=trainer) for _ in range(3)]
    one, two = (module._lookup.tables for module in modules[:2])
    places = lambda: [str(table.device) for table in (*one, *two)]  # noqa: E731
    steps.move(one, torch.device("cuda:0"))
    assert names == ["cuda:0"] and places() == ["cuda:0", "cpu"]
    steps.move([], torch.device("cpu"))  # a module is made on the CPU
    steps.move(two, torch.device("cuda:1"))
    assert names == ["cuda:0", "cuda:1"] and places() == ["cuda:1", "cuda:1"]
    steps.move(one, torch.device("cpu"))
    assert names == ["cuda:0", "cuda:1"] and places() == ["cpu", "cuda:1"]
    steps.move(two, torch.device("cpu"))
    assert names == ["cuda:0", "cuda:1", "cpu"] and places() == ["cpu", "cpu"]


def test_a_table_is_on_one_device(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of several modules. Here are no GPUs: nothing is moved there."""
    collection: Callable[..., Any] = lambda rows, dim, name, **keywords: ft.EmbeddingBagCollection(  # noqa: E731
        [ft.TableConfig(name, rows, dim, ["x"])], **keywords
    )
    module = ft.Embedding(ROWS, DIM, name="e", trainer=trainer)
    monkeypatch.setattr(module._steps, "move_to", lambda name: pytest.fail("the trainer is moved"))
    for cls in (ft.Embedding, ft.EmbeddingBag, collection):
        with pytest.raises(ValueError, match="table 'e' exists, on cpu, and .* cannot have it on cuda:0"):
            cls(ROWS, DIM, name="e", device="cuda:0", trainer=trainer)
        cls(ROWS, DIM, name="e", device="cpu", trainer=trainer)
    with pytest.raises(ValueError, match="table 'e' exists, with outputs in torch.float32, and .* in torch.float16"):
        ft.Embedding(ROWS, DIM, name="e", dtype=torch.float16, trainer=trainer)
    ft.Embedding(ROWS, DIM, name="e", dtype=torch.float32, trainer=trainer)
    with monkeypatch.context() as patch:
        patch.setattr(module._table, "device", torch.device("cuda:1"))
        with pytest.raises(ValueError, match="table 'e' exists, on cuda:1, and Embedding cannot have it on cpu"):
            ft.Embedding(ROWS, DIM, name="e", device="cpu", trainer=trainer)
        ft.Embedding(ROWS, DIM, name="e", trainer=trainer)  # where the table is
    table = module._table
    del module
    gc.collect()
    table.device = torch.device("cuda:1")  # of modules that are gone
    module = ft.Embedding(ROWS, DIM, name="e", device="cpu", trainer=trainer)
    assert module._table is table and table.device.type == "cpu"


def test_hashed_tables_take_any_key(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(100, DIM, mode="sum", hashed=True, padding_idx=-7, trainer=trainer, optimizer=sgd())
    keys = torch.tensor([[-1, 2**62, -7], [-7, -7, 5]])
    out = module(keys)
    assert torch.equal(out, module(keys.view(torch.uint64)))
    out.backward(torch.ones_like(out))
    ft.Optimizer(module).step()
    assert sorted(module.state_dict()["keys"].tolist()) == [-1, 5, 2**62]


@pytest.mark.parametrize("kind", ["sum", "transposed", "sliced", "one column"])
def test_gradients_of_every_stride(trainer: frugal.Trainer, kind: str) -> None:
    dim = 1 if kind == "one column" else DIM
    ours, theirs = bag_pair(trainer, integers(ROWS, dim), mode="sum")
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    inputs = bag_inputs("2d")
    outs = ours(**inputs), theirs(**inputs)
    rows = outs[0].shape[0]
    grads: Dict[str, Any] = {
        "sum": lambda: None,
        "transposed": lambda: integers(dim, rows).t(),
        "sliced": lambda: integers(rows, 3 * dim)[:, dim : 2 * dim],
        "one column": lambda: integers(rows, 5)[:, 2:3],
    }
    grad = grads[kind]()
    for out in outs:
        if grad is None:
            out.sum().backward()
        else:
            out.backward(grad)
    tables.step()
    dense.step()
    assert torch.equal(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_vectorized_jacobian_of_weights(trainer: frugal.Trainer, frozen: bool) -> None:
    batch, weights = torch.tensor([[1, 2], [2, 3]]), torch.rand(2, 2)
    found = []
    for module in bag_pair(trainer, integers(ROWS, DIM), mode="sum"):
        module.requires_grad_(not frozen)
        found += [
            torch.autograd.functional.jacobian(
                lambda given: module(batch, per_sample_weights=given), weights, vectorize=vectorize
            )
            for vectorize in (False, True)
        ]  # fmt: skip
    assert all(torch.equal(each, found[2]) for each in found)


def test_modules_are_not_copied(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(module)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(module)


def test_a_shallow_copy_has_the_same_table(trainer: frugal.Trainer) -> None:
    for module in bag_pair(trainer, integers(ROWS, DIM), mode="sum"):
        both = copy.copy(module)
        assert type(both) is type(module) and next(both.parameters()) is next(module.parameters())
        optimizer = torch.optim.SGD(both.parameters(), lr=0.5)
        batch = torch.tensor([[1, 2]])
        out = both(batch)
        before = out.detach().clone()
        out.sum().backward()
        optimizer.step()
        assert torch.equal(module(batch), both(batch)) and torch.equal(both(batch), before - 1.0)
        both.training = False
        assert module.training


def test_modules_have_one_parameter_for_each_table(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    tables = [ft.TableConfig("a", ROWS, 4, ["x", "y"]), ft.TableConfig("b", ROWS, 8, ["z"])]
    model = torch.nn.Sequential(module, ft.EmbeddingBagCollection(tables, trainer=trainer), torch.nn.Linear(DIM, 1))
    (anchor,) = module.parameters()
    assert anchor.shape == module.weight.shape and anchor.requires_grad and isinstance(anchor, torch.nn.Parameter)
    assert len(list(model.parameters())) == 5 and len({id(p) for p in model.parameters()}) == 5
    assert list(module.buffers()) == []
    assert "60, 8" in repr(model) and "embedding_0" in repr(anchor)
    # Modules of one table have one.
    (other,) = ft.EmbeddingBag(ROWS, DIM, name=module.table.name, trainer=trainer).parameters()
    assert other is anchor
    assert not any("anchor" in name for name in model.state_dict())


def bad(keys: Any, **more: Any) -> List[Any]:
    return [keys, more]


@pytest.mark.parametrize(
    "keys, more, error",
    [
        bad([1, 2], offsets=None) + [TypeError],
        bad(torch.rand(4, 2)) + [TypeError],
        bad(torch.zeros(4, 2, dtype=torch.int16)) + [TypeError],
        bad(torch.zeros(4, 2, dtype=torch.bool)) + [TypeError],
        bad(torch.zeros(4, dtype=torch.int64)) + [ValueError],
        bad(torch.zeros(2, 2, 2, dtype=torch.int64)) + [ValueError],
        bad(torch.zeros(4, 2, dtype=torch.int64), offsets=torch.tensor([0, 2])) + [ValueError],
        bad(torch.zeros(4, 2, dtype=torch.int64, device="meta")) + [ValueError],
        bad(torch.zeros(4, dtype=torch.int64), offsets=torch.tensor([0.0])) + [TypeError],
        bad(torch.zeros(4, dtype=torch.int64), offsets=torch.tensor([[0]])) + [ValueError],
        bad(torch.zeros(4, dtype=torch.int64), offsets=torch.tensor([0, 9])) + [frugal.InvalidArgument],
        bad(torch.zeros(4, dtype=torch.int64), offsets=torch.tensor([1, 2])) + [frugal.InvalidArgument],
        bad(torch.zeros(4, dtype=torch.int64), offsets=torch.tensor([0, -1])) + [frugal.InvalidArgument],
        bad(torch.full((4, 2), ROWS)) + [frugal.KeyOutOfRange],
        bad(torch.full((4, 2), -1)) + [frugal.KeyOutOfRange],
        bad(torch.zeros(4, 2, dtype=torch.int64), per_sample_weights=torch.ones(8)) + [ValueError],
        bad(torch.zeros(4, 2, dtype=torch.int64), per_sample_weights=torch.ones(4, 2).double()) + [TypeError],
    ],
)  # fmt: skip
def test_bad_input_is_an_error(trainer: frugal.Trainer, keys: Any, more: Dict[str, Any], error: Any) -> None:
    weight = integers(ROWS, DIM)
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=trainer, optimizer=sgd())
    optimizer = ft.Optimizer(module)
    with pytest.raises(error):
        module(keys, **more)
    module.eval()
    with pytest.raises(error):
        module(keys, **more)
    module.train()
    good = torch.tensor([[1, 2]])
    module(good).sum().backward()
    optimizer.step()
    weight[good] -= 0.5
    assert torch.equal(module.weight, weight)


def test_keys_changed_before_backward_are_noticed(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    keys = torch.randint(0, ROWS, (5,))
    out = module(keys)
    keys.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_closed_engine_is_an_error() -> None:
    engine = frugal.Engine()
    trainer = engine.create_trainer()
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    optimizer = ft.Optimizer(module)
    out = module(torch.tensor([1]))
    engine.close()
    out.sum().backward()  # is kept for a step
    with pytest.raises(frugal.Error):
        optimizer.step()
    with pytest.raises(frugal.Error):
        module(torch.tensor([1]))


def test_a_collection_knows_the_names_it_gets(trainer: frugal.Trainer) -> None:
    bags = ft.EmbeddingBagCollection([ft.TableConfig("a", ROWS, DIM, ["x"])], trainer=trainer)
    keys = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"per_sample_weights has \['X'\]"):
        bags({"x": keys}, per_sample_weights={"X": torch.ones(2)})
    with pytest.raises(ValueError, match=r"lengths has \['y'\]"):
        bags({"x": keys}, {"y": torch.tensor([1, 1])})
    with pytest.raises(ValueError, match="has offsets, and lengths too"):
        bags({"x": (keys, torch.tensor([0, 2]))}, {"x": torch.tensor([1, 1])})


def test_negative_views_are_seen(trainer: frugal.Trainer) -> None:
    weight = torch.zeros(3, 1)
    ours = ft.EmbeddingBag(3, 1, mode="sum", _weight=weight, trainer=trainer, optimizer=frugal.SGD(lr=1.0))
    optimizer = ft.Optimizer(ours)
    keys, ones = torch.arange(3)[:, None], torch.ones(3, 1)
    (torch.complex(ones, ours(keys)).conj() * torch.complex(ones, ones)).imag.sum().backward()
    optimizer.step()
    assert torch.equal(ours.weight, ones)
    assert torch.equal(ours(keys, None, torch.complex(ones, ones).conj().imag), -ones)


def test_rows_that_are_found_by_their_name_are_told_of(trainer: frugal.Trainer) -> None:
    def make(weight: Optional[torch.Tensor] = None) -> Any:
        return ft.EmbeddingBag(ROWS, DIM, trainer=trainer, name="t", _weight=weight)

    def collect() -> Any:
        return ft.EmbeddingBagCollection([ft.TableConfig("t", ROWS, DIM, ["x"])], trainer=trainer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = make()
        for again in (make, collect):
            assert torch.equal(again().state_dict().popitem()[1], first.weight)  # nothing is trained
    with pytest.warns(UserWarning, match="'t' exists, not trained: .* does not take the weight"):
        make(torch.zeros(ROWS, DIM))
    first(torch.tensor([[1]])).sum().backward()
    torch.optim.SGD(first.parameters(), lr=0.5).step()
    for again in (make, collect):
        with pytest.warns(UserWarning, match="'t' exists, trained: the module goes on with its rows$") as told:
            again()
        assert [warning.filename for warning in told] == [__file__]


def test_a_module_s_own_table_goes_with_it(trainer: frugal.Trainer) -> None:
    engine = trainer.engine
    kept = ft.Embedding(ROWS, DIM, trainer=trainer)
    named = ft.Embedding(ROWS, DIM, trainer=trainer, name="named")
    tables = ft.Optimizer(kept)
    for inside in (False, True):
        module = ft.Embedding(ROWS, DIM, trainer=trainer)
        name = module.table.name
        steps = module._steps
        kept(torch.tensor([1])).sum().backward()  # a step is open
        before = kept.weight.clone()
        kept(torch.tensor([2]))
        if inside:
            with steps.lock:  # as where the collector comes in the middle of a call
                del module
                gc.collect()
                assert engine.find_table(name).dim == DIM
        else:
            del module
            gc.collect()
        tables.step()
        assert not torch.equal(kept.weight.clone(), before)
        kept(torch.tensor([1]))
        with pytest.raises(frugal.NotFound):
            engine.find_table(name)
    name = named.table.name
    del named
    gc.collect()
    assert engine.find_table(name).dim == DIM
