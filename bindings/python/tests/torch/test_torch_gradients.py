"""Functions of lists in which parameters, weights and gradients of tables are mixed; what a gradient gives to hooks, under
inference_mode() and as values; and what has its values. Each is compared with torch.nn."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from torch_support import DIM, ROWS, integers

import frugal
import frugal.torch as ft

Modules = Tuple[Any, Any]


def modules(make: Callable[..., Any]) -> Modules:
    """Two tables, with other rows and other gradients."""
    both = make(ROWS, DIM), make(ROWS, DIM)
    with torch.no_grad():
        for i, module in enumerate(both):
            module.weight.copy_(torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM) + i)
    (both[0](torch.tensor([1, 2])) * 2).sum().backward()
    both[1](torch.tensor([2, 3])).sum().backward()
    return both


def parameter(module: Any) -> Any:
    return next(module.parameters())


def grad(module: Any) -> Any:
    return parameter(module).grad


LISTS: Dict[str, Callable[[Any, Any], List[Any]]] = {
    "a gradient and a parameter": lambda m, n: [grad(m), parameter(m)],
    "a parameter and a gradient": lambda m, n: [parameter(m), grad(n)],
    "a gradient and a weight": lambda m, n: [grad(m), n.weight],
    "a gradient and a weight's": lambda m, n: [grad(m), n.weight.grad],
    "a weight's gradient and a parameter": lambda m, n: [n.weight.grad, parameter(m)],
    "a gradient and the same as a weight's": lambda m, n: [grad(m), m.weight.grad],
    "a gradient twice": lambda m, n: [grad(m), grad(m)],
    "a parameter twice": lambda m, n: [parameter(m), parameter(m)],
    "a weight and its parameter": lambda m, n: [m.weight, parameter(m)],
}

CHANGES: Dict[str, Callable[[List[Any], List[Any]], Any]] = {
    "mul": lambda tensors, others: torch._foreach_mul_(tensors, [2.0, 3.0]),
    "add": lambda tensors, others: torch._foreach_add_(tensors, others, alpha=0.5),
    "addcmul": lambda tensors, others: torch._foreach_addcmul_(tensors, others, others, 0.5),
    "copy": lambda tensors, others: torch._foreach_copy_(tensors, others),
    "zero": lambda tensors, others: torch._foreach_zero_(tensors),
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("chosen", list(LISTS))
def test_a_function_that_writes_to_a_list(trainer: frugal.Trainer, chosen: str, change: str) -> None:
    found, others = [], [integers(ROWS, DIM), integers(ROWS, DIM)]
    for make in (torch.nn.Embedding, lambda *shape: ft.Embedding(*shape, trainer=trainer)):
        both = modules(make)
        with torch.no_grad():
            CHANGES[change](LISTS[chosen](*both), others)
        found.append([tensor.detach().clone() for module in both for tensor in (module.weight, module.weight.grad)])
    for expected, got in zip(*found):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("chosen", list(LISTS))
def test_gradients_are_what_others_get(trainer: frugal.Trainer, chosen: str) -> None:
    found = []
    for make in (torch.nn.Embedding, lambda *shape: ft.Embedding(*shape, trainer=trainer)):
        both = modules(make)
        tensors = LISTS[chosen](*both)
        others = [torch.ones(ROWS, DIM), torch.ones(ROWS, DIM)]
        with torch.no_grad():
            torch._foreach_add_(others, tensors, alpha=0.5)
            found.append([*others, *torch._foreach_norm(tensors), *torch._foreach_mul(tensors, 2.0)])
    for expected, got in zip(*found):
        torch.testing.assert_close(got.clone(), expected)


def _hooked(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(module: Any) -> Any:
        parameter(module).register_hook(hook)
        (module(torch.tensor([2, 3])) * 2).sum().backward()
        return grad(module)

    return run


def _inferred(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(module: Any) -> Any:
        with torch.inference_mode():
            change(module)
        torch.optim.SGD(module.parameters(), lr=0.5).step()
        return module.weight.detach()

    return run


def _saved(module: Any) -> Any:
    leaf = torch.full((ROWS, DIM), 2.0, requires_grad=True)
    (leaf * grad(module).abs()).sum().backward()
    return leaf.grad


VALUES: Dict[str, Callable[[Any], Any]] = {
    "a hook adds a tensor": _hooked(lambda gradient: gradient + torch.ones(ROWS, DIM)),
    "a hook adds to a tensor": _hooked(lambda gradient: torch.ones(ROWS, DIM) + gradient),
    "a hook adds a tensor in place": _hooked(lambda gradient: gradient.add_(torch.ones(ROWS, DIM))),
    "inference_mode: a tensor is added": _inferred(lambda module: grad(module).add_(torch.ones(ROWS, DIM))),
    "inference_mode: weight decay": _inferred(lambda module: grad(module).add_(parameter(module), alpha=0.5)),
    "lists": lambda module: torch.tensor(grad(module).abs().tolist()),
    "numpy": lambda module: torch.tensor(np.asarray(grad(module).abs().numpy())),
    "an array": lambda module: torch.tensor(np.asarray(grad(module).abs())),
    "a copy": lambda module: copy.deepcopy(grad(module).abs()).clone(),
    "saved for a backward": _saved,
}


@pytest.mark.parametrize("use", list(VALUES))
def test_what_a_gradient_gives(trainer: frugal.Trainer, use: str) -> None:
    expected = VALUES[use](modules(torch.nn.Embedding)[0])
    module = modules(lambda *shape: ft.Embedding(*shape, trainer=trainer))[0]
    torch.testing.assert_close(VALUES[use](module).clone(), expected.clone())


def _ema(module: Any) -> Any:
    """As Grokfast filters gradients."""
    optimizer, mean = torch.optim.SGD(module.parameters(), lr=0.5), None
    for factor in (1.0, 2.0, 4.0):
        optimizer.zero_grad()
        (module(torch.tensor([2, 3])) * factor).sum().backward()
        if mean is None:
            mean = grad(module).data.detach()
        mean = mean * 0.75 + grad(module).data.detach() * 0.25
        grad(module).data = grad(module).data + mean * 2.0
        optimizer.step()
    return module.weight.detach()


def _left(change: Callable[[Any, Any], Any], of: Callable[[Any], Any] = lambda kept: kept) -> Callable[[Any], Any]:
    """What somebody sees who has kept detach() of a gradient, or the gradient itself."""

    def run(module: Any) -> Any:
        kept = grad(module).detach()
        change(module, kept)
        (module(torch.tensor([2, 3])) * 8).sum().backward()
        found = of(kept)
        return grad(module) if found is None else found

    return run


def _assign_data(module: Any, kept: Any) -> None:
    grad(module).data = torch.ones(ROWS, DIM)


def _assign_and_write(module: Any, kept: Any) -> None:
    _assign_data(module, kept)
    kept.add_(1.0)


def _assign_kept(module: Any, kept: Any) -> None:
    kept.data = torch.ones(ROWS, DIM)


def _give_kept(module: Any, kept: Any) -> None:
    parameter(module).grad = kept


def _give_kept_later(module: Any, kept: Any) -> None:
    _assign_data(module, kept)
    _give_kept(module, kept)


def _zero(module: Any, kept: Any) -> None:
    module.zero_grad()


KEPT: Dict[str, Callable[[Any, Any], Any]] = {
    "data is assigned": _assign_data,
    "data of what is kept is assigned": _assign_kept,
    "data is assigned, and what is kept is written": _assign_and_write,
    "what is kept becomes the gradient": _give_kept,
    "data is assigned, and what is kept becomes the gradient": _give_kept_later,
    "the gradient is multiplied": lambda m, kept: grad(m).mul_(3.0),
    "what is kept is multiplied": lambda m, kept: kept.mul_(3.0),
    "what is kept is clipped": lambda m, kept: kept.clamp_(-0.5, 0.5),
    "what is kept is copied to": lambda m, kept: kept.data.copy_(torch.ones(ROWS, DIM)),
    "a view of what is kept is written": lambda m, kept: kept[1:3].mul_(2.0),
    "zero_grad": _zero,
    "zeros": lambda m, kept: grad(m).zero_(),
}


@pytest.mark.parametrize("shown", ["what is kept", "the gradient"])
@pytest.mark.parametrize("change", list(KEPT))
def test_what_has_a_gradient_s_values(trainer: frugal.Trainer, change: str, shown: str) -> None:
    run = _left(KEPT[change]) if shown == "what is kept" else _left(KEPT[change], lambda kept: None)
    expected = run(modules(torch.nn.Embedding)[0])
    module = modules(lambda *shape: ft.Embedding(*shape, trainer=trainer))[0]
    torch.testing.assert_close(run(module).clone(), expected.clone())


def test_a_moving_average_of_gradients(trainer: frugal.Trainer) -> None:
    expected = _ema(modules(torch.nn.Embedding)[0])
    module = modules(lambda *shape: ft.Embedding(*shape, trainer=trainer))[0]
    torch.testing.assert_close(_ema(module).clone(), expected)


def test_a_gradient_whose_modules_are_gone(trainer: frugal.Trainer) -> None:
    left = grad(modules(lambda *shape: ft.Embedding(*shape, trainer=trainer))[0])
    with pytest.raises(RuntimeError, match="went with the last of its modules: keep a module"):
        left.clone().norm()
        left.add_(torch.ones(ROWS, DIM))


def test_the_memory_of_a_gradient_has_no_numbers(trainer: frugal.Trainer) -> None:
    """PyTorch takes the memory without a call of anything here."""
    other = torch.ones(ROWS, DIM)
    module = modules(lambda *shape: ft.Embedding(*shape, trainer=trainer))[0]
    other.data = grad(module)
    assert bool(torch.isnan(other.sum()))
