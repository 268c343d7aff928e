"""Life and death: closing, the collector, the interpreter's end, fork, signals, threads, callbacks."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import threading
import time
import weakref
from typing import Any, Callable, List, Tuple, Type

import numpy as np
import pytest

import frugal
from frugal import _trainer

KEYS = np.array([7, 42, 7])
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_closed_objects_are_errors() -> None:
    engine = frugal.Engine()
    table = engine.create_table("t", rows=50, dim=2)
    trainer = engine.create_trainer()
    batch = trainer.prefetch(0, table, KEYS)
    trainer.step_begin(0)
    engine.close()
    engine.close()
    rows = np.zeros((3, 2), np.float32)
    calls: List[Callable[[], Any]] = [
        lambda: trainer.lookup(batch, rows),
        lambda: trainer.push_grad(batch, rows),
        lambda: trainer.step_end(0),
        lambda: trainer.step_begin(1),
        lambda: trainer.step_abort(),
        lambda: trainer.prefetch(1, table, KEYS),
        lambda: trainer.prefetch_cancel(batch),
        lambda: table.get(KEYS),
        lambda: table.put(KEYS, rows),
        lambda: table.delete(KEYS),
        lambda: table.count(),
        lambda: table.keys(),
        lambda: next(table.key_chunks()),
        lambda: table.describe(),
        lambda: table.set_optimizer(5, frugal.SGD()),
        lambda: table.drop(),
        lambda: engine.flush(),
        lambda: engine.stats(),
        lambda: engine.metrics(),
        lambda: engine.trace_start(),
        lambda: engine.trace_stop(None),
        lambda: engine.serve("/tmp/none"),
        lambda: engine.committed_step(),
        lambda: engine.read(table, KEYS),
        lambda: engine.create_trainer(),
        lambda: engine.create_table("u", rows=1, dim=1),
        lambda: engine.find_table("t"),
        lambda: engine.tables(),
    ]
    for call in calls:
        with pytest.raises(frugal.BadHandle):
            call()
    assert engine.health() == -2
    trainer.close()
    del trainer, table, batch, engine, calls
    gc.collect()


def test_closing_a_trainer_frees_its_rank(engine: frugal.Engine) -> None:
    with engine.create_trainer() as trainer:
        with pytest.raises(frugal.Exists):
            engine.create_trainer()
    trainer.close()
    with pytest.raises(frugal.BadHandle):
        trainer.step_begin(0)
    again = engine.create_trainer()
    del again
    gc.collect()
    engine.create_trainer()


def test_children_keep_their_engine() -> None:
    table = frugal.Engine().create_table("t", rows=50, dim=2)
    gc.collect()
    assert table.count() == 50
    engine = weakref.ref(table._engine)
    trainer = table._engine.create_trainer()
    del table
    gc.collect()
    trainer.step_begin(0)
    handle = trainer.engine.handle
    del trainer
    gc.collect()
    assert engine() is None
    from frugal._lib import lib

    assert lib.frugal_health(handle) == -2


def test_handles_cannot_be_copied_or_pickled(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=4)
    trainer = engine.create_trainer()
    batch = trainer.prefetch(0, table, KEYS)
    for handle in (engine, table, trainer, batch):
        ways: List[Callable[[Any], object]] = [copy.copy, copy.deepcopy]
        ways += [lambda it, n=n: pickle.dumps(it, n) for n in range(pickle.HIGHEST_PROTOCOL + 1)]  # type: ignore[misc]
        for way in ways:
            with pytest.raises(TypeError, match=f"frugal.{type(handle).__name__} cannot be copied or pickled"):
                way(handle)
    with pytest.raises(TypeError, match="copied"):
        copy.deepcopy(frugal.Op(table, KEYS))
    assert copy.copy(frugal.Op(table, KEYS)).table is table
    with trainer.step(0):
        assert trainer.lookup(batch).shape == (3, 4)


def test_the_collector_may_run_at_any_time(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=2, optimizer=frugal.SGD(lr=1.0))
    trainer = engine.create_trainer()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for step in range(30):
            frugal.Engine().create_trainer()  # garbage with finalizers, perhaps in a cycle
            batch = trainer.prefetch(step, table, KEYS + 0)
            with trainer.step(step):
                rows = trainer.lookup(batch)
                trainer.push_grad(batch, np.ones_like(rows))
    finally:
        gc.set_threshold(*threshold)
    assert table.get(KEYS).tolist() == [[-60, -60], [-30, -30], [-60, -60]]


# --- The interpreter's end ---


@pytest.mark.parametrize("where", ["globals", "cycle", "thread", "atexit", "exception", "exit in a step"])
def test_the_end_of_the_interpreter(run_python: Run, where: str) -> None:
    program = """
