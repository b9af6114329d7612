"""The launchers of one machine: all give the same losses, forward stop signals, and leave no process behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch
from conftest import Bake
from runs import (
    ENDLESS,
    SHORT,
    TOLERANCE,
    alone,
    find_ranks,
    processes,
    records,
    started,
    wait_for_step,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc"),
]

TIMEOUT = 240.0  # Seconds; an idle machine needs only a few of them.
LONG = [*SHORT, "--train.max_steps", "20", "--train.eval_every", "8"]
MPI = {
    "Open MPI": ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"], "openmpi-bin"),
    "MPICH": ("mpiexec.hydra", [], "mpich"),
}


def losses(folder: Path, event: str = "train") -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(folder, event)]


def approximately(exact: list[tuple[int, float]]) -> list[tuple[int, object]]:
    """Return the same losses with a tolerance for rounding."""
    return [(step, pytest.approx(loss, rel=TOLERANCE)) for step, loss in exact]


@pytest.fixture(scope="module")
def reference(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    alone(plain, "train", *LONG, "--run.dir", folder)
    return folder


def start(
    project: Path, *command: str | Path, log: Path, **environment: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a command of a rendered project for the duration of a ``with`` block."""
    return started(*command, cwd=project, log=log, PYTHONPATH="src", NPROC="2", **environment)


def find_processes(folder: Path) -> list[int]:
    """Return the ids of all processes that have ``folder`` on their command line."""
    return processes(lambda _, command: str(folder).encode() in command)


def mpi_command(kind: str, project: Path, *arguments: str | Path, ranks: int = 2) -> list[str | Path]:
    """Return the command that starts ranks with an MPI launcher; skip the test if it is not installed."""
    program, options, package = MPI[kind]
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed (Debian's {package})")
    module = next((project / "src").iterdir()).name
    return [program, *options, "-np", str(ranks), sys.executable, "-m", module, *arguments]


@pytest.mark.parametrize(("kind", "ranks"), [("Open MPI", 2), ("MPICH", 1), ("MPICH", 2)])
def test_a_run_under_mpirun_has_the_same_losses(
    plain: Path, reference: Path, kind: str, ranks: int, tmp_path: Path
) -> None:
    command = mpi_command(kind, plain, "train", *SHORT, "--run.dir", tmp_path / "run", ranks=ranks)
    with start(plain, *command, log=tmp_path / "log") as launcher:
        assert launcher.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
    assert losses(tmp_path / "run") == approximately(losses(reference)[:6])
    assert f"on {ranks} rank(s)" in (tmp_path / "log").read_text()


def test_ranks_under_mpirun_can_rendezvous_through_a_file(plain: Path, reference: Path, tmp_path: Path) -> None:
    rendezvous = ["--distributed.init_method", f"file://{tmp_path}/meet"]
    command = mpi_command("Open MPI", plain, "train", *SHORT, "--run.dir", tmp_path / "run", *rendezvous)
    with start(plain, *command, log=tmp_path / "log") as launcher:
        assert launcher.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
    assert losses(tmp_path / "run") == approximately(losses(reference)[:6])


@pytest.mark.parametrize("kind", MPI)
def test_an_invalid_setting_under_mpirun_is_reported_once(plain: Path, kind: str, tmp_path: Path) -> None:
    command = mpi_command(kind, plain, "train", "--data.global_batch_size", "63", "--run.dir", tmp_path / "run")
    with start(plain, *command, log=tmp_path / "log") as launcher:
        assert launcher.wait(TIMEOUT) == 2
    assert (tmp_path / "log").read_text().count("error: data.global_batch_size is 63") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", MPI)
def test_ranks_end_when_mpirun_is_killed(plain: Path, kind: str, tmp_path: Path) -> None:
    command = mpi_command(kind, plain, "train", *SHORT, *ENDLESS, "--run.dir", tmp_path / "run")
    with start(plain, *command, log=tmp_path / "log") as launcher:
        wait_for_step(1, tmp_path / "run", launcher, tmp_path / "log")
        launcher.kill()
        wait_until(lambda: not find_processes(tmp_path / "run"), "all ranks end", TIMEOUT)


def test_jobs_can_run_at_the_same_time(baked: Bake, plain: Path, reference: Path, tmp_path: Path) -> None:
    jobs = {
        "torchrun": (plain, ["scripts/launch.sh"]),
        "again": (plain, ["scripts/launch.sh"]),
        "spawn": (baked(launcher="spawn"), ["scripts/launch.sh"]),
    }
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(
                start(project, *command, "train", *SHORT, "--run.dir", tmp_path / name, log=tmp_path / f"{name}.log")
            )
            for name, (project, command) in jobs.items()
        ]
        assert [launcher.wait(TIMEOUT) for launcher in launchers] == [0, 0, 0]
    for name in jobs:
        assert losses(tmp_path / name) == approximately(losses(reference)[:6])


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_stop_signal_to_one_rank_stops_all_ranks(baked: Bake, reference: Path, launcher: str, tmp_path: Path) -> None:
    project, folder = baked(launcher=launcher), tmp_path / "run"
    command = ["scripts/launch.sh", "train", *LONG, "--train.max_steps", "400", "--run.dir", folder]
    with start(project, *command, log=tmp_path / "log") as job:
        wait_for_step(2, folder, job, tmp_path / "log")
        os.kill(find_ranks(job)[1], signal.SIGUSR1)
        assert job.wait(TIMEOUT) == 0, "the launcher must exit with 0 after its ranks stop"
        assert find_processes(folder) == []
    assert "stopped by SIGUSR1 after step" in (tmp_path / "log").read_text()
    assert (folder / f"checkpoints/step-{len(losses(folder)):08d}.pt").exists()


