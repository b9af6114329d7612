"""The doctor finds nothing that would break a run on this machine, and finds what would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import PACKAGE, ROOT, environment


def examine(run: Path) -> subprocess.CompletedProcess[str]:
    """One process looks at its machine, for a run on the CPU."""
    words = [sys.executable, "-m", PACKAGE, "doctor", "--distributed.device", "cpu", "--run.dir", str(run)]
    here = environment(1) | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, env=here, capture_output=True, text=True, timeout=120)


def test_nothing_would_break_a_run_here(tmp_path: Path) -> None:
    done = examine(tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-reduce" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = examine(tmp_path / "file" / "run")
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line.split()[0] for line in done.stdout.splitlines() if line[20:].lstrip().startswith("fail ")]
    assert failed == ["run.dir"]
