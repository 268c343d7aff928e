"""examples/dlrm.py: a planted model is recovered, as well as by PyTorch alone; files are read as they are."""

from __future__ import annotations

import gzip
import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "dlrm.py"


@pytest.fixture(scope="module")
def dlrm() -> Any:
    spec = importlib.util.spec_from_file_location("dlrm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dlrm"] = module
    spec.loader.exec_module(module)
    return module


def test_measures(dlrm: Any) -> None:
    score = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4])
    label = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    # Of 3 x 2 pairs: 0.35 is above one and below one, 0.8 above both, 0.4 above one and equal to one.
    assert dlrm.auc(score, label) == pytest.approx((1 + 2 + 1.5) / 6)
    assert dlrm.logloss(torch.zeros(5), label) == pytest.approx(0.6931471805599453)


def test_the_planted_model_is_recovered(dlrm: Any, capsys: Any) -> None:
    results = dlrm.main(["--side", "both", "--rows", "20", "--samples", "200000", "--batch", "500", "--workers", "2"])
    auc, logloss = results["frugal"]
    best_auc, best_logloss = results["optimum"]
    assert best_auc > 0.8
    assert best_auc - 0.02 < auc < best_auc + 0.001
    assert best_logloss - 0.001 < logloss < best_logloss + 0.03
    assert results["torch"] == pytest.approx(results["frugal"], abs=0.005)
    said = capsys.readouterr()
    assert "known optimum" in said.out and "[####" in said.err


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("workers", [0, 2])
def test_criteo_s_format(dlrm: Any, tmp_path: Path, suffix: str, workers: int) -> None:
    generator = random.Random(3)
    lines: List[str] = []
    for _ in range(3000):
        category = generator.randrange(8)
        label = int(generator.random() < (0.9 if category < 4 else 0.1))
        counts = ["" if generator.random() < 0.2 else str(generator.randrange(-1, 50)) for _ in range(13)]
        others = ["" if generator.random() < 0.1 else f"{generator.randrange(2**32):08x}" for _ in range(25)]
        lines.append("\t".join([str(label), *counts, f"{category:08x}", *others]) + "\n")
    path = tmp_path / f"train.{suffix}"
    if suffix == "txt":
        path.write_text("".join(lines))
    else:
        with gzip.open(path, "wt") as file:
            file.writelines(lines)
    training = dlrm.Criteo(str(path), 100, 50, test=False, most=None)
    batches = list(training)
    assert sum(batch.label.numel() for batch in batches) == 2700
    first = lines[0].rstrip("\n").split("\t")
    assert batches[0].label[0] == float(first[0])
    assert batches[0].dense[0, 0] == pytest.approx(torch.tensor(max(float(first[1] or 0), 0.0)).log1p().item())
    assert batches[0].ids[3, 0] == int(first[17] or "0", 16) % 50 + 3 * 50
    arguments = ["--data", str(path), "--rows", "50", "--batch", "100", "--epochs", "4", "--workers", str(workers)]
    results = dlrm.main(arguments)
    assert "optimum" not in results
    assert results["frugal"][0] > 0.8
    path = tmp_path / "short.txt"
    path.write_text("1\t2\n")
    with pytest.raises(ValueError, match="line 1: 2 fields, expected 40"):
        list(dlrm.Criteo(str(path), 100, 50, test=False, most=None))


def test_what_cannot_be_is_said(dlrm: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--samples 100 is less than --batch 2048"):
        dlrm.main(["--samples", "100"])
    missing = str(tmp_path / "missing.txt")
    run = subprocess.run([sys.executable, str(EXAMPLE), "--data", missing], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("dlrm.py: ") and missing in run.stderr and "Traceback" not in run.stderr
    path = tmp_path / "clicks.txt"
    path.write_text("".join(["1" + "\t" * 39 + "\n"] * 20))
    with pytest.raises(ValueError, match="all 2 samples to test on have the label 1"):
        dlrm.main(["--data", str(path), "--rows", "5"])
    path.write_text("")
    with pytest.raises(ValueError, match="no samples to train on"):
        dlrm.main(["--data", str(path), "--rows", "5"])
