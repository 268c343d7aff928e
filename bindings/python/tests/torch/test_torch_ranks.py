"""Several ranks, and DistributedDataParallel."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.distributed as dist
from torch_support import DIM, ROWS, integers, sgd, snapshot

import frugal
import frugal.torch as ft
from frugal import _abi
from frugal.torch import _ranks, _steps


def run_ranks(world_size: int, work: Callable[[int], None]) -> None:
    failures: List[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: B036
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("whose", ["frugal", "torch"])
def test_ranks_average_as_distributed_data_parallel_does(mean: bool, whose: str) -> None:
    world_size, steps = 4, 6
    weight = integers(ROWS, DIM)
    batches = [[torch.randint(0, ROWS, (5, 2)) for _ in range(steps)] for _ in range(world_size)]
    grads = [[integers(5, DIM) for _ in range(steps)] for _ in range(world_size)]
    outs: List[List[torch.Tensor]] = [[] for _ in range(world_size)]
    made = threading.Barrier(world_size)
    with frugal.Engine(world_size=world_size, lookahead=3, timeout=60) as engine:

        def work(rank: int) -> None:
            trainer = engine.create_trainer(rank)
            bags = ft.EmbeddingBag(
                ROWS, DIM, mode="sum", _weight=weight, trainer=trainer, optimizer=sgd(0.5), mean_ranks=mean
            )
            optimizer: torch.optim.Optimizer = ft.Optimizer(bags)
            if whose == "torch":
                del optimizer
                optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
            made.wait(60)
            batched = list(zip(batches[rank], grads[rank]))
            for keys, grad in ft.Lookahead(batched, lambda batch: {bags: batch[0]}, trainer=trainer):
                optimizer.zero_grad()
                out = bags(keys)
                outs[rank].append(out.detach())
                out.backward(grad)
                optimizer.step()

        run_ranks(world_size, work)
        table = engine.find_table("embedding_bag_0")
        got = torch.from_numpy(table.get(torch.arange(ROWS)))
        assert engine.stats()["keys_undeclared"] == 0
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            out = torch.nn.functional.embedding_bag(batches[rank][step], parameter, mode="sum")
            assert torch.equal(out, outs[rank][step])
            out.backward(grads[rank][step] / (world_size if mean else 1))
        optimizer.step()
    assert torch.equal(got, parameter.detach())


def test_an_overflow_of_one_rank_skips_the_step_of_all() -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd()) for t in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        scalers: List[Any] = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        before = snapshot(bags[0])
        for factor, changes in ((float("inf"), False), (1.0, True)):
            for bag, scale in zip(bags, (1.0, factor)):
                (bag(torch.zeros(2, 2, dtype=torch.int64)) * scale).sum().backward()
            for scaler, optimizer in zip(scalers, optimizers):
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update(4.0)
                optimizer.zero_grad()
            assert torch.equal(bags[1].weight, before) is not changes
        assert engine.committed_step() == 1


def test_a_gradient_that_one_rank_has_refused_undoes_the_step_of_all() -> None:
    """Ranks stay in the same step: batches of different steps are never summed."""
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        weight = torch.zeros(ROWS, DIM)
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=t, mean_ranks=False) for t in trainers]
        optimizers = [torch.optim.SGD(bag.parameters(), lr=1.0) for bag in bags]
        told = [0, 0]
        for i in range(6):
            for rank in range(2):
                factor = float("nan") if (i, rank) == (2, 1) else 10.0**i
                optimizers[rank].zero_grad()
                try:
                    (bags[rank](torch.tensor([[1]])).sum() * factor).backward()
                    optimizers[rank].step()
                except frugal.NanGradient:
                    assert (i, rank) == (2, 1)
                except frugal.StepAborted:
                    told[rank] += 1
                    assert i == 3
                    (bags[rank](torch.tensor([[1]])).sum() * factor).backward()
                    optimizers[rank].step()
        assert told == [1, 0]
        expected = -2.0 * (1.0 + 10.0 + 1e3 + 1e4 + 1e5)
        assert bags[0].weight[1, 0] == expected


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_torch_s_optimizer_skips_the_step_of_all(fused: bool) -> None:
    """One that calls step() all the same, as the fused do, skips for ranks that found nothing; one that does not is for
    ranks that find the same."""
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t) for t in trainers]
        optimizers = [torch.optim.SGD(bag.parameters(), lr=0.5, fused=fused) for bag in bags]
        scalers: List[Any] = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        before = snapshot(bags[0])
        for bad in (True, False):
            for rank, (bag, scaler) in enumerate(zip(bags, scalers)):
                loss = bag(torch.tensor([[1]])).sum()
                scaler.scale(loss * float("inf") if bad and (rank == 1 or not fused) else loss).backward()
            for scaler, optimizer in zip(scalers, optimizers):
                scaler.step(optimizer)
                scaler.update(4.0)
                optimizer.zero_grad()
            if fused or not bad:  # else the step goes on, and rows can be had at its end
                assert torch.equal(bags[0].weight, before) is bad
        torch.testing.assert_close(bags[0].weight[1], before[1] - 0.5)
        assert engine.committed_step() == (1 if fused else 0)


@pytest.mark.parametrize("whose", ["frugal", "torch"])
def test_a_rank_without_a_gradient_takes_part(whose: str) -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd(0.5)) for t in trainers]
        optimizers: List[Any] = [
            ft.Optimizer(bag) if whose == "frugal" else torch.optim.SGD(bag.parameters(), lr=0.5) for bag in bags
        ]
        expected = snapshot(bags[0])
        for step, rank in enumerate((0, 1)):
            bags[rank](torch.tensor([[1]])).sum().backward()
            for parameter in bags[rank].parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)  # of one rank alone
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            expected[1] -= 0.125
            assert torch.equal(bags[1].weight, expected) and engine.committed_step() == step


def test_what_ranks_cannot_know_is_refused() -> None:
    """Before anything of it is done."""
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        adagrad = frugal.Adagrad(lr=0.5)
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=adagrad) for t in trainers]
        optimizers = [torch.optim.Adagrad(bag.parameters(), lr=0.5) for bag in bags]
        for _ in range(2):
            before = snapshot(bags[0])
            for bag in bags:
                bag(torch.tensor([[1]])).sum().backward()
            for foreach in (False, True):
                with pytest.raises(NotImplementedError, match="2 ranks.*clip_norm"):
                    torch.nn.utils.clip_grad_norm_(bags[0].parameters(), 1.0, foreach=foreach)
                with pytest.raises(NotImplementedError, match="2 ranks.*clip_value"):
                    torch.nn.utils.clip_grad_value_(bags[0].parameters(), 1.0, foreach=foreach)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert not torch.equal(bags[0].weight[1], before[1])
        second = torch.optim.Adagrad(bags[0].parameters(), lr=0.5)
        bags[0](torch.tensor([[1]])).sum().backward()
        with pytest.raises(NotImplementedError, match="new state"):
            second.step()


def test_ranks_choose_a_kind_together() -> None:
    """torch.optim.Adagrad for a table that was made with SGD: at the first step, whichever rank comes first."""
    world_size, steps = 2, 4
    weight = integers(ROWS, DIM)
    batches = [[torch.randint(0, ROWS, (5, 2)) for _ in range(steps)] for _ in range(world_size)]
    grads = [[integers(5, DIM) for _ in range(steps)] for _ in range(world_size)]
    made = threading.Barrier(world_size)
    with frugal.Engine(world_size=world_size, timeout=60) as engine:

        def work(rank: int) -> None:
            bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=engine.create_trainer(rank))
            optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.5)
            made.wait(60)
            for keys, grad in zip(batches[rank], grads[rank]):
                time.sleep(0.01 * rank)
                optimizer.zero_grad()
                bags(keys).backward(grad)
                optimizer.step()

        run_ranks(world_size, work)
        got = torch.from_numpy(engine.find_table("embedding_bag_0").get(torch.arange(ROWS)))
    parameter = torch.nn.Parameter(weight.clone())
    reference = torch.optim.Adagrad([parameter], lr=0.5)
    for step in range(steps):
        reference.zero_grad()
        for rank in range(world_size):
            out = torch.nn.functional.embedding_bag(batches[rank][step], parameter, mode="sum")
            out.backward(grads[rank][step] / world_size)
        reference.step()
    torch.testing.assert_close(got, parameter.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("together", [True, False])
def test_a_rank_chooses_a_kind_while_another_one_waits_to(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is refused, since rank 0 is inside a step. Before it does anything else, rank 0 has given the second table
    its kind: before that step, after rank 1's call had read the kind, or after that step. Then neither rank makes a
    step more than the other. `together`: one optimizer has both tables."""
    said, chosen, stepped = threading.Event(), threading.Event(), threading.Event()
    own = threading.local()
    choose, begin, end = frugal.Table.set_optimizer, _steps.Steps.begin, _steps.Steps.end

    def chooses(table: frugal.Table, *how: Any, **options: Any) -> None:
        second = table.name == "embedding_bag_1"
        first_try = second and own.rank == 1 and not said.is_set()
        if second and own.rank == 1 and not first_try:
            assert chosen.wait(60)
        if first_try and together:
            assert stepped.wait(60)
            said.set()
            raise frugal.Busy("not between steps: rank 0 is inside step 1", _abi.STATUS["FRUGAL_ERR_BUSY"])
        try:
            choose(table, *how, **options)
        except frugal.Busy:
            if first_try:
                said.set()
            raise
        if second and own.rank == 0:
            chosen.set()

    def begins(steps: _steps.Steps) -> None:
        if steps.rank == 1 and said.is_set():
            assert chosen.wait(60)
        begin(steps)
        if steps.rank == 0 and steps.next == 1:
            stepped.set()

    def ends(steps: _steps.Steps, skip: bool) -> None:
        if steps.rank == 0 and steps.next == 1 and not together:
            assert said.wait(60)
        end(steps, skip)

    monkeypatch.setattr(frugal.Table, "set_optimizer", chooses)
    monkeypatch.setattr(_steps.Steps, "begin", begins)
    monkeypatch.setattr(_steps.Steps, "end", ends)
    weight = integers(ROWS, DIM)
    batches = [[torch.randint(0, ROWS, (5, 2)) for _ in range(3)] for _ in range(2)]
    made = threading.Barrier(2)

    def optimizers_of(modules: Any) -> List[torch.optim.Optimizer]:
        of = [list(modules.parameters())] if together else [list(module.parameters()) for module in modules]
        return [torch.optim.Adagrad(some, lr=0.5) for some in of]

    with frugal.Engine(world_size=2, timeout=60) as engine:

        def work(rank: int) -> None:
            own.rank = rank
            trainer = engine.create_trainer(rank)
            bags = torch.nn.ModuleList(
                [ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=trainer) for _ in range(2)]
            )
            optimizers = optimizers_of(bags)
            made.wait(60)
            for keys in batches[rank]:
                bags.zero_grad()
                (bags[0](keys) + bags[1](keys)).square().sum().backward()
                for optimizer in optimizers:
                    optimizer.step()

        run_ranks(2, work)
        assert said.is_set() and engine.committed_step() == 3 * (1 if together else 2)
        got = [torch.from_numpy(engine.find_table(f"embedding_bag_{i}").get(torch.arange(ROWS))) for i in range(2)]
    theirs = [torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight.clone()) for _ in range(2)]
    optimizers = optimizers_of(torch.nn.ModuleList(theirs))
    for keys in zip(*batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for some in keys:
            ((theirs[0](some) + theirs[1](some)).square().sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine, bag in zip(got, theirs):
        torch.testing.assert_close(mine, bag.weight.detach(), rtol=1e-5, atol=1e-5)


def test_a_second_model_is_new_on_all_ranks() -> None:
    """Also where one rank has made it, and has chosen its optimizer, before another makes it."""
    weight = integers(ROWS, DIM)
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]

        def train(models: List[Any]) -> None:
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
            for model in models:
                model(torch.tensor([1])).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                train([ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer) for trainer in trainers])
            first = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainers[0])
            first._table.choose(frugal.Adagrad())
            second = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainers[1])
            assert torch.equal(snapshot(second), weight)
            for module in (first, second):
                module(torch.tensor([1])).sum().backward()
            for optimizer in [torch.optim.Adagrad(module.parameters(), lr=0.5) for module in (first, second)]:
                optimizer.step()
        torch.testing.assert_close(snapshot(second)[1], weight[1] - 0.5)
        with pytest.warns(UserWarning, match="exists, trained: the module goes on with its rows"):
            ft.Embedding(ROWS, DIM, trainer=trainers[1], name=first.table.name)


