"""``metrics.jsonl``: reading it, truncating it when a run resumes, drawing its curves."""

import json
from pathlib import Path
from typing import Any

from ..runtime import replace_text


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file in order, without a last line that a killed run left incomplete."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the records after ``step``, which a run that resumes from there writes again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def draw_curves(metrics: Path, image: Path, best_metric: str) -> None:
    """Draw the loss, and the metric that selects the best checkpoint, over steps."""
    from matplotlib.figure import Figure  # Slow to import, so only here. It needs no display.

    records = read_metrics(metrics)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, event, key, label in (
        (left, "train", "loss", "training loss"),
        (left, "eval", "loss", "test loss"),
        (right, "eval", best_metric, f"test {best_metric}"),
    ):
        points = [(record["step"], record[key]) for record in records if record["event"] == event]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
            axes.legend()
        axes.set_xlabel("step")
    figure.savefig(image, dpi=150)
