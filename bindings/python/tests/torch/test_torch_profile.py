"""What a forward, a backward and a step cost in torch: operations, and bytes. Keys, offsets and factors that the caller
made are copied in the backward, since they are needed again in the step; of keys x dim there is nothing."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch_support import delivered, sgd

import frugal
import frugal.torch as ft
from frugal.torch import _lookup, _usual

BAGS, PER_BAG, DIM = 64, 50, 16
KEYS = BAGS * PER_BAG
COPIES = {"aten::clone", "aten::empty_strided", "aten::copy_"}


class Costs:
    def __init__(self) -> None:
        self.operations: Dict[str, int] = {}
        self.peak_bytes = 0


def costs_of(run: Any) -> Costs:
    """Operations of torch, and the most bytes that were allocated at once above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    costs = Costs()
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            costs.operations[event.key] = event.count
    now = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            costs.peak_bytes = max(costs.peak_bytes, now)
    return costs


@pytest.fixture
def bags(trainer: frugal.Trainer, monkeypatch: pytest.MonkeyPatch) -> ft.EmbeddingBag:
    """A module whose forward is in Python."""
    monkeypatch.setattr(_usual, "native", None)
    return ft.EmbeddingBag(1000, DIM, mode="sum", include_last_offset=True, trainer=trainer, optimizer=sgd())


def inputs() -> List[torch.Tensor]:
    return [torch.randint(0, 1000, (KEYS,)), torch.arange(0, KEYS + 1, PER_BAG), torch.randn(BAGS, DIM)]


def test_a_step_is_a_new_tensor_and_copies_of_keys_and_offsets(bags: ft.EmbeddingBag) -> None:
    optimizer = ft.Optimizer(bags)
    keys, offsets, grad = inputs()
    grads = [grad.clone() for _ in range(2)]

    def step() -> None:
        delivered(bags(keys, offsets), grads).backward(grad)
        optimizer.step()

    step()  # what is made once is made
    costs = costs_of(step)
    assert costs.operations.pop("aten::add") == 1  # of nothing but anchors
    assert [costs.operations.pop(name) for name in sorted(COPIES)] == [2, 2, 2]
    # Autograd's own: views and detaches of the gradient that is given, no copy of it.
    assert set(costs.operations) <= {"aten::detach", "aten::view_as", "aten::view"}, costs.operations
    expected = BAGS * DIM * 4 + KEYS * 8 + (BAGS + 1) * 8
    assert expected <= costs.peak_bytes < expected + 1024
    assert costs.peak_bytes < KEYS * DIM * 4 / 6


def test_torch_s_own_is_measured_in_the_same_way(trainer: frugal.Trainer) -> None:
    """The measure finds the keys x dim tensor where there is one."""
    theirs = torch.nn.EmbeddingBag(1000, DIM, mode="sum", include_last_offset=True, sparse=True)
    keys, offsets, grad = inputs()
    costs = costs_of(lambda: theirs(keys, offsets).backward(grad))
    assert costs.peak_bytes > KEYS * DIM * 4


def test_evaluation_is_a_new_tensor(bags: ft.EmbeddingBag) -> None:
    keys, offsets, _ = inputs()

    def read() -> None:
        with torch.no_grad():
            bags(keys, offsets)

    costs = costs_of(read)
    assert costs.operations == {"aten::empty": 1}


def test_a_frozen_module_costs_no_copy(bags: ft.EmbeddingBag) -> None:
    bags.requires_grad_(False)
    keys, offsets, _ = inputs()
    costs = costs_of(lambda: bags(keys, offsets))
    assert costs.operations == {"aten::empty": 1}


@pytest.mark.parametrize("case", ["offsets", "int32", "2d", "weights", "embedding", "collection"])
def test_other_inputs_cost_what_is_documented(
    trainer: frugal.Trainer, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, offsets, grad = inputs()
    allowed = {"aten::add", "aten::detach", "aten::view_as", "aten::view", "aten::reshape"} | COPIES
    copies = KEYS * 8  # of keys, one way or the other
    copied = 1
    extra_bytes = 0
    if case == "embedding":
        module: Any = ft.Embedding(1000, DIM, trainer=trainer)
        arguments: List[Any] = [keys.view(BAGS, PER_BAG)]
        grad = torch.randn(BAGS, PER_BAG, DIM)
        # An output that is large is not written to before the engine does it.
        allowed |= {"aten::empty", "aten::index_put_", "aten::_index_put_impl_", "aten::as_strided"}
    elif case == "collection":
        tables = [ft.TableConfig(f"t{i}", 1000, DIM, [f"f{i}"]) for i in range(4)]
        module = ft.EmbeddingBagCollection(tables, trainer=trainer)
        arguments = [keys.view(4, -1, 50)]
        grad = torch.randn(BAGS // 4, 4 * DIM)
        allowed |= {"aten::unbind", "aten::select", "aten::as_strided"}  # views of the input
        copied = 4  # each
        allowed |= {"aten::cat", "aten::sum", "aten::fill_"}  # of anchors
    else:
        module = ft.EmbeddingBag(1000, DIM, mode="sum", include_last_offset=case != "offsets", trainer=trainer)
        arguments = [keys, offsets]
        if case == "offsets":
            arguments = [keys, offsets[:-1]]
            # One more number than there are offsets.
            allowed |= {"aten::constant_pad_nd", "aten::pad", "aten::fill_", "aten::narrow", "aten::slice"}
            allowed |= {"aten::as_strided", "aten::cat"}
            allowed |= {"aten::empty", "aten::lift_fresh"}
            extra_bytes = (BAGS + 1) * 8
            copied = 2  # torch's padding has a copy of its own
        elif case == "int32":
            arguments = [keys.int(), offsets]
            allowed |= {"aten::to", "aten::_to_copy", "aten::empty"}
            extra_bytes = (BAGS + 1) * 8  # keys are ours already, but where C++ has made them
            extra_bytes += 0 if _usual.native is None else KEYS * 8
        elif case == "2d":
            arguments = [keys.view(BAGS, PER_BAG)]
        else:
            arguments = [keys, offsets, torch.ones(KEYS, requires_grad=True)]
            # Their gradient, for which rows are read and multiplied, a chunk of keys at a time; and copies of offsets
            # and of factors.
            monkeypatch.setattr(_lookup, "_CHUNK", 64)
            monkeypatch.setattr(_usual, "native", None)  # which has one chunk, and leaves more keys to Python
            allowed |= {
                "aten::alias", "aten::arange", "aten::as_strided", "aten::contiguous", "aten::empty_like",
                "aten::fill_", "aten::index", "aten::mul", "aten::resize_", "aten::searchsorted", "aten::select",
                "aten::slice", "aten::sub", "aten::sum", "aten::to", "aten::_to_copy", "aten::zeros_like",
            }  # fmt: skip
            allowed |= {"aten::empty"}
            copied = 3
            extra_bytes = KEYS * 4 + KEYS * 4 + (BAGS + 1) * 8 + 3 * 64 * DIM * 4 + 4 * 64 * 8
    optimizer = ft.Optimizer(module)

    grads = [grad.clone() for _ in range(2)]

    def step() -> None:
        delivered(module(*arguments), grads).backward(grad)
        optimizer.step()

    step()
    for argument in arguments:
        argument.grad = None
    costs = costs_of(step)
    assert set(costs.operations) <= allowed, costs.operations
    output = grad.numel() * 4
    assert costs.peak_bytes < output + copies + extra_bytes + 1024
    assert costs.operations.get("aten::clone", 0) <= copied, costs.operations
    assert copies + extra_bytes < KEYS * DIM * 4 / 3