def test_ranks_say_the_same() -> None:
    keys = torch.zeros(1, 1, dtype=torch.int64)
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd(), name="t") for t in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        before = snapshot(bags[0])
        for bag in bags:
            bag(keys).sum().backward()
        optimizers[0].step()
        optimizers[1].param_groups[0]["lr"] = 0.25
        with pytest.raises(ValueError, match="rank 1 says lr=0.25, rank 0 lr=0.5"):
            optimizers[1].step()
        optimizers[1].param_groups[0]["lr"] = 0.5
        optimizers[1].step()
        assert torch.equal(bags[0].weight[0], before[0] - 0.5)
        with pytest.raises(ValueError, match="exists with the optimizer"):
            ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainers[1], optimizer=sgd(0.1), name="t2") and (
                ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainers[0], optimizer=sgd(0.2), name="t2")
            )


def test_each_rank_has_its_own_scale() -> None:
    keys = torch.zeros(1, 1, dtype=torch.int64)
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [
            ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd(1.0), mean_ranks=False) for t in trainers
        ]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        scalers: List[Any] = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        before = snapshot(bags[0])

        def backward(factors: Any) -> None:
            for bag, scaler, factor in zip(bags, scalers, factors):
                scaler.scale((bag(keys) * factor).sum()).backward()

        backward((1.0, float("inf")))
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(bags[0].weight, before)
        least = min(scaler.get_scale() for scaler in scalers)
        assert [scaler.get_scale() for scaler in scalers] == [4.0, 2.0]
        for scaler in scalers:  # as docs/torch.md says
            scaler.update(least)
        backward((1.0, 1.0))
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(bags[0].weight[0], before[0] - 2.0)
        scalers[1].update(1.0)
        backward((1.0, 1.0))
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
        torch.testing.assert_close(bags[0].weight[0], before[0] - 4.0)
        # Of what a table has once, all ranks say the same.
        optimizers[1].param_groups[0]["lr"] = 0.5
        backward((1.0, 1.0))
        optimizers[0].step()
        with pytest.raises(ValueError, match="rank 1 says lr=0.5, rank 0 lr=1.0; all ranks must say the same"):
            optimizers[1].step()


