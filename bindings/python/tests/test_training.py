"""Training by the public interface: effects and results of each call."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import pickle
import threading
from typing import Any, List

import numpy as np
import pytest

import frugal
from frugal import _abi, _table, errors
from frugal._lib import lib
from frugal.errors import check

KEYS = np.array([7, 42, 7])


def train(trainer: frugal.Trainer, table: frugal.Table, keys: Any, grads: Any, step: int = 0) -> Any:
    batch = trainer.prefetch(step, table, keys)
    with trainer.step(step):
        rows = trainer.lookup(batch)
        trainer.push_grad(batch, grads)
    return rows


def test_sgd_by_hand(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=100, dim=3, init=frugal.Constant(1.0), optimizer=frugal.SGD(lr=0.5))
    trainer = engine.create_trainer()
    grads = np.array([[1, 2, 3], [4, 5, 6], [1, 1, 1]], np.float32)
    assert (train(trainer, table, KEYS, grads) == 1).all()
    rows = table.get(np.array([7, 42, 8]))
    assert rows.tolist() == [[0, -0.5, -1], [-1, -1.5, -2], [1, 1, 1]]
    assert engine.committed_step() == 0
    assert engine.stats()["keys_pushed"] == 3
    assert engine.health() == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        frugal.SGD(lr=0.25, weight_decay=0.1),
        frugal.Momentum(lr=0.25, momentum=0.5, dampening=0.25, nesterov=True),
        frugal.Adagrad(lr=0.25, eps=1e-3, initial_accumulator=0.5),
        frugal.RowWiseAdagrad(lr=0.25, clip_norm=1.0),
        frugal.Adam(lr=0.25, beta1=0.5, beta2=0.75),
        frugal.RMSProp(lr=0.25, rho=0.5, clip_value=0.5),
        frugal.FTRL(lr=0.25, ftrl_lambda1=0.1, ftrl_lambda2=0.2, ftrl_beta=2.0),
    ],
    ids=lambda o: type(o).__name__,
)
def test_every_optimizer_trains_and_its_state_travels(engine: frugal.Engine, optimizer: frugal.Optimizer) -> None:
    init = frugal.Uniform(-1, 1)
    table = engine.create_table("t", rows=10, dim=4, init=init, optimizer=optimizer)
    trainer = engine.create_trainer()
    keys = np.arange(10)
    before = table.get(keys, with_state=True)
    for step in range(3):
        train(trainer, table, keys[:5], np.full((5, 4), 0.75, np.float32), step)
    after = table.get(keys, with_state=True)
    assert after.shape == (10, 4 + table.describe().state_floats)
    assert (after[:5, :4] != before[:5, :4]).all() and (after[5:] == before[5:]).all()
    other = engine.create_table("other", rows=10, dim=4, optimizer=optimizer)
    other.put(keys, after, with_state=True)
    assert (other.get(keys, with_state=True) == after).all()
    with pytest.raises(frugal.InvalidArgument):
        table.set_optimizer(10, frugal.SGD() if table.describe().optimizer else frugal.Adam())
    with pytest.raises(frugal.InvalidArgument):
        table.set_optimizer(10, dataclasses.replace(optimizer, lr=math.nan))


def test_committed_rows_are_read_in_a_step(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=2, optimizer=frugal.Adagrad(lr=0.5))
    trainer, keys = engine.create_trainer(), np.array([3])
    for step in range(2):
        with trainer.step(step):
            trainer.push_grad(table, keys, np.full((1, 2), 2.0, np.float32))
            with pytest.raises(frugal.Busy):
                table.get(keys, with_state=True)
            row = table.get(keys, with_state=True, committed=True)
            assert row[0, 2:].tolist() == [4.0 * step] * 2
            assert (table.get(keys, committed=True) == row[:, :2]).all()


def test_the_kind_may_come_until_the_first_update(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=4, init=frugal.Uniform(1, 2))
    keys, values = np.arange(10), table.get(np.arange(10))
    table.set_optimizer(0, frugal.Adagrad(initial_accumulator=0.5))
    assert table.describe().state_floats == 4
    assert (table.get(keys, with_state=True) == np.hstack([values, np.full((10, 4), 0.5)])).all()
    trainer = engine.create_trainer()
    train(trainer, table, keys[:5], np.ones((5, 4), np.float32), 0)
    with pytest.raises(frugal.InvalidArgument, match="first update"):
        table.set_optimizer(1, frugal.SGD())


def test_flags_and_hyper_parameters_reach_their_fields() -> None:
    struct = frugal.Momentum(lr=0.5, momentum=0.25, nesterov=True, mean_ranks=True)._struct()
    assert (struct.lr, struct.momentum, struct.flags) == (0.5, 0.25, 3)
    assert (frugal.Adam()._struct().flags, frugal.Adam(bias_correction=False)._struct().flags) == (0, 4)
    with pytest.raises(TypeError, match="SGD"):
        frugal.Optimizer()._struct()


@pytest.mark.parametrize(
    "init, check",
    [
        (frugal.Constant(2.5), lambda r: (r == 2.5).all()),
        (frugal.Uniform(1, 2), lambda r: (1 <= r).all() and (r < 2).all() and r.std() > 0.2),
        (frugal.Normal(3, 0.5), lambda r: abs(r.mean() - 3) < 0.1 and abs(r.std() - 0.5) < 0.1),
        (frugal.TruncatedNormal(3, 0.5), lambda r: r.min() >= 2 and r.max() <= 4 and r.std() > 0.3),
        (frugal.Xavier(1.0, fan_in=20), lambda r: np.abs(r).max() <= math.sqrt(6 / 24) and r.std() > 0.2),
    ],
    ids=lambda i: type(i).__name__,
)
def test_initial_values(engine: frugal.Engine, init: frugal.Initializer, check: Any) -> None:
    assert check(engine.create_table("t", rows=500, dim=4, init=init).get(np.arange(500)))


def test_a_step_changes_the_learning_rate(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=1, optimizer=frugal.SGD(lr=1.0))
    table.set_optimizer(1, frugal.SGD(lr=0.5))
    trainer = engine.create_trainer()
    for step in range(3):
        train(trainer, table, KEYS[:1], np.ones((1, 1), np.float32), step)
    assert table.get(KEYS[:1]).tolist() == [[-2.0]]
    with pytest.raises(frugal.StepRange):
        table.set_optimizer(0, frugal.SGD(lr=0.5))


def test_bags_weights_and_their_gradients(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=2, optimizer=frugal.SGD(lr=1.0))
    table.put(np.arange(10), np.arange(20, dtype=np.float32).reshape(10, 2))
    trainer = engine.create_trainer()
    keys = np.array([1, 2, 3, 0, 5])
    offsets = np.array([0, 2, 2, 5])
    weights = np.array([1, 2, 3, 4, 5], np.float32)
    batch = trainer.prefetch(0, frugal.Op(table, keys, padding_key=0))
    trainer.step_begin(0)
    op = frugal.Op(
        table, batch=batch, pooling="sum", offsets=offsets, weights=weights, padding_key=0,
        grads=np.array([[1, 1], [9, 9], [1, 2]], np.float32), weight_grads=np.zeros(5, np.float32),
    )  # fmt: skip
    rows = trainer.lookup(op)
    assert rows.tolist() == [[1 * 2 + 2 * 4, 1 * 3 + 2 * 5], [0, 0], [3 * 6 + 5 * 10, 3 * 7 + 5 * 11]]
    (again,) = trainer.lookup([op])
    assert (again == rows).all() and again is not rows
    mean = trainer.lookup(frugal.Op(table, keys, pooling="mean", offsets=offsets, padding_key=0))
    assert mean.tolist() == [[3, 4], [0, 0], [8, 9]]
    trainer.push_grad(op)
    assert np.asarray(op.weight_grads).tolist() == [5, 9, 6 + 14, 0, 10 + 22]
    trainer.step_end(0)
    assert table.get(keys).tolist() == [[1, 2], [2, 3], [3, 1], [0, 1], [5, 1]]


def test_many_tables_in_one_call(engine: frugal.Engine) -> None:
    tables = [engine.create_table(f"t{n}", rows=10, dim=n + 1, init=frugal.Constant(n)) for n in range(5)]
    trainer = engine.create_trainer()
    batch = trainer.prefetch(0, [frugal.Op(t, KEYS[: n + 1] % 10) for n, t in enumerate(tables[:3])])
    assert len(batch) == 1 + 2 + 3 and batch.counts == (1, 2, 3) and batch.step == 0
    trainer.step_begin(0)
    outputs = trainer.lookup([frugal.Op(t, batch=batch, part=n) for n, t in enumerate(tables[:3])])
    assert [o.shape for o in outputs] == [(1, 1), (2, 2), (3, 3)] and [o[0, 0] for o in outputs] == [0, 1, 2]
    assert trainer.lookup([]) == []
    with pytest.raises(ValueError, match="3 parts"):
        trainer.lookup(batch)
    with pytest.raises(ValueError, match="part is 3"):
        trainer.lookup(frugal.Op(tables[0], batch=batch, part=3))
    empty = trainer.prefetch(1, tables[0], KEYS[:0])
    assert len(empty) == 0 and empty
    trainer.prefetch_cancel(empty)
    undeclared = trainer.lookup(tables[4], KEYS % 10)
    assert undeclared.shape == (3, 5) and (undeclared == 4).all()
    trainer.push_grad(tables[4], KEYS % 10, np.ones((3, 5), np.float32))
    trainer.step_end(0)
    assert engine.stats()["keys_undeclared"] == 6


def test_hashed_tables_create_rows_and_tell_what_is_missing(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=4, dim=2, hashed=True, init=frugal.Constant(3))
    trainer = engine.create_trainer()
    keys = np.array([2**64 - 1, 5], np.uint64)
    train(trainer, table, keys, np.zeros((2, 2), np.float32))
    assert table.count() == len(table) == 2 and sorted(table.keys().tolist()) == [5, 2**64 - 1]
    found = np.full(3, 9, np.uint8)
    asked = np.array([5, 6, -1])  # the bits of -1 are the key 2**64 - 1
    assert table.get(asked, found=found).tolist() == [[3, 3], [0, 0], [3, 3]] and found.tolist() == [1, 0, 1]
    truth = np.zeros(3, bool)
    assert engine.read(table, asked, found=truth).tolist() == [[3, 3], [0, 0], [3, 3]]
    assert truth.tolist() == [True, False, True]
    assert table.delete(asked[:2]) == 1 and table.count() == 1
    assert [k.tolist() for k in table.key_chunks(1)] == [[2**64 - 1]] == [k.tolist() for k in table.key_chunks()]
    with pytest.raises(frugal.TableFull):
        table.put(np.arange(10), np.zeros((10, 2), np.float32))


def test_read_inside_and_outside_of_a_step(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=1, optimizer=frugal.SGD(lr=1.0))
    trainer = engine.create_trainer()
    train(trainer, table, KEYS[:1], np.ones((1, 1), np.float32))
    assert engine.read(table, KEYS[:1]).tolist() == [[-1]]
    assert engine.read(table, KEYS[:1], trainer=trainer).tolist() == [[-1]]
    rows = np.zeros((1, 1), np.float32)
    with trainer.step(1):
        assert engine.read(table, KEYS[:1], rows, trainer=trainer) is rows and rows[0, 0] == -1
        pair = engine.read([frugal.Op(table, KEYS[:1]), frugal.Op(table, np.array([1]))], trainer=trainer, timeout=5)
        assert [p.tolist() for p in pair] == [[[-1]], [[0]]]
        with pytest.raises(frugal.Busy):
            table.get(KEYS[:1])


def test_two_ranks_sum_and_one_can_abort() -> None:
    with frugal.Engine(world_size=2) as engine:
        table = engine.create_table("t", rows=50, dim=1, optimizer=frugal.SGD(lr=1.0))
        ranks = [engine.create_trainer(n) for n in range(2)]
        assert [t.rank for t in ranks] == [0, 1] and engine.world_size == 2
        for trainer in ranks:
            trainer.step_begin(5)
            trainer.push_grad(table, KEYS, np.ones((3, 1), np.float32))
        for trainer in ranks:
            trainer.step_end(5)
        assert table.get(KEYS[:2]).tolist() == [[-4], [-2]]
        ranks[1].step_begin(6)
        with pytest.raises(KeyError, match="mine"):
            with ranks[0].step(6):
                raise KeyError("mine")
        with pytest.raises(frugal.StepAborted) as raised:
            ranks[1].step_end(6)
        assert raised.value.status_name == "FRUGAL_ERR_STEP_ABORTED" and engine.committed_step() == 5


def test_an_exception_in_a_step_aborts_it(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=1, optimizer=frugal.SGD(lr=1.0))
    trainer = engine.create_trainer()
    with pytest.raises(ZeroDivisionError):
        with trainer.step(0):
            trainer.push_grad(table, KEYS, np.ones((3, 1), np.float32))
            1 / 0
    assert table.get(KEYS).tolist() == [[0]] * 3 and engine.committed_step() is None
    with trainer.step(0):
        pass
    assert engine.committed_step() == 0


def test_a_skipped_step_and_a_cancelled_declaration(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=1)
    trainer = engine.create_trainer(cache_ratio=0.5)
    batch = trainer.prefetch(1, table, KEYS)
    trainer.step_begin(0)
    trainer.push_grad(table, KEYS, np.ones((3, 1), np.float32))
    trainer.step_end(0, skip=True)
    assert (table.get(KEYS) == 0).all()
    trainer.prefetch_cancel(batch)
    with pytest.raises(frugal.BadHandle):
        trainer.prefetch_cancel(batch)


def test_keys_come_in_chunks(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=1000, dim=1, hashed=True)
    assert list(table.key_chunks()) == []
    keys = np.arange(1000, dtype=np.uint64) * np.uint64(2**53 + 1)
    table.put(keys, np.zeros((1000, 1), np.float32))
    for most in (1, 7, 999, 1000, 5000):
        chunks = list(table.key_chunks(most))
        assert max(map(len, chunks)) <= most and all(c.base is None or len(c.base) == most for c in chunks)
        assert np.concatenate(chunks).tolist() == table.keys().tolist()
    # Rows change between two chunks; the keys of rows that exist throughout come all the same.
    seen = []
    for chunk in table.key_chunks(100):
        seen += chunk.tolist()
        table.put(chunk, np.ones((len(chunk), 1), np.float32))
    assert sorted(seen) == sorted(keys.tolist()) and (table.get(keys) == 1).all()
    for most in (0, -1):
        with pytest.raises(ValueError, match="most"):
            table.key_chunks(most)
    with pytest.raises(TypeError):
        table.key_chunks(1.5)  # type: ignore[arg-type]


def test_names_and_memory(engine: frugal.Engine) -> None:
    assert engine.tables() == {}
    table = engine.create_table("tâble", rows=50, dim=8, lazy=True)
    assert engine.find_table("tâble").dim == 8
    name = "ü" * 127
    handle = engine.create_table(name, rows=1, dim=1).handle
    assert [(n, t.name, t.dim) for n, t in engine.tables().items()] == [("tâble", "tâble", 8), (name, name, 1)]
    assert engine.tables()[name].handle == handle
    config = _table.table_config(1, 3, False, False, frugal.Constant(), frugal.SGD(), "reject")
    config.name = b"\xff"  # another language may use such a name
    made = ctypes.c_void_p()
    check(lib.frugal_table_create(engine.handle, ctypes.addressof(config), ctypes.byref(made)))
    *_, (name, other) = engine.tables().items()
    assert other.handle == made.value and engine.find_table(name).dim == 3 and other.get(np.array([0])).shape == (1, 3)
    other.drop()
    assert len(engine.tables()) == 2
    with pytest.raises(frugal.Exists):
        engine.create_table("tâble", rows=50, dim=8)
    with pytest.raises(frugal.NotFound) as raised:
        engine.find_table("other")
    assert isinstance(raised.value, LookupError)
    with pytest.raises(ValueError, match="NUL"):
        engine.create_table("a\0b", rows=50, dim=8)
    memory = frugal.memory_needed(1000, 8, optimizer=frugal.Adam(), flush_mode="at_once")
    assert memory.values >= 1000 * 32 and memory.state >= 1000 * 64 and memory.window == 0
    assert memory.total == memory.values + memory.state + memory.index + memory.window + memory.cache
    table.drop()
    with pytest.raises(frugal.BadHandle):
        table.count()


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": -1}, {"world_size": 2**32}, {"lookahead": 2**40}, {"seed": -1}, {"seed": 2**64},
        {"flush_mode": "sometimes"}, {"backing": 1}, {"timeout": -1}, {"timeout": math.nan}, {"host_bytes": -5},
        {"world_size": 0}, {"lookahead": 41}, {"flush_threads": 257},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range(arguments: Any) -> None:
    with pytest.raises(ValueError):
        frugal.Engine(**arguments)


def test_numbers_out_of_range(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=1)
    trainer = engine.create_trainer()
    for step in (-1, 2**64):
        with pytest.raises(ValueError, match="step"):
            trainer.step_begin(step)
        with pytest.raises(ValueError, match="step"):
            trainer.prefetch(step, table, KEYS)
    for bad in (1.0, "1", None):
        with pytest.raises(TypeError):
            trainer.step_begin(bad)  # type: ignore[arg-type]
    trainer.step_begin(np.int64(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="padding_key"):
        trainer.lookup(frugal.Op(table, KEYS, padding_key=2**64))
    with pytest.raises(ValueError, match="pooling"):
        trainer.lookup(frugal.Op(table, KEYS, pooling="max"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offsets"):
        trainer.lookup(frugal.Op(table, KEYS, offsets=np.array([0, 3])))
    with pytest.raises(ValueError, match="offsets"):
        trainer.lookup(frugal.Op(table, KEYS, pooling="sum"))
    with pytest.raises(ValueError, match="offsets"):
        trainer.lookup(frugal.Op(table, KEYS, pooling="sum", offsets=np.array([], np.int64)))
    with pytest.raises(frugal.InvalidArgument, match="offset"):
        trainer.lookup(frugal.Op(table, KEYS % 10, pooling="sum", offsets=np.array([0, 2])))
    with pytest.raises(ValueError, match="batch"):
        trainer.lookup(frugal.Op(table))
    with pytest.raises(ValueError, match="grads"):
        trainer.push_grad(frugal.Op(table, KEYS))
    with pytest.raises(TypeError, match="int"):
        trainer.lookup(5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="rank"):
        engine.create_trainer(-1)
    with pytest.raises(frugal.InvalidArgument):
        engine.create_trainer(1)
    with pytest.raises(frugal.Exists):
        engine.create_trainer(0)
    with pytest.raises(frugal.Error):
        engine.create_trainer(0, device="tpu:0")


def test_arguments_of_another_type(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=1)
    trainer = engine.create_trainer()
    wrong: Any
    method: Any
    with pytest.raises(TypeError, match="log must be"):
        frugal.Engine(log=3)  # type: ignore[arg-type]
    for wrong in (None, 3, frugal.Constant, frugal.SGD(), frugal.Initializer()):
        with pytest.raises(TypeError, match="init must be an Initializer|Initializer is what"):
            engine.create_table("u", rows=1, dim=1, init=wrong)
    for wrong in (None, "sgd", frugal.SGD, frugal.Constant(0), frugal.Optimizer()):
        for call in (
            lambda: engine.create_table("u", rows=1, dim=1, optimizer=wrong),
            lambda: table.set_optimizer(0, wrong),
            lambda: frugal.memory_needed(1, 1, optimizer=wrong),
        ):
            with pytest.raises(TypeError, match="optimizer must be an Optimizer|Optimizer is what"):
                call()
    for wrong in (None, 3, b"t"):
        with pytest.raises(TypeError, match="name must be a str"):
            engine.find_table(wrong)
        with pytest.raises(TypeError, match="device must be a str"):
            engine.create_trainer(device=wrong)
    for wrong in (3, engine, table):
        with pytest.raises(TypeError, match="trainer must be a frugal.Trainer"):
            engine.read(table, KEYS, trainer=wrong)
    with pytest.raises(TypeError, match="a Batch is needed"):
        trainer.prefetch_cancel(table)  # type: ignore[arg-type]
    for wrong, message in (
        ([table], "an Op is needed in a list"),
        ((None,), "an Op is needed in a list"),
        (frugal.Op(5, KEYS), "table of an Op"),  # type: ignore[arg-type]
        ([frugal.Op(table, KEYS, batch=table)], "batch of an Op"),  # type: ignore[arg-type]
    ):
        for method in (engine.read, trainer.lookup, trainer.push_grad, lambda ops: trainer.prefetch(0, ops)):
            with pytest.raises(TypeError, match=message):
                method(wrong)
    with trainer.step(0):  # the refused calls had no effect
        assert trainer.lookup(table, KEYS).shape == (3, 1)


def test_a_table_is_true_even_if_empty_or_in_a_step(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=1, hashed=True)
    assert len(table) == 0 and bool(table) is True
    with engine.create_trainer().step(0):
        assert bool(table) is True


def test_a_list_of_ops_that_changes_during_the_call(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=1)
    other = engine.create_table("other", rows=50, dim=1)
    trainer = engine.create_trainer()
    ops: List[frugal.Op] = []

    class Growing:
        """The call requests its memory."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **_: Any) -> Any:
            ops.extend([frugal.Op(table, KEYS)] * 100)
            ops[0].table = other
            return self.array.__dlpack__()

    def one(**arrays: Any) -> List[frugal.Op]:
        ops[:] = [frugal.Op(table, Growing(KEYS.copy()), **arrays), frugal.Op(table, KEYS, **arrays)]
        return ops

    batch = trainer.prefetch(0, one())
    assert batch.counts == (3, 3) and batch._tables == (table, table)
    with trainer.step(0):
        assert len(trainer.lookup(one())) == 2
        trainer.push_grad(one(grads=np.ones((3, 1), np.float32)))
    assert len(engine.read(one())) == 2


