"""``metrics.jsonl``: read it, cut it, draw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .dataset import BEST_BY
from .rundir import replace_text


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; a last line that a killed run left unfinished is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cut_metrics(path: Path, step: int) -> None:
    """Drop the records after ``step``, which a run that goes on from there writes again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def draw_curves(metrics: Path, image: Path) -> None:
    """Draw loss, and the figure that chooses the best checkpoint, over steps."""
    from matplotlib.figure import Figure  # Only here: it takes a moment. No screen is needed.

    records = read_metrics(metrics)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, event, key, label in (
        (left, "train", "loss", "training loss"),
        (left, "eval", "loss", "test loss"),
        (right, "eval", BEST_BY, f"test {BEST_BY}"),
    ):
        points = [(record["step"], record[key]) for record in records if record["event"] == event]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
            axes.legend()
        axes.set_xlabel("step")
    figure.savefig(image, dpi=150)
