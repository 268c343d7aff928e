"""frugal.torch.Checkpoints: a run that was interrupted goes on, bit for bit as the one that was not."""

from __future__ import annotations

import atexit
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import numpy
import pytest
import torch
from torch_support import DIM, ROWS

import forked
import frugal
import frugal.torch as ft
from frugal.torch import _default, _ranks, _state, _steps

STEPS, SAVED = 7, 3


class Model(torch.nn.Module):
    """Each kind of module, a decoder that is tied to a table, and what is in no table: weights, buffers, dropout."""

    def __init__(self, trainer: frugal.Trainer, optimizer: Optional[frugal.Optimizer] = None) -> None:
        super().__init__()
        self.words = ft.Embedding(ROWS, DIM, padding_idx=0, trainer=trainer, optimizer=optimizer)
        torch.nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=optimizer)
        self.many = ft.EmbeddingBagCollection(
            [ft.TableConfig("users", 1000, 4, ["u"], hashed=True, optimizer=optimizer),
             ft.TableConfig("items", ROWS, 4, ["i", "j"], padding_idx=1, optimizer=optimizer)],
            trainer=trainer,
        )  # fmt: skip
        self.old = ft.convert(torch.nn.Sequential(torch.nn.Embedding(ROWS, 3)), trainer=trainer)
        self.middle = torch.nn.Sequential(torch.nn.BatchNorm1d(2 * DIM + 15), torch.nn.Dropout(0.3))
        self.dense = torch.nn.Linear(2 * DIM + 15, DIM)
        self.decoder = torch.nn.Linear(DIM, ROWS, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        many = self.many({"u": keys * 12345678901, "i": keys, "j": keys + 1})
        parts = [self.words(keys[:, 0]), self.bags(keys), many, self.old(keys[:, 1])]
        return self.decoder(self.dense(self.middle(torch.cat(parts, 1))))  # type: ignore[no-any-return]


Make = Callable[[Model], List[Any]]

KINDS: Dict[str, Make] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    "adagrad": lambda model: [
        torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5)
    ],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=0.1)],
    "adamw": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)],
    "rmsprop": lambda model: [torch.optim.RMSprop(model.parameters(), lr=0.1)],
    "sparse adam": lambda model: [
        torch.optim.SparseAdam(tables(model), lr=0.1), torch.optim.Adam(dense(model), lr=0.1)
    ],
    "frugal": lambda model: [ft.Optimizer(model), torch.optim.SGD(dense(model), lr=0.1, momentum=0.5)],
}  # fmt: skip
OURS: Dict[str, frugal.Optimizer] = {"frugal": frugal.Adam(lr=0.1)}  # whose step numbers are the optimizer's


def tables(model: torch.nn.Module) -> List[Any]:
    return [p for p in model.parameters() if isinstance(p, ft._anchor.Anchor)]


def dense(model: torch.nn.Module) -> List[Any]:
    return [p for p in model.parameters() if not isinstance(p, ft._anchor.Anchor)]