def test_errors_say_what_was_wrong(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=1)
    trainer = engine.create_trainer()
    with pytest.raises(frugal.KeyOutOfRange) as raised:
        table.get(np.array([3, -1]))
    error = raised.value
    assert isinstance(error, IndexError) and error.status == -5 and error.system_code == error.device_code == 0
    assert error.status_name == "FRUGAL_ERR_KEY_OUT_OF_RANGE" and str(2**64 - 1) in error.message
    assert str(error) == f"{error.status_name}: {error.message}"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and vars(copy) == vars(error)
    with pytest.raises(frugal.NotInStep):
        trainer.lookup(table, KEYS)
    trainer.step_begin(0)
    with pytest.raises(frugal.NanGradient):
        trainer.push_grad(table, KEYS % 10, np.full((3, 1), np.nan, np.float32))
    weights = np.array([1, np.nan, 1], np.float32)
    bag = frugal.Op(table, KEYS % 10, pooling="sum", offsets=np.array([0, 3]), weights=weights)
    bag.grads = np.ones((1, 1), np.float32)
    with pytest.raises(frugal.NanGradient, match="table 't'.* step 0 has a NaN in the weight 1, of the key 2;"):
        trainer.push_grad(bag)
    with pytest.raises(frugal.StepOrder):
        trainer.step_end(1)
    with pytest.raises(frugal.StepRange):
        trainer.prefetch(0, table, KEYS % 10)


