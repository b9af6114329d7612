"""The launchers of one machine: the same losses under each, requests to stop handed on, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import Bake
from runs import SHORT, alone, processes, records, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc"),
]

PATIENCE = 240.0  # Seconds for what takes a few on a machine that has nothing else to do.
LONG = [*SHORT, "--train.max_steps", "20", "--train.eval_every", "8"]
MPI = {
    "Open MPI": ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"], "openmpi-bin"),
    "MPICH": ("mpiexec.hydra", [], "mpich"),
}


def losses(folder: Path, event: str = "train") -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(folder, event)]


def about(expected: list[tuple[int, float]]) -> list[tuple[int, object]]:
    """The same to rounding."""
    return [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected]


@pytest.fixture(scope="module")
def expected(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nobody interrupted."""
    folder = tmp_path_factory.mktemp("alone")
    alone(plain, "train", *LONG, "--run.dir", folder)
    return folder


def start(project: Path, *words: str | Path, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start a command of a rendered project in the background."""
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=project,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": "src", "NPROC": "2"} | environment,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )


def started_for(folder: Path) -> list[int]:
    """Every process that has ``folder`` on its command line."""
    return processes(lambda _, words: str(folder).encode() in words)


def mpi(kind: str, project: Path, *words: str | Path) -> list[str | Path]:
    """The command line of two ranks under an MPI's launcher."""
    program, options, package = MPI[kind]
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed (Debian's {package})")
    name = next((project / "src").iterdir()).name
    return [program, *options, "-np", "2", sys.executable, "-m", name, *words]


@pytest.mark.parametrize("kind", MPI)
def test_mpirun_trains(plain: Path, expected: Path, kind: str, tmp_path: Path) -> None:
    words = mpi(kind, plain, "train", *SHORT, "--run.dir", tmp_path / "run")
    launcher = start(plain, *words, log=tmp_path / "log")
    assert launcher.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert losses(tmp_path / "run") == about(losses(expected)[:6])
    assert "on 2 rank(s)" in (tmp_path / "log").read_text()


def test_ranks_of_mpirun_meet_in_a_file(plain: Path, expected: Path, tmp_path: Path) -> None:
    place = ["--distributed.init_method", f"file://{tmp_path}/meet"]
    words = mpi("Open MPI", plain, "train", *SHORT, "--run.dir", tmp_path / "run", *place)
    assert start(plain, *words, log=tmp_path / "log").wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert losses(tmp_path / "run") == about(losses(expected)[:6])


def test_a_mistake_under_mpirun_is_told_once(plain: Path, tmp_path: Path) -> None:
    words = mpi("Open MPI", plain, "train", "--data.global_batch_size", "63", "--run.dir", tmp_path / "run")
    assert start(plain, *words, log=tmp_path / "log").wait(PATIENCE) == 2
    assert (tmp_path / "log").read_text().count("error: data.global_batch_size is 63") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", MPI)
def test_ranks_end_when_mpirun_was_killed(plain: Path, kind: str, tmp_path: Path) -> None:
    words = mpi(kind, plain, "train", "--train.epochs", "1000", "--train.log_every", "1", "--run.dir", tmp_path / "run")
    launcher = start(plain, *words, log=tmp_path / "log")
    wait_until(lambda: (tmp_path / "run/metrics.jsonl").exists() or launcher.poll() is not None, "it trains", PATIENCE)
    launcher.kill()
    assert launcher.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: not started_for(tmp_path / "run"), "no rank is left", PATIENCE)


def test_jobs_run_beside_each_other(baked: Bake, plain: Path, expected: Path, tmp_path: Path) -> None:
    jobs = {
        "torchrun": (plain, ["scripts/launch.sh"]),
        "again": (plain, ["scripts/launch.sh"]),
        "spawn": (baked(launcher="spawn"), ["scripts/launch.sh"]),
    }
    started = [
        start(project, *words, "train", *SHORT, "--run.dir", tmp_path / name, log=tmp_path / f"{name}.log")
        for name, (project, words) in jobs.items()
    ]
    assert [launcher.wait(PATIENCE) for launcher in started] == [0, 0, 0]
    for name in jobs:
        assert losses(tmp_path / name) == about(losses(expected)[:6])


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_signal_to_one_rank_stops_all(baked: Bake, expected: Path, launcher: str, tmp_path: Path) -> None:
    project, folder = baked(launcher=launcher), tmp_path / "run"
    words = ["scripts/launch.sh", "train", *LONG, "--train.max_steps", "400", "--run.dir", folder]
    job = start(project, *words, log=tmp_path / "log")
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 2, "it trains", PATIENCE)
    os.kill(ranks(job)[1], signal.SIGUSR1)
    assert job.wait(PATIENCE) == 0, "the ranks ended in order, and nobody asked the launcher"
    assert started_for(folder) == []
    assert "stopped by SIGUSR1 after step" in (tmp_path / "log").read_text()
    assert (folder / f"checkpoints/step-{len(losses(folder)):08d}.pt").exists()


def ranks(job: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of a launcher's ranks, which it started in this order."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return sorted(pid for pid, line in words.items() if b" train" in line.replace(b"\0", b" ") or b"spawn_main" in line)


def test_an_evaluation_is_left_and_made_up_for(bake: Bake, expected: Path, tmp_path: Path) -> None:
    project, folder = bake(), tmp_path / "run"
    slow = project / "src/my_experiment/dataset.py"
    fast = slow.read_text()
    words = ["scripts/launch.sh", "train", *LONG, "--data.eval_batch_size", "1", "--run.dir", folder]
    slow.write_text(fast + SLOW)
    job = start(project, *words, log=tmp_path / "log")
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) == 8, "it evaluates", PATIENCE)
    time.sleep(0.5)  # Into the evaluation that follows step 8.
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE) != 0
    assert "stopped by SIGTERM after step 8" in (tmp_path / "log").read_text()
    saved = torch.load(folder / "checkpoints/step-00000008.pt", weights_only=True)
    assert saved["progress"]["evaluation_due"] and not records(folder, "eval")

    slow.write_text(fast)
    assert start(project, *words, log=tmp_path / "log").wait(PATIENCE) == 0
    assert losses(folder) == about(losses(expected))
    assert losses(folder, "eval") == about(losses(expected, "eval"))
    saved = torch.load(sorted((folder / "checkpoints").iterdir())[-1], weights_only=True)
    assert not saved["progress"]["evaluation_due"]


# An evaluation of 180 batches a rank that takes a minute.
SLOW = """

import time

quick_score = score


def score(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    time.sleep(0.3)
    return quick_score(outputs, targets)
"""


def test_torchrun_starts_the_ranks_again(plain: Path, expected: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["scripts/launch.sh", "train", *LONG, "--checkpoint.every_steps", "4", "--run.dir", folder]
    job = start(plain, *words, log=tmp_path / "log", MAX_RESTARTS="1")
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 6, "it has saved", PATIENCE)
    os.kill(ranks(job)[1], signal.SIGKILL)
    assert job.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    told = (tmp_path / "log").read_text()
    assert "step 0 of 20" in told and "step 4 of 20" in told
    assert losses(folder) == about(losses(expected))
