"""A trainer's modules in several threads: evaluation, saving and construction concurrently with a training loop."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch_support import DIM, ROWS, integers, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _native, _state, _steps, _usual


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What it returns, or raises, in another thread."""
    results: List[Any] = []

    def run() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:  # noqa: B036
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = results[0]
    if error is not None:
        raise error
    return result


def optimizer_of(model: Any) -> Any:
    return torch.optim.Adagrad(model.parameters(), lr=0.5)


def overwrite(weight: Any, rows: Any) -> None:
    with torch.no_grad():
        weight[:] = rows


USES: Dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda module, optimizer: module.state_dict(),
    "load_state_dict": lambda module, optimizer: module.load_state_dict(module.state_dict()),
    "optimizer's": lambda module, optimizer: optimizer.state_dict(),
    "load the optimizer's": lambda module, optimizer: _state.load_optimizer_state(
        module._steps, module._table, _state.optimizer_state(module._steps, module._table)
    ),
    "read": lambda module, optimizer: module.weight.clone(),
    "some": lambda module, optimizer: module.weight[torch.tensor([0])],
    "write": lambda module, optimizer: overwrite(module.weight, module.weight * 2),
    "init": lambda module, optimizer: torch.nn.init.normal_(module.weight),
    "in place": lambda module, optimizer: module.weight.data.mul_(0.5),
    "a view": lambda module, optimizer: module.weight.data[:2].mul_(0.5),
}


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("use", list(USES))
def test_nobody_begins_a_step_while_rows_are_read_or_written(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, use: str, hashed: bool
) -> None:
    module = ft.Embedding(ROWS, DIM, hashed=hashed, trainer=trainer)
    optimizer = optimizer_of(module)
    module(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    module(torch.tensor([1, 2]))  # a step is open
    lock = module._steps.lock
    calls: List[bool] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(in_a_thread(lambda: lock.acquire(blocking=False) and not lock.release()))
            return function(*args)

        return call

    for name in ("get", "put", "delete", "table_keys"):
        monkeypatch.setattr(_native, name, watched(getattr(_native, name)))
    USES[use](module, optimizer)
    assert calls and not any(calls)


def test_a_thread_evaluates_saves_and_builds_while_another_trains(trainer: frugal.Trainer) -> None:
    weight = integers(ROWS, DIM)
    ours = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer)
    theirs = torch.nn.Embedding(ROWS, DIM, _weight=weight.clone())
    optimizers = [optimizer_of(module) for module in (ours, theirs)]
    batches = [torch.randint(0, ROWS, (16,)) for _ in range(40)]
    over, begun = threading.Event(), threading.Event()
    failures: List[BaseException] = []
    names: List[str] = []

    def look() -> None:
        try:
            while not (over.is_set() and begun.is_set()):
                with torch.no_grad():
                    assert ours(torch.arange(ROWS)).shape == (ROWS, DIM)
                ours.state_dict()
                optimizers[0].state_dict()
                ours.weight[torch.tensor([1, 2])]
                names.append(ft.Embedding(4, 2, trainer=trainer).table.name)
                begun.set()
        except BaseException as error:  # noqa: B036
            failures.append(error)
            begun.set()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        begun.wait()
        for batch in batches:
            for module, optimizer in zip((ours, theirs), optimizers):
                optimizer.zero_grad()
                module(batch).pow(2).sum().backward()
                optimizer.step()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(set(names)) == len(names)
    torch.testing.assert_close(snapshot(ours), theirs.weight.detach(), rtol=1e-5, atol=1e-5)


def test_backwards_in_several_threads_lose_no_gradient(trainer: frugal.Trainer) -> None:
    """More of them than are held one by one."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(8):
            module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
            begin = threading.Barrier(4)

            def work(module: Any = module, begin: threading.Barrier = begin) -> None:
                begin.wait(60)
                for _ in range(40):
                    module(torch.tensor([[1]])).sum().backward()

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            grad = module.weight.grad
            assert grad is not None and grad[1].tolist() == [160.0] * DIM
    finally:
        sys.setswitchinterval(interval)


def test_what_is_pushed_lives_until_it_is(trainer: frugal.Trainer) -> None:
    """Another thread's backward may sum what a table's gradient holds meanwhile."""
    module: Any = ft.EmbeddingBag(10, 4, mode="sum", trainer=trainer)
    for _ in range(2):
        module(torch.arange(4), torch.tensor([0, 2])).sum().backward()
    gradient = module.weight.grad
    memory = [weakref.ref(tensor) for part in gradient.parts for tensor in (part.held.tensors[0], part.held.grad)]
    _, alive = _steps._pushes([_steps.Update(gradient.table, gradient, gradient.table.optimizer)])
    gradient.fold()
    assert len(gradient.parts) == 1 and all(tensor() is not None for tensor in memory)
    del alive
    assert all(tensor() is None for tensor in memory[::2])


@pytest.mark.parametrize("usual", [True, False])
def test_a_backward_beside_an_optimizers_step_is_for_the_next(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, usual: bool
) -> None:
    if not usual:
        monkeypatch.setattr(_usual, "native", None)
    weight, keys = integers(ROWS, DIM), torch.tensor([1, 2, 2])
    ours = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer)
    theirs = torch.nn.Embedding(ROWS, DIM, _weight=weight.clone())
    dense = torch.nn.Parameter(torch.ones(1))
    dense.grad = torch.zeros(1)

    def backward(module: Any) -> None:
        (module(keys) * 0.5).sum().backward()

    optimizer = torch.optim.SGD([*ours.parameters(), dense], lr=0.5)
    backward(ours)
    of_torch: Any = sys.modules[torch.optim.SGD.__module__]
    steps = of_torch.sgd
    with monkeypatch.context() as inside:  # where PyTorch steps the other parameters

        def beside(*args: Any, **kwargs: Any) -> Any:
            in_a_thread(lambda: backward(ours))
            return steps(*args, **kwargs)

        inside.setattr(of_torch, "sgd", beside)
        optimizer.step()
    optimizer.step()  # of both backwards, as there was no zero_grad()

    reference = torch.optim.SGD(theirs.parameters(), lr=0.5)
    backward(theirs)
    reference.step()
    backward(theirs)
    reference.step()
    assert torch.equal(snapshot(ours), theirs.weight.detach())


def test_a_step_that_fails_in_pytorch_leaves_gradients(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    dense = torch.nn.Parameter(torch.ones(1))
    dense.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([*module.parameters(), dense], lr=0.5)
    module(torch.tensor([1, 2])).sum().backward()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError

    with monkeypatch.context() as inside:
        inside.setattr(sys.modules[torch.optim.SGD.__module__], "sgd", fails)
        with pytest.raises(ArithmeticError):
            optimizer.step()
    module(torch.tensor([1])).sum().backward()
    before = snapshot(module)
    optimizer.step()
    moved = torch.zeros(ROWS, DIM)
    moved[1], moved[2] = 1.0, 0.5
    torch.testing.assert_close(before - snapshot(module), moved)


def test_first_forwards_in_several_threads(trainer: frugal.Trainer) -> None:
    """Each makes what outputs are computed of. (A module of half numbers has its forward in Python.)"""
    keys, errors = torch.tensor([[1, 2], [2, 3]]), []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            module, all_there = ft.EmbeddingBag(8, 4, mode="sum", trainer=trainer).half(), threading.Barrier(4)

            def run() -> None:
                try:
                    all_there.wait()
                    module(keys).sum().backward()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=run) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert module.weight.grad is not None and float(module.weight.grad.sum()) == 4 * 4 * 4
    finally:
        sys.setswitchinterval(before)
