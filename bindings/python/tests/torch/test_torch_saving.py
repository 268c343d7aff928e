"""state_dict of modules and of the optimizer."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from torch_support import DIM, ROWS, bag_pair, integers, sgd, snapshot

import frugal
import frugal.torch as ft

CONFIGS: Dict[str, frugal.Optimizer] = {
    "sgd": frugal.SGD(lr=0.1),
    "momentum": frugal.Momentum(lr=0.1),
    "adagrad": frugal.Adagrad(lr=0.1, initial_accumulator=0.5),
    "row-wise adagrad": frugal.RowWiseAdagrad(lr=0.1),
    "adam": frugal.Adam(lr=0.1),
    "ftrl": frugal.FTRL(lr=0.1),
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(module: Any, optimizer: ft.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(0, ROWS, (8, 2), generator=generator)
        out = module(batch)
        out.backward(torch.randn(out.shape, generator=generator))
        optimizer.step()


def state_of(module: Any, optimizer: ft.Optimizer) -> Dict[str, torch.Tensor]:
    """By key, so that the order of hashed rows does not matter."""
    model, saved = module.state_dict(), optimizer.state_dict()["state"][0]
    if "keys" not in model:
        return {"rows": model["weight"], "state": saved["state"]}
    order, saved_order = model["keys"].argsort(), saved["keys"].argsort()
    return {
        "keys": model["keys"][order], "rows": model["weight"][order], "state": saved["state"][saved_order],
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_training_goes_on_bit_for_bit(kind: str, hashed: bool, order: str) -> None:
    def world(engine: frugal.Engine) -> Any:
        trainer = engine.create_trainer()
        module = ft.EmbeddingBag(
            ROWS, DIM, mode="sum", hashed=hashed, trainer=trainer, name="t", optimizer=CONFIGS[kind]
        )
        return module, ft.Optimizer(module)

    with frugal.Engine(seed=1) as engine:
        module, optimizer = world(engine)
        train(module, optimizer, 4, seed=1)
        optimizer.param_groups[0]["lr"] = 0.05
        saved = through_a_file({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
        assert saved["optimizer"]["step"] == 4
        train(module, optimizer, 4, seed=2)
        expected = state_of(module, optimizer)
    with frugal.Engine(seed=1) as engine:
        module, optimizer = world(engine)
        if order == "model first" or hashed:  # the rows of a hashed table must be there
            module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        else:
            optimizer.load_state_dict(saved["optimizer"])
            module.load_state_dict(saved["model"])
        assert optimizer.param_groups[0]["lr"] == 0.05
        train(module, optimizer, 4, seed=2)
        assert engine.committed_step() == 7
        got = state_of(module, optimizer)
    assert got.keys() == expected.keys()
    for name in got:
        assert torch.equal(got[name], expected[name]), name


def test_state_dicts_of_torch_and_ours_are_each_other_s(trainer: frugal.Trainer) -> None:
    for ours, theirs in (
        (ft.EmbeddingBag(ROWS, DIM, trainer=trainer), torch.nn.EmbeddingBag(ROWS, DIM)),
        (ft.Embedding(ROWS, DIM, trainer=trainer), torch.nn.Embedding(ROWS, DIM)),
    ):
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.weight, theirs.weight.detach())
        with torch.no_grad():
            theirs.weight.zero_()
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(ours.weight, theirs.weight.detach())
        half = {"weight": theirs.weight.detach().half()}
        ours.load_state_dict(half)
        assert torch.equal(ours.weight, half["weight"].float())


def test_writing_to_a_state_dict_writes_rows_as_in_torch(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), optimizer=sgd(), sparse=False)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    kept = [module.state_dict() for module in (ours, theirs)]
    average = [copy.deepcopy(module.state_dict()) for module in (ours, theirs)]
    for _ in range(3):
        batch, grad = torch.randint(0, ROWS, (6, 2)), integers(6, DIM)
        for module, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            module(batch).backward(grad)
            optimizer.step()
        for states in (kept, [module.state_dict() for module in (ours, theirs)]):
            for state in states:
                state["weight"].mul_(0.5)
                state["weight"][3:5] += 1.0
                with torch.no_grad():
                    torch.nn.init.constant_(state["weight"][7], 0.25)
            assert torch.equal(ours.weight, theirs.weight.detach())
            assert torch.equal(states[0]["weight"], states[1]["weight"])
        for state, module in zip(average, (ours, theirs)):
            for name, value in module.state_dict().items():
                state[name].mul_(0.5).add_(value, alpha=0.5)  # a copy's are its own
        assert torch.equal(average[0]["weight"], average[1]["weight"])
        assert torch.equal(ours.weight, theirs.weight.detach())
    for copied in (copy.deepcopy(kept[0]), through_a_file(kept[0]), {"weight": kept[0]["weight"].clone()}):
        assert type(copied["weight"]) is torch.Tensor
        copied["weight"].zero_()
    assert torch.equal(ours.weight, theirs.weight.detach())


def test_a_state_dict_may_keep_the_weight_itself(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(6, 2, trainer=trainer)
    kept = module.state_dict(keep_vars=True)["weight"]
    assert kept is module.weight and kept.requires_grad
    torch.func.functional_call(module, {"weight": kept}, torch.tensor([1])).sum().backward()
    before = kept.detach().clone()
    torch.optim.SGD([kept], lr=0.5).step()
    assert torch.equal(kept, before.index_add(0, torch.tensor([1]), torch.ones(1, 2), alpha=-0.5))
    assert not module.state_dict()["weight"].requires_grad


@pytest.mark.parametrize("how", ["from_pretrained", "assign"])
def test_a_module_of_torch_may_have_a_state_dict_s_tensor(trainer: frugal.Trainer, how: str) -> None:
    """As its weight, which it then shares with the table, and which can be exported."""
    ours = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    saved, theirs = ours.state_dict(), torch.nn.Embedding(ROWS, DIM)
    if how == "assign":
        theirs.load_state_dict(saved, assign=True)
    else:
        theirs = torch.nn.Embedding.from_pretrained(saved["weight"])  # type: ignore[no-untyped-call]
    ids = torch.arange(ROWS)
    assert torch.equal(theirs(ids), ours(ids))
    with torch._subclasses.FakeTensorMode() as fakes:
        assert fakes.from_tensor(theirs.weight).shape == (ROWS, DIM)
    with torch.no_grad():
        theirs.weight[3] = 7.0
    assert torch.equal(theirs(ids), ours(ids)) and ours.weight[3].eq(7.0).all()


def test_a_state_dict_of_a_table_s_keys_is_written_by_key(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer, optimizer=sgd())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for ids in ([4, -9], list(range(30))):
        module(torch.tensor(ids)).sum().backward()
        optimizer.step()
        if len(ids) == 2:
            saved = module.state_dict()
    saved["weight"].fill_(3.0)
    now = module.state_dict()
    assert sorted(now["keys"][now["weight"].eq(3.0).all(1)].tolist()) == [-9, 4]


def test_loading_a_model_keeps_the_optimizer_s_state(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=frugal.Adagrad(lr=0.1))
    optimizer = ft.Optimizer(module)
    train(module, optimizer, 3, seed=1)
    state = optimizer.state_dict()["state"][0]["state"]
    assert state.abs().sum() > 0
    module.load_state_dict({"weight": torch.zeros(ROWS, DIM)})
    assert torch.equal(optimizer.state_dict()["state"][0]["state"], state)
    assert torch.equal(module.weight, torch.zeros(ROWS, DIM))


def test_a_hashed_table_becomes_what_is_loaded(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer, optimizer=frugal.Adagrad(lr=0.1))
    optimizer = ft.Optimizer(module)
    module(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    keys = torch.tensor([3, -4])
    rows = torch.randn(2, DIM)
    module.load_state_dict({"weight": rows, "keys": keys})
    saved, state = module.state_dict(), optimizer.state_dict()["state"][0]
    order = saved["keys"].argsort(descending=True)
    assert torch.equal(saved["keys"][order], keys) and torch.equal(saved["weight"][order], rows)
    order = state["keys"].argsort(descending=True)
    assert torch.equal(state["state"][order], torch.stack([torch.ones(DIM), torch.zeros(DIM)]))


def test_a_model_s_state_dict_has_its_tables(trainer: frugal.Trainer) -> None:
    def model() -> Any:
        return torch.nn.ModuleDict(
            {
                "bag": ft.EmbeddingBag(ROWS, DIM, trainer=trainer),
                "all": ft.EmbeddingBagCollection([ft.TableConfig("t", 20, 4, ["x"])], trainer=trainer),
                "head": torch.nn.Linear(2, 2),
            }
        )

    ours = model()
    assert list(ours.state_dict()) == ["bag.weight", "all.embedding_bags.t.weight", "head.weight", "head.bias"]
    ours.load_state_dict(through_a_file(ours.state_dict()))
    partly = ours.state_dict()
    del partly["bag.weight"]
    partly["all.embedding_bags.u.weight"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="(?s)Missing key.*bag.weight.*Unexpected key|Unexpected key.*Missing key"):
        ours.load_state_dict(partly)
    ours.load_state_dict(partly, strict=False)


def test_what_does_not_fit_is_said(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=frugal.Adagrad(lr=0.1))
    other = ft.Embedding(ROWS, DIM, trainer=trainer, name="other")
    with pytest.raises(RuntimeError, match="60 rows, the saved one 7"):
        module.load_state_dict({"weight": torch.zeros(7, DIM)})
    with pytest.raises(RuntimeError, match="weight has shape"):
        module.load_state_dict({"weight": torch.zeros(ROWS, DIM + 1)})
    with pytest.raises(RuntimeError, match="a hashed table's"):
        module.load_state_dict({"weight": torch.zeros(ROWS, DIM), "keys": torch.zeros(ROWS)})
    saved = ft.Optimizer(other).state_dict()
    optimizer = ft.Optimizer(module)
    with pytest.raises(ValueError, match="the saved tables are"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["name"] = module.table.name
    with pytest.raises(ValueError, match="floats of optimizer state"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("at", [0, 3])
def test_a_running_engine_goes_back(engine: frugal.Engine, trainer: frugal.Trainer, kind: str, at: int) -> None:
    """Rows, state and the count of steps, which Adam corrects its bias by; the engine's own steps go on."""
    module = ft.EmbeddingBag(ROWS, DIM, trainer=trainer, optimizer=CONFIGS[kind])
    optimizer = ft.Optimizer(module)
    train(module, optimizer, at, seed=0)
    saved = through_a_file({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    assert saved["optimizer"]["step"] == at
    train(module, optimizer, 4, seed=1)
    expected = state_of(module, optimizer)
    for times in range(1, 3):
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.state_dict()["step"] == at
        train(module, optimizer, 4, seed=1)
        assert engine.committed_step() == at + 4 * (times + 1) - 1
        assert optimizer.state_dict()["step"] == at + 4
        got = state_of(module, optimizer)
        for name in got:
            assert torch.equal(got[name], expected[name]), name


def test_a_scheduler_s_state_goes_along(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), optimizer=sgd())
    optimizers = [ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)]
    rates = []
    for optimizer in optimizers:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        saved = through_a_file([optimizer.state_dict(), scheduler.state_dict()])
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(rates[1]) and rates[0] < 0.01


