"""What the tests of training share: start rendered projects, read what they left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import run

SHORT = "--train.max_steps 6 --train.log_every 1 --distributed.device cpu".split()
# A small text and a small model for it, of as many blocks as that of the digits.
SMALL_LANGUAGE = (
    "--dataset.max_bytes 43000 --dataset.test_bytes 20000 --data.global_batch_size 32 --train.epochs 20 "
    "--model.width 32 --model.layers 6 --model.heads 4 --model.context 32"
).split()


def task_of(project: Path) -> str:
    """The answer to the question that a project was rendered with."""
    return tomllib.loads((project / "pyproject.toml").read_text())["tool"]["ddp-template"]["task"]


def small(project: Path, command: str, *words: str | Path) -> list[str | Path]:
    """A command line that a test has time for."""
    return [command, *(SMALL_LANGUAGE if task_of(project) == "language" and command != "convert" else []), *words]


def launch(project: Path, *words: str | Path, nproc: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    """The shipped launcher, to its end."""
    return run(project / "scripts/launch.sh", *small(project, *words), cwd=project, NPROC=str(nproc), **options)


def alone(project: Path, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """One process, as `python -m <package>`."""
    package = next((project / "src").iterdir()).name
    return run(sys.executable, "-m", package, *small(project, *words), cwd=project, PYTHONPATH="src", **options)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["event"] == event]


def losses(folder: Path) -> list[float]:
    """The losses of a run, step by step."""
    return [record["loss"] for record in records(folder, "train")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("*.pt"))[-1]
    return torch.load(newest, weights_only=True)["model"]


def plant(project: Path, name: str, line: str, fault: str) -> None:
    """Put ``fault`` before a line of a file of the package."""
    path = next((project / "src").iterdir()) / name
    source = path.read_text()
    assert source.count(line) == 1
    indent = line[: len(line) - len(line.lstrip())]
    planted = "".join(f"{indent}{part}\n" for part in fault.splitlines())
    path.write_text(source.replace(line, planted + line))


def processes(wanted: Callable[[bytes, bytes], bool]) -> list[int]:
    """The processes of which ``wanted`` says so, given environment and command line, from the kernel's table."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted((process / "environ").read_bytes(), (process / "cmdline").read_bytes()):
                found.append(int(process.name))
        except OSError:  # It ended just now.
            continue
    return sorted(found)


def wait_until(true: Callable[[], object], what: str, seconds: float) -> None:
    """Wait until something is so; ``seconds`` is a limit that no machine should need."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"waited {seconds} s in vain until {what}"
        time.sleep(0.05)
