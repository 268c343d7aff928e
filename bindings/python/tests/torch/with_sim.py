"""Trainers on a simulated GPU, which a library of tests has: test_torch_modules.py runs these cases with it."""

# mypy: disable-error-code="no-untyped-call"
# torch says no types of Tensor.backward.

from __future__ import annotations

import pytest
import torch
from torch_support import DIM, ROWS, integers, snapshot

import frugal
import frugal.torch as ft


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_a_trainer_goes_to_another_device_and_goes_on(ahead: bool, mode: str) -> None:
    """Here to one that takes host memory, too."""
    torch.manual_seed(5)
    weight, rows = integers(ROWS, DIM), []
    data = [torch.randint(0, ROWS, (4, 3)) for _ in range(12)]
    for moves in (False, True):
        with frugal.Engine() as engine, engine.create_trainer(cache_ratio=0.5) as trainer:
            bags = ft.EmbeddingBag(ROWS, DIM, mode=mode, _weight=weight, trainer=trainer)
            other = ft.Embedding(ROWS, DIM, _weight=weight, trainer=trainer)
            optimizer = torch.optim.Adagrad([*bags.parameters(), *other.parameters()], lr=0.5)
            source = ft.Lookahead(data, lambda keys: {bags: keys, other: keys}) if ahead else data
            for i, keys in enumerate(source):
                name = "cpu" if i == 6 else "sim:0"
                if moves and i % 4 == 2:
                    bags._steps.move_to(name)
                (bags(keys).sum(1) * other(keys)[:, 0, 0]).sum().backward()
                if moves and i == 8:  # with gradients, and an open step
                    bags._steps.move_to("cpu")
                optimizer.step()
                optimizer.zero_grad()
            rows.append([snapshot(bags), snapshot(other)])
            with pytest.raises(frugal.Error):
                bags._steps.move_to("cuda:77")  # it stays
            assert ("sim:0" in repr(trainer)) == moves and torch.equal(other(data[0]), rows[-1][1][data[0]])
        with pytest.raises(frugal.Closed, match="rank 0 has left"):
            trainer._move("cpu")
    assert all(torch.equal(a, b) for a, b in zip(*rows))
