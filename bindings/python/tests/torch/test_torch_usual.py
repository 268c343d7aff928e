"""What is in C++ does what Python does, bit for bit: both run each story, on engines that are alike."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import ctypes
import gc
import os
import re
import sysconfig
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch_support import DIM, ROWS, snapshot

import frugal
import frugal.torch as ft
from frugal import _abi
from frugal._lib import lib
from frugal.torch import _steps, _usual
from frugal.torch._gradient import Gradient

NODE = "FrugalBackward"
WEIGHTS_NODE = "FrugalWeightsBackward"
needs_native = pytest.mark.skipif(_usual.native is None, reason="frugal.torch was not built in C++ for this torch")
pytestmark = needs_native


class Side:
    """Modules of one way, in an engine of its own."""

    def __init__(self, usual: bool) -> None:
        self.usual = usual
        self.engine = frugal.Engine(lookahead=10)
        self.trainer = self.engine.create_trainer()
        self.steps: List[Any] = []  # what C++ said of each

    def embedding(self, **arguments: Any) -> ft.Embedding:
        return ft.Embedding(ROWS, DIM, trainer=self.trainer, **arguments)

    def bags(self, **arguments: Any) -> ft.EmbeddingBag:
        return ft.EmbeddingBag(ROWS, DIM, trainer=self.trainer, **arguments)

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()


Story = Callable[[Side], List[Any]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Story], List[Any]]]:
    """Runs a story both ways, which must be equal. Returns what C++ said of the optimizers' steps."""
    sides: List[Side] = []
    native = _usual.native

    def tell(story: Story) -> List[Any]:
        ends = []
        for usual in (True, False):
            torch.manual_seed(11)
            side = Side(usual)
            sides.append(side)
            real = native.step

            class Calls:
                Forward, show = native.Forward, native.show

                @staticmethod
                def step(*args: Any) -> Any:
                    side.steps.append(real(*args))
                    return side.steps[-1]

            monkeypatch.setattr(_usual, "native", Calls if usual else None)
            ends.append(story(side))
        assert len(ends[0]) == len(ends[1])
        for i, (ours, theirs) in enumerate(zip(*ends)):
            same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert same, (i, ours, theirs)
        return sides[0].steps

    yield tell
    for side in sides:
        side.close()


def by(side: Side, out: torch.Tensor) -> torch.Tensor:
    """The same, that came the way of this side."""
    assert out.grad_fn is not None and (out.grad_fn.name() == NODE) == side.usual
    return out


def nodes(out: torch.Tensor) -> List[str]:
    """The names of an output's nodes, from the last to the first of each one's."""
    node, names = out.grad_fn, []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """Reads of rows that Python makes."""
    made: List[Any] = []
    real = _steps.Steps.read

    def read(steps: _steps.Steps, ops: Any) -> Any:
        made.append(ops)
        return real(steps, ops)

    monkeypatch.setattr(_steps.Steps, "read", read)
    return made


def anchor(module: Any) -> Any:
    return module.weight


def gradient(module: Any) -> Any:
    """That of the module's table."""
    return anchor(module).grad


def bag_inputs() -> List[torch.Tensor]:
    keys = torch.randint(0, ROWS, (24,))
    return [keys, torch.sort(torch.cat((torch.zeros(1, dtype=torch.int64), torch.randint(0, 25, (6,)))))[0]]


