"""Checkpoints: an engine goes on where another one was, with the blobs of its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest

import frugal


class Job:
    """One table and one rank, which says in its blob after which step it is."""

    def __init__(self, engine: frugal.Engine) -> None:
        self.table = engine.create_table("t", 10, 3, optimizer=frugal.Adagrad(lr=0.5))
        self.trainer = engine.create_trainer()

    def step(self, number: int) -> bool:
        with self.trainer.step(number):
            keys = numpy.array([number % 10])
            self.trainer.push_grad(self.table, keys, numpy.full((1, 3), -1.5, numpy.float32))
            due = self.trainer.checkpoint_due()
            if due:
                self.trainer.checkpoint_blob(f"after {number}".encode())
        return due

    def rows(self) -> Any:
        return self.table.get(numpy.arange(10), with_state=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_goes_on(folder: Path) -> None:
    with frugal.Engine(timeout=30, service="") as whole, frugal.Engine(timeout=30, service="") as first:
        first.open_folder(folder, keep=1, every_steps=4)
        reference, job = Job(whole), Job(first)
        for number in range(7):
            reference.step(number)
            assert job.step(number) == (number == 3)
            if number == 3:
                frugal.Checkpoint(first, 0).wait()
        (found,) = frugal.checkpoints(folder)
        assert (found.number, found.step, found.name, found.blobs, found.tables) == (1, 3, "", 1, 1)
        assert found.bytes > 0 and found.created > 1_600_000_000
        assert frugal.read_blob(folder) == b"after 3"
        with frugal.Engine(timeout=30, service="", flush_threads=0, lookahead=2) as again:
            assert again.restore(folder) == found
            job = Job(again)
            for number in range(4, 7):
                job.step(number)
            assert numpy.array_equal(job.rows(), reference.rows())


def test_tickets(folder: Path, tmp_path: Path) -> None:
    with frugal.Engine(timeout=30, service="") as engine:
        with pytest.raises(frugal.NotFound):
            engine.checkpoint()
        engine.open_folder(os.fsencode(folder), every_seconds=1e6)
        Job(engine).step(0)
        named = engine.checkpoint("first", blob=b"weights")
        assert named.wait().name == "first" and named.done()
        later = engine.checkpoint(step=5)
        assert not later.done()
        with pytest.raises(frugal.Timeout):
            later.wait(0.01)
        with pytest.raises(frugal.Busy):
            engine.checkpoint()
        later.cancel()
        with pytest.raises(frugal.Closed):
            later.wait()
        with pytest.raises(frugal.NotFound):
            later.cancel()
        assert frugal.read_blob(folder, number=named.number) == b"weights"
        with pytest.raises(frugal.NotFound):
            frugal.read_blob(folder, 1)
        frugal.copy_checkpoint(folder, tmp_path / "copy")
        with pytest.raises(frugal.Exists):
            frugal.copy_checkpoint(folder, tmp_path / "copy")
        engine.delete_checkpoint(named.number)
        assert frugal.checkpoints(folder) == []
        assert [c.name for c in frugal.checkpoints(tmp_path / "copy")] == ["first"]
        engine.close_folder()
        with pytest.raises(frugal.NotFound):
            named.wait()
        assert "number 1" in repr(named)
        assert engine.stats()["checkpoints"] == 1
    with frugal.Engine(service="") as other:
        with pytest.raises(frugal.NotFound):
            other.restore(tmp_path / "copy", tables=["u"])
        assert other.restore(tmp_path / "copy", name="first", tables=["t"]).step == 0
        assert list(other.tables()) == ["t"]


def test_bad_arguments(folder: Path) -> None:
    with frugal.Engine(service="") as engine:
        for wrong in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="every_seconds"):
                engine.open_folder(folder, every_seconds=wrong)
        with pytest.raises(frugal.InvalidArgument, match="keep"):
            engine.open_folder(folder, keep=0)
        with pytest.raises(TypeError, match="path"):
            engine.open_folder(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="tables"):
            engine.restore(folder, tables="t")
        with pytest.raises(frugal.NotFound):
            frugal.checkpoints(folder)
