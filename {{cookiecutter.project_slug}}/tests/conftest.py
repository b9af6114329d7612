"""Runs that several tests look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import LENGTH, launch


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train 20 steps on a number of ranks, once for each choice of settings; gives the run directory."""
    runs: dict[tuple[object, ...], Path] = {}

    def train(nproc: int, *settings: str) -> Path:
        key = (nproc, *settings)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("run")
            launch("train", *LENGTH, *settings, "--run.dir", str(runs[key]), nproc=nproc)
        return runs[key]

    return train
