"""What training scripts do besides the plain loop: with gradients, weights, subclasses of optimizers and transforms."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward and of the functions of torch.nn.init.

from __future__ import annotations

import copy
import gc
import math
from typing import Any, Callable, Dict, List, Tuple, cast

import pytest
import torch
from torch.nn.utils import parametrize, prune
from torch_support import DIM, ROWS, integers, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _hook

Pair = Tuple[Any, Any]


@pytest.fixture
def pair(trainer: frugal.Trainer) -> Pair:
    weight = integers(ROWS, DIM)
    return (
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()),
    )


def backward(module: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, ROWS, (12,), generator=generator)
    module(keys).backward(torch.randint(-3, 4, (12, DIM), generator=generator).float())


def assert_same(pair: Pair, exact: bool = False) -> None:
    ours, theirs = pair
    tolerance = 0.0 if exact else 1e-5
    torch.testing.assert_close(snapshot(ours), theirs.weight.detach(), rtol=tolerance, atol=tolerance)


# --- Gradients of parameters ---


def zeros_before(module: Any) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    backward(module)


def zeros_twice(module: Any) -> None:
    zeros_before(module)
    zeros_before(module)


def old_zero_grad(module: Any) -> None:
    backward(module, 1)
    for parameter in module.parameters():
        parameter.grad.detach_()
        parameter.grad.zero_()
    backward(module)


def data_zero(module: Any) -> None:
    backward(module, 1)
    for parameter in module.parameters():
        parameter.grad.data.zero_()
    backward(module)


def filled(module: Any) -> None:
    backward(module, 1)
    for parameter in module.parameters():
        parameter.grad.fill_(0)
    backward(module)


def saved_and_restored(module: Any) -> None:
    backward(module)
    saved = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    backward(module, 1)
    for parameter, grad in zip(module.parameters(), saved):
        parameter.grad.copy_(grad)


def skipped_if_not_finite(module: Any) -> None:
    backward(module)
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in module.parameters())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


def negated(module: Any) -> None:
    backward(module)
    for parameter in module.parameters():
        parameter.grad = -parameter.grad
        parameter.grad.neg_()
        parameter.grad = -parameter.grad
    backward(module, 1)


def deleted(module: Any) -> None:
    backward(module, 1)
    for parameter in module.parameters():
        del parameter.grad
    backward(module)


GRADIENTS: List[Callable[[Any], None]] = [
    zeros_before, zeros_twice, old_zero_grad, data_zero, filled, saved_and_restored, skipped_if_not_finite, negated,
    deleted,
]  # fmt: skip


@pytest.mark.parametrize("use", GRADIENTS, ids=lambda use: use.__name__)
def test_gradients_of_parameters(pair: Pair, use: Callable[[Any], None]) -> None:
    for module in pair:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        use(module)
        optimizer.step()
    assert_same(pair, exact=True)


def test_a_gradient_that_is_not_finite_is_seen(pair: Pair) -> None:
    for module in pair:
        module(torch.tensor([1])).backward(torch.full((1, DIM), math.nan))
        (parameter,) = module.parameters()
        assert not torch.isfinite(parameter.grad).all()


def test_zeros_for_a_gradient_train_nothing(pair: Pair) -> None:
    ours, _ = pair
    before = snapshot(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    (parameter,) = ours.parameters()
    parameter.grad = torch.zeros_like(parameter)
    assert parameter.grad is not None
    optimizer.step()
    assert torch.equal(snapshot(ours), before)


# --- Gradients of weights ---


def clip_norm(module: Any) -> None:
    backward(module)
    torch.nn.utils.clip_grad_norm_([module.weight], 1.0)


def clip_value(module: Any) -> None:
    backward(module)
    torch.nn.utils.clip_grad_value_([module.weight], 1.0)


def scaled_in_place(module: Any) -> None:
    backward(module)
    module.weight.grad.mul_(0.5)
    module.weight.grad.data.div_(2)
    module.weight.grad *= 2


def a_row_is_left_out(module: Any) -> None:
    backward(module)
    module.weight.grad[3] = 0.0
    module.weight.grad.view(-1)[: 2 * DIM].fill_(1.0)


def zeroed(module: Any) -> None:
    backward(module, 1)
    module.weight.grad.zero_()
    backward(module)


def assigned(module: Any) -> None:
    module.weight.grad = torch.arange(ROWS * DIM).view(ROWS, DIM).float()
    backward(module)


WEIGHTS: List[Callable[[Any], None]] = [clip_norm, clip_value, scaled_in_place, a_row_is_left_out, zeroed, assigned]


@pytest.mark.parametrize("use", WEIGHTS, ids=lambda use: use.__name__)
def test_gradients_of_weights(pair: Pair, use: Callable[[Any], None]) -> None:
    for module in pair:
        optimizer = torch.optim.SGD([module.weight], lr=0.5)
        use(module)
        mine = module.weight.grad
        assert mine is not None
        optimizer.step()
    assert_same(pair)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_scaler_before_the_first_step_of_a_weight_s_optimizer(trainer: frugal.Trainer, sparse: bool) -> None:
    weight = integers(ROWS, DIM)
    pair = (
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer, sparse=sparse),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone(), sparse=sparse),
    )
    for module in pair:
        optimizer = torch.optim.SGD([module.weight], lr=0.5)
        scaler: Any = torch.amp.grad_scaler.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((module(torch.tensor([1, 2, 1])) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_same(pair, exact=True)


# --- Weights in place ---

OTHER = torch.arange(ROWS * DIM).view(ROWS, DIM) % 7 + 1.0

IN_PLACE: Dict[str, Callable[[Any], Any]] = {
    "number": lambda w: w.mul_(0.9),
    "clamp": lambda w: w.clamp_(-1, 1),
    "matrix": lambda w: w.mul_(OTHER),
    "column": lambda w: w.div_(OTHER[:, :1]),
    "norms": lambda w: w.div_(w.norm(dim=1, keepdim=True) + 1),
    "itself": lambda w: w.add_(w),
    "alpha": lambda w: w.add_(OTHER, alpha=-0.5),
    "lerp": lambda w: w.lerp_(OTHER, 0.25),
    "addcmul": lambda w: w.addcmul_(OTHER, OTHER, value=0.5),
    "mask": lambda w: w.masked_fill_(OTHER > 4, 0.0),
    "renorm": lambda w: w.renorm_(2, 0, 1.0),
    "sqrt": lambda w: w.abs_().sqrt_(),
    "index_fill": lambda w: w.index_fill_(0, torch.tensor([1, 2]), 5.0),
    "index_add": lambda w: w.index_add_(0, torch.tensor([1, 1]), OTHER[:2]),
    "foreach": lambda w: torch._foreach_mul_([w, torch.ones(1)], 0.5),
    "foreach of tensors": lambda w: torch._foreach_add_([w], [OTHER], alpha=2.0),
    "operator": lambda w: w.__imul__(0.5),
    "tensor operator": lambda w: w.__isub__(OTHER),
}


@pytest.mark.parametrize("case", list(IN_PLACE))
@pytest.mark.parametrize("data", [False, True])
def test_functions_in_place_write_rows(pair: Pair, case: str, data: bool) -> None:
    for module in pair:
        with torch.no_grad():
            IN_PLACE[case](module.weight.data if data else module.weight)
    assert_same(pair)


def test_assignments_with_an_operator_write_rows(pair: Pair) -> None:
    for module in pair:
        with torch.no_grad():
            module.weight *= 0.5
            module.weight -= OTHER
        module.weight.data /= 4
        weight = module.weight.data
        weight += 1
    assert_same(pair)
    assert isinstance(pair[0].weight, type(ft.Embedding(1, 1, trainer=pair[0].trainer).weight))


def test_a_shape_cannot_be_changed(pair: Pair) -> None:
    ours, _ = pair
    before = snapshot(ours)
    for call in (lambda w: w.t_(), lambda w: w.unsqueeze_(0), lambda w: w.resize_(3, DIM)):
        with torch.no_grad(), pytest.raises(NotImplementedError, match="embedding_0.*shape"):
            call(ours.weight)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        ours.weight.mul_(OTHER)
    assert torch.equal(snapshot(ours), before)


# --- Optimizers ---


def halves(kind: Any) -> Any:
    """A subclass whose step does something more."""

    class Halves(kind):  # type: ignore[misc]
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            for group in self.param_groups:
                group["lr"] *= 0.5
            return super().step(closure)

    return Halves


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "AdamW"])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_subclass_may_call_the_step_that_it_inherits(pair: Pair, kind: str, closure: bool, levels: int) -> None:
    base = getattr(torch.optim, kind)
    for _ in range(levels):
        base = halves(base)
    if levels == 1 and kind == "SGD":  # of which there are others
        torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0).step()
    for module in pair:
        # Of all rows, so that Adam's are torch's.
        optimizer = base(module.parameters(), lr=0.5)
        for step in range(3):

            def work(module: Any = module, optimizer: Any = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = (module(torch.arange(ROWS)) * (step + 1)).pow(2).sum()
                loss.backward()
                return loss

            if closure:
                optimizer.step(work)
            else:
                work()
                optimizer.step()
        assert optimizer.calls == 3 * levels and next(iter(module.parameters())).grad is not None
    assert_same(pair)


def test_a_step_may_be_called_several_times(pair: Pair) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return super().step()

    class Outer(torch.optim.Optimizer):
        """Has the parameters, and another optimizer that steps them."""

        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner
            self.count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            if self.count != 2:
                for _ in range(3):
                    self.inner.step()

    for module in pair:
        optimizers = [Twice(module.parameters(), lr=0.5), Outer(torch.optim.SGD(module.parameters(), lr=0.25))]
        for step in range(4):
            module.zero_grad()
            backward(module, step)
            for optimizer in optimizers:
                optimizer.step()
    assert_same(pair, exact=True)


def test_an_optimizer_that_calls_nobody_s_step_in_the_end_is_told_of(pair: Pair) -> None:
    class Never(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure) if closure is not None else None

    ours, _ = pair
    optimizer = Never(ours.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="embedding_0.*no optimizer that has its parameter has made a step"):
        for _ in range(_hook._PATIENCE):
            optimizer.zero_grad()
            backward(ours)
            optimizer.step()


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_closure_may_step_its_own_optimizer(pair: Pair, kind: str) -> None:
    for module in pair:
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.5)
        for seed in range(3):

            def closure(module: Any = module, optimizer: Any = optimizer, seed: int = seed) -> float:
                optimizer.zero_grad()
                backward(module, seed)
                optimizer.step()
                return 0.0

            optimizer.step(closure)
    assert_same(pair)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_step_may_be_compiled(pair: Pair, kind: str) -> None:
    for module in pair:
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.5)
        step = torch.compile(optimizer.step, backend="eager") if module is pair[0] else optimizer.step
        for seed in range(3):
            optimizer.zero_grad()
            backward(module, seed)
            step()
    assert_same(pair)


def test_none_of_torch_s_own_steps_is_taken_for_one_that_calls_another() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and "step" in vars(kind)]
    assert len(kinds) > 10
    assert not [kind for kind in kinds if kind is not torch.optim.Optimizer and _hook._delegates(kind)]


@pytest.mark.parametrize("rows", [ROWS, 5000])
def test_norms_of_small_and_large_tables(trainer: frugal.Trainer, rows: int) -> None:
    pair = ft.Embedding(rows, DIM, trainer=trainer), torch.nn.Embedding(rows, DIM)
    keys, grad = torch.tensor([1, 5, 1, 7]), integers(4, DIM)
    norms = []
    for module in pair:
        module(keys).backward(grad)
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0))
    assert norms[1] > 1.0
    torch.testing.assert_close(*norms)
    mine, expected = (module.weight.grad for module in pair)
    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(expected))


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
def test_tables_of_a_group_have_steps_of_their_own(trainer: frugal.Trainer) -> None:
    """Adam's bias correction is that of the table's own step, and its rate is the group's of now."""
    weights = [integers(ROWS, DIM) for _ in range(2)]
    ours = [ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer) for weight in weights]
    theirs = [torch.nn.Embedding(ROWS, DIM, _weight=weight.clone()) for weight in weights]
    every = torch.arange(ROWS)
    for modules in (ours, theirs):
        optimizer = torch.optim.Adam([next(iter(module.parameters())) for module in modules], lr=0.5)
        for step, trained in enumerate(([0], [0, 1], [1], [0, 1])):
            optimizer.zero_grad()
            for number in trained:
                modules[number](every).pow(2).sum().backward()
            optimizer.param_groups[0]["lr"] = 0.5 / (step + 1)
            optimizer.step()
    for pair in zip(ours, theirs):
        assert_same(pair)


