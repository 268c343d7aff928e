"""Functions of lists in which parameters, weights and gradients of tables are mixed; what a gradient gives to hooks,
under inference_mode() and as values; and what has its values. Each is compared with torch.nn."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch_support import DIM, ROWS, integers

import frugal
import frugal.torch as ft
from frugal.torch import _computed

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
    """What a program sees that has kept detach() of a gradient, or the gradient itself."""

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
    if _computed._set_data_message is None:  # this PyTorch is too old
        assert bool(torch.isnan(other.sum()))
        return
    with pytest.raises(RuntimeError, match=r"take module.weight.grad.to_dense\(\)"):
        other.sum()


# --- What a fresh look found ---


LATER: Dict[str, Callable[[Any], Any]] = {
    "a view, clamped from above": lambda g: view_after(g, lambda g: g.clamp_(-1, 0.5)),
    "a view, its own clamp": lambda g: view_after(g, lambda g: g.clamp_(max=1.0)),
    "a view, without infinities": lambda g: view_after(
        g.mul_(float("inf")), lambda g: torch.nan_to_num(g, 0.5, 9.0, out=g)
    ),
    "a view, clamped and scaled": lambda g: view_after(g, lambda g: g.clamp_(-1, 1).mul_(2).mul_(0.5)),
    "any, by rows": lambda g: torch.isnan(g).any(dim=1),
    "all, by rows": lambda g: torch.isfinite(g).all(1),
    "divided by 0": lambda g: (g + 1.0) / 0,
    "squares": lambda g: (g**2).add_(1e-8).sqrt_(),
    "a running mean": lambda g: running_mean(g),
}


def view_after(grad: Any, change: Callable[[Any], Any]) -> Any:
    view = grad[1]
    change(grad)
    seen = view.clone()
    view *= 2
    return [seen, grad[:3].clone()]


def running_mean(grad: Any) -> Any:
    mean = grad.data.clone().pow(2)
    kept = mean.clone()
    mean.mul_(0.5).add_(grad, alpha=0.25)
    return [kept + 0, mean + 0]


@pytest.mark.parametrize("what", LATER)
def test_what_is_made_of_a_gradient_later(trainer: frugal.Trainer, what: str) -> None:
    found = []
    for module in (ft.Embedding(7, 3, trainer=trainer), torch.nn.Embedding(7, 3)):
        module(torch.tensor([0, 1, 2, 1])).sum().backward()
        made = LATER[what](module.weight.grad)
        found.append([each.detach() for each in (made if isinstance(made, list) else [made])])
    assert len(found[0]) == len(found[1])
    for mine, expected in zip(*found):
        assert torch.equal(mine, expected), (mine, expected)


ASSIGNED: Dict[str, Callable[[Any], Any]] = {
    "absolute values": lambda g: g.abs(),
    "squares": lambda g: g**2,
    "sparse": lambda g: g.to_sparse(),
    "sparse rows": lambda g: g.to_sparse(1),
}


@pytest.mark.parametrize("what", ASSIGNED)
def test_what_was_made_of_a_gradient_becomes_it(trainer: frugal.Trainer, what: str) -> None:
    weight, rows = torch.arange(21.0).view(7, 3), []
    ours, theirs = ft.Embedding(7, 3, _weight=weight, trainer=trainer), torch.nn.Embedding(7, 3, _weight=weight.clone())
    for module in (ours, theirs):
        (module(torch.tensor([0, 1, 2, 1])) * torch.tensor([-1.0, 2.0, 3.0])).sum().backward()
        module.weight.grad = ASSIGNED[what](module.weight.grad)
        torch.optim.SGD(module.parameters(), lr=0.5).step()
        rows.append(module.weight.detach().clone())
    assert torch.equal(*rows)


def test_a_gradient_is_no_number(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(7, 3, trainer=trainer)
    module(torch.tensor([0, 1])).sum().backward()
    grad: Any = module.weight.grad
    for number in (float, int, bool, lambda g: g.item()):
        with pytest.raises(RuntimeError, match="21 elements"):
            number(grad)
    with pytest.raises(TypeError, match="expected to be a Tensor"):
        module.weight.grad = 5  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="own grad"):
        module.weight.grad = module.weight


def test_a_mean_of_half_numbers_is_no_infinity(trainer: frugal.Trainer) -> None:
    for module in (ft.Embedding(600, 8, trainer=trainer).half(), torch.nn.Embedding(600, 8).half()):
        (module(torch.arange(600)) * 100).sum().backward()
        grad: Any = module.weight.grad
        assert float(grad.mean()) == float(grad.abs().mean()) == 100.0 and grad.mean().dtype == torch.float16


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 3


class Clamped(torch.autograd.Function):
    """Writes to what it gets."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        weight.clamp_(-1.0, 1.0)
        return weight.round()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, weight: Any, factor: float = 2.0) -> Any:
        return x @ weight.t() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


