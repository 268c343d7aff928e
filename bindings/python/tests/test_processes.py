"""Engines in a controller's process: the effects of it, and of other trainer processes, on a trainer process."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

import numpy as np
import pytest

import frugal

Start = Callable[..., Any]

WORLD = 2

# A rank that reads the words "begin", "train" and "end" from its lines of input, and does each.
RANK = """
import sys
import numpy as np
import frugal
service, rank, replace = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
engine = frugal.Engine(world_size=2, lookahead=4, service=service, timeout=60)
table = engine.create_table("t", 50, 4, optimizer=frugal.Adagrad(lr=0.5), init=frugal.Uniform(-1, 1))
trainer = engine.create_trainer(rank, replace=replace)
committed = engine.committed_step()
step = 0 if committed is None else committed + 1
keys = np.arange(0, 50, rank + 2)
print("joined", flush=True)
for line in sys.stdin:
    said = "done"
    try:
        if "begin" in line:
            trainer.step_begin(step)
        if "train" in line:
            trainer.push_grad(table, keys, trainer.lookup(table, keys) * np.float32(0.5) + np.float32(rank))
        if "end" in line:
            trainer.step_end(step)
            step += 1
    except frugal.Error as error:
        said = type(error).__name__
    print(said, flush=True)
"""


class World:
    """An engine of a controller, with rank 0 here."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.engine = frugal.Engine(world_size=WORLD, lookahead=4, service=service, timeout=60)
        self.table = self.engine.create_table(
            "t", 50, 4, optimizer=frugal.Adagrad(lr=0.5), init=frugal.Uniform(-1, 1)
        )
        self.trainer = self.engine.create_trainer(0)
        self.keys = np.arange(0, 50, 2)

    def push(self) -> None:
        rows = self.trainer.lookup(self.table, self.keys)
        self.trainer.push_grad(self.table, self.keys, rows * np.float32(0.5))

    def step(self, step: int) -> None:
        with self.trainer.step(step):
            self.push()

    def rows(self) -> Any:
        self.engine.flush()
        return self.table.get(np.arange(50), with_state=True)


@pytest.fixture
def world(controller: Any) -> Iterator[World]:
    world = World(controller.address)
    with world.engine:
        yield world


def alone(steps: int) -> Any:
    """The rows that two ranks of one process train."""
    with frugal.Engine(world_size=WORLD, lookahead=4, timeout=60) as engine:
        table = engine.create_table("t", 50, 4, optimizer=frugal.Adagrad(lr=0.5), init=frugal.Uniform(-1, 1))
        trainers = [engine.create_trainer(rank) for rank in range(WORLD)]
        for step in range(steps):
            for trainer in trainers:
                trainer.step_begin(step)
            for rank, trainer in enumerate(trainers):
                keys = np.arange(0, 50, rank + 2)
                rows = trainer.lookup(table, keys)
                trainer.push_grad(table, keys, rows * np.float32(0.5) + np.float32(rank))
            for trainer in trainers:
                trainer.step_end(step)
        return table.get(np.arange(50), with_state=True)


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


# --- The address ---


