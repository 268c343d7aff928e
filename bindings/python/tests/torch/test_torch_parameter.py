"""A Parameter of PyTorch that is assigned to weight, or whose module is converted: it becomes the table's, and all
references to it stay valid. Each case is compared with torch.nn."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch

import frugal
import frugal.torch as ft
from torch_support import integers, sgd, snapshot

ROWS, DIM = 10, 4
KEYS = torch.arange(ROWS)


def parameter(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((ROWS, DIM), value))


def any_parameter() -> Any:
    return parameter()


def decoder() -> torch.nn.Linear:
    return torch.nn.Linear(DIM, ROWS, bias=False)


def in_both(case: Callable[[Any], Any]) -> Tuple[Any, Any]:
    """What a case gives with each class."""
    found = []
    for kind in (torch.nn.Embedding, ft.Embedding):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(case(kind))
    return found[0], found[1]


def train(module: Any, optimizer: Any, steps: int = 3, head: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        rows = module(KEYS)
        (rows if head is None else head(rows) - torch.eye(ROWS)).square().sum().backward()
        optimizer.step()


# --- who has it ---


def written_afterwards(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), parameter()
    module.weight = given
    with torch.no_grad():
        given[3:] *= 2.0
        given.data.add_(1.0)
    return module(KEYS)


def initialized_by_a_decoder(kind: Any) -> Any:
    module, head = kind(ROWS, DIM), decoder()
    module.weight = head.weight
    torch.nn.init.normal_(head.weight, std=0.5)
    return module(KEYS), head.weight


def loaded_by_a_decoder(kind: Any) -> Any:
    module, head = kind(ROWS, DIM), decoder()
    module.weight = head.weight
    head.load_state_dict({"weight": torch.full((ROWS, DIM), 4.0)})
    return module(KEYS), head.state_dict()["weight"]


def in_a_list(kind: Any) -> Any:
    owner, module = torch.nn.ParameterList([parameter()]), kind(ROWS, DIM)
    module.weight = owner[0]
    owner.load_state_dict({"0": torch.full((ROWS, DIM), 2.0)})
    return module(KEYS), len(list(torch.nn.ModuleList([owner, module]).parameters()))


def trained_with_a_decoder(kind: Any) -> Any:
    module, head = kind(ROWS, DIM), decoder()
    module.weight = head.weight
    model = torch.nn.ModuleList([module, head])
    train(module, torch.optim.Adam(model.parameters(), lr=0.05), 20, head)
    return module(KEYS), head(module(KEYS)), len(list(model.parameters()))


def trained_by_an_optimizer_of_it(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), parameter()
    optimizer = torch.optim.SGD([given], lr=0.125)
    module.weight = given
    train(module, optimizer)
    return module(KEYS), given


def trained_before(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), parameter()
    optimizer = torch.optim.Adagrad([given], lr=0.1)
    loss: Any = given.square().sum()
    loss.backward()
    del loss
    optimizer.step()
    module.weight = given
    train(module, optimizer)
    return module(KEYS)


def of_two_modules(kind: Any) -> Any:
    modules, given = [kind(ROWS, DIM) for _ in range(2)], parameter()
    for module in modules:
        module.weight = given
    (modules[0](KEYS) + modules[1](KEYS)).sum().backward()
    torch.optim.SGD([given], lr=0.5).step()
    return [module(KEYS) for module in modules], modules[0].weight is modules[1].weight


def loaded_by_assignment(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), parameter()
    module.weight.requires_grad_(False)
    module.load_state_dict({"weight": given}, assign=True)
    frozen = given.requires_grad
    given.requires_grad_(True)
    train(module, torch.optim.SGD([given], lr=0.125))
    return module(KEYS), given, frozen, module.weight is given


def loaded_by_assignment_of_another_s(kind: Any) -> Any:
    modules = [kind(ROWS, DIM) for _ in range(2)]
    modules[1].load_state_dict(dict(modules[0].named_parameters()), assign=True)
    train(modules[0], torch.optim.Adam(modules[0].parameters(), lr=0.1))
    return [module(KEYS) for module in modules], modules[0].weight is modules[1].weight


def loaded_by_assignment_of_its_own(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    weight, optimizer = module.weight, torch.optim.SGD(module.parameters(), lr=0.125)
    module.load_state_dict(module.state_dict(keep_vars=True), assign=True)
    train(module, optimizer)
    return module(KEYS), module.weight is weight


def frozen_by_a_decoder(kind: Any) -> Any:
    module, head = kind(ROWS, DIM), decoder()
    module.weight = head.weight
    head.requires_grad_(False)
    return module(KEYS).requires_grad, module.weight.requires_grad


def with_a_gradient(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), parameter()
    loss: Any = given.square().sum()
    loss.backward()
    del loss
    module.weight = given
    module(KEYS[:3]).sum().backward()
    found = given.grad.clone()  # type: ignore[union-attr]
    torch.optim.SGD([given], lr=0.5).step()
    return found, module(KEYS)


def with_a_hook(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), any_parameter()
    handle = given.register_hook(lambda grad: grad * 2)
    module.weight = given
    module(KEYS).sum().backward()
    first = given.grad.clone()
    handle.remove()
    module(KEYS).sum().backward()
    return first, given.grad


def of_half_precision(kind: Any) -> Any:
    module, given = kind(ROWS, DIM), torch.nn.Parameter(torch.ones(ROWS, DIM, dtype=torch.float16))
    module.weight = given
    return module(KEYS), given, given.dtype == torch.float16


def of_a_view_of_itself(kind: Any) -> Any:
    module = kind(ROWS, DIM)
    views: List[Callable[[Any], Any]] = [lambda w: w[:], lambda w: w.view(ROWS, DIM), lambda w: w.data[:ROWS]]
    for view in views:
        module.weight = torch.nn.Parameter(view(module.weight))
    train(module, torch.optim.SGD(module.parameters(), lr=0.125))
    return module(KEYS)


def tied_to_a_layer_with_sparse_gradients(kind: Any) -> Any:
    module, other = kind(ROWS, DIM, sparse=True), torch.nn.Embedding(ROWS, DIM, sparse=True)
    other.weight = module.weight
    (module(KEYS[:4]) + other(torch.tensor([7, 7, 1, 0]))).square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.125).step()
    return module(KEYS), other(KEYS)


HAVE: List[Callable[[Any], Any]] = [
    of_a_view_of_itself, tied_to_a_layer_with_sparse_gradients,
    written_afterwards, initialized_by_a_decoder, loaded_by_a_decoder, in_a_list, trained_with_a_decoder,
    trained_by_an_optimizer_of_it, trained_before, of_two_modules, frozen_by_a_decoder, with_a_gradient, with_a_hook,
    loaded_by_assignment, loaded_by_assignment_of_another_s, loaded_by_assignment_of_its_own,
    of_half_precision,
]  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("case", HAVE, ids=lambda case: str(case.__name__))
def test_whoever_has_the_parameter_has_the_table_s(case: Callable[[Any], Any]) -> None:
    theirs, ours = in_both(lambda kind: plain(case(kind)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- what it takes the place of ---


def weight_of(module: Any) -> Any:
    return module.weight


BEFORE: Dict[str, Callable[[Any], Any]] = {
    "weight": weight_of,
    "data": lambda m: m.weight.data,
    "named_parameters": lambda m: dict(m.named_parameters())["weight"],
}


@pytest.mark.parametrize("kept", BEFORE)
@pytest.mark.parametrize("trained", [False, True])
def test_the_parameter_of_before_keeps_its_rows(kept: str, trained: bool) -> None:
    def case(kind: Any) -> Any:
        module = kind.from_pretrained(torch.full((ROWS, DIM), 2.0), freeze=False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
        if trained:
            train(module, optimizer)
        before = BEFORE[kept](module)
        module.weight = torch.nn.Parameter(torch.zeros(ROWS, DIM), requires_grad=False)
        averaged = plain(module(KEYS))
        if isinstance(before, torch.nn.Parameter):
            module.weight = before
            train(module, optimizer)
        return averaged, before, module(KEYS)

    theirs, ours = in_both(lambda kind: plain(case(kind)))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def test_tables_of_parameters_of_before_go(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    for i in range(5):
        module.weight = parameter(float(i))
    gc.collect()
    module(KEYS)
    assert len(trainer.engine.tables()) == 1 and torch.equal(module.weight, parameter(4.0))


def test_threads_use_a_module_whose_weight_is_assigned(trainer: frugal.Trainer) -> None:
    module, over, failed = ft.Embedding(ROWS, DIM, trainer=trainer), threading.Event(), []
    uses: List[Callable[[], Any]] = [
        lambda: module(KEYS), lambda: module(KEYS).sum().backward(), lambda: module.weight.clone(), module.state_dict,
    ]  # fmt: skip

    def use(one: Callable[[], Any]) -> None:
        while not over.is_set():
            try:
                one()
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=use, args=(one,)) for one in uses]
    for thread in threads:
        thread.start()
    for i in range(60):
        module.weight = parameter(float(i))
    over.set()
    for thread in threads:
        thread.join()
    assert not failed and torch.equal(snapshot(module), torch.full((ROWS, DIM), 59.0))


def test_a_table_that_stays_is_the_new_parameter_s(trainer: frugal.Trainer) -> None:
    """One with a name: the parameter of before has no rows, and says so."""
    module = ft.Embedding(ROWS, DIM, trainer=trainer, name="kept")
    before, given = module.weight, any_parameter()
    optimizer = torch.optim.SGD([before], lr=0.5)
    module.weight = given
    with torch.no_grad():
        given += 1.0
    assert module.table.name == "kept" and torch.equal(snapshot(module), torch.full((ROWS, DIM), 2.0))
    module(KEYS).sum().backward()
    for use in (optimizer.step, lambda: before + 1, lambda: before.data):
        with pytest.raises(RuntimeError, match="'kept'.*another Parameter.*make optimizers after"):
            use()
    torch.optim.SGD([given], lr=0.5).step()
    assert torch.equal(snapshot(module), torch.full((ROWS, DIM), 1.5))


# --- an optimizer's state that is moved to another parameter ---


def replaced_in_the_optimizer(kind: Any, make: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = make(module.parameters())
    train(module, optimizer)
    state = optimizer.state.pop(module.weight)
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = module.weight
    optimizer.state[module.weight] = state
    train(module, optimizer)
    (saved,) = optimizer.state_dict()["state"].values()
    return module(KEYS), saved


def replaced_with_other_moments(kind: Any, make: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = make(module.parameters())
    train(module, optimizer)
    state = optimizer.state.pop(module.weight)
    for name, value in list(state.items()):
        if name != "step":
            state[name] = torch.full_like(value, 0.5)
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = module.weight
    optimizer.state[module.weight] = state
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    train(module, optimizer)
    return module(KEYS), list(saved.values()), list(optimizer.state_dict()["state"].values())


def exchanged(kind: Any, make: Any) -> Any:
    modules = [kind(ROWS, DIM) for _ in range(2)]
    first, second = [module.weight for module in modules]
    optimizer = make([first, second])
    for seed in range(4):
        torch.manual_seed(seed)
        for module in modules:
            (module(KEYS) * torch.randn(ROWS, DIM)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if seed == 1:
            state = optimizer.state
            state[first], state[second] = state[second], state[first]
    return [module(KEYS) for module in modules], list(optimizer.state_dict()["state"].values())


def given_to_a_plain_parameter(kind: Any, make: Any) -> Any:
    module = kind(ROWS, DIM)
    optimizer = make(module.parameters())
    train(module, optimizer)
    given: Any = torch.nn.Parameter(module.weight.detach().clone())
    optimizer.state[given] = optimizer.state.pop(module.weight)
    optimizer.param_groups[0]["params"][0] = given
    for _ in range(3):
        given.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return given


MOVES: List[Callable[[Any, Any], Any]] = [
    replaced_in_the_optimizer, replaced_with_other_moments, exchanged, given_to_a_plain_parameter,
]  # fmt: skip
OPTIMIZERS: Dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", MOVES, ids=lambda case: str(case.__name__))
def test_state_that_is_moved_is_the_other_parameter_s(case: Callable[[Any, Any], Any], optimizer: str) -> None:
    def plainly(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plainly(each) for name, each in value.items()}
        return [plainly(each) for each in value] if isinstance(value, (list, tuple)) else plain(value)

    theirs, ours = in_both(lambda kind: plainly(case(kind, OPTIMIZERS[optimizer])))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# --- what cannot be a table's ---


def in_a_graph(module: Any, given: Any) -> None:
    output = given.square().sum()
    module.weight = given
    output.backward()


def known_weakly(module: Any, given: Any) -> None:
    import weakref

    known = weakref.ref(given)
    module.weight = given
    assert known() is None


def with_a_hook_of_accumulated_gradients(module: Any, given: Any) -> None:
    given.register_post_accumulate_grad_hook(lambda p: None)
    module.weight = given


def of_another_class(module: Any, given: Any) -> None:
    class Mine(torch.nn.Parameter):
        pass

    module.weight = Mine(given.detach())


REFUSED: Dict[Callable[[Any, Any], None], str] = {
    known_weakly: "in use.*weakref",
    with_a_hook_of_accumulated_gradients: "has a hook.*register it with module.weight afterwards",
    of_another_class: "a Mine cannot be its weight: give it a torch.nn.Parameter",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case.__name__))
def test_what_cannot_be_a_table_s_is_refused_and_nothing_changes(trainer: frugal.Trainer, case: Any) -> None:
    module, given = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd()), parameter(3.0)
    before, rows, tables = module.weight, snapshot(module), len(trainer.engine.tables())
    with pytest.raises((NotImplementedError, RuntimeError), match=REFUSED[case]):
        case(module, given)
    gc.collect()
    assert module.weight is before and torch.equal(snapshot(module), rows) and torch.equal(given, parameter(3.0))
    assert type(given) is torch.nn.Parameter
    before.requires_grad_(True)
    module(KEYS).sum().backward()
    torch.optim.SGD([before], lr=0.5).step()
    assert torch.equal(snapshot(module), rows - 0.5) and len(trainer.engine.tables()) == tables


def test_a_graph_of_before_has_the_parameter_no_more(trainer: frugal.Trainer) -> None:
    with pytest.raises(RuntimeError, match="AccumulateGrad"):
        in_a_graph(ft.Embedding(ROWS, DIM, trainer=trainer), parameter())


# --- convert ---


def tied_outside(convert: bool) -> Any:
    table, head = torch.nn.Embedding(ROWS, DIM), decoder()
    head.weight = table.weight
    encoder: Any = torch.nn.Sequential(table)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.05)
    train(encoder, optimizer, 5, head)
    if convert:
        ft.convert(encoder)
        assert isinstance(encoder[0], ft.Embedding) and encoder[0].weight is head.weight
    train(encoder, optimizer, 5, head)
    return encoder(KEYS), head.weight


def with_hooks(convert: bool) -> Any:
    table: Any = torch.nn.Embedding(ROWS, DIM)
    handle = table.weight.register_hook(lambda grad: grad * 3)
    table(KEYS).sum().backward()
    if convert:
        ft.convert(torch.nn.Sequential(table))
    table(KEYS[:2]).sum().backward()
    handle.remove()
    table(KEYS[:1]).sum().backward()
    return table.weight.grad


def of_two_optimizers(convert: bool) -> Any:
    table = torch.nn.Embedding(ROWS, DIM)
    optimizers = [torch.optim.Adagrad(table.parameters(), lr=0.1), torch.optim.SGD(table.parameters(), lr=0.1)]
    train(table, optimizers[0])
    if convert:
        ft.convert(torch.nn.Sequential(table))
    for optimizer in optimizers:
        train(table, optimizer)
    return table(KEYS)


@pytest.mark.parametrize("case", [tied_outside, with_hooks, of_two_optimizers], ids=lambda case: str(case.__name__))
def test_convert_keeps_the_parameter(case: Callable[[bool], Any]) -> None:
    found = []
    for convert in (False, True):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(plain(case(convert)))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-5)


class Mixin:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Named(Mixin, torch.nn.Embedding):
    def __init__(self, rows: int, name: str) -> None:
        super().__init__(rows, DIM)
        self.called = name


def test_convert_keeps_the_class_for_isinstance() -> None:
    model: Any = torch.nn.Sequential(Named(ROWS, "a name"))
    rows = snapshot(model[0])
    ft.convert(model)
    assert isinstance(model[0], ft.Embedding) and isinstance(model[0], Named) and model[0].called == "a name"
    assert torch.equal(model(KEYS), rows) and type(model[0]).__name__ == "Named"


def test_convert_of_what_has_a_table_s_weight() -> None:
    table, other = ft.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM)
    other.weight = table.weight
    ft.convert(torch.nn.ModuleList([table, other]))
    assert isinstance(other, ft.Embedding) and other.weight is table.weight
    (table(KEYS) + other(KEYS)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.5).step()
    assert torch.equal(table(KEYS), other(KEYS))


def test_convert_of_a_parameter_of_another_class_replaces_nothing() -> None:
    class Mine(torch.nn.Parameter):
        __slots__ = ("more",)

    model: Any = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM))
    model[1].weight = Mine(torch.ones(ROWS, DIM))
    with pytest.raises(NotImplementedError, match="^1: its weight is a Mine.*give the module a torch.nn.Parameter"):
        ft.convert(model)
    assert type(model[0]) is type(model[1]) is torch.nn.Embedding and type(model[1].weight) is Mine


def test_a_part_of_the_rows_makes_another_module(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    with pytest.raises(ValueError, match="from_pretrained"):
        module.weight = torch.nn.Parameter(module.weight[:5])


def test_convert_of_a_weight_in_use_replaces_nothing() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM))
    import weakref

    known = weakref.ref(model[1].weight)
    with pytest.raises(RuntimeError, match="^1: its weight is in use"):
        ft.convert(model)
    assert type(model[0]) is type(model[1]) is torch.nn.Embedding and known() is model[1].weight
    weight = model[0].weight
    del known
    ft.convert(model)
    assert model[0].weight is weight and torch.equal(weight, integers(1, 1) * 0 + weight)
