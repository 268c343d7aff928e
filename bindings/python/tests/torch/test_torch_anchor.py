"""Tables under PyTorch's own optimizers, clipping, GradScaler and accumulation, each compared with torch.nn."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.sgd import sgd as sgd_step
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_support import DIM, ROWS, bag_pair, committed, integers, sgd, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _anchor, _gradient, _hook

Maker = Callable[[Any], torch.optim.Optimizer]


class Model(torch.nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module, head: torch.nn.Linear) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, head

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(batch) + self.second(batch))  # type: ignore[no-any-return]


def pair(trainer: frugal.Trainer, rows: int = ROWS, sparse: bool = False) -> Tuple[Model, Model]:
    """The same model in both worlds; small integers."""
    weights = [integers(rows, DIM) for _ in range(2)]
    heads = [torch.nn.Linear(DIM, 2) for _ in range(2)]
    with torch.no_grad():
        heads[0].weight.copy_(integers(2, DIM))
        heads[0].bias.zero_()
    heads[1].load_state_dict(heads[0].state_dict())
    ours = [ft.EmbeddingBag(rows, DIM, mode="sum", _weight=weight, trainer=trainer) for weight in weights]
    theirs = [
        torch.nn.EmbeddingBag(rows, DIM, mode="sum", _weight=weight.clone(), sparse=sparse) for weight in weights
    ]
    return Model(ours[0], ours[1], heads[0]), Model(theirs[0], theirs[1], heads[1])


def keys(*shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, shape or (6, 2))


def all_keys(rows: int) -> torch.Tensor:
    """Each row at least once: then a table's state moves in every row, as that of a dense gradient does."""
    return torch.cat([torch.randperm(rows), torch.randint(0, rows, (rows,))]).view(rows, 2)


def rows_of(model: Model) -> List[torch.Tensor]:
    weights = [model.first.weight, model.second.weight, model.head.weight, model.head.bias]
    return [weight.detach().clone() for weight in weights]  # type: ignore[operator]


def assert_same(ours: Model, theirs: Model, rtol: float = 0.0, atol: float = 0.0) -> None:
    for mine, expected in zip(rows_of(ours), rows_of(theirs)):
        if rtol or atol:
            torch.testing.assert_close(mine, expected, rtol=rtol, atol=atol)
        else:
            assert torch.equal(mine, expected)


def backward(models: Any, batch: torch.Tensor, grad: torch.Tensor) -> None:
    for model in models:
        model(batch).backward(grad)


def steps(optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# --- Each optimizer, with and without tables ---

SAME: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.5}),
    "sgd decay": ("SGD", {"lr": 0.5, "weight_decay": 0.25}),
    "sgd maximize": ("SGD", {"lr": 0.1, "maximize": True}),  # it grows, and rounding with it
    "sgd foreach": ("SGD", {"lr": 0.5, "foreach": True}),
    "sgd fused": ("SGD", {"lr": 0.5, "fused": True}),
    "sgd tensor": ("SGD", {"lr": torch.tensor(0.5)}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "momentum decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True, "foreach": True}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adagrad decay": (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3},
    ),
    "adagrad maximize": ("Adagrad", {"lr": 0.1, "maximize": True, "foreach": True}),
    "adagrad fused": ("Adagrad", {"lr": 0.1, "fused": True}),
    "adam": ("Adam", {"lr": 0.1}),
    "adam betas": ("Adam", {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "adam foreach": ("Adam", {"lr": 0.1, "foreach": True}),
    "adam fused": ("Adam", {"lr": 0.1, "fused": True}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.5}),
    "adamw fused": ("AdamW", {"lr": 0.1, "weight_decay": 0.5, "fused": True, "eps": 1e-2}),
    "adam decoupled": ("Adam", {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True}),
    "rmsprop": ("RMSprop", {"lr": 0.05}),
    "rmsprop decay": ("RMSprop", {"lr": 0.05, "alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "rmsprop foreach": ("RMSprop", {"lr": 0.05, "foreach": True}),
}


def maker(case: str) -> Maker:
    name, arguments = SAME[case]
    return lambda parameters: getattr(torch.optim, name)(parameters, **copy.deepcopy(arguments))


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("case", list(SAME))
def test_optimizers_are_torch_s(engine: frugal.Engine, trainer: frugal.Trainer, case: str) -> None:
    rows = 12
    models = pair(trainer, rows)
    optimizers = [maker(case)(model.parameters()) for model in models]
    for _ in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models, all_keys(rows), torch.randn(rows, 2))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*models, rtol=2e-5, atol=2e-6)
    assert committed(engine) == 6


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_sparse_forms_are_torch_s(trainer: frugal.Trainer, kind: str) -> None:
    """Rows that have no gradient stay as they are, and so does their state."""
    ours, theirs = bag_pair(trainer, torch.randn(ROWS, DIM), mode="mean")
    optimizers: List[Any] = [getattr(torch.optim, kind)(list(m.parameters()), lr=0.1) for m in (ours, theirs)]
    for _ in range(8):
        batch, grad = keys(5, 3), torch.randn(5, DIM)
        for module in (ours, theirs):
            module(batch).backward(grad)
        steps(optimizers)
        torch.testing.assert_close(snapshot(ours), theirs.weight.detach(), rtol=2e-6, atol=1e-6)


def test_whole_numbers_are_exact(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for step in range(4):
        backward(models, keys(), integers(6, 2))
        steps(optimizers)
        assert_same(*models)
        assert committed(engine) == step + 1


def test_groups_have_rates_of_their_own(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = []
    for model in models:
        groups: List[Any] = [
            {"params": model.first.parameters(), "lr": 0.5},
            {"params": model.second.parameters(), "lr": 2.0, "maximize": True},
            {"params": model.head.parameters()},
        ]
        optimizers.append(torch.optim.SGD(groups, lr=1.0))
    for step in range(3):
        for optimizer in optimizers:
            optimizer.param_groups[1]["lr"] = 2.0 / 2**step
        backward(models, keys(), integers(6, 2))
        steps(optimizers)
        assert_same(*models)


def test_a_group_may_come_later(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.5) for model in models]
    for step in range(3):
        if step == 1:
            for model, optimizer in zip(models, optimizers):
                optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.25})
        backward(models, keys(), integers(6, 2))
        steps(optimizers)
        for model in models:
            if step < 1:
                model.zero_grad()
        assert_same(*models)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_schedulers_change_the_rate(trainer: frugal.Trainer, kind: str, tensor: bool) -> None:
    models = pair(trainer)
    optimizers: List[Any] = []
    for model in models:
        rate = torch.tensor(0.5) if tensor else 0.5
        optimizers.append(getattr(torch.optim, kind)(model.parameters(), lr=rate))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for _ in range(4):
        backward(models, keys(), integers(6, 2))
        steps(optimizers)
        for scheduler in schedulers:
            scheduler.step()
        assert_same(*models, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("array", [False, True])
def test_a_rate_of_numpy_may_change_in_place(trainer: frugal.Trainer, array: bool) -> None:
    np = pytest.importorskip("numpy")
    models = pair(trainer)
    made = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for optimizer in made:
        optimizer.param_groups[0]["lr"] = np.array(1.0) if array else np.float64(1.0)
    for _ in range(4):
        backward(models, keys(), integers(6, 2))
        steps(made)
        assert_same(*models)
        for optimizer in made:
            optimizer.param_groups[0]["lr"] *= 0.5


def test_two_optimizers_step_at_different_times(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    """SGD for one table in each iteration; the other and the dense layer gather gradients over three."""
    models = pair(trainer)
    often = [torch.optim.SGD(model.first.parameters(), lr=0.5) for model in models]
    seldom = [
        torch.optim.SGD([*model.second.parameters(), *model.head.parameters()], lr=0.25) for model in models
    ]
    for i in range(9):
        backward(models, keys(), integers(6, 2))
        steps(often)
        if i % 3 == 2:
            steps(seldom)
        assert_same(*models)
    assert committed(engine) == 9 + 3


def test_two_optimizers_have_one_table_in_turns(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    first = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    second = [torch.optim.SGD(model.parameters(), lr=0.25, maximize=True) for model in models]
    for i in range(4):
        backward(models, keys(), integers(6, 2))
        steps(first if i % 2 else second)
        assert_same(*models)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kinds", ["adagrad sgd", "adagrad adagrad", "adam momentum", "rmsprop adagrad sgd"])
@pytest.mark.parametrize("saved", ["no", "own", "ours"])
def test_optimizers_in_turns_keep_their_states(trainer: frugal.Trainer, kinds: str, saved: str) -> None:
    """A table has one state of each row, and torch keeps one for each optimizer."""
    models = pair(trainer)
    makers = [STATES[kind] for kind in kinds.split()]
    optimizers = [[make(model.parameters()) for make in makers] for model in models]
    for turn in [0, 0, 1, 1, 0, 1, len(makers) - 1, 0]:
        batch, grad = all_keys(ROWS), integers(ROWS, 2)
        states = [through_a_file([optimizer.state_dict() for optimizer in own]) for own in optimizers]
        if saved == "ours":
            states[1] = copy.deepcopy(states[0])
        for model, own, loaded in zip(models, optimizers, states):
            if saved != "no":
                own[:] = [make(model.parameters()) for make in makers]
                for optimizer, state in zip(own, loaded):
                    optimizer.load_state_dict(state)
            own[turn].zero_grad()
            (model(batch) * grad).sum().backward()
            own[turn].step()
    assert_same(*models, rtol=1e-3, atol=1e-3)


def test_a_hashed_table_s_optimizers_in_turns(trainer: frugal.Trainer) -> None:
    rows = []
    for hashed in (False, True):
        module = ft.EmbeddingBag(
            ROWS, DIM, mode="sum", hashed=hashed, init=frugal.Constant(0.0), name=f"table {hashed}", trainer=trainer
        )
        makers = [STATES["adagrad"], STATES["sgd"]]
        optimizers = [make(module.parameters()) for make in makers]
        for turn in (0, 1, 0, 1, 0):
            optimizers[turn].zero_grad()
            module(torch.arange(4 + turn)[None]).sum().backward()
            optimizers[turn].step()
        rows.append(module(torch.arange(6)[:, None]).detach())
    assert torch.equal(*rows)


MOMENTS = {
    "momentum": ["momentum_buffer"], "adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"], "rmsprop": ["square_avg"],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", list(MOMENTS))
def test_moments_are_read_by_name(trainer: frugal.Trainer, kind: str) -> None:
    models = pair(trainer)
    optimizers = [STATES[kind](model.parameters()) for model in models]
    for turn in range(3):
        batch, grad = all_keys(ROWS), integers(ROWS, 2)
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            (model(batch) * grad).sum().backward()
            optimizer.step()
        mine, theirs = (
            [optimizer.state[parameter] for parameter in model.parameters()]
            for model, optimizer in zip(models, optimizers)
        )
        for name in MOMENTS[kind]:
            for own, other in zip(mine, theirs):
                assert name in own
                torch.testing.assert_close(own[name], other[name], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(own.get(name).norm(), other[name].norm(), rtol=1e-4, atol=1e-4)
            if turn == 1:  # the first of them is set, and the others are as they were
                for state in (*mine, *theirs):
                    state[MOMENTS[kind][0]] = torch.ones_like(state[MOMENTS[kind][0]])
    state, steps = mine[0], [] if kind == "momentum" else ["step"]
    assert [*state] == [*state.keys()] == [*steps, *MOMENTS[kind]] and len(state) == len(theirs[0])
    assert "other" not in state and state.get("other", 7) == 7
    with pytest.raises(KeyError, match="other"):
        state["other"]
    with pytest.raises(ValueError, match="read-only"):
        state[name].numpy()[:] = 0.0
    copied = copy.deepcopy(state)
    assert [copied[step] for step in steps] == [3] * len(steps)
    assert torch.equal(copied[name], state[name]) and type(copied[name]) is torch.Tensor
    assert_same(*models, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", list(MOMENTS))
def test_moments_that_were_kept_are_those_of_now(trainer: frugal.Trainer, kind: str) -> None:
    found = []
    theirs = torch.nn.EmbeddingBag(10, 4, mode="sum")
    mine = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer, _weight=theirs.weight.detach().clone())
    for module in (theirs, mine):
        optimizer = STATES[kind](module.parameters())
        for step in range(4):
            module(torch.arange(10)[:, None]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                kept = [optimizer.state[module.weight][name] for name in MOMENTS[kind]]
                views = [each[3:5] for each in kept]
        found.append([*[each + 0 for each in kept], *[each.sum() for each in views]])
        found[-1] += [torch.tensor(each[7].tolist()) for each in kept]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "RMSprop", "AdamW"])
def test_the_count_of_steps_is_a_tensor_as_in_torch(trainer: frugal.Trainer, kind: str) -> None:
    theirs = torch.nn.EmbeddingBag(10, 4, mode="sum")
    mine = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer, _weight=theirs.weight.detach().clone())
    models = mine, theirs
    optimizers = [getattr(torch.optim, kind)(model.parameters(), lr=0.1) for model in models]

    def counts() -> List[torch.Tensor]:
        return [o.state[model.weight]["step"] for o, model in zip(optimizers, models)]

    def restart(state: Any) -> None:
        state["step"] = torch.tensor(2.0)

    writes: List[Callable[[Any], Any]] = [
        lambda state: state["step"].zero_(), lambda state: state["step"].view(1).fill_(3.0), restart,
        lambda state: torch._foreach_add_([state["step"]], 2),
        lambda state: torch.add(state["step"], 1, out=state["step"]),
    ]  # fmt: skip
    held: List[torch.Tensor] = []
    for write in writes:
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.tensor([list(range(10))])).square().sum().backward()
            optimizer.step()
        for ours, expected in zip(counts(), counts()[1:]):
            assert torch.is_tensor(ours) and (ours.shape, ours.dtype, ours.device) == (
                expected.shape, expected.dtype, expected.device,
            )  # fmt: skip
            assert torch.equal(ours.clone(), expected) and int(ours) == ours.cpu().item() == expected.item()
            held.append(ours)
        assert held[0] is held[-1]
        torch.testing.assert_close(mine.weight.detach(), theirs.weight.detach())
        for model, optimizer in zip(models, optimizers):
            write(optimizer.state[model.weight])
        assert torch.equal(*counts()) and held[0].item() == counts()[1].item()
    saved = [o.state_dict()["state"][0] for o in optimizers]
    assert torch.equal(saved[0]["step"], saved[1]["step"]) and type(saved[0]["step"]) is torch.Tensor
    assert type(copy.deepcopy(held[0])) is torch.Tensor


def test_a_state_can_be_made_of_another(trainer: frugal.Trainer) -> None:
    """As Lightning moves an optimizer's state."""
    module = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer)
    optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.5)
    for _ in range(2):
        state: Any = optimizer.state[module.weight]
        optimizer.state[module.weight] = type(state)({name: value.to("cpu") for name, value in state.items()})
        expected = optimizer.state[module.weight]["sum"].clone()
        module(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected[1:3] += 1.0
        assert torch.equal(optimizer.state[module.weight]["sum"], expected)
    assert int(optimizer.state[module.weight]["step"]) == 2


@pytest.mark.parametrize("new", [0.0, 0.25])
def test_adagrad_s_state_is_there_before_the_first_step(trainer: frugal.Trainer, new: float) -> None:
    theirs = torch.nn.EmbeddingBag(10, 4, mode="sum")
    mine = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer, _weight=theirs.weight.detach().clone())
    for written in (False, True):
        found = []
        for model in (mine, theirs):
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=new)
            state = optimizer.state[model.weight]
            assert list(state) == ["step", "sum"] and torch.equal(state["sum"], torch.full((10, 4), new))
            assert torch.equal(state["step"], torch.tensor(0.0))
            if written:
                state["sum"][1].fill_(2.0)
            found.append(copy.deepcopy(optimizer.state_dict()["state"][0]))
            model(torch.tensor([[1, 2]])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: value.clone() for name, value in state.items()})
        torch.testing.assert_close(found[:2], found[2:])
        torch.testing.assert_close(mine.weight.detach(), theirs.weight.detach())


