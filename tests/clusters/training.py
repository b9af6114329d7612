"""The run that the tests of clusters train: its settings, and its losses, alone and as a cluster's log has them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import run

CPU = ("--distributed.device", "cpu")
STEPS = 80  # Some seconds, so that a signal arrives in between.
TRAIN = ["train", *CPU, *f"--train.max_steps {STEPS} --train.log_every 1 --checkpoint.every_steps 5".split()]
SHORT = [*TRAIN, "--train.max_steps", "12"]


def losses(folder: Path) -> list[float]:
    """Return the losses that a run has logged, of steps 1, 2, ..."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    records = [record for record in records if record["event"] == "train"]
    assert [record["step"] for record in records] == [*range(1, len(records) + 1)]
    return [record["loss"] for record in records]


def check_first_losses(project: Path, folder: Path, scratch: Path) -> None:
    """Check that a run began with the losses of one process."""
    words = (sys.executable, "-m", "my_experiment", *SHORT, "--run.dir", scratch)
    run(*words, cwd=project, PYTHONPATH="src")
    assert losses(folder)[:12] == pytest.approx(losses(scratch), rel=1e-5) and len(losses(scratch)) == 12