def test_the_address_is_told_or_the_environment_s(
    controller: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for service in (controller.address, os.fsencode(controller.address), Path(controller.address)):
        with frugal.Engine(service=service) as engine:
            assert engine.service == controller.address
            engine.create_trainer().close()
    with frugal.Engine() as engine:
        assert engine.service == ""
    monkeypatch.setenv("FRUGAL_SERVICE", controller.address)
    with frugal.Engine() as engine:
        assert engine.service == controller.address
    monkeypatch.setenv("FRUGAL_SERVICE", str(tmp_path / "unserved"))
    with pytest.raises(frugal.PeerLost, match="unserved within 100 ms"):
        frugal.Engine(timeout=0.1)
    with frugal.Engine(service=controller.address) as engine:
        assert engine.service == controller.address
    with frugal.Engine(service="") as engine:
        assert engine.service == ""
    monkeypatch.setenv("FRUGAL_SERVICE", "")
    with frugal.Engine() as engine:
        assert engine.service == ""


def test_bad_addresses() -> None:
    with pytest.raises(TypeError, match="service"):
        frugal.Engine(service=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NUL"):
        frugal.Engine(service="a\0b")
    with frugal.Engine(service="") as engine:
        with pytest.raises(ValueError, match="NUL"):
            engine.serve("a\0b")
        with pytest.raises(frugal.Error, match="SHM"):
            engine.serve("address")
        with pytest.raises(frugal.Unsupported, match="service"):
            engine.create_trainer(replace=True)


def test_a_host_may_create_a_table_that_a_trainer_has_created(
    controller_program: Path, peer: Start, tmp_path: Path
) -> None:
    address = str(tmp_path / "socket")
    options: Any = {"optimizer": frugal.Adagrad(lr=0.5), "init": frugal.Uniform(-1, 1)}
    with frugal.Engine(world_size=WORLD, lookahead=4, backing="shm", timeout=60, service="") as engine:
        engine.serve(address)
        other = peer(RANK, address, "1")
        assert other.says() == "joined"
        with pytest.raises(frugal.Exists, match="another configuration"):
            engine.create_table("t", 50, 5, **options)
        table = engine.create_table("t", 50, 4, **options)
        assert table.count() == 50
        with pytest.raises(frugal.Exists):
            engine.create_table("t", 50, 4, **options)


def test_a_trainer_can_host_the_controller(controller_program: Path, peer: Start, tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    with frugal.Engine(world_size=WORLD, lookahead=4, backing="shm", timeout=60, service="") as engine:
        engine.serve(address)
        table = engine.create_table("t", 50, 4, optimizer=frugal.Adagrad(lr=0.5), init=frugal.Uniform(-1, 1))
        found = re.sub(r"engine.create_table\(.*\)", 'engine.find_table("t")', RANK)
        other = peer(found, address, "1")
        assert other.says() == "joined"
        trainer = engine.create_trainer(0)
        keys = np.arange(0, 50, 2)
        for step in range(3):
            other.hears("begin train end")
            with trainer.step(step):
                trainer.push_grad(table, keys, trainer.lookup(table, keys) * np.float32(0.5))
            assert other.says() == "done"
        assert same(table.get(np.arange(50), with_state=True), alone(3))


def test_tables_of_all_processes(world: World, peer: Start) -> None:
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    with frugal.Engine(world_size=WORLD, lookahead=4, service=world.service) as engine:
        mine = engine.create_table("mine", 10, 3, hashed=True)
        assert repr(engine) == f"<frugal.Engine, world_size 2, lookahead 4, service {world.service!r}>"
        for each in (world.engine, engine):
            tables = each.tables()
            assert [(name, t.name, t.dim) for name, t in tables.items()] == [("t", "t", 4), ("mine", "mine", 3)]
            assert repr(tables["mine"]) == repr(mine) == "<frugal.Table 'mine', at most 10 rows x 3, hashed, SGD>"
        tables["mine"].put(np.arange(5), np.ones((5, 3), np.float32))
        assert sorted(k for chunk in world.engine.tables()["mine"].key_chunks(2) for k in chunk) == list(range(5))
    world.engine.tables()["mine"].drop()
    assert list(world.engine.tables()) == ["t"]


# --- Death ---


def test_a_rank_that_is_killed_and_replaced(world: World, peer: Start) -> None:
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    other.hears("begin train end")
    world.step(0)
    assert other.says() == "done"
    other.hears("begin train")
    world.trainer.step_begin(1)
    world.push()
    assert other.says() == "done"
    other.kill()
    # The first call after the death reports it, whichever call that is. Then nothing is left of the step.
    with pytest.raises(frugal.PeerLost, match="rank 1 is gone.*begin step 1 again"):
        world.trainer.step_end(1)
        world.trainer.step_begin(2)  # if step_end came before the death
    assert world.engine.committed_step() == 0
    # The time-out is longer than a slice of a wait.
    with pytest.raises(frugal.Timeout, match="a trainer to join as rank 1"):
        world.trainer.step_begin(1, timeout=0.25)
    begun = threading.Thread(target=world.trainer.step_begin, args=(1,))
    begun.start()
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    other.hears("begin train end")
    begun.join()
    world.push()
    world.trainer.step_end(1)
    assert other.says() == "done"
    assert world.engine.committed_step() == 1
    assert same(world.rows(), alone(2))


def test_a_rank_that_is_stopped_and_replaced(world: World, peer: Start) -> None:
    stopped = peer(RANK.replace("timeout=60", "timeout=2"), world.service, "1")
    assert stopped.says() == "joined"
    stopped.hears("begin train")
    assert stopped.says() == "done"
    os.kill(stopped.process.pid, signal.SIGSTOP)
    world.step(0)
    with pytest.raises(frugal.Timeout, match="rank 1"):
        world.trainer.step_begin(1, timeout=0.25)
    with pytest.raises(frugal.Exists, match="rank 1"):
        world.engine.create_trainer(1)
    other = peer(RANK, world.service, "1", "replace")
    assert other.says() == "joined"
    with pytest.raises(frugal.PeerLost):
        world.trainer.step_begin(1)
    for step in range(2):
        other.hears("begin train end")
        world.step(step)
        assert other.says() == "done"
    os.kill(stopped.process.pid, signal.SIGCONT)
    stopped.hears("train end")
    assert stopped.says() == "PeerLost"
    assert same(world.rows(), alone(2))


def test_a_controller_that_is_killed(world: World, controller: Any, peer: Start) -> None:
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    other.hears("begin train end")
    world.step(0)
    assert other.says() == "done"
    other.hears("begin train")
    assert other.says() == "done"
    waits = threading.Timer(0.2, controller.process.kill)
    world.step(1)
    waits.start()
    with pytest.raises(frugal.PeerLost):
        world.trainer.step_begin(2)  # for rank 1
    controller.process.communicate(timeout=60)
    other.hears("end")
    assert other.says() == "PeerLost"
    with pytest.raises(frugal.PeerLost):
        world.trainer.step_begin(2)
    with pytest.raises(frugal.PeerLost):
        world.engine.create_trainer(1)
    world.trainer.close()
    world.engine.close()


# --- Failing ---

# The ways in which a program fails between two steps.
FAILURES = {
    "trainer": "with trainer:\n    run()\n    raise RuntimeError('on purpose')\n",
    "engine": "with engine:\n    run()\n    raise RuntimeError('on purpose')\n",
    "step": "with engine, trainer, trainer.step(1):\n    raise RuntimeError('on purpose')\n",
    "exit": "with engine, trainer:\n    run()\n    sys.exit(3)\n",
    "nothing": "run()\nraise RuntimeError('on purpose')\n",
    "caught": "try:\n    with trainer:\n        run()\n        raise RuntimeError('on purpose')\n"
    "except RuntimeError:\n    print('caught', flush=True)\n    sys.stdin.readline()\n",
}
FAILING = RANK[: RANK.index("for line in")] + "def run():\n    pass\n"
STEP_0 = """
trainer.step_begin(0)
trainer.push_grad(table, keys, trainer.lookup(table, keys) * np.float32(0.5) + np.float32(rank))
trainer.step_end(0)
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_is_lost_and_replaced(world: World, peer: Start, how: str) -> None:
    other = peer(FAILING + STEP_0 + FAILURES[how], world.service, "1")
    assert other.says() == "joined"
    world.step(0)
    assert other.says() == "done"
    other.hears("fail")
    if how == "caught":
        assert other.says() == "caught"  # its process still runs
    # No rank continues without it: its gradients would be missing.
    with pytest.raises(frugal.PeerLost, match="rank 1"):
        while True:
            try:
                world.trainer.step_begin(1)
                world.push()
                world.trainer.step_end(1)
                world.trainer.step_begin(2)
            except frugal.StepAborted:
                assert how == "step"
    with pytest.raises(frugal.Timeout, match="rank 1"):
        try:
            world.trainer.step_begin(1, timeout=0.25)
        except frugal.PeerLost:  # the abort comes first, but may be reported after the loss of the rank
            assert how == "step"
            world.trainer.step_begin(1, timeout=0.25)
    again = peer(RANK, world.service, "1")
    assert again.says() == "joined"
    again.hears("begin train end")
    world.step(1)
    assert again.says() == "done"
    assert same(world.rows(), alone(2))


@pytest.mark.parametrize(
    "how",
    [
        "with engine, trainer:\n    sys.exit(0)\n",
        "trainer.close()\nraise RuntimeError('on purpose')\n",
        "",
        "sys.exit(0)\n",
    ],
)
def test_a_rank_that_ends_leaves(world: World, peer: Start, how: str) -> None:
    other = peer(FAILING + STEP_0 + how, world.service, "1")
    assert other.says() == "joined"
    world.step(0)
    assert other.says() == "done"
    other.hears("end")
    for step in range(1, 4):
        world.step(step)
    assert world.engine.committed_step() == 3


# --- Waiting ---


def test_who_waits_for_what_never_comes_says_so(world: World, impatient: None, tmp_path: Path) -> None:
    world.trainer.step_begin(0)
    world.trainer.step_end(0)
    with pytest.raises(UserWarning, match="rank 0 waits for rank 1: no trainer has joined"):
        world.trainer.step_begin(1)
    with frugal.Engine(world_size=WORLD, lookahead=4, service=world.service) as engine:
        with engine.create_trainer(1) as other, other.step(0):
            pass
        world.trainer.step_begin(1)
    with pytest.raises(UserWarning, match="no controller serves .*unserved .*frugal-controller"):
        frugal.Engine(service=tmp_path / "unserved")


def test_ctrl_c_while_nobody_serves(tmp_path: Path) -> None:
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        frugal.Engine(service=tmp_path / "unserved", timeout=math.inf)
    timer.join()


def test_a_controller_that_comes_later(controller_program: Path, tmp_path: Path) -> None:
    address = tmp_path / "later"
    process = []
    timer = threading.Timer(0.3, lambda: process.append(subprocess.Popen([str(controller_program), str(address)])))
    timer.start()
    with frugal.Engine(service=address, timeout=60) as engine:
        assert engine.committed_step() is None
    timer.join()
    process[0].terminate()
    assert process[0].wait(60) == 0


def pair(service: str) -> Tuple[World, frugal.Trainer]:
    """Rank 0 and rank 1 of two engines, as in two processes; rank 1 is in step 0, which rank 0 has ended."""
    world = World(service)
    other = frugal.Engine(world_size=WORLD, lookahead=4, service=service, timeout=60).create_trainer(1)
    for trainer in (world.trainer, other):
        trainer.step_begin(0)
    world.trainer.step_end(0)
    return world, other


def interrupt_soon() -> threading.Timer:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("what", ["step_begin", "with", "read"])
def test_ctrl_c_ends_a_wait_and_takes_nothing(controller: Any, what: str) -> None:
    world, other = pair(controller.address)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        if what == "step_begin":
            world.trainer.step_begin(1, timeout=float("inf"))
        elif what == "with":
            with world.trainer.step(1):
                pytest.fail("rank 1 is in step 0")
        else:
            world.engine.read([], trainer=world.trainer)
    timer.join()
    with pytest.raises(frugal.Timeout, match="rank 1"):
        world.trainer.step_begin(1, timeout=0)
    with pytest.raises(frugal.Timeout, match="rank 1"):
        world.trainer.step_begin(1, timeout=0.25)
    other.step_end(0)
    with pytest.raises(frugal.StepOrder):
        world.trainer.step_begin(2)
    world.step(1)
    other.step_begin(1)
    other.step_end(1)
    assert world.engine.committed_step() == 1
    world.engine.close()
    other.engine.close()


def test_ctrl_c_while_nobody_has_joined_in_place_of_a_lost_rank(world: World, peer: Start) -> None:
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    other.hears("begin")
    world.trainer.step_begin(0)
    assert other.says() == "done"
    other.kill()
    with pytest.raises(frugal.PeerLost):
        while True:
            world.trainer.lookup(world.table, world.keys)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        world.trainer.step_begin(0, timeout=float("inf"))
    timer.join()
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    other.hears("begin train end")
    world.step(0)
    assert other.says() == "done"
    assert same(world.rows(), alone(1))


# --- Children ---


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_of_a_trainer_process(world: World, peer: Start) -> None:
    other = peer(RANK, world.service, "1")
    assert other.says() == "joined"
    other.hears("begin train end")
    world.trainer.step_begin(0)
    child = os.fork()
    if child == 0:
        wrong = 0
        end, get = lambda: world.trainer.step_end(0), lambda: world.table.get(world.keys)
        for call in (end, get, world.engine.committed_step):
            try:
                call()
                wrong += 1
            except frugal.Forked:
                pass
        world.trainer.close()
        world.engine.close()
        os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    world.push()
    world.trainer.step_end(0)
    assert other.says() == "done"
    assert same(world.rows(), alone(1))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_lives_on_does_not_hide_its_parent_s_death(world: World, peer: Start) -> None:
    fork = """
import os, signal
child = os.fork()
if child == 0:
    signal.pause()
print("joined", child, flush=True)
"""
    program = RANK.replace('print("joined", flush=True)\n', fork)
    other = peer(program, world.service, "1")
    said = other.says().split()
    assert said[0] == "joined"
    other.hears("begin")
    world.trainer.step_begin(0)
    assert other.says() == "done"
    other.process.kill()
    try:
        with pytest.raises(frugal.PeerLost):
            while True:
                world.trainer.lookup(world.table, world.keys)
    finally:
        os.kill(int(said[1]), signal.SIGKILL)