def test_what_takes_all_ranks_is_said() -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd()) for t in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        before = snapshot(bags[0])
        bags[0](torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
        optimizers[0].zero_grad()  # the rank's own matter
        bags[0](torch.tensor([[1]])).sum().backward()
        optimizers[0].step()
        expected = before.clone()
        expected[1] -= 0.25
        read: List[torch.Tensor] = []
        reader = threading.Thread(target=lambda: read.append(bags[0].state_dict()["weight"]))
        reader.start()
        reader.join(0.2)
        assert not read and reader.is_alive()  # it waits for the other rank
        optimizers[1].step()  # an empty step: the rank has no data
        reader.join(60)
        assert engine.committed_step() == 0
        assert torch.equal(read[0], expected)
        assert torch.equal(bags[0].state_dict()["weight"], expected)


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_and_state_are_read_and_written_when_other_ranks_have_ended_the_step(hashed: bool) -> None:
    keys = torch.tensor([[1, 2]])
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        kind = frugal.Adagrad(lr=0.5)
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=kind, hashed=hashed) for t in trainers]
        optimizers = [torch.optim.Adagrad(bag.parameters(), lr=0.5) for bag in bags]
        for step in range(2):
            for bag in bags:
                bag(keys).sum().backward()
            optimizers[0].step()
            done: List[Any] = []

            def read() -> None:
                state = optimizers[0].state_dict()
                rows = snapshot(bags[0])
                with torch.no_grad():
                    bags[0].weight.mul_(2.0)
                done.extend([state, rows, snapshot(bags[0])])

            reader = threading.Thread(target=read)
            reader.start()
            reader.join(0.1)
            assert not done
            optimizers[1].step()
            reader.join(60)
            for optimizer in optimizers:
                optimizer.zero_grad()
            assert torch.equal(done[1] * 2.0, done[2]) and engine.committed_step() == step
            assert len(done[0]["state"]) == 1


