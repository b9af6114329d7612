"""Several machines: the losses match those of one process, also after a cut link or a killed rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHOICES, Bake, leave_to_weekly
from machines import Machines, start_on_both
from runs import SHORT, TOLERANCE, alone, checkpoints, find_ranks, last_step, losses

pytestmark = pytest.mark.slow

TIMEOUT = 240.0  # Seconds; an idle machine needs only a few of them.
STEPS = 30
TRAIN = ["train", "--train.max_steps", str(STEPS), "--train.log_every", "1", "--distributed.device", "cpu"]


@pytest.fixture(scope="module")
def expected(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    alone(baked(), *TRAIN, "--run.dir", folder)
    return losses(folder)


def wait_until(condition: Callable[[], bool], launchers: list[subprocess.Popen[str]]) -> None:
    """Wait until a condition is true; fail if a launcher ends first."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        assert [launcher.poll() for launcher in launchers] == [None, None], "a launcher ended"
        time.sleep(0.02)


def wait_for_exit(launchers: list[subprocess.Popen[str]]) -> list[int]:
    """Wait until both launchers end, and return their exit codes."""
    return [launcher.wait(timeout=TIMEOUT) for launcher in launchers]


def assert_no_processes_left(machines: Machines) -> None:
    """Wait until no process runs on either machine; Python's resource tracker needs a moment to end."""
    deadline = time.monotonic() + 30
    while left := [machine.processes() for machine in machines if machine.processes()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("launcher", leave_to_weekly(CHOICES["launcher"], ["spawn"]))
def test_a_run_resumes_after_the_link_is_cut(
    baked: Bake,
    machines: Machines,
    expected: list[float],
    launcher: str,
    tmp_path: Path,
) -> None:
    project, folder = baked(launcher=launcher), tmp_path / "run"
    arguments = [*TRAIN, "--checkpoint.every_steps", "5", "--distributed.timeout_seconds", "5", "--run.dir", folder]
    launchers = start_on_both(machines, project, *arguments, logs=tmp_path / "cut")
    wait_until(lambda: last_step(folder) >= 12, launchers)
    machines[0].ip("link", "set", "wire", "down")
    assert all(wait_for_exit(launchers)), "both launchers must fail"
    assert_no_processes_left(machines)
    for rank in (0, 1):
        assert f"rank{rank}" in (log := (tmp_path / f"cut/{rank}.log").read_text()) or "Process 0 terminated" in log
        assert re.search("timed? ?out", log, re.IGNORECASE)

    machines[0].ip("link", "set", "wire", "up")
    assert wait_for_exit(start_on_both(machines, project, *arguments, logs=tmp_path / "again")) == [0, 0]
    assert "step 10 of" in (tmp_path / "again/0.log").read_text()
    assert losses(folder) == pytest.approx(expected, rel=TOLERANCE)
    assert_no_processes_left(machines)


def test_a_lossy_link_only_costs_time(baked: Bake, machines: Machines, expected: list[float], tmp_path: Path) -> None:
    for machine in machines:
        machine.lose_packets()
    launchers = start_on_both(machines, baked(), *TRAIN, "--run.dir", tmp_path / "run", logs=tmp_path)
    assert wait_for_exit(launchers) == [0, 0], (tmp_path / "0.log").read_text()
    assert sum(machine.retransmitted() for machine in machines) >= STEPS // 3
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)
    assert_no_processes_left(machines)


def test_torchrun_restarts_the_ranks_of_both_machines_when_one_is_killed(
    baked: Bake,
    machines: Machines,
    expected: list[float],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # "never" only applies to the first start: a restart resumes from the newest checkpoint.
    arguments = [*TRAIN, "--checkpoint.every_steps", "5", "--checkpoint.resume", "never", "--run.dir", folder]
    launchers = start_on_both(machines, baked(), *arguments, logs=tmp_path, MAX_RESTARTS="1")
    wait_until(lambda: last_step(folder) >= 12, launchers)
    os.kill(find_ranks(launchers[1])[0], signal.SIGKILL)
    assert wait_for_exit(launchers) == [0, 0]
    assert losses(folder) == pytest.approx(expected, rel=TOLERANCE)
    output = "".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    assert "step 0 of" in output and "step 10 of" in output
    assert_no_processes_left(machines)


@pytest.mark.parametrize("parallelism", [p for p in CHOICES["parallelism"] if p not in ("ddp", "data_parallel")])
def test_a_strategy_has_the_same_losses_on_two_machines(
    baked: Bake,
    machines: Machines,
    expected: list[float],
    parallelism: str,
    tmp_path: Path,
) -> None:
    project, folder = baked(parallelism=parallelism), tmp_path / "run"
    launchers = start_on_both(machines, project, "train", *SHORT, "--run.dir", folder, logs=tmp_path)
    assert wait_for_exit(launchers) == [0, 0], (tmp_path / "0.log").read_text()
    assert losses(folder) == pytest.approx(expected[:6], rel=TOLERANCE)
    assert checkpoints(folder) == ["step-00000006.pt"]
