#!/usr/bin/env python3
"""The time that the package adds to a call: lookup + push_grad of a declared batch, from Python and from C.

    overhead.py [--turns N] [--json FILE]

Both sides call one library in one process, with the same trainer, batch and arrays. They alternate after each step.
The C side is overhead.c, which this program compiles. The results are for a pair of calls. For 65,536 rows it is a
ratio (aim: at most 1.03), the median over turns, because two successive steps run under the same load. For 1 row it is
nanoseconds, the tenth percentile, which other programs disturb least. After 65,536 rows the interpreter is no longer in
the processor's caches: the same calls then cost several times as much as in a loop.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any, Dict, List

import numpy as np

import frugal
from frugal._lib import lib

DIM = 32
AIM = 1.03


def c_side() -> Any:
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overhead.so"
        include = here.parents[2] / "include"
        command = [os.environ.get("CC", "cc"), "-std=c99", "-O2", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run([*command, str(here / "overhead.c"), "-o", str(path)], check=True)
        pairs = ctypes.CDLL(str(path)).pairs
    pairs.restype = ctypes.c_int64
    pairs.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64]
    return pairs


def measure(pairs: Any, rows: int, repeats: int, turns: int) -> Dict[str, float]:
    """Returns the nanoseconds of a pair of calls on each side, and their ratio."""
    address = ctypes.cast(lib.frugal_lookup, ctypes.c_void_p), ctypes.cast(lib.frugal_push_grad, ctypes.c_void_p)
    times: Dict[str, List[float]] = {"python": [], "c": []}
    with frugal.Engine(flush_mode="at_once", pending_bytes=4 << 30) as engine:
        table = engine.create_table("t", rows=1_000_000, dim=DIM, optimizer=frugal.SGD(lr=0.01))
        trainer = engine.create_trainer()
        random = np.random.default_rng(1)
        out = np.empty((rows, DIM), np.float32)
        grads = random.standard_normal((rows, DIM), np.float32)
        # The first side of a turn is random: steps themselves may alternate, for example in the memory that they reuse.
        sides = [side for turn in range(turns + 2) for side in random.permutation(["python", "c"])]
        for step, side in enumerate(sides):
            batch = trainer.prefetch(step, table, random.integers(0, 1_000_000, rows))
            trainer.step_begin(step)
            if side == "python":
                begin = perf_counter_ns()
                for _ in range(repeats):
                    trainer.lookup(batch, out)
                    trainer.push_grad(batch, grads)
                taken = perf_counter_ns() - begin
            else:
                arguments = trainer.handle, table.handle, batch.handle, out.ctypes.data, grads.ctypes.data
                taken = pairs(*address, *arguments, repeats)
                if taken < 0:
                    raise RuntimeError(f"status {taken}")
            trainer.step_end(step)
            engine.flush()
            if step >= 4:  # two turns to warm up
                times[side].append(taken / repeats)
    result = {side: quantiles(values, n=10)[0] for side, values in times.items()}
    result["ratio"] = median(python / c for python, c in zip(times["python"], times["c"]))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    pairs = c_side()
    many = measure(pairs, 65536, 1, arguments.turns)
    one = measure(pairs, 1, 1000, arguments.turns)
    ratio = many["ratio"]
    print(f"Python {sys.version.split()[0]}, frugal {frugal.__version__}: lookup + push_grad, dim {DIM}")
    print(
        f"65536 rows: Python {many['python'] / 1e6:.3f} ms, C {many['c'] / 1e6:.3f} ms, ratio {ratio:.4f} (aim {AIM})"
    )
    print(
        f"    1 row:  Python {one['python']:.0f} ns, C {one['c']:.0f} ns:"
        f" {one['python'] - one['c']:.0f} ns for two calls"
    )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": 65536, "many": many, "one": one, "aim": AIM}, file, indent=1)
    return 0 if ratio <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
