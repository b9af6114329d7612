"""A job one of whose ranks dies ends, names the rank, and leaves no process behind.

That a clean run exits with 0 is what every other test that launches one expects.
"""

from pathlib import Path

import pytest

from support import RANKS


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in Linux's process table")
def test_a_killed_rank_ends_the_job(killed: tuple[Path, int, str]) -> None:
    _, exit_code, output = killed  # It has ended, and with it everything that held its output.
    assert exit_code > 0
    assert RANKS == 1 or "no report from rank 1" in output
