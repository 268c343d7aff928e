"""The programs of the documents run as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import torch

import frugal
import frugal.torch

DOCS = Path(__file__).resolve().parents[2] / "docs" / "torch.md"


def test_the_guide_s_program_runs() -> None:
    programs = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    program, _ = programs  # the other one, which resumes, is run by test_torch_checkpoints.py
    names: Dict[str, Any] = {}
    exec(program, names)
    assert names["bags"].frozen is False


def test_the_package_s_program_runs() -> None:
    assert frugal.torch.__doc__ is not None
    program = frugal.torch.__doc__.split("\n\n", 1)[1]
    loader = [(torch.arange(4), torch.tensor([0, 2]), torch.ones(2, 16)) for _ in range(3)]
    exec(program, {"frugal": frugal, "torch": torch, "loader": loader})
