"""Write the difference between the default project and each strategy that shards it into docs/diffs: make diffs"""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from conftest import TEMPLATE
from renders import Recorder, write

STRATEGIES = ("fsdp", "pipeline", "tensor")


def diff(strategy: str) -> str:
    """Return the diff that turns the default project into one with another strategy, for ``patch -p1``."""
    recorder = Recorder()
    with TemporaryDirectory() as folder:
        for side, parallelism in (("a", "ddp"), ("b", strategy)):
            write(recorder.render({"parallelism": parallelism}), Path(folder, side))
        words = ("git", "diff", "--no-index", "--no-color", "--no-prefix", "a", "b")
        return subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout


if __name__ == "__main__":
    for strategy in STRATEGIES:
        (TEMPLATE / "docs" / "diffs" / f"{strategy}.diff").write_text(diff(strategy))