OPTIMIZERS: Dict[str, Callable[[List[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "decay": lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("last", [False, True])
def test_forms_of_keys_and_offsets(told: Callable[[Story], List[Any]], dtype: torch.dtype, last: bool) -> None:
    """A caller may write to keys and offsets after the forward where they have been converted."""

    def story(side: Side) -> List[Any]:
        bags, rows = side.bags(mode="mean", include_last_offset=last), side.embedding()
        optimizer = torch.optim.Adagrad([*bags.parameters(), *rows.parameters()], lr=0.3)
        seen: List[Any] = []
        for _ in range(6):
            keys, offsets = bag_inputs()
            if last:
                offsets = torch.cat([offsets, torch.tensor([keys.numel()])])
            keys, offsets = keys.to(dtype), offsets.to(dtype)
            outs = [by(side, bags(keys, offsets)), by(side, bags(keys.view(4, 6))), by(side, rows(keys))]
            if dtype != torch.int64:
                keys.zero_()
                offsets.zero_()
            torch.stack([out.square().mean() for out in outs]).sum().backward()
            seen += [out.detach() for out in outs]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, bags.weight.detach().clone(), rows.weight.detach().clone()]

    told(story)


@pytest.mark.filterwarnings("ignore:.*a frugal table's row changes in the steps")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_training(told: Callable[[Story], List[Any]], kind: str, mode: str) -> None:
    """Three tables of one optimizer in two groups, a rate that changes, and two backwards in some steps."""

    def story(side: Side) -> List[Any]:
        modules: List[Any] = [side.bags(mode=mode), side.embedding(padding_idx=3), side.bags(mode=mode, padding_idx=5)]
        dense = torch.nn.Linear(DIM, 1)
        parameters = [p for m in modules for p in m.parameters()] + list(dense.parameters())
        optimizer = OPTIMIZERS[kind]([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        seen: List[Any] = []
        for step in range(12):
            for _ in range(1 + (step % 3 == 2)):
                keys, offsets = bag_inputs()
                rows = [by(side, m(keys, offsets)).mean(0, keepdim=True) / 4 for m in modules[::2]]
                rows.append(by(side, modules[1](keys.view(4, 6))).mean((0, 1)).view(1, DIM))
                loss = dense(torch.cat(rows)).square().mean()
                loss.backward()
                seen += [row.detach() for row in rows] + [loss.detach()]
            if step % 4 == 3:
                seen.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 5 != 4)
        for name, value in optimizer.state_dict()["state"].items():
            for what, held in value.items():
                seen += [f"{name} {what}", held]
        return seen + [snapshot(m) for m in modules]

    said = told(story)
    assert len(said) == 12 and said[-1] is True and said.count(True) >= 9


def test_a_default_device_changes_nothing(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        with torch.device("cpu"):
            module = side.bags(mode="sum")
            optimizer = torch.optim.Adagrad(module.parameters(), lr=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                by(side, module(*bag_inputs())).square().sum().backward()
                optimizer.step()
            return [snapshot(module)]

    assert told(story)[1:] == [True, True]


def test_a_gradient_of_any_stride(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        module = side.bags(mode="sum")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for make in (
            lambda: torch.randn(7, 2 * DIM)[:, DIM:],
            lambda: torch.randn(DIM, 7).t(),
            lambda: torch.randn(1, DIM).expand(7, DIM),
            lambda: torch._neg_view(torch.randn(7, DIM)),
        ):
            by(side, module(*bag_inputs())).backward(make())
            optimizer.step()
            optimizer.zero_grad()
        return [snapshot(module)]

    told(story)


def test_shapes_of_keys(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        module = side.embedding()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        seen = []
        for shape in ((), (0,), (5,), (2, 3), (2, 0, 3), (2, 1, 3, 2)):
            out = module(torch.randint(0, ROWS, shape))
            if shape:  # an output of one row has fewer dimensions than an anchor
                by(side, out)
            out.backward(torch.randn(out.shape))
            optimizer.step()
            optimizer.zero_grad()
            seen += [out.detach(), list(out.shape)]
        bags = side.bags(mode="mean")
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
        for count in (0, 4):
            out = by(side, bags(torch.randint(0, ROWS, (count,)), torch.zeros(3, dtype=torch.int64)))
            seen.append(out.detach())
        for shape in ((3, 2), (2, 3), (3, 2), (0, 4), (4, 0), (1, 6), (6, 1)):
            keys = torch.randint(0, ROWS, shape)
            out = by(side, bags(keys))
            out.backward(torch.randn(out.shape))
            if keys.numel():
                again = by(side, bags(keys.view(-1), torch.arange(0, keys.numel(), shape[1])))
                assert torch.equal(out, again)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(out.detach())
        seen.append(snapshot(bags))
        return seen + [snapshot(module)]

    told(story)


def refusal(call: Callable[[], Any]) -> List[Any]:
    with pytest.raises(Exception) as found:
        call()
    return [type(found.value), re.sub("0x[0-9a-f]+", "a handle", str(found.value))]


def test_what_is_wrong_is_said_in_the_same_words(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        module, rows = side.bags(mode="sum"), side.embedding()
        optimizer = torch.optim.SGD([*module.parameters(), *rows.parameters()], lr=0.5)
        keys, offsets = bag_inputs()
        seen: List[Any] = []
        bad = keys.clone()
        bad[3] = ROWS
        seen += refusal(lambda: module(bad, offsets))
        seen += refusal(lambda: rows(bad))
        seen += refusal(lambda: module(keys, offsets + 1))
        seen += refusal(lambda: module(keys, torch.tensor([0, 5, 2])))
        seen += refusal(lambda: module(keys))
        seen += refusal(lambda: module(keys.view(4, 6), offsets))
        seen += refusal(lambda: module(bad.view(4, 6)))
        seen += refusal(lambda: module(keys.float(), offsets))
        out = by(side, module(keys, offsets))
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        seen += refusal(lambda: out.sum().backward())
        changed = keys.clone()
        out = by(side, module(changed, offsets))
        changed[0] = 1
        seen += refusal(lambda: out.sum().backward())
        optimizer.step()
        optimizer.zero_grad()
        # All or nothing, of both tables.
        (module(keys, offsets).sum() + rows(keys).sum() * float("nan")).backward()
        before = snapshot(module)
        seen += refusal(optimizer.step)
        assert torch.equal(before, snapshot(module)) and gradient(module) is not None
        optimizer.zero_grad()
        grad = torch.ones(7, DIM)
        module(keys, offsets).backward(grad)
        module(keys, offsets).sum().backward()  # the next comes before the step, too
        for part in gradient(module).parts:
            part.held.grad.add_(1.0)
        seen += refusal(optimizer.step)
        return seen + [snapshot(module)]

    told(story)


def test_graphs(told: Callable[[Story], List[Any]]) -> None:
    """torch.autograd.grad(), create_graph, hooks, and leaves that are not asked for."""

    def story(side: Side) -> List[Any]:
        module = side.bags(mode="sum")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        keys, offsets = bag_inputs()
        dense = torch.nn.Linear(DIM, 1)
        seen: List[Any] = []

        def loss() -> torch.Tensor:
            return dense(by(side, module(keys, offsets))).square().sum()  # type: ignore[no-any-return]

        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        (found,) = torch.autograd.grad(loss(), anchor(module))
        assert isinstance(found, Gradient) and gradient(module) is None
        seen.append(found.norm())
        torch.autograd.grad(loss(), dense.weight)
        assert gradient(module) is None
        loss().backward(inputs=[dense.weight])
        assert gradient(module) is None
        loss().backward(inputs=[anchor(module)])
        seen.append(gradient(module).norm())
        loss().backward(create_graph=True)
        seen += refusal(lambda: torch.linalg.vector_norm(gradient(module)))
        handle = anchor(module).register_hook(lambda grad: grad * 0.5)
        loss().backward()
        handle.remove()
        seen.append(len(gradient(module).parts))
        optimizer.step()
        optimizer.zero_grad()
        out = loss()
        module.requires_grad_(False)
        out.backward()
        assert gradient(module) is None
        module.requires_grad_(True)
        return seen + [snapshot(module)]

    told(story)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("wanted", [False, True])
def test_weights(
    told: Callable[[Story], List[Any]], reads: List[Any], dtype: torch.dtype, padding: Any, wanted: bool
) -> None:
    """The caller may write to them after the backward."""

    def story(side: Side) -> List[Any]:
        bags = side.bags(mode="sum", padding_idx=padding)
        optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.3)
        seen: List[Any] = []
        for step in range(8):
            keys, offsets = bag_inputs()
            inputs = [(keys.to(dtype), offsets), (keys.to(dtype).view(4, 6), None), (keys[:0], offsets * 0)]
            for i, (some, begins) in enumerate(inputs):
                factors = torch.randn(some.shape, requires_grad=wanted)
                given = factors if step % 2 else factors * 1.0  # a leaf, or what was computed
                if i == 1 and not wanted:
                    given = torch.nn.Parameter(given, requires_grad=False)
                out = bags(some, begins, given)
                if side.usual:
                    assert nodes(out)[: wanted + 1] == [WEIGHTS_NODE, NODE][not wanted :]
                else:
                    assert NODE not in nodes(out)
                # Rows of a gradient that are apart, and a gradient that is transposed.
                wide = torch.randn(out.shape[0], 2 * DIM)
                out.backward([wide[:, :DIM], torch.randn(DIM, out.shape[0]).t(), wide[:, DIM:]][i])
                seen += [out.detach(), factors.grad if wanted else None]
                with torch.no_grad():
                    factors.zero_()
            optimizer.step()
            optimizer.zero_grad()
        # What Python reads rows for: of the usual side gradients that are transposed.
        assert len(reads) == (8 if side.usual else 16) * wanted
        reads.clear()
        return [*seen, bags.weight.detach().clone()]

    told(story)


def test_gradients_of_weights_alone(told: Callable[[Story], List[Any]]) -> None:
    """Of a frozen table, of many keys, by torch.autograd.grad(), and what has one derivative."""

    def story(side: Side) -> List[Any]:
        bags = side.bags(mode="sum")
        keys, offsets = bag_inputs()
        weights = torch.randn(24, requires_grad=True)
        seen: List[Any] = []
        seen += torch.autograd.grad(bags(keys, offsets, weights).square().sum(), weights)
        (found,) = torch.autograd.grad(bags(keys, offsets, weights).square().sum(), weights, create_graph=True)
        seen += [found.detach(), *refusal(lambda: found.sum().backward())]
        out = bags(keys, offsets, weights)
        every = torch.eye(out.numel()).view(-1, *out.shape)
        seen += torch.autograd.grad(out, weights, every, is_grads_batched=True)
        bags.requires_grad_(False)
        out = bags(keys, offsets, weights)
        assert nodes(out)[0] == (WEIGHTS_NODE if side.usual else "WeightedRowsBackward")
        out.square().sum().backward()
        many = torch.randint(0, ROWS, (2, 10000))
        factors = torch.randn(2, 10000, requires_grad=True)
        bags(many, None, factors).square().sum().backward()
        return [*seen, out.detach(), weights.grad, factors.grad]

    told(story)


def test_what_is_wrong_with_weights_is_said_in_the_same_words(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        bags, mean = side.bags(mode="sum"), side.bags(mode="mean")
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
        keys, offsets = bag_inputs()
        weights, wanted = torch.randn(24), torch.randn(24, requires_grad=True)
        seen: List[Any] = []
        bad = keys.clone()
        bad[3] = ROWS
        for some in (weights, wanted):
            seen += refusal(lambda: bags(bad, offsets, some))
            seen += refusal(lambda: bags(keys, offsets + 1, some))
            seen += refusal(lambda: bags(keys, torch.tensor([0, 5, 2]), some))
            seen += refusal(lambda: bags(keys, offsets, some[1:]))
            seen += refusal(lambda: bags(keys, offsets, some.view(4, 6)))
            seen += refusal(lambda: bags(keys, offsets, some.double()))
            seen += refusal(lambda: mean(keys, offsets, some))
        seen += refusal(lambda: bags(keys, offsets, [1.0]))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(weights, torch.ones(24))
            seen += refusal(lambda: bags(keys, offsets, dual))
        changed = weights.clone()
        out = bags(keys, offsets, changed)
        changed[0] = 1.0
        seen += refusal(lambda: out.sum().backward())
        for what in ("keys", "weights"):
            some, factors = keys.clone(), wanted * 1.0
            out = bags(some, offsets, factors)
            with torch.no_grad():
                (some if what == "keys" else factors)[0] = 1
            seen += refusal(lambda: out.sum().backward())
        out = bags(keys, offsets, wanted)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        seen += refusal(lambda: out.sum().backward())
        out = bags(keys, offsets, wanted)
        optimizer.step()
        seen += refusal(lambda: out.sum().backward())
        out = bags(keys, offsets, wanted)
        bags.weight.data.fill_(2.0)
        seen += refusal(lambda: out.sum().backward())
        return [*seen, wanted.grad]

    told(story)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("last", [False, True])
def test_maxima(told: Callable[[Story], List[Any]], padding: Any, last: bool) -> None:
    """Of equal rows, of NaNs first and later, of both zeros; of bags without a key, and with padding alone."""

    def story(side: Side) -> List[Any]:
        bags = side.bags(mode="max", padding_idx=padding, include_last_offset=last)
        rows = torch.randint(-2, 3, (ROWS, DIM)).float()
        rows[::5] = -rows[::5]  # zeros of the other sign
        rows[torch.rand(ROWS, DIM) < 0.1] = float("nan")
        bags.weight.data.copy_(rows)
        seen: List[Any] = []
        for step in range(8):
            keys, offsets = bag_inputs()
            if step % 3 == 0:
                keys[: offsets[2]] = 3
            if last:
                offsets = torch.cat([offsets, torch.tensor([24])])
            some = keys.int() if step % 2 else keys
            outs = [bags(some, offsets), bags(some.view(4, 6))]
            for out in outs:
                assert NODE in nodes(out) if side.usual else NODE not in nodes(out)
                grad = torch.randint(-1, 2, out.shape) * -1.0
                out.backward([grad, grad.t().contiguous().t(), grad[:1].expand(grad.shape)][step % 3])
                at, of_keys = gradient(bags).per_key()
                seen += [*map(bits, (out, of_keys)), at.reshape(-1)]
                anchor(bags).grad = None
            with torch.no_grad():
                seen += [bits(bags(some, offsets))]
        return seen

    told(story)


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bits, which differ between the two zeros, and compare NaNs."""
    return values.detach().contiguous().view(torch.int32).clone()


def test_training_of_maxima(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        modules = [side.bags(mode="max", padding_idx=3), side.bags(mode="max")]
        optimizer = torch.optim.Adagrad([p for m in modules for p in m.parameters()], lr=0.3)
        for _ in range(6):
            keys, offsets = bag_inputs()
            sum(m(keys, offsets).square().sum() for m in modules).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [snapshot(m) for m in modules]

    assert told(story)[1:] == [True] * 5


def test_what_is_wrong_with_maxima_is_said_in_the_same_words(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        bags = side.bags(mode="max")
        keys, offsets = bag_inputs()
        seen: List[Any] = []
        bad = keys.clone()
        bad[3] = ROWS
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                seen += refusal(lambda: bags(bad, offsets))
                seen += refusal(lambda: bags(keys, offsets + 1))
                seen += refusal(lambda: bags(keys, torch.tensor([0, 5, 2])))
                seen += refusal(lambda: bags(keys, torch.tensor([0, 25])))
                seen += refusal(lambda: bags(keys, offsets, torch.ones(24)))
                seen.append(bags(keys[:0], offsets * 0).detach())
        changed = keys.clone()
        out = bags(changed, offsets)
        changed[0] = 1
        seen += refusal(lambda: out.sum().backward())
        out = bags(keys, offsets)
        out.sum().backward()
        seen += refusal(lambda: out.sum().backward())
        out = bags(keys, offsets)
        every = torch.ones(2, *out.shape)
        seen += refusal(lambda: torch.autograd.grad(out, anchor(bags), every, is_grads_batched=True))
        bags(keys, offsets).sum().backward(create_graph=True)
        seen += refusal(lambda: torch.linalg.vector_norm(gradient(bags)))
        return seen

    told(story)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "frozen"])
def test_reading(told: Callable[[Story], List[Any]], reads: List[Any], mode: str) -> None:
    """Rows alone, in a step and between steps; then inputs of the same shape in training."""

    def story(side: Side) -> List[Any]:
        rows = side.embedding(padding_idx=3)
        every = [side.bags(mode=mode, padding_idx=3) for mode in ("sum", "mean", "max")]
        modules = [rows, *every]
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5)
        keys, offsets = bag_inputs()
        seen: List[Any] = []

        def read() -> None:
            if mode == "inference_mode":
                inputs = keys.clone(), offsets.clone()
                assert inputs[0].is_inference()
            else:
                inputs = keys, offsets
            outs = [rows(some) for some in (keys, keys.int(), keys.view(2, 3, 4), keys[:0], keys[5])]
            for bags in every:
                outs += [bags(*inputs), bags(keys.view(4, 6))]
            outs.append(every[0](*inputs, torch.randn(24, requires_grad=mode != "frozen")))
            assert not any(out.requires_grad for out in outs)
            assert all(out.is_inference() == (mode == "inference_mode") for out in outs)
            seen.extend(out.clone() for out in outs)

        for _ in range(3):
            if mode == "frozen":
                for module in modules:
                    module.requires_grad_(False)
                read()
                for module in modules:
                    module.requires_grad_(True)
            else:
                with getattr(torch, mode)():
                    read()
            assert bool(reads) != side.usual
            reads.clear()
            weights = torch.randn(24, requires_grad=True)
            outs = [rows(keys), every[0](keys, offsets, weights), *[bags(keys.view(4, 6)) for bags in every]]
            with torch.no_grad():
                seen.append(rows(keys))  # in the step
            torch.stack([out.square().mean() for out in outs]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            reads.clear()
            seen.append(weights.grad)
        return seen + [snapshot(m) for m in modules]

    told(story)


def test_what_is_wrong_with_reading_is_said_in_the_same_words(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        module, rows = side.bags(mode="sum"), side.embedding()
        keys, offsets = bag_inputs()
        bad = keys.clone()
        bad[3] = ROWS
        seen: List[Any] = []
        with torch.no_grad():
            seen += refusal(lambda: module(bad, offsets))
            seen += refusal(lambda: rows(bad))
            seen += refusal(lambda: module(keys, offsets + 1))
            seen += refusal(lambda: module(keys, torch.tensor([0, 5, 2])))
            seen += refusal(lambda: module(keys, torch.tensor([0, 25])))
            seen += refusal(lambda: rows(keys.float()))
        side.trainer.close()
        with torch.no_grad():
            seen += refusal(lambda: rows(keys))
        side.engine.close()
        with torch.no_grad():
            seen += refusal(lambda: rows(keys))
        return seen

    told(story)


def test_a_read_that_takes_long_is_python_s(
    trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, reads: List[Any]
) -> None:
    """Python warns of it. Another error is raised at once."""
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    keys = torch.arange(4)
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    )
    statuses = [_abi.STATUS[f"FRUGAL_ERR_{name}"] for name in ("TIMEOUT", "OUT_OF_MEMORY")]
    failing = kind(lambda *args: statuses.pop(0))
    with monkeypatch.context() as patch:
        patch.setattr(lib, "frugal_read", failing)
        module._make_usual()  # which asks for the address
    with torch.no_grad():
        assert torch.equal(module(keys), module.weight[keys]) and reads
        reads.clear()
        with pytest.raises(frugal.OutOfMemory):
            module(keys)
    assert not reads and not statuses
    module._make_usual()


def test_many_backwards_before_a_step(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        module = side.bags(mode="mean")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        seen: List[Any] = []
        for count in (1, 63, 64, 65, 130):
            for _ in range(count):
                by(side, module(*bag_inputs())).sum().backward()
            seen.append(len(gradient(module).parts))
            optimizer.step()
            optimizer.zero_grad()
        return seen + [snapshot(module)]

    told(story)


def test_a_compiled_backward(told: Callable[[Story], List[Any]]) -> None:
    def story(side: Side) -> List[Any]:
        module, dense = side.bags(mode="sum"), torch.nn.Linear(DIM, 1)
        optimizer = torch.optim.SGD([*module.parameters(), *dense.parameters()], lr=0.01)
        seen: List[Any] = []
        for _ in range(3):
            loss = dense(by(side, module(*bag_inputs()))).square().mean()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.detach(), snapshot(module)]
        assert not torch.equal(seen[1], seen[-1])
        return seen

    told(story)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_a_compiled_backward_of_weights_and_of_maxima(told: Callable[[Story], List[Any]], mode: str) -> None:
    def story(side: Side) -> List[Any]:
        module = side.bags(mode=mode)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        seen: List[Any] = []
        for wanted in (False, True, True):
            weights = torch.randn(24, requires_grad=wanted)
            loss = module(*bag_inputs(), *[weights] * (mode == "sum")).square().mean()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.detach(), snapshot(module), weights.grad]
        return seen

    told(story)


def test_python_does_what_is_not_usual(trainer: frugal.Trainer) -> None:
    """Each is one that the other tests know of; here, that C++ leaves it alone."""
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    keys, offsets = bag_inputs()
    assert module(keys, offsets).grad_fn.name() == NODE

    def left() -> bool:
        return bool(module(keys, offsets).grad_fn.name() != NODE)

    with torch.no_grad():
        assert module(keys, offsets).grad_fn is None
    with torch.inference_mode():
        assert module(keys, offsets).grad_fn is None
        with torch.enable_grad():
            assert module(keys, offsets).grad_fn is None
        inferred = keys.clone()
    with pytest.raises(RuntimeError, match="Inference tensors"):
        module(inferred, offsets)
    with torch.autocast("cpu"):
        assert not left()

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Looks():
        assert left()
    with torch.overrides.BaseTorchFunctionMode():
        assert left()
    for device in ("cpu", "meta"):  # the program's default, which is a mode of PyTorch's own
        torch.set_default_device(device)
        try:
            assert not left()
            with torch.overrides.BaseTorchFunctionMode():
                assert left()
        finally:
            torch.set_default_device(None)
    with torch.device("cpu"):
        assert not left()
    assert module(keys.int(), offsets.int()).grad_fn.name() == NODE
    assert module(keys.short(), offsets).grad_fn.name() != NODE
    assert module(keys.view(4, 6).t()).grad_fn.name() != NODE
    module.include_last_offset = True
    assert left()  # the last is not the number of keys
    assert module(keys, torch.cat([offsets, torch.tensor([keys.numel()])])).grad_fn.name() == NODE
    with pytest.raises(ValueError, match="number for each bag and one more"):
        module(keys, offsets[:0])
    assert module(keys[:0], offsets[:1]).shape == (0, DIM)
    module.include_last_offset = False
    module.scale_grad_by_freq = True
    assert left()
    module.scale_grad_by_freq = False
    module.max_norm = 1000.0
    assert left()
    module.max_norm = None
    assert not left()
    module.mode = "max"
    assert NODE in nodes(module(keys, offsets))
    assert NODE not in nodes(module(keys[:0], offsets * 0))
    module.mode = "mean"  # another lookup, and so another forward of it
    assert not left()
    module.half()
    assert left()
    module.float()
    assert not left()
    module.requires_grad_(False)
    assert module(keys, offsets).grad_fn is None
    module.requires_grad_(True)
    other = torch.func.functional_call(module, {"weight": torch.full((ROWS, DIM), 2.0)}, (keys, offsets))
    assert set(other.unique().tolist()) <= {0.0, 2.0}
    with pytest.raises(NotImplementedError, match="in a transform of torch.func"):
        torch.func.vmap(lambda k: module(k, offsets))(torch.stack((keys, keys)))
    with pytest.raises(RuntimeError, match="cannot be traced"):
        torch.jit.trace(module, (keys, offsets))


def test_a_padding_s_row_that_was_written_is_shown(trainer: frugal.Trainer) -> None:
    module = ft.Embedding(ROWS, DIM, padding_idx=2, trainer=trainer)
    keys = torch.tensor([1, 2])
    assert not module(keys)[1].any()
    module.weight.data.fill_(4.0)
    out = module(keys)
    assert out.grad_fn.name() == NODE and (out == 4.0).all()


def test_another_trainer_of_the_module_s_steps(trainer: frugal.Trainer) -> None:
    """As after a move and a move back."""
    module = ft.Embedding(ROWS, DIM, trainer=trainer)
    keys = torch.arange(4)
    module(keys)
    module._steps.move_to("cpu")
    out = module(keys)
    assert out.grad_fn.name() == NODE and torch.equal(out, module.weight[keys])


@pytest.mark.parametrize("name", ["frugal_lookup", "frugal_push_grad", "frugal_step_end"])
def test_a_call_that_fails(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The step is undone and can be made again."""
    modules = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer) for _ in range(2)]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5)
    keys, offsets = bag_inputs()

    def train() -> None:
        torch.stack([m(keys, offsets).sum() for m in modules]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    train()
    before = [snapshot(m) for m in modules]
    status = _abi.STATUS["FRUGAL_ERR_OUT_OF_MEMORY"]
    types = {"frugal_step_end": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)}
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *types.get(name, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)))
    failing = kind(lambda *args: status)
    with monkeypatch.context() as patch:
        patch.setattr(lib, name, failing)
        for module in modules:
            module._make_usual()  # which asks for the address
        with pytest.raises(frugal.OutOfMemory):
            train()
    assert all(map(torch.equal, before, [snapshot(m) for m in modules]))
    for module in modules:
        module._make_usual()
    optimizer.zero_grad()
    train()
    expected = torch.zeros(ROWS, DIM).index_add_(0, keys, torch.full((len(keys), DIM), 0.5))
    for module, rows in zip(modules, before):
        assert torch.equal(rows - expected, snapshot(module))


def test_an_optimizer_begins_the_step_after_another_s(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """For no forward has begun it; also if the library refuses that once."""
    modules = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in modules]
    keys, offsets = bag_inputs()
    expected = torch.zeros(ROWS, DIM).index_add_(0, keys, torch.full((len(keys), DIM), 0.5))

    def backward() -> None:
        for module, optimizer in zip(modules, optimizers):
            optimizer.zero_grad()
            module(keys, offsets).sum().backward()

    for _ in range(2):
        backward()
        for optimizer in optimizers:
            optimizer.step()
    before = [snapshot(m) for m in modules]
    backward()

    def begin(steps: Any) -> None:
        raise AssertionError("in Python")

    status = _abi.STATUS["FRUGAL_ERR_OUT_OF_MEMORY"]
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64)
    failing = kind(lambda *args: status)
    monkeypatch.setattr(_steps.Steps, "begin", begin)
    optimizers[0].step()
    with monkeypatch.context() as patch:
        patch.setattr(lib, "frugal_step_begin", failing)
        with pytest.raises(frugal.OutOfMemory):
            optimizers[1].step()
    assert torch.equal(snapshot(modules[1]), before[1])
    optimizers[1].step()
    for module, rows in zip(modules, before):
        assert torch.equal(rows - expected, snapshot(module))


def test_threads(trainer: frugal.Trainer) -> None:
    """One trains a table, while others look it up, and run backwards of another. Rows are integers."""
    modules = [ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in modules]
    keys, offsets = bag_inputs()
    for module, optimizer in zip(modules, optimizers):
        module(keys, offsets).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        module.weight.data.zero_()
    errors: List[BaseException] = []
    each = 50

    def run() -> None:
        try:
            for _ in range(each):
                assert modules[0](keys, offsets).grad_fn.name() == NODE
                modules[1](keys, offsets).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(each):
        modules[0](keys, offsets).sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    for thread in threads:
        thread.join()
    assert not errors
    optimizers[1].step()
    times = torch.zeros(ROWS).index_add_(0, keys, torch.ones(len(keys)))
    for module, count in zip(modules, (each, 3 * each)):
        assert torch.equal(snapshot(module), (-float(count) * times)[:, None].expand(ROWS, DIM))


def test_backwards_of_several_threads_add_up(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    keys, offsets = bag_inputs()
    module(keys, offsets).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    module.weight.data.zero_()
    outs = [module(keys, offsets).sum() for _ in range(12)]
    threads = [threading.Thread(target=out.backward) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gradient(module).parts) == 12
    optimizer.step()
    times = torch.zeros(ROWS).index_add_(0, keys, torch.ones(len(keys)))
    assert torch.equal(snapshot(module), (-12.0 * times)[:, None].expand(ROWS, DIM))


def test_a_module_that_is_in_a_cycle_is_collected(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    module(*bag_inputs()).sum().backward()
    anchor(module).register_hook(lambda grad, module=module: None)
    weak = weakref.ref(module)
    del module
    gc.collect()
    assert weak() is None


def test_gradients_are_used_again_if_nobody_has_them(trainer: frugal.Trainer) -> None:
    module = ft.EmbeddingBag(ROWS, DIM, mode="sum", trainer=trainer)
    inputs = bag_inputs()
    module(*inputs).sum().backward()
    first = weakref.ref(gradient(module))
    anchor(module).grad = None
    assert gradient(module) is None
    module(*inputs).sum().backward()
    kept = gradient(module)
    assert kept is first() and len(kept.parts) == 1
    del anchor(module).grad
    module(*inputs).sum().backward()
    assert gradient(module) is not kept and len(kept.parts) == 1


PROGRAM = """
import frugal.torch as ft, torch
from frugal.torch import _usual
print(_usual.native)
module = ft.EmbeddingBag(10, 4, mode="sum")
optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
for _ in range(3):
    out = module(torch.arange(10), torch.arange(10))
    out.sum().backward()
    optimizer.step()
print(out.grad_fn.name() == "FrugalBackward")
"""


@pytest.mark.parametrize("said", ["0", "nowhere", "broken"])
def test_it_can_be_left_out(run_python: Any, tmp_path: Path, said: str) -> None:
    if said == "broken":
        said = str(tmp_path / f"_direct{sysconfig.get_config_var('EXT_SUFFIX')}")
        Path(said).write_bytes(b"no library")
    done = run_python(PROGRAM, env={**os.environ, "FRUGAL_TORCH_NATIVE": said})
    assert done.stdout == "None\nFalse\n" and not done.stderr, done.stderr


def test_a_file_of_another_revision_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _usual._load() is not None
    monkeypatch.setattr(_usual, "_REVISION", _usual._REVISION + 1)
    assert _usual._load() is None
