"""What the tests share: an engine, a spy between the package and the library, programs in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

import frugal
from frugal import _abi, _engine, _lib, _table, _trainer
from spying import Spy

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def engine() -> Iterator[frugal.Engine]:
    with frugal.Engine(timeout=30) as engine:
        yield engine


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
    """Puts the spy before the library that is loaded: handles of either are those of both."""
    spy = Spy(spy_library, _lib.lib._name)
    for name in _abi.FUNCTIONS:
        seen = getattr(spy.library, name)
        real = getattr(_lib.lib, name)
        monkeypatch.setattr(_lib.lib, name, seen)
        for module in (_engine, _table, _trainer):
            for variable, value in list(vars(module).items()):
                if value is real:
                    monkeypatch.setattr(module, variable, seen)
    return spy


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a program in a Python of its own and returns how it ended."""

    def run(program: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        file = tmp_path / "program.py"
        file.write_text(program)
        command: List[str] = [sys.executable, "-X", "faulthandler", str(file), *arguments]
        options.setdefault("timeout", 60)
        return subprocess.run(command, capture_output=True, text=True, **options)

    return run
