"""What an optimizer of torch has of a table in its state, as programs move it, reset it and take from it. Each case
is compared with torch.nn."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any, Callable, List, Tuple

import pytest
import torch

import frugal.torch as ft

ROWS, DIM = 10, 4
KEYS = torch.arange(ROWS)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.25)


def adagrad_of_zeros(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


KINDS = [momentum, adam, adagrad]


def plain(value: Any) -> Any:
    """Copies of what there is now."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def check(case: Callable[..., Any], *arguments: Any) -> None:
    found: List[Any] = []
    for kind in (torch.nn.Embedding, ft.Embedding):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(plain(case(kind, *arguments)))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-5)


def train(optimizer: Any, *modules: Any, steps: int = 2) -> None:
    """Each module gets gradients of its own, and each step others."""
    for step in range(steps):
        optimizer.zero_grad()
        for number, module in enumerate(modules):
            rows = module(KEYS) if isinstance(module, torch.nn.Embedding) else module.weight
            ((number + 1) * rows.square().sum() / 10 + (step - 1) * rows.sum()).backward()
        optimizer.step()


def states(optimizer: Any) -> List[Any]:
    return [state for state in copy.deepcopy(optimizer.state_dict()["state"]).values() if state]


def tables(kind: Any) -> Tuple[Any, Any]:
    return kind(ROWS, DIM), kind(ROWS, DIM)


# --- two optimizers, one after the other ---


def of_a_new_adagrad(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    train(adagrad(module.parameters()), module)
    gc.collect()
    new = torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5)
    found = states(new), new.state[module.weight]["sum"].clone()
    another = torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5)
    another.load_state_dict(copy.deepcopy(new.state_dict()))
    train(another, module)
    return found, module.weight, states(another)


def of_an_adagrad_s_later_group(kind: Any) -> Any:
    first, second = tables(kind)
    optimizer = adagrad(first.parameters())
    optimizer.add_param_group({"params": second.weight})
    return states(optimizer)


@pytest.mark.parametrize("case", [of_a_new_adagrad, of_an_adagrad_s_later_group], ids=lambda case: str(case.__name__))
def test_adagrad_s_state_is_its_own(case: Any) -> None:
    check(case)


def moved(kind: Any, make: Any, pops: bool) -> Any:
    module = kind(ROWS, DIM)
    old = make(module.parameters())
    train(old, module)
    new, weight = make(module.parameters()), module.weight
    new.state[weight] = old.state.pop(weight) if pops else old.state[weight]
    found = states(new)
    train(new, module)
    return found, module.weight, states(new), len(old.state)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("pops", [False, True])
def test_a_state_goes_to_another_optimizer(make: Any, pops: bool) -> None:
    check(moved, make, pops)


def exchanged_and_another_steps(kind: Any, make: Any) -> Any:
    modules = tables(kind)
    parameters = first, second = [module.weight for module in modules]
    optimizer, other = make(parameters), torch.optim.SGD(parameters, lr=0.01)
    train(optimizer, *modules)
    state = optimizer.state
    state[first], state[second] = state[second], state[first]
    for each in (other, optimizer, other, optimizer):
        train(each, *modules, steps=1)
    return parameters, states(optimizer)


def kept(kind: Any, make: Any, to: str) -> Any:
    """What the state of the first table is read into, which then is another parameter's or optimizer's."""
    modules, head = tables(kind), torch.nn.Linear(DIM, ROWS, bias=False)
    weights = [module.weight for module in modules]
    optimizer, other = [make([*weights, head.weight]) for _ in range(2)]
    train(optimizer, modules[0])
    state = optimizer.state[weights[0]]
    kept = [state[name] for name in sorted(state)]
    parts = [value[2:4] for value in kept if value.dim()]
    trained = {"another table": modules[1], "a layer": head, "another optimizer": modules[0]}[to]
    target = trained.weight
    optimizer = other if to == "another optimizer" else optimizer
    optimizer.state[target] = state
    if target is not weights[0]:
        del optimizer.state[weights[0]]
    else:
        optimizer.state.pop(weights[1], None)
    found = []
    for _ in range(2):
        train(optimizer, trained)
        found.append([value.clone() for value in (*kept, *parts)])
    for value in kept:
        value.mul_(2)
    train(optimizer, trained)
    return found, kept, parts, target, states(optimizer)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("to", ["another table", "a layer", "another optimizer"])