REFUSED_OF_OPTIMIZERS: Dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "centered": lambda p: torch.optim.RMSprop(p, centered=True),
    "momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "differentiable": lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
}


@pytest.mark.parametrize("name", REFUSED_OF_OPTIMIZERS)
def test_what_tables_train_without_is_said_with_a_way_out(trainer: frugal.Trainer, name: str) -> None:
    module = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer)
    optimizer = REFUSED_OF_OPTIMIZERS[name](module.parameters())
    module(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(NotImplementedError, match=f"{name}.*leave it out, or give the tables an optimizer"):
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_that_is_a_function_is_refused_with_a_way_out(trainer: frugal.Trainer, foreach: bool) -> None:
    module = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer)
    module(torch.tensor([[1, 2]])).sum().backward()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="torch.optim.SGD, Adagrad"):
        parameters: List[Any] = list(module.parameters())
        sgd_step(
            parameters, [p.grad for p in parameters], [None], foreach=foreach,
            weight_decay=0, momentum=0, lr=0.1, dampening=0, nesterov=False, maximize=False,
        )  # fmt: skip


MOMENT_WRITES: Dict[str, Callable[[Any], Any]] = {
    "zero": lambda moment: moment.zero_(),
    "row": lambda moment: moment[0].zero_(),
    "element": lambda moment: moment.__setitem__((..., 0), 0.25),
    "scaled": lambda moment: moment.mul_(0.5).add_(0.125),
    "data": lambda moment: moment.data.view(-1)[3:].fill_(0.5),
    "out": lambda moment: torch.clamp(moment, max=0.5, out=moment),
}


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", list(MOMENTS))
@pytest.mark.parametrize("write", MOMENT_WRITES)
@pytest.mark.parametrize("kept", [False, True])
def test_moments_are_written_in_place(trainer: frugal.Trainer, kind: str, write: str, kept: bool) -> None:
    """As programs do that restart momentum; `kept`: through tensors that were taken before the last step."""
    models = pair(trainer)
    optimizers = [STATES[kind](model.parameters()) for model in models]
    taken: List[List[Any]] = [[], []]
    for turn in range(4):
        batch, grad = all_keys(ROWS), integers(ROWS, 2)
        for moments, model, optimizer in zip(taken, models, optimizers):
            optimizer.zero_grad()
            (model(batch) * grad).sum().backward()
            optimizer.step()
            states = [optimizer.state[parameter] for parameter in model.parameters()]
            if turn == 0 or not kept:
                moments[:] = [state[name] for state in states for name in list(state) if name != "step"]
            if turn == 1:
                for moment in moments:
                    MOMENT_WRITES[write](moment)
    assert_same(*models, rtol=1e-3, atol=1e-3)
    saved = [optimizer.state_dict()["state"][0][MOMENTS[kind][0]] for optimizer in optimizers]
    torch.testing.assert_close(*saved, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Adagrad", "SGD"])
def test_a_new_optimizer_begins_with_new_state(trainer: frugal.Trainer, kind: str) -> None:
    models = pair(trainer)
    for times in range(3):
        optimizers: List[Any] = [
            getattr(torch.optim, kind)(model.parameters(), lr=0.5 / (times + 1)) for model in models
        ]
        for _ in range(2):
            backward(models, keys(), integers(6, 2))
            steps(optimizers)
        assert_same(*models, rtol=1e-5, atol=1e-6)


def test_a_table_of_two_modules_is_trained_by_both(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    weight = integers(ROWS, DIM)
    bags, theirs = bag_pair(trainer, weight, mode="sum", name="t")
    one = ft.Embedding(ROWS, DIM, name="t", trainer=trainer, optimizer=sgd())
    parameters = list(torch.nn.ModuleList([bags, one]).parameters())
    assert len(parameters) == 1
    optimizers = [torch.optim.SGD(parameters, lr=0.5), torch.optim.SGD(theirs.parameters(), lr=0.5)]
    for _ in range(3):
        batch, grad = keys(), integers(6, DIM)
        (bags(batch) * grad).sum().backward()
        (one(batch[:, 0]) * grad).sum().backward()
        (theirs(batch) * grad).sum().backward()
        (theirs(batch[:, :1]) * grad).sum().backward()
        steps(optimizers)
        assert torch.equal(bags.weight, theirs.weight.detach())
    assert committed(engine) == 3


def test_tables_of_a_collection_are_parameters(trainer: frugal.Trainer) -> None:
    tables = [ft.TableConfig("a", ROWS, 4, ["x", "y"]), ft.TableConfig("b", ROWS, 4, ["z"])]
    ours = ft.EmbeddingBagCollection(tables, trainer=trainer)
    weights = {f"embedding_bags.{name}.weight": integers(ROWS, 4) for name in "ab"}
    ours.load_state_dict(weights)
    theirs = [torch.nn.EmbeddingBag(ROWS, 4, mode="sum", _weight=w.clone()) for w in weights.values()]
    anchors = list(ours.parameters())
    groups: List[Any] = [{"params": anchors[:1]}, {"params": anchors[1:], "lr": 0.25}]
    pairs: List[Any] = [{"params": theirs[0].parameters()}, {"params": theirs[1].parameters(), "lr": 0.25}]
    optimizers = [torch.optim.SGD(groups, lr=0.5), torch.optim.SGD(pairs, lr=0.5)]
    for frozen in (False, True, False):
        anchors[0].requires_grad_(not frozen)
        theirs[0].weight.requires_grad_(not frozen)
        batch, grad = torch.randint(0, ROWS, (3, 5, 2)), integers(5, 12)
        ours(batch).backward(grad)
        torch.cat([theirs[0](batch[0]), theirs[0](batch[1]), theirs[1](batch[2])], 1).backward(grad)
        steps(optimizers)
        saved = ours.state_dict()
        for name, module in zip("ab", theirs):
            assert torch.equal(saved[f"embedding_bags.{name}.weight"], module.weight.detach())


def test_an_optimizer_steps_tables_of_two_engines(trainer: frugal.Trainer) -> None:
    with frugal.Engine() as other, other.create_trainer() as stranger:
        pairs = [bag_pair(t, integers(ROWS, DIM), mode="sum") for t in (trainer, stranger)]
        sides = list(zip(*pairs))
        optimizers = [torch.optim.SGD(torch.nn.ModuleList(side).parameters(), lr=0.5) for side in sides]
        for _ in range(3):
            batch, grad = keys(), integers(6, DIM)
            for side in sides:
                (side[0](batch) + side[1](batch)).backward(grad)
            steps(optimizers)
        for ours, theirs in pairs:
            assert torch.equal(ours.weight, theirs.weight.detach())
        for ours, _ in pairs:
            list(ours.parameters())[0].grad = None


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_step_of_three_engines_is_made_or_not(trainer: frugal.Trainer, refused: int) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(frugal.Engine()) for _ in range(2)]
        trainers = [trainer, *(stack.enter_context(engine.create_trainer()) for engine in engines)]
        pairs = [bag_pair(t, integers(ROWS, DIM), mode="sum") for t in trainers]
        head = torch.nn.Linear(DIM, DIM)
        sides = [torch.nn.ModuleList([*side, copy.deepcopy(head)]) for side in zip(*pairs)]
        optimizers = [torch.optim.Adagrad(side.parameters(), lr=0.5) for side in sides]
        for poisoned in (False, True, False):
            batch, grads = keys(), [integers(6, DIM) for _ in range(3)]
            if poisoned:
                grads[refused][2, 3] = math.nan
            for side in sides[: 1 if poisoned else 2]:
                for table, grad in zip(side, grads):
                    table(batch).backward(grad)
                side[3](torch.ones(6, DIM)).sum().backward()
            if poisoned:
                rows = [snapshot(table) for table in sides[0]]
                with pytest.raises(frugal.NanGradient):
                    optimizers[0].step()
                after = [snapshot(table) for table in sides[0]]
                assert all(map(torch.equal, rows, after))
                assert [int(optimizers[0].state[next(ours.parameters())]["step"]) for ours, _ in pairs] == [1, 1, 1]
            else:
                for optimizer in optimizers:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        for ours, theirs in pairs:
            assert torch.allclose(ours.weight, theirs.weight.detach(), atol=1e-6)


def test_a_frugal_optimizer_keeps_its_tables(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    tables = ft.Optimizer(models[0].first)
    group = tables.param_groups[0]
    group["lr"] = 0.125
    dense = torch.optim.SGD(models[0].parameters(), lr=0.5)
    groups: List[Any] = [
        {"params": models[1].first.parameters(), "lr": 0.125},
        {"params": [*models[1].second.parameters(), *models[1].head.parameters()]},
    ]
    reference = torch.optim.SGD(groups, lr=0.5)
    for order in ((tables, dense), (dense, tables)):
        backward(models, keys(), integers(6, 2))
        for optimizer in (*order, reference):
            optimizer.step()
        for optimizer in (*order, reference):
            optimizer.zero_grad()
        assert_same(*models)
    del tables, order, optimizer
    gc.collect()  # then the others have the table
    for group in reference.param_groups:
        group["lr"] = 0.5
    backward(models, keys(), integers(6, 2))
    steps([dense, reference])
    assert_same(*models)


def test_a_module_s_optimizer_is_for_the_frugal_one_alone(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum", optimizer=frugal.SGD(lr=8.0))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    batch = keys()
    for module in (ours, theirs):
        module(batch).sum().backward()
    steps(optimizers)
    assert torch.equal(ours.weight, theirs.weight.detach())


# --- What is refused ---


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.5)


@pytest.mark.parametrize("form", ["weight", "foreach"])
def test_an_optimizer_may_be_given_the_weight(trainer: frugal.Trainer, form: str) -> None:
    models = pair(trainer)
    optimizers = []
    for model in models:
        parameters: List[Any] = [model.first.weight, model.second.weight, *model.head.parameters()]
        optimizers.append(torch.optim.SGD(parameters, lr=0.5, foreach=form == "foreach"))
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models, keys(), integers(6, 2))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*models)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("case", ["sgd decay", "adagrad decay", "adam"])
@pytest.mark.parametrize("form", ["weight", "parameter", "both"])
def test_a_table_that_a_group_has_twice_is_stepped_twice(trainer: frugal.Trainer, case: str, form: str) -> None:
    """As torch does, which warns of it."""
    weight = integers(ROWS, DIM)
    modules: List[Any] = [
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()),
    ]
    optimizers = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in modules:
            first, second = next(module.parameters()), module.weight
            given = {"weight": [second, second], "parameter": [first, first], "both": [first, second]}[form]
            optimizers.append(maker(case)(given))
        for _ in range(3):
            grad = integers(ROWS, DIM)
            for module, optimizer in zip(modules, optimizers):
                optimizer.zero_grad()
                module(torch.arange(ROWS)).backward(grad)
                optimizer.step()
            torch.testing.assert_close(snapshot(modules[0]), snapshot(modules[1]), rtol=2e-5, atol=2e-6)
    ours, theirs = [list(optimizer.state_dict()["state"]) for optimizer in optimizers]
    assert ours == theirs or not ours  # (SGD has none of a table)
    assert sum("duplicate parameters" in str(w.message) for w in caught) == 2


