"""Guarantee 6: a job whose rank dies ends, tells so, and leaves no process behind.

Guarantee 7, that a clean run exits with 0, is what every other test that launches one expects.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support import RANKS, command, environment


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in Linux's table of processes")
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    words = command("train", "--train.epochs", "1000", "--train.log_every", "1", "--run.dir", str(tmp_path))
    with subprocess.Popen(
        words, env=environment(RANKS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        try:
            assert any(line.startswith("train step") for line in job.stdout), "it did not train"
            os.kill(find_ranks(job.pid)[-1], signal.SIGKILL)
            output, _ = job.communicate(timeout=120)
        finally:
            job.kill()
    assert job.returncode > 0
    assert RANKS == 1 or "no word from rank 1" in output


def find_ranks(launcher: int) -> list[int]:
    """The processes that a launcher has started, but for the helper of Python's multiprocessing."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
