"""Under a real Slurm with two nodes, a job trains, is stopped, requeued and resumed; srun and mpirun start ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Bake, read_losses, run, wait_until, weekly
from slurm import Slurm, start_slurm
from training import SHORT, STEPS, TRAIN, check_first_losses

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A running Slurm with two nodes."""
    with start_slurm() as running:
        yield running


@pytest.fixture(scope="module")
def project(baked: Bake) -> Path:
    """The rendered project, which also contains the logs and runs."""
    return baked(cluster="slurm")


def submit(slurm: Slurm, project: Path, *words: str) -> str:
    """Submit the shipped script, with one rank per node on the CPU; returns the number of the job."""
    script = ("sbatch", "--parsable", "--gpus-per-node=0", "scripts/train.sbatch")
    return slurm.command(*script, *words, cwd=project, NPROC="1")


def log_of(project: Path, job: str) -> str:
    """Return the output of a job."""
    return (project / f"slurm-my-experiment-{job}.out").read_text()


@pytest.fixture(scope="module")
def whole(slurm: Slurm, project: Path) -> Path:
    """The run of a job that nothing interrupts, on both nodes."""
    job = submit(slurm, project, *TRAIN, "--run.dir", "runs/whole")
    assert slurm.wait(job) == ["COMPLETED", "0", "0:0"], log_of(project, job)
    assert f"step 0 of {STEPS} on 2 rank(s)" in log_of(project, job)
    return project / "runs" / "whole"


def test_two_nodes_have_the_losses_of_one_process(project: Path, whole: Path, tmp_path: Path) -> None:
    check_first_losses(project, whole, tmp_path)


def test_a_signalled_job_saves_is_requeued_and_resumes(slurm: Slurm, project: Path, whole: Path) -> None:
    job, folder = submit(slurm, project, *TRAIN, "--run.dir", "runs/stopped"), project / "runs" / "stopped"
    wait_until(lambda: len(read_losses(folder)) > 5, "the run has started", 240)
    slurm.command("scancel", "--signal=USR1", job)  # As Slurm does before the time limit: to the job's steps.
    ended = slurm.wait(job)
    log = log_of(project, job)
    assert ended == ["COMPLETED", "1", "0:0"], log
    stopped = re.search(r"stopped after step (\d+)", log)
    assert stopped is not None and 5 < int(stopped[1]) < STEPS, log
    assert f"step {stopped[1]} of {STEPS} on 2 rank(s)" in log.split("start 2,")[1]
    assert read_losses(folder) == read_losses(whole)


def test_a_mistake_fails_the_job_which_is_not_requeued(slurm: Slurm, project: Path) -> None:
    job = submit(slurm, project, *TRAIN, "--data.global_batch_size", "33", "--run.dir", "runs/failed")
    assert slurm.wait(job) == ["FAILED", "0", "2:0"]
    assert "error: data.global_batch_size is 33" in log_of(project, job)


def test_srun_starts_ranks_on_two_nodes(slurm: Slurm, project: Path, whole: Path) -> None:
    words = ("srun", "--nodes=2", "--ntasks=2", "scripts/rank.sh", *SHORT, "--run.dir", "runs/srun")
    assert "on 2 rank(s)" in slurm.command(*words, cwd=project)
    assert read_losses(project / "runs" / "srun") == read_losses(whole)[:12]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--nodes=1 --gpus-per-task=1", ["0 0 0", "1 0 1"]),
        ("--nodes=1 --gpus-per-node=2", ["0 0 0,1", "1 1 0,1"]),
        ("--nodes=2 --gpus-per-node=2", ["0 0 0,1", "1 0 0,1"]),
    ],
)
def test_a_rank_takes_the_device_that_slurm_gives_it(
    slurm: Slurm, project: Path, tmp_path: Path, options: str, wanted: list[str]
) -> None:
    python = tmp_path / "python"
    # On several nodes, another call looks at the host name before.
    python.write_text('#!/bin/sh\n[ -z "$RANK" ] || echo "$RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    words = ("srun", "--ntasks=2", *options.split(), "scripts/rank.sh", "train")
    assert sorted(slurm.command(*words, cwd=project, PYTHON=str(python)).splitlines()) == wanted


@pytest.mark.parametrize("launcher", [*weekly("mpirun.openmpi --allow-run-as-root --oversubscribe"), "mpirun.mpich"])
def test_ranks_under_mpirun_have_the_losses_of_one_process(baked: Bake, tmp_path: Path, launcher: str) -> None:
    project = baked(cluster="slurm")
    words = (*launcher.split(), "-np", "2", "scripts/rank.sh", *SHORT, "--run.dir", tmp_path / "run")
    assert "on 2 rank(s)" in run(*words, cwd=project).stdout
    check_first_losses(project, tmp_path / "run", tmp_path / "alone")