def test_each_status_has_its_class() -> None:
    for name, status in _abi.STATUS.items():
        error = errors._CLASSES.get(status, frugal.Error)("why", status, 5, 6)
        assert (error.status_name, str(error), error.system_code, error.device_code) == (name, f"{name}: why", 5, 6)
        with pytest.raises(frugal.Error):
            raise error


def test_each_thread_finds_its_own_message(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=10, dim=1)
    wrong: List[str] = []

    def ask(key: int) -> None:
        for _ in range(300):
            try:
                table.get(np.array([key]))
            except frugal.KeyOutOfRange as error:
                if f"id {key} " not in error.message:
                    wrong.append(error.message)

    threads = [threading.Thread(target=ask, args=(100 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_objects_of_others_are_refused(engine: frugal.Engine) -> None:
    table = engine.create_table("t", rows=50, dim=1)
    trainer = engine.create_trainer()
    batch = trainer.prefetch(0, table, KEYS)
    trainer.step_begin(0)
    rows = np.zeros((3, 1), np.float32)
    with frugal.Engine() as other:
        stranger = other.create_trainer()
        stranger.step_begin(0)
        with pytest.raises(frugal.Error):
            stranger.lookup(batch, rows)
        with pytest.raises(frugal.Error):
            stranger.lookup(table, KEYS)
        with pytest.raises(frugal.Error):
            stranger.prefetch(1, table, KEYS)
        with pytest.raises(frugal.Error):
            stranger.prefetch_cancel(batch)
        with pytest.raises(frugal.Error):
            other.read(table, KEYS)
        with pytest.raises(frugal.Error):
            other.read(other.create_table("t", rows=1, dim=1) and table, KEYS, trainer=trainer)
    for wrong in (None, 5, table):
        with pytest.raises((TypeError, ValueError)):
            trainer.lookup(frugal.Op(wrong, batch=wrong))  # type: ignore[arg-type]
    for part in (-1, 1, 2**40):
        with pytest.raises(ValueError, match="part"):
            trainer.lookup(frugal.Op(table, KEYS, batch=batch, part=part))
    trainer.step_end(0)
    trainer.step_begin(1)
    with pytest.raises(frugal.Error):
        trainer.lookup(batch, rows)  # its step is over
    with pytest.raises(frugal.Error):
        trainer.push_grad(batch, rows)
