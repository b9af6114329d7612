"""Runs that several tests look at."""

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support import LENGTH, end_at, launch


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train 20 steps on a number of ranks, once for each choice of settings; returns the run directory."""
    runs: dict[tuple[object, ...], Path] = {}

    def train(nproc: int, *settings: str) -> Path:
        key = (nproc, *settings)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("run")
            launch("train", *LENGTH, *settings, "--run.dir", str(runs[key]), nproc=nproc)
        return runs[key]

    return train


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The same run, whose last rank is killed after step 6: its directory, its exit code, and what it printed."""
    run = tmp_path_factory.mktemp("killed")
    return run, *end_at(6, run, partial(signal_last_rank, signal.SIGKILL))


def signal_last_rank(number: int, launcher: subprocess.Popen[str]) -> None:
    """Send a signal to the process that the launcher started last, except the helper of Python's multiprocessing."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    if not children.exists():  # Not Linux: the launcher ends its ranks.
        return launcher.send_signal(number)
    pids = [pid for pid in children.read_text().split() if not is_resource_tracker(pid)]
    os.kill(int(pids[-1]), number)


def is_resource_tracker(pid: str) -> bool:
    """Return whether a process is not a rank, from its command line in /proc."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