def test_a_table_that_two_groups_have_is_an_error(trainer: frugal.Trainer) -> None:
    """At construction where torch sees it, or else in the step, before anything changes."""
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    (anchor,) = module.parameters()
    message = "some parameters appear in more than one parameter group"
    parameters: List[torch.Tensor] = [module.weight, anchor]
    for one in parameters:
        for other in parameters:
            with pytest.raises(ValueError, match=message):
                torch.optim.SGD([{"params": [one]}, {"params": [other]}], lr=0.5)
    groups: List[Dict[str, Any]] = [{"params": [anchor]}, {"params": [torch.nn.Parameter(torch.zeros(1))]}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    optimizer.param_groups[1]["params"].append(module.weight)
    before = snapshot(module)
    module(keys()).sum().backward()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{message}.*embedding_0"):
            optimizer.step()
    assert torch.equal(module.weight, before)


REFUSED: Dict[str, Tuple[Maker, str]] = {
    "adadelta": (lambda p: torch.optim.Adadelta(p), "Adadelta"),
    "lbfgs": (lambda p: torch.optim.LBFGS(p), "LBFGS"),
    "rprop": (lambda p: torch.optim.Rprop(p), "Rprop"),
    "nadam": (lambda p: torch.optim.NAdam(p), "NAdam"),
    "own step": (lambda p: OwnStep(p, lr=0.5), "OwnStep"),
    "dampening": (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, dampening=0.5), r"SGD\(dampening=0.5\)"),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), r"Adam\(amsgrad=True\)"),
    "centered": (lambda p: torch.optim.RMSprop(p, centered=True), r"RMSprop\(centered=True\)"),
    "rmsprop momentum": (lambda p: torch.optim.RMSprop(p, momentum=0.5), r"RMSprop\(momentum=0.5\)"),
}


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_counterpart_is_refused_by_name(engine: frugal.Engine, trainer: frugal.Trainer, case: str) -> None:
    make, name = REFUSED[case]
    models = pair(trainer)
    optimizer = make(models[0].parameters())
    before = rows_of(models[0])
    batch, grad = keys(), integers(6, 2)
    backward(models, batch, grad)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=name):
            optimizer.step(*([lambda: 0.0] if case == "lbfgs" else []))
        assert all(torch.equal(a, b) for a, b in zip(before, rows_of(models[0])))  # dense layers too
    assert committed(engine) == 0
    # The gradient is there for one that can.
    steps([torch.optim.SGD(model.parameters(), lr=0.5) for model in models])
    assert_same(*models)


def test_a_refused_group_stops_all(trainer: frugal.Trainer) -> None:
    """Also where it comes after one that could be trained."""
    model, _ = pair(trainer)
    groups: List[Any] = [
        {"params": model.first.parameters()},
        {"params": model.second.parameters(), "momentum": 0.5, "dampening": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    before = rows_of(model)
    model(keys()).sum().backward()
    with pytest.raises(NotImplementedError, match="dampening"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, rows_of(model)))


def test_what_has_no_gradient_is_not_refused(trainer: frugal.Trainer) -> None:
    model, _ = pair(trainer)
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    optimizer = torch.optim.Adadelta(model.parameters())
    before = rows_of(model)
    model(keys()).sum().backward()
    optimizer.step()
    after = rows_of(model)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    assert not torch.equal(after[2], before[2])


# --- Closures ---


@pytest.mark.parametrize("form", ["positional", "keyword"])
def test_closures(trainer: frugal.Trainer, form: str) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(3):
        batch, grad = keys(), integers(6, 2)
        losses = []
        for model, optimizer in zip(models, optimizers):
            calls: List[int] = []

            def closure(model: Model = model, optimizer: Any = optimizer, calls: List[int] = calls) -> Any:
                calls.append(1)
                optimizer.zero_grad()
                loss = (model(batch) * grad).sum()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure) if form == "positional" else optimizer.step(closure=closure))
            assert len(calls) == 1
        assert torch.equal(losses[0], losses[1])
        assert_same(*models)


# --- Gradients: norms, clipping, scaling ---


def norms(models: Any, order: float, limit: float, foreach: Optional[bool]) -> List[torch.Tensor]:
    return [
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=order, foreach=foreach) for model in models
    ]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clip_grad_norm(trainer: frugal.Trainer, order: float, foreach: Optional[bool], limit: float) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(3):
        for _ in range(2):
            backward(models, keys(), integers(6, 2))
        mine, expected = norms(models, order, limit, foreach)
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)
        steps(optimizers)
        assert_same(*models, rtol=1e-6, atol=1e-6)


def test_the_norm_is_of_sums_over_a_row_s_keys(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="mean", padding_idx=1)
    batch = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]])
    for module in (ours, theirs):
        module(batch).backward(torch.ones(2, DIM))
    assert theirs.weight.grad is not None
    expected = theirs.weight.grad.to_dense().norm()
    (anchor,) = ours.parameters()
    assert anchor.grad is not None
    for mine in (
        anchor.grad.norm(),
        torch.linalg.vector_norm(anchor.grad),
        torch.nn.utils.get_total_norm([anchor.grad]),
        torch.norm(anchor.grad, 2),
    ):
        torch.testing.assert_close(mine, expected)


def test_clip_of_what_is_not_finite(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    backward(models, keys(), torch.full((6, 2), float("inf")))
    for model in models:
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_a_norm_that_is_no_number_goes_into_the_rows(trainer: frugal.Trainer) -> None:
    model, _ = pair(trainer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tables: List[Any] = [model.first, model.second]
    before = [table.weight.detach().clone() for table in tables]
    backward((model,), keys(), torch.full((6, 2), float("nan")))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(frugal.NanGradient, match="table 'embedding_bag_.'.*NaN in row 0"):
        optimizer.step()
    for table, rows in zip(tables, before):
        assert torch.equal(table.weight, rows)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_clip_grad_value(trainer: frugal.Trainer, foreach: Optional[bool], maximize: bool) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, maximize=maximize) for model in models]
    for step in range(3):
        batch = keys()
        backward(models, batch, integers(6, 2))
        backward(models, batch, integers(6, 2))
        for model in models:
            torch.nn.utils.clip_grad_value_(model.parameters(), 2.0 if step else 4.0, foreach=foreach)
            if step == 2:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)
        steps(optimizers)
        assert_same(*models)


BOUNDS: Dict[str, Callable[[List[torch.Tensor]], Any]] = {
    "nothing is left": lambda grads: [g.clamp_(0.0, 0.0) for g in grads],
    "all is left": lambda grads: [g.clamp_(-math.inf, math.inf) for g in grads],
    "the least of each": lambda grads: torch._foreach_clamp_min_(grads, -1.0),
    "the most of each": lambda grads: torch._foreach_clamp_max_(grads, 1.0),
    "two bounds": lambda grads: (torch._foreach_clamp_min_(grads, -1.0), torch._foreach_clamp_max_(grads, 2.0)),
    "more and more": lambda grads: [g.clamp_(-4.0, 3.0).clamp_(min=-2.0).clamp_(max=2.0).clamp_(max=1) for g in grads],
    "multiplied between": lambda grads: [g.clamp_(min=-2.0).mul_(-0.5).clamp_(max=2.0) for g in grads],
    "asked between": lambda grads: [(g.clamp_(min=-2.0).abs().max(), g.clamp_(max=2.0)) for g in grads],
    "a copy": lambda grads: [(g.clone().clamp_(max=1.0), g.clamp_(min=-1.0).clone().clamp_(max=1.0)) for g in grads],
}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_gradients_are_clamped(trainer: frugal.Trainer, bounds: str) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(3):
        backward(models, keys(), integers(6, 2))
        for model in models:
            BOUNDS[bounds]([p.grad for p in model.parameters() if p.grad is not None])
        steps(optimizers)
        assert_same(*models)


@pytest.mark.parametrize("bounds", ["foreach", "max first", "least"])
def test_two_bounds_that_are_one_are_the_engine_s(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, bounds: str
) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    sums: List[Any] = []
    fold = _gradient.Gradient.fold

    def counted(*args: Any) -> None:
        sums.append(args)
        fold(*args)

    monkeypatch.setattr(_gradient.Gradient, "fold", counted)
    backward(models, keys(), integers(6, 2))
    for model in models:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if bounds == "foreach":
            torch.nn.utils.clip_grad_value_(model.parameters(), 2.0, foreach=True)
        else:
            torch._foreach_clamp_max_(grads, 2.0)
            if bounds == "max first":
                torch._foreach_clamp_min_(grads, -2.0)
    steps(optimizers)
    assert_same(*models)
    assert len(sums) == (2 if bounds == "least" else 0)  # of two tables


@pytest.mark.parametrize("both", [False, True])
def test_a_backward_after_bounds_is_not_clipped(trainer: frugal.Trainer, both: bool) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(2):
        batch = keys()
        backward(models, batch, integers(6, 2))
        for model in models:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            torch._foreach_clamp_min_(grads, -2.0)
            if both:
                torch._foreach_clamp_max_(grads, 2.0)
        backward(models, batch, integers(6, 2))
        steps(optimizers)
        assert_same(*models)


@pytest.mark.parametrize("factors", [(math.nan,), (math.inf,), (1e38, 1e5), (1e-30,)])
def test_whether_a_scaled_gradient_is_finite(trainer: frugal.Trainer, factors: Tuple[float, ...]) -> None:
    models = pair(trainer)
    backward(models, keys(), integers(6, 2))
    for ask in (torch.isfinite, torch.isnan, torch.isinf):
        found = []
        for model in models:
            for parameter in [p for name, p in model.named_parameters() if not name.startswith("head")]:
                assert parameter.grad is not None
                grad = parameter.grad.clone()
                for factor in factors:
                    grad = grad.mul_(factor)
                answers = ask(grad if not grad.is_sparse else grad.to_dense())
                found.append(bool(answers.all() if ask is torch.isfinite else answers.any()))
        half = len(found) // 2
        assert found[:half] == found[half:]


# Batches of keys with their gradients, what gradients are multiplied by after each, and weights of keys.
SUMS: Dict[str, Tuple[List[Tuple[List[List[int]], float]], Tuple[float, ...], Optional[float]]] = {
    "a key twice": ([([[1, 1]], 3e38)], (1.0,), None),
    "a key in two bags": ([([[1, 2], [1, 3]], 3e38)], (1.0,), None),
    "another key": ([([[1, 2], [4, 3]], 3e38)], (1.0,), None),
    "two backwards": ([([[1, 2]], 3e38), ([[1, 3]], 3e38)], (1.0, 1.0), None),
    "what cancels": ([([[1, 2]], 3e38), ([[1, 2]], -3e38)], (1.0, 1.0), None),
    "infinities": ([([[1, 2]], math.inf), ([[1, 2]], -math.inf)], (1.0, 1.0), None),
    "padding": ([([[0, 1]], 1.0), ([[0, 0]], math.inf)], (1.0, 1.0), None),
    "multiplied after": ([([[1, 1]], 3e38)], (0.1,), None),
    "multiplied after both": ([([[1, 2]], 3e38), ([[1, 2]], 3e38)], (1.0, 0.1), None),
    "multiplied between": ([([[1, 2]], 3e38), ([[1, 2]], 3e38)], (0.1, 1.0), None),
    "zeros by infinity": ([([[1, 2]], 1.0)], (math.inf,), None),
    "large weights": ([([[1, 2]], 1e30)], (1.0,), 1e10),
    "small weights": ([([[1, 1]], 3e38)], (1.0,), 0.25),
}


@pytest.mark.parametrize("what", SUMS)
def test_sums_of_gradients_are_finite_or_not(trainer: frugal.Trainer, what: str) -> None:
    batches, factors, weights = SUMS[what]
    found: List[List[Any]] = []
    for module in bag_pair(trainer, integers(ROWS, DIM), mode="sum", sparse=False, padding_idx=0):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        (parameter,) = module.parameters()
        for (batch, grad), factor in zip(batches, factors):
            given = {} if weights is None else {"per_sample_weights": torch.full((len(batch), 2), weights)}
            module(torch.tensor(batch), **given).backward(torch.full((len(batch), DIM), grad))
            assert parameter.grad is not None
            if factor != 1.0:
                parameter.grad.mul_(factor)
        assert parameter.grad is not None
        asked = [bool(torch.isfinite(parameter.grad).all())]
        asked += [bool(ask(parameter.grad).any()) for ask in (torch.isnan, torch.isinf)]
        scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=0.5)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        found.append([*asked, *scaler._found_inf_per_device(optimizer).values()])
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["mul_", "div_", "imul", "data", "foreach", "set mul", "set rmul", "set div"])
def test_a_gradient_is_multiplied(trainer: frugal.Trainer, form: str) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(2):
        backward(models, keys(), integers(6, 2))
        for model in models:
            for parameter in model.parameters():
                if form.startswith("set"):
                    old: Any = parameter.grad
                    parameter.grad = old / 0.25 if form == "set div" else old * 4 if form == "set mul" else 4.0 * old
            grads: List[Any] = [parameter.grad for parameter in model.parameters()]
            if form == "foreach":
                torch._foreach_mul_(grads, 4.0)
            for grad in grads:
                if form == "mul_":
                    grad.mul_(torch.tensor(4.0))
                elif form == "div_":
                    grad.div_(0.25)
                elif form == "imul":
                    grad *= 4
                elif form == "data":
                    grad.data.mul_(4)
        # And what comes after is not.
        backward(models, keys(), integers(6, 2))
        steps(optimizers)
        assert_same(*models)