class Run:
    """A program: made as ever, it goes on where it was."""

    def __init__(self, kind: str, folder: Optional[Path], seed: int = 1, restore: Union[int, str, None] = None) -> None:
        torch.manual_seed(seed)
        self.engine = frugal.Engine(seed=1)
        self.checkpoints = None if folder is None else ft.Checkpoints(folder, restore=restore, engine=self.engine)
        self.model = Model(self.engine.create_trainer(), OURS.get(kind))
        self.parts = KINDS[kind](self.model)
        self.parts.append(torch.optim.lr_scheduler.MultiStepLR(self.parts[0], [2, 4, 5], gamma=0.5))
        self.first = 0
        if self.checkpoints is not None:
            extra = self.checkpoints.load(self.model, *self.parts)
            self.first = 0 if extra is None else extra["i"]

    def step(self, i: int) -> float:
        keys = torch.randint(1, ROWS - 1, (6, 3), generator=torch.Generator().manual_seed(i))
        loss = torch.nn.functional.cross_entropy(self.model(keys), keys[:, 2])
        torch.autograd.backward(loss)
        *optimizers, scheduler = self.parts
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scheduler.step()
        return loss.item()

    def save(self, i: int) -> frugal.Checkpoint:
        assert self.checkpoints is not None
        return self.checkpoints.save(self.model, *self.parts, extra={"i": i})

    def state(self) -> Any:
        return through_a_file([self.model.state_dict(), *[part.state_dict() for part in self.parts]])


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def by_key(state: Any) -> Any:
    """Hashed rows in the order of their keys."""
    model = state[0]
    keys = model["many.embedding_bags.users.keys"]
    order = keys.argsort()
    model["many.embedding_bags.users.keys"] = keys[order]
    model["many.embedding_bags.users.weight"] = model["many.embedding_bags.users.weight"][order]
    for part in state[1:]:
        for entry in part.get("state", {}).values():
            for name in ("frugal_keys", "keys"):
                if isinstance(entry, dict) and name in entry:
                    entry[name] = entry[name].view(torch.int64)
                    at = entry[name].flatten().argsort()
                    entry[name] = entry[name].flatten()[at]
                    rows = "frugal_state" if name == "frugal_keys" else "state"
                    entry[rows] = entry[rows][at]
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.filterwarnings("ignore:.*a frugal table's row changes")
@pytest.mark.parametrize("kind", list(KINDS))
def test_goes_on_bit_for_bit(kind: str, folder: Path) -> None:
    whole = Run(kind, None)
    losses = [whole.step(i) for i in range(STEPS)]
    first = Run(kind, folder)
    assert first.checkpoints is not None and first.checkpoints.restored is None and first.first == 0
    assert [first.step(i) for i in range(SAVED)] == losses[:SAVED]
    ticket = first.save(SAVED)
    assert [first.step(i) for i in range(SAVED, SAVED + 2)] == losses[SAVED : SAVED + 2]  # while it is written
    assert ticket.wait().blobs == 1
    first.engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = Run(kind, folder, seed=99)
    assert again.first == SAVED and again.model.words.table.name == first.model.words.table.name
    assert [again.step(i) for i in range(SAVED, STEPS)] == losses[SAVED:]
    got, expected = by_key(again.state()), by_key(whole.state())
    for one, other in zip(got, expected):
        assert same(one, other)
    again.save(STEPS).wait()
    for run in (whole, again):
        run.engine.close()


def test_no_row_is_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("adam", folder)
    run.step(0)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("rows are read")

    with monkeypatch.context() as patch:
        patch.setattr(_steps.Table, "get", refuse)
        patch.setattr(_state, "keys", refuse)
        run.save(1).wait()
    run.engine.close()
    assert len(frugal.read_blob(folder)) < 60_000
    again = Run("adam", folder)
    with monkeypatch.context() as patch:
        patch.setattr(_steps.Table, "get", refuse)
        again.save(1).wait()
    again.engine.close()


def plain(folder: Path, make: Callable[[frugal.Trainer], Any], kind: Any = torch.optim.Adam) -> Tuple[Any, Any, Any]:
    engine = frugal.Engine(seed=1)
    checkpoints = ft.Checkpoints(folder, engine=engine)
    model = make(engine.create_trainer())
    optimizer = kind(model.parameters(), lr=0.1)
    return checkpoints, model, optimizer


def bags(*names: str, rows: int = 8) -> Callable[[frugal.Trainer], torch.nn.Module]:
    def make(trainer: frugal.Trainer) -> torch.nn.Module:
        layers = {name: ft.EmbeddingBag(rows, 2, trainer=trainer, name=name) for name in names}
        return torch.nn.ModuleDict({**layers, "dense": torch.nn.Linear(2, 1)})

    return make