import atexit, sys, threading, time
from array import array
import frugal

where = sys.argv[1]
def log(level, text):
    print("log", file=sys.stderr)
def train(engine, steps=3):
    table = engine.create_table("t", rows=100000, dim=8)
    trainer = engine.create_trainer()
    keys = array("q", range(50000)); grads = array("f", [1.0]) * (8 * 50000)
    for step in range(steps):
        trainer.prefetch(step, table, keys)
        trainer.step_begin(step)
        trainer.push_grad(table, keys, grads)
        if step < 2 or where != "exit in a step":
            trainer.step_end(step)
    return engine, table, trainer
if where == "atexit":
    kept = []
    atexit.register(lambda: kept[0][1].count())
    kept.append(train(frugal.Engine(log=log)))
elif where == "cycle":
    ring = [train(frugal.Engine(log=log, flush_mode="deferred"))]
    ring.append(ring)
    del ring
elif where == "thread":
    kept = train(frugal.Engine(world_size=2, log=log), 1)
    def wait():
        try:
            kept[2].step_begin(1)
        except frugal.Error:
            pass
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)
else:
    kept = train(frugal.Engine(log=log))
    if where == "exception":
        raise SystemExit("leaving")
print("end")
"""
    ended = run_python(program, where)
    assert ended.returncode == (1 if where == "exception" else 0), ended.stderr
    assert "Traceback" not in ended.stderr and "Fatal" not in ended.stderr, ended.stderr
    assert ended.stdout == ("" if where == "exception" else "end\n")


# --- fork ---


def in_child(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child and returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_the_engine_nor_harm_it() -> None:
    engine = frugal.Engine()
    table = engine.create_table("t", rows=50, dim=2, optimizer=frugal.SGD(lr=1.0))
    trainer = engine.create_trainer()
    trainer.step_begin(0)
    objects = [engine, table, trainer]

    def child() -> None:
        for call in (table.count, engine.flush, lambda: trainer.step_end(0), lambda: engine.create_trainer(0)):
            with pytest.raises(frugal.Forked):
                call()
        trainer.close()
        engine.close()
        objects.clear()
        with frugal.Engine() as own:
            assert own.create_table("t", rows=5, dim=1).count() == 5

    assert in_child(child) == 0
    trainer.push_grad(table, KEYS, np.ones((3, 2), np.float32))
    trainer.step_end(0)
    assert table.get(KEYS[:1]).tolist() == [[-2, -2]]
    engine.close()


def test_finalizers_of_a_child_that_exits_by_itself(run_python: Run) -> None:
    program = """
import os, sys, warnings
from array import array
import frugal
warnings.simplefilter("ignore", DeprecationWarning)  # of fork, which is what this is about
engine = frugal.Engine()
table = engine.create_table("t", rows=10, dim=1)
trainer = engine.create_trainer()
trainer.step_begin(0)
child = os.fork()
if child == 0:
    sys.exit(0)  # the whole end of the interpreter, finalizers too
