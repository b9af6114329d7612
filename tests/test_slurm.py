"""`scripts/train.sbatch` under a real Slurm with two nodes: a job trains, is stopped, is requeued and resumes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import Bake
from runs import alone, losses, records, wait_until
from slurm import MISSING, Slurm, start_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: apt-get install slurm-wlm munge"),
]

SMALL = "--train.log_every 1 --data.global_batch_size 32 --distributed.device cpu".split()
LONG = [*SMALL, "--train.max_steps", "400"]  # Long enough for a signal to arrive during training.


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A running Slurm with two nodes."""
    with start_slurm() as running:
        yield running


@pytest.fixture(scope="module")
def project(baked: Bake) -> Path:
    """The rendered project, which also contains the logs and runs."""
    return baked(cluster="slurm")


def submit(slurm: Slurm, project: Path, *arguments: str, options: str = "", script: str = "train.sbatch") -> str:
    """Submit the shipped script, with one rank per node on the CPU, and return the number of the job."""
    environment = {"NPROC": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": "src"}
    command = ["sbatch", "--parsable", *options.split(), f"scripts/{script}", *arguments]
    return slurm.command(*command, cwd=project, **environment)


def log_of(project: Path, job: str) -> str:
    """Return the output of a job."""
    return (project / f"slurm-my-experiment-{job}.out").read_text()


@pytest.fixture(scope="module")
def finished(slurm: Slurm, project: Path) -> Path:
    """The folder of an uninterrupted run on both nodes."""
    job = submit(slurm, project, "train", *LONG, "--run.dir", "runs/finished")
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), log_of(project, job)
    assert "step 0 of 400 on 2 rank(s)" in log_of(project, job)
    return project / "runs" / "finished"


def test_two_nodes_have_the_same_losses_as_one_process(project: Path, finished: Path, tmp_path: Path) -> None:
    alone(project, "train", *SMALL, "--train.max_steps", "20", "--run.dir", tmp_path)
    assert losses(finished)[:20] == pytest.approx(losses(tmp_path), rel=1e-5)


def test_a_signalled_job_saves_and_resumes_from_the_same_step(slurm: Slurm, project: Path, finished: Path) -> None:
    job = submit(slurm, project, "train", *LONG, "--run.dir", "runs/stopped")
    folder = project / "runs" / "stopped"
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) > 5, "the run has started", 900)
    slurm.command("scancel", "--batch", "--signal=USR1", job)  # As Slurm does before the time limit.
    ended = slurm.wait(job)
    log = log_of(project, job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    stopped = re.search(r"stopped by SIGUSR1 after step (\d+)", log)
    assert stopped is not None and 0 < int(stopped[1]) < 400, log
    assert f"step {stopped[1]} of 400" in log.split("start 2,")[1]
    assert [record["step"] for record in records(folder, "train")] == list(range(1, 401))
    assert losses(folder) == losses(finished)


def test_srun_starts_the_ranks_without_another_launcher(slurm: Slurm, project: Path, finished: Path) -> None:
    script = (project / "scripts" / "train.sbatch").read_text()
    script, replacements = re.subn(r"^# (task=\(--kill-on-bad-exit)", r"\1", script, flags=re.MULTILINE)
    assert replacements == 1
    (project / "scripts" / "srun.sbatch").write_text(script)
    arguments = ("train", *SMALL, "--train.max_steps", "6", "--run.dir", "runs/srun")
    ended = slurm.wait(job := submit(slurm, project, *arguments, script="srun.sbatch", options="--cpus-per-task=1"))
    assert ended["JobState"] == "COMPLETED", log_of(project, job)
    assert "step 0 of 6 on 2 rank(s)" in log_of(project, job)
    assert losses(project / "runs" / "srun") == pytest.approx(losses(finished)[:6], rel=1e-5)


def test_a_failed_job_is_not_requeued(slurm: Slurm, project: Path) -> None:
    job = submit(slurm, project, "train", "--data.global_batch_size", "33", "--run.dir", "runs/failed")
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert "error: data.global_batch_size is 33" in log_of(project, job)
    assert not (project / "runs" / "failed").exists()


def test_a_job_must_be_submitted_from_the_root_of_the_project(slurm: Slurm, project: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = slurm.command("sbatch", "--parsable", f"--output={log}", project / "scripts" / "train.sbatch", cwd=tmp_path)
    assert slurm.wait(job)["ExitCode"] == "2:0"
    assert "submit from the project's root" in log.read_text() and log.read_text().count("\n") == 1


def test_a_job_array_trains_one_run_per_seed(slurm: Slurm, baked: Bake) -> None:
    project = baked(cluster="slurm", parallelism="data_parallel", launcher="spawn")
    arguments = ("train", *SMALL, "--train.max_steps", "2", "--run.dir", "runs/seeds")
    array = submit(slurm, project, *arguments, options="--array=0-1 --gpus-per-node=0")
    for seed in (0, 1):
        ended = slurm.wait(f"{array}_{seed}")
        assert ended["JobState"] == "COMPLETED", log_of(project, ended["JobId"])
        settings = yaml.safe_load((project / "runs" / "seeds" / f"seed-{seed}" / "config.yaml").read_text())
        assert settings["run"]["seed"] == seed
    assert losses(project / "runs" / "seeds" / "seed-0") != losses(project / "runs" / "seeds" / "seed-1")
