"""A world of one rank for each test."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

import frugal

# Threads that wait for each other spin where the machine has other things to do.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.fixture
def engine() -> Iterator[frugal.Engine]:
    with frugal.Engine(lookahead=10) as engine:
        yield engine


@pytest.fixture
def trainer(engine: frugal.Engine) -> Iterator[frugal.Trainer]:
    with engine.create_trainer() as trainer:
        yield trainer
