"""``doctor`` finds what would break a run, and nothing else on this machine."""

import subprocess
import sys
from pathlib import Path

from support import PACKAGE, ROOT, environment


def test_a_directory_that_cannot_be_written_is_the_only_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = tmp_path / "file" / "run"
    words = [sys.executable, "-m", PACKAGE, "doctor", "--distributed.device", "cpu", "--run.dir", str(run)]
    variables = environment(1) | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "all-reduce" in done.stdout
    failed = [line.split()[0] for line in done.stdout.splitlines() if line[20:].lstrip().startswith("fail ")]
    assert failed == ["run.dir"]
