"""Ranks that mpirun starts, of Open MPI and of MPICH, train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Bake, run
from training import SHORT, check_first_losses

pytestmark = pytest.mark.long


@pytest.mark.parametrize("launcher", ["mpirun.openmpi --allow-run-as-root --oversubscribe", "mpirun.mpich"])
def test_ranks_under_mpirun_have_the_losses_of_one_process(baked: Bake, tmp_path: Path, launcher: str) -> None:
    project = baked(cluster="slurm")
    words = (*launcher.split(), "-np", "2", "scripts/rank.sh", *SHORT, "--run.dir", tmp_path / "run")
    assert "on 2 rank(s)" in run(*words, cwd=project).stdout
    check_first_losses(project, tmp_path / "run", tmp_path / "alone")
