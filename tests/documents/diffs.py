"""Write the difference between the default project and each strategy that shards it into docs/diffs: make diffs"""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).parents[2]
STRATEGIES = ("fsdp", "pipeline", "tensor")


def diff(strategy: str) -> str:
    """Return the diff that turns the default project into one with another strategy, for ``patch -p1``."""
    with TemporaryDirectory() as folder:
        for name in ("ddp", strategy):
            answers = {"parallelism": name}
            cookiecutter(
                str(TEMPLATE), no_input=True, extra_context=answers, output_dir=f"{folder}/{name}", accept_hooks=False
            )
        words = [
            "git",
            "diff",
            "--no-index",
            "--no-color",
            "--no-prefix",
            "ddp/my-experiment",
            f"{strategy}/my-experiment",
        ]
        text = subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout
    for name in ("ddp", strategy):
        text = text.replace(f" {name}/my-experiment/", " a/" if name == "ddp" else " b/")
    return text


if __name__ == "__main__":
    for strategy in STRATEGIES:
        (TEMPLATE / "docs" / "diffs" / f"{strategy}.diff").write_text(diff(strategy))
