"""Guarantee 7: a clean run exits with 0, every time, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

from support import RANKS, launch


def test_a_clean_run_exits_with_zero(tmp_path: Path) -> None:
    # Ends when the last process that holds the launcher's output is gone: one left behind would run into the timeout.
    launch("train", "--train.max_steps", "3", "--run.dir", str(tmp_path), nproc=RANKS)