# --- Transforms ---


def test_transforms_of_torch_func_are_refused_by_name(pair: Pair) -> None:
    ours, theirs = pair
    keys, factor = torch.tensor([1, 2]), torch.ones(2, DIM)
    calls: Dict[str, Callable[[Any], Any]] = {
        "grad": lambda m: torch.func.grad(lambda f: (m(keys) * f).sum())(factor),
        "vmap": lambda m: torch.func.vmap(m)(keys),
        "vjp": lambda m: torch.func.vjp(lambda f: m(keys) * f, factor),
        "batched": lambda m: torch.autograd.grad(
            m(keys), list(m.parameters()), grad_outputs=torch.ones(2, 2, DIM), is_grads_batched=True
        ),
    }
    for call in calls.values():
        call(theirs)
        with pytest.raises(NotImplementedError, match="transform"):
            call(ours)


def test_vmap_over_the_parameter_is_refused_by_name(pair: Pair) -> None:
    """Its functions of C++ would make batches of the one element."""
    ours, theirs = pair
    for module in (ours, theirs):
        sums = torch.func.vmap(lambda row: row.sum())
        torch.testing.assert_close(sums(module.weight.detach()), theirs.weight.detach().sum(1))
    for dim in (0, -1):
        with pytest.raises(NotImplementedError, match="transform of torch.func"):
            torch.func.vmap(lambda row: row.sum(), in_dims=dim)(ours.weight)