def test_an_interrupted_evaluation_is_repeated_after_resuming(bake: Bake, reference: Path, tmp_path: Path) -> None:
    project, folder = bake(), tmp_path / "run"
    dataset = project / "src/my_experiment/dataset.py"
    source = dataset.read_text()
    command = ["scripts/launch.sh", "train", *LONG, "--data.eval_batch_size", "1", "--run.dir", folder]
    dataset.write_text(source + SLOW_METRICS)
    with start(project, *command, log=tmp_path / "log") as job:
        wait_for_step(8, folder, job, tmp_path / "log")
        time.sleep(0.5)  # Interrupt the evaluation that follows step 8.
        job.send_signal(signal.SIGTERM)
        assert job.wait(TIMEOUT) != 0
    assert "stopped by SIGTERM after step 8" in (tmp_path / "log").read_text()
    saved = torch.load(folder / "checkpoints/step-00000008.pt", weights_only=True)
    assert saved["progress"]["evaluated_step"] == 0 and not records(folder, "eval")

    dataset.write_text(source)
    with start(project, *command, log=tmp_path / "log") as job:
        assert job.wait(TIMEOUT) == 0
    assert losses(folder) == approximately(losses(reference))
    assert losses(folder, "eval") == approximately(losses(reference, "eval"))
    saved = torch.load(sorted((folder / "checkpoints").iterdir())[-1], weights_only=True)
    assert saved["progress"]["evaluated_step"] == saved["progress"]["step"]


# Makes an evaluation of 180 batches per rank take about a minute.
SLOW_METRICS = """

import time

fast_metrics = per_sample_metrics


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    time.sleep(0.3)
    return fast_metrics(outputs, targets)
"""


def test_torchrun_restarts_the_ranks_when_one_is_killed(plain: Path, reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ["scripts/launch.sh", "train", *LONG, "--checkpoint.every_steps", "4", "--run.dir", folder]
    with start(plain, *command, log=tmp_path / "log", MAX_RESTARTS="1") as job:
        wait_for_step(6, folder, job, tmp_path / "log")
        os.kill(find_ranks(job)[1], signal.SIGKILL)
        assert job.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
    output = (tmp_path / "log").read_text()
    assert "step 0 of 20" in output and "step 4 of 20" in output
    assert losses(folder) == approximately(losses(reference))
