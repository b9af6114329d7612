"""Guarantee 7: a clean run exits with 0, every time, and leaves no process behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support import launch


@pytest.mark.parametrize("attempt", range(2))
def test_a_clean_run_exits_with_zero(tmp_path: Path, attempt: int) -> None:
    run = tmp_path / f"clean{attempt}"
    launch("train", "--train.max_steps", "3", "--run.dir", str(run), nproc=2)
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run) not in processes
