"""Compares training loops with torch.nn.EmbeddingBag to the same loops with the class replaced.

    python torch_loops.py [--only small] [--turns N] [--device cuda] [--json FILE]

A loop is like a user's: zero_grad, forward, loss, backward, step of a torch optimizer, and a dense layer on top of the
bags. The sides are `torch`, with sparse=True; `frugal`, with the class replaced and no other change; and `lookahead`,
with the batches in frugal.torch.Lookahead too. The sides alternate in one process, each for some steps at a time (a
turn), so that other load hits all of them. The result is the ratio of two sides, the median over the turns. Each turn
ends with a flush of the engine. Before the timing all sides must agree on the loss of the last step.

small: 3 tables of 1,000 x 16, batches of 128 with 4 keys a bag, SGD. large: 4 M x 32, 2,048 bags of 20 keys. tables:
26 tables of 100,000 x 32, batches of 2,048, one key a bag. The last two use Adagrad. The aims are for the CPU.

With `--device cuda` all sides are on that GPU. torch's tables are in its memory, this package's in host memory.
`cached` is `lookahead` with a fifth of the rows in the trainer's cache on the GPU.
"""

# mypy: disable-error-code="no-untyped-call"
# torch declares no types of Tensor.backward.

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, Dict, List, NamedTuple, Tuple

import torch

import frugal
import frugal.torch as ft

Batch = Tuple[List[Tuple[torch.Tensor, torch.Tensor]], torch.Tensor]  # keys and offsets of each table; the labels


class Shape(NamedTuple):
    tables: int
    rows: int
    dim: int
    batch: int
    bag: int
    optimizer: str
    steps: int  # in a turn
    aims: Dict[Tuple[str, str], float]


SHAPES = {
    "loop": Shape(3, 1_000, 16, 128, 1, "SGD", 200, {("frugal", "torch"): 1.2}),
    "small": Shape(3, 1_000, 16, 128, 4, "SGD", 200, {("lookahead", "frugal"): 0.98, ("frugal", "torch"): 1.0}),
    "large": Shape(
        1, 4_000_000, 32, 2_048, 20, "Adagrad", 20, {("lookahead", "frugal"): 1.1, ("frugal", "torch"): 5.0}
    ),
    "tables": Shape(26, 100_000, 32, 2_048, 1, "Adagrad", 20, {("frugal", "torch"): 2.0}),
}


class Kind(NamedTuple):
    bags: Any  # the class of the modules
    ahead: bool = False  # batches come from a Lookahead
    cached: bool = False  # a GPU caches a fifth of the rows


SIDES = {
    "torch": Kind(torch.nn.EmbeddingBag),
    "frugal": Kind(ft.EmbeddingBag),
    "lookahead": Kind(ft.EmbeddingBag, ahead=True),
    "cached": Kind(ft.EmbeddingBag, ahead=True, cached=True),
}


class Side:
    def __init__(self, kind: Kind, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(1)
        self.shape = shape
        self.device = device
        self.ahead = kind.ahead
        self.engine: Any = None
        more: Dict[str, Any] = {}
        if kind.cached:
            self.engine = frugal.Engine(lookahead=10)
            more["trainer"] = self.engine.create_trainer(device=str(device), cache_ratio=0.2)
        elif kind.bags is ft.EmbeddingBag:
            self.engine = ft.default_trainer(device).engine
        bags: List[Any] = []
        for _ in range(shape.tables):
            weight = torch.full((shape.rows, shape.dim), 0.01)
            bags.append(kind.bags(shape.rows, shape.dim, mode="sum", sparse=True, _weight=weight, **more))
        self.bags = [module.to(device) for module in bags]
        self.top = torch.nn.Linear(shape.tables * shape.dim, 1).to(device)
        parameters = [p for module in (*bags, self.top) for p in module.parameters()]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, shape.optimizer)(parameters, lr=0.01)

    def keys(self, batch: Batch) -> Dict[Any, torch.Tensor]:
        return {bags: keys for bags, (keys, _) in zip(self.bags, batch[0])}

    def turn(self, batches: List[Batch]) -> float:
        """Returns the seconds per step; keeps the loss."""
        self.wait()
        begin = time.perf_counter()
        for inputs, wanted in ft.Lookahead(batches, self.keys) if self.ahead else batches:
            self.optimizer.zero_grad()
            rows = [bags(*some) for bags, some in zip(self.bags, inputs)]
            loss = (self.top(torch.cat(rows, 1)) - wanted).square().mean()
            loss.backward()
            self.optimizer.step()
        if self.engine is not None:
            self.engine.flush()
        self.loss = loss.item()
        self.wait()
        return (time.perf_counter() - begin) / len(batches)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def batches_of(shape: Shape, count: int, generator: torch.Generator, device: torch.device) -> List[Batch]:
    offsets = torch.arange(0, shape.batch * shape.bag, shape.bag, device=device)
    batches: List[Batch] = []
    for _ in range(count):
        keys = [
            torch.randint(0, shape.rows, (shape.batch * shape.bag,), generator=generator).to(device)
            for _ in range(shape.tables)
        ]
        wanted = (keys[0].view(shape.batch, shape.bag)[:, :1] % 7) / 7
        batches.append(([(some, offsets) for some in keys], wanted))
    return batches


def measure(name: str, shape: Shape, turns: int, device: torch.device) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    names = [side for side, kind in SIDES.items() if device.type == "cuda" or not kind.cached]
    sides = {side: Side(SIDES[side], shape, device) for side in names}
    batches = batches_of(shape, shape.steps, generator, device)
    for side in names:
        for _ in range(4):  # a Lookahead measures its benefit during some batches
            sides[side].turn(batches)
    seconds: Dict[str, List[float]] = {side: [] for side in names}
    for turn in range(turns):
        batches = batches_of(shape, shape.steps, generator, device)
        first = turn % len(names)
        for side in names[first:] + names[:first]:
            seconds[side].append(sides[side].turn(batches))
    losses = [sides[side].loss for side in names]
    if max(losses) - min(losses) > 1e-3 * max(losses):
        raise RuntimeError(f"{name}: the sides' losses differ: {dict(zip(names, losses))}")
    found: Dict[str, Any] = {"shape": name, "us": {s: 1e6 * statistics.median(t) for s, t in seconds.items()}}
    print(f"{name}: " + ", ".join(f"{side} {us:.0f} us" for side, us in found["us"].items()))
    pairs = [("frugal", "torch"), ("lookahead", "torch"), ("lookahead", "frugal")]
    for fast, slow in pairs + [("cached", "torch")] * ("cached" in names):
        ratio = statistics.median(b / a for a, b in zip(seconds[fast], seconds[slow]))
        found[f"{fast} / {slow}"] = ratio
        aim = shape.aims.get((fast, slow))
        says = "" if aim is None else f" (aim {aim}: {'met' if ratio >= aim else 'NOT met'})"
        print(f"  {fast} / {slow}: {ratio:.2f} x the speed{says}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES, action="append")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [measure(name, SHAPES[name], options.turns, options.device) for name in options.only or SHAPES]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
