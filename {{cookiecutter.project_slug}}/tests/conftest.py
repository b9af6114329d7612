"""Runs that several tests look at."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support import RANKS, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that trains, once per number of ranks and settings, and returns the run.dir."""
    run_dirs: dict[tuple[object, ...], Path] = {}

    def train_once(nproc: int = RANKS, *words: str) -> Path:
        if (nproc, *words) not in run_dirs:
            run_dirs[nproc, *words] = tmp_path_factory.mktemp("run")
            train(run_dirs[nproc, *words], *words, nproc=nproc)
        return run_dirs[nproc, *words]

    return train_once
