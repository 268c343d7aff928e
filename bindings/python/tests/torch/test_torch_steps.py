"""Which call begins and ends a step, and the optimizer that ends it."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import copy
import linecache
import sys
import threading
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch_support import DIM, ROWS, bag_pair, committed, integers, sgd, snapshot

import frugal
import frugal.torch as ft
from frugal.torch import _usual


def keys(*shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, shape or (6, 2))


@pytest.fixture
def pair(trainer: frugal.Trainer) -> Any:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    return ours, theirs, ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5)


def same(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours.weight, theirs.weight.detach())


def train(pair: Any, batch: torch.Tensor) -> None:
    ours, theirs, tables, dense = pair
    dense.zero_grad()
    tables.zero_grad()
    grad = integers(batch.shape[0], DIM)
    ours(batch).backward(grad)
    theirs(batch).backward(grad)
    dense.step()
    tables.step()


def test_a_step_is_one_step(engine: frugal.Engine, pair: Any) -> None:
    for step in range(5):
        train(pair, keys())
        assert committed(engine) == step + 1 and engine.committed_step() == step
    assert same(*pair[:2])


@pytest.mark.parametrize("zero_grad", ["first", "between", "last", "never"])
def test_zero_grad_may_stand_where_loops_have_it(engine: frugal.Engine, pair: Any, zero_grad: str) -> None:
    ours, theirs, tables, dense = pair
    for _ in range(3):
        batch, grad = keys(), integers(6, DIM)
        if zero_grad == "first":
            tables.zero_grad()
        out = ours(batch)
        if zero_grad == "between":
            tables.zero_grad()
        out.backward(grad)
        tables.step()
        if zero_grad == "last":
            tables.zero_grad()
        dense.zero_grad()
        theirs(batch).backward(grad)
        dense.step()
    assert same(ours, theirs)
    assert engine.stats()["steps_aborted"] == 0


def test_zero_grad_after_backward_throws_gradients_away(engine: frugal.Engine, pair: Any) -> None:
    ours, theirs, tables, dense = pair
    before = snapshot(ours)
    ours(keys()).sum().backward()
    tables.zero_grad()
    tables.step()
    assert torch.equal(ours.weight, before)
    batch, grad = keys(), integers(6, DIM)
    kept = ours(batch)
    ours(keys()).sum().backward()
    tables.zero_grad()
    kept.backward(grad)
    theirs(batch).backward(grad)
    tables.step()
    dense.step()
    assert not torch.equal(ours.weight, before) and same(ours, theirs)


def test_gradients_of_several_forwards_add_up(engine: frugal.Engine, pair: Any) -> None:
    ours, theirs, tables, dense = pair
    for _ in range(3):
        dense.zero_grad()
        for _ in range(4):
            batch, grad = keys(), integers(6, DIM)
            ours(batch).backward(grad)
            theirs(batch).backward(grad)
        first, second = keys(), keys(4, 3)
        grad = integers(6, DIM)
        a, b = ours(first), ours(second)
        torch.autograd.backward([a, b], [grad, grad[:4]])
        torch.autograd.backward([theirs(first), theirs(second)], [grad, grad[:4]])
        dense.step()
        tables.step()
    assert same(ours, theirs) and committed(engine) == 3


def test_a_forward_without_backward_changes_nothing(engine: frugal.Engine, pair: Any) -> None:
    ours, theirs, tables, dense = pair
    before = snapshot(ours)
    ours(keys())
    assert torch.equal(ours.weight, before)  # ends the step that holds nothing, for it
    ours(keys())
    tables.step()
    assert torch.equal(ours.weight, before) and committed(engine) == 1
    train(pair, keys())
    assert same(ours, theirs)


def test_rows_can_be_had_while_gradients_wait(engine: frugal.Engine, pair: Any) -> None:
    ours, theirs, tables, dense = pair
    for _ in range(3):
        for _ in range(2):
            batch, grad = keys(), integers(6, DIM)
            ours(batch).backward(grad)
            theirs(batch).backward(grad)
            assert torch.equal(ours.state_dict()["weight"], theirs.weight.detach())
            tables.state_dict()
            assert same(ours, theirs)
            with torch.no_grad():
                assert torch.equal(ours(batch), theirs(batch))
        tables.step()
        dense.step()
        dense.zero_grad()
        assert same(ours, theirs)
    assert committed(engine) == 3


def test_rows_may_be_loaded_while_gradients_wait(pair: Any) -> None:
    ours, theirs, tables, dense = pair
    batch, grad, weight = keys(), integers(6, DIM), integers(ROWS, DIM)
    for module in (ours, theirs):
        module(batch).backward(grad)
        module.load_state_dict({"weight": weight})
    tables.step()
    dense.step()
    assert same(ours, theirs) and not torch.equal(ours.weight, weight)


def test_a_backward_after_step_counts_for_the_next(engine: frugal.Engine, pair: Any) -> None:
    ours, theirs, tables, dense = pair
    batch, grad = keys(), integers(6, DIM)
    out, expected = ours(batch), theirs(batch)
    tables.step()
    dense.step()
    assert same(ours, theirs)
    out.backward(grad)
    expected.backward(grad)
    tables.step()
    dense.step()
    assert same(ours, theirs) and committed(engine) == 2


def test_a_late_backward_has_no_gradient_of_weights(trainer: frugal.Trainer) -> None:
    """torch's: a variable needed for gradient computation has been modified."""
    bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    tables = ft.Optimizer(bags)
    before = snapshot(bags)
    for training in (True, False):
        bags.train(training)
        out = bags(keys(), per_sample_weights=torch.ones(6, 2, requires_grad=True))
        tables.step()
        with pytest.raises(RuntimeError, match=r"before the optimizer's step\(\)"):
            out.sum().backward()
        tables.step()
        assert torch.equal(bags.weight, before)
    bags.requires_grad_(False)  # no step changes the rows
    weights = torch.ones(6, 2, requires_grad=True)
    batch = keys()
    out = bags(batch, per_sample_weights=weights)
    tables.step()
    out.sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, before[batch].sum(2))