def test_a_module_made_inside_a_step_says_what_ends_it() -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t) for t in trainers]
        bags[0](torch.tensor([[1]])).sum().backward()
        with pytest.raises(frugal.Busy, match="table 'late': .*step 0.*optimizer.step.. on all ranks ends it"):
            ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainers[0], name="late")
        optimizers = [torch.optim.SGD(bag.parameters(), lr=0.1) for bag in bags]
        run_ranks(2, lambda rank: optimizers[rank].step())
        ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainers[0], name="late")


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_a_rank_reads_state_alone_whatever_the_others_are_inside_of(kind: str) -> None:
    """The usual checkpoint: rank 0 saves, and the others, which do not, wait for it in their next step."""
    keys = torch.tensor([[1, 2]])
    more = {"momentum": 0.9} if kind == "SGD" else {}

    def optimizer_of(module: Any) -> Any:
        return getattr(torch.optim, kind)(module.parameters(), lr=0.5, **more)

    weight = integers(ROWS, DIM)
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=kind != "SGD", _weight=weight.clone())
    expected = optimizer_of(theirs)
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=t) for t in trainers]
        optimizers = [optimizer_of(bag) for bag in bags]

        def matches(optimizer: Any) -> None:
            torch.testing.assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])

        for _ in range(2):
            for module, optimizer in zip([theirs, *bags], [expected, *optimizers]):
                optimizer.zero_grad()
                module(keys).sum().backward()
                if optimizer is expected:
                    optimizer.step()
            run_ranks(2, lambda rank: optimizers[rank].step())
        matches(optimizers[0])
        bags[1](keys).sum().backward()
        matches(optimizers[0])
        matches(optimizers[1])  # in its step, with what is accumulated of it
        optimizers[1].step()  # ends it; it is committed when rank 0 ends it
        matches(optimizers[0])
        bags[0](keys).sum().backward()
        matches(optimizers[0])
        saved = optimizers[0].state[bags[0].weight]
        for name in {"SGD": ["momentum_buffer"], "Adagrad": ["sum"], "SparseAdam": ["exp_avg", "exp_avg_sq"]}[kind]:
            torch.testing.assert_close(saved[name].clone(), expected.state[theirs.weight][name])
        before = engine.committed_step()
        optimizers[0].step()
        assert before is not None and engine.committed_step() == before + 1


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_the_first_step_gives_a_table_of_several_ranks_its_kind_of_optimizer(kind: str) -> None:
    weight = torch.randn(ROWS, DIM)
    batches = [[torch.randint(0, ROWS, (5, 2)) for _ in range(4)] for _ in range(2)]
    made = threading.Barrier(2)

    def optimizer_of(module: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(module.parameters(), lr=0.1)  # type: ignore[no-any-return]

    with frugal.Engine(world_size=2, timeout=60) as engine:
        rows: List[torch.Tensor] = []
        states: List[Any] = []

        def work(rank: int) -> None:
            bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=engine.create_trainer(rank))
            optimizer = optimizer_of(bags)
            made.wait(60)
            for keys in batches[rank]:
                optimizer.zero_grad()
                bags(keys).square().sum().backward()
                optimizer.step()
            rows.append(snapshot(bags))
            states.append(optimizer.state_dict()["state"])
            made.wait(60)

        run_ranks(2, work)
    bags = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight.clone(), sparse=True)
    optimizer = optimizer_of(bags)
    for keys in zip(*batches):
        optimizer.zero_grad()
        for some in keys:
            (bags(some).square().sum() / 2).backward()
        optimizer.step()
    for mine, state in zip(rows, states):
        torch.testing.assert_close(mine, bags.weight.detach())
        torch.testing.assert_close(state, optimizer.state_dict()["state"])


