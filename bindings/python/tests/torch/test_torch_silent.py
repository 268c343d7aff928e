"""What would pass without a word and differ from torch.nn: each is torch's, or an error that says what to do."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack
from torch_support import DIM, ROWS, bag_pair, integers, sgd, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _computed, _hook

KEYS = torch.tensor([[1, 2], [3, 4]])


def embedding(trainer: frugal.Trainer, **arguments: Any) -> ft.Embedding:
    return ft.Embedding(ROWS, DIM, trainer=trainer, **arguments)


# --- the gradient of a new parameter ---


def test_a_new_parameter_has_its_own_gradient(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM))
    for bags in (ours, theirs):
        bags(KEYS).sum().backward()
        bags.weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
        assert bags.weight.grad is None
        given = torch.nn.Parameter(torch.ones(ROWS, DIM))
        given.grad = torch.full((ROWS, DIM), 2.0)
        bags.weight = given
        torch.optim.SGD(bags.parameters(), lr=1.0).step()
    assert torch.equal(snapshot(ours), snapshot(theirs))


# --- writes to the parameter that stands for a table ---

LOOKS: Dict[str, Callable[[ft.Embedding], Any]] = {
    "training forward": lambda m: m(KEYS),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.zeros(ROWS, DIM)}),
    "weight": lambda m: m.weight,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_write_to_the_parameter_s_memory_is_found(
    trainer: frugal.Trainer, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an extension in C++ does, which knows nothing of rows, where PyTorch is too old to refuse it."""
    monkeypatch.setattr(_computed, "_set_data_message", None)
    table = embedding(trainer)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.copy_(table.weight, torch.ones(1))
    with pytest.raises(NotImplementedError, match="changes no row"):
        LOOKS[look](table)
    LOOKS[look](table)  # told once


def data_of(weight: Any) -> torch.Tensor:
    other = torch.zeros(1)
    other.data = weight
    return other.sum()


def shared_memory_of(weight: Any) -> torch.Tensor:
    other = torch.zeros(1)
    other.data = weight
    return other.add_(1)


IN_CPP: Dict[str, Callable[[Any], Any]] = {
    "tensor": lambda w: torch.tensor(w),
    "Tensor": lambda w: torch.Tensor(w).sum(),
    "grad": lambda w: torch.func.grad(lambda x: x.sum())(w),
    "jacrev": lambda w: torch.func.jacrev(lambda x: x.sum())(w),
    "jvp": lambda w: torch.func.jvp(lambda x: x.sum(), (w,), (w,)),
    "functionalize": lambda w: torch.func.functionalize(lambda x: x.sum())(w),
    "data": data_of,
    "shared": shared_memory_of,
    "written": lambda w: torch.Tensor.copy_(w, torch.ones(1)),
    "added": lambda w: torch.ones(2, 2).add_(w),
    "indexed": lambda w: torch.ones(2, 2).index_put_((torch.tensor([0]),), w),
    "each": lambda w: torch._foreach_mul_([w], 2.0),
    "multiplied": lambda w: torch.ones(2, 1) @ w,
    "storage": lambda w: w.untyped_storage().fill_(0),
    "number": lambda w: w.item(),
}
PASSED_ON = {"grad", "jacrev", "jvp", "functionalize", "tensor", "Tensor", "data", "shared"}  # which ask no subclass


@pytest.mark.skipif(_computed._set_data_message is None, reason="PyTorch is too old")
@pytest.mark.parametrize("how", IN_CPP)
def test_the_parameter_has_no_memory_for_what_asks_no_subclass(trainer: frugal.Trainer, how: str) -> None:
    """Nothing sees, or writes, the one element that stands for the table in PyTorch's C++."""
    table = embedding(trainer)
    rows = table.weight.detach().clone()
    no_subclass = contextlib.nullcontext() if how in PASSED_ON else torch._C.DisableTorchFunctionSubclass()
    with warnings.catch_warnings(), torch.set_grad_enabled(how in PASSED_ON):
        warnings.simplefilter("ignore")  # torch.tensor() of a tensor
        with pytest.raises(RuntimeError, match=r"give .*module\.weight\.clone\(\)"), no_subclass:
            IN_CPP[how](table.weight)
    assert torch.equal(table.weight, rows)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    rows[1] -= 1
    assert torch.equal(table.weight, rows)


def test_what_asks_where_memory_is_gets_an_answer(trainer: frugal.Trainer) -> None:
    """PyTorch ends the process where it asks a storage without memory whether it is shared."""
    table = embedding(trainer)
    table(torch.tensor([1])).sum().backward()
    weight: Any = table.weight
    for value in (weight, weight.detach(), weight.grad, weight.grad.detach()):
        assert not value.is_shared() and not value.is_pinned()
        with pytest.raises(RuntimeError, match="has no memory of its own"):
            value.untyped_storage()
    assert not torch.Tensor.is_shared(weight) and not torch.Tensor.is_pinned(weight)