# --- Lifetimes ---


def test_a_weight_outlives_its_module(trainer: frugal.Trainer) -> None:
    engine = trainer.engine
    rows = integers(ROWS, DIM)
    module = ft.Embedding(ROWS, DIM, _weight=rows, trainer=trainer)
    weight, name = module.weight, module.table.name
    optimizer = torch.optim.SGD([weight], lr=0.5)
    module(torch.tensor([1])).sum().backward()
    del module
    gc.collect()
    assert torch.equal(weight.clone(), rows) and weight.grad is not None
    optimizer.step()
    rows[1] -= 0.5
    assert torch.equal(weight.clone(), rows) and engine.find_table(name).dim == DIM
    part = weight.data[2:4]
    del weight, optimizer
    gc.collect()
    assert torch.equal(part.clone(), rows[2:4])
    del part
    gc.collect()
    with pytest.raises(frugal.NotFound):
        engine.find_table(name)


def test_a_table_stays_while_another_module_has_it(trainer: frugal.Trainer) -> None:
    first = ft.Embedding(ROWS, DIM, trainer=trainer)
    rows = snapshot(first)
    second = ft.Embedding(ROWS, DIM, trainer=trainer, name=first.table.name)
    del first
    gc.collect()
    assert torch.equal(snapshot(second), rows)