def train(model: Any, optimizer: Any) -> None:
    for name, layer in model.items():
        if name != "dense":
            model["dense"](layer(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def saved(folder: Path) -> Path:
    checkpoints, model, optimizer = plain(folder, bags("a", "b"))
    train(model, optimizer)
    checkpoints.save(model, optimizer)
    checkpoints.wait()
    checkpoints._engine.close()
    return folder


def test_what_is_missing_is_named(saved: Path) -> None:
    def load(make: Callable[[frugal.Trainer], Any], kind: Any = torch.optim.Adam) -> None:
        checkpoints, model, optimizer = plain(saved, make, kind)
        try:
            checkpoints.load(model, optimizer)
        finally:
            checkpoints._engine.close()

    with pytest.raises(ValueError, match=r"Missing: \[\"b.weight \(table 'b'\)\"\]. Others: \[\]"):
        load(bags("a"))
    with pytest.raises(ValueError, match=r"state of \['Adam'\], and load\(\) was given \['SGD'\]"):
        load(bags("a", "b"), torch.optim.SGD)
    with pytest.raises(ValueError, match="the checkpoint has it, not with rows=9"):
        load(bags("a", "b", rows=9))
    with pytest.raises(ValueError, match="with the optimizer SGD, and this one has Adagrad"):
        load(lambda trainer: ft.EmbeddingBag(8, 2, trainer=trainer, name="a", optimizer=frugal.Adagrad()))

    def deeper(trainer: frugal.Trainer) -> Any:
        model: Any = bags("a", "b")(trainer)
        model["more"] = torch.nn.BatchNorm1d(1, affine=False)
        del model["dense"].bias
        model["dense"].register_parameter("other", torch.nn.Parameter(torch.zeros(1)))
        return model

    with pytest.raises(RuntimeError, match=r"lacks \['dense.other', 'more.running_mean'.*besides \['dense.bias'\]"):
        load(deeper)

    def swapped(trainer: frugal.Trainer) -> Any:
        model: Any = bags("a", "b")(trainer)
        model["a"], model["b"] = model["b"], model["a"]
        return model

    with pytest.raises(ValueError, match=r"a.weight \(table 'b', saved of 'a'\)"):
        load(swapped)
    with pytest.warns(UserWarning, match=r"the checkpoint lacks the tables \['c'\]"):
        load(bags("a", "b", "c"))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_new_table_begins_and_the_others_go_on(folder: Path, kind: Any) -> None:
    checkpoints, model, optimizer = plain(folder, bags("a", "b"), kind)
    train(model, optimizer)
    step = optimizer.state[model["a"].weight]["step"]
    checkpoints.save(model, optimizer).wait()
    checkpoints._engine.close()
    checkpoints, model, optimizer = plain(folder, bags("c", "a", "b"), kind)
    with pytest.warns(UserWarning, match="lacks"):
        checkpoints.load(model, optimizer)
    states = [optimizer.state[model[name].weight] for name in "abc"]
    assert same(states[0]["step"], step) and type(states[0]["step"]) is type(step)
    assert [int(state.get("step", 0)) for state in states] == [1, 1, 0]
    assert ("sum" in states[2]) == (kind is torch.optim.Adagrad)  # which makes it before the first step
    train(model, optimizer)
    assert [int(optimizer.state[model[name].weight]["step"]) for name in "abc"] == [2, 2, 1]
    checkpoints._engine.close()


def test_an_optimizer_that_went_back_counts_its_own_steps(folder: Path) -> None:
    def world() -> Tuple[Any, Any, Any]:
        checkpoints, model, _ = plain(
            folder, lambda trainer: ft.EmbeddingBag(8, 2, trainer=trainer, name="a", optimizer=frugal.Adam())
        )
        optimizer = ft.Optimizer(model)
        checkpoints.load(model, optimizer)
        return checkpoints, model, optimizer

    def goes_on(model: Any, optimizer: Any) -> torch.Tensor:
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        rows: torch.Tensor = model.weight.detach().clone()
        return rows

    checkpoints, model, optimizer = world()
    before = optimizer.state_dict()
    for _ in range(3):
        goes_on(model, optimizer)
    optimizer.load_state_dict(before)
    goes_on(model, optimizer)
    checkpoints.save(model, optimizer).wait()
    expected = goes_on(model, optimizer)
    checkpoints._engine.close()
    checkpoints, model, optimizer = world()
    assert optimizer.state_dict()["step"] == 1
    assert torch.equal(goes_on(model, optimizer), expected)
    checkpoints._engine.close()


def test_before_load_nothing_trains_and_nothing_is_written(saved: Path) -> None:
    checkpoints, model, optimizer = plain(saved, bags("a", "b"))
    rows = model["a"].weight.detach().clone()
    torch.nn.init.zeros_(model["a"].weight)
    with torch.no_grad():
        model["a"].weight[3] = 1.0
    model.load_state_dict({**model.state_dict(), "a.weight": torch.ones(8, 2)})
    model["b"].weight = torch.nn.Parameter(torch.zeros(8, 2))
    assert torch.equal(model["a"].weight, rows) and rows.abs().sum() > 0 and model["b"].weight.abs().sum() > 0
    for made in (torch.optim.Adam(model.parameters()), ft.Optimizer(model["a"])):
        with pytest.raises(RuntimeError, match="call load"):
            train(model, made)
    del made
    with pytest.raises(RuntimeError, match=r"call load\(\) before save"):
        checkpoints.save(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    assert checkpoints.load(model, optimizer) is None
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(RuntimeError, match="loaded already"):
        checkpoints.load(model, optimizer)
    model["a"].weight.data.zero_()
    assert model["a"].weight.abs().sum() == 0
    checkpoints._engine.close()


def test_a_weight_of_torch_takes_its_place_as_before(folder: Path) -> None:
    def make(trainer: frugal.Trainer) -> torch.nn.Module:
        model = torch.nn.ModuleDict({"a": ft.Embedding(4, 2, trainer=trainer), "dense": torch.nn.Linear(2, 1)})
        model["a"].weight = torch.nn.Parameter(torch.ones(4, 2))
        return model

    checkpoints, model, optimizer = plain(folder, make)
    train(model, optimizer)
    checkpoints.save(model, optimizer).wait()
    expected = model["a"].weight.detach().clone()
    checkpoints._engine.close()
    checkpoints, model, optimizer = plain(folder, make)
    checkpoints.load(model, optimizer)
    assert torch.equal(model["a"].weight, expected) and not torch.equal(expected, torch.ones(4, 2))
    checkpoints._engine.close()


def test_states_that_no_table_has_are_saved_as_they_are(folder: Path) -> None:
    """Loaded and not taken in, new, put aside, and a caller's own entry."""

    def world() -> Tuple[Any, Any, List[Any]]:
        checkpoints, model, adam = plain(folder, bags("a", "b"))
        adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)
        return checkpoints, model, [adam, adagrad]

    checkpoints, model, optimizers = world()
    train(model, optimizers[0])
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    optimizers[0].state[model["a"].weight]["mine"] = 5
    checkpoints.save(model, *optimizers).wait()
    expected = through_a_file([optimizer.state_dict() for optimizer in optimizers])
    checkpoints._engine.close()

    checkpoints, model, optimizers = world()
    checkpoints.load(model, *optimizers)
    assert same(through_a_file([optimizer.state_dict() for optimizer in optimizers]), expected)
    assert torch.equal(optimizers[1].state[model["a"].weight]["sum"], torch.full((8, 2), 0.25))
    train(model, optimizers[1])
    train(model, optimizers[0])  # puts Adagrad's aside
    checkpoints.save(model, *optimizers).wait()
    for optimizer in optimizers:
        train(model, optimizer)
    expected = through_a_file([model.state_dict(), *[optimizer.state_dict() for optimizer in optimizers]])
    checkpoints._engine.close()

    checkpoints, model, optimizers = world()
    checkpoints.load(model, *optimizers)
    for optimizer in optimizers:
        train(model, optimizer)
    assert same(through_a_file([model.state_dict(), *[optimizer.state_dict() for optimizer in optimizers]]), expected)
    checkpoints._engine.close()


def test_lookahead_goes_on_over_a_checkpoint(folder: Path) -> None:
    batches = [torch.randint(0, 8, (4, 2), generator=torch.Generator().manual_seed(i)) for i in range(8)]

    def run(until: int, save_at: int) -> torch.Tensor:
        torch.manual_seed(3)
        checkpoints, model, optimizer = plain(folder, bags("a"))
        begin = checkpoints.load(model, optimizer) or 0
        ahead = ft.Lookahead(batches[begin:until], lambda batch: {model["a"]: batch}, measure=False)
        for i, batch in enumerate(ahead, begin):
            model["dense"](model["a"](batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i + 1 == save_at:
                ticket = checkpoints.save(model, optimizer, extra=i + 1)
        if save_at:
            ticket.wait()
        rows: torch.Tensor = model["a"].weight.detach().clone()
        checkpoints._engine.close()
        return rows

    run(6, 4)
    resumed = run(8, 0)
    folder = folder.with_name("other")
    assert torch.equal(resumed, run(8, 0))


def test_a_checkpoint_that_is_being_written_is_waited_for(folder: Path) -> None:
    checkpoints, model, optimizer = plain(folder, bags("a"))
    checkpoints.load(model, optimizer)
    tickets = []
    for i in range(4):
        train(model, optimizer)
        tickets.append(checkpoints.save(model, optimizer, extra=i))
    assert [ticket.number for ticket in tickets] == [1, 2, 3, 4] and all(ticket.done() for ticket in tickets[:3])
    info = checkpoints.wait()
    assert info.step == 3 and [found.number for found in frugal.checkpoints(folder)] == [3, 4]
    train(model, optimizer)
    later = checkpoints._engine.checkpoint(step=5)  # by another, and it fails
    checkpoints._ticket = later
    later.cancel()
    with pytest.warns(UserWarning, match="has failed"):
        checkpoints.save(model, optimizer).wait()
    checkpoints._engine.close()


def test_the_exit_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: List[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    checkpoints, model, optimizer = plain(folder, bags("a"))
    checkpoints._own = True  # as if the process's own engine, which closes at exit
    checkpoints.load(model, optimizer)
    train(model, optimizer)
    ticket = checkpoints.save(model, optimizer)
    (call,) = at_exit
    call()
    checkpoints._engine.close()
    assert [found.number for found in frugal.checkpoints(folder)] == [ticket.number]
    call()  # of an engine that is closed


def test_only_plain_types_are_saved(folder: Path) -> None:
    checkpoints, model, optimizer = plain(folder, bags("a"))
    checkpoints.load(model, optimizer)
    train(model, optimizer)
    extra: Any
    for extra, where in (
        ({"x": [1, numpy.zeros(2)]}, r"extra\['x'\]\[1\] is a numpy.ndarray"),
        ({folder: 1}, r"a key of extra is a pathlib"),
    ):
        with pytest.raises(TypeError, match=where):
            checkpoints.save(model, optimizer, extra=extra)
    loop: List[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        checkpoints.save(model, optimizer, extra=loop)
    with pytest.raises(TypeError, match="has no state_dict"):
        checkpoints.save(model, 3)
    with pytest.raises(TypeError, match="ModuleList"):
        checkpoints.save(optimizer)
    extra = {"i": 3, "t": (torch.arange(3), b"x", 1.5, None, {"s"}), 4: torch.float16}
    checkpoints.save(model, optimizer, extra=extra).wait()
    checkpoints._engine.close()
    checkpoints, model, optimizer = plain(folder, bags("a"))
    assert same(checkpoints.load(model, optimizer), extra)
    checkpoints._engine.close()


def test_who_cannot_have_checkpoints_is_told_before_anything_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: frugal.Engine
) -> None:
    with frugal.Engine(world_size=2) as two:
        with pytest.raises(frugal.Unsupported, match=r"2 ranks.*torch.save\(\)"):
            ft.Checkpoints(folder, engine=two)
    with monkeypatch.context() as patch:
        patch.setenv("FRUGAL_SERVICE", "/nowhere")
        with pytest.raises(frugal.Unsupported, match="controller at /nowhere"):
            ft.Checkpoints(folder)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        with pytest.raises(frugal.Unsupported, match="3 ranks"):
            ft.Checkpoints(folder)
    with monkeypatch.context() as patch:
        patch.setattr(_ranks, "_group", lambda: (0, 4))
        with pytest.raises(frugal.Unsupported, match="4 ranks"):
            ft.Checkpoints(folder)
    assert not folder.exists()
    trainer = engine.create_trainer()
    with pytest.raises(RuntimeError, match="before them"):
        ft.Checkpoints(folder, engine=engine)
    monkeypatch.setattr(_default, "_trainer", trainer)
    with pytest.raises(RuntimeError, match="before the first module"):
        ft.Checkpoints(folder)
    assert not folder.exists()
    with frugal.Engine(seed=1) as other:
        checkpoints = ft.Checkpoints(folder, engine=other)
        model = ft.Embedding(4, 2, trainer=trainer, name="elsewhere")
        for call in (checkpoints.load, checkpoints.save):
            with pytest.raises(ValueError, match="table 'elsewhere' is in another engine"):
                call(model)


def test_checkpoints_of_others_are_refused(folder: Path) -> None:
    for blob in (None, b"theirs"):
        with frugal.Engine() as engine:
            engine.open_folder(folder)
            engine.checkpoint(blob=blob).wait()
        with frugal.Engine() as engine:
            with pytest.raises(ValueError, match="was not written by frugal.torch.Checkpoints"):
                ft.Checkpoints(folder, engine=engine)
    file = io.BytesIO()
    file.write(b"frugal.torch\n")
    torch.save({"version": 1000}, file)
    with frugal.Engine() as engine:
        engine.open_folder(folder)
        engine.checkpoint(blob=file.getvalue()).wait()
    with frugal.Engine() as engine:
        with pytest.raises(frugal.TooNew, match="version 1000"):
            ft.Checkpoints(folder, engine=engine)


# Without `folder` it is not interrupted; with `kill` it kills itself after so many steps.
PROGRAM = """
import os, signal, sys
import torch
import frugal.torch
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[3]))
folder, kill = sys.argv[1], int(sys.argv[2])
checkpoints = frugal.torch.Checkpoints(folder) if folder else None
model = torch.nn.ModuleList([frugal.torch.EmbeddingBag(50, 4, mode="sum"), torch.nn.Linear(4, 1)])
hashed = frugal.torch.Embedding(500, 1, hashed=True)
model.append(hashed)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
extra = checkpoints.load(model, optimizer) if checkpoints else None
begin = extra["i"] if extra else 0
torch.manual_seed(5) if begin == 0 else None
for i in range(begin, 40):
    keys = torch.randint(0, 50, (8, 3))
    out = model[1](torch.dropout(model[0](keys), 0.5, True)) + hashed(keys[:, 0] * 7 + i % 3)
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if checkpoints and i % 10 == 9:
        ticket = checkpoints.save(model, optimizer, extra={"i": i + 1})
        if i == 19:
            ticket.wait()
    if i + 1 == kill:
        os.kill(os.getpid(), signal.SIGKILL)
weights = [model[0].weight.detach().clone(), *model[1].parameters()]
state = model.state_dict()
order = state["2.keys"].argsort()
moments = optimizer.state_dict()["state"]
values = [w.tolist() for w in weights], state["2.weight"][order].tolist(), moments[0], moments[1]
with open(sys.argv[4], "w") as out:
    print(begin, *values, sep=chr(10), file=out)
"""


def test_a_killed_process_goes_on(folder: Path, tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)

    def run(where: str, kill: int, seed: int) -> str:
        arguments = [str(program), where, str(kill), str(seed), str(out)]
        assert forked.run(arguments, [dict(os.environ)]) == [-9 if kill else 0]
        return "" if kill else out.read_text()

    _, whole = run("", 0, 1).split("\n", 1)
    run(str(folder), 27, 1)
    begin, again = run(str(folder), 0, 2).split("\n", 1)  # the tables go on with the first one's seed
    assert begin == "20" and again == whole
    (_, last) = frugal.checkpoints(folder)
    assert last.step == 39  # for which the exit has waited


def test_the_guide_s_recipe_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "torch.md"
    _, recipe = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    ended: List[Dict[str, Any]] = []
    for _ in range(2):  # as two processes, each with an engine of its own
        monkeypatch.setattr(_default, "_engine", None)
        monkeypatch.setattr(_default, "_trainer", None)
        names: Dict[str, Any] = {}
        exec(recipe, names)
        names["checkpoints"].wait()
        assert _default._engine is not None
        _default._close(_default._engine, _default._trainer, os.getpid())
        ended.append(names)
    first, second = ended
    assert first["begin"] == 0 and second["begin"] == 200 and first["loss"].item() == second["loss"].item()


def test_one_with_a_name_is_kept_and_restored(folder: Path) -> None:
    run = Run("adagrad", folder)
    states: Dict[int, Any] = {}
    for i in range(1, 6):
        run.step(i)
        assert run.checkpoints is not None
        run.checkpoints.save(run.model, *run.parts, extra={"i": i}, name="good" if i == 2 else None).wait()
        states[i] = run.state()
    run.engine.close()
    infos = frugal.checkpoints(folder)
    assert [info.name for info in infos] == ["good", "", ""]
    for wanted, i in ((None, 5), ("good", 2), (infos[0].number, 2), (infos[1].number, 4)):
        again = Run("adagrad", folder, restore=wanted)
        assert again.first == i
        for one, other in zip(by_key(again.state()), by_key(states[i])):
            assert same(one, other)
        again.engine.close()
    for missing in ("bad", 99):
        with pytest.raises(frugal.NotFound, match=r"has no checkpoint .*: it has 2 \(good\), 4, 5"):
            ft.Checkpoints(folder, restore=missing, engine=frugal.Engine(seed=1))
    with pytest.raises(frugal.NotFound, match="it has none"):
        ft.Checkpoints(folder / "nothing", restore="good", engine=frugal.Engine(seed=1))