class Squares(torch.autograd.Function):
    """Which computes the gradient of its input by itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight.clone())
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return torch.mul(weight, grad).mul_(2.0)


@pytest.fixture(params=[False, True])
def alone(request: Any, tmp_path: Path) -> Iterator[None]:
    """Without torch.distributed, and as its only rank, where a reducer may ask for the gradient, too."""
    if request.param:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


def into_others(module: Any) -> List[torch.Tensor]:
    grad = module.weight.grad
    copies = [torch.ones(ROWS, DIM).copy_(each) for each in (grad, grad.clone(), grad * 2, grad.data)]
    grad.copy_(torch.full((ROWS, DIM), 0.5))
    return [*copies, torch.ones(ROWS, DIM, dtype=torch.float64).copy_(grad), module.weight.grad.to_dense()]


def of_itself(module: Any) -> List[torch.Tensor]:
    found: List[torch.Tensor] = []
    for call in (module.weight.backward, lambda: torch.autograd.grad(module.weight, module.weight)):
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            call()
    module.zero_grad()
    ones = torch.ones(ROWS, DIM)
    found += torch.autograd.grad([module.weight], [module.weight], [ones])
    module.weight.backward(ones)
    torch.autograd.backward([module.weight, module.weight.sum()], [2 * ones, None])
    return [*found, module.weight.grad.to_dense()]


@pytest.mark.parametrize("use", [into_others, of_itself])
def test_gradients_of_a_rank_that_is_alone(alone: None, trainer: frugal.Trainer, use: Callable[[Any], Any]) -> None:
    modules: List[Any] = [ft.Embedding(ROWS, DIM, trainer=trainer), torch.nn.Embedding(ROWS, DIM)]
    modules[1].weight.data.copy_(modules[0].weight)
    found = []
    for module in modules:
        module(KEYS).square().sum().backward()
        found.append(use(module))
    for mine, expected in zip(*found):
        torch.testing.assert_close(mine, expected)


def test_a_function_that_has_got_the_parameter_trains_or_is_an_error(alone: None, trainer: frugal.Trainer) -> None:
    table = embedding(trainer)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    rows = snapshot(table)
    in_cpp: Any = super(torch.autograd.function._SingleLevelFunction, Squares).apply  # as an extension's
    in_cpp(table.weight).backward()
    with pytest.raises(NotImplementedError, match="give it rows, module.weight.clone"):
        optimizer.step()
    for form in (lambda weight: weight, torch.Tensor.clone):
        optimizer.zero_grad()
        Squares.apply(form(table.weight)).backward()
        optimizer.step()
        rows = -rows
        torch.testing.assert_close(snapshot(table), rows)


def test_a_number_of_rows_is_written_in_a_form(trainer: frugal.Trainer) -> None:
    table: Any = embedding(trainer)
    table(KEYS).sum().backward()
    for number in (table.weight[0, 0], table.weight.data[1, 1], table.weight.detach()[2, 0], table.weight.grad[1, 0]):
        assert f"{number.detach():.3f}" == f"{number.item():.3f}" == f"{number:.3f}"


# --- parameters as scripts use them ---


def two_of_each(trainer: frugal.Trainer) -> List[List[Any]]:
    """Two modules of this package, and two of torch.nn with the same rows."""
    weights = [integers(ROWS, DIM), integers(ROWS, DIM)]
    ours: List[Any] = [ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer) for weight in weights]
    return [ours, [torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()) for weight in weights]]


def parameter_of(module: Any) -> Any:
    return next(module.parameters())


GIVES: Dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda p, q: setattr(q, "grad", p.grad),
    "_grad": lambda p, q: setattr(q, "_grad", p.grad),
    "clone": lambda p, q: setattr(q, "grad", p.grad.clone()),
    "scaled": lambda p, q: setattr(q, "grad", p.grad * 0.5),
}


@pytest.mark.parametrize("give", GIVES)
def test_a_gradient_that_is_given_to_another_table_trains_that_one(trainer: frugal.Trainer, give: str) -> None:
    """As a worker's gradients are given to the model that all share."""
    found = []
    for worker, shared in two_of_each(trainer):
        worker(KEYS).square().sum().backward()
        GIVES[give](parameter_of(worker), parameter_of(shared))
        torch.optim.SGD(shared.parameters(), lr=0.5).step()
        found.append((snapshot(worker), snapshot(shared)))
    for mine, expected in zip(*found):
        assert torch.equal(mine, expected)
    larger: Any = ft.Embedding(ROWS + 1, DIM, trainer=trainer)
    worker = ft.Embedding(ROWS, DIM, trainer=trainer)
    worker(KEYS).sum().backward()
    with pytest.raises(RuntimeError, match="different size"):
        larger.weight.grad = parameter_of(worker).grad


@pytest.mark.parametrize("by", ["parameter", "weight"])
def test_data_that_was_kept_has_the_rows_of_before_an_assignment(trainer: frugal.Trainer, by: str) -> None:
    """As a moving average's backup has, while its own rows are evaluated."""
    found = []
    for one, other in two_of_each(trainer):
        p, q = ((m.weight if by == "weight" else parameter_of(m)) for m in (one, other))
        before = snapshot(one)
        backup = p.data
        p.data = torch.ones(ROWS, DIM)
        evaluated = snapshot(one)
        assert torch.equal(backup, before) and torch.equal(backup[2], before[2]) and torch.equal(backup * 2, before * 2)
        p.data = backup
        p.data, q.data = q.data, p.data
        swapped = snapshot(one), snapshot(other)
        one(KEYS).sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.5).step()
        found.append((evaluated, *swapped, snapshot(one), snapshot(other)))
    for mine, expected in zip(*found):
        assert torch.equal(mine, expected)


def test_data_that_is_dropped_is_not_remembered(trainer: frugal.Trainer) -> None:
    table = embedding(trainer)
    for _ in range(100):
        table.weight.data.clamp_(-1.0, 1.0)
    assert not table._table.shown


@pytest.mark.parametrize("what", ["another's", "its own"])
def test_what_is_put_among_a_module_s_parameters_is_saved_and_loaded(trainer: frugal.Trainer, what: str) -> None:
    found = []
    for one, other in two_of_each(trainer):
        own = torch.nn.Parameter(torch.full((ROWS, DIM), 3.0))
        one._parameters["weight"] = other._parameters["weight"] if what == "another's" else own
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        one(KEYS).sum().backward()
        optimizer.step()
        saved = {name: value.clone() for name, value in one.state_dict().items()}
        one.load_state_dict({"weight": 2 * saved["weight"]})
        found.append((saved["weight"], one(KEYS).detach(), snapshot(other), one.state_dict()["weight"].clone()))
    for mine, expected in zip(*found):
        assert torch.equal(mine, expected)


def test_what_is_no_parameter_or_of_another_dtype_is_not_assigned(trainer: frugal.Trainer) -> None:
    for module in (embedding(trainer), torch.nn.Embedding(ROWS, DIM)):
        before = module.weight.detach().clone()
        for value in (torch.zeros(ROWS, DIM), module.weight * 0.5, module.weight.data):
            message = r"cannot assign 'torch.*Tensor' as parameter 'weight' \(torch.nn.Parameter"
            with pytest.raises(TypeError, match=message):
                module.weight = value
        with pytest.raises(RuntimeError, match="data of a different type|grad_dtype"):  # which newer ones name
            parameter_of(module).grad = torch.ones(ROWS, DIM, dtype=torch.float64)
        assert torch.equal(module.weight, before) and parameter_of(module).grad is None


@pytest.mark.parametrize("how", ["weight", "register_parameter"])
def test_a_parameter_that_is_assigned_is_shared(trainer: frugal.Trainer, how: str) -> None:
    for one, other in two_of_each(trainer):
        if how == "weight":
            one.weight = parameter_of(other)
        else:
            one.register_parameter("weight", parameter_of(other))
        with torch.no_grad():
            other.weight.fill_(5.0)
        assert torch.equal(snapshot(one), torch.full((ROWS, DIM), 5.0))