# --- convert ---


def test_bags_of_maxima_are_converted(trainer: frugal.Trainer) -> None:
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="max")
    keys = torch.tensor([[1, 2], [3, 1]])
    expected = theirs(keys)
    ours: Any = ft.convert(theirs, trainer=trainer)
    assert isinstance(ours, ft.EmbeddingBag) and torch.equal(ours(keys), expected)


# --- A weight in the hands of functions, modules and optimizers ---


@pytest.mark.parametrize("form", ["weight", "data", "state_dict"])
@pytest.mark.parametrize("bags", [False, True])
def test_functions_that_write_to_a_later_argument_write_rows(pair: Pair, form: str, bags: bool) -> None:
    ids = torch.tensor([3, 7, 3])
    out = []
    for module in pair:
        forms = {"weight": module.weight, "data": module.weight.data, "state_dict": module.state_dict()["weight"]}
        weight = forms[form]
        with torch.no_grad():
            if bags:
                offsets = torch.tensor([0, 1])
                out.append(torch.nn.functional.embedding_bag(ids, weight, offsets, max_norm=0.5, mode="sum"))
            else:
                out.append(torch.nn.functional.embedding(ids, weight, max_norm=0.5))
    torch.testing.assert_close(*out)
    assert_same(pair)
    assert float(snapshot(pair[0])[3].norm()) < 0.6
    with torch.inference_mode():
        assert torch.equal(torch.relu(pair[0].weight), torch.relu(snapshot(pair[0])))


def test_hooks_of_a_weight_are_called(pair: Pair) -> None:
    for module in pair:
        called: List[torch.Tensor] = []
        handles = [
            module.weight.register_hook(lambda grad, called=called: called.append(grad.sum())),
            module.weight.register_post_accumulate_grad_hook(lambda p, called=called: called.append(p.grad.sum())),
        ]
        backward(module)
        assert len(called) == 2 and called[0] == called[1] == module.weight.grad.sum()
        for handle in handles:
            handle.remove()
        module.zero_grad()
        module.weight.retain_grad()  # of a leaf
        backward(module)
        del module.weight.grad
        assert module.weight.grad is None
        module.requires_grad_(False)
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            module.weight.register_hook(lambda grad: grad)


class Alias(torch.nn.Module):
    """Has the weight of a module of its own a second time."""

    def __init__(self, module: Any, listed: bool) -> None:
        super().__init__()
        self.module = module
        if listed:
            self.all = torch.nn.ParameterList([module.weight])
        else:
            self.shared = module.weight


@pytest.mark.filterwarnings("error:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_weight_that_is_a_parameter_of_two_modules_is_one(pair: Pair, kind: str, listed: bool) -> None:
    for module in pair:
        model = Alias(module, listed)
        assert len(list(model.parameters())) == 1
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.5)
        for seed in range(3):
            optimizer.zero_grad()
            backward(module, seed)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": module.parameters()})
    assert_same(pair)
    assert pair[0].weight in dict.fromkeys(pair[0].parameters())


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "RMSprop", "SGD"])
def test_the_state_of_an_optimizer_of_weights_is_kept(trainer: frugal.Trainer, pair: Pair, kind: str) -> None:
    """Also what is loaded before its first step."""
    more = {"momentum": 0.5} if kind == "SGD" else {}
    saved: Dict[str, Any] = {}
    for module in pair:
        for resumed in range(2):
            optimizer = getattr(torch.optim, kind)([module.weight], lr=0.1, **more)
            if resumed:
                optimizer.load_state_dict(saved)
            for _ in range(3):
                optimizer.zero_grad()
                module(torch.arange(ROWS)).pow(2).sum().backward()
                optimizer.step()
            assert optimizer.state[module.weight]
            saved = optimizer.state_dict()
            assert list(saved["state"]) == [0]
    assert_same(pair)


def kept(module: Any, optimizer: Any) -> torch.Tensor:
    backward(module)
    grad: torch.Tensor = module.weight.grad
    backward(module, 1)
    grad.mul_(0.5)
    return grad


def seen(module: Any, optimizer: Any) -> torch.Tensor:
    backward(module)
    grad: torch.Tensor = module.weight.grad
    backward(module, 1)
    return grad


def clipped(module: Any, optimizer: Any) -> torch.Tensor:
    backward(module)
    grad: torch.Tensor = module.weight.grad
    for parameter in module.parameters():
        parameter.grad.mul_(0.25)
    return grad.mul_(2)


def kept_and_zeroed(module: Any, optimizer: Any) -> torch.Tensor:
    backward(module)
    grad: torch.Tensor = module.weight.grad
    optimizer.zero_grad(set_to_none=False)
    return grad


def zeroed_and_left_behind(module: Any, optimizer: Any) -> torch.Tensor:
    grad = kept_and_zeroed(module, optimizer)
    optimizer.zero_grad()
    backward(module, 1)
    return grad