def test_a_state_that_is_kept_goes_along(make: Any, to: str) -> None:
    check(kept, make, to)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("to", ["table", "layer", "another optimizer"])
def test_a_state_is_not_that_of_two_parameters(make: Any, to: str) -> None:
    modules, head = tables(ft.Embedding), torch.nn.Linear(DIM, ROWS, bias=False)
    first, second = [module.weight for module in modules]
    optimizer, other = [make([first, second, head.weight]) for _ in range(2)]
    train(optimizer, *modules)
    if to == "another optimizer":
        other.state[second] = optimizer.state[first]
        train(other, modules[1])
    else:
        optimizer.state[head.weight if to == "layer" else second] = optimizer.state[first]
        train(optimizer, head if to == "layer" else modules[1])
    before = first.detach().clone()
    with pytest.raises(NotImplementedError, match="cannot be that of two parameters"):
        train(optimizer, modules[0], steps=1)
    assert torch.equal(first, before)
    del optimizer.state[first]
    train(optimizer, modules[0])
    assert not torch.equal(first, before)


# --- exchanges with what is no table's ---


def exchanged(kind: Any, make: Any) -> Tuple[Any, Any, Any]:
    """A table's module and a layer, whose trained states are each other's; and their optimizer."""
    module, head = kind(ROWS, DIM), torch.nn.Linear(DIM, ROWS, bias=False)
    optimizer = make([module.weight, head.weight])
    train(optimizer, module, head)
    state = optimizer.state
    state[module.weight], state[head.weight] = state[head.weight], state[module.weight]
    return module, head, optimizer


def exchanged_with_a_plain_parameter(kind: Any, make: Any) -> Any:
    module, head, optimizer = exchanged(kind, make)
    saved = states(optimizer)
    train(optimizer, module, head)
    return saved, module.weight, head.weight, states(optimizer)


def exchanged_and_the_table_waits(kind: Any, make: Any) -> Any:
    module, head, optimizer = exchanged(kind, make)
    train(optimizer, head)
    train(optimizer, module)
    return module.weight, head.weight, states(optimizer)


def exchanged_with_a_dict_of_the_caller(kind: Any, make: Any) -> Any:
    modules = tables(kind)
    first, second = [module.weight for module in modules]
    optimizer = make([first, second])
    train(optimizer, *modules)
    state = optimizer.state
    state[second] = {name: value * 2 for name, value in state[second].items()}
    state[first], state[second] = state[second], state[first]
    train(optimizer, *modules)
    return first, second, states(optimizer)


def exchanged_before_the_first_step(kind: Any, make: Any) -> Any:
    modules = tables(kind)
    first, second = [module.weight for module in modules]
    optimizer = make([first, second])
    state = optimizer.state
    found: List[Any] = []
    if first in state:
        state[first], state[second] = state[second], state[first]
        found = [states(optimizer), state[first]["sum"].clone(), state[second]["sum"].clone()]
    train(optimizer, *modules)
    return found, first, second, states(optimizer)


