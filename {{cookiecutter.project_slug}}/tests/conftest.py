"""Runs that several tests look at."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support import RANKS, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train on a number of ranks, once for each choice of settings; returns the run directory."""
    runs: dict[tuple[object, ...], Path] = {}

    def run(nproc: int = RANKS, *words: str) -> Path:
        if (nproc, *words) not in runs:
            runs[nproc, *words] = tmp_path_factory.mktemp("run")
            train(runs[nproc, *words], *words, nproc=nproc)
        return runs[nproc, *words]

    return run
