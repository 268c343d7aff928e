"""What the modules take and refuse, compared with torch.nn, whatever the program's default dtype and device are."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple, Type

import pytest
import torch
from torch_support import DIM, ROWS, bag_pair, integers, sgd, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _native

CPU: Any = torch.device("cpu")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS: Dict[str, Callable[[], ContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "meta by default": lambda: default_device("meta"),
    "within meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("kind", ["bag", "embedding", "hashed", "collection"])
def test_defaults_of_the_program_change_the_output_s_type_alone(
    trainer: frugal.Trainer, surroundings: str, kind: str
) -> None:
    rows, loaded, grad = integers(ROWS, DIM), integers(ROWS, DIM), integers(4, DIM)
    rows[3] = loaded[3] = 0
    keys = torch.tensor([[5, 6], [3, 7], [8, 3], [5, 9]])
    every = torch.arange(ROWS)
    optimizer = frugal.Adagrad(lr=0.5)
    states = {"weight": loaded} if kind != "hashed" else {"weight": loaded, "keys": every}
    state_name = "embedding_bags.t." if kind == "collection" else ""
    with SURROUNDINGS[surroundings]():
        module: Any
        # As torch.nn's: of the weight that is given, or else the default.
        dtype = torch.float32 if kind == "embedding" else torch.get_default_dtype()
        factors = torch.tensor([[1, -2], [3, 1], [2, 2], [-1, 3]], dtype=dtype, device="cpu", requires_grad=True)
        arguments: Dict[str, Any] = {"trainer": trainer, "optimizer": optimizer, "padding_idx": 3}
        if kind == "embedding":
            module = ft.Embedding(ROWS, DIM, _weight=rows, **arguments)
        elif kind == "collection":
            table = ft.TableConfig("t", ROWS, DIM, ["x"], padding_idx=3, optimizer=optimizer)
            module = ft.EmbeddingBagCollection([table], trainer=trainer)
        else:
            module = ft.EmbeddingBag(ROWS, DIM, mode="sum", hashed=kind == "hashed", **arguments)
        tables = ft.Optimizer(module)
        if kind == "embedding":
            assert torch.equal(module.weight.detach(), rows)
        module.load_state_dict({state_name + name: value for name, value in states.items()})
        saved = module.state_dict()
        values = saved[state_name + "weight"]
        if kind == "hashed":
            order = saved["keys"].argsort()
            assert saved["keys"].dtype == torch.int64
            assert torch.equal(saved["keys"][order], every)
            values = values[order]
        assert values.device == CPU and torch.equal(values.to(torch.float32), loaded)
        if kind in ("bag", "hashed"):
            assert module.weight.dtype == dtype and module.weight.device == CPU
        if kind == "embedding":
            out = module(keys[:, 0])
        elif kind == "collection":
            out = module({"x": keys}, per_sample_weights={"x": factors})
        else:
            out = module(keys, per_sample_weights=factors)
        assert out.dtype == dtype and out.device == CPU
        out.backward(grad.to(dtype))
        tables.step()
        state = tables.state_dict()
        tables.load_state_dict(state)
        after = module.state_dict()
    if kind == "embedding":
        reference: Any = torch.nn.Embedding(ROWS, DIM, padding_idx=3, _weight=loaded.clone())
        expected = reference(keys[:, 0])
    else:
        reference = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3, _weight=loaded.clone())
        expected = reference(keys, per_sample_weights=factors.detach().to(torch.float32))
    assert torch.equal(out, expected.to(dtype))
    expected.backward(grad)
    torch.optim.Adagrad(reference.parameters(), lr=0.5).step()
    weight, accumulated = after[state_name + "weight"], state["state"][0]["state"]
    if kind == "hashed":
        weight, accumulated = weight[after["keys"].argsort()], accumulated[state["state"][0]["keys"].argsort()]
    torch.testing.assert_close(weight, reference.weight.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(accumulated, reference.weight.grad**2)
    if kind != "embedding":
        assert factors.grad is not None and factors.grad.dtype == dtype


def raised(call: Callable[[], Any]) -> Optional[Exception]:
    try:
        call()
    except Exception as error:
        return error
    return None


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


EMBEDDING: Dict[str, Callable[[], Tuple[Any, ...]]] = {
    "a list": lambda: ([1, 2],),
    "floats": lambda: (torch.rand(4),),
    "half": lambda: (torch.rand(4).half(),),
    "bool": lambda: (torch.zeros(4, dtype=torch.bool),),
    "int16": lambda: (ints(1, 2, dtype=torch.int16),),
    "int8": lambda: (ints(1, 2, dtype=torch.int8),),
    "uint8": lambda: (ints(1, 2, dtype=torch.uint8),),
    "complex": lambda: (torch.zeros(2, dtype=torch.complex64),),
    "an id beyond": lambda: (ints(1, ROWS),),
    "a negative id": lambda: (ints(1, -1),),
    "a negative id of 32 bits": lambda: (ints(1, -1, dtype=torch.int32),),
}

EIGHT = lambda: torch.arange(8)  # noqa: E731

BAGS: Dict[str, Callable[[], Tuple[Any, ...]]] = {
    "floats": lambda: (torch.rand(4, 2),),
    "int16, 2-D": lambda: (torch.zeros(4, 2, dtype=torch.int16),),
    "floats, 1-D": lambda: (torch.rand(4), ints(0, 2)),
    "float offsets": lambda: (EIGHT(), torch.tensor([0.0, 2.0])),
    "narrow keys and offsets": lambda: (ints(1, 2, dtype=torch.uint8), ints(0, dtype=torch.int8)),
    "no dimension": lambda: (torch.tensor(3),),
    "three dimensions": lambda: (torch.zeros(2, 2, 2, dtype=torch.int64),),
    "no offsets": lambda: (EIGHT(),),
    "offsets of 2-D input": lambda: (torch.zeros(4, 2, dtype=torch.int64), ints(0, 2)),
    "offsets of two dimensions": lambda: (EIGHT(), ints(0, 2)[None]),
    "offsets of no dimension": lambda: (EIGHT(), torch.tensor(0)),
    "offsets from 1": lambda: (EIGHT(), ints(1, 2)),
    "a negative first offset": lambda: (EIGHT(), ints(-1, 2)),
    "an offset beyond": lambda: (EIGHT(), ints(0, 100)),
    "an id beyond": lambda: (ints(1, ROWS)[None],),
    "a negative id": lambda: (ints(1, -1)[None],),
    "a negative id of 32 bits": lambda: (ints(1, -1, dtype=torch.int32)[None],),
    "factors of another shape": lambda: (EIGHT(), ints(0, 2), torch.ones(7)),
    "factors of another shape, 2-D": lambda: (EIGHT()[None], None, torch.ones(8)),
    "factors of another shape and no offsets": lambda: (EIGHT(), None, torch.ones(7)),
    "double factors": lambda: (EIGHT(), ints(0, 2), torch.ones(8).double()),
    "half factors": lambda: (EIGHT(), ints(0, 2), torch.ones(8).half()),
    "whole factors": lambda: (EIGHT(), ints(0, 2), EIGHT()),
}

LAST: Dict[str, Callable[[], Tuple[Any, ...]]] = {
    "no offsets at all": lambda: (EIGHT(), ints()),
    "an offset beyond": lambda: (EIGHT(), ints(0, 2, 9)),
    "offsets from 1": lambda: (EIGHT(), ints(1, 8)),
}

MEAN: Dict[str, Callable[[], Tuple[Any, ...]]] = {"factors": lambda: (EIGHT(), ints(0, 2), torch.ones(8))}
ALL = {
    "embedding": EMBEDDING, "bags": BAGS, "last": LAST, "mean": MEAN,
    "max": {name: case for name, case in BAGS.items() if "factors" not in name},
}  # fmt: skip


def modules(kind: str, trainer: frugal.Trainer) -> Tuple[Any, Any]:
    weight = integers(ROWS, DIM)
    if kind == "embedding":
        return (
            ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer, optimizer=sgd()),
            torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()),
        )
    mode = kind if kind in ("mean", "max") else "sum"
    return bag_pair(trainer, weight, mode=mode, include_last_offset=kind == "last", sparse=kind != "max")


def cases() -> List[Any]:
    return [pytest.param(kind, name, id=f"{kind}: {name}") for kind, names in ALL.items() for name in names]


@pytest.mark.parametrize("kind, name", cases())
def test_bad_inputs_raise_torch_s_classes(trainer: frugal.Trainer, kind: str, name: str) -> None:
    ours, theirs = modules(kind, trainer)
    arguments = ALL[kind][name]
    expected = raised(lambda: theirs(*arguments()))
    assert expected is not None
    before = ours.state_dict()["weight"]
    for training in (True, False):
        ours.train(training)
        error = raised(lambda: ours(*arguments()))
        assert isinstance(error, type(expected)), (error, expected)
    assert torch.equal(ours.state_dict()["weight"], before)


def test_what_torch_notices_by_chance(trainer: frugal.Trainer) -> None:
    """torch may read beyond the keys here, or says AttributeError where a list is given."""
    bags = bag_pair(trainer, integers(ROWS, DIM), mode="sum")[0]
    most = ft.EmbeddingBag(ROWS, DIM, mode="max", trainer=trainer)
    for offsets in (ints(0, 3, 1), ints(0, -1), ints(0, 100, 3)):
        for each in (bags, most):
            with pytest.raises(RuntimeError, match="offsets must .*not decrease|offsets.*can not be below 0"):
                each(EIGHT(), offsets)
    for arguments in (([1, 2], ints(0)), (EIGHT(), [0]), (EIGHT(), ints(0), [1.0] * 8)):
        with pytest.raises(TypeError, match="must be a torch.Tensor, not list"):
            bags(*arguments)
    with pytest.raises(TypeError, match="of layout torch.sparse_coo"):
        bags(EIGHT().to_sparse(), ints(0))
    with pytest.raises(RuntimeError, match="on meta"):
        bags(EIGHT().to("meta"), ints(0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_negative_id_is_shown_as_such(trainer: frugal.Trainer, dtype: torch.dtype) -> None:
    for module in (modules("embedding", trainer)[0], modules("bags", trainer)[0]):
        with pytest.raises(frugal.KeyOutOfRange, match="id -1 "):
            module(ints(1, -1, dtype=dtype)[None])


@pytest.mark.parametrize("kind", [ft.Embedding, ft.EmbeddingBag])
@pytest.mark.parametrize("index", [ROWS, -ROWS - 1])
def test_padding_beyond_the_rows(trainer: frugal.Trainer, kind: Type[Any], index: int) -> None:
    theirs: Any = getattr(torch.nn, kind.__name__)
    expected = raised(lambda: theirs(ROWS, DIM, padding_idx=index))
    error = raised(lambda: kind(ROWS, DIM, padding_idx=index, trainer=trainer))
    assert isinstance(expected, AssertionError) and isinstance(error, AssertionError)
    assert str(expected).lower() in str(error)  # "padding_idx must be within num_embeddings"


# What is taken: arguments, and whether include_last_offset is said.
TAKEN: Dict[str, Callable[[], Tuple[Any, ...]]] = {
    "a column": lambda: (torch.randint(0, ROWS, (8, 3))[:, 1], ints(0, 2, 2, 5)),
    "a column, 32 bits": lambda: (torch.randint(0, ROWS, (8, 3), dtype=torch.int32)[:, 1], ints(0, 2, 2, 5)),
    "columns": lambda: (torch.randint(0, ROWS, (8, 3))[:, 1:],),
    "transposed": lambda: (torch.randint(0, ROWS, (3, 8)).t(),),
    "transposed, 32 bits": lambda: (torch.randint(0, ROWS, (3, 8), dtype=torch.int32).t(),),
    "expanded": lambda: (torch.randint(0, ROWS, (3, 1)).expand(3, 5),),
    "expanded, 1-D": lambda: (ints(4).expand(6), ints(0, 2, 3)),
    "turned": lambda: (torch.randint(0, ROWS, (8,)).flip(0)[1:], ints(0, 3)),
    "offsets with gaps": lambda: (torch.randint(0, ROWS, (8,)), torch.stack([ints(0, 3, 8), ints(7, 7, 7)], 1)[:, 0]),
    "offsets of 32 bits": lambda: (torch.randint(0, ROWS, (8,)), ints(0, 3, 8, dtype=torch.int32)),
    "both of 32 bits": lambda: (torch.randint(0, ROWS, (8,), dtype=torch.int32), ints(0, 3, dtype=torch.int32)),
    "narrow keys": lambda: (torch.randint(0, ROWS, (8,), dtype=torch.uint8), ints(0, 3)),
    "narrow keys, offsets of 32 bits": lambda: (
        torch.randint(0, ROWS, (8,), dtype=torch.int16),
        ints(0, 3, dtype=torch.int32),
    ),
    "bool keys": lambda: (torch.tensor([True, False, True]), ints(0, 1)),
    "narrow offsets": lambda: (torch.randint(0, ROWS, (8,)), ints(0, 3, dtype=torch.int8)),
    "no keys": lambda: (ints(), ints(0)),
    "no keys, some bags": lambda: (ints(dtype=torch.int32), ints(0, 0, 0)),
    "no keys, no bags": lambda: (ints(), ints()),
    "no rows of keys": lambda: (torch.zeros(0, 4, dtype=torch.int64),),
    "factors of a column": lambda: (torch.randint(0, ROWS, (8,)), ints(0, 3), integers(8, 2)[:, 1]),
    "factors transposed": lambda: (torch.randint(0, ROWS, (4, 2)), None, integers(2, 4).t()),
    "factors expanded": lambda: (torch.randint(0, ROWS, (4, 2)), None, integers(4, 1).expand(4, 2)),
    "factors of the other sign": lambda: (
        torch.randint(0, ROWS, (4, 2)),
        None,
        torch.complex(integers(4, 2), integers(4, 2)).conj().imag,
    ),
}
TAKEN_LAST: Dict[str, Callable[[], Tuple[Any, ...]]] = {
    "complete": lambda: (torch.randint(0, ROWS, (8,)), ints(0, 3, 3, 8)),
    "with gaps": lambda: (torch.randint(0, ROWS, (8,)), torch.stack([ints(0, 3, 8), ints(7, 7, 7)], 1)[:, 0]),
    "no bags": lambda: (ints(), ints(0)),
    "narrow": lambda: (torch.randint(0, ROWS, (8,), dtype=torch.uint8), ints(0, 3, 8)),
}


@pytest.mark.parametrize("last, name", [(False, name) for name in TAKEN] + [(True, name) for name in TAKEN_LAST])
@pytest.mark.parametrize("padding", [None, 5])
def test_inputs_that_torch_takes_give_its_numbers(
    trainer: frugal.Trainer, last: bool, name: str, padding: Optional[int]
) -> None:
    weight = integers(ROWS, DIM)
    if padding is not None:
        weight[padding] = 0
    ours, theirs = bag_pair(trainer, weight, mode="sum", include_last_offset=last, padding_idx=padding)
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(2):
        arguments = list((TAKEN_LAST if last else TAKEN)[name]())
        twins = list(arguments)
        if len(arguments) == 3:
            arguments[2] = arguments[2].requires_grad_()
            # torch's own backward reads factors that are a negative view without the sign.
            twins[2] = arguments[2].detach().resolve_neg().requires_grad_()
        out, expected = ours(*arguments), theirs(*twins)
        assert out.shape == expected.shape and torch.equal(out, expected)
        grad = integers(*out.shape)
        dense.zero_grad()
        out.backward(grad)
        expected.backward(grad)
        if len(arguments) == 3 and padding is None:
            assert torch.equal(arguments[2].grad, twins[2].grad)
        dense.step()
        tables.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_last_bag_goes_to_the_end(trainer: frugal.Trainer, mode: str) -> None:
    """torch does so, though not in each of its kernels: the others leave these keys out of the output, and give them
    the gradient all the same."""
    weight = integers(ROWS, DIM) * 8
    ours, theirs = bag_pair(trainer, weight, mode=mode, include_last_offset=True)
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    keys = torch.randperm(ROWS)[:8]
    out, expected = ours(keys, ints(0, 4, 5)), theirs(keys, ints(0, 4, 8))
    assert torch.equal(out, expected)
    grad = integers(*out.shape) * 8
    out.backward(grad)
    expected.backward(grad)
    dense.step()
    tables.step()
    assert torch.equal(ours.weight, theirs.weight.detach())


def test_offsets_that_are_strided_are_not_taken_for_those_of_before(trainer: frugal.Trainer) -> None:
    """Their memory begins as that of the last offsets does."""
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    keys = torch.arange(8)
    for offsets in (torch.arange(4), torch.arange(8)[::2], torch.arange(4), torch.tensor([0, 1, 2, 5])):
        assert torch.equal(ours(keys, offsets), theirs(keys, offsets))


@pytest.mark.parametrize("name", ["a column", "transposed", "expanded", "32 bits"])
def test_keys_of_any_strides_have_their_rows(trainer: frugal.Trainer, name: str) -> None:
    keys = {
        "a column": lambda: torch.randint(0, ROWS, (8, 3))[:, 2],
        "transposed": lambda: torch.randint(0, ROWS, (3, 4)).t(),
        "expanded": lambda: torch.randint(0, ROWS, (3, 1, 2)).expand(3, 4, 2),
        "32 bits": lambda: torch.randint(0, ROWS, (5, 3), dtype=torch.int32).t(),
    }[name]()
    ours, theirs = modules("embedding", trainer)
    tables, dense = ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)
    out, expected = ours(keys), theirs(keys)
    assert torch.equal(out, expected)
    grad = integers(*out.shape)
    out.backward(grad)
    expected.backward(grad)
    dense.step()
    tables.step()
    assert torch.equal(ours.weight, theirs.weight.detach())


def test_nested_tensors_are_bags(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    ends = ints(0, 3, 4, 6)
    keys = torch.nested.nested_tensor_from_jagged(torch.arange(6), ends)
    assert torch.equal(ours(keys), theirs(keys))
    factors = torch.nested.nested_tensor_from_jagged(integers(6), ends)
    assert torch.equal(ours(keys, per_sample_weights=factors), theirs(keys, per_sample_weights=factors))
    for wrong in (integers(6), torch.nested.nested_tensor_from_jagged(integers(6), ints(0, 1, 4, 6))):
        for module in (ours, theirs):
            with pytest.raises(ValueError):
                module(keys, per_sample_weights=wrong)


def test_declared_keys_of_any_strides_are_found(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(module)
    loader = [torch.randint(0, ROWS, (6, 3)) for _ in range(5)]
    for batch in ft.Lookahead(loader, lambda batch: {module: batch[:, 1]}):
        module(batch[:, 1], ints(0, 2)).sum().backward()
        tables.step()
    stats = trainer.engine.stats()
    assert stats["steps_committed"] == 5 and stats["keys_undeclared"] == 0


REFUSED: Dict[str, Tuple[Type[Exception], Any, Any]] = {
    "int32 keys": (TypeError, lambda: ints(1, 2, dtype=torch.int32), lambda: torch.zeros(2, DIM)),
    "float keys": (TypeError, lambda: torch.zeros(2), lambda: torch.zeros(2, DIM)),
    "keys elsewhere": (ValueError, lambda: ints(1, 2).to("meta"), lambda: torch.zeros(2, DIM)),
    "keys with gaps": (ValueError, lambda: ints(1, 1, 2, 2)[::2], lambda: torch.zeros(2, DIM)),
    "keys of two dimensions": (ValueError, lambda: ints(1, 2)[None], lambda: torch.zeros(2, DIM)),
    "a list of keys": (TypeError, lambda: [1, 2], lambda: torch.zeros(2, DIM)),
    "double rows": (TypeError, lambda: ints(1, 2), lambda: torch.zeros(2, DIM).double()),
    "half rows": (TypeError, lambda: ints(1, 2), lambda: torch.zeros(2, DIM).half()),
    "rows elsewhere": (ValueError, lambda: ints(1, 2), lambda: torch.zeros(2, DIM, device="meta")),
    "rows with gaps": (ValueError, lambda: ints(1, 2), lambda: torch.zeros(2, 2 * DIM)[:, :DIM]),
    "rows transposed": (ValueError, lambda: ints(1, 2), lambda: torch.zeros(DIM, 2).t()),
    "too few rows": (ValueError, lambda: ints(1, 2), lambda: torch.zeros(1, DIM)),
    "rows too short": (ValueError, lambda: ints(1, 2), lambda: torch.zeros(2, DIM - 1)),
    "rows of the other sign": (
        ValueError,
        lambda: ints(1, 2),
        lambda: torch._neg_view(torch.zeros(2, DIM)),
    ),
    "sparse rows": (ValueError, lambda: ints(1, 2), lambda: torch.zeros(2, DIM).to_sparse()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_addresses_are_those_of_the_right_memory(trainer: frugal.Trainer, name: str) -> None:
    module = ft.Embedding(ROWS, DIM, _weight=integers(ROWS, DIM), trainer=trainer, optimizer=sgd())
    before = snapshot(module)
    error, make_keys, make_rows = REFUSED[name]
    keys, rows = make_keys(), make_rows()
    with pytest.raises(error):
        _native.get(module.table, keys, rows, with_state=False)
    with pytest.raises(error):
        _native.put(module.table, keys, rows, with_state=False)
    if "keys" in name:
        with pytest.raises(error):
            _native.delete(module.table, keys)
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize(
    "weight, message",
    [
        (torch.zeros(ROWS, DIM, device="meta"), "meta device"),
        (torch.zeros(ROWS, DIM, dtype=torch.complex64), "complex64"),
        (torch.zeros(ROWS, DIM).to_sparse(), "sparse"),
        (torch.zeros(ROWS), "1 dimensions"),
        (torch.tensor(1.0), "0 dimensions"),
        (torch.zeros(ROWS, DIM + 1), "shape"),
        (torch.zeros(ROWS + 1, DIM), "rows"),
    ],
)
def test_states_that_cannot_be_loaded(trainer: frugal.Trainer, weight: torch.Tensor, message: str) -> None:
    module = ft.Embedding(ROWS, DIM, _weight=integers(ROWS, DIM), trainer=trainer, optimizer=sgd())
    before = snapshot(module)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict({"weight": weight})
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("strides", ["transposed", "with gaps"])
def test_states_of_any_type_and_strides_are_loaded(trainer: frugal.Trainer, dtype: torch.dtype, strides: str) -> None:
    wanted = integers(ROWS, DIM)
    weight = torch.zeros(DIM, ROWS, dtype=dtype).t() if strides == "transposed" else torch.zeros(ROWS, 2 * DIM)[:, ::2]
    weight = weight.copy_(wanted).to(dtype)
    module = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    module.load_state_dict({"weight": weight})
    assert torch.equal(module.weight, wanted)


def test_keys_of_a_hashed_state_are_whole_numbers(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer, optimizer=sgd())
    with pytest.raises(RuntimeError, match="keys is of torch.float32"):
        module.load_state_dict({"weight": torch.zeros(2, DIM), "keys": torch.tensor([1.0, 2.0])})
    keys = torch.tensor([1, 2**64 - 1], dtype=torch.uint64)
    module.load_state_dict({"weight": torch.ones(2, DIM), "keys": keys})
    assert sorted(module.state_dict()["keys"].tolist()) == [-1, 1]


@pytest.mark.parametrize(
    "ours, theirs, also",
    [
        (frugal.SGD(), torch.optim.SGD, {}),
        (frugal.Momentum(momentum=0.0), torch.optim.SGD, {"momentum": "momentum", "dampening": "dampening"}),
        (frugal.Momentum(), torch.optim.SGD, {"nesterov": "nesterov"}),
        (frugal.Adagrad(), torch.optim.Adagrad, {"eps": "eps", "initial_accumulator": "initial_accumulator_value"}),
        (frugal.RowWiseAdagrad(), torch.optim.Adagrad, {"eps": "eps"}),
        (frugal.Adam(), torch.optim.Adam, {"eps": "eps"}),
        (frugal.Adam(), torch.optim.SparseAdam, {"eps": "eps"}),
        (frugal.RMSProp(), torch.optim.RMSprop, {"eps": "eps", "rho": "alpha"}),
    ],
)
def test_defaults_are_torch_s(ours: Any, theirs: Type[Any], also: Dict[str, str]) -> None:
    defaults = theirs([torch.nn.Parameter(torch.zeros(1))]).defaults
    for name, other in {"lr": "lr", **also}.items():
        assert getattr(ours, name) == defaults[other], name
    if "betas" in defaults:
        assert (ours.beta1, ours.beta2) == defaults["betas"]
    assert ours.weight_decay_l2 == defaults.get("weight_decay", 0) and ours.weight_decay == 0.0


@pytest.mark.parametrize("kind", [ft.Embedding, ft.EmbeddingBag])
def test_shapes_that_cannot_be(trainer: frugal.Trainer, kind: Type[Any]) -> None:
    theirs: Any = getattr(torch.nn, kind.__name__)
    for arguments in ((-1, 3), (3, -1), (3, 4, torch.zeros(3)), (3, 4, torch.zeros(4, 3))):
        rows, dim, *weight = arguments
        expected = raised(lambda: theirs(rows, dim, _weight=weight[0] if weight else None))
        error = raised(lambda: kind(rows, dim, _weight=weight[0] if weight else None, trainer=trainer))
        assert expected is not None and isinstance(error, type(expected)), (arguments, error, expected)
    expected = raised(lambda: theirs.from_pretrained(torch.zeros(3)))
    error = raised(lambda: kind.from_pretrained(torch.zeros(3), trainer=trainer))
    assert expected is not None and isinstance(error, type(expected))
    for rows, dim in ((0, 3), (3, 0), (0, 0)):
        with pytest.raises(ValueError, match=f"num_embeddings {rows} and embedding_dim {dim}"):
            kind(rows, dim, hashed=True, trainer=trainer)


def test_no_bags_take_no_keys(trainer: frugal.Trainer) -> None:
    """torch's backward reads beyond the gradient here, so that only the output is compared."""
    for last, offsets in ((False, ints()), (True, ints(0)), (True, ints(3))):
        ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum", include_last_offset=last)
        before, factors = ours.weight, integers(8).requires_grad_()
        tables = ft.Optimizer(ours)
        out = ours(EIGHT(), offsets, factors)
        assert out.shape == theirs(EIGHT(), ints(0) if last else offsets).shape == (0, DIM)
        out.sum().backward()
        tables.step()
        assert torch.equal(ours.weight, before)
        assert factors.grad is not None and not factors.grad.any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("begins", [[0, 10], [0, 3, -5]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("graph", [True, False])
def test_bad_offsets_are_those_of_the_caller(
    trainer: frugal.Trainer, mode: str, begins: List[int], dtype: torch.dtype, graph: bool
) -> None:
    bags = ft.EmbeddingBag(ROWS, DIM, mode=mode, trainer=trainer)
    at = len(begins) - 1
    with torch.set_grad_enabled(graph), pytest.raises(RuntimeError) as error:
        bags(torch.arange(9), torch.tensor(begins, dtype=dtype))
    assert f"'embedding_bag_0': offsets[{at}] is {begins[at]}, and can not be" in str(error.value)
    assert "the 9 keys" in str(error.value) and isinstance(error.value, frugal.InvalidArgument)


@pytest.mark.parametrize("graph", [True, False])
def test_errors_of_reads_are_torch_s(trainer: frugal.Trainer, graph: bool) -> None:
    with torch.set_grad_enabled(graph):
        with pytest.raises(RuntimeError, match="id 60"):
            ft.EmbeddingBag(ROWS, DIM, trainer=trainer)(torch.tensor([[ROWS]]))
        with pytest.raises(IndexError, match="id 60"):
            ft.Embedding(ROWS, DIM, trainer=trainer)(torch.tensor([[ROWS]]))