def test_a_rank_that_waits_between_steps_says_for_what(impatient: None) -> None:
    """The other may wait for it in the step, as in DistributedDataParallel's reduction."""
    with frugal.Engine(world_size=2, timeout=60) as engine:
        bags = [ft.EmbeddingBag(ROWS, DIM, trainer=engine.create_trainer(rank), optimizer=sgd()) for rank in range(2)]
        state = {"weight": snapshot(bags[1]) + 1}
        bags[0](torch.tensor([[1]]))
        with pytest.raises(UserWarning, match="rank 1 waits between steps.*load_state_dict.*barrier"):
            bags[1].load_state_dict(state)
        bags[0].zero_grad()


@pytest.mark.parametrize("chooses", [False, True])
def test_a_rank_that_waits_for_nobody_says_so(chooses: bool, impatient: None) -> None:
    """In the second step, or where the first one gives the table its kind of optimizer."""
    with frugal.Engine(world_size=3, timeout=60) as engine:
        trainer, _ = engine.create_trainer(0), engine.create_trainer(2)
        bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=sgd())
        kind = torch.optim.Adagrad if chooses else torch.optim.SGD
        optimizer = kind(bags.parameters(), lr=0.5)
        with pytest.raises(UserWarning, match="rank 0 waits for rank 1: no trainer has joined"):
            for _ in range(2):
                bags(torch.tensor([[1]])).sum().backward()
                optimizer.step()
        assert engine.committed_step() is None