PENALTIES_OF_PARAMETERS: Dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "function": lambda p: torch.norm(p) ** 2,
    "square": lambda p: torch.square(p).sum(),
    "product": lambda p: torch.mul(p, p).sum(),
    "absolute": lambda p: p.abs().sum(),
    "view": lambda p: p.view(-1).pow(2).mean(),
    "nothing": lambda p: 0 * p.sum(),
}


@pytest.mark.parametrize("case", PENALTIES_OF_PARAMETERS)
@pytest.mark.parametrize("when", ["alone", "before", "with"])
def test_a_penalty_of_parameters_trains_the_rows(trainer: frugal.Trainer, case: str, when: str) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25) for model in models]
    for _ in range(3):
        batch = keys()
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            penalty: Any = sum(PENALTIES_OF_PARAMETERS[case](parameter) for parameter in model.parameters())
            if when == "before":
                penalty.backward()
                penalty = 0.0
            if when != "alone":
                penalty = penalty + model(batch).sum()
            penalty.backward()
        steps(optimizers)
        for mine, expected in zip(rows_of(models[0]), rows_of(models[1])):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


READS: Dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: torch.tensor([*p.shape, *p.size(), p.numel(), p.dim(), len(p), p.nbytes]),
    "norm": lambda p: p.norm(),
    "power": lambda p: p.pow(2).sum(),
    "operator": lambda p: 2 * p**2 - p / 3,
    "absolute": lambda p: p.abs().mean(),
    "row": lambda p: p[0],
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.norm(),
    "data's view": lambda p: p.data.view(-1).square(),
    "data, a function": lambda p: torch.linalg.vector_norm(p.data),
    "detached data": lambda p: p.data.detach().std(),
    "mask": lambda p: (p.data != 0).float().sum(),
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p])),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "zeros": lambda p: torch.zeros_like(p),
    "equal": lambda p: torch.tensor(torch.equal(p, p.clone())),
    "NumPy": lambda p: torch.tensor(p.detach().numpy()),
    "list": lambda p: torch.tensor(p.tolist()),
    "cast": lambda p: p.to(torch.float64),
    "average": lambda p: torch.lerp(p, torch.ones_like(p), 0.25),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_computed_of_a_parameter_is_of_the_rows(trainer: frugal.Trainer, read: str, grad: bool) -> None:
    models = pair(trainer)
    for mine, theirs in zip(*(model.parameters() for model in models)):
        with torch.set_grad_enabled(grad):
            found, expected = READS[read](mine), READS[read](theirs)
        assert found.dtype == expected.dtype and (found.requires_grad == expected.requires_grad or not grad)
        torch.testing.assert_close(found.detach(), expected.detach())


# What needs the gradient of all rows.
OF_ALL_ROWS: Dict[str, Callable[[Any], Any]] = {
    "product with rows": lambda p: p.grad * p,
    "rows and product": lambda p: p.detach() * p.grad,
    "sign": lambda p: p.grad.sign(),
    "flat": lambda p: p.grad.view(-1),
    "element": lambda p: p.grad[2, 1],
    "rows": lambda p: p.grad[torch.tensor([1, 2])],
    "transposed": lambda p: p.grad.t() @ p.detach(),
    "sum with a number": lambda p: p.grad + 1,
    "sum with rows": lambda p: p.grad.add(p.data, alpha=0.5),
    "square of itself": lambda p: p.grad * p.grad.clone(),
    "median": lambda p: p.grad.median(),
    "median of absolutes": lambda p: p.grad.abs().median(),
    "absolutes of rows": lambda p: p.grad.abs().sum(dim=1),
    "absolutes by absolutes": lambda p: p.grad.abs() * p.grad,
    "reciprocals": lambda p: p.grad.pow(-1),
    "histogram": lambda p: p.grad.histc(5, -4, 4),
    "narrow": lambda p: p.grad.narrow(0, 2, 3),
    "reshape": lambda p: p.grad.reshape(2, -1),
    "rows by a loop": lambda p: torch.stack([row.sum() for row in p.grad]),
    "split": lambda p: p.grad.split(7)[1],
    "largest of rows": lambda p: p.grad.max(dim=1).values,
    "length": lambda p: torch.tensor([len(p.grad), len(p.grad.abs()), *p.grad.abs().shape, *p.grad.stride()]),
    "stack": lambda p: torch.stack([p.grad, p.grad]),
    "stack of absolutes": lambda p: torch.stack([p.grad.abs()]),
    "norms of rows": lambda p: p.grad.norm(2, dim=1),
    "norms of rows, kept": lambda p: p.grad.norm(dim=1, keepdim=True),
    "norms of columns": lambda p: torch.linalg.vector_norm(p.grad, ord=2, dim=0),
    "count as a norm": lambda p: p.grad.norm(0.0),
    "smallest": lambda p: p.grad.norm(float("-inf")),
    "sums of columns": lambda p: p.grad.sum(dim=0),
    "means of columns": lambda p: p.grad.mean(0),
    "clipped without 0": lambda p: p.grad.clamp(1.0, 2.0),
    "into a tensor": lambda p: torch.zeros(p.shape).add_(p.grad),
    "trust ratio": lambda p: p.norm() / (p.grad + 0.1 * p.data).norm(),
    "copy": lambda p: copy.deepcopy(p.grad).sign(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)),
}


@pytest.mark.parametrize("what", OF_ALL_ROWS)
def test_a_gradient_is_computed_of_as_torch_s(trainer: frugal.Trainer, what: str) -> None:
    modules, batch = bag_pair(trainer, integers(ROWS, DIM), sparse=False), keys()
    found = []
    for module in modules:
        module(batch).pow(2).sum().backward()
        found.append(OF_ALL_ROWS[what](next(module.parameters())).detach())
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(modules[0].weight.grad, modules[1].weight.grad)


CHANGES: Dict[str, Callable[[Any], Any]] = {
    "mask": lambda p: p.grad.mul_(p.data > 0),
    "mask, augmented": lambda p: exec("p.grad *= p.data > 0", {"p": p}),
    "mask, set": lambda p: setattr(p, "grad", p.grad * (p.data > 0)),
    "rows": lambda p: p.grad.__setitem__(slice(0, 3), 0.0),
    "row by a list": lambda p: p.grad.__setitem__([1, 2], 5.0),
    "weight decay": lambda p: p.grad.add_(p.data, alpha=0.5),
    "weight decay of data": lambda p: p.grad.data.add_(p.data, alpha=0.5),
    "noise": lambda p: p.grad.add_(torch.ones(p.shape)),
    "number": lambda p: p.grad.add_(torch.tensor(0.5)),
    "fill": lambda p: p.grad.fill_(0.5),
    "sign": lambda p: p.grad.sign_(),
    "view": lambda p: p.grad.view(-1).mul_(2.0),
    "itself": lambda p: p.grad.mul_(p.grad),
    "clipped without 0": lambda p: p.grad.clamp_(1.0, 2.0),
    "clipped to nothing": lambda p: p.grad.clamp_(0.5, -0.5),
    "divided by the norms": lambda p: p.grad.div_(p.grad.norm(dim=1, keepdim=True) + 1.0),
    "centralized": lambda p: p.grad.add_(-p.grad.mean(dim=1, keepdim=True)),
    "data": lambda p: setattr(p.grad, "data", p.grad.data.sign()),
    "saved": lambda p: setattr(p, "grad", pickle.loads(pickle.dumps(p.grad))),
    "copied": lambda p: setattr(p, "grad", copy.deepcopy(p.grad)),
    "clipped by another order": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, norm_type=0.0),
    "hook": lambda p: None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_gradient_is_changed_as_torch_s(trainer: frugal.Trainer, what: str) -> None:
    modules, batch = bag_pair(trainer, integers(ROWS, DIM), sparse=False), torch.randint(1, ROWS - 1, (6, 2))
    for module in modules:
        (parameter,) = module.parameters()
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        if what == "hook":
            parameter.register_hook(lambda grad, keep=parameter.data > 0: grad * keep)
        for i in range(3):
            module(batch + i - 1).pow(2).sum().backward()
            if i != 1:
                CHANGES[what](parameter)
        optimizer.step()
    torch.testing.assert_close(modules[0].weight.detach().clone(), modules[1].weight.detach())


def test_a_copy_of_a_gradient_is_its_own(trainer: frugal.Trainer) -> None:
    modules, batch = bag_pair(trainer, integers(ROWS, DIM), sparse=False), keys()
    copies = []
    for module in modules:
        (parameter,) = module.parameters()
        module(batch).pow(2).sum().backward()
        grad = parameter.grad
        assert grad is not None
        copied = grad.clone()
        copied.sign_()
        copied.view(-1).mul_(2.0)
        copied[3] = 5.0
        torch._foreach_mul_([copied, grad], [(parameter.detach() > 0).float(), torch.tensor(0.5)])
        sizes = grad.abs()
        kept, row = sizes.clone(), sizes[2]
        row.add_(1.0)
        sizes.mul_(grad).clamp_(max=2.0)
        sizes[4] = 0.5
        copies.append((copied + 0.0, grad + 0.0, kept + 0.0, row + 0.0, sizes + 0.0))
        parameter.grad = copied
        copied.add_(1.0)
        torch.optim.SGD([parameter], lr=0.5).step()
    torch.testing.assert_close(*copies)
    ours, theirs = modules
    torch.testing.assert_close(ours.weight.detach().clone(), theirs.weight.detach())


def test_a_frozen_parameter_takes_no_hook(trainer: frugal.Trainer) -> None:
    for module in bag_pair(trainer, integers(ROWS, DIM)):
        (parameter,) = module.parameters()
        parameter.register_hook(lambda grad: None)
        parameter.requires_grad_(False)
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            parameter.register_hook(lambda grad: None)


def test_a_gradient_of_a_hashed_table_has_no_shape(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer)
    module(torch.tensor([1])).sum().backward()
    grad = next(module.parameters()).grad
    assert grad is not None
    for compute in (lambda: grad.sign(), lambda: grad.abs().median(), lambda: grad.norm(dim=1), lambda: grad + 1):
        with pytest.raises(NotImplementedError, match="a tensor of all rows: a hashed table has none"):
            compute()


WRITES: Dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p.add_(1.0),
    "clamp": lambda p: p.clamp_(-0.01, 0.01),
    "copy": lambda p: p.copy_(torch.ones(p.shape)),
    "augmented": lambda p: exec("p -= 0.5", {"p": p}),
    "by hand": lambda p: p.sub_(p.grad, alpha=0.5),
    "by hand, scaled": lambda p: p.data.add_(-0.5 * p.grad),
    "by hand, foreach": lambda p: torch._foreach_add_([p], [p.grad], alpha=-0.5),
    "data": lambda p: p.data.clamp_(-0.01, 0.01),
    "data's view": lambda p: p.data.view(-1).fill_(1.0),
    "data's element": lambda p: p.data.__setitem__(0, 1.0),
    "element": lambda p: p.__setitem__(0, 1.0),
    "new data": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "init": lambda p: torch.nn.init.constant_(p, -0.1),
    "init if a matrix": lambda p: torch.nn.init.eye_(p) if p.dim() > 1 else None,
    "vector": lambda p: torch.nn.utils.vector_to_parameters(torch.arange(p.numel()).float(), [p]),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "lerp": lambda p: torch._foreach_lerp_([p], [torch.zeros(p.shape)], 0.5),
    "out": lambda p: torch.clamp(p, -0.01, 0.01, out=p),
    "detached": lambda p: p.detach().mul_(0.5),
}


@pytest.mark.parametrize("case", list(WRITES))
def test_who_writes_a_parameter_writes_rows(trainer: frugal.Trainer, case: str) -> None:
    """Weight clipping, moving averages, steps by hand and other functions over parameters()."""
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    batch = keys()
    for model in models:
        model(batch).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                WRITES[case](parameter)
    assert_same(*models)
    steps(optimizers)
    assert_same(*models)
    if case in ("add", "clamp", "copy"):
        for model in models:
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                WRITES[case](next(model.parameters()))


@pytest.mark.parametrize("kind", ["xavier_uniform_", "kaiming_normal_", "normal_", "orthogonal_"])
def test_parameters_are_initialized_as_torch_s(trainer: frugal.Trainer, kind: str) -> None:
    models = pair(trainer)
    for model in models:
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "weight" in name and parameter.dim() > 1:
                getattr(torch.nn.init, kind)(parameter)
    assert_same(*models)