def replaced(module: Any, optimizer: Any) -> torch.Tensor:
    backward(module)
    grad: torch.Tensor = module.weight.grad
    module.weight.grad = grad * 2
    module.weight.grad *= 3
    return grad.mul_(5)


def written_after_zero_grad(module: Any, optimizer: Any) -> torch.Tensor:
    grad = kept_and_zeroed(module, optimizer)
    more = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, DIM), (ROWS, DIM))
    module.weight.grad.add_(more if grad.is_sparse else more.to_dense())
    return grad


def left_behind(module: Any, optimizer: Any) -> torch.Tensor:
    backward(module)
    grad: torch.Tensor = module.weight.grad
    optimizer.zero_grad()
    backward(module, 1)
    return grad.zero_()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "use",
    [kept, seen, clipped, kept_and_zeroed, zeroed_and_left_behind, replaced, written_after_zero_grad, left_behind],
)
def test_a_gradient_that_is_kept_is_the_weight_s(
    trainer: frugal.Trainer, use: Callable[[Any, Any], torch.Tensor], sparse: bool
) -> None:
    """Until zero_grad() drops it."""
    weight = integers(ROWS, DIM)
    pair = (
        ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer, sparse=sparse),
        torch.nn.Embedding(ROWS, DIM, _weight=weight.clone(), sparse=sparse),
    )
    grads = []
    for module in pair:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        grads.append(use(module, optimizer).to_dense().clone())
        optimizer.step()
    torch.testing.assert_close(*grads)
    assert_same(pair)


def test_values_of_a_sparse_gradient_that_has_changed_are_not_written(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer, sparse=True)
    backward(module)
    grad = module.weight.grad
    assert grad is not None
    values = grad._values()
    values.mul_(0.5)
    backward(module)
    with pytest.raises(NotImplementedError, match="take them anew"):
        values.mul_(0.5)


def test_functions_write_to_a_weight_that_is_their_output(pair: Pair) -> None:
    for module in pair:
        with pytest.raises(RuntimeError):
            torch.mul(module.weight, 2.0, out=module.weight)
        with torch.no_grad():
            torch.mul(module.weight, 2.0, out=module.weight)
            torch.nn.functional.normalize(module.weight.data, dim=1, out=module.weight.data)
        torch.nn.init.constant_(module.weight[3], 2.0)
    assert_same(pair)
    for module in pair:
        torch.nn.init.eye_(module.weight)
    assert_same(pair)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
@pytest.mark.parametrize("change", ["scale", "clamp", "look", "in place"])
def test_hooks_of_a_parameter_get_its_gradient(pair: Pair, kind: str, change: str) -> None:
    def hook(grad: torch.Tensor) -> Any:
        norms.append(float(grad.norm()))
        if change == "scale":
            return grad * 0.5
        if change == "clamp":
            return grad.clamp(-0.5, 0.5)
        return grad.mul_(2.0) if change == "in place" else None

    all_norms = []
    for module in pair:
        norms: List[float] = []
        (parameter,) = module.parameters()
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1)
        handle = parameter.register_hook(hook)
        for _ in range(3):
            optimizer.zero_grad()
            keys = torch.tensor([1, 2, 2])
            (module(keys) + module(keys)).square().sum().backward()  # once for both
            optimizer.step()
        handle.remove()
        backward(module)
        optimizer.step()
        assert len(norms) == 3
        all_norms.append(norms)
    torch.testing.assert_close(*all_norms, rtol=1e-5, atol=0)
    assert_same(pair)


def test_hooks_of_a_parameter_in_a_backward_within_a_backward(pair: Pair) -> None:
    for module in pair:
        (parameter,) = module.parameters()
        counts: List[float] = []
        handle = parameter.register_hook(lambda grad, counts=counts: counts.append(float(grad.norm())))
        keys, factor = torch.tensor([1, 2, 2]), torch.ones((), requires_grad=True)
        first = module(keys)
        inner = torch.utils.checkpoint.checkpoint(
            lambda factor, module=module, keys=keys: module(keys).sum() * factor, factor, use_reentrant=True
        )
        (first + module(keys)).sum().mul(inner).backward()  # the inner one comes between the two
        assert len(counts) == 2  # one of each backward
        handle.remove()
        with torch.no_grad():
            module.weight[4] = torch.tensor(sorted(counts) + [0.0] * (DIM - 2))
        torch.optim.SGD([parameter], lr=0.1).step()
    assert_same(pair)


def test_a_hook_after_accumulation_steps_in_the_backward(pair: Pair) -> None:
    for module in pair:
        (parameter,) = module.parameters()
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            module(torch.tensor([1, 2, 2])).square().sum().backward()
            assert parameter.grad is None
    assert_same(pair)


