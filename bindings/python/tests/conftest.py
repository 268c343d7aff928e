"""Fixtures of the tests: an engine, a spy between the package and the library, programs in other processes, a
controller.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

import frugal
from frugal import _abi, _engine, _lib, _table, _trainer, _wait
from spying import Spy

REPOSITORY = Path(__file__).resolve().parents[3]

# A shell that starts the tests in the background makes them ignore SIGINT. Programs that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def engine() -> Iterator[frugal.Engine]:
    with frugal.Engine(timeout=30) as engine:
        yield engine


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wait counts as long after its first slice, and its warning is raised as an exception."""
    monkeypatch.setattr(_wait, "SLICE_MS", 1)
    monkeypatch.setattr(_wait, "WORD_MS", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="session")
def compiler() -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.fail("no C compiler: set CC")
    return found


@pytest.fixture(scope="session")
def spy_library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spy") / "libspy.so"
    source = REPOSITORY / "bindings" / "spy" / "spy.c"
    include = REPOSITORY / "include"
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(path), "-ldl"], check=True)
    return path


@pytest.fixture
def spy(spy_library: Path, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Puts the spy in front of the loaded library. Both take the same handles."""
    spy = Spy(spy_library, _lib.lib._name)
    for name in _abi.FUNCTIONS:
        seen = getattr(spy.abi, name)
        real = getattr(_lib.lib, name)
        monkeypatch.setattr(_lib.lib, name, seen)
        for module in (_engine, _table, _trainer):
            for variable, value in list(vars(module).items()):
                if value is real:
                    monkeypatch.setattr(module, variable, seen)
    return spy


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a program in another Python process and returns how it ended."""

    def run(program: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        file = tmp_path / "program.py"
        file.write_text(program)
        command: List[str] = [sys.executable, "-X", "faulthandler", str(file), *arguments]
        options.setdefault("timeout", 60)
        return subprocess.run(command, capture_output=True, text=True, **options)

    return run


@pytest.fixture(scope="session")
def controller_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of frugal-controller: FRUGAL_CONTROLLER, or the program that was built with the library."""
    try:
        frugal.Engine(service=tmp_path_factory.mktemp("none") / "socket", timeout=0.1)
    except frugal.Unsupported:
        pytest.skip("the library was built without trainers as processes")
    except frugal.PeerLost:
        pass
    beside = Path(_lib.lib._name).resolve().parent / "tools" / "controller" / "frugal-controller"
    found = os.environ.get("FRUGAL_CONTROLLER") or (str(beside) if beside.exists() else shutil.which(beside.name))
    if found is None:
        pytest.fail("no frugal-controller: set FRUGAL_CONTROLLER")
    return Path(found)


class Controller:
    """A running controller."""

    def __init__(self, program: Path, address: Path) -> None:
        self.address = str(address)
        self.process = subprocess.Popen([str(program), self.address], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"frugal-controller: serving {self.address}\n"

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


@pytest.fixture
def controller(controller_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    controller = Controller(controller_program, tmp_path_factory.mktemp("c") / "tables")
    yield controller
    if controller.process.poll() is None:
        controller.end()
        assert controller.process.returncode == 0


class Peer:
    """A program in another Python process. It prints a line when it has reached the expected state."""

    def __init__(self, program: str, *arguments: str) -> None:
        command = [sys.executable, "-X", "faulthandler", "-c", program, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hears(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    peers: List[Peer] = []

    def start(program: str, *arguments: str) -> Peer:
        peers.append(Peer(program, *arguments))
        return peers[-1]

    yield start
    for started in peers:
        started.kill()
        started.process.communicate()
