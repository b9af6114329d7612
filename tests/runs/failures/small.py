"""A run of four steps, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import launch, run_alone

SMALL = "train --train.max_steps 4 --train.log_every 1 --data.global_batch_size 32 --distributed.device cpu".split()
WORKERS = ["--data.num_workers", "1"]
SHARDED = ["--checkpoint.format", "sharded"]


def refuse(project: Path, *words: str, nproc: int = 1) -> str:
    """Train with a mistake, which is refused in one line; returns it. One of rank 1 alone is repeated by rank 0."""
    words = (*SMALL, "--run.dir", "run", *words)
    result = launch(project, *words, nproc=nproc, code=2) if nproc > 1 else run_alone(project, *words, code=2)
    line, *others = result.stderr.splitlines(keepends=True)
    repeated = line.replace("error: ", "error: rank 0 waited in vain: rank 1 failed with UserError: ", 1)
    assert line.startswith("error: ") and others in ([], [repeated]), result.stderr
    return line


def load(run_dir: Path) -> dict[str, Any]:
    """Return the newest checkpoint."""
    content: dict[str, Any] = torch.load(sorted(run_dir.glob("checkpoints/*.pt"))[-1], weights_only=True)
    return content