def test_an_abort_of_one_rank_reaches_the_other() -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd()) for t in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        before = snapshot(bags[0])
        keys = torch.zeros(1, 1, dtype=torch.int64)
        for bag in bags:
            bag(keys).sum().backward()
        trainers[0].step_abort()
        for optimizer in optimizers:
            with pytest.raises(frugal.Error):
                optimizer.step()
        for optimizer in optimizers:  # both begin again: the gradients are there
            optimizer.step()
        torch.testing.assert_close(bags[0].weight[0], before[0] - 0.5)
        for bag in bags:
            bag(keys).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(bags[0].weight[0], before[0] - 1.0)
        assert engine.committed_step() == 1


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


GRADIENT_WRITES: List[Callable[[Any], Any]] = [
    lambda weight: weight.grad.copy_(torch.tensor(5.0)),
    lambda weight: weight.grad.copy_(torch.full((1, 1), 5.0)),
    lambda weight: weight.grad.data.copy_(torch.tensor(5.0)),
    lambda weight: torch._foreach_copy_([weight.grad], [torch.tensor(5.0)]),
    lambda weight: setattr(weight, "grad", torch.full(tuple(weight.shape), 5.0)),
    lambda weight: setattr(weight, "grad", torch.full((2 * weight.shape[0], weight.shape[1]), 5.0)[: weight.shape[0]]),
    lambda weight: weight.grad.mul_(2.0),
    lambda weight: torch.empty(tuple(weight.shape)).copy_(weight.grad),
    lambda weight: torch.mul(weight.grad, 0.5, out=torch.empty(tuple(weight.shape))),
]


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
@pytest.mark.parametrize("write", range(len(GRADIENT_WRITES)))
@pytest.mark.parametrize("shape", [(6, 3), (1, 1)])
def test_copies_of_a_caller_are_none_of_a_reducer(
    shape: Any, write: int, trainer: frugal.Trainer, process_group: Any
) -> None:
    found = []
    for modules, options in ((torch.nn, {}), (ft, {"trainer": trainer})):
        made: Any = modules.Embedding(*shape, _weight=torch.zeros(shape), **options)
        optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
        (4.0 * made(torch.arange(shape[0]))).sum().backward()
        out = GRADIENT_WRITES[write](made.weight)
        optimizer.step()
        found.append([snapshot(made), *([out[...].clone()] if isinstance(out, torch.Tensor) else [])])
    assert all(map(torch.equal, *found))


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
def test_distributed_data_parallel_does_not_touch_tables(trainer: frugal.Trainer, process_group: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=sgd())
            self.head = torch.nn.Linear(DIM, 1)

        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            return self.head(self.bags(keys))  # type: ignore[no-any-return]

    torch.manual_seed(3)
    model = Model()
    head = torch.nn.Linear(DIM, 1)
    head.load_state_dict(model.head.state_dict())
    bags = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=snapshot(model.bags), sparse=True)
    for find_unused, as_view in ((False, False), (True, False), (False, True)):
        parallel = torch.nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=find_unused, gradient_as_bucket_view=as_view
        )
        optimizers: List[torch.optim.Optimizer] = [
            ft.Optimizer(parallel),
            torch.optim.SGD(parallel.parameters(), lr=0.1),
        ]
        groups: List[Any] = [{"params": head.parameters()}, {"params": bags.parameters(), "lr": 0.5}]
        reference = torch.optim.SGD(groups, lr=0.1)
        for _ in range(3):
            keys = torch.randint(0, ROWS, (6, 2))
            for optimizer in (*optimizers, reference):
                optimizer.zero_grad()
            parallel(keys).sum().backward()
            head(bags(keys)).sum().backward()
            for optimizer in (*optimizers, reference):
                optimizer.step()
        torch.testing.assert_close(model.bags.weight, bags.weight.detach())
        torch.testing.assert_close(model.head.weight, head.weight)
    assert list(parallel.state_dict()) == ["module.bags.weight", "module.head.weight", "module.head.bias"]


