"""What the tests of frugal.torch share: worlds of one rank, and this package's modules in pairs with torch.nn's."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import torch

import frugal
import frugal.torch as ft

ROWS, DIM = 60, 8


def integers(*shape: int, low: int = -3, high: int = 4) -> torch.Tensor:
    """Small integers as floats: their sums and products are exact in any order."""
    return torch.randint(low, high, shape).float()


def sgd(lr: float = 0.5) -> frugal.SGD:
    return frugal.SGD(lr=lr)


def bag_pair(
    trainer: frugal.Trainer, weight: torch.Tensor, **arguments: Any
) -> Tuple[ft.EmbeddingBag, torch.nn.EmbeddingBag]:
    """The same bags in both worlds; arguments of the table go to frugal alone."""
    table: Dict[str, Any] = {key: arguments.pop(key) for key in ("optimizer", "name", "hashed") if key in arguments}
    rows, dim = weight.shape
    ours = ft.EmbeddingBag(rows, dim, _weight=weight, trainer=trainer, **{"optimizer": sgd(), **table}, **arguments)
    theirs = torch.nn.EmbeddingBag(rows, dim, _weight=weight.clone(), **{"sparse": True, **arguments})
    return ours, theirs


def snapshot(module: Any) -> torch.Tensor:
    """The rows as they are now: `weight` itself shows those of later, as torch's does."""
    return module.weight.detach().clone()  # type: ignore[no-any-return]


class Delivered(torch.autograd.Function):
    """Delivers the gradient that a list holds without another reference to it, as PyTorch's own functions do."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, grads: List[torch.Tensor]) -> torch.Tensor:
        ctx.grads = grads
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor, None]:
        return ctx.grads.pop(0), None


delivered: Callable[..., Any] = Delivered.apply  # without types in torch

def undeclared(engine: frugal.Engine) -> int:
    return int(engine.stats()["keys_undeclared"])


def committed(engine: frugal.Engine) -> int:
    return int(engine.stats()["steps_committed"])