def test_a_hook_of_a_parameter_sees_a_penalty_too(trainer: frugal.Trainer) -> None:
    weight, seen = torch.randint(-4, 4, (10, 8)).float(), []
    for module in (
        ft.EmbeddingBag(10, 8, mode="sum", _weight=weight, trainer=trainer),
        torch.nn.EmbeddingBag(10, 8, mode="sum", _weight=weight.clone()),
    ):
        (parameter,) = module.parameters()
        parameter.register_hook(lambda grad: grad * 0.5)
        (module(torch.tensor([[1]])).sum() + parameter.square().sum()).backward()
        assert parameter.grad is not None
        seen.append(parameter.grad.norm())
    torch.testing.assert_close(*seen)
    module = ft.EmbeddingBag(10, 8, mode="sum", trainer=trainer)
    (anchor,) = module.parameters()
    anchor.register_hook(lambda grad: torch.zeros(1))
    with pytest.raises(RuntimeError, match="hook has changed the size"):
        module(torch.tensor([[1]])).sum().backward()


def test_weights_of_modules_that_share_a_table_are_one_key(trainer: frugal.Trainer) -> None:
    one, other = (ft.EmbeddingBag(10, 8, mode="sum", name="shared", trainer=trainer) for _ in range(2))
    third = ft.EmbeddingBag(10, 8, trainer=trainer)
    assert len({one.weight, other.weight, third.weight}) == 2
    before = one.weight
    one.requires_grad_(False)
    assert before in {one.weight}
    assert bool((one.weight == other.weight).all()) and (one.weight == other.weight).shape == (10, 8)


@pytest.mark.parametrize("bags", [False, True])
def test_a_subclass_may_have_its_arguments_in_another_order(trainer: frugal.Trainer, bags: bool) -> None:
    for library, also in ((ft, {"trainer": trainer}), (torch.nn, {})):
        base: Any = getattr(library, "EmbeddingBag" if bags else "Embedding")

        class Named(base):  # type: ignore[misc]
            def __init__(self, name: str = "", **arguments: Any) -> None:
                super().__init__(**{key: value for key, value in arguments.items()})
                self.name = name

        for freeze in (False, True):
            module = Named.from_pretrained(torch.ones(ROWS, DIM), freeze, **also)
            assert module.weight.requires_grad is not freeze and torch.equal(module.weight, torch.ones(ROWS, DIM))
        assert "padding_idx" in module.__constants__


@pytest.mark.parametrize("bags", [False, True])
def test_a_subclass_s_rows_are_those_of_its_reset_parameters(trainer: frugal.Trainer, bags: bool) -> None:
    weights = []
    for library, also in ((ft, {"trainer": trainer}), (torch.nn, {})):
        base: Any = getattr(library, "EmbeddingBag" if bags else "Embedding")

        class Small(base):  # type: ignore[misc]
            def reset_parameters(self) -> None:
                torch.manual_seed(3)
                torch.nn.init.uniform_(self.weight, -0.1, 0.1)
                self._fill_padding_idx_with_zero()

        module = Small(ROWS, DIM, padding_idx=2, **also)
        weights.append(snapshot(module))
        given = Small(ROWS, DIM, _weight=torch.ones(ROWS, DIM), **also)  # whose rows are not reset
        assert torch.equal(given.weight, torch.ones(ROWS, DIM))
    torch.testing.assert_close(*weights)
    assert float(weights[0].abs().max()) <= 0.1 and not weights[0][2].any()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_frozen_after_the_forward_takes_no_gradient(pair: Pair, before: bool) -> None:
    for module in pair:
        out = module(torch.tensor([1, 2, 2]))
        if before:
            backward(module)
        module.requires_grad_(False)
        out.sum().backward()
        module.requires_grad_(True)
        assert (module.weight.grad is not None) == before
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert_same(pair)


@pytest.mark.filterwarnings("ignore:.*of a frugal table's row")
@pytest.mark.parametrize("of_weight", [False, True])
@pytest.mark.parametrize("kind", ["Adagrad", "Adam"])
def test_a_state_of_before_the_first_step_begins_anew(pair: Pair, kind: str, of_weight: bool) -> None:
    """As for each fold of a cross-validation."""
    for module in pair:
        optimizer = getattr(torch.optim, kind)([module.weight] if of_weight else module.parameters(), lr=0.1)
        first = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            for seed in range(3):
                optimizer.zero_grad()
                module(torch.arange(ROWS)).pow(2).sum().backward()
                optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(first))
    assert_same(pair)


@pytest.mark.filterwarnings("ignore:.*a frugal table's row changes")
@pytest.mark.parametrize("whose", ["none", "ours", "theirs"])
@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "SGD"])
def test_a_table_of_one_element(trainer: frugal.Trainer, kind: str, whose: str) -> None:
    """Its optimizer state has the anchor's shape, also where it is loaded before the fourth step."""
    arguments = {"Adagrad": {"initial_accumulator_value": 0.1}, "SGD": {"momentum": 0.9}}.get(kind, {})
    weight = torch.full((1, 1), 2.0)
    pair = ft.Embedding(1, 1, _weight=weight, trainer=trainer), torch.nn.Embedding(1, 1, _weight=weight.clone())
    optimizers = [getattr(torch.optim, kind)(m.parameters(), lr=0.1, **arguments) for m in pair]
    for step in range(6):
        if step == 3 and whose != "none":
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            optimizers = [getattr(torch.optim, kind)(m.parameters(), lr=0.1, **arguments) for m in pair]
            optimizers[0].load_state_dict(saved[whose == "theirs"])
            optimizers[1].load_state_dict(saved[1])
        for module, optimizer in zip(pair, optimizers):
            optimizer.zero_grad()
            (module(torch.zeros(3, dtype=torch.int64)) * (step + 1)).sum().backward()
            optimizer.step()
    assert_same(pair)


