"""Several machines: the same losses as one, and what becomes of a run whose link is cut or whose rank is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHOICES, Bake
from machines import Machine, Machines, start_on_both
from runs import SHORT, alone, checkpoints, losses

pytestmark = pytest.mark.slow

PATIENCE = 240.0  # Seconds for what takes a few on a machine that has nothing else to do.
STEPS = 30
TRAIN = ["train", "--train.max_steps", str(STEPS), "--train.log_every", "1", "--distributed.device", "cpu"]


@pytest.fixture(scope="module")
def expected(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    alone(baked(), *TRAIN, "--run.dir", folder)
    return losses(folder)


def wait_until(condition: Callable[[], bool], launchers: list[subprocess.Popen[bytes]]) -> None:
    """Wait for a run to come so far."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        assert [launcher.poll() for launcher in launchers] == [None, None], "a launcher ended"
        time.sleep(0.02)


def end(launchers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for both launchers; gives their exit codes."""
    return [launcher.wait(timeout=PATIENCE) for launcher in launchers]


def assert_nothing_left(machines: Machines) -> None:
    """No process is left on either machine; Python's resource tracker needs a moment to see that it has no work."""
    give_up = time.monotonic() + 30
    while left := [machine.processes() for machine in machines if machine.processes()]:
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def step_of(folder: Path) -> int:
    return len(losses(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("launcher", CHOICES["launcher"])
def test_a_run_goes_on_after_its_link_was_cut(
    baked: Bake,
    machines: Machines,
    expected: list[float],
    launcher: str,
    tmp_path: Path,
) -> None:
    project, folder = baked(launcher=launcher), tmp_path / "run"
    words = [*TRAIN, "--checkpoint.every_steps", "5", "--distributed.timeout_seconds", "5", "--run.dir", folder]
    launchers = start_on_both(machines, project, *words, logs=tmp_path / "cut")
    wait_until(lambda: step_of(folder) >= 12, launchers)
    machines[0].ip("link", "set", "wire", "down")
    assert all(end(launchers)), "both have failed"
    assert_nothing_left(machines)
    for rank in (0, 1):
        assert f"rank{rank}" in (log := (tmp_path / f"cut/{rank}.log").read_text()) or "Process 0 terminated" in log
        assert "imed out" in log

    machines[0].ip("link", "set", "wire", "up")
    assert end(start_on_both(machines, project, *words, logs=tmp_path / "again")) == [0, 0]
    assert "step 10 of" in (tmp_path / "again/0.log").read_text()
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert_nothing_left(machines)


def ranks(machine: Machine) -> list[int]:
    """The processes of a machine that torchrun has given a rank."""
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in machine.processes()}
    return [pid for pid, environment in environments.items() if b"\0LOCAL_RANK=" in environment]


def test_torchrun_starts_both_machines_again_when_a_rank_was_killed(
    baked: Bake,
    machines: Machines,
    expected: list[float],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # Restarts go on from what was saved, though the first start had to be a fresh one.
    words = [*TRAIN, "--checkpoint.every_steps", "5", "--checkpoint.resume", "never", "--run.dir", folder]
    launchers = start_on_both(machines, baked(), *words, logs=tmp_path, MAX_RESTARTS="1")
    wait_until(lambda: step_of(folder) >= 12, launchers)
    os.kill(ranks(machines[1])[0], signal.SIGKILL)
    assert end(launchers) == [0, 0]
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    told = "".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    assert "step 0 of" in told and "step 10 of" in told
    assert_nothing_left(machines)


@pytest.mark.parametrize("parallelism", [p for p in CHOICES["parallelism"] if p not in ("ddp", "data_parallel")])
def test_every_strategy_trains_over_two_machines(
    baked: Bake,
    machines: Machines,
    expected: list[float],
    parallelism: str,
    tmp_path: Path,
) -> None:
    project, folder = baked(parallelism=parallelism), tmp_path / "run"
    launchers = start_on_both(machines, project, "train", *SHORT, "--run.dir", folder, logs=tmp_path)
    assert end(launchers) == [0, 0], (tmp_path / "0.log").read_text()
    assert losses(folder) == pytest.approx(expected[:6], rel=1e-5)
    assert checkpoints(folder) == ["step-00000006.pt"]
