"""Several ranks, and DistributedDataParallel."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch
import torch.distributed as dist
from torch_support import DIM, ROWS, integers, sgd

import frugal
import frugal.torch as ft


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
def test_ranks_average_as_distributed_data_parallel_does(mean: bool) -> None:
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
            optimizer = ft.Optimizer(bags)
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
        optimizers = [ft.Optimizer(bag, check_inf=True) for bag in bags]
        before = bags[0].weight
        for factor, changes in ((float("inf"), False), (1.0, True)):
            for bag, scale in zip(bags, (1.0, factor)):
                (bag(torch.zeros(2, 2, dtype=torch.int64)) * scale).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert torch.equal(bags[1].weight, before) is not changes


def test_ranks_say_the_same() -> None:
    keys = torch.zeros(1, 1, dtype=torch.int64)
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd(), name="t") for t in trainers]
        optimizers = [ft.Optimizer(bag, check_inf=True) for bag in bags]
        before = bags[0].weight
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


def test_scales_of_ranks_are_the_same_or_an_error() -> None:
    keys = torch.zeros(1, 1, dtype=torch.int64)
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [
            ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd(1.0), mean_ranks=False) for t in trainers
        ]
        optimizers = [ft.Optimizer(bag, check_inf=True) for bag in bags]
        scalers: List[Any] = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        before = bags[0].weight

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
        scalers[0].step(optimizers[0])
        with pytest.raises(ValueError, match="rank 1 says grad_scale=1.0, rank 0 grad_scale=0.5"):
            scalers[1].step(optimizers[1])


def test_what_takes_all_ranks_is_said() -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer) for trainer in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        bags[0](torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
        with pytest.raises(RuntimeError, match="several ranks"):
            optimizers[0].zero_grad()
        optimizers[0].step()
        with pytest.raises(frugal.Busy):
            bags[0].state_dict()
        optimizers[1].step()  # an empty step: the rank has no data
        assert engine.committed_step() == 0
        bags[0].state_dict()


def test_an_abort_of_one_rank_reaches_the_other() -> None:
    with frugal.Engine(world_size=2, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(2)]
        bags = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=t, optimizer=sgd()) for t in trainers]
        optimizers = [ft.Optimizer(bag) for bag in bags]
        before = bags[0].weight
        keys = torch.zeros(1, 1, dtype=torch.int64)
        for bag in bags:
            bag(keys).sum().backward()
        trainers[0].step_abort()
        for optimizer in optimizers:
            with pytest.raises(frugal.Error):
                optimizer.step()
        for attempt in range(2):  # both begin again
            for bag in bags:
                bag(keys).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(bags[0].weight[0], before[0] - 1.0) and engine.committed_step() == 1


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    bags = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=model.bags.weight, sparse=True)
    for find_unused in (False, True):
        parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)
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
            for call in (lambda: bags[0](keys), optimizers[0].step, optimizers[0].zero_grad, bags[0].state_dict):
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
