"""Observation of an engine: metrics and traces. Also: services in a library without them."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest

import frugal

KEYS = np.arange(40)


def train(engine: frugal.Engine, steps: int = 10) -> None:
    table = engine.create_table("users", rows=100, dim=4)
    with engine.create_trainer() as trainer:
        for step in range(steps):
            batch = trainer.prefetch(step, table, KEYS)
            with trainer.step(step):
                trainer.push_grad(batch, trainer.lookup(batch))
    engine.flush()


def spans(path: Path) -> Dict[str, List[Dict[str, Any]]]:
    trace = json.loads(path.read_text())
    assert trace["otherData"]["clock"] == "CLOCK_MONOTONIC"
    found: Dict[str, List[Dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        assert event["pid"] == os.getpid()
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def test_a_trace_has_the_spans_of_a_training(engine: frugal.Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with engine.trace(path):
        train(engine)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = spans(path)
    for name in ("prefetch", "step_begin", "gate", "lookup", "push", "step_end"):
        assert [e["args"]["step"] for e in found[name]] == list(range(10)), name
        assert {e["args"]["rank"] for e in found[name]} == {0}
        assert {e["tid"] for e in found[name]} == {threading.get_native_id()}
    assert {e["args"]["keys"] for e in found["lookup"]} == {len(KEYS)}
    assert sum(e["args"]["rows"] for e in found["apply"]) == 10 * len(KEYS)
    assert {e["args"]["table"] for e in found["apply"]} == {"users"}


def test_traces_that_cannot_be(engine: frugal.Engine, tmp_path: Path) -> None:
    with pytest.raises(frugal.NotFound):
        engine.trace_stop(None)
    with pytest.raises(frugal.InvalidArgument):
        engine.trace_start(0)
    engine.trace_start(events=5)
    with pytest.raises(frugal.Exists):
        engine.trace_start()
    with pytest.raises(frugal.Exists), engine.trace(tmp_path / "t"):
        pass
    with pytest.raises(frugal.InvalidArgument) as refused:
        engine.trace_stop(tmp_path / "none" / "t")
    assert refused.value.system_code == errno.ENOENT
    train(engine)
    engine.trace_stop(os.fsencode(tmp_path / "t"))
    assert spans(tmp_path / "t") == {}  # the recording had ended
    with pytest.raises(frugal.InvalidArgument), engine.trace(tmp_path):
        pass
    # No events are kept after that, nor after an exception in the block, which passes through.
    with pytest.raises(ZeroDivisionError), engine.trace(tmp_path / "u"):
        engine.committed_step()
        raise ZeroDivisionError
    assert spans(tmp_path / "u") == {}
    with pytest.raises(ZeroDivisionError), engine.trace(str(tmp_path)):
        raise ZeroDivisionError
    with pytest.raises(frugal.NotFound):
        engine.trace_stop(None)
    for path, error in ((1, TypeError), ("a\0b", ValueError)):
        with pytest.raises(error):
            engine.trace_stop(path)  # type: ignore[arg-type]


def test_every_line_of_the_metrics(engine: frugal.Engine) -> None:
    train(engine)
    stats = engine.stats()
    text = engine.metrics()
    assert text.endswith("\n")
    samples: Dict[str, str] = {}
    types: Dict[str, str] = {}
    family = ""
    for line in text[:-1].split("\n"):
        comment = re.fullmatch(r"# (HELP|TYPE) (frugal_[a-z_]+) (.+)", line)
        if comment:
            family = comment[2]
            if comment[1] == "TYPE":
                assert comment[3] == ("counter" if family.endswith("_total") else "gauge")
                types[family] = comment[3]
            continue
        sample = re.fullmatch(r'((frugal_[a-z_]+)(?:\{[a-z]+="[^"\\]+"\})?) ([0-9.]+)', line)
        assert sample and sample[2] == family and family in types, line
        assert sample[1] not in samples
        samples[sample[1]] = sample[3]
    for name, value in stats.items():
        if name.endswith("_ns"):
            assert float(samples[f"frugal_{name[:-3]}_seconds_total"]) == pytest.approx(value / 1e9), name
        elif name.startswith("pending_") or name == "active_rows":
            assert samples[f"frugal_{name}"] == str(value)
        else:
            assert samples[f"frugal_{name}_total"] == str(value)
    assert samples["frugal_committed_step"] == "9"
    assert samples["frugal_health"] == "0"
    assert samples['frugal_table_rows{table="users"}'] == "100"


def test_metrics_that_are_longer_than_a_first_guess(engine: frugal.Engine) -> None:
    for i in range(200):
        engine.create_table(f"{i} " + "x" * 200, rows=1, dim=1)
    assert engine.metrics().count("frugal_table_rows{") == 200


def test_peer_lost_is_a_connection_error() -> None:
    assert issubclass(frugal.PeerLost, ConnectionError)
    assert frugal.PeerLost("gone", -23).status_name == "FRUGAL_ERR_PEER_LOST"


def test_objects_tell_what_they_are() -> None:
    engine = frugal.Engine(world_size=2, lookahead=3)
    dense = engine.create_table("a'b", rows=50, dim=8, optimizer=frugal.Adam())
    hashed = engine.create_table("h", rows=7, dim=1, hashed=True)
    trainer, other = engine.create_trainer(1), engine.create_trainer(0)
    assert repr(engine) == "<frugal.Engine, world_size 2, lookahead 3>"
    assert repr(dense) == """<frugal.Table "a'b", 50 rows x 8, dense, Adam>"""
    assert repr(hashed) == "<frugal.Table 'h', at most 7 rows x 1, hashed, SGD>"
    assert repr(engine.tables()) == f"""{{"a'b": {dense!r}, 'h': {hashed!r}}}"""
    assert repr(trainer) == "<frugal.Trainer of rank 1, world_size 2, on cpu>"
    hashed.set_optimizer(0, frugal.FTRL())
    assert "hashed, FTRL" in repr(hashed)
    hashed.drop()
    assert repr(hashed).endswith(", hashed, FTRL, dropped>")
    trainer.close()
    assert repr(trainer) == "<frugal.Trainer of rank 1, closed>"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, "\n".join(map(repr, (engine, dense, other))).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1000).decode().split("\n")
    os.close(read)
    os.close(write)
    ends = (engine, ", of the parent process>"), (dense, ">"), (other, ", of the parent process>")
    assert told == [f"{of!r}"[:-1] + end for of, end in ends]
    engine.close()
    assert repr(engine) == "<frugal.Engine, closed>" and repr(other) == "<frugal.Trainer of rank 0, closed>"
    assert repr(dense).endswith(", dense, Adam, closed>")
    # Objects whose constructor has not run, as a debugger may print them.
    for kind in (frugal.Engine, frugal.Table):
        assert repr(kind.__new__(kind)).startswith(f"<frugal.{kind.__name__}")


@pytest.mark.parametrize("block", [False, True])
def test_a_rank_that_waits_for_nobody_says_so(block: bool, impatient: None) -> None:
    with frugal.Engine(world_size=4, timeout=60) as engine:
        trainers = [engine.create_trainer(rank) for rank in (0, 2)]

        def begin(step: int, timeout: Optional[float] = None) -> None:
            if block:
                trainers[0].step(step, timeout).__enter__()
            else:
                trainers[0].step_begin(step, timeout)

        begin(0)
        trainers[0].step_end(0)
        with pytest.raises(UserWarning, match="rank 0 waits for ranks 1, 3: no trainer .* world_size is 4.* torchrun"):
            begin(1)
        with pytest.raises(frugal.Timeout):  # once
            begin(1, timeout=0.01)
        trainers += [engine.create_trainer(rank) for rank in (1, 3)]
        for trainer in trainers[1:]:
            trainer.step_begin(0)
            trainer.step_end(0)
        begin(1)
        # A rank that has joined and is slow gives no warning.
        trainers[0].step_end(1)
        with pytest.raises(frugal.Timeout):
            begin(2, timeout=0.01)
        trainers[1].step_begin(1)
        trainers[1].step_end(1)
        with pytest.raises(frugal.Timeout):
            trainers[1].step_begin(2, timeout=0.01)


def test_all_who_are_late_are_counted() -> None:
    with frugal.Engine(world_size=1000) as engine:
        trainer = engine.create_trainer(5)
        trainer.step_begin(0)
        trainer.step_end(0)
        with pytest.raises(frugal.Timeout) as raised:
            trainer.step_begin(1, timeout=0)
        named = re.findall(r"(\d+) \(not joined\)", raised.value.message)
        more = re.search(r" and (\d+) more to end step 0", raised.value.message)
        assert named[:6] == ["0", "1", "2", "3", "4", "6"] and more and len(named) + int(more[1]) == 999
        with pytest.raises(frugal.Busy, match=r"step 0 is ended by some ranks, and not by rank 0 \(not joined\), 1"):
            engine.create_table("t", rows=1, dim=1).keys()