CLIPS: Dict[str, Callable[[Any], Any]] = {
    "norm": lambda parallel: torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0),
    "value": lambda parallel: torch.nn.utils.clip_grad_value_(parallel.parameters(), 1.0),
    "a factor": lambda parallel: parallel.module[0].weight.grad.mul_(0.5),
    "a copy": lambda parallel: parallel.module[0].weight.grad.clone(),
}


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_gradient_where_a_reducer_has_views_of_its_buckets(
    clip: str, to_none: bool, options: Any, trainer: frugal.Trainer, process_group: Any
) -> None:
    """The reducer's element is no gradient of the rows where a caller clips or reads it. Gradients that are kept are
    copied when the reducer orders its buckets anew."""
    found: List[List[torch.Tensor]] = []
    for modules, more in ((torch.nn, {}), (ft, {"trainer": trainer})):
        torch.manual_seed(1)
        made: Any = modules.Embedding(6, 3, _weight=integers(6, 3), **more)
        model = torch.nn.Sequential(made, torch.nn.Linear(3, 1))
        parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
        seen = []
        for keys in ([1, 2], [2, 2], [0, 1]):
            optimizer.zero_grad(set_to_none=to_none)
            (4.0 * parallel(torch.tensor(keys))).sum().backward()
            answer = CLIPS[clip](parallel)
            seen += [] if answer is None else [answer[...].clone()]
            seen.append(made.weight.grad.norm())
            optimizer.step()
        found.append([*seen, snapshot(made)])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_from_before_a_process_group(
    name: str, views: bool, trainer: frugal.Trainer, request: pytest.FixtureRequest
) -> None:
    def double(given: Any) -> Any:
        if name == "register_hook":
            return given * 2
        given.grad.mul_(2)
        return None

    both = []
    for modules, more in ((torch.nn, {}), (ft, {"trainer": trainer})):
        torch.manual_seed(1)
        made: Any = modules.Embedding(6, 3, _weight=integers(6, 3), **more)
        getattr(made.weight, name)(lambda given: double(given))
        both.append(torch.nn.Sequential(made, torch.nn.Linear(3, 1)))
    request.getfixturevalue("process_group")
    found = []
    for model in both:
        parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.25)
        for to_none in (True, False):
            optimizer.zero_grad(set_to_none=to_none)
            for keys in ([1, 2], [2, 3]):
                parallel(torch.tensor(keys)).sum().backward()
            optimizer.step()
        found.append([snapshot(model[0]), *[p.grad.norm() for p in model.parameters() if p.grad is not None]])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