def test_parameters_have_torch_s_names(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    mine, expected = ({name: p.shape for name, p in model.named_parameters()} for model in models)
    assert mine == expected and list(mine) == list(expected)
    assert [*models[0].state_dict()] == [*models[1].state_dict()]


def test_functional_call_with_other_parameters(trainer: frugal.Trainer) -> None:
    model, _ = pair(trainer)
    batch = keys()
    own: Dict[str, torch.Tensor] = dict(model.named_parameters())
    call = torch.func.functional_call
    assert torch.equal(call(model, own, (batch,)), model(batch))
    dense = {name: 2 * parameter.detach() for name, parameter in own.items() if name.startswith("head")}
    assert torch.equal(call(model, dense, (batch,)), 2 * model(batch))
    others = {name: parameter.detach() for name, parameter in own.items()}
    assert torch.equal(call(model, others, (batch,)), model(batch))
    others = {name: parameter.detach().clone() for name, parameter in own.items()}
    found = torch.func.grad(lambda given: call(model, given, (batch,)).sum())(others)
    model(batch).sum().backward()
    torch.testing.assert_close(found["first.weight"], model.first.weight.grad)
    with pytest.raises(NotImplementedError, match="embedding_bag_0.*functional_call"):
        torch.func.grad(lambda given: call(model, given, (batch,)).sum())(own)
    assert torch.equal(call(model, {}, (batch,)), model(batch))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_functional_call_with_another_weight(trainer: frugal.Trainer, kind: str) -> None:
    """It is for the call alone, and has a gradient."""
    weight, other, batch = integers(ROWS, DIM), integers(ROWS, DIM), keys()
    results: List[List[torch.Tensor]] = []
    for made in (
        getattr(ft, kind)(ROWS, DIM, padding_idx=3, _weight=weight, trainer=trainer),
        getattr(torch.nn, kind)(ROWS, DIM, padding_idx=3, _weight=weight.clone()),
    ):
        model = torch.nn.Sequential(made)

        def run(given: Dict[str, torch.Tensor], model: torch.nn.Module = model) -> torch.Tensor:
            return torch.func.functional_call(model, given, (batch,))  # type: ignore[no-any-return]

        def nested(given: Dict[str, torch.Tensor], model: torch.nn.Module = model) -> torch.Tensor:
            with torch.nn.utils.stateless._reparametrize_module(model, {"0.weight": 2 * other}):
                inner = run(given)
                return torch.cat((inner, model(batch)))

        with torch.no_grad():
            outs = [run({"0.weight": other}), nested({"0.weight": other}), run({"0.weight": made.weight}), run({})]
            outs.append(run(model.state_dict()))
        grads = torch.func.grad(lambda given: run(given).pow(2).sum())({"0.weight": other})
        with pytest.raises(IndexError if kind == "Embedding" else RuntimeError):
            run({"0.weight": other[:4]})
        results.append([*outs, grads["0.weight"], snapshot(made), model(batch)])
    for mine, expected in zip(*results):
        assert torch.equal(mine, expected)
    hashed = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer)
    with pytest.raises(NotImplementedError, match="embedding_.*functional_call"):
        torch.func.functional_call(hashed, {"weight": other}, (batch,))


def test_autograd_grad_of_parameters(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    """What torch.autograd.grad() returns of a table can be measured, scaled, and made the table's gradient."""
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    batch, again, grad = keys(), keys(), integers(6, 2)
    for unused in (False, True):
        got = []
        for model in models:
            out = model(batch) * grad + model.head(model.first(again)) * grad
            parameters = list(model.parameters())
            grads: Any = torch.autograd.grad(out.sum(), parameters, retain_graph=True, allow_unused=unused)
            assert all(parameter.grad is None for parameter in parameters)
            got.append(grads)
        for mine, expected in zip(*got):
            torch.testing.assert_close(mine.norm(), expected.norm())
            assert float(mine.sum()) == float(expected.sum())
        for model, grads in zip(models, got):
            for parameter, each in zip(model.parameters(), grads):
                parameter.grad = each * 0.5
            model(again).backward(grad)
        steps(optimizers)
        assert_same(*models)
    ours, theirs = (next(iter(model.parameters())) - grads[0] for model, grads in zip(models, got))
    torch.testing.assert_close(ours, theirs)  # a step by hand


def test_autograd_grad_with_a_graph_of_its_own(trainer: frugal.Trainer) -> None:
    """The gradient of a table's gradient is an error; others are as before."""
    models = pair(trainer)
    batch = keys()
    for model in models:
        factor = torch.ones(6, 2, requires_grad=True)
        (first,) = torch.autograd.grad((model(batch) * factor).sum(), [factor], create_graph=True)
        assert first.requires_grad
    ours, _ = models
    for factor in (torch.ones(6, 2), torch.ones(6, 2, requires_grad=True)):
        ways: List[Any] = [list(ours.first.parameters()), [ours.first.weight]]
        for asked in ways:
            with pytest.raises(NotImplementedError, match="embedding_bag_0.*create_graph"):
                torch.autograd.grad((ours(batch) * factor).sum(), asked, create_graph=True)


PENALTIES: Dict[str, Callable[[torch.Tensor], Any]] = {
    "square": lambda g: g**2,
    "pow": lambda g: g.pow(2).sum(),
    "product": lambda g: (g * g).sum(),
    "norm": lambda g: g.norm(),
    "vector norm": lambda g: torch.linalg.vector_norm(g),
    "scaled norm": lambda g: (0.5 * g).norm(),
    "clone": lambda g: g.clone().norm(),
    "sum": lambda g: g.sum(),
    "foreach": lambda g: torch._foreach_norm([g])[0],
    "abs": lambda g: g.abs().sum(),
    "dot": lambda g: (g * torch.ones(tuple(g.shape))).sum(),
    "row": lambda g: g[1].norm(),
    "norms of rows": lambda g: g.norm(dim=1).sum(),
}


@pytest.mark.parametrize("form", list(PENALTIES))
def test_a_penalty_of_gradients(trainer: frugal.Trainer, form: str) -> None:
    """Those of other layers are differentiated through a table's rows, too; a table's own are refused."""
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    batch, grad = keys(), integers(6, 2)
    for turn in range(2):
        for model in models:
            (model(batch).pow(2) * grad).sum().backward(create_graph=turn == 0)
        if turn == 0:
            (anchor,) = models[0].first.parameters()
            assert anchor.grad is not None
            with pytest.raises(NotImplementedError, match="embedding_bag_0"):
                PENALTIES[form](anchor.grad)
            with torch.no_grad():
                torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1e30)
        for model in models:
            weight, bias = model.head.weight.grad, model.head.bias.grad
            assert weight is not None and bias is not None
            if turn == 0:
                penalty = weight.pow(2).sum() / 64 + bias.pow(2).sum()
                model.zero_grad()
                penalty.backward()
        if turn == 1:
            assert anchor.grad is not None
            assert bool(torch.as_tensor(PENALTIES[form](anchor.grad)).isfinite().all())
        for mine, expected in zip(models[0].parameters(), models[1].parameters()):
            assert mine.grad is not None and expected.grad is not None
            torch.testing.assert_close(float(mine.grad.norm()), float(expected.grad.norm()), rtol=1e-5, atol=0)
        steps(optimizers)
        assert_same(*models, rtol=1e-5, atol=1e-3)


# What loggers make of a gradient.
REDUCTIONS: Dict[str, Callable[[torch.Tensor], Any]] = {
    "largest": lambda g: g.abs().max(),
    "max": lambda g: g.max(),
    "min": lambda g: g.min(),
    "amax": lambda g: g.data.abs().amax(),
    "amin": lambda g: torch.amin(-g),
    "mean": lambda g: g.mean(),
    "mean abs": lambda g: torch.mean(torch.abs(g)),
    "sum abs": lambda g: g.abs().sum(),
    "mean square": lambda g: g.pow(2).mean(),
    "root mean square": lambda g: torch.sqrt(torch.mean(g**2)),
    "sum of squares": lambda g: (g * g).sum(),
    "std": lambda g: g.detach().std(),
    "var": lambda g: torch.var(g, unbiased=False),
    "scaled": lambda g: (g.abs() / 2).mean() * 3,
    "norm": lambda g: g.abs().norm(1),
    "nonzero": lambda g: torch.count_nonzero(g),
    "finite": lambda g: torch.isfinite(g.abs()).all(),
    "numpy": lambda g: torch.from_numpy(g.detach().cpu().numpy().copy()),
    "array": lambda g: torch.from_numpy(np.asarray(g).copy()),
    "list": lambda g: torch.tensor(g.tolist()),
}


@pytest.mark.parametrize("rows", [ROWS, 4000])  # of few and of many, the gradients of which are summed in another way
@pytest.mark.parametrize("form", list(REDUCTIONS))
def test_reductions_of_a_gradient(trainer: frugal.Trainer, form: str, rows: int) -> None:
    weight = integers(rows, DIM)
    found, batches = [], [keys(), keys()]
    for module in bag_pair(trainer, weight, sparse=False):
        for batch in batches:
            module(batch).pow(2).sum().backward()
        gradient = next(module.parameters()).grad
        assert gradient is not None
        found.append(REDUCTIONS[form](gradient))
    torch.testing.assert_close(*found)


def test_elements_of_a_hashed_table_s_gradient_have_no_number(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", hashed=True, trainer=trainer)
    batch = keys()
    module(batch).sum().backward()
    gradient = next(module.parameters()).grad
    assert gradient is not None
    count = batch.unique(return_counts=True)[1]
    assert float(gradient.abs().max()) == float(count.max()) and float(gradient.min()) == 0.0
    for call in (lambda: gradient.abs().mean(), lambda: gradient.std(), lambda: gradient.numpy()):
        with pytest.raises(NotImplementedError, match="embedding_bag_0"):
            call()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.0])
@pytest.mark.parametrize("form", ["in place", "method", "out", "assigned"])
def test_gradients_without_nan(trainer: frugal.Trainer, form: str, value: float) -> None:
    modules = bag_pair(trainer, integers(ROWS, DIM), sparse=False)
    given: Any = {"nan": 2.0, "posinf": 1e3, "neginf": -1e3}
    for module in modules:
        for factor in (value, 1.0):  # of which the sum is what is changed
            out = module(torch.tensor([[1, 2], [2, 3]]))
            (out * torch.tensor([[1.0], [factor]])).sum().backward()
        parameter = next(module.parameters())
        gradient = parameter.grad
        assert gradient is not None
        if form == "in place":
            torch.nan_to_num_(gradient, **given)
        elif form == "method":
            gradient.nan_to_num_(2.0, 1e3, -1e3)
        elif form == "out":
            torch.nan_to_num(gradient, out=gradient, **given)
        else:
            parameter.grad = torch.nan_to_num(gradient, **given)
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    ours, theirs = modules
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("least, most", [(-1.0, 2.0), (0.0, None), (None, 1.0)])
def test_a_gradient_is_clipped_to_any_range_with_0(
    trainer: frugal.Trainer, least: Optional[float], most: Optional[float]
) -> None:
    modules, batch = bag_pair(trainer, integers(ROWS, DIM), sparse=False), keys()
    for module in modules:
        module(batch).pow(2).sum().backward()
        gradient = next(module.parameters()).grad
        assert gradient is not None
        gradient.clamp_(least, most)
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    ours, theirs = modules
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(
    engine: frugal.Engine, trainer: frugal.Trainer, unscale: bool, foreach: bool, fused: bool
) -> None:
    models = pair(trainer)
    form = {"fused": True} if fused else {"foreach": foreach}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, **form) for model in models]
    scalers = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    scales = []
    for step in range(8):
        batch, grad = keys(), integers(6, 2)
        if step in (2, 5):
            grad[3, 1] = float("inf")
        if step == 4:
            grad[0, 0] = float("nan")
        before = rows_of(models[0])
        for model, optimizer, scaler in zip(models, optimizers, scalers):
            optimizer.zero_grad()
            scaler.scale((model(batch) * grad).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(model.parameters(), 3.0)
            scaler.step(optimizer)
            scaler.update()
        skipped = step in (2, 4, 5)
        assert torch.equal(rows_of(models[0])[0], before[0]) is skipped
        assert_same(*models)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    assert scales[2] < scales[1] and scales[7] > scales[5]


@pytest.mark.parametrize("foreach", [False, True])
def test_unscale_and_clip_the_norm(trainer: frugal.Trainer, foreach: bool) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    scalers = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    for step in range(5):
        batch, grad = keys(), integers(6, 2)
        if step == 2:
            grad[1, 1] = float("inf")
        totals = []
        for model, optimizer, scaler in zip(models, optimizers, scalers):
            optimizer.zero_grad()
            for _ in range(2):
                scaler.scale((model(batch) * grad).sum()).backward()
            scaler.unscale_(optimizer)
            totals.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach))
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(totals[0], totals[1], rtol=1e-6, atol=0, equal_nan=True)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(*models, rtol=1e-6, atol=1e-6)