EXCHANGES: List[Callable[[Any, Any], Any]] = [
    exchanged_and_another_steps, exchanged_with_a_plain_parameter, exchanged_and_the_table_waits,
    exchanged_with_a_dict_of_the_caller, exchanged_before_the_first_step,
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("case", EXCHANGES, ids=lambda case: str(case.__name__))
def test_an_exchanged_state_is_the_other_parameter_s(case: Any, make: Any) -> None:
    check(case, make)


# --- SGD has a state of momentum alone ---


def nothing_without_momentum(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(optimizer, module)
    return len(optimizer.state), optimizer.state_dict()["state"]


def all_that_there_is(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = momentum(module.parameters())
    train(optimizer, module)
    return [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]


def without_a_group(kind: Any) -> Any:
    module, head = kind(ROWS, DIM), torch.nn.Linear(DIM, ROWS)
    optimizer = torch.optim.SGD([{"params": module.parameters()}, {"params": head.parameters()}], lr=0.1)
    train(optimizer, module, head)
    optimizer.param_groups.pop(0)
    return optimizer.state_dict()


def with_another_weight(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(optimizer, module)
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    optimizer.param_groups[0]["params"] = list(module.parameters())
    train(optimizer, module)
    return module.weight, optimizer.state_dict()["state"]


def beside_the_caller_s(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for rate in (0.0, 0.9, 0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = rate
        optimizer.state[module.weight]["mine"] = module.weight.detach().clone()
        train(optimizer, module)
        found.append((plain(dict(optimizer.state[module.weight])), module.weight.detach().clone()))
    return found


PLAIN: List[Callable[[Any], Any]] = [
    nothing_without_momentum, all_that_there_is, without_a_group, with_another_weight, beside_the_caller_s,
]  # fmt: skip


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: str(case.__name__))
def test_sgd_has_what_torch_s_has(case: Any) -> None:
    check(case)


# --- What a program takes out, or sets to what it was at the beginning ---


def without_a_buffer(state: Any) -> None:
    del state["momentum_buffer"]


def popped(state: Any) -> None:
    for name in list(state):
        state.pop(name, None)


def none(state: Any) -> None:
    state["momentum_buffer"] = None


def emptied(state: Any) -> None:
    state.clear()


def zeroed(state: Any) -> None:
    for name in state:
        state[name].zero_()


def set_to_zeros(state: Any) -> None:
    for name in state:
        state[name] = torch.zeros_like(state[name])


def as_it_was_made(state: Any) -> None:
    state["sum"].fill_(0.25)
    state["step"] = torch.tensor(0.0)


def reset(kind: Any, make: Any, change: Callable[[Any], None]) -> Any:
    module = kind(ROWS, DIM)
    optimizer = make(module.parameters())
    train(optimizer, module)
    state = optimizer.state[module.weight]
    change(state)
    has = "sum" in state, "exp_avg" in state
    found = plain({name: state[name] for name in state}), len(state), has, states(optimizer)
    train(optimizer, module)
    return found, module.weight, states(optimizer)


RESETS: List[Tuple[Any, Callable[[Any], None]]] = [
    (momentum, without_a_buffer), (momentum, popped), (momentum, none), (momentum, emptied), (momentum, zeroed),
    (adam, popped), (adam, emptied), (adam, zeroed), (adam, set_to_zeros),
    (adagrad, zeroed), (adagrad, as_it_was_made), (adagrad_of_zeros, zeroed), (adagrad_of_zeros, set_to_zeros),
]  # fmt: skip


@pytest.mark.parametrize("make, change", RESETS, ids=lambda each: str(each.__name__))
def test_what_is_reset_begins_anew(make: Any, change: Any) -> None:
    check(reset, make, change)


def copied(kind: Any, make: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = make(module.parameters())
    train(optimizer, module)
    optimizer.state[module.weight] = optimizer.state[module.weight].copy()
    train(optimizer, module)
    return module.weight, states(optimizer)


@pytest.mark.parametrize("make", KINDS)
def test_a_state_s_copy_has_it_all(make: Any) -> None:
    check(copied, make)


def test_what_is_popped_is_what_was_there() -> None:
    module = ft.Embedding(ROWS, DIM)
    optimizer: Any = adam(module.parameters())
    train(optimizer, module)
    state = optimizer.state[module.weight]
    expected, other = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    assert torch.equal(state.pop("exp_avg"), expected) and "exp_avg" not in state
    assert state.pop("exp_avg", 3) == 3 and torch.equal(state["exp_avg_sq"], other)
    with pytest.raises(KeyError, match="exp_avg"):
        state.pop("exp_avg")
    with pytest.raises(KeyError, match="exp_avg"):
        del state["exp_avg"]
