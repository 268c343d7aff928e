"""Rows/s of the embedding part of a DLRM step: frugal.torch, torch.nn and FBGEMM, in one run.

    python torch_dlrm.py [--quick] [--optimizer adagrad] [--keys zipf] [--shape 2048x32] [--json FILE]

A step is the forward of a bag of keys, the backward of its gradient, and the update of the rows. The gradient is given,
so that only the embedding is timed. There are two shapes: bags of one key, as in Criteo's data, and bags of 32 keys.
The sides alternate in one process, each for some steps at a time (a turn), so that other load hits all of them. The
program compares the medians over the turns. frugal declares its keys ahead with Lookahead, inside the timed loop. Its
turn ends with a flush, so that it leaves no work to the other sides. All sides get the same batches, and must have the
same rows at the end. Without fbgemm_gpu the program reports that FBGEMM is missing.
"""

# mypy: disable-error-code="no-untyped-call"
# torch declares no types of Tensor.backward.

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from typing import Any, Dict, List, Tuple

import torch

import frugal
import frugal.torch as ft

Batch = Tuple[torch.Tensor, torch.Tensor]  # keys, offsets with the last

LR, EPS, INIT = 0.01, 1e-8, 0.01
# (optimizer, the side to compare with): the ratio to reach.
AIMS = {
    ("sgd", "torch"): 2.0,
    ("adagrad", "torch"): 5.0,
    ("adagrad", "fbgemm"): 3.0,
    ("rowwise_adagrad", "fbgemm"): 3.0,
}
OPTIMIZERS = {
    "sgd": frugal.SGD(lr=LR),
    "adagrad": frugal.Adagrad(lr=LR, eps=EPS),
    "rowwise_adagrad": frugal.RowWiseAdagrad(lr=LR, eps=EPS),
}


class Frugal:
    name = "frugal"

    def __init__(self, optimizer: str, rows: int, dim: int, lookahead: int) -> None:
        self.engine = frugal.Engine(lookahead=lookahead)
        self.trainer = self.engine.create_trainer()
        self.bags = ft.EmbeddingBag(
            rows, dim, mode="sum", include_last_offset=True, trainer=self.trainer, init=frugal.Constant(INIT),
            optimizer=OPTIMIZERS[optimizer],
        )  # fmt: skip
        self.optimizer = ft.Optimizer(self.bags)

    def turn(self, batches: List[Batch], grad: torch.Tensor) -> None:
        for keys, offsets in ft.Lookahead(batches, lambda batch: {self.bags: batch[0]}, trainer=self.trainer):
            self.optimizer.zero_grad()
            self.bags(keys, offsets).backward(grad)
            self.optimizer.step()
        self.engine.flush()

    def rows(self, keys: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows: torch.Tensor = self.bags(keys.view(-1, 1), None)
            return rows

    def close(self) -> None:
        undeclared = self.engine.stats()["keys_undeclared"]
        if undeclared:
            raise RuntimeError(f"{undeclared} keys were not declared")
        self.engine.close()


class Torch:
    name = "torch"

    def __init__(self, optimizer: str, rows: int, dim: int, lookahead: int) -> None:
        weight = torch.full((rows, dim), INIT)
        self.bags = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True, _weight=weight)
        parameters = list(self.bags.parameters())
        self.optimizer: torch.optim.Optimizer
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=LR)
        else:
            self.optimizer = torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
            for state in self.optimizer.state.values():
                state["sum"].fill_(0)  # touches the memory before the timing

    def turn(self, batches: List[Batch], grad: torch.Tensor) -> None:
        for keys, offsets in batches:
            self.optimizer.zero_grad()
            self.bags(keys, offsets).backward(grad)
            self.optimizer.step()

    def rows(self, keys: torch.Tensor) -> torch.Tensor:
        return self.bags.weight.detach()[keys]

    def close(self) -> None:
        pass


