"""Guarantee 6: a job whose rank dies ends, tells so, and leaves no process behind.

Guarantee 7, that a clean run exits with 0, is what every other test that launches one expects.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support import RANKS


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in Linux's table of processes")
def test_a_killed_rank_ends_the_job(killed: tuple[Path, int, str]) -> None:
    _, exit_code, told = killed  # It has ended, and with it all that held its output.
    assert exit_code > 0
    assert RANKS == 1 or "no word from rank 1" in told