def test_a_hashed_table_s_state_wants_its_rows() -> None:
    saved: Any = None
    for _ in range(2):
        with frugal.Engine() as engine, engine.create_trainer() as trainer:
            module = ft.EmbeddingBag(ROWS, DIM, hashed=True, trainer=trainer, optimizer=frugal.Adagrad(lr=0.1))
            optimizer = ft.Optimizer(module)
            if saved is None:
                train(module, optimizer, 3, seed=1)
                saved = module.state_dict(), optimizer.state_dict()
                continue
            with pytest.raises(ValueError, match="load the model's state first"):
                optimizer.load_state_dict(saved[1])
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            assert optimizer.state_dict()["step"] == 3


def test_what_is_no_tensor_or_negated_is_said_or_made_good(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, trainer=trainer)
    with pytest.raises(RuntimeError, match="must be a torch.Tensor, not list"):
        module.load_state_dict({"weight": [1]})
    ones = torch.complex(torch.ones(ROWS, DIM), torch.ones(ROWS, DIM)).conj().imag
    assert ones.is_neg()
    module.load_state_dict({"weight": ones})
    assert torch.equal(module.weight, -torch.ones(ROWS, DIM))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_loading_with_assign_takes_the_dtype(trainer: frugal.Trainer, dtype: torch.dtype) -> None:
    saved = {"weight": integers(ROWS, DIM).to(dtype)}
    keys = torch.tensor([[1, 2], [3, 3]])
    for module in bag_pair(trainer, integers(ROWS, DIM), mode="sum"):
        module(keys).sum().backward()
        module.load_state_dict(saved, assign=True)
        (parameter,) = module.parameters()
        assert parameter.grad is None and parameter.dtype == dtype and parameter.requires_grad
        out = module(keys)
        assert out.dtype == dtype and torch.equal(out, saved["weight"][keys].sum(1))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not in this build")
def test_a_checkpoint_is_written_while_training_goes_on(trainer: frugal.Trainer, tmp_path: Path) -> None:
    checkpoint: Any = pytest.importorskip("torch.distributed.checkpoint")

    def make() -> Tuple[Any, torch.optim.Optimizer]:
        model = torch.nn.Sequential(ft.Embedding(ROWS, DIM, trainer=trainer), torch.nn.Linear(DIM, 1))
        return model, torch.optim.Adagrad(model.parameters(), lr=0.5)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.arange(5)).sum().backward()
        optimizer.step()

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, optimizer = make()
        train()
        rows, sums = snapshot(model[0]), optimizer.state_dict()["state"][0]["sum"]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saving = checkpoint.async_save(state, checkpoint_id=tmp_path / "saved")
        train()
        saving.result()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        again, fresh = make()
        again.load_state_dict(state["model"])
        fresh.load_state_dict(state["optimizer"])
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(snapshot(again[0]), rows)
    assert torch.equal(fresh.state_dict()["state"][0]["sum"], sums)