def test_a_table_s_infinity_skips_the_dense_layers_and_the_other_way(trainer: frugal.Trainer) -> None:
    for where in ("table", "head"):
        models = pair(trainer)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
        scalers = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        before = rows_of(models[0])
        for model, optimizer, scaler in zip(models, optimizers, scalers):
            out = model.first(keys()) if where == "table" else model.head(torch.full((1, DIM), float("inf")))
            scaler.scale(model(keys()).sum() + (out * (float("inf") if where == "table" else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
        assert all(torch.equal(a, b) for a, b in zip(before, rows_of(models[0])))


# --- Accumulation, zero_grad, graphs ---


@pytest.mark.parametrize("count", [1, 2, 7])
def test_accumulation(engine: frugal.Engine, trainer: frugal.Trainer, count: int) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for step in range(3):
        for _ in range(count):
            backward(models, keys(), integers(6, 2))
        steps(optimizers)
        assert_same(*models)
        assert committed(engine) == step + 1


@pytest.mark.parametrize("to_none", [None, False, True])
@pytest.mark.parametrize("whose", ["optimizer", "foreach", "module", "model", "parameter"])
def test_zero_grad(trainer: frugal.Trainer, whose: str, to_none: Optional[bool]) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=whose == "foreach") for m in models]
    arguments = {} if to_none is None else {"set_to_none": to_none}
    before = rows_of(models[0])
    for model, optimizer in zip(models, optimizers):
        model(keys()).sum().backward()
        if whose in ("optimizer", "foreach"):
            optimizer.zero_grad(**arguments)
        elif whose == "module":
            for child in model.children():
                child.zero_grad(**arguments)
        elif whose == "model":
            model.zero_grad(**arguments)
        else:
            for parameter in model.parameters():
                if to_none is False:
                    assert parameter.grad is not None
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, rows_of(models[0])))
    backward(models, keys(), integers(6, 2))
    steps(optimizers)
    assert_same(*models)


