"""Runs that several tests look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import launch

STEPS = 20


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train 20 steps on a number of ranks, once for each choice of settings; gives the run directory."""
    runs: dict[tuple[object, ...], Path] = {}

    def train(nproc: int, *settings: str) -> Path:
        key = (nproc, *settings)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("run")
            length = ("--train.max_steps", str(STEPS), "--train.log_every", "1")
            launch("train", *length, *settings, "--run.dir", str(runs[key]), nproc=nproc)
        return runs[key]

    return train