def test_a_retained_graph_is_pushed_again(pair: Any) -> None:
    ours, theirs, tables, dense = pair
    batch, grad = keys(), integers(6, DIM)
    for module in (ours, theirs):
        out = module(batch)
        out.backward(grad, retain_graph=True)
        out.backward(grad)
        with pytest.raises(RuntimeError, match="second time"):
            out.backward(grad)
    tables.step()
    dense.step()
    assert same(ours, theirs)


def test_a_second_derivative_is_an_error(trainer: frugal.Trainer) -> None:
    bags = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    weights = torch.ones(6, 2, requires_grad=True)
    (first,) = torch.autograd.grad((bags(keys(), per_sample_weights=weights) ** 2).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="has one derivative"):
        first.sum().backward()


def test_backward_on_another_thread(pair: Any) -> None:
    ours, theirs, tables, dense = pair
    for _ in range(3):
        batch, grad = keys(), integers(6, DIM)
        out = ours(batch)
        thread = threading.Thread(target=out.backward, args=(grad,))
        thread.start()
        thread.join()
        dense.zero_grad()
        theirs(batch).backward(grad)
        tables.step()
        dense.step()
    assert same(ours, theirs)


def test_forwards_and_backwards_of_several_threads(pair: Any) -> None:
    ours, theirs, tables, dense = pair
    batches = [(keys(), integers(6, DIM)) for _ in range(8)]
    failures: List[BaseException] = []

    def work(mine: List[Any]) -> None:
        try:
            for batch, grad in mine:
                ours(batch).backward(grad)
        except BaseException as error:  # noqa: B036
            failures.append(error)

    threads = [threading.Thread(target=work, args=(batches[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for batch, grad in batches:
        theirs(batch).backward(grad)
    tables.step()
    dense.step()
    assert same(ours, theirs)


def test_several_modules_share_a_step(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    model = {name: ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=sgd()) for name in "abc"}
    tables = ft.Optimizer(torch.nn.ModuleDict(model))
    assert [group["name"] for group in tables.param_groups] == [model[name].table.name for name in "abc"]
    before = {name: snapshot(model[name]) for name in "abc"}
    ids = torch.tensor([1, 2])
    (model["a"](ids).sum() + 2 * model["b"](ids).sum()).backward()
    tables.step()
    for name, change in (("a", 0.5), ("b", 1.0), ("c", 0.0)):
        torch.testing.assert_close(before[name][ids] - model[name].weight[ids], torch.full((2, DIM), change))
    assert committed(engine) == 1


def test_step_without_a_forward_is_an_empty_step(engine: frugal.Engine, pair: Any) -> None:
    before = snapshot(pair[0])
    pair[2].step()
    assert committed(engine) == 1 and torch.equal(pair[0].weight, before)


def test_step_takes_a_closure(pair: Any) -> None:
    ours, _, tables, _ = pair
    before = snapshot(ours)

    def closure() -> float:
        loss = ours(torch.tensor([[3]])).sum()
        loss.backward()
        return loss.item()  # type: ignore[no-any-return]

    assert tables.step(closure) == before[3].sum().item()
    assert torch.equal(ours.weight[3], before[3] - 0.5)


def test_a_model_beside_it_trains_as_before(trainer: frugal.Trainer) -> None:
    weight = torch.randn(ROWS, DIM)
    ours, theirs = bag_pair(trainer, weight, mode="sum", optimizer=sgd(0.1))
    heads = [torch.nn.Linear(DIM, 1) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    models = [torch.nn.Sequential(ours, heads[0]), torch.nn.Sequential(theirs, heads[1])]
    optimizers: List[List[torch.optim.Optimizer]] = [
        [ft.Optimizer(models[0]), torch.optim.SGD(models[0].parameters(), lr=0.1)],
        [torch.optim.SGD(models[1].parameters(), lr=0.1)],
    ]
    losses: List[List[float]] = [[], []]
    for _ in range(20):
        batch, target = keys(16, 3), torch.randn(16, 1)
        for model, mine, out in zip(models, optimizers, losses):
            for optimizer in mine:
                optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), target)
            loss.backward()
            for optimizer in mine:
                optimizer.step()
            out.append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-4, atol=1e-5)


def no_gradient(run: Callable[[], torch.Tensor], module: Any) -> torch.Tensor:
    with torch.no_grad():
        return run()


def inference(run: Callable[[], torch.Tensor], module: Any) -> torch.Tensor:
    with torch.inference_mode():
        return run()


def frozen(run: Callable[[], torch.Tensor], module: Any) -> torch.Tensor:
    module.requires_grad_(False)
    try:
        return run()
    finally:
        module.requires_grad_(True)


@pytest.mark.parametrize("way", [no_gradient, inference, frozen])
def test_evaluation_reads_and_creates_nothing(engine: frugal.Engine, trainer: frugal.Trainer, way: Any) -> None:
    bags = ft.EmbeddingBag(1000, DIM, mode="sum", hashed=True, trainer=trainer, optimizer=sgd())
    tables = ft.Optimizer(bags)
    seen = torch.tensor([[5], [7]])
    unseen = torch.tensor([[6], [8]])
    for step in range(3):
        out = way(lambda: bags(unseen), bags)
        assert torch.equal(out, torch.zeros(2, DIM)) and not out.requires_grad
        assert committed(engine) == step
        trained = bags(seen)
        # Inside the step too; it sees what the forward saw.
        assert torch.equal(way(lambda: bags(seen), bags), trained.detach())
        assert torch.equal(way(lambda: bags(unseen), bags), torch.zeros(2, DIM))
        trained.sum().backward()
        tables.step()
        assert torch.equal(way(lambda: bags(seen), bags), trained.detach() - 0.5)
    assert engine.stats()["rows_created"] == 2


def test_eval_does_not_stop_training(engine: frugal.Engine, pair: Any) -> None:
    ours, theirs, tables, dense = pair
    before = snapshot(ours)
    ours.eval()
    theirs.eval()
    train(pair, keys())
    assert same(ours, theirs) and not torch.equal(ours.weight, before) and committed(engine) == 1


def test_modules_may_be_made_and_kept_from_inference_mode(trainer: frugal.Trainer) -> None:
    with torch.inference_mode():
        bags = ft.EmbeddingBag(ROWS, DIM, trainer=trainer, optimizer=sgd())
        bags(torch.zeros(2, 2, dtype=torch.int64))
    out = bags(torch.zeros(2, 2, dtype=torch.int64))
    out.sum().backward()
    ft.Optimizer(bags).step()


def test_schedulers_change_the_rate_of_a_step(trainer: frugal.Trainer) -> None:
    makers: Dict[str, Callable[[Any], Any]] = {
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.25 ** (n % 2)),
        "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=8, cycle_momentum=False),
        "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    }
    for name, make in makers.items():
        ours, theirs = bag_pair(trainer, torch.randn(ROWS, DIM), mode="sum")
        pair = (ours, theirs, ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5))
        schedulers = [make(pair[2]), make(pair[3])]
        for _ in range(6):
            train(pair, keys())
            for scheduler in schedulers:
                scheduler.step()
        assert pair[2].param_groups[0]["lr"] == pair[3].param_groups[0]["lr"], name
        torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-5, atol=1e-5)