def test_a_retained_graph_counts_twice(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    batch, grad = keys(), integers(6, 2)
    for model in models:
        out = model(batch)
        out.backward(grad, retain_graph=True)
        out.backward(grad)
    steps(optimizers)
    assert_same(*models)


def test_a_graph_may_outlive_a_step(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    batch, grad = keys(), integers(6, DIM)
    outs = ours(batch), theirs(batch)
    for _ in range(3):
        for out in outs:
            out.backward(grad, retain_graph=True)
        steps(optimizers)
        assert torch.equal(ours.weight, theirs.weight.detach())


def test_step_without_a_backward_takes_the_gradient_again(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    backward(models, keys(), integers(6, 2))
    for step in range(3):
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*models)
        assert committed(engine) == step + 1
    backward(models, keys(), integers(6, 2))  # and adds to it
    steps(optimizers)
    assert_same(*models)
    for optimizer in optimizers:
        optimizer.step()  # nothing
    assert_same(*models)
    assert committed(engine) == 4


def test_grad_of_something_else_holds_nothing(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    batch, grad = keys(), integers(6, DIM)
    (anchor,) = ours.parameters()
    for way in ("grad", "inputs"):
        got = []
        for module in (ours, theirs):
            weights = (torch.arange(12).view(6, 2) % 3).float().requires_grad_()
            factor = torch.full((1,), 2.0, requires_grad=True)
            out = module(batch, per_sample_weights=weights) * factor
            if way == "grad":
                got.append(torch.autograd.grad(out, [weights, factor], grad))
            else:
                torch.autograd.backward([out], [grad], inputs=[weights, factor])
                got.append((weights.grad, factor.grad))  # type: ignore[arg-type]
        for mine, expected in zip(*got):
            assert torch.equal(mine, expected)
        assert anchor.grad is None
        steps(optimizers)
        assert torch.equal(ours.weight, theirs.weight.detach())
    out = ours(batch)
    (out * 1).backward(grad, inputs=[anchor])  # the table by name
    theirs(batch).backward(grad)
    steps(optimizers)
    assert torch.equal(ours.weight, theirs.weight.detach())
    assert torch.autograd.grad(ours(batch).sum(), [anchor])[0] is not None
    assert anchor.grad is None


def test_gradients_of_weights_are_torch_s_under_accumulation(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum", padding_idx=None)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    weights = [torch.nn.Parameter(torch.ones(6, 2)) for _ in range(2)]
    for _ in range(2):
        for _ in range(3):
            batch, grad = keys(), integers(6, DIM)
            for module, mine in zip((ours, theirs), weights):
                module(batch, per_sample_weights=mine).backward(grad)
        assert weights[0].grad is not None and weights[1].grad is not None
        assert torch.equal(weights[0].grad, weights[1].grad)
        steps(optimizers)
        for mine in weights:
            with torch.no_grad():
                mine.sub_(mine.grad)  # type: ignore[arg-type]
            mine.grad = None
        assert torch.equal(ours.weight, theirs.weight.detach())


# --- Freezing, dtypes ---


def by_module(model: torch.nn.Module, on: bool) -> None:
    model.requires_grad_(on)


def by_parameters(model: torch.nn.Module, on: bool) -> None:
    for parameter in model.parameters():
        parameter.requires_grad = on


def by_weight(model: torch.nn.Module, on: bool) -> None:
    for module in model.children():
        module.weight.requires_grad_(on)
        if isinstance(module, torch.nn.Linear):
            module.bias.requires_grad_(on)


@pytest.mark.parametrize("way", [by_module, by_parameters, by_weight])
def test_freezing_from_above(engine: frugal.Engine, trainer: frugal.Trainer, way: Any) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for frozen in (True, False, True, False):
        for model in models:
            way(model, not frozen)
            assert models[0](keys()).requires_grad is not frozen
        first: Any = models[0].first
        assert first.frozen is frozen and first.weight.requires_grad is not frozen
        before = rows_of(models[0])
        if frozen:
            with pytest.raises(RuntimeError, match="does not require grad"):
                models[0](keys()).sum().backward()
        else:
            backward(models, keys(), integers(6, 2))
        steps(optimizers)
        assert_same(*models)
        assert torch.equal(rows_of(models[0])[0], before[0]) is frozen


def test_one_table_of_two_is_frozen(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for model in models:
        model.first.requires_grad_(False)
    for _ in range(2):
        backward(models, keys(), integers(6, 2))
        steps(optimizers)
        assert_same(*models)


def test_frozen_after_the_backward_is_stepped_as_torch_does(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    backward(models, keys(), integers(6, 2))
    for model in models:
        model.requires_grad_(False)
    steps(optimizers)
    assert_same(*models)


DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("when", ["made", "moved", "after a backward"])
def test_outputs_have_the_module_s_dtype(trainer: frugal.Trainer, dtype: torch.dtype, when: str) -> None:
    """Small integers are exact in all of them; rows stay float32."""
    weight = integers(ROWS, DIM)
    made = dtype if when == "made" else None
    ours = ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=trainer, dtype=made)
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight.clone())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    if when == "after a backward":
        batch, grad = keys(), integers(6, DIM)
        for module in (ours, theirs):
            module(batch).backward(grad)
    if when != "made":
        ours.to(dtype)
    for _ in range(2):
        batch, grad = keys(), integers(6, DIM)
        out = ours(batch)
        assert out.dtype == dtype and ours.weight.dtype == dtype
        assert torch.equal(out.float(), theirs(batch))
        with torch.no_grad():
            assert ours(batch).dtype == dtype
        out.backward(grad.to(dtype))
        theirs(batch).backward(grad)
        (anchor,) = ours.parameters()
        assert anchor.grad is not None and anchor.grad.dtype == dtype
        torch.testing.assert_close(
            torch.nn.utils.clip_grad_norm_([anchor], 1e6).float(),
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e6),
            rtol=1e-2,
            atol=0,
        )
        steps(optimizers)
        assert torch.equal(snapshot(ours).float(), theirs.weight.detach())
    assert ours.state_dict()["weight"].dtype == torch.float32
    ours.float()
    assert ours(keys()).dtype == torch.float32 and torch.equal(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("overwrite", [False, True])
def test_moves_keep_the_parameter(trainer: frugal.Trainer, overwrite: bool) -> None:
    """PyTorch may make another one, which no table would know."""
    model, _ = pair(trainer)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.5)
    (anchor,) = model.first.parameters()
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        for move in (torch.nn.Module.half, torch.nn.Module.float):
            move(model.first)
            assert list(model.first.parameters()) == [anchor]
            before = snapshot(model.first)
            optimizer.zero_grad()
            model.first(torch.tensor([[1]])).sum().backward()
            optimizer.step()
            assert torch.equal(snapshot(model.first)[1], before[1] - 0.5)
        with pytest.raises(NotImplementedError, match="cannot be moved to meta"):
            model.first.to("meta")
        assert list(model.first.parameters()) == [anchor] and anchor.device.type == "cpu"
        assert not model.first(torch.tensor([[1]])).is_meta
        model.first.to_empty(device="cpu")
        model.first.cpu()
        assert list(model.first.parameters()) == [anchor]
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_half_of_a_model(trainer: frugal.Trainer) -> None:
    model, _ = pair(trainer)
    model.to(torch.bfloat16)
    assert model(keys()).dtype == torch.bfloat16
    model.double()
    model(keys()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


# --- A step that no optimizer makes ---


def tensors() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor)


def test_a_forgotten_step_is_bounded_and_warned_of_once(trainer: frugal.Trainer) -> None:
    rows, batch = 50, 400
    ours, theirs = bag_pair(trainer, torch.zeros(rows, DIM), mode="sum")
    (anchor,) = ours.parameters()
    most_parts = most_bytes = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            ids, grad = torch.randint(0, rows, (batch, 1)), integers(batch, DIM)
            ours(ids).backward(grad)
            theirs(ids).backward(grad)
            grad_now = anchor.grad
            assert isinstance(grad_now, _gradient.Gradient)
            held = [part.held for part in grad_now.parts]
            most_parts = max(most_parts, len(held))
            most_bytes = max(
                most_bytes,
                sum(t.nbytes for h in held for t in [h.grad, *(x for x in h.tensors if x is not None)]),
            )
    found = [str(w.message) for w in caught if "embedding_bag_0" in str(w.message)]
    assert len(found) == 1 and "optimizer" in found[0]
    assert most_parts <= _gradient._MOST_HELD
    one = batch * (DIM * 4 + 8) + (batch + 1) * 8
    assert most_bytes <= _gradient._MOST_HELD * one + rows * (DIM * 4 + 8)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    steps(optimizers)
    assert torch.equal(ours.weight, theirs.weight.detach())
    assert anchor.grad is None


@pytest.mark.parametrize("who", ["nobody", "another's", "its own, later", "no step"])
def test_a_table_that_no_optimizer_has_is_warned_of_once(trainer: frugal.Trainer, who: str) -> None:
    """Also where its gradients are dropped before each step, as by model.zero_grad()."""
    model, _ = pair(trainer)
    optimizers = [torch.optim.SGD(model.head.parameters(), lr=0.5), torch.optim.SGD(model.first.parameters(), lr=0.5)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turn in range(30):
            model.zero_grad()
            model(keys()).sum().backward()
            if who != "no step":
                optimizers[0].step()
            if who == "another's" or (who == "its own, later" and turn == 15):
                optimizers[1].step()
    found = sorted(str(w.message).split("'")[1] for w in caught if "many backwards" in str(w.message))
    assert found == {"nobody": ["embedding_bag_0", "embedding_bag_1"], "no step": []}.get(who, ["embedding_bag_1"])


def test_sums_of_what_is_held_are_scaled_and_clipped_alike(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    (anchor,) = ours.parameters()
    steps(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(_gradient._MOST_HELD * 2 + 3):
            batch, grad = keys(), integers(6, DIM)
            for module in (ours, theirs):
                module(batch).backward(grad)
            if i == 50:
                for parameter in (anchor, theirs.weight):
                    parameter.grad.mul_(2.0)  # type: ignore[union-attr]
    totals = [torch.nn.utils.clip_grad_norm_(anchor, 1e9)]
    assert theirs.weight.grad is not None
    totals.append(theirs.weight.grad.to_dense().norm())
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-6, atol=0)
    steps(optimizers)
    assert torch.equal(ours.weight, theirs.weight.detach())


def test_many_steps_hold_nothing(trainer: frugal.Trainer) -> None:
    model, _ = pair(trainer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(keys()).sum().backward()
            optimizer.step()

    train(5)
    before = tensors()
    train(50)
    assert tensors() <= before


def test_modules_and_optimizers_go(trainer: frugal.Trainer) -> None:
    """Nothing of ours holds what the program has dropped."""
    model, _ = pair(trainer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(keys()).sum().backward()
    optimizer.step()
    refs: List[Any] = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(list(model.first.parameters())[0])]
    del model, optimizer, _
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


# --- Memory that the caller uses again ---


@pytest.mark.parametrize("form", ["2d", "offsets", "last", "uint64", "int32", "weights", "nested", "collection"])
def test_the_memory_of_inputs_may_be_used_again_before_the_step(trainer: frugal.Trainer, form: str) -> None:
    weight = integers(ROWS, DIM)
    last = form in ("last", "uint64", "weights")
    ours: Any = ft.EmbeddingBag(
        ROWS, DIM, mode="sum", _weight=weight, trainer=trainer, include_last_offset=last, optimizer=sgd()
    )
    if form == "collection":
        ours = ft.EmbeddingBagCollection([ft.TableConfig("t", ROWS, DIM, ["x"], optimizer=sgd())], trainer=trainer)
        ours.load_state_dict({"embedding_bags.t.weight": weight})
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight.clone(), include_last_offset=last)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    ids, offsets, factors = keys(12), torch.tensor([0, 3, 4, 9, 12]), integers(12)
    grad = integers(4, DIM)
    if form == "2d":
        inputs: List[Any] = [ids.view(4, 3)]
    elif form == "offsets":
        inputs = [ids, offsets[:-1]]
    elif form == "last":
        inputs = [ids, offsets]
    elif form == "uint64":
        inputs = [ids.view(torch.uint64), offsets.view(torch.uint64)]
    elif form == "int32":
        inputs = [ids.int(), offsets[:-1].int()]
    elif form == "weights":
        inputs = [ids, offsets, factors]
    elif form == "nested":
        inputs = [torch.nested.nested_tensor_from_jagged(ids, offsets)]
    else:
        inputs = [{"x": (ids, offsets)}]
    expected = [ids.view(4, 3)] if form == "2d" else [ids, offsets if last else offsets[:-1]]
    if form == "weights":
        expected.append(factors)
    theirs(*(tensor.clone() for tensor in expected)).backward(grad)
    ours(*inputs).backward(grad)
    for tensor in [ids, offsets, factors, *(t for t in inputs if isinstance(t, torch.Tensor) and not t.is_nested)]:
        tensor.zero_()  # uint64 and int32 too
    steps(optimizers)
    got = ours.state_dict()
    assert torch.equal(got[next(iter(got))], theirs.weight.detach())


class Static(torch.autograd.Function):
    """Its gradient is one buffer, which each backward fills."""

    buffer = torch.zeros(6, DIM)

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Static.buffer.copy_(grad * 2)


@pytest.mark.parametrize("how", ["numpy", "data", "in place", "view", "static"])
def test_the_caller_s_gradient_is_the_caller_s_after_a_backward(trainer: frugal.Trainer, how: str) -> None:
    """It may be another one by the step."""
    models = pair(trainer)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    batches, grads = [keys() for _ in range(2)], [integers(6, DIM) for _ in range(2)]
    for model in models:
        buffer = np.zeros((6, DIM), dtype=np.float32)
        tensor = torch.from_numpy(buffer)
        for batch, grad in zip(batches, grads):
            out = model.first(batch)
            if how == "static":
                (Static.apply(out) * grad).sum().backward()
                continue
            if how in ("in place", "view"):
                tensor.copy_(grad)
            else:
                buffer[:] = grad.numpy()
            if how == "view":
                out.view(-1).backward(tensor.view(-1))
            else:
                out.backward(tensor)
            if how == "data":
                tensor.data.fill_(100.0)
            buffer[:] = 100.0
    steps(optimizers)
    assert_same(*models)


# --- Copies, files, traces ---


def test_a_copy_of_a_parameter_is_a_parameter(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    (anchor,) = module.parameters()
    before = snapshot(module)
    optimizer = torch.optim.Adagrad([anchor], lr=0.5)
    copies = [*copy.deepcopy([anchor, module.weight]), pickle.loads(pickle.dumps(anchor))]
    assert copies[0] is copies[1]
    module(keys()).sum().backward()
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert torch.equal(copied.param_groups[0]["params"][0], module.weight)
    for each in copies[1:]:
        assert type(each) is torch.nn.Parameter and torch.equal(each, before) and each.requires_grad
        each.data.zero_()
    assert not torch.equal(module.weight, before) and module.weight.abs().sum() > 0


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_entries_of_a_caller_s_own_in_optimizer_state(trainer: frugal.Trainer, kind: str) -> None:
    """As a subclass keeps them in addition to what the class that it inherits from has."""
    modules, batch = bag_pair(trainer, integers(ROWS, DIM), sparse=False), all_keys(ROWS)
    for module in modules:
        (parameter,) = module.parameters()

        def make(parameter: Any = parameter) -> torch.optim.Optimizer:
            if kind == "adam":
                return torch.optim.Adam([parameter], lr=0.5)
            return torch.optim.SGD([parameter], lr=0.5, momentum=0.5 if kind == "momentum" else 0.0)

        optimizer = make()
        for i in range(6):
            module(batch).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = optimizer.state[parameter]
            state["seen"] = state.get("seen", 0) + 1
            state["average"] = parameter.detach().clone()
            if i == 3:
                saved = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(saved)
        state = optimizer.state[parameter]
        assert state["seen"] == 6 and torch.equal(state["average"], parameter)
    torch.testing.assert_close(modules[0].weight.detach().clone(), modules[1].weight.detach())


def test_copies_and_pickles_say_what_to_do(trainer: frugal.Trainer) -> None:
    model, _ = pair(trainer)
    for what in (model, model.first):
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(what)
        with pytest.raises(TypeError, match="cannot be pickled.*state_dict"):
            pickle.dumps(what)
    tables = ft.Optimizer(model)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            call(tables)


def test_modules_are_leaves_of_graphs_of_fx(trainer: frugal.Trainer) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ft.Embedding(ROWS, DIM, trainer=trainer)
            self.bags = torch.nn.ModuleList([ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)])

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
            return self.rows(ids).sum(0) + self.bags[0](ids, offsets)

    model = Model()
    graph = torch.fx.symbolic_trace(model)
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_module"] == ["rows", "bags.0"]
    ids, offsets = torch.tensor([1, 2, 2, 3]), torch.tensor([0, 1])
    assert torch.equal(graph(ids, offsets), model(ids, offsets))
    assert graph.rows is model.rows


def test_traces_say_what_to_do(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    for frozen in (False, True):
        module.requires_grad_(not frozen)
        with pytest.raises(RuntimeError, match="cannot be traced, scripted or exported.*from_pretrained"):
            torch.jit.trace(module, (keys(),))
        with pytest.raises(Exception, match="cannot be traced, scripted or exported.*from_pretrained"):
            torch.export.export(module, (keys(),))
        with pytest.raises(RuntimeError, match="cannot be traced, scripted or exported.*from_pretrained"):
            torch.fx.symbolic_trace(module)
    model = torch.nn.Sequential(module, torch.nn.Linear(DIM, 1))
    with pytest.raises(Exception, match="cannot be traced, scripted or exported"):
        torch.export.export(model, (keys(),), strict=True)
    with pytest.raises(RuntimeError, match="cannot be traced, scripted or exported.*from_pretrained"):
        torch.jit.script(model)
    batch = keys()
    decoder = torch.nn.Linear(DIM, ROWS, bias=False)
    decoder.weight = module.weight
    with pytest.raises(RuntimeError, match=r"cannot be traced.*weight.clone\(\)"):
        torch.jit.trace(decoder, (torch.ones(1, DIM),))
    with pytest.raises(RuntimeError, match=r"cannot be traced.*weight.clone\(\)"):
        make_fx(lambda ids: module.weight[ids].sum())(batch)
    tables = [ft.TableConfig("table", ROWS, DIM, ["feature"])]
    collection = ft.EmbeddingBagCollection(tables, trainer=trainer)
    rows = ft.Embedding(ROWS, DIM, trainer=trainer)
    for call in (module, rows, lambda ids: collection(ids[None]), lambda ids: module(ids[0], ids[0] * 0)):
        with pytest.raises(RuntimeError, match="cannot be traced.*make_fx.*from_pretrained"):
            make_fx(call)(batch)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with pytest.raises(RuntimeError, match="cannot be traced.*FakeTensorMode.*from_pretrained"):
                call(torch.zeros(2, 2, dtype=torch.int64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(RuntimeError, match=r"cannot be traced.*weight.clone\(\)"):
            module.weight * 2
        with pytest.raises(NotImplementedError, match="cannot be made under FakeTensorMode.*make it before"):
            ft.Embedding(ROWS, DIM, trainer=trainer)
    served = torch.nn.EmbeddingBag.from_pretrained(module.weight.clone(), mode="sum")
    traced = torch.jit.trace(served, (batch,))
    assert torch.equal(traced(batch), module(batch))
    assert module.frozen is True  # as it was
    torch.export.export(served, (batch,))


def test_a_frozen_copy_of_a_weight_freezes_nothing(trainer: frugal.Trainer) -> None:
    ours, _ = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    served = torch.nn.EmbeddingBag.from_pretrained(ours.weight, mode="sum")
    ours.weight.detach().requires_grad_(False)
    ours.weight.data.requires_grad = False
    assert not served.weight.requires_grad and ours.weight.requires_grad and not ours.frozen
    before = snapshot(ours)
    batch = keys()
    ours(batch).sum().backward()
    torch.optim.SGD(ours.parameters(), lr=0.5).step()
    assert not torch.equal(before, ours.weight) and torch.equal(before, served.weight)


# --- States of optimizers ---

STATES: Dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
}


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", list(STATES))
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("into", ["same optimizer", "new optimizer", "new engine"])
def test_states_come_back(
    engine: frugal.Engine, trainer: frugal.Trainer, kind: str, hashed: bool, into: str, tmp_path: Any
) -> None:
    """With its own count of steps, for the bias of Adam and the decaying rate of Adagrad."""
    rows = 8

    def made(trainer: frugal.Trainer, name: str) -> Any:
        module = ft.Embedding(rows, DIM, hashed=hashed, name=name, trainer=trainer)
        return module, STATES[kind](module.parameters())

    def train(module: Any, optimizer: Any, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            optimizer.zero_grad()
            module(torch.randperm(rows, generator=generator)).backward(torch.randn(rows, DIM, generator=generator))
            optimizer.step()

    def rows_by_key(module: Any) -> torch.Tensor:
        saved = module.state_dict()
        return saved["weight"][saved["keys"].argsort()] if hashed else saved["weight"]  # type: ignore[no-any-return]

    module, optimizer = made(trainer, "t")
    train(module, optimizer, 3, 1)
    file = tmp_path / "saved"
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(module, optimizer, 4, 2)
    expected = rows_by_key(module)
    saved = torch.load(file, weights_only=True)
    for _ in range(2):
        other = None
        if into == "new engine":
            other = frugal.Engine()
            module, optimizer = made(other.create_trainer(), "t")
        elif into == "new optimizer":
            optimizer = STATES[kind](module.parameters())
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        again = optimizer.state_dict()  # nothing is lost before the first step
        assert again["state"].keys() == saved["optimizer"]["state"].keys()
        for name, value in saved["optimizer"]["state"].get(0, {}).items():
            assert torch.equal(again["state"][0][name], value)
        train(module, optimizer, 4, 2)
        assert torch.equal(rows_by_key(module), expected)
        if other is not None:
            other.close()


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
def test_a_state_s_step_is_torch_s(trainer: frugal.Trainer) -> None:
    models = pair(trainer, 4)
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for _ in range(3):
        backward(models, all_keys(4), integers(4, 2))
        steps(optimizers)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for place in (0, 1):
        assert float(states[0][place]["step"]) == float(states[1][place]["step"]) == 3
    for place in (2, 3):
        assert torch.equal(states[0][place]["exp_avg_sq"], states[1][place]["exp_avg_sq"])


STATEFUL: Dict[str, Maker] = {kind: STATES[kind] for kind in STATES if kind != "sgd"}
STATEFUL["sparse adam"] = torch.optim.SparseAdam


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", list(STATEFUL))
def test_a_state_dict_of_torch_s_run_goes_on(trainer: frugal.Trainer, kind: str) -> None:
    """Moments and all, saved again before the first step or not."""
    models = pair(trainer, 4, sparse=kind == "sparse adam")
    made = [STATEFUL[kind]([*model.first.parameters(), *model.second.parameters()]) for model in models]
    for _ in range(3):
        backward(models[1:], all_keys(4), integers(4, 2))
        steps(made[1:])
    with torch.no_grad():
        for mine, weight in ((models[0].first, models[1].first), (models[0].second, models[1].second)):
            mine.load_state_dict(weight.state_dict())
    made[0].step()  # with no gradient yet
    made[0].load_state_dict(made[1].state_dict())
    made[0].load_state_dict(copy.deepcopy(made[0].state_dict()))
    for _ in range(2):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        assert_same(*models, rtol=1e-5, atol=1e-5)


IN_TORCH: Dict[str, Maker] = {
    **STATES,
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "adagrad from 0.1": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def forms(optimizer: torch.optim.Optimizer) -> Any:
    """What its state_dict has, without values."""
    return {
        number: {n: (type(v), v.dtype, v.shape) if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("kind", list(IN_TORCH))
def test_torch_s_run_goes_on_from_a_state_dict_of_ours(
    trainer: frugal.Trainer, kind: str, loaded: bool, before: int
) -> None:
    """It is of torch's form, also when it is loaded and saved again, and before the first step."""
    sparse = kind == "sparse adam"
    models = pair(trainer, 4, sparse=sparse)

    def make(model: Model) -> torch.optim.Optimizer:
        return IN_TORCH[kind](list(model.parameters())[: 2 if sparse else None])

    made = [make(model) for model in models]
    for _ in range(before):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
    assert forms(made[0]) == forms(made[1])
    saved = through_a_file([models[0].state_dict(), made[0].state_dict()])
    made = [make(model) for model in models]
    if loaded:
        made[0].load_state_dict(saved[1])
        saved[1] = made[0].state_dict()
    for model, optimizer in zip(models, made):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert forms(made[0]) == forms(made[1])
    for _ in range(3):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        assert_same(*models, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kinds", [("adam", "sparse adam"), ("sparse adam", "adam")])
def test_adam_and_sparse_adam_go_on_with_each_other_s_state(trainer: frugal.Trainer, kinds: Tuple[str, str]) -> None:
    models = pair(trainer, 4, sparse=kinds[1] == "sparse adam")
    made: Any = [IN_TORCH[kinds[0]]([*model.first.parameters(), *model.second.parameters()]) for model in models]
    for _ in range(3):
        backward(models[:1], all_keys(4), integers(4, 2))
        steps(made[:1])
    saved = through_a_file([models[0].state_dict(), made[0].state_dict()["state"]])
    made = [IN_TORCH[kinds[1]]([*model.first.parameters(), *model.second.parameters()]) for model in models]
    for model, optimizer in zip(models, made):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(saved[1])})
    for _ in range(2):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        assert_same(*models, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", ["momentum", "adagrad", "adam", "rmsprop", "adamw", "sparse adam"])
@pytest.mark.parametrize("hashed", [False, True])
def test_moments_of_a_half_model_come_back_bit_for_bit(kind: str, hashed: bool) -> None:
    """PyTorch casts what it loads to the parameter's dtype, which is that of outputs."""
    batch = torch.arange(8).view(4, 2)
    saved: Any = None
    ends = []
    for resumed in (False, True):
        with frugal.Engine() as engine, engine.create_trainer() as trainer:
            init = frugal.Constant(0.5)
            module = ft.EmbeddingBag(8, DIM, mode="sum", hashed=hashed, init=init, trainer=trainer).half()
            optimizer = IN_TORCH[kind](module.parameters())
            for step in range(3 if resumed else 0, 6):
                if step == 3:
                    if not resumed:
                        saved = through_a_file([module.state_dict(), optimizer.state_dict()])
                    module.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                optimizer.zero_grad()
                (module(batch).float() * torch.arange(1.0, DIM + 1) * (step + 1) / 3).sum().backward()
                optimizer.step()
            state = optimizer.state_dict()["state"][0]
            ends.append([module.weight.detach().clone(), *(state[name] for name in sorted(state) if name != "step")])
    for value, expected in zip(*ends):
        assert value.dtype == expected.dtype and torch.equal(value, expected)
    assert ends[0][-1].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", list(STATES))
def test_a_state_of_the_form_of_before_loads(trainer: frugal.Trainer, kind: str) -> None:
    """The state of a dense table was saved in one tensor, and now is as torch has it."""
    models = pair(trainer, 4)
    made = [STATES[kind](model.parameters()) for model in models]
    for _ in range(3):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
    saved = made[0].state_dict()
    for number in (0, 1):
        state = saved["state"].pop(number, {})
        parts = [state[name] for name in MOMENTS.get(kind, [])]
        saved["state"][number] = {"step": 3, "frugal_state": torch.cat([torch.empty(4, 0), *parts], dim=1)}
    made[0] = STATES[kind](models[0].parameters())
    made[0].load_state_dict(saved)
    if kind in MOMENTS:
        assert forms(made[0]) == forms(made[1])
        for tensor in made[0].state_dict()["state"][0].values():
            assert not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().nbytes() == tensor.nbytes
    for _ in range(2):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        assert_same(*models, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("whose", ["own", "ours"])
def test_a_momentum_of_0_keeps_what_is_loaded(trainer: frugal.Trainer, whose: str) -> None:
    models = pair(trainer, 4)
    made = [STATES["momentum"](model.parameters()) for model in models]
    for step, momentum in enumerate([0.9, 0.9, 0.0, 0.0, 0.9, 0.0, 0.9, 0.9]):
        saved = [through_a_file(optimizer.state_dict()) for optimizer in made]
        if step % 3:
            made = [STATES["momentum"](model.parameters()) for model in models]
        for optimizer, state in zip(made, saved if whose == "own" else [saved[0], copy.deepcopy(saved[0])]):
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["momentum"] = momentum
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        assert_same(*models, rtol=1e-5, atol=1e-5)


def test_hooks_of_saving_and_loading_see_a_table_s_moments(trainer: frugal.Trainer) -> None:
    models = pair(trainer, 4)
    made = [STATES["adagrad"](model.parameters()) for model in models]
    scaled: List[int] = []

    def scale(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        state = {n: {**own, "sum": own["sum"] * 2.0} for n, own in state_dict["state"].items()}
        scaled.append(len(state))
        return {**state_dict, "state": state}

    for optimizer in made:
        optimizer.register_state_dict_post_hook(scale)
        optimizer.register_load_state_dict_pre_hook(scale)
    for _ in range(3):
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        for optimizer in made:
            optimizer.load_state_dict(optimizer.state_dict())
    assert_same(*models, rtol=1e-5, atol=1e-5)
    assert scaled == [4] * 12


@pytest.mark.parametrize("of_weight", [False, True])
def test_a_table_that_was_never_stepped_is_saved_as_torch_s(trainer: frugal.Trainer, of_weight: bool) -> None:
    models = pair(trainer, 4)

    def make(model: Any) -> torch.optim.Optimizer:
        weights = [model.first.weight, model.second.weight] if of_weight else model.parameters()
        return IN_TORCH["adagrad from 0.1"](weights)

    made = [make(model) for model in models]
    for part in ("first", "second"):
        batch = all_keys(4)
        for model in models:
            getattr(model, part)(batch).sum().backward()
        steps(made)
        assert forms(made[0]) == forms(made[1])
        saved = through_a_file(made[0].state_dict())
        made = [make(model) for model in models]
        for optimizer in made:
            optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same(*models, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
def test_tensors_of_a_state_dict_have_storages_of_their_own(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.arange(ROWS)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    moments = [state["exp_avg"], state["exp_avg_sq"]]
    assert [m.untyped_storage().nbytes() for m in moments] == [ROWS * DIM * 4] * 2
    assert all(m.is_contiguous() for m in moments) and moments[0].data_ptr() != moments[1].data_ptr()


@pytest.mark.parametrize("case", ["shape", "hashed", "amsgrad", "another optimizer"])
def test_a_state_dict_that_a_table_cannot_take_is_refused(trainer: frugal.Trainer, case: str) -> None:
    theirs = torch.nn.Embedding(5 if case == "shape" else 4, DIM)
    other: Any = torch.optim.Adagrad if case == "another optimizer" else torch.optim.Adam
    saved = other(theirs.parameters(), **({"amsgrad": True} if case == "amsgrad" else {}))
    theirs(torch.arange(4)).sum().backward()
    saved.step()
    ours = ft.Embedding(4, DIM, hashed=case == "hashed", trainer=trainer)
    optimizer = torch.optim.Adam(ours.parameters())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": saved.state_dict()["state"]})
    before = snapshot(ours) if case != "hashed" else None
    for _ in range(2):  # nothing of it is lost
        ours(torch.arange(4)).sum().backward()
        with pytest.raises(ValueError, match="embedding_0.*state that Adam has loaded"):
            optimizer.step()
    assert before is None or torch.equal(ours.weight, before)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", ["momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("way", ["clear", "another dict"])
def test_an_optimizer_s_state_may_be_emptied(trainer: frugal.Trainer, kind: str, way: str) -> None:
    models = pair(trainer, 4)
    made = [STATES[kind]([*model.first.parameters(), *model.second.parameters()]) for model in models]
    for turn in range(5):
        if turn == 3:
            for optimizer in made:
                if way == "clear":
                    optimizer.state.clear()
                else:
                    optimizer.state = collections.defaultdict(dict)
        backward(models, all_keys(4), integers(4, 2))
        steps(made)
        assert_same(*models, rtol=1e-5, atol=1e-5)


# --- What wraps an optimizer ---


class Wrapper:
    """What LightningOptimizer does: an object of a class made on the spot, with the other's attributes."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
        self.__class__ = type("Lightning" + type(optimizer).__name__, (Wrapper, type(optimizer)), {})
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure=closure)


@pytest.mark.parametrize("whose", ["torch", "frugal"])
def test_an_optimizer_is_wrapped_by_a_dynamic_subclass(trainer: frugal.Trainer, whose: str) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    inner: Any = ft.Optimizer(ours) if whose == "frugal" else torch.optim.SGD(ours.parameters(), lr=0.5)
    wrapped: Any = Wrapper(inner)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        batch, grad = keys(), integers(6, DIM)

        def closure() -> Any:
            wrapped.zero_grad()
            loss = (ours(batch) * grad).sum()
            loss.backward()
            return loss

        wrapped.step(closure)
        reference.zero_grad()
        theirs(batch).backward(grad)
        reference.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


def test_a_subclass_with_the_same_step_is_the_same(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")

    class Named(torch.optim.SGD):
        pass

    first: Any = Named(ours.parameters(), lr=0.5)
    first.__class__ = type("Again", (type(first),), {})
    optimizers = [first, torch.optim.SGD(theirs.parameters(), lr=0.5)]
    batch, grad = keys(), integers(6, DIM)
    for module in (ours, theirs):
        module(batch).backward(grad)
    steps(optimizers)
    assert torch.equal(ours.weight, theirs.weight.detach())


def test_an_optimizer_may_be_made_of_another_s_attributes(trainer: frugal.Trainer) -> None:
    """Our hooks are among them."""

    class Made(torch.optim.SGD):
        def __init__(self, optimizer: Any) -> None:
            self.__dict__.update(optimizer.__dict__)

    models = pair(trainer)
    made: List[Any] = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for turn in range(4):
        if turn == 2:
            made = [Made(optimizer) for optimizer in made]
        backward(models, keys(), integers(6, 2))
        steps(made)
        assert_same(*models)


def test_hooks_of_the_caller_are_called(trainer: frugal.Trainer) -> None:
    """And see the gradients before a step and after it."""
    ours, _ = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    (anchor,) = ours.parameters()
    seen: List[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    ours(keys()).sum().backward()
    optimizer.step()
    assert seen == ["pre", "post"] and anchor.grad is not None


@pytest.mark.parametrize("whose", ["optimizer", "global"])
def test_hooks_of_the_caller_are_for_the_step_that_comes(trainer: frugal.Trainer, whose: str) -> None:
    """Whenever they are registered: they clip gradients and say rates."""
    models = pair(trainer)
    made = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    handles: List[Any] = []
    try:
        for turn in range(4):
            if turn in (0, 2):
                if whose == "global":
                    handles.append(register_optimizer_step_pre_hook(hook))
                else:
                    handles += [optimizer.register_step_pre_hook(hook) for optimizer in made]
            backward(models, keys(), integers(6, 2))
            steps(made)
            assert_same(*models)
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_after_the_step_may_drop_gradients(trainer: frugal.Trainer) -> None:
    models = pair(trainer)
    made = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for optimizer in made:
        optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for _ in range(3):
        backward(models, keys(), integers(6, 2))
        for optimizer in made:
            optimizer.step()
        assert_same(*models)


@pytest.mark.parametrize("change", ["reversed", "taken out", "another table"])
def test_groups_may_be_changed_by_hand(trainer: frugal.Trainer, change: str) -> None:
    """With as many parameters as before."""
    models = pair(trainer)
    made = []
    for model in models:
        groups = [
            {"params": list(part.parameters()), "lr": lr} for part, lr in ((model.first, 0.5), (model.second, 0.25))
        ]
        made.append(torch.optim.SGD(groups))
    for turn in range(2):
        for optimizer in made:
            optimizer.zero_grad()
        for model in models:
            model.zero_grad()
        backward(models, keys(), integers(6, 2))
        if turn == 1:
            for model, optimizer in zip(models, made):
                if change == "reversed":
                    optimizer.param_groups.reverse()
                    optimizer.param_groups[0]["lr"] = 1.0
                elif change == "taken out":
                    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(1))]
                else:
                    first, second = optimizer.param_groups
                    first["params"], second["params"] = second["params"], first["params"]
        steps(made)
        assert_same(*models)


@pytest.mark.parametrize("kind", ["Adagrad", "SGD momentum"])
def test_a_warning_says_what_dense_gradients_would_do(trainer: frugal.Trainer, kind: str) -> None:
    """Once, where torch's dense form would move every row."""
    _hook._warned.clear()
    models = pair(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer: Any = (
            torch.optim.Adagrad(models[0].parameters())
            if kind == "Adagrad"
            else torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
        )
        for _ in range(3):
            models[0](keys()).sum().backward()
            steps([optimizer])
    found = [str(w.message) for w in caught if "frugal table" in str(w.message)]
    assert len(found) == (0 if kind == "Adagrad" else 1), found


@pytest.fixture(autouse=True)
def nothing_hidden() -> Iterator[None]:
    """After each test no gradient is with a hook."""
    yield
    assert not any(known.hidden for known in _hook._known.values())


def test_data_of_another_dtype_gives_the_module_that(trainer: frugal.Trainer) -> None:
    """As loops do that convert a model's parameters by hand."""
    for module in bag_pair(trainer, integers(ROWS, DIM), mode="sum"):
        model = torch.nn.Sequential(module, torch.nn.Linear(DIM, 2))
        for dtype in (torch.float16, torch.float32, torch.float64):
            for p in model.parameters():
                p.data = p.data.to(dtype)
            assert module.weight.dtype == module(keys()).dtype == model(keys()).dtype == dtype


def test_what_is_written_to_adagrad_s_state_before_the_first_step(trainer: frugal.Trainer) -> None:
    rows, batch = [], keys()
    for module in bag_pair(trainer, integers(ROWS, DIM), mode="sum"):
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.5, initial_accumulator_value=0.25)
        for state in optimizer.state.values():
            state["sum"].fill_(4.0)
        module(batch).sum().backward()
        optimizer.step()
        state = optimizer.state[module.weight]
        rows.append((module.weight.detach().clone(), copy.deepcopy(state["sum"])))
        kept = io.BytesIO()
        torch.save(state["sum"], kept)
        kept.seek(0)
        assert torch.equal(torch.load(kept), rows[-1][1])
    for mine, expected in zip(*rows):
        torch.testing.assert_close(mine, expected)