def test_a_gradient_has_its_rows_shape(trainer: frugal.Trainer) -> None:
    (ours, _), (theirs, _) = two_of_each(trainer)
    found = []
    for bags in (ours, theirs):
        parameter = parameter_of(bags)
        loss = bags(KEYS).square().sum()
        (alone,) = torch.autograd.grad(loss, [parameter], retain_graph=True)
        loss.backward()
        grad = parameter.grad
        assert grad.shape == parameter.shape == alone.shape == grad.size() and grad.size(1) == DIM
        found.append([grad.norm() / grad.numel() ** 0.5, grad.abs().sum() / grad.nelement(), grad.norm(2, dim=(0, 1))])
        assert torch.equal(torch.zeros_like(grad), torch.zeros(ROWS, DIM))
        with pytest.raises(RuntimeError, match="size"):
            parameter.grad = torch.ones(1, 1)
    torch.testing.assert_close(*found)


def test_a_gradient_of_a_table_of_one_element_is_assigned(trainer: frugal.Trainer) -> None:
    for module in (ft.Embedding(1, 1, trainer=trainer), torch.nn.Embedding(1, 1)):
        before = snapshot(module)
        parameter_of(module).grad = torch.full((1, 1), 0.5)
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        torch.testing.assert_close(snapshot(module), before - 0.5)


def test_what_is_noted_at_a_weight_is_noted_at_its_parameter(trainer: frugal.Trainer) -> None:
    for one, other in two_of_each(trainer):
        one.weight._no_weight_decay = True
        parameter_of(other).rate = 0.5
        assert parameter_of(one)._no_weight_decay and other.weight.rate == 0.5
        assert not hasattr(other.weight, "_no_weight_decay")
        one.double()
        assert one.weight._no_weight_decay and parameter_of(one)._no_weight_decay


def test_a_copy_of_a_tied_layer_has_a_parameter(trainer: frugal.Trainer) -> None:
    for one, _ in two_of_each(trainer):
        layer = torch.nn.Linear(DIM, ROWS, bias=False)
        layer.weight = one.weight
        for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert isinstance(made.weight, torch.nn.Parameter) and made.weight.requires_grad
            assert torch.equal(made.weight, one.weight)
            assert [name for name, _ in made.named_parameters()] == ["weight"]


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.full((ROWS, DIM), 0.25), torch.zeros(1)])
def test_a_gradient_is_overwritten_by_copy(trainer: frugal.Trainer, value: torch.Tensor) -> None:
    (ours, _), (theirs, _) = two_of_each(trainer)
    for module in (ours, theirs):
        module(KEYS).square().sum().backward()
        parameter_of(module).grad.copy_(value)
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert torch.equal(snapshot(ours), snapshot(theirs))


DATA_WRITES: Dict[str, Callable[[Any], Any]] = {
    "row": lambda m: m.weight.data.__setitem__(0, 0.0),
    "assigned": lambda m: setattr(m.weight, "data", torch.nn.functional.normalize(m.weight.data)),
    "clamped": lambda m: m.weight.data.clamp_(-1.0, 1.0),
    "parameter": lambda m: parameter_of(m).data.mul_(0.5),
}


@pytest.mark.parametrize("write", DATA_WRITES)
def test_writes_through_data_do_not_stop_a_backward(trainer: frugal.Trainer, write: str) -> None:
    """As torch's do not: the second forward of a step writes before the backward of the first."""
    ours, theirs = two_of_each(trainer)
    for one, _ in (ours, theirs):
        total = 0.0
        for _ in range(2):
            DATA_WRITES[write](one)
            total = total + (one(KEYS) @ one.weight.t()).sum()
        total.backward()  # type: ignore[attr-defined]


# --- gradients that are set by data ---


@pytest.mark.parametrize("how", ["parameter", "weight", "sparse weight", "zeros"])
def test_gradients_are_set_by_their_data(trainer: frugal.Trainer, how: str) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), sparse=how == "sparse weight")
    both: List[Any] = [ours, theirs]
    for bags in both:
        optimizer = torch.optim.SGD(bags.parameters(), lr=1.0)
        bags(KEYS).sum().backward()
        if "weight" in how:
            bags.weight.grad.data = bags.weight.grad.data / 4
        else:
            for parameter in bags.parameters():
                grad: Any = parameter.grad
                if how == "zeros":
                    grad.data = grad.data * 0
                else:
                    grad.data = grad.data / 4
        optimizer.step()
    assert torch.equal(snapshot(ours), snapshot(theirs))


def test_data_of_a_gradient_that_is_another_s_is_copied(trainer: frugal.Trainer) -> None:
    table: Any = embedding(trainer)
    other: Any = embedding(trainer)
    (table(KEYS).sum() + 3.0 * other(KEYS).sum()).backward()
    grad: Any = table.weight.grad
    grad.data = other.weight.grad
    assert table.weight.grad is grad and torch.equal(table.weight.grad, other.weight.grad)
    with pytest.raises(RuntimeError, match="size"):
        grad.data = torch.ones(1)
    with pytest.raises(RuntimeError, match="size"):
        table.weight.grad.data = torch.ones(2, 2)


@pytest.mark.parametrize("way", ["optimizer", "model"])
def test_a_step_that_is_never_made_is_warned_of(trainer: frugal.Trainer, way: str) -> None:
    """Also where gradients are dropped before each backward, so that nothing piles up."""
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        for _ in range(1200):
            (optimizer if way == "optimizer" else module).zero_grad()
            module(KEYS.view(1, -1)).sum().backward()
    assert len(met) == 1 and "no optimizer" in str(met[0].message)


def test_steps_by_hand_are_not_warned_of(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    (parameter,) = module.parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(600):
            module.zero_grad()
            module(KEYS.view(1, -1)).sum().backward()
            parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]


def test_what_torch_s_optimizers_have_no_word_for_stays_the_table_s(trainer: frugal.Trainer) -> None:
    given: List[Tuple[Dict[str, Any], float]] = [
        ({"clip_value": 0.01}, 0.01), ({"clip_norm": 0.01}, 0.01 / DIM**0.5), ({"weight_bound": 0.25}, 0.25),
    ]  # fmt: skip
    for more, moved in given:
        module = ft.Embedding(ROWS, DIM, _weight=torch.zeros(ROWS, DIM), optimizer=frugal.SGD(**more), trainer=trainer)
        for lr, rows in ((1.0, 1), (2.0, 2)):
            optimizer = torch.optim.SGD(module.parameters(), lr=lr)
            module(torch.tensor([rows])).sum().backward()
            optimizer.step()
            expected = -min(lr, 0.25) if "weight_bound" in more else -lr * moved
            torch.testing.assert_close(module.weight[rows].detach(), torch.full((DIM,), expected))
            optimizer.zero_grad()