@pytest.mark.parametrize("hashed", [False, True])
def test_adagrad_s_state_of_an_anchor_is_none_of_a_table_of_one_element(trainer: frugal.Trainer, hashed: bool) -> None:
    module: Any = ft.Embedding(1, 1, dtype=torch.bfloat16, hashed=hashed, trainer=trainer)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.1)
    module(torch.zeros(1, dtype=torch.int64)).sum().backward()
    optimizer.step()
    expected = torch.full((1, 1), 0.1) + 1.0  # 0.1 in float32, and not in the anchor's dtype
    assert torch.equal(optimizer.state[module.weight]["sum"], expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (), (100, 30, 2)])
def test_an_output_may_be_detached_in_place(trainer: frugal.Trainer, shape: Tuple[int, ...]) -> None:
    """As one of torch.nn's, it is no view, whatever its shape."""
    module = ft.Embedding(10, 8, trainer=trainer)
    for graph in (True, False):
        with torch.set_grad_enabled(graph):
            out = module(torch.zeros(shape, dtype=torch.int64))
        assert out.shape == (*shape, 8) and out.requires_grad == graph and not out._is_view()
        assert not out.detach_().requires_grad
    out = module(torch.zeros(shape, dtype=torch.int64))
    out.mul_(2.0).sum().backward()
    expected = torch.zeros(10, 8)
    expected[0] = 2.0 * math.prod(shape)
    grad = module.weight.grad
    assert grad is not None and torch.equal(grad, expected)


def test_a_graph_is_used_once(trainer: frugal.Trainer) -> None:
    """Though PyTorch's own nodes would let it be used again."""
    module, keys = ft.EmbeddingBag(10, 8, mode="sum", trainer=trainer), torch.tensor([[1, 2]])
    out = module(keys)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    grad = module.weight.grad
    assert grad is not None and grad[1].tolist() == [2.0] * 8
    out = module(keys)
    keys.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    grad = module.weight.grad
    assert grad is not None and grad[3].tolist() == [0.0] * 8


def test_gradients_that_are_asked_for_after_one_that_failed(trainer: frugal.Trainer) -> None:
    module, keys = ft.EmbeddingBag(10, 8, mode="sum", trainer=trainer), torch.tensor([[1, 2]])
    (anchor,) = module.parameters()
    first = torch.ones((), requires_grad=True)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("no")

    between = first * 1.0
    between.register_hook(fail)
    with pytest.raises(KeyError):
        torch.autograd.grad((module(keys).sum() * between, ), [anchor, first])
    (found,) = torch.autograd.grad((module(keys) + module(keys)).sum(), [anchor])
    assert found.norm() == 8.0 and anchor.grad is None
    module(keys).sum().backward()
    assert anchor.grad is not None and anchor.grad.norm() == 4.0


