#!/usr/bin/env python3
"""Replays an op script (docs/bindings.md) with the public interface of the package, and prints the hashes.

    opscript.py SCRIPT

At the first line whose call returns another status than the script has, it prints a line on stderr and exits with 1.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

import frugal

FLUSH_MODES: List[Any] = ["auto", "at_once", "deferred", "write_through", "tree_heap"]
NAN_POLICIES: List[Any] = ["reject", "skip", "accept"]
POOLING: List[Any] = ["none", "sum", "mean"]
OPTIMIZERS: List[Any] = [
    frugal.SGD,
    frugal.Momentum,
    frugal.Adagrad,
    frugal.RowWiseAdagrad,
    frugal.Adam,
    frugal.RMSProp,
    frugal.FTRL,
]
# The bits of the defaults of frugal_optimizer_init that differ from those of frugal.config.
DEFAULTS = {"lr": 0x3C23D70A, "eps": 0x322BCC77}
INITIALIZERS: List[Any] = [frugal.Constant, frugal.Uniform, frugal.Normal, frugal.TruncatedNormal, frugal.Xavier]
NESTEROV, MEAN_RANKS, NO_BIAS_CORRECTION, LAZY, WITH_STATE, SKIP = 1, 2, 4, 1, 1, 1


class Fnv:
    """The 64-bit FNV-1a hash."""

    def __init__(self) -> None:
        self.value = 14695981039346656037

    def add(self, data: bytes) -> None:
        value = self.value
        for byte in data:
            value = (value ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
        self.value = value

    def __str__(self) -> str:
        return f"{self.value:016x}"


def floats(bits: List[int]) -> Any:
    return np.array(bits, np.uint32).view(np.float32)


def one_float(bits: int) -> float:
    return float(floats([bits])[0])


def keys_of(line: Dict[str, Any]) -> Any:
    return np.array([int(k) for k in line["keys"]], np.uint64)


def optimizer_of(fields: Optional[Dict[str, Any]]) -> frugal.Optimizer:
    fields = fields or {}
    flags = fields.get("flags", 0)
    kind = OPTIMIZERS[fields.get("kind", 0)]
    # A class has only the fields that its optimizer uses; the others have no effect. A field that a script leaves out
    # has the header's default, which may differ from Python's.
    fields = {**DEFAULTS, **fields}
    arguments: Dict[str, Any] = {
        name: one_float(bits) for name, bits in fields.items() if name in kind.__dataclass_fields__
    }
    if "nesterov" in kind.__dataclass_fields__:
        arguments["nesterov"] = bool(flags & NESTEROV)
    if "bias_correction" in kind.__dataclass_fields__:
        arguments["bias_correction"] = not flags & NO_BIAS_CORRECTION
    optimizer: frugal.Optimizer = kind(mean_ranks=bool(flags & MEAN_RANKS), **arguments)
    return optimizer


class Replay:
    def __init__(self) -> None:
        self.engine = frugal.Engine(service="")
        self.engine.close()
        self.tables: Dict[int, frugal.Table] = {}
        self.trainers: Dict[int, frugal.Trainer] = {}
        self.batches: Dict[int, frugal.Batch] = {}
        self.outputs = Fnv()
        self.hashes = 0
        self.has_folder = False

    def run(self, line: Dict[str, Any]) -> str:
        """Makes a line's call. Returns the name of its status."""
        try:
            getattr(self, "do_" + line["do"])(line)
        except frugal.Error as error:
            return error.status_name
        return "FRUGAL_OK"

    def do_open(self, line: Dict[str, Any]) -> None:
        names = ("world_size", "lookahead", "flush_threads", "staleness", "pending_bytes", "seed")
        options: Dict[str, Any] = {name: int(line[name]) for name in names if name in line}
        options["service"] = os.environ.get("FRUGAL_SERVICE")
        self.engine = frugal.Engine(flush_mode=FLUSH_MODES[line.get("flush_mode", 0)], **options)

    def do_resume(self, line: Dict[str, Any]) -> None:
        """Another engine goes on from a checkpoint of this one."""
        folder = os.environ["FRUGAL_FOLDER"]
        if not self.has_folder:
            self.engine.open_folder(folder)
        self.engine.checkpoint().wait()
        self.engine.close()
        self.do_open(line)
        self.engine.open_folder(folder)
        self.has_folder = True
        self.engine.restore()
        for number, table in self.tables.items():
            self.tables[number] = self.engine.find_table(table.name)

    def do_close(self, line: Dict[str, Any]) -> None:
        self.engine.close()

    def do_table(self, line: Dict[str, Any]) -> None:
        kind = INITIALIZERS[line.get("init", 0)]
        a, b = one_float(line.get("init_a", 0)), one_float(line.get("init_b", 0))
        self.tables[line["table"]] = self.engine.create_table(
            line["name"],
            int(line["rows"]),
            line["dim"],
            hashed=line.get("key_space", 0) == 1,
            lazy=bool(line.get("flags", 0) & LAZY),
            init=kind(a) if kind is frugal.Constant else kind(a, b),
            optimizer=optimizer_of(line.get("optimizer")),
            nan_policy=NAN_POLICIES[line.get("nan_policy", 0)],
        )

    def do_trainer(self, line: Dict[str, Any]) -> None:
        ratio = one_float(line.get("cache_ratio", 0))
        self.trainers[line["rank"]] = self.engine.create_trainer(line["rank"], cache_ratio=ratio)

    def do_close_trainer(self, line: Dict[str, Any]) -> None:
        self.trainers[line["rank"]].close()

    def do_set_optimizer(self, line: Dict[str, Any]) -> None:
        self.tables[line["table"]].set_optimizer(int(line["first_step"]), optimizer_of(line["optimizer"]))

    def do_prefetch(self, line: Dict[str, Any]) -> None:
        ops = self.ops(line)
        self.batches[line["batch"]] = self.trainers[line["rank"]].prefetch(int(line["step"]), ops)

    def do_cancel(self, line: Dict[str, Any]) -> None:
        self.trainers[line["rank"]].prefetch_cancel(self.batches[line["batch"]])

    def do_begin(self, line: Dict[str, Any]) -> None:
        timeout = line["timeout_ms"] / 1000 if "timeout_ms" in line else None
        self.trainers[line["rank"]].step_begin(int(line["step"]), timeout)

    def do_end(self, line: Dict[str, Any]) -> None:
        self.trainers[line["rank"]].step_end(int(line["step"]), skip=bool(line.get("flags", 0) & SKIP))

    def do_abort(self, line: Dict[str, Any]) -> None:
        self.trainers[line["rank"]].step_abort()

    def do_flush(self, line: Dict[str, Any]) -> None:
        self.engine.flush()

    def do_lookup(self, line: Dict[str, Any]) -> None:
        for rows in self.trainers[line["rank"]].lookup(self.ops(line)):
            self.outputs.add(rows.tobytes())

    def do_push(self, line: Dict[str, Any]) -> None:
        ops = self.ops(line)
        self.trainers[line["rank"]].push_grad(ops)
        for op in ops:
            if op.weight_grads is not None:
                self.outputs.add(np.asarray(op.weight_grads).tobytes())

    def do_read(self, line: Dict[str, Any]) -> None:
        ops = self.ops(line)
        found = []
        for op in ops:
            op.found = np.zeros(np.asarray(op.keys).size, np.uint8)
            found.append(op.found)
        rows = self.engine.read(ops, trainer=self.trainers[line["rank"]] if "rank" in line else None)
        for flags, values in zip(found, rows):
            self.outputs.add(flags.tobytes() + values.tobytes())

    def do_get(self, line: Dict[str, Any]) -> None:
        keys = keys_of(line)
        found = np.zeros(keys.size, np.uint8)
        rows = self.tables[line["table"]].get(keys, found=found, with_state=line.get("flags", 0) == WITH_STATE)
        self.outputs.add(found.tobytes() + rows[found == 1].tobytes())

    def do_put(self, line: Dict[str, Any]) -> None:
        rows = floats(line["rows"])
        self.tables[line["table"]].put(keys_of(line), rows, with_state=line.get("flags", 0) == WITH_STATE)

    def do_delete(self, line: Dict[str, Any]) -> None:
        self.tables[line["table"]].delete(keys_of(line))

    def do_hash(self, line: Dict[str, Any]) -> None:
        tables = Fnv()
        for number in sorted(self.tables):
            table = self.tables[number]
            keys = np.sort(table.keys())
            tables.add(table.count().to_bytes(8, "little"))
            rows = table.get(keys, with_state=True)
            for key, row in zip(keys, rows):
                tables.add(key.tobytes() + row.tobytes())
        print(f"hash {self.hashes} {self.outputs} {tables}")
        self.hashes += 1

    def ops(self, line: Dict[str, Any]) -> List[frugal.Op]:
        return [self.op(fields) for fields in line["ops"]]

    def op(self, fields: Dict[str, Any]) -> frugal.Op:
        op = frugal.Op(self.tables[fields["table"]])
        if "keys" in fields:
            op.keys = keys_of(fields)
        if "batch" in fields:
            op.batch = self.batches[fields["batch"]]
            op.part = fields.get("part", 0)
        op.pooling = POOLING[fields.get("pooling", 0)]
        if "offsets" in fields:
            op.offsets = np.array(fields["offsets"], np.uint64)
        if "weights" in fields:
            op.weights = floats(fields["weights"])
            if fields.get("weight_grads"):
                op.weight_grads = np.zeros(len(fields["weights"]), np.float32)
        op.grads = floats(fields.get("grads", []))  # left out of an op that has no rows
        if "padding_key" in fields:
            op.padding_key = int(fields["padding_key"])
        return op


def replay(path: str) -> Tuple[int, str]:
    """Returns the exit status and a message."""
    state = Replay()
    with open(path, encoding="utf-8") as script:
        for number, text in enumerate(script, 1):
            line = json.loads(text)
            wanted = line.get("status", "FRUGAL_OK")
            answered = state.run(line)
            if answered != wanted:
                return 1, f"{path}:{number}: {line['do']} returned {answered}, and {wanted} is right"
            if "FRUGAL_TURNS" in os.environ:
                print("done", flush=True)
    return 0, ""


if __name__ == "__main__":
    status, message = replay(sys.argv[1])
    if status:
        print(message, file=sys.stderr)
    sys.exit(status)