def test_ranks_with_an_engine_each_are_refused(
    trainer: frugal.Trainer, process_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a script says rank and number of ranks to torch.distributed alone: at the latest in a backward."""
    for name in ("RANK", "WORLD_SIZE", "FRUGAL_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    bags = ft.EmbeddingBag(ROWS, DIM, trainer=trainer)
    parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(bags, torch.nn.Linear(DIM, 1)))
    assert (_ranks.world(alone=True).rank, _ranks.world().size) == (0, 1)
    before = snapshot(bags)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="one rank and torch.distributed 2.*FRUGAL_SERVICE"):
        parallel(torch.tensor([[1, 2]])).sum().backward()
    assert torch.equal(bags.weight, before)
    with pytest.raises(RuntimeError, match="no address of a controller, which 2 ranks"):
        _ranks.world(alone=True)
    found = _ranks.world("somewhere")
    assert (found.rank, found.size) == (1, 2)
    monkeypatch.setenv("RANK", "0")  # torchrun's, which comes first
    assert _ranks.world("somewhere").rank == 0


def test_a_forked_child_cannot_train_and_does_no_harm(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer, optimizer=sgd())
    optimizer = ft.Optimizer(bags)
    keys = torch.tensor([[1, 2]])
    lookahead = iter(ft.Lookahead([keys] * 3, lambda batch: {bags: batch}, trainer=trainer))
    next(lookahead)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = b"no error"
        try:
            bags(keys)
        except frugal.Error as error:
            told = type(error).__name__.encode()
        del lookahead, bags, optimizer
        os.write(writer, told)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 100) == b"Forked"
    os.close(reader)
    os.close(writer)
    bags(keys).sum().backward()
    optimizer.step()
    assert engine.committed_step() == 0


def test_a_child_does_not_wait_for_a_lock_of_the_parent() -> None:
    keys = torch.tensor([[1, 2]])
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer) for trainer in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        bags[0](keys).sum().backward()
        optimizers[0].step()
        waits = threading.Thread(target=lambda: bags[0](keys))  # for rank 1, with the lock
        waits.start()
        time.sleep(0.2)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            wrong = 0
            for call in (lambda: bags[0](keys), optimizers[0].step, bags[0].state_dict):
                try:
                    call()
                    wrong += 1
                except frugal.Forked:
                    pass
            os._exit(wrong)
        assert os.waitpid(child, 0)[1] == 0
        bags[1](keys).sum().backward()
        optimizers[1].step()
        waits.join()


@pytest.mark.parametrize("optimizer", [sgd(), frugal.Adagrad()])
def test_rows_that_are_there_are_loaded_while_a_rank_is_in_a_step(optimizer: frugal.Optimizer) -> None:
    """As where each rank loads the same file, with nothing between that and its first forward."""
    engine = frugal.Engine(world_size=2, timeout=60)
    with engine, engine.create_trainer(0) as one, engine.create_trainer(1) as two:
        modules = [ft.Embedding(ROWS, DIM, name="e", trainer=t, optimizer=optimizer) for t in (one, two)]
        saved = {"weight": integers(ROWS, DIM)}
        modules[0].load_state_dict(saved)
        out = modules[0](torch.arange(5))
        modules[1].load_state_dict(saved)
        assert torch.equal(out, saved["weight"][:5]) and torch.equal(snapshot(modules[1]), saved["weight"])
        for module in modules:
            module(torch.arange(5)).sum().backward()
            ft.Optimizer(module).step()
        assert not torch.equal(snapshot(modules[1])[:5], saved["weight"][:5])