BAGS = torch.tensor([[1, 2, 1], [4, 4, 5]])
_product: Any = Product.apply
_clamped: Any = Clamped.apply
_identity: Any = Identity.apply
_scaled: Any = Scaled.apply
FUNCTIONS: Dict[str, Callable[[Any], Any]] = {
    "a product": lambda module: _product(torch.ones(2, 3), module.weight),
    "its context is set up later": lambda module: _scaled(torch.ones(2, 3), module.weight),
    "rows of the result": lambda module: _identity(module.weight)[BAGS],
    "a lookup in the result": lambda module: torch.nn.functional.embedding(BAGS, _clamped(module.weight)),
    "bags of the result": lambda module: torch.nn.functional.embedding_bag(BAGS, _identity(module.weight), mode="sum"),
    "with a forward of the module": lambda module: module(BAGS).sum() + _product(torch.ones(2, 3), module.weight),
    "without gradients": lambda module: module(BAGS) * torch.no_grad()(_identity)(module.weight)[BAGS],
    "a checkpoint": lambda module: torch.utils.checkpoint.checkpoint(
        torch.nn.functional.embedding, BAGS, module.weight, use_reentrant=True
    ),
}


@pytest.fixture(params=["alone", "in a process group"])
def group(request: Any, tmp_path: Any) -> Any:
    """Where a reducer may put its own in the place of a gradient."""
    if request.param == "alone":
        yield None
        return
    if not dist.is_available():
        pytest.skip("torch.distributed is not in this build")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield None
    dist.destroy_process_group()


@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_function_of_a_caller_s_gets_rows(trainer: frugal.Trainer, what: str, group: None) -> None:
    module = ft.Embedding(7, 3, trainer=trainer)
    found = []
    for made in (module, torch.nn.Embedding(7, 3, _weight=module.weight.detach().clone())):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.25)
        for _ in range(2):
            optimizer.zero_grad()
            FUNCTIONS[what](made).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(made.parameters(), 4.0)
            optimizer.step()
        found.append([norm, made.weight.detach().clone()])
    torch.testing.assert_close(*found)


