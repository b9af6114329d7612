"""Runs that several tests look at."""

from pathlib import Path
from typing import Any

import pytest

from support import RANKS, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that trains, once per number of ranks and settings, and returns the run.dir."""
    run_dirs: dict[tuple[object, ...], Path] = {}

    def train_once(nproc: int = RANKS, *words: str) -> Path:
        if (nproc, *words) not in run_dirs:
            run_dirs[nproc, *words] = tmp_path_factory.mktemp("run")
            train(run_dirs[nproc, *words], *words, nproc=nproc)
        return run_dirs[nproc, *words]

    return train_once