def test_what_replaces_a_weight_is_refused(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(10, 8, trainer=trainer)
    with pytest.raises(NotImplementedError, match="prun"):
        prune.l1_unstructured(module, "weight", amount=0.5)
    for compute in (
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        torch.nn.utils.parametrizations.spectral_norm,
        torch.nn.utils.parametrizations.orthogonal,
        torch.nn.utils.parametrizations.weight_norm,
        lambda module, name: parametrize.register_parametrization(module, name, torch.nn.Identity()),
    ):
        with pytest.raises(NotImplementedError, match="write rows to module.weight"):
            compute(module, "weight")
    assert len(list(module.parameters())) == 1
    module(torch.tensor([[1]])).sum().backward()


def test_an_ensemble(trainer: frugal.Trainer) -> None:
    """Of the rows that modules have now, as tensors."""
    modules = [ft.EmbeddingBag(10, 8, mode="sum", trainer=trainer) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(modules)
    assert torch.equal(parameters["weight"], torch.stack([module.weight.detach() for module in modules]))
    keys = torch.tensor([[1, 2], [3, 3]])

    def one(some: Any, others: Any) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(modules[0], (some, others), (keys,))
        return out

    found = torch.func.vmap(one)(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([module(keys) for module in modules]))


def test_means_of_gradients(trainer: frugal.Trainer) -> None:
    ours, theirs = ft.EmbeddingBag(10, 8, mode="sum", trainer=trainer), torch.nn.EmbeddingBag(10, 8, mode="sum")
    for module in (ours, theirs):
        module(torch.tensor([[1, 2, 2], [4, 4, 4]])).sum().backward()
    (mine,), (other,) = (list(module.parameters()) for module in (ours, theirs))
    assert mine.grad is not None and other.grad is not None
    assert torch.equal(mine.grad.mean(), other.grad.mean())
    grad = ours.weight.grad
    assert grad is not None and torch.equal(grad.abs().mean(), other.grad.abs().mean())


# --- Averages of models ---

averages = torch.optim.swa_utils
AVERAGES: Dict[str, Dict[str, Any]] = {
    "usual": {},
    "ema": {"avg_fn": averages.get_ema_avg_fn(0.9)},
    "swa": {"avg_fn": averages.get_swa_avg_fn()},
    "ema of lists": {"multi_avg_fn": averages.get_ema_multi_avg_fn(0.9)},
    "swa of lists": {"multi_avg_fn": averages.get_swa_multi_avg_fn(), "use_buffers": True},
}


def averaged(kind: str, model_is_ours: bool, average_is_ours: bool, trainer: frugal.Trainer) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Linear(DIM, 2))
    average: Any = averages.AveragedModel(model, **AVERAGES[kind])
    for which in [model] * model_is_ours + [average.module] * average_is_ours:
        ft.convert(which, trainer=trainer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.arange(9)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    return snapshot(average.module[0])


@pytest.mark.parametrize("kind", list(AVERAGES))
@pytest.mark.parametrize("ours", [(True, False), (False, True), (True, True)])
def test_an_average_is_one_of_rows(kind: str, ours: Tuple[bool, bool], trainer: frugal.Trainer) -> None:
    expected = averaged(kind, False, False, trainer)
    torch.testing.assert_close(averaged(kind, *ours, trainer), expected, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_each_backward_steps_tables(pair: Pair) -> None:
    """It finds the parameter by the node that accumulates its gradient."""
    from torch.distributed import optim

    for module in pair:
        getattr(optim, "_apply_optimizer_in_backward")(torch.optim.SGD, list(module.parameters()), {"lr": 0.5})
        for seed in range(3):
            backward(module, seed)
    torch.testing.assert_close(*map(snapshot, pair), rtol=1e-5, atol=1e-6)


def test_functions_of_averages_take_parameters(pair: Pair) -> None:
    found = []
    for module in pair:
        average = torch.zeros(ROWS, DIM)
        averages.get_ema_multi_avg_fn(0.5)([average], list(module.parameters()), 1)
        found.append(average)
    assert torch.equal(*found)


# --- PyTorch's own way to resume ---


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not in this build")
@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adagrad", "Adam", "AdamW", "RMSprop"])
def test_a_fresh_optimizer_takes_state_by_names(kind: str, trainer: frugal.Trainer) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make(ours: bool) -> Tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Linear(DIM, 2))
        if ours:
            ft.convert(model, trainer=trainer)
        options = {"momentum": 0.9} if kind == "momentum" else {}
        return model, getattr(torch.optim, "SGD" if options else kind)(model.parameters(), lr=0.1, **options)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(ROWS)).square().mean().backward()
            optimizer.step()

    found = []
    for ours in (False, True):
        model, optimizer = make(ours)
        train(model, optimizer)
        saved = copy.deepcopy(get_state_dict(model, optimizer))
        again, fresh = make(ours)
        set_state_dict(again, fresh, model_state_dict=saved[0], optim_state_dict=saved[1])
        weight = next(again.parameters())
        assert weight.grad is None
        train(again, fresh)
        found.append([weight.detach().clone(), fresh.state_dict()["state"].get(0, {})])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


# --- steps by functions ---


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["adadelta", "adagrad", "adam", "adamax", "adamw", "rmsprop", "rprop", "sgd"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functional_optimizers_say_what_steps_a_table(kind: str, foreach: bool, trainer: frugal.Trainer) -> None:
    functional = pytest.importorskip(f"torch.distributed.optim.functional_{kind}")
    (name,) = [name for name in vars(functional) if name.lower() == f"_functional{kind}"]
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    optimizer = getattr(functional, name)([module.weight], lr=0.1, foreach=foreach)
    before = snapshot(module)
    module(torch.arange(5)).square().sum().backward()
    said = r"^table 'embedding_0': a function of torch.optim.* cannot step it: give module.parameters"
    with pytest.raises(NotImplementedError, match=said):
        optimizer.step([module.weight.grad])
    assert torch.equal(snapshot(module), before)


def test_a_function_that_writes_rows_steps_a_table(trainer: frugal.Trainer) -> None:
    from torch.optim._functional import sparse_adam

    found: List[Any] = []
    weight = integers(ROWS, DIM)
    for module in (
        torch.nn.Embedding(ROWS, DIM, sparse=True, _weight=weight.clone()),
        ft.Embedding(ROWS, DIM, sparse=True, _weight=weight, trainer=trainer),
    ):
        rows = [torch.zeros(ROWS, DIM) for _ in range(2)]
        module(torch.arange(5)).square().sum().backward()
        with torch.no_grad():
            sparse_adam(
                [module.weight], [cast(torch.Tensor, module.weight.grad)], rows[:1], rows[1:], [1],
                beta1=0.9, beta2=0.99, lr=0.1, eps=1e-8, maximize=False,
            )  # fmt: skip
        found.append([module.weight.detach().clone(), *rows])
    torch.testing.assert_close(*found)