def test_a_function_in_cpp_gets_one_element(trainer: frugal.Trainer, group: None) -> None:
    """Its gradient is an error, and not one number for all rows."""
    module = ft.Embedding(7, 3, trainer=trainer)
    theirs = torch.nn.Embedding(7, 3, _weight=module.weight.detach().clone())
    in_cpp: Any = super(torch.autograd.function._SingleLevelFunction, Product).apply
    in_cpp(torch.ones(2, 3), module.weight).sum().backward()
    with pytest.raises(NotImplementedError, match=r"module\.weight\.clone\(\)"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for made in (module, theirs):
        in_cpp(torch.ones(2, 3), made.weight.clone()).sum().backward()
    grads = module.weight.grad, theirs.weight.grad
    assert grads[0] is not None and torch.equal(*grads)  # type: ignore[arg-type]


def test_buckets_of_gradients() -> None:
    """As programs make them that sum gradients over ranks by hand."""
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    model = torch.nn.ModuleList([ft.Embedding(5, 3), torch.nn.Linear(3, 2)])
    model[1](model[0](torch.tensor([1, 2, 1]))).sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    before = [grad.clone() for grad in grads]
    bucket = _flatten_dense_tensors(grads)
    assert bucket.shape == (5 * 3 + 3 * 2 + 2,)
    for grad, part in zip(grads, _unflatten_dense_tensors(bucket * 2, grads)):
        assert part.shape == grad.shape
        grad.copy_(part)
    assert all(torch.equal(grad, 2 * old) for grad, old in zip(grads, before))
    assert torch.zeros(15).view_as(grads[0]).shape == torch.zeros(15).reshape_as(grads[0]).shape == (5, 3)


# --- hooks of torch.autograd.graph ---


class Unused(torch.autograd.Function):
    """A sum whose first term gets no gradient."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


def calls_of_hooks(kind: Any, trained: int, dense: bool) -> Any:
    torch.manual_seed(3)
    tables = [kind(ROWS, DIM) for _ in range(3)]
    head = torch.nn.Linear(DIM, 1)
    weights = [table.weight for table in tables]
    called: List[Any] = []

    def call(grads: Any) -> None:
        called.append([None if grad is None else grad.detach().clone() for grad in grads])

    def loss() -> torch.Tensor:
        return head(sum(table(torch.tensor([1, 2])) for table in tables[:trained])).sum()  # type: ignore[no-any-return]

    hooked = [*weights, head.weight] if dense else weights
    handles = [
        torch.autograd.graph.register_multi_grad_hook(hooked, call, mode="all"),
        torch.autograd.graph.register_multi_grad_hook(hooked, lambda grad: called.append(grad is None), mode="any"),
    ]
    for inputs in (None, None, weights[:1]):
        loss().backward(inputs=inputs)
    Unused.apply(tables[0](torch.tensor([1])), head.weight).sum().backward()
    for handle in handles:
        handle.remove()
    loss().backward()
    return called


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("trained", [1, 2, 3])
def test_a_hook_of_several_gradients_is_called_once_with_all(trained: int, dense: bool) -> None:
    theirs, ours = [calls_of_hooks(kind, trained, dense) for kind in (torch.nn.Embedding, ft.Embedding)]
    torch.testing.assert_close(ours, theirs)


def calls_of_a_node(kind: Any, node_of: Any) -> Any:
    torch.manual_seed(3)
    module = kind(ROWS, DIM)
    node = node_of(module.weight)
    called: List[Any] = []

    def after(inputs: Any, outputs: Any) -> None:
        called.append((inputs, module.weight.grad[...].clone()))

    node.register_hook(after)
    assert node.variable is module.weight
    for _ in range(2):
        module(torch.tensor([1, 2])).sum().backward()
    edge = torch.autograd.graph.get_gradient_edge(module.weight)
    found = torch.autograd.grad(module(torch.tensor([3])).sum(), [edge])
    return called, found[0][...].clone()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("view", ["expand_as", "view_as"])
def test_the_node_of_a_parameter_is_found_and_has_hooks(view: str, named: bool) -> None:
    def node_of(parameter: Any) -> Any:
        if not named:
            return getattr(parameter, view)(parameter).grad_fn.next_functions[0][0]
        rows = getattr(parameter, view)(parameter)
        return rows.grad_fn.next_functions[0][0]

    theirs, ours = [calls_of_a_node(kind, node_of) for kind in (torch.nn.Embedding, ft.Embedding)]
    torch.testing.assert_close(ours, theirs)


def uses_of_a_whole_view(kind: Any, view: str) -> Any:
    torch.manual_seed(3)
    module = kind(ROWS, DIM)
    rows = getattr(module.weight, view)(module.weight)
    found = [rows.clone(), rows.t().sum()]
    (rows * rows.detach()).sum().backward()
    found.append(module.weight.grad.clone())
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        rows.mul_(2)
    squares = getattr(module.weight, view)(module.weight).square().sum()
    with torch.no_grad():
        getattr(module.weight, view)(module.weight).mul_(2)
    found += [rows.clone(), module.weight.clone()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    return found


@pytest.mark.parametrize("view", ["expand_as", "view_as"])
def test_a_parameter_viewed_as_itself_shows_its_rows(view: str) -> None:
    theirs, ours = [uses_of_a_whole_view(kind, view) for kind in (torch.nn.Embedding, ft.Embedding)]
    torch.testing.assert_close(ours, theirs)