def test_groups_have_the_table_s_hyper_parameters(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer, optimizer=frugal.Momentum(lr=0.5, momentum=0.0, nesterov=True))
    tables = ft.Optimizer(module)
    (group,) = tables.param_groups
    assert group["momentum"] == 0.0 and group["nesterov"] and group["name"] == module.table.name
    before = snapshot(module)
    group["clip_value"] = 0.25
    module(torch.tensor([0, 1])).sum().backward()
    tables.step()
    group["clip_value"] = 0.0
    group["weight_decay"] = 1.0
    module(torch.tensor([2])).sum().backward()
    tables.step()
    after = module.weight
    torch.testing.assert_close(after[:2], before[:2] - 0.125)
    torch.testing.assert_close(after[2], (before[2] - 0.5) * 0.5)


def test_optimizer_says_what_is_wrong(engine: frugal.Engine, trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    with pytest.raises(ValueError, match="no module of frugal.torch"):
        ft.Optimizer(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="torch.nn.Modules"):
        ft.Optimizer([torch.zeros(2)])  # type: ignore[list-item]
    with frugal.Engine() as other, other.create_trainer() as stranger:
        with pytest.raises(ValueError, match="several trainers"):
            ft.Optimizer([module, ft.Embedding(ROWS, DIM, trainer=stranger)])
    older = ft.Optimizer(module)
    newer = ft.Optimizer(module)
    with pytest.raises(RuntimeError, match="newer"):
        older.step()
    newer.step()


def test_an_exception_in_the_loop_leaves_a_step_that_goes_on(pair: Any) -> None:
    ours, theirs, tables, dense = pair
    with pytest.raises(ZeroDivisionError):
        ours(keys()).sum().backward()
        raise ZeroDivisionError
    tables.zero_grad()
    train(pair, keys())
    assert same(ours, theirs)
    with pytest.raises(frugal.KeyOutOfRange):
        ours(torch.full((2, 2), ROWS))
    train(pair, keys())
    assert same(ours, theirs)


def test_an_interrupt_after_the_gate_is_made_good(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, tables, dense = pair
    train(pair, keys())
    native = type(tables._steps.native)
    begin = native.begin

    def interrupted(*arguments: Any) -> None:
        begin(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native, "begin", interrupted)
        patch.setattr(ours, "_usual", lambda *arguments: None)  # in C++ an interrupt comes after the gate has opened
        with pytest.raises(KeyboardInterrupt):
            ours(keys())
    train(pair, keys())
    assert same(ours, theirs)


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_of_a_push_leaves_gradients(
    engine: frugal.Engine, pair: Any, monkeypatch: pytest.MonkeyPatch, pushed: bool, again: bool
) -> None:
    """Of the step nothing is done: the gradient is there, for another step() or for zero_grad()."""
    ours, theirs, tables, dense = pair
    before, batch, grad = snapshot(ours), keys(), integers(6, DIM)
    native = type(tables._steps.native)
    push = native.push

    def interrupted(*arguments: Any) -> None:
        if pushed:
            push(*arguments)
        raise KeyboardInterrupt

    ours(batch).backward(grad)
    with monkeypatch.context() as patch:
        patch.setattr(native, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tables.step()
    assert committed(engine) == 0
    if again:
        theirs(batch).backward(grad)
        tables.step()
        dense.step()
        assert same(ours, theirs)
    else:
        tables.zero_grad()
        tables.step()
        assert torch.equal(ours.weight, before)
    train(pair, keys())
    assert same(ours, theirs)


@pytest.mark.parametrize("ended", [False, True])
def test_an_interrupt_of_a_step_s_end_ends_it(pair: Any, monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    ours, theirs, tables, dense = pair
    native = type(tables._steps.native)
    end = native.end
    times: List[int] = []

    def interrupted(*arguments: Any, **more: Any) -> None:
        times.append(1)
        if ended or len(times) > 1:
            end(*arguments, **more)
        if len(times) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native, "end", interrupted)
        batch = keys()
        ours(batch).sum().backward()
        theirs(batch).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            tables.step()
    dense.step()
    dense.zero_grad()
    assert same(ours, theirs)
    train(pair, keys())
    assert same(ours, theirs)


class Interrupt:
    """Raises KeyboardInterrupt where a function or a line begins during a call, in some files."""

    def __init__(self, *files: str) -> None:
        self.files, self.left = files, -1

    def call(self, at: int, function: Callable[[], Any]) -> bool:
        """Whether it was interrupted, at the place of this number."""
        self.left = at
        before = sys.gettrace()
        sys.settrace(self.place)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def place(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        # No signal comes between the end of a block and its lock's release, where the line of `with` comes again.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "call" or (event == "line" and not line.startswith("with ")):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self.place


@pytest.mark.parametrize("usual", [True, False])
@pytest.mark.parametrize("delegates", [False, True])
def test_an_interrupt_of_a_step_hides_no_gradient(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, usual: bool, delegates: bool
) -> None:
    """Wherever it comes, zero_grad() finds the gradient, and the next step trains its own batch alone."""
    if not usual:
        monkeypatch.setattr(_usual, "native", None)

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    module, dense = ft.Embedding(ROWS, DIM, trainer=trainer), torch.nn.Linear(DIM, 1)
    parameters = [*module.parameters(), *dense.parameters()]
    optimizer = (Other if delegates else torch.optim.SGD)(parameters, lr=1e-3, foreach=False)
    interrupt = Interrupt("torch/_hook.py", "torch/_usual.py", "torch/optim/optimizer.py", "torch/optim/sgd.py")
    for warm in range(2):
        dense(module(keys(4))).sum().backward()
        optimizer.step()
    ended, at = False, 0
    while not ended:
        optimizer.zero_grad()
        assert module.weight.grad is None
        dense(module(torch.tensor([1, 2]))).sum().backward()
        ended = not interrupt.call(at, optimizer.step)
        torch.set_grad_enabled(True)  # the step has it off
        assert module.weight.grad is not None, at
        optimizer.zero_grad()
        before = snapshot(module)
        dense(module(torch.tensor([at % ROWS]))).sum().backward()
        rows = module.weight.grad.abs().sum(dim=1).nonzero().flatten()
        assert rows.tolist() == [at % ROWS], at
        optimizer.step()
        changed = (snapshot(module) != before).any(dim=1).nonzero().flatten()
        assert changed.tolist() == [at % ROWS], at
        at += 1
    assert at > 100


def test_gradients_of_weights_do_not_mind_zero_grad(pair: Any) -> None:
    ours, theirs, tables, dense = pair
    batch, grad = keys(), integers(6, DIM)
    weights = [integers(6, 2).requires_grad_() for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    for module, optimizer, mine in ((ours, tables, weights[0]), (theirs, dense, weights[1])):
        module(keys()).sum().backward()
        out = module(batch, per_sample_weights=mine)
        optimizer.zero_grad()
        out.backward(grad)
        optimizer.step()
    assert weights[0].grad is not None and weights[1].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad) and same(ours, theirs)


def test_a_group_cannot_be_added(pair: Any) -> None:
    with pytest.raises(TypeError, match="those of the tables"):
        pair[2].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    train(pair, keys())


def test_nan_gradients_are_refused_and_nothing_is_taken(pair: Any) -> None:
    ours, theirs, tables, _ = pair
    other = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=ours.trainer, optimizer=sgd())
    both = ft.Optimizer([other, ours])
    before = snapshot(ours), snapshot(other)
    for bad in (ours, other):
        for module in (ours, other):
            out = module(torch.tensor([[5, 6], [7, 8]]))
            grad = torch.ones_like(out)
            grad[1, 2] = float("nan") if module is bad else 1.0
            out.backward(grad)
        step = ours.trainer.engine.stats()["steps_committed"]
        message = f"table '{bad.table.name}'.*step {step} has a NaN in row 1, column 2, of the key 7"
        for _ in range(2):  # the gradients are still there
            with pytest.raises(frugal.NanGradient, match=message):
                both.step()
            assert torch.equal(ours.weight, before[0]) and torch.equal(other.weight, before[1])
        both.zero_grad()
        both.step()
        assert torch.equal(ours.weight, before[0]) and torch.equal(other.weight, before[1])
    ours(torch.tensor([[0]])).sum().backward()
    both.step()
    assert torch.equal(ours.weight[0], before[0][0] - 0.5) and torch.equal(ours.weight[1:], before[0][1:])


# --- GradScaler ---


def scaled_step(pair: Any, scaler: Any, reference: Any, batch: torch.Tensor, grad: torch.Tensor, unscale: bool) -> None:
    ours, theirs, tables, dense = pair
    tables.zero_grad()
    dense.zero_grad()
    for module, optimizer, scale in ((ours, tables, scaler), (theirs, dense, reference)):
        scale.scale((module(batch) * grad).sum()).backward()
        if unscale:
            scale.unscale_(optimizer)
        scale.step(optimizer)
        scale.update()


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(engine: frugal.Engine, trainer: frugal.Trainer, unscale: bool) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    pair = (ours, theirs, ft.Optimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.5))
    scalers = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(8):
        grad = integers(6, DIM)
        if step in (2, 5):
            grad[3, 2] = float("inf")
        if step == 4:
            grad[0, 0] = float("nan")
        scaled_step(pair, scalers[0], scalers[1], keys(), grad, unscale)
        assert same(ours, theirs), step
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert committed(engine) == step + 1
    assert scalers[0].get_scale() != 1024.0


def test_grad_scaler_with_accumulation_and_a_dense_part(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    heads = [torch.nn.Linear(DIM, 1, bias=False) for _ in range(2)]
    for head in heads:
        with torch.no_grad():
            head.weight.copy_(torch.arange(DIM).float() - 3)
    tables = ft.Optimizer(ours)
    dense = [torch.optim.SGD(head.parameters(), lr=0.5) for head in heads]
    sparse = torch.optim.SGD(theirs.parameters(), lr=0.5)
    scalers = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    for step in range(4):
        batches = [(keys(), integers(6, 1)) for _ in range(3)]
        if step == 2:
            batches[1][1][0] = float("inf")
        for module, head, optimizers, scaler in (
            (ours, heads[0], (tables, dense[0]), scalers[0]),
            (theirs, heads[1], (sparse, dense[1]), scalers[1]),
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for batch, grad in batches:
                scaler.scale((head(module(batch)) * grad).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert torch.equal(heads[0].weight, heads[1].weight) and same(ours, theirs)


def test_weights_have_gradients_though_the_step_is_skipped(trainer: frugal.Trainer) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    ft.Optimizer(ours)
    batch, grad = keys(), integers(6, DIM)
    grad[2, 1] = float("inf")
    weights = [torch.ones(6, 2, requires_grad=True) for _ in range(2)]
    ours(batch, per_sample_weights=weights[0]).backward(grad)
    theirs(batch, per_sample_weights=weights[1]).backward(grad)
    torch.testing.assert_close(weights[0].grad, weights[1].grad, equal_nan=True)


# --- torch.compile ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_breaks_the_graph_and_trains(trainer: frugal.Trainer, backend: str) -> None:
    ours, theirs = bag_pair(trainer, integers(ROWS, DIM), mode="sum")
    heads = [torch.nn.Linear(DIM, 1, bias=False) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())

    class Model(torch.nn.Module):
        def __init__(self, bags: torch.nn.Module, head: torch.nn.Module) -> None:
            super().__init__()
            self.bags, self.head = bags, head

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.bags(batch * 1)) + 1)  # type: ignore[no-any-return]

    models = [Model(ours, heads[0]), Model(theirs, heads[1])]
    compiled = torch.compile(models[0], backend=backend)
    tables = ft.Optimizer(models[0])
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        batch = keys()
        out, expected = compiled(batch), models[1](batch)
        torch.testing.assert_close(out, expected)
        tables.zero_grad()
        optimizer.zero_grad()
        out.sum().backward()
        expected.sum().backward()
        tables.step()
        optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach())
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch), models[1](batch))
    torch.compiler.reset()
    with pytest.raises(Exception, match="(?i)disable|graph break"):
        torch.compile(models[0], backend=backend, fullgraph=True)(batch)