class Fbgemm:
    name = "fbgemm"

    def __init__(self, optimizer: str, rows: int, dim: int, lookahead: int) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=kinds[optimizer],
            learning_rate=LR, eps=EPS, pooling_mode=PoolingMode.SUM,
        )  # fmt: skip
        with torch.no_grad():
            self.bags.split_embedding_weights()[0].fill_(INIT)
        for states in self.bags.split_optimizer_states():
            for state in states:
                state.fill_(0)

    def turn(self, batches: List[Batch], grad: torch.Tensor) -> None:
        for keys, offsets in batches:
            self.bags(keys, offsets).backward(grad)

    def rows(self, keys: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.bags.split_embedding_weights()[0]
        return weight.detach()[keys]

    def close(self) -> None:
        pass


def draw(distribution: str, rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Keys: uniform, or by a power law of exponent 0.99 over popularity ranks scattered over the table."""
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if distribution == "uniform":
        return (u * rows).long().clamp_(max=rows - 1)
    power = 1 - 0.99
    ranks: torch.Tensor = (((rows**power - 1) * u + 1) ** (1 / power) - 1).long().clamp_(0, rows - 1)
    return (ranks * 2654435761) % rows


def make_batches(rows: int, shape: Tuple[int, int], distribution: str, steps: int, seed: int) -> List[Batch]:
    generator = torch.Generator().manual_seed(seed)
    bags, per_bag = shape
    offsets = torch.arange(0, bags * per_bag + 1, per_bag)
    return [(draw(distribution, rows, bags * per_bag, generator), offsets) for _ in range(steps)]


def sides_of(optimizer: str, have_fbgemm: bool) -> List[Any]:
    sides: List[Any] = [Frugal]
    if optimizer != "rowwise_adagrad":  # torch has none
        sides.append(Torch)
    if have_fbgemm:
        sides.append(Fbgemm)
    return sides


def agree(sides: List[Any], keys: torch.Tensor) -> None:
    rows = [side.rows(keys) for side in sides]
    for side, other in zip(sides[1:], rows[1:]):
        if not torch.allclose(rows[0], other, rtol=1e-3, atol=1e-5):
            worst = (rows[0] - other).abs().max().item()
            raise RuntimeError(f"frugal and {side.name} do not agree on the rows after training: {worst}")


def run_case(
    args: argparse.Namespace, sides: List[Any], optimizer: str, distribution: str, shape: Tuple[int, int]
) -> List[Dict[str, Any]]:
    bags, per_bag = shape
    grad = torch.randn(bags, args.dim, generator=torch.Generator().manual_seed(0)) * 0.1
    times: Dict[str, List[float]] = {side.name: [] for side in sides}
    for turn in range(args.turns + 1):
        batches = make_batches(args.rows, shape, distribution, args.steps, turn)
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            began = time.perf_counter()
            side.turn(batches, grad)
            if turn:  # the first warms up
                times[side.name].append(time.perf_counter() - began)
    agree(sides, batches[-1][0][:1000])
    results = []
    for name, taken in times.items():
        rates = sorted(args.steps * bags * per_bag / t for t in taken)
        results.append(
            {"optimizer": optimizer, "keys": distribution, "shape": f"{bags}x{per_bag}", "side": name, "unit": "rows/s",
             "median": statistics.median(rates), "min": rates[0], "max": rates[-1], "n": len(rates)}
        )  # fmt: skip
    return results


def report(case: List[Dict[str, Any]]) -> int:
    """Prints a case. Returns the number of aims that were missed."""
    first, missed = case[0], 0
    print(f"{first['optimizer']}, {first['keys']}, {first['shape']}")
    for result in case:
        low, high = result["min"] / 1e6, result["max"] / 1e6
        print(f"    {result['side']:8} {result['median'] / 1e6:7.2f} M rows/s  [{low:.2f} .. {high:.2f}]")
    for result in case[1:]:
        ratio = first["median"] / result["median"]
        aim = AIMS.get((first["optimizer"], result["side"]))
        verdict = "" if aim is None else f" (aim {aim:g}: {'met' if ratio >= aim else 'NOT met'})"
        missed += aim is not None and ratio < aim
        print(f"    frugal / {result['side']}: {ratio:.2f}{verdict}", flush=True)
    return missed


def shape_of(text: str) -> Tuple[int, int]:
    bags, per_bag = text.split("x")
    return int(bags), int(per_bag)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--shape", type=shape_of, help="only this one: bags of a batch x keys of a bag, as 2048x32")
    parser.add_argument("--lookahead", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--turns", type=int, default=7, help="timed rounds of each side")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), help="only this one")
    parser.add_argument("--keys", choices=("uniform", "zipf"), help="only these")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 12 steps")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps = 3, 12
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    logging.disable(logging.WARNING)  # fbgemm_gpu warns of a table entry that its version lacks
    try:
        import fbgemm_gpu  # noqa: F401

        have_fbgemm = True
    except ImportError:
        have_fbgemm = False
        print("fbgemm: skipped, fbgemm_gpu is not installed")
    results: List[Dict[str, Any]] = []
    missed = 0
    print(f"{args.rows} x {args.dim}, {torch.get_num_threads()} threads of torch; load {os.getloadavg()[0]:.2f}")
    for optimizer in OPTIMIZERS if args.optimizer is None else (args.optimizer,):
        sides = [make(optimizer, args.rows, args.dim, args.lookahead) for make in sides_of(optimizer, have_fbgemm)]
        for distribution in ("uniform", "zipf") if args.keys is None else (args.keys,):
            for shape in ((65536, 1), (2048, 32)) if args.shape is None else (args.shape,):
                case = run_case(args, sides, optimizer, distribution, shape)
                results += case
                missed += report(case)
        for side in sides:
            side.close()
        del sides, side
    print(f"{missed} aims not met")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
