"""Lookahead: what is declared, when, and that nothing stays declared."""

from __future__ import annotations

import gc
import itertools
from typing import Any, Dict, Iterator, List

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torch_support import DIM, ROWS, committed, sgd, undeclared

import frugal
import frugal.torch as ft
from frugal.torch import _lookahead

SAMPLES, BATCH = 96, 8


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops declare all of their batches, but where a test says otherwise."""
    monkeypatch.setattr(_lookahead._Trial, "TURNS", 0)


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i % ROWS, (i * 7) % ROWS])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, SAMPLES, step):
            yield torch.tensor([i % ROWS, (i * 7) % ROWS])


class World:
    def __init__(self, engine: frugal.Engine, trainer: frugal.Trainer) -> None:
        self.engine, self.trainer = engine, trainer
        self.bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=sgd(0.01))
        self.optimizer = ft.Optimizer(self.bags)
        self.declared: List[torch.Tensor] = []  # all batches that ever were

    def keys(self, batch: torch.Tensor) -> Any:
        self.declared.append(batch)
        return {self.bags: batch}

    def lookahead(self, loader: Any, **arguments: Any) -> ft.Lookahead[Any]:
        return ft.Lookahead(loader, self.keys, trainer=self.trainer, **arguments)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.bags(batch).sum().backward()
        self.optimizer.step()

    def nothing_is_declared(self) -> bool:
        """The engine finds what is declared for a step by its keys: tries all that ever was declared in the next
        steps."""
        assert self.declared
        before, keys = undeclared(self.engine), 0
        for _ in range(self.engine.lookahead + 1):
            for batch in self.declared:
                self.bags(batch)
                keys += batch.numel()
            self.optimizer.step()
        return undeclared(self.engine) - before == keys


@pytest.fixture
def world(engine: frugal.Engine, trainer: frugal.Trainer) -> World:
    return World(engine, trainer)


def loaders(workers: int) -> Dict[str, Any]:
    more: Dict[str, Any] = {"num_workers": workers, "timeout": 120 if workers else 0}
    if workers:
        more["multiprocessing_context"] = "fork"
    samples = Samples()
    sampler: Any = DistributedSampler(samples, num_replicas=2, rank=1, seed=4)
    return {
        "plain": DataLoader(samples, BATCH, **more),
        "shuffle": DataLoader(samples, BATCH, shuffle=True, **more),
        "batch_sampler": DataLoader(samples, batch_sampler=BatchSampler(RandomSampler(samples), BATCH, True), **more),
        "iterable": DataLoader(Stream(), BATCH, **more),
        "distributed": DataLoader(samples, BATCH, sampler=sampler, **more),
        "persistent": DataLoader(samples, BATCH, shuffle=True, persistent_workers=workers > 0, **more),
    }


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "shuffle", "batch_sampler", "iterable", "distributed", "persistent"])
def test_no_key_is_undeclared(world: World, kind: str, workers: int) -> None:
    loader = loaders(workers)[kind]
    lookahead = world.lookahead(loader)
    steps = 0
    for epoch in range(2):
        if kind == "distributed":
            loader.sampler.set_epoch(epoch)
        seen: List[int] = []
        for batch in lookahead:
            seen += batch[:, 0].tolist()
            world.step(batch)
            steps += 1
        expected = SAMPLES // 2 if kind == "distributed" else SAMPLES
        assert len(seen) == expected
        if kind != "distributed":
            assert sorted(seen) == sorted(i % ROWS for i in range(SAMPLES))
    assert undeclared(world.engine) == 0 and committed(world.engine) == steps
    assert world.nothing_is_declared()


@pytest.mark.parametrize("depth", [0, 1, 4, 10])
def test_batches_are_declared_depth_steps_ahead(world: World, depth: int) -> None:
    batches = [torch.randint(0, ROWS, (4, 2)) for _ in range(20)]
    taken = []

    def load() -> Iterator[torch.Tensor]:
        for i, batch in enumerate(batches):
            taken.append(i)
            yield batch

    for i, batch in enumerate(world.lookahead(load(), depth=depth)):
        assert batch is batches[i]
        assert len(taken) == min(i + 1 + depth, len(batches))
        world.step(batch)
    assert undeclared(world.engine) == 0
    assert world.engine.stats()["keys_declared"] == 20 * 8


def test_keys_that_are_none_are_said_to_be_its_own(world: World) -> None:
    batches = [torch.tensor([[0, 1]]), torch.tensor([[ROWS - 1, 0]])]
    with pytest.raises(IndexError, match=f"Lookahead: what keys.*id {ROWS} "):
        for batch in ft.Lookahead(batches, lambda batch: {world.bags: batch + 1}, measure=False):
            world.step(batch)


def test_without_it_keys_are_undeclared(world: World) -> None:
    for batch in DataLoader(Samples(), BATCH):
        world.step(batch)
    assert undeclared(world.engine) == 2 * SAMPLES * 2  # by lookup and by push


def test_what_is_declared_is_seen(world: World) -> None:
    iteration = iter(world.lookahead(DataLoader(Samples(), BATCH)))
    world.step(next(iteration))
    assert not world.nothing_is_declared()


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_break_leaves_nothing_declared(world: World, when: str) -> None:
    for i, batch in enumerate(world.lookahead(DataLoader(Samples(), BATCH, num_workers=2))):
        if i == 3 and when == "before":
            break
        out = world.bags(batch)
        if i == 3 and when == "within":
            break
        out.sum().backward()
        world.optimizer.step()
        if i == 3:
            break
    if when == "within":
        world.optimizer.step()  # what was declared for the open step goes with it
    assert world.nothing_is_declared()


def test_an_exception_leaves_nothing_declared(world: World) -> None:
    kept = None
    try:
        for i, batch in enumerate(world.lookahead(DataLoader(Samples(), BATCH))):
            world.step(batch)
            if i == 2:
                raise ZeroDivisionError
    except ZeroDivisionError as error:
        kept = error
    assert kept is not None
    assert world.nothing_is_declared()


@pytest.mark.parametrize("where", ["loader", "keys", "module", "range"])
def test_exceptions_of_what_it_calls_come_through(world: World, where: str) -> None:
    def load() -> Iterator[torch.Tensor]:
        for i in range(20):
            if i == 6 and where == "loader":
                raise ZeroDivisionError
            yield torch.full((2, 2), ROWS if i == 6 and where == "range" else i)

    def keys(batch: torch.Tensor) -> Any:
        if batch[0, 0] == 6 and where == "keys":
            raise ZeroDivisionError
        if batch[0, 0] == 6 and where == "module":
            return {torch.nn.Linear(1, 1): batch}
        return {world.bags: batch} if batch[0, 0] == ROWS else world.keys(batch)

    expected = {"module": ValueError, "range": frugal.KeyOutOfRange}.get(where, ZeroDivisionError)
    steps = 0
    with pytest.raises(expected):
        for batch in ft.Lookahead(load(), keys, trainer=world.trainer, depth=4):
            world.step(batch)
            steps += 1
    assert steps == 2  # batch 6 is declared when batch 2 is given
    assert world.nothing_is_declared()


def test_a_second_epoch_takes_the_first_one_s_declarations_back(world: World) -> None:
    lookahead = world.lookahead(DataLoader(Samples(), BATCH))
    first = iter(lookahead)
    world.step(next(first))
    for batch in lookahead:
        world.step(batch)
    assert undeclared(world.engine) == 0
    rest = list(first)
    assert len(rest) == SAMPLES // BATCH - 1
    assert world.nothing_is_declared()
    third = iter(lookahead)
    next(third)
    lookahead.close()
    assert world.nothing_is_declared()
    fourth = iter(lookahead)
    next(fourth)
    del fourth
    gc.collect()
    assert world.nothing_is_declared()


def test_a_skipped_batch_moves_the_others(world: World) -> None:
    for i, batch in enumerate(world.lookahead(DataLoader(Samples(), BATCH))):
        if i % 3 == 1:
            continue
        world.step(batch)
    assert undeclared(world.engine) == 0
    assert world.nothing_is_declared()


def test_more_steps_than_batches_move_the_others(world: World) -> None:
    undeclared_keys = 0
    for i, batch in enumerate(world.lookahead(DataLoader(Samples(), BATCH))):
        world.step(batch)
        if i % 3 == 1:
            world.step(batch)  # which was not declared
            undeclared_keys += 2 * batch.numel()
    assert undeclared(world.engine) == undeclared_keys
    assert world.nothing_is_declared()


def hundred() -> List[torch.Tensor]:
    return [torch.full((2, 2), i % ROWS) for i in range(100)]


@pytest.mark.parametrize("depth", [0, 1, 10])
@pytest.mark.parametrize("loop", ["skips", "every second", "evaluates", "more steps", "never"])
def test_every_loop_gets_all_batches(world: World, depth: int, loop: str) -> None:
    seen = []
    for i, batch in enumerate(world.lookahead(hundred(), depth=depth)):
        seen.append(int(batch[0, 0]))
        if loop == "evaluates":
            with torch.no_grad():
                world.bags(batch)
            continue
        if loop == "skips" and i % 3 == 1:
            continue
        world.bags(batch).sum().backward()
        if loop != "never" and (loop != "every second" or i % 2):
            world.optimizer.step()
        if loop == "more steps" and i % 3 == 1:
            world.optimizer.step()
    if loop == "never":
        world.optimizer.step()
    assert seen == [i % ROWS for i in range(100)]
    if loop in ("skips", "more steps"):
        assert undeclared(world.engine) == 0
    assert world.nothing_is_declared()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_engine_without_lookahead(depth: int) -> None:
    with frugal.Engine(lookahead=depth) as engine, engine.create_trainer() as trainer:
        world = World(engine, trainer)
        seen = 0
        for i, batch in enumerate(world.lookahead(hundred())):
            seen += 1
            world.bags(batch).sum().backward()
            if i % 2:
                world.optimizer.step()
        assert seen == 100 and committed(engine) == 50
        for batch in world.lookahead(hundred(), batches_per_step=2):
            world.bags(batch).sum().backward()
            seen += 1
            if seen % 2 == 0:
                world.optimizer.step()
        assert seen == 200 and world.nothing_is_declared()


def test_a_second_lookahead_does_not_end_the_first(world: World) -> None:
    seen = 0
    for i, batch in enumerate(world.lookahead(hundred())):
        seen += 1
        world.step(batch)
        if i % 40 == 4:
            with torch.no_grad():
                for other in world.lookahead(hundred()[:3]):
                    world.bags(other)
    assert seen == 100 and undeclared(world.engine) == 0  # it declares again when the second is over
    both = zip(world.lookahead(hundred()), world.lookahead(hundred()))
    for first, second in both:
        seen += 1
        world.bags(first).sum().backward()
        world.bags(second).sum().backward()
        world.optimizer.step()
    assert seen == 200
    assert world.nothing_is_declared()


def test_states_may_be_loaded_before_the_first_batch(world: World) -> None:
    for batch in hundred()[:30]:
        world.step(batch)
    states = world.bags.state_dict(), world.optimizer.state_dict()
    with frugal.Engine(lookahead=10) as engine, engine.create_trainer() as trainer:
        other = World(engine, trainer)
        iteration = iter(other.lookahead(hundred()))
        other.bags.load_state_dict(states[0])
        other.optimizer.load_state_dict(states[1])
        for batch in iteration:
            other.step(batch)
        assert committed(engine) == 100
        assert undeclared(engine) == 0 and other.nothing_is_declared()


def test_the_trainer_is_that_of_the_first_batch_s_modules(world: World) -> None:
    lookahead = ft.Lookahead(hundred(), world.keys)
    for _ in range(2):
        for batch in lookahead:
            world.step(batch)
    assert undeclared(world.engine) == 0 and committed(world.engine) == 200
    assert lookahead.depth == 10
    assert list(ft.Lookahead([], world.keys)) == []
    assert world.nothing_is_declared()


def test_several_batches_of_a_step(world: World) -> None:
    for i, batch in enumerate(world.lookahead(DataLoader(Samples(), BATCH), batches_per_step=3)):
        world.bags(batch).sum().backward()
        if i % 3 == 2:
            world.optimizer.step()
    assert undeclared(world.engine) == 0 and committed(world.engine) == 4
    assert world.nothing_is_declared()


def test_evaluation_between_does_no_harm(world: World) -> None:
    for batch in world.lookahead(DataLoader(Samples(), BATCH)):
        world.step(batch)
        with torch.no_grad():
            world.bags(torch.arange(ROWS).view(-1, 2))
    assert undeclared(world.engine) == 0


def test_a_step_that_is_open_has_begun(world: World) -> None:
    world.bags(torch.zeros(1, 1, dtype=torch.int64))
    before = undeclared(world.engine)
    for batch in world.lookahead(DataLoader(Samples(), BATCH)):
        world.step(batch)
    assert undeclared(world.engine) - before == 2 * 2 * BATCH  # the first batch came into the open step


def test_collections_pairs_padding_and_int32(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    both = ft.EmbeddingBagCollection(
        [ft.TableConfig("a", 30, 4, ["x", "y"], padding_idx=0), ft.TableConfig("b", 40, 8, ["z"], hashed=True)],
        trainer=trainer,
    )
    single = ft.Embedding(50, 4, 3, trainer=trainer)
    optimizer = ft.Optimizer([both, single])

    def load() -> Iterator[Any]:
        for _ in range(15):
            z = torch.randint(0, 40, (7,))
            features = {
                "x": torch.randint(0, 30, (3, 2)),
                "y": torch.randint(0, 30, (3,)),
                "z": (z, torch.tensor([0, 2, 2, 7])),
            }
            yield features, torch.randint(0, 50, (2, 2), dtype=torch.int32), torch.randint(0, 50, (5,))

    def keys(batch: Any) -> Any:
        return [(both, batch[0]), (single, batch[1]), (single, batch[2])]

    for features, first, second in ft.Lookahead(load(), keys, trainer=trainer):
        (both(features).sum() + single(first).sum() + single(second).sum()).backward()
        optimizer.step()
    assert undeclared(engine) == 0
    packed = ft.EmbeddingBagCollection([ft.TableConfig("c", 30, 4, ["p", "q"])], trainer=trainer)
    optimizer = ft.Optimizer(packed)
    for batch in ft.Lookahead([torch.randint(0, 30, (2, 9)) for _ in range(5)], lambda b: {packed: b}, trainer=trainer):
        packed(batch).sum().backward()
        optimizer.step()
    assert undeclared(engine) == 0


def test_wrong_arguments_are_said(world: World) -> None:
    assert len(world.lookahead(DataLoader(Samples(), BATCH))) == SAMPLES // BATCH
    with pytest.raises(TypeError, match="no length"):
        len(world.lookahead(iter([])))
    with pytest.raises(ValueError, match="0..10"):
        world.lookahead([], depth=11)
    with pytest.raises(ValueError, match="batches_per_step"):
        world.lookahead([], batches_per_step=0)
    with pytest.raises(ValueError, match="at least 0"):
        world.lookahead([], depth=-1)
    with pytest.raises(TypeError, match="Trainer"):
        ft.Lookahead([], lambda batch: {}, trainer=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0..10"):
        next(iter(ft.Lookahead([torch.tensor([[1]])], world.keys, depth=11)))
    nothing: Dict[Any, Any] = {}
    with pytest.raises(ValueError, match="trainer="):
        next(iter(ft.Lookahead([1], lambda batch: nothing)))


def test_after_the_engine_is_closed_nothing_is_taken_back() -> None:
    engine = frugal.Engine()
    world = World(engine, engine.create_trainer())
    iteration = iter(world.lookahead(DataLoader(Samples(), BATCH)))
    next(iteration)
    engine.close()
    del iteration
    gc.collect()


class Clock:
    """A batch costs what the test says, with declarations and without."""

    def __init__(self, with_: float, without: float) -> None:
        self.now = 0.0
        self.costs = {True: with_, False: without}

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("without", [2.0, 1.05, 0.95, 0.5])
def test_it_measures_whether_it_pays(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, without: float) -> None:
    pays, turns = without > 1.0, 4 if 0.9 < without < 1.1 else 2
    clock = Clock(1.0, without)
    monkeypatch.setattr(_lookahead, "_clock", clock)
    monkeypatch.setattr(_lookahead._Trial, "TURNS", 4)
    monkeypatch.setattr(_lookahead._Trial, "SECONDS", 1000.0)
    engine, bag = trainer.engine, ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd(), init=frugal.Constant())
    tables = ft.Optimizer(bag)
    loader = [torch.randint(0, ROWS, (5,)) for _ in range(400)]
    declared, last, rows = [], 0, bag.weight.clone()
    asked = 0

    def inputs(keys: torch.Tensor) -> Dict[Any, torch.Tensor]:
        nonlocal asked
        asked += 1
        return {bag: keys}

    for keys in itertools.chain(ft.Lookahead(loader, inputs, depth=4), ft.Lookahead(loader[:50], inputs, depth=4)):
        now = engine.stats()["keys_declared"]
        declared.append(now > last)
        clock.now += clock.costs[now > last]
        last = now
        bag(keys).sum().backward()
        tables.step()
        rows.index_add_(0, keys, torch.ones(5, DIM), alpha=-0.5)
    turn = 4 + 2 + 32
    assert all(declared[8 : turn - 8]) and not any(declared[turn + 8 : 2 * turn - 8])
    if turns == 4:
        assert all(declared[2 * turn + 8 : 3 * turn - 8]) and not any(declared[3 * turn + 8 : 4 * turn - 8])
    found = declared[turns * turn + 8 : 392]
    assert found == [pays] * len(found)
    assert declared[408:442] == [pays] * 34  # another epoch does not begin with a trial
    assert (asked > 300) == pays  # and where it does not pay, no keys are requested
    assert torch.equal(bag.weight.clone(), rows)


def test_epochs_that_are_short_are_measured_together(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1.0, 0.5)
    monkeypatch.setattr(_lookahead, "_clock", clock)
    monkeypatch.setattr(_lookahead._Trial, "TURNS", 4)
    monkeypatch.setattr(_lookahead._Trial, "SECONDS", 8.0)
    engine, bag = trainer.engine, ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(bag)
    loader = [torch.randint(0, ROWS, (5,)) for _ in range(20)]
    batches = ft.Lookahead(loader, lambda keys: {bag: keys}, depth=4)
    declared = []
    for _ in range(8):
        before = last = engine.stats()["keys_declared"]
        for keys in batches:
            now = engine.stats()["keys_declared"]
            clock.now += clock.costs[now > last]
            last = now
            bag(keys).sum().backward()
            tables.step()
        declared.append(engine.stats()["keys_declared"] - before)
    assert declared[0] > 50 and not any(declared[5:])


@pytest.mark.parametrize("without", [2.0, 0.5])
@pytest.mark.parametrize("batches", [1, 5, 7])
def test_epochs_that_are_over_before_anything_is_left_to_time(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, batches: int, without: float
) -> None:
    clock = Clock(1.0, without)
    monkeypatch.setattr(_lookahead, "_clock", clock)
    monkeypatch.setattr(_lookahead._Trial, "TURNS", 4)
    monkeypatch.setattr(_lookahead._Trial, "SECONDS", 8.0)
    engine, bag = trainer.engine, ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(bag)
    loader = [torch.randint(0, ROWS, (5,)) for _ in range(batches)]
    ahead = ft.Lookahead(loader, lambda keys: {bag: keys}, depth=4)
    declared = []
    for _ in range(60):
        before = engine.stats()["keys_declared"]
        for keys in ahead:
            clock.now += clock.costs[engine.stats()["keys_declared"] > before]
            bag(keys).sum().backward()
            tables.step()
        declared.append(engine.stats()["keys_declared"] > before)
        clock.now += 100.0 * len(declared)  # what the loop does between epochs counts for nothing
    assert declared[0] and not all(declared)
    assert declared[-5:] == [without > 1.0] * 5


def test_it_does_not_measure_if_it_is_told_so(trainer: frugal.Trainer) -> None:
    engine, bag = trainer.engine, ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(bag)
    loader = [torch.randint(0, ROWS, (5,)) for _ in range(200)]
    for keys in ft.Lookahead(loader, lambda keys: {bag: keys}, measure=False):
        bag(keys).sum().backward()
        tables.step()
    assert engine.stats()["keys_declared"] == 1000


def test_keys_that_nobody_looks_up_are_warned_of_once(trainer: frugal.Trainer) -> None:
    bag = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(bag)
    loader = [torch.randint(0, ROWS // 2, (5,)) for _ in range(120)]
    with pytest.warns(UserWarning, match="were not declared") as told:
        for keys in ft.Lookahead(loader, lambda keys: {bag: keys + ROWS // 2}, measure=False):
            bag(keys).sum().backward()
            tables.step()
    assert len(told) == 1
    undeclared, _, used = str(told[0].message).split()[1:4]
    assert int(undeclared) <= int(used)


def test_right_keys_are_not_warned_of(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(_lookahead._Trial, "TURNS", 4)
    bag = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(bag)
    for keys in ft.Lookahead([torch.randint(0, ROWS, (5,)) for _ in range(300)], lambda keys: {bag: keys}):
        bag(keys).sum().backward()
        tables.step()
    assert not recwarn.list
