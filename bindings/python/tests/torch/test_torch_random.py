"""Random training compared with torch.nn: the same actions on both sides, and after each all that a caller can see."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import copy
import os
import random
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
import torch

import frugal
import frugal.torch as ft

ROWS, DIM, BAGS = 11, 3, 4
FIRST, END = (int(os.environ.get(f"FRUGAL_RANDOM_{name}", usual)) for name, usual in (("FIRST", 0), ("END", 30)))
ACTIONS = 60

Modules = List[Any]


def close(ours: Any, theirs: Any, what: str) -> None:
    assert (ours is None) == (theirs is None), f"{what}: {ours} and {theirs}"
    if ours is not None:
        ours, theirs = ours.detach().clone(), theirs.detach().clone()
        ours, theirs = (x.to_dense() if x.is_sparse else x for x in (ours, theirs))
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-5, atol=2e-5, msg=lambda m: f"{what}: {m}")


class Run:
    """A model of two tables and a dense layer, on each side, and an optimizer or two."""

    def __init__(self, seed: int, trainer: frugal.Trainer) -> None:
        self.random = pick = random.Random(seed)
        torch.manual_seed(seed)
        self.kind = pick.choice(["SGD", "SGD", "Adagrad", "SparseAdam"])
        self.sparse = self.kind == "SparseAdam"
        self.ours: Modules = []
        self.theirs: Modules = []
        for _ in range(2):
            weight = torch.randn(ROWS, DIM)
            common: Dict[str, Any] = {"sparse": self.sparse, "padding_idx": pick.choice([None, 2])}
            kind = pick.choice(["sum", "mean", "max", "rows"])
            if kind == "rows":
                classes: Tuple[Any, Any] = (ft.Embedding, torch.nn.Embedding)
            else:
                classes = (ft.EmbeddingBag, torch.nn.EmbeddingBag)
                common["mode"] = kind
                if kind == "max" and self.sparse:
                    common["mode"] = "sum"
            self.ours.append(classes[0](ROWS, DIM, _weight=weight, trainer=trainer, **common))
            self.theirs.append(classes[1](ROWS, DIM, _weight=weight.clone(), **common))
        dense = torch.nn.Linear(DIM, 2)
        self.ours.append(dense)
        self.theirs.append(copy.deepcopy(dense))
        self.one = pick.random() < 0.5  # optimizer for all
        self.optimizers = [self.make(self.ours), self.make(self.theirs)]
        self.outputs: List[Tuple[Any, Any]] = []
        self.of_dense: List[Tuple[Any, Any]] = []  # those that torch can differentiate until the dense layer's step
        self.views: List[Tuple[Any, Any]] = []
        self.hooks: List[Tuple[Any, Any]] = []
        self.saved: Optional[Tuple[Any, Any]] = None
        self.done: List[str] = []

    def make(self, modules: Modules) -> List[torch.optim.Optimizer]:
        tables = [p for m in modules[:2] for p in m.parameters()]
        dense = list(modules[2].parameters())
        if self.kind == "SparseAdam":
            return [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.SGD(dense, lr=0.05)]
        kind = getattr(torch.optim, self.kind)
        if self.one:
            return [kind([{"params": tables, "lr": 0.1}, {"params": dense}], lr=0.05)]
        return [kind(modules[0].parameters(), lr=0.1), kind([*modules[1].parameters(), *dense], lr=0.05)]

    def both(self, call: Callable[[Modules, List[torch.optim.Optimizer]], Any]) -> Tuple[Any, Any]:
        """What the call gives on each side: an error on both, or on none."""
        state = torch.get_rng_state()
        found: List[Any] = []
        errors: List[Optional[Exception]] = []
        for modules, optimizers in ((self.ours, self.optimizers[0]), (self.theirs, self.optimizers[1])):
            torch.set_rng_state(state)
            try:
                found.append(call(modules, optimizers))
                errors.append(None)
            except (RuntimeError, IndexError, ValueError) as error:
                found.append(None)
                errors.append(error)
        assert (errors[0] is None) == (errors[1] is None), f"ours: {errors[0]!r}; torch's: {errors[1]!r}"
        return found[0], found[1]

    # Actions

    def forward(self) -> None:
        which = self.random.randrange(2)
        shape = self.random.choice([(BAGS, 3), (BAGS, 1), (0, 3)])
        keys = torch.randint(0, ROWS, shape)
        dense, chain = self.random.random() < 0.5, self.random.choice(["none", "mul_", "tanh_", "slice", "detach_"])
        grad = self.random.random() < 0.9
        weights = torch.rand(shape) if self.random.random() < 0.3 else None

        def call(modules: Modules, _: Any) -> Any:
            module = modules[which]
            with torch.set_grad_enabled(grad):
                if weights is not None and getattr(module, "mode", "") == "sum":
                    out = module(keys, per_sample_weights=weights)
                else:
                    out = module(keys)
                if chain == "mul_":
                    out.mul_(1.5)
                elif chain == "tanh_":
                    out = torch.tanh_(out)
                elif chain == "slice":
                    out = out[:2]
                elif chain == "detach_":
                    out.detach_()
                return modules[2](out) if dense else out

        ours, theirs = self.both(call)
        close(ours, theirs, "output")
        assert ours.requires_grad == theirs.requires_grad
        if ours.requires_grad:
            self.outputs.append((ours, theirs))
            if dense:
                self.of_dense.append(self.outputs[-1])

    def dense_changes(self) -> None:
        self.outputs = [pair for pair in self.outputs if not any(pair is one for one in self.of_dense)]
        self.of_dense = []

    def bad_key(self) -> None:
        which = self.random.randrange(2)
        self.both(lambda modules, _: modules[which](torch.tensor([[1, ROWS]])))

    def backward(self) -> None:
        if not self.outputs:
            return
        some = self.random.sample(self.outputs, self.random.randint(1, min(3, len(self.outputs))))
        retain, factor = self.random.random() < 0.3, self.random.choice([1.0, -0.5, 3.0])
        for side in (0, 1):
            loss = sum((pair[side].square().sum() * factor for pair in some), torch.zeros(()))
            loss.backward(retain_graph=retain)
        if not retain:
            for kept in (self.outputs, self.of_dense):
                kept[:] = [pair for pair in kept if not any(pair is one for one in some)]

    def dense_alone(self) -> None:
        for pair in self.of_dense[-1:]:
            for side, modules in ((0, self.ours), (1, self.theirs)):
                torch.autograd.backward(
                    [pair[side].sum()], inputs=list(modules[2].parameters()), retain_graph=True
                )

    def asked(self) -> None:
        """torch.autograd.grad() of a table's weight."""
        for pair in self.outputs[-1:]:
            which = self.random.randrange(2)
            found = [
                torch.autograd.grad(
                    pair[side].sin().sum(), modules[which].weight, retain_graph=True, allow_unused=True
                )[0]
                for side, modules in ((0, self.ours), (1, self.theirs))
                if modules[which].weight.requires_grad
            ]
            if len(found) == 2:
                close(found[0], found[1], "asked")

    def step(self) -> None:
        which = self.random.randrange(len(self.optimizers[0])) if self.random.random() < 0.4 else None
        self.dense_changes()
        self.both(lambda _, all_: [o.step() for i, o in enumerate(all_) if which is None or i == which] and None)

    def train(self) -> None:
        self.forward()
        self.backward()
        self.step()
        self.zero()

    def zero(self) -> None:
        none = self.random.random() < 0.7 or self.sparse
        self.both(lambda _, all_: [o.zero_grad(set_to_none=none) for o in all_] and None)

    def zero_module(self) -> None:
        which = self.random.randrange(3)
        self.both(lambda modules, _: modules[which].zero_grad())

    def clip(self) -> None:
        if self.sparse:
            return
        most, order = self.random.choice([0.5, 5.0]), self.random.choice([2.0, 1.0, float("inf")])

        def call(modules: Modules, _: Any) -> Any:
            return torch.nn.utils.clip_grad_norm_([p for m in modules for p in m.parameters()], most, order)

        close(*self.both(call), "norm")

    def clip_value(self) -> None:
        if self.sparse:
            return

        def call(modules: Modules, _: Any) -> None:
            torch.nn.utils.clip_grad_value_([p for m in modules for p in m.parameters()], 0.7)

        self.both(call)

    def scale(self) -> None:
        factor = self.random.choice([0.5, 2.0, 0.0])

        def call(modules: Modules, _: Any) -> None:
            for parameter in (p for m in modules for p in m.parameters()):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

        self.both(call)

    def freeze(self) -> None:
        which, on = self.random.randrange(2), self.random.random() < 0.6
        self.both(lambda modules, _: modules[which].requires_grad_(on) and None)

    def write(self) -> None:
        which, kind = self.random.randrange(2), self.random.randrange(4)
        row, values = self.random.randrange(ROWS), torch.randn(DIM)

        def call(modules: Modules, _: Any) -> None:
            weight = modules[which].weight
            with torch.no_grad():
                if kind == 0:
                    weight[row] = values
                elif kind == 1:
                    weight.data.mul_(0.9)
                elif kind == 2:
                    weight.view(-1)[row] = 0.25
                else:
                    torch.nn.init.uniform_(weight, -1, 1)

        self.both(call)

    def keep_view(self) -> None:
        which, row = self.random.randrange(2), self.random.randrange(ROWS)
        self.views.append(self.both(lambda modules, _: modules[which].weight.detach()[row]))

    def rate(self) -> None:
        factor = self.random.choice([0.5, 1.5])

        def call(_: Any, optimizers: List[torch.optim.Optimizer]) -> None:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] *= factor

        self.both(call)

    def save(self) -> None:
        self.saved = self.both(
            lambda modules, optimizers: copy.deepcopy(
                ([m.state_dict() for m in modules], [o.state_dict() for o in optimizers])
            )
        )

    def load(self) -> None:
        if self.saved is None:
            return
        self.dense_changes()
        for (modules, optimizers), saved in zip(zip((self.ours, self.theirs), self.optimizers), self.saved):
            for module, state in zip(modules, saved[0]):
                module.load_state_dict(state)
            for optimizer, state in zip(optimizers, saved[1]):
                optimizer.load_state_dict(copy.deepcopy(state))

    def hook(self) -> None:
        which, factor = self.random.randrange(2), self.random.choice([0.5, -1.0])

        def call(modules: Modules, _: Any) -> Any:
            parameter = next(modules[which].parameters())
            return parameter.register_hook(lambda grad: grad * factor) if parameter.requires_grad else None

        self.hooks.append(self.both(call))

    def unhook(self) -> None:
        while self.hooks:
            for handle in self.hooks.pop():
                if handle is not None:
                    handle.remove()

    def compare(self) -> None:
        for i, (ours, theirs) in enumerate(zip(self.ours, self.theirs)):
            close(ours.weight, theirs.weight, f"weight {i}")
        for ours, theirs in self.views:
            close(ours, theirs, "view")

    def compare_grads(self) -> None:
        for i, (ours, theirs) in enumerate(zip(self.ours, self.theirs)):
            close(ours.weight.grad, theirs.weight.grad, f"gradient {i}")

    def run(self) -> None:
        actions = {
            self.forward: 6, self.backward: 4, self.step: 3, self.train: 3, self.zero: 2, self.zero_module: 1,
            self.clip: 1, self.clip_value: 0.5, self.scale: 1, self.freeze: 1, self.write: 1, self.keep_view: 0.5,
            self.rate: 1, self.save: 1, self.load: 1, self.dense_alone: 0.5, self.asked: 0.5, self.compare_grads: 1,
            self.bad_key: 0.3, self.hook: 0.3, self.unhook: 0.3,
        }  # fmt: skip
        for _ in range(ACTIONS):
            action = self.random.choices(list(actions), list(actions.values()))[0]
            self.done.append(action.__name__)
            action()
            self.compare()


@pytest.mark.parametrize("seed", range(FIRST, END))
def test_random_training(trainer: frugal.Trainer, seed: int) -> None:
    run = Run(seed, trainer)
    try:
        run.run()
    except BaseException:
        print(f"seed {seed}: {run.kind}, {[type(m).__name__ for m in run.ours]}: {' '.join(run.done)}")
        raise