def test_rows_are_no_complex_numbers(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    with pytest.raises(NotImplementedError, match="real"):
        module.to(torch.complex64)
    assert module(KEYS).dtype == torch.float32


def test_another_kind_of_optimizer_is_said_in_words(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, optimizer=frugal.RowWiseAdagrad(), trainer=trainer)
    module.weight.data.mul_(2.0)
    optimizer = torch.optim.Adam(module.parameters())
    module(KEYS).sum().backward()
    with pytest.raises(frugal.InvalidArgument, match="RowWiseAdagrad, and Adam cannot step it.*without optimizer="):
        optimizer.step()


def test_a_hyper_parameter_that_no_table_takes_is_said_in_words(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    for optimizer in (torch.optim.Adagrad, torch.optim.Adam):
        module(KEYS).sum().backward()
        with pytest.raises(frugal.InvalidArgument, match=r"optimizer\.eps"):
            optimizer(module.parameters(), eps=0.0).step()


def test_what_a_second_module_says_of_a_table_is_warned_of(trainer: frugal.Trainer) -> None:
    ft.Embedding(ROWS, DIM, name="found", trainer=trainer)
    with pytest.warns(UserWarning, match=r"'found'.*init=.*nan_policy='skip'"):
        ft.Embedding(ROWS, DIM, name="found", nan_policy="skip", init=frugal.Uniform(5, 6), trainer=trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ft.Embedding(ROWS, DIM, name="found", trainer=trainer)


def test_what_serves_a_module_is_named(trainer: frugal.Trainer) -> None:
    hashed = ft.Embedding(ROWS, DIM, hashed=True, trainer=trainer)
    hashed(KEYS).sum().backward()
    bags = ft.EmbeddingBag(ROWS, DIM, trainer=trainer)
    for module, name in ((hashed, "Embedding"), (bags, "EmbeddingBag")):
        for strict in (False, True):
            with pytest.raises(Exception, match=rf"torch\.nn\.{name}\.from_pretrained"):
                torch.export.export(torch.nn.Sequential(module), (KEYS.view(1, -1),), strict=strict)


def test_a_step_that_would_be_differentiated_is_refused(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, differentiable=True)
    module(KEYS).sum().backward()
    with pytest.raises(NotImplementedError, match="differentiable"):
        optimizer.step()


# --- steps of gradients that are zeros ---

ZEROS: Dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.3),
}


@pytest.mark.parametrize("kind", ZEROS)
def test_a_step_of_zeros_counts(trainer: frugal.Trainer, kind: str) -> None:
    weight = integers(ROWS, DIM)
    ours, theirs = bag_pair(trainer, weight, mode="sum", sparse=kind == "SparseAdam")
    other, others = bag_pair(trainer, weight, mode="sum", sparse=kind == "SparseAdam")
    for used, now_and_then in ((ours, other), (theirs, others)):
        optimizer = ZEROS[kind]([*used.parameters(), *now_and_then.parameters()])
        for i in range(7):
            optimizer.zero_grad(set_to_none=False)
            out = used(KEYS)
            if i % 3 == 1:
                out = out + now_and_then(KEYS)
            out.pow(2).sum().backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        states = [optimizer.state[p]["step"] for m in (used, now_and_then) for p in m.parameters()]
        assert [int(step) for step in states] == [8, 7]
    for one, two in ((ours, theirs), (other, others)):
        torch.testing.assert_close(snapshot(one), snapshot(two), rtol=1e-5, atol=1e-6)


# --- weight decay ---


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_one_warning_says_which_rows_decay(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(_hook, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lr in (0.1, 0.2):
            table = embedding(trainer)
            optimizer = kind(table.parameters(), lr=lr, weight_decay=0.5)
            table(KEYS).sum().backward()
            optimizer.step()
    assert sum("in the steps that have a gradient of it" in str(w.message) for w in caught) == 1


# --- derivatives of per_sample_weights ---

SECOND: Dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jvp": lambda f, w: torch.autograd.functional.jvp(f, w, w),
    "hvp": lambda f, w: torch.autograd.functional.hvp(lambda w: f(w).pow(2).sum(), w, w),
    "hessian": lambda f, w: torch.autograd.functional.hessian(lambda w: f(w).pow(2).sum(), w),
    "dual": lambda f, w: f(forward_ad.make_dual(w, w)),
}


@pytest.mark.parametrize("how", SECOND)
def test_derivatives_that_torch_has_not_are_refused(trainer: frugal.Trainer, how: str) -> None:
    for bags in bag_pair(trainer, integers(ROWS, DIM), mode="sum"):
        bags.requires_grad_(False)
        with forward_ad.dual_level():
            with pytest.raises(RuntimeError):
                SECOND[how](lambda w, bags=bags: bags(KEYS, per_sample_weights=w), torch.ones(2, 2))


# --- convert ---


def test_convert_leaves_no_copy_behind() -> None:
    """Where a model has a module elsewhere too, it is the module that is trained."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = torch.nn.ModuleList([torch.nn.Embedding(8, 4), torch.nn.EmbeddingBag(8, 4, mode="sum")])
            self.by_name = {"rows": self.tables[0], "bags": self.tables[1]}

        def forward(self, ids: torch.Tensor) -> Any:
            return self.by_name["rows"](ids).sum(1) + self.by_name["bags"](ids)

    torch.manual_seed(1)
    theirs = Net()
    ours = Net()
    ours.load_state_dict(theirs.state_dict())
    inside = list(ours.tables)
    assert ft.convert(ours) is ours
    assert [type(module) for module in inside] == [ft.Embedding, ft.EmbeddingBag]
    assert all(a is b for a, b in zip(inside, ours.tables))
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            model(torch.tensor([[1, 2], [3, 3]])).square().sum().backward()
            optimizer.step()
    for name, rows in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], rows)


def test_convert_restores_all_where_one_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Embedding(8, 4))
    setattr(model[1], "table", 1)  # what replaces it has another thing of that name
    before = [dict(vars(module)) for module in model]
    with pytest.raises(NotImplementedError, match="1: its attribute table"):
        ft.convert(model)
    assert all(type(module) is torch.nn.Embedding for module in model)
    assert [dict(vars(module)) for module in model] == before


def test_convert_keeps_what_stands_beside_weight(trainer: frugal.Trainer) -> None:
    called: List[str] = []
    theirs: Any = torch.nn.Embedding(ROWS, DIM)
    theirs.register_buffer("scale", torch.ones(1), persistent=False)
    theirs.register_parameter("gate", torch.nn.Parameter(torch.ones(2)))
    theirs.add_module("inner", torch.nn.Linear(1, 1))
    theirs.note = "a note"
    handle = theirs.register_forward_hook(lambda *_: called.append("forward"))
    theirs.register_full_backward_hook(lambda *_: called.append("backward"))
    theirs.register_state_dict_post_hook(lambda *_: called.append("saved"))
    theirs.register_load_state_dict_pre_hook(lambda module, *_: called.append(type(module).__module__.split(".")[0]))
    theirs(KEYS).sum().backward()
    called.clear()
    grad: Any = theirs.weight.grad
    model: Any = ft.convert(torch.nn.Sequential(theirs), trainer=trainer)
    ours: Any = model[0]
    assert torch.equal(ours.weight.grad, grad) and ours.note == "a note" and type(ours) is ft.Embedding
    assert set(model.state_dict()) == {f"0.{name}" for name in ("weight", "gate", "inner.weight", "inner.bias")}
    assert set(dict(ours.named_buffers())) == {"scale"} and ours.gate is theirs.gate
    ours(KEYS).sum().backward()
    del theirs
    gc.collect()
    ours.load_state_dict(ours.state_dict())
    handle.remove()
    ours(KEYS)
    assert called == ["saved", "forward", "backward", "saved", "frugal"]


REFUSED: Dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.weight.register_post_accumulate_grad_hook(lambda parameter: None),
    "forward": lambda m: setattr(m, "forward", m.forward),
    "_table": lambda m: setattr(m, "_table", 1),
    "computed": lambda m: torch.nn.utils.spectral_norm(m),
}


@pytest.mark.parametrize("what", REFUSED)
def test_convert_refuses_what_it_cannot_keep(trainer: frugal.Trainer, what: str) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM))
    REFUSED[what](model[1])
    with pytest.raises(NotImplementedError, match=f"^1: .*{what}"):
        ft.convert(model, trainer=trainer)
    assert type(model[0]) is torch.nn.Embedding


def test_convert_takes_a_subclass_that_is_only_made_in_another_way(trainer: frugal.Trainer) -> None:
    class Scaled(torch.nn.Embedding):
        """Of rows of another size."""

        def __init__(self, rows: int) -> None:
            super().__init__(rows, DIM)
            self.note = "a note"
            with torch.no_grad():
                self.weight.mul_(0.1)

        def extra_repr(self) -> str:
            return "scaled"

    class Forward(Scaled):
        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(keys)

    theirs = Scaled(ROWS)
    weight = theirs.weight.detach().clone()
    ours: Any = ft.convert(torch.nn.Sequential(theirs), trainer=trainer)[0]
    assert isinstance(ours, ft.Embedding) and isinstance(ours, Scaled)
    assert ours.note == "a note" and torch.equal(snapshot(ours), weight)
    message = "^the model itself: Forward is .*Embedding whose forward would .*: derive it from frugal.torch.Embedding"
    with pytest.raises(NotImplementedError, match=message):
        ft.convert(Forward(ROWS), trainer=trainer)
    computed = torch.nn.Embedding(ROWS, DIM)
    torch.nn.utils.parametrizations.weight_norm(computed)
    with pytest.raises(NotImplementedError, match="^the model itself: .*computed.*remove_parametrizations"):
        ft.convert(computed, trainer=trainer)


# --- rows that were read ---


def test_a_state_dict_outlives_its_model(trainer: frugal.Trainer) -> None:
    table = embedding(trainer)
    kept, saved = embedding(trainer, name="kept"), {}
    for name, module in (("table", table), ("kept", kept)):
        saved[name] = module.state_dict()["weight"]
    before = saved["table"].clone()
    del table, module, kept
    gc.collect()
    for rows in saved.values():
        rows += 1
        rows /= 2
    assert torch.equal(saved["table"], (before + 1) / 2)
    again = embedding(trainer, name="kept")
    assert torch.equal(snapshot(again), saved["kept"].clone())


@pytest.mark.parametrize("how", ["data", "detach", "fill", "of data"])
def test_rows_are_written_by_their_data(trainer: frugal.Trainer, how: str) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM, low=1))
    for bags in (ours, theirs):
        row = bags.weight[3]
        if how == "data":
            row.data.zero_()
        elif how == "detach":
            row.detach().zero_()
        elif how == "fill":
            bags.weight[4:6].data[:, 1].fill_(7.0)
        else:
            row.data.detach().mul_(2)
        with pytest.raises(RuntimeError, match="leaf|view"):
            bags.weight[3].zero_()
    assert torch.equal(snapshot(ours), snapshot(theirs))


DETACHED: Dict[str, Callable[[Any], Any]] = {
    "not required": lambda weight: weight.data.requires_grad_(False).zero_(),
    "required": lambda weight: weight.detach().requires_grad_().data.add_(1.0),
    "a row": lambda weight: weight.data[3].requires_grad_().data.add_(1.0),
    "written": lambda weight: weight.detach().requires_grad_().mul_(2.0),
}


@pytest.mark.parametrize("how", DETACHED)
def test_a_detached_weight_has_the_table_s_rows(trainer: frugal.Trainer, how: str) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM, low=1))
    before = snapshot(ours)
    with torch.no_grad():
        for bags in (ours, theirs):
            DETACHED[how](bags.weight)
    assert torch.equal(snapshot(ours), snapshot(theirs)) and not torch.equal(snapshot(ours), before)


@pytest.mark.parametrize("row", [None, 3])
def test_a_leaf_of_a_detached_weight_is_trained(trainer: frugal.Trainer, row: Any) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM, low=1), sparse=False)
    leaves = []
    for bags in (ours, theirs):
        leaf = (bags.weight.detach() if row is None else bags.weight.data[row]).requires_grad_()
        optimizer = torch.optim.Adam([leaf], lr=0.5)
        for _ in range(2):
            (leaf**2).sum().backward()
            assert leaf.is_leaf and leaf.grad is not None
            optimizer.step()
        assert bags.weight.grad is None
        with torch.no_grad():
            bags.weight[3] = 7.0
        leaves.append(leaf.detach().clone())
    assert torch.equal(*leaves)
    assert torch.equal(snapshot(ours), snapshot(theirs))
    with pytest.raises(NotImplementedError, match=r"requires_grad_\(\)"):
        ours.weight.detach().requires_grad = True


MEMORY: Dict[str, Callable[[Any], Any]] = {
    "dlpack": lambda module: from_dlpack(module.weight.data),
    "dlpack of a row": lambda module: from_dlpack(module.weight.data[3]),
    "dlpack of a state_dict": lambda module: from_dlpack(module.state_dict()["weight"]),
    "dlpack of a gradient": lambda module: from_dlpack(module.weight.grad),
    "storage": lambda module: module.weight.untyped_storage(),
    "storage of data": lambda module: module.weight.data.storage(),
    "set_": lambda module: torch.empty(0).set_(module.weight.data),
}


@pytest.mark.parametrize("what", MEMORY)
def test_memory_that_would_not_be_the_table_s_is_not_given(trainer: frugal.Trainer, what: str) -> None:
    module = embedding(trainer)
    module(KEYS).sum().backward()
    with pytest.raises(RuntimeError, match=r"no memory.*clone\(\)"):
        MEMORY[what](module)
    module.zero_grad()


# --- gradients of rows of weight ---


def test_rows_of_weight_have_a_gradient(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum", padding_idx=2)
    for bags in (ours, theirs):
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
        for ids in (torch.tensor([2, 3, 3]), torch.tensor([[5], [1]]), slice(3, 6), 4):
            optimizer.zero_grad()
            loss = bags(KEYS).sum() + bags.weight[ids].pow(2).sum() + bags.weight[7, 1:3].sum()
            loss.backward(retain_graph=True)
            loss.backward()
            grad = bags.weight.grad
            assert grad is not None
            optimizer.step()
    assert torch.equal(snapshot(ours), snapshot(theirs))
    (gradient,) = torch.autograd.grad(ours.weight[KEYS].sum(), list(ours.parameters()))
    assert gradient.norm() == (4 * DIM) ** 0.5
    ours.requires_grad_(False)
    assert not ours.weight[3].requires_grad


def test_rows_of_a_hashed_weight_have_a_gradient(trainer: frugal.Trainer) -> None:
    table = embedding(trainer, hashed=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    table(torch.tensor([70, -9])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(table)
    table.weight[1].pow(2).sum().backward()
    optimizer.step()
    after = snapshot(table)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1] - before[1])


# --- the meta device ---


@pytest.mark.parametrize("how", ["argument", "within", "skip_init", "to"])
@pytest.mark.parametrize("kind", [ft.Embedding, ft.EmbeddingBag])
def test_a_table_on_the_meta_device_is_refused(how: str, kind: Any) -> None:
    tables = ft.default_trainer().engine.tables().keys()
    with pytest.raises((NotImplementedError, ValueError), match="meta.*lazy=True"):
        if how == "argument":
            kind(ROWS, DIM, device="meta")
        elif how == "within":
            with torch.device("meta"):
                kind(ROWS, DIM)
        elif how == "skip_init":
            torch.nn.utils.skip_init(kind, ROWS, DIM)
        else:
            made = kind(ROWS, DIM)
            tables = ft.default_trainer().engine.tables().keys()
            made.to("meta")
    assert ft.default_trainer().engine.tables().keys() == tables


# --- who trains rows by hand ---


@pytest.mark.parametrize("writes", [False, True])
def test_who_trains_by_weight_s_gradient_is_not_warned(trainer: frugal.Trainer, writes: bool) -> None:
    table, dense = embedding(trainer), torch.nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(30):
            dense(table(KEYS)).sum().backward()
            optimizer.step()
            grad = table.weight.grad
            assert grad is not None
            if writes:
                table.weight.data.sub_(grad, alpha=0.1)
            table.weight.grad = None
    assert any("are not trained" in str(w.message) for w in caught) != writes


# --- padding, momentum and steps of zeros ---


@pytest.mark.parametrize("mode", ["bags", "offsets"])
def test_a_weight_of_padding_has_a_gradient_of_zero(trainer: frugal.Trainer, mode: str) -> None:
    rows, grads = integers(ROWS, DIM) + 1.0, []
    keys = torch.tensor([[3, 1, 3], [2, 3, 4]])
    for bags in (
        torch.nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="sum", padding_idx=3),
        ft.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", padding_idx=3, trainer=trainer),
    ):
        weights = torch.full(keys.shape, 0.5)
        if mode == "offsets":
            weights = weights.reshape(-1)
        weights.requires_grad_(True)
        arguments = (keys,) if mode == "bags" else (keys.reshape(-1), torch.tensor([0, 3]))
        bags(*arguments, per_sample_weights=weights).sum().backward()
        assert weights.grad is not None
        grads.append(weights.grad)
    assert torch.equal(*grads)


def test_momentum_that_is_zero_for_a_while(trainer: frugal.Trainer) -> None:
    """PyTorch's buffers stay as they are meanwhile."""
    rows = integers(ROWS, DIM)
    theirs = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    ours = ft.Embedding.from_pretrained(rows, freeze=False, trainer=trainer)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (theirs, ours)]
    keys = torch.arange(ROWS)
    for step in range(12):
        grad = integers(ROWS, DIM)
        for module, optimizer in zip((theirs, ours), optimizers):
            optimizer.param_groups[0]["momentum"] = 0.9 if 3 <= step < 6 or step >= 9 else 0.0
            optimizer.zero_grad()
            (module(keys) * grad).sum().backward()
            optimizer.step()
    assert torch.allclose(ours.weight.detach(), theirs.weight.detach(), rtol=1e-6, atol=1e-6)
    (buffer,) = [state["momentum_buffer"] for state in optimizers[1].state.values()]
    (wanted,) = [state["momentum_buffer"] for state in optimizers[0].state.values()]
    assert torch.allclose(buffer.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_the_state_after_a_step_of_zeros_is_loaded(trainer: frugal.Trainer) -> None:
    ours, theirs = embedding(trainer), torch.nn.Embedding(ROWS, DIM)
    theirs.load_state_dict(ours.state_dict())
    for module in (theirs, ours):
        first, second = (torch.optim.Adagrad(module.parameters(), lr=0.1) for _ in range(2))
        module(KEYS).sum().backward()
        first.zero_grad(set_to_none=False)
        first.step()
        second.load_state_dict(first.state_dict())
        module(KEYS).sum().backward()
        second.step()
    assert torch.allclose(ours.weight.detach(), theirs.weight.detach(), rtol=1e-6, atol=1e-6)


def test_memory_that_is_shared_has_no_rows(trainer: frugal.Trainer) -> None:
    """A child process would train a copy of nothing."""
    model = torch.nn.Sequential(ft.Embedding(ROWS, DIM, trainer=trainer), torch.nn.Linear(DIM, 1))
    with pytest.raises(NotImplementedError, match=r"share_memory\(\) shares no rows.*FRUGAL_SERVICE"):
        model.share_memory()
    model(KEYS).sum().backward()  # it is as it was


# --- rows that are written between a computation of weight and its backward ---

COMPUTED: Dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "square": lambda module, hidden: (module.weight**2).sum(),
    "sum": lambda module, hidden: module.weight.sum(),
    "linear": lambda module, hidden: torch.nn.functional.linear(hidden, module.weight).sum(),
    "transposed": lambda module, hidden: (hidden @ module.weight.t()).sum(),
    "some, squared": lambda module, hidden: (module.weight[KEYS[0]] ** 2).sum(),
    "a row, squared": lambda module, hidden: (module.weight[3] ** 2).sum(),
    "rows, squared": lambda module, hidden: (module.weight[3:5] ** 2).sum(),
    "columns, squared": lambda module, hidden: (module.weight[:, 3] ** 2).sum(),
    "detached": lambda module, hidden: (hidden @ module.weight.detach().t()).sum(),
    "data": lambda module, hidden: (hidden @ module.weight.data.t()).sum(),
    "detached view": lambda module, hidden: (hidden @ module.weight.t().detach()).sum(),
    "looked up": lambda module, hidden: torch.nn.functional.embedding(KEYS, module.weight).sum(),
    "forward": lambda module, hidden: (module(KEYS) ** 2).sum(),
}
CHANGES: Dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "nothing": lambda module, optimizer: None,
    "mul_": lambda module, optimizer: module.weight.mul_(2.0),
    "a row": lambda module, optimizer: module.weight.__setitem__(7, 1.0),
    "a view": lambda module, optimizer: module.weight[7].zero_(),
    "step": lambda module, optimizer: optimizer.step(),
    "load": lambda module, optimizer: module.load_state_dict(module.state_dict()),
    "forward": lambda module, optimizer: module(KEYS),
    "max_norm": lambda module, optimizer: torch.nn.functional.embedding(KEYS, module.weight, max_norm=100.0),
    "read": lambda module, optimizer: module.weight.clone(),
    "step without a gradient": lambda module, optimizer: (optimizer.zero_grad(), optimizer.step()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("computed", COMPUTED)
def test_a_backward_of_rows_that_were_written_is_refused(trainer: frugal.Trainer, computed: str, change: str) -> None:
    weight, hidden = integers(ROWS, DIM), integers(2, DIM)
    found = []
    theirs = torch.nn.Embedding(ROWS, DIM, _weight=weight.clone())
    for module in (embedding(trainer, _weight=weight), theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for early in (True, False):  # also with the usual step
            module(KEYS).sum().backward()
            if early:
                optimizer.step()
        own = hidden.clone().requires_grad_(True)
        loss = COMPUTED[computed](module, own)
        with torch.no_grad():
            CHANGES[change](module, optimizer)
        try:
            loss.backward()
            found.append("done")
        except RuntimeError as error:
            found.append(str(error)[:90])
    assert found[0] == found[1]


def test_max_norm_writes_rows_that_a_backward_needs(trainer: frugal.Trainer) -> None:
    weight = integers(ROWS, DIM)
    ours = embedding(trainer, _weight=weight, max_norm=100.0)  # of which no row is above
    for module in (ours, torch.nn.Embedding(ROWS, DIM, _weight=weight.clone(), max_norm=100.0)):
        loss = (module.weight**2).sum()
        module(KEYS)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_view_is_used_twice_before_a_backward(ranks: int) -> None:
    with frugal.Engine(world_size=ranks) as engine:
        trainers = [engine.create_trainer(rank) for rank in range(ranks)]
        module, other = (ft.Embedding(ROWS, DIM, trainer=trainers[0], optimizer=sgd()) for _ in range(2))
        hidden = integers(2, DIM).requires_grad_(True)
        view = module.weight.t()
        loss = (hidden @ view).sum()
        if ranks == 1:  # a step of another table
            optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
            other(KEYS).sum().backward()
            optimizer.step()
        (loss + (hidden @ view).sum()).backward()
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, (2.0 * hidden.sum(0)).expand(ROWS, DIM))


# --- what is computed of gradients and views together with weights ---

IDS, ALL = torch.tensor([[0, 1], [2, 2]]), torch.arange(6).view(6, 1)


def with_grad(m: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    m(ids).pow(2).sum().backward()
    return next(m.parameters()).grad  # type: ignore[no-any-return]


def with_nan(m: Any) -> torch.Tensor:
    grad = torch.ones(2, 3)
    grad[0, 0] = float("nan")
    m(IDS).backward(grad)
    return next(m.parameters()).grad  # type: ignore[no-any-return]


def then(m: Any, *done: Any) -> Any:
    return m.weight.grad


def trained(m: Any, loss: torch.Tensor) -> Any:
    loss.backward()
    return next(m.parameters()).grad + 0.0


def parameter(m: Any) -> Any:
    return next(m.parameters())


def written(m: Any, write: Callable[[Any], Any]) -> Any:
    grad = with_grad(m)
    write(grad)
    return grad + 0.0


def nan_set(m: Any) -> Any:
    grad = with_nan(m)
    grad[torch.isnan(grad)] = 0.0
    return m.weight.grad


def kept_by_a_hook(m: Any) -> Any:
    seen: List[Any] = []
    parameter(m).register_hook(lambda grad: seen.append(grad))
    m(IDS).sum().backward()
    with_grad(m).mul_(0.5)
    return torch.stack([grad.sum() for grad in seen])


def twice(m: Any) -> Any:
    with_grad(m)
    grad = m.weight.grad
    with_grad(m)
    with torch.no_grad():
        return torch.stack([(m.weight * grad).sum(), (parameter(m) * grad).sum(), (grad * parameter(m)).sum()])


TOGETHER: Dict[str, Callable[[Any], Any]] = {
    "view times weight": lambda m: trained(m, (m.weight[2] * m.weight).sum()),
    "view and parameter": lambda m: trained(m, torch.nn.functional.linear(m.weight[1:3], parameter(m)).sum()),
    "saved and weight": lambda m: trained(m, (m.state_dict()["weight"] - m.weight * 2).pow(2).sum()),
    "saved linear": lambda m: trained(m, torch.nn.functional.linear(m.state_dict()["weight"], m.weight).sum()),
    "cat": lambda m: trained(m, torch.cat([m.weight[2:4], m.weight]).pow(2).sum()),
    "detached view": lambda m: trained(m, (parameter(m).detach().view(6, 3) * parameter(m)).sum()),
    "gradient times weight": lambda m: trained(m, (with_grad(m).detach() * m.weight).sum()),
    "gradient times parameter": lambda m: trained(m, (with_grad(m).clone() * parameter(m)).sum()),
    "weight.grad times weight": lambda m: (with_grad(m), trained(m, (m.weight.grad * m.weight).sum()))[1],
    "isnan": lambda m: torch.isnan(with_nan(m)).sum(),
    "isnan as numbers": lambda m: torch.isnan(with_nan(m)).float(),
    "isfinite": lambda m: torch.isfinite(with_nan(m)).sum(),
    "isfinite as numbers": lambda m: torch.isfinite(with_grad(m)).float(),
    "isfinite of absolutes": lambda m: torch.isfinite(with_nan(m).abs()).sum(),
    "all finite": lambda m: torch.stack([torch.isfinite(with_grad(m)).all(), torch.isinf(with_grad(m)).any()]),
    "NaN filled": lambda m: then(m, (grad := with_nan(m)).masked_fill_(torch.isnan(grad), 0)),
    "NaN where": lambda m: torch.where(torch.isnan(grad := with_nan(m)), torch.zeros(6, 3), grad),
    "NaN set": nan_set,
    "NaN masked": lambda m: then(m, (grad := with_grad(m)).mul_(torch.isfinite(grad))),
    "absolutes times parameter": lambda m: (with_grad(m).abs() * parameter(m).detach()).sum(),
    "parameter times absolutes": lambda m: (parameter(m).detach() * with_grad(m).abs()).sum(),
    "squares times parameter": lambda m: trained(m, ((with_grad(m) ** 2).detach() * parameter(m)).sum()),
    "relu": lambda m: written(m, lambda g: torch.nn.functional.relu(g.neg_(), inplace=True)),
    "relu of weight.grad": lambda m: (
        with_grad(m), torch.nn.functional.relu(m.weight.grad.neg_(), inplace=True), then(m)
    )[2],
    "init of weight.grad": lambda m: (with_grad(m, ALL), torch.nn.init.constant_(m.weight.grad, 0.5), then(m))[2],
    "init": lambda m: written(m, lambda g: torch.nn.init.constant_(g, 0.5)),
    "clamp out": lambda m: written(m, lambda g: torch.clamp(g, -0.5, 0.5, out=g)),
    "clamp out elsewhere": lambda m: torch.clamp(with_grad(m), -0.5, 0.5, out=torch.empty(6, 3)),
    "truncated": lambda m: written(m, lambda g: g.mul_(0.7).div_(0.5, rounding_mode="trunc")),
    "neg out": lambda m: written(m, lambda g: torch.neg(g, out=g)),
    "sum out": lambda m: torch.sum(with_grad(m), dim=(0, 1), out=torch.empty(())),
    "pow out": lambda m: torch.pow(with_grad(m), 2, out=torch.empty(6, 3)),
    "integers": lambda m: with_grad(m).mul(0.5).int(),
    "truth": lambda m: with_grad(m).bool().sum(),
    "double": lambda m: with_grad(m).double().view(-1),
    "half": lambda m: with_grad(m).mul(1.0001).half().float(),
    "float of half": lambda m: (with_grad(m.half()).float() + 1.0),
    "numel": lambda m: torch.tensor([torch.numel(with_grad(m)), *torch.Tensor.size(with_grad(m))]),
    "std kept": lambda m: with_grad(m).std(dim=(0, 1), keepdim=True),
    "sum of absolutes kept": lambda m: with_grad(m).abs().sum((0, 1), keepdim=True),
    "largest kept": lambda m: with_grad(m).amax((0, 1), True),
    "kept by a hook": kept_by_a_hook,
    "stale": twice,
    "bounds of tensors": lambda m: with_grad(m).clamp(min=-torch.ones(6, 3), max=torch.full((6, 3), 0.25)),
    "power of a number": lambda m: 2 ** with_grad(m).clamp(-2, 2),
    "gradient by gradient": lambda m: (with_grad(m), m.weight.grad.mul_(parameter(m).grad), then(m))[2],
    "gradient and gradient": lambda m: (with_grad(m), torch.add(m.weight.grad, parameter(m).grad, alpha=2))[1],
    "copied": lambda m: (with_grad(m), copy.deepcopy(m.weight.grad.data))[1],
    "pickled": lambda m: (with_grad(m), pickle.loads(pickle.dumps(m.weight.grad)))[1],
}


@pytest.mark.parametrize("what", TOGETHER)
def test_gradients_views_and_weights_together(trainer: frugal.Trainer, what: str) -> None:
    found = []
    for made in (ft.EmbeddingBag(6, 3, mode="sum", trainer=trainer), torch.nn.EmbeddingBag(6, 3, mode="sum")):
        made.weight.data.copy_(torch.arange(18.0).view(6, 3) / 10)
        found.append(TOGETHER[what](made).detach())
    assert found[0].shape == found[1].shape and found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[0] + 0, found[1] + 0, equal_nan=True)


def test_what_is_computed_gives_no_memory_away(trainer: frugal.Trainer) -> None:
    module: Any = ft.EmbeddingBag(6, 3, mode="sum", trainer=trainer)
    other = torch.ones(6, 3)
    with pytest.raises(RuntimeError, match="no memory of its own"):
        other.data = with_grad(module).abs()
        other.sum()


def test_a_hook_is_asked_in_every_kind_of_backward(trainer: frugal.Trainer) -> None:
    found = []
    for module in bag_pair(trainer, integers(ROWS, DIM), sparse=False):
        (anchor,) = module.parameters()
        anchor.register_hook(lambda grad: grad * torch.full((ROWS, DIM), 0.5))
        (grad,) = torch.autograd.grad(module(IDS).sum(), [anchor])
        module(IDS).pow(2).sum().backward(inputs=[anchor])
        assert anchor.grad is not None
        found.append([grad + 0.0, anchor.grad + 0.0])
    torch.testing.assert_close(*found)