@pytest.mark.parametrize("module", ["bags", "weighted", "rows", "collection"])
def test_a_compiled_training_step_says_nothing(
    trainer: frugal.Trainer, module: str, recwarn: pytest.WarningsRecorder
) -> None:
    """torch.compile compiles nothing of frugal's code that runs where the graph is broken."""

    def made(weight: torch.Tensor) -> Any:
        if module == "rows":
            return ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer)
        if module == "collection":
            tables = [ft.TableConfig(f"table {len(names)}", ROWS, DIM, ["feature"])]
            names.append("")
            collection = ft.EmbeddingBagCollection(tables, trainer=trainer)
            collection.load_state_dict({f"embedding_bags.{tables[0].name}.weight": weight})
            return collection
        return ft.EmbeddingBag(ROWS, DIM, mode="sum", _weight=weight, trainer=trainer)

    names: List[str] = []
    weight, head = integers(ROWS, DIM), torch.nn.Linear(DIM, 1)
    batches = [torch.randint(0, ROWS, (4, 3)) for _ in range(3)]
    losses: List[List[float]] = []
    torch.compiler.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    for compiles in (False, True):
        bags, own = made(weight), copy.deepcopy(head)
        parameters = [*bags.parameters(), *own.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.125)

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            if module == "weighted":
                out = bags(batch, per_sample_weights=torch.ones(4, 3))
            else:
                out = bags(batch[None] if module == "collection" else batch)
            loss = own(out).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        run: Callable[[torch.Tensor], torch.Tensor] = torch.compile(step, backend="eager") if compiles else step
        losses.append([float(run(batch)) for batch in batches])
    torch.compiler.reset()
    torch.testing.assert_close(*losses)
    assert not [str(warning.message) for warning in recwarn if "Dynamo" in str(warning.message)]