assert os.waitpid(child, 0)[1] == 0
trainer.step_end(0)
assert engine.committed_step() == 0 and table.count() == 10
print("well")
"""
    ended = run_python(program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "well\n", "")


_shared: List[Any] = []


def _touch(n: int) -> str:
    try:
        return str(_shared[0].count())
    except frugal.Forked as error:
        return error.status_name


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_multiprocessing_with_fork(engine: frugal.Engine) -> None:
    _shared[:] = [engine.create_table("t", rows=10, dim=1)]
    trainer = engine.create_trainer()
    trainer.step_begin(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_touch, range(4)) == ["FRUGAL_ERR_FORKED"] * 4
    _shared.clear()
    trainer.step_end(0)
    assert engine.committed_step() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_another_thread_is_in_a_call() -> None:
    with frugal.Engine(world_size=2) as engine:
        trainer, other = engine.create_trainer(0), engine.create_trainer(1)
        trainer.step_begin(0)
        trainer.step_end(0)
        waiting = threading.Thread(target=trainer.step_begin, args=(1,))
        waiting.start()
        while trainer._turn:
            time.sleep(0.001)

        def child() -> None:
            with pytest.raises(frugal.Forked):
                trainer.step_begin(1)

        assert in_child(child) == 0
        other.step_begin(0)
        other.step_end(0)
        waiting.join()


# --- Signals ---


def waiting_rank() -> Tuple[frugal.Engine, frugal.Trainer, frugal.Trainer]:
    """An engine whose first rank waits at the gate of step 1 until the second ends step 0."""
    engine = frugal.Engine(world_size=2)
    ranks = [engine.create_trainer(n) for n in range(2)]
    for trainer in ranks:
        trainer.step_begin(0)
    ranks[0].step_end(0)
    return engine, ranks[0], ranks[1]


def interrupt_soon() -> threading.Timer:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_ends_a_waiting_step_begin() -> None:
    engine, waiting, other = waiting_rank()
    with engine:
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            waiting.step_begin(1)
        timer.join()
        with pytest.raises(frugal.Timeout, match="rank 1"):
            waiting.step_begin(1, timeout=0.01)
        other.step_end(0)
        waiting.step_begin(1)
        waiting.step_end(1)


class Interrupted(Exception):
    """An exception that a signal handler raises."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_an_interrupt_after_the_gate_of_a_with_block_undoes_the_step(
    engine: frugal.Engine, monkeypatch: pytest.MonkeyPatch, kind: Type[BaseException]
) -> None:
    real = _trainer._step_begin
    trainer = engine.create_trainer()

    def late(*arguments: Any) -> int:
        assert real(*arguments) == 0
        raise kind

    monkeypatch.setattr(_trainer, "_step_begin", late)
    with pytest.raises(kind):
        with trainer.step(0):
            pytest.fail("the block is not entered")
    monkeypatch.setattr(_trainer, "_step_begin", real)
    with pytest.raises(frugal.NotInStep):
        trainer.step_abort()
    with trainer.step(0):
        # A step that cannot begin does not change the step that the trainer is in.
        with pytest.raises(frugal.StepOrder), trainer.step(5):
            pass
        with pytest.raises(ValueError), trainer.step(-1):
            pass
    assert engine.committed_step() == 0


def test_an_interrupt_in_the_gate_of_a_with_block_undoes_nothing() -> None:
    engine, waiting, other = waiting_rank()
    with engine:
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            with waiting.step(1):
                pytest.fail("rank 1 is in step 0")
        timer.join()
        other.step_end(0)
        with waiting.step(1):
            assert engine.committed_step() == 0


def test_ctrl_c_ends_a_waiting_read() -> None:
    engine, waiting, other = waiting_rank()
    with engine:
        table = None
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            engine.read([], trainer=waiting)
        timer.join()
        other.step_end(0)
        assert engine.read([], trainer=waiting) == [] and table is None


def test_ctrl_c_from_a_terminal(run_python: Run, tmp_path: Any) -> None:
    """The same in a user's situation: a separate program with its default handler."""
    program = """
import os, signal, sys, threading
import frugal
signal.signal(signal.SIGINT, signal.default_int_handler)
engine = frugal.Engine(world_size=2)
trainer, other = engine.create_trainer(0), engine.create_trainer(1)
for t in (trainer, other):
    t.step_begin(0)
trainer.step_end(0)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    trainer.step_begin(1, timeout=float("inf"))
except KeyboardInterrupt:
    print("interrupted")
other.step_end(0)
trainer.step_begin(1)
print("usable")
"""
    ended = run_python(program)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\nusable\n"), ended.stderr


def test_a_signal_handler_that_uses_the_waiting_trainer_is_refused() -> None:
    engine, waiting, other = waiting_rank()
    seen: List[BaseException] = []

    def handler(*_: Any) -> None:
        try:
            waiting.step_abort()
        except RuntimeError as error:
            seen.append(error)
        other.step_end(0)

    old = signal.signal(signal.SIGALRM, handler)
    try:
        with engine:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            waiting.step_begin(1)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert len(seen) == 1 and "another call" in str(seen[0])


