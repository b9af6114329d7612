"""The run that the tests of clusters train: its settings, and a comparison with one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import read_losses, run_alone

CPU = ("--distributed.device", "cpu")
STEPS = 80  # Some seconds, so that a signal arrives in between.
TRAIN = ["train", *CPU, *f"--train.max_steps {STEPS} --train.log_every 1 --checkpoint.every_steps 5".split()]
SHORT = [*TRAIN, "--train.max_steps", "12"]


def check_first_losses(project: Path, folder: Path, scratch: Path) -> None:
    """Check that a run began with the losses of one process."""
    run_alone(project, *SHORT, "--run.dir", scratch)
    assert read_losses(folder)[:12] == pytest.approx(read_losses(scratch), rel=1e-5) and len(read_losses(scratch)) == 12
