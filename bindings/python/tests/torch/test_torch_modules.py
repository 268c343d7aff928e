"""Embedding, EmbeddingBag and EmbeddingBagCollection beside torch.nn's: values, gradients, arguments."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import gc
import copy
import pickle
import warnings
from typing import Any, Dict, List, Optional

import pytest
import torch
from torch_support import DIM, ROWS, bag_pair, integers, sgd

import frugal
import frugal.torch as ft


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
        for arguments in (
            {"max_norm": 1.0},
            {"max_norm": 1.0, "norm_type": 1.0},
            {"scale_grad_by_freq": True},
        ):
            with pytest.raises(NotImplementedError):
                cls(ROWS, DIM, trainer=trainer, **arguments)
        with pytest.raises(ValueError, match="padding_idx"):
            cls(ROWS, DIM, padding_idx=ROWS, trainer=trainer)
        with pytest.raises(ValueError, match="trainer's device"):
            cls(ROWS, DIM, device="meta", trainer=trainer)
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


def test_modules_are_not_copied(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(module)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(module)


def test_modules_have_one_parameter_for_each_table(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    tables = [ft.TableConfig("a", ROWS, 4, ["x", "y"]), ft.TableConfig("b", ROWS, 8, ["z"])]
    model = torch.nn.Sequential(module, ft.EmbeddingBagCollection(tables, trainer=trainer), torch.nn.Linear(DIM, 1))
    (anchor,) = module.parameters()
    assert anchor.numel() == 1 and anchor.requires_grad and isinstance(anchor, torch.nn.Parameter)
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