def test_timeouts() -> None:
    engine, waiting, other = waiting_rank()
    with engine:
        for timeout in (0, 0.001, 0.25):
            start = time.monotonic()
            with pytest.raises(TimeoutError) as raised:
                waiting.step_begin(1, timeout=timeout)
            assert time.monotonic() - start >= timeout
            assert isinstance(raised.value, frugal.Timeout) and raised.value.status == -13
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError):
                waiting.step_begin(1, timeout=wrong)
    with frugal.Engine(world_size=2, timeout=0.15) as engine:
        trainer = engine.create_trainer()
        trainer.step_begin(0)
        trainer.step_end(0)
        with pytest.raises(frugal.Timeout):
            trainer.step_begin(1)


# --- Threads ---


def test_a_trainer_in_use_refuses_other_threads() -> None:
    engine, waiting, other = waiting_rank()
    with engine:
        thread = threading.Thread(target=waiting.step_begin, args=(1,))
        thread.start()
        while waiting._turn:
            time.sleep(0.001)
        table = engine.find_table  # any thread may use the engine
        with pytest.raises(frugal.NotFound):
            table("t")
        for call in (
            lambda: waiting.step_begin(1), lambda: waiting.step_end(1), waiting.step_abort, lambda: waiting.lookup([]),
            lambda: waiting.push_grad([]), lambda: waiting.prefetch(2, []), lambda: waiting.set_stream(0),
            lambda: engine.read([], trainer=waiting),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="one thread at a time"):
                call()
        other.step_end(0)
        thread.join()
        waiting.step_end(1)


def test_closing_wakes_a_thread_that_waits() -> None:
    engine, waiting, _ = waiting_rank()
    ended: List[BaseException] = []

    def wait() -> None:
        try:
            waiting.step_begin(1)
        except frugal.Error as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    engine.close()
    thread.join()
    # CLOSED if the thread was inside a slice, BAD_HANDLE if between two.
    assert len(ended) == 1 and isinstance(ended[0], (frugal.Closed, frugal.BadHandle))


def test_ranks_as_threads_reach_what_one_thread_reaches() -> None:
    def result(threads: bool) -> Any:
        with frugal.Engine(world_size=3, seed=5) as engine:
            table = engine.create_table("t", rows=64, dim=4, init=frugal.Normal(0, 1), optimizer=frugal.Adagrad())
            trainers = [engine.create_trainer(n) for n in range(3)]

            def keys(rank: int, step: int) -> Any:
                return np.random.default_rng([rank, step]).integers(0, 64, 100)

            def part(trainer: frugal.Trainer, step: int) -> None:
                batch = trainer.prefetch(step, table, keys(trainer.rank, step))
                trainer.step_begin(step)
                rows = trainer.lookup(batch)
                trainer.push_grad(batch, rows * np.float32(0.5) + np.float32(0.25))
                trainer.step_end(step)

            def whole(trainer: frugal.Trainer) -> None:
                for step in range(40):
                    part(trainer, step)

            if threads:
                workers = [threading.Thread(target=whole, args=(t,)) for t in trainers]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            else:
                for step in range(40):
                    for trainer in trainers:
                        part(trainer, step)
            return table.get(np.arange(64), with_state=True).tobytes()

    assert result(True) == result(False)


# --- The log callback ---


def test_log_callback(run_python: Run) -> None:
    """An exception of a callback only reaches sys.unraisablehook."""
    program = """
import ctypes, gc, sys
import frugal
from frugal import _abi, _engine

calls = []
def log(level, text):
    calls.append((level, text))
    raise [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)][len(calls) % 3]
hooked = []
sys.unraisablehook = lambda args: hooked.append(args.exc_type.__name__)
engine = frugal.Engine(log=log)
gc.collect()
# As the library calls it: by the pointer that it was given, from C.
callback = engine._finalizer.peek()[2][2]
address = ctypes.cast(callback, ctypes.c_void_p).value
from_c = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)(address)
for level, text in ((0, b"one"), (1, b"tw\\xffo"), (2, "drei ü".encode())):
    from_c(None, level, text)
print(ascii(calls), hooked)
"""
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr
    texts = ascii([(0, "one"), (1, "tw\ufffdo"), (2, "drei ü")])
    assert ended.stdout == f"{texts} ['KeyboardInterrupt', 'SystemExit', 'ValueError']\n"
