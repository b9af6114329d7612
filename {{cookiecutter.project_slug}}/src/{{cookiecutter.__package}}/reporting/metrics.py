"""``metrics.jsonl``: reading it, truncating it when a run resumes, drawing its curves."""

import json
import time
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
    #:: if cookiecutter.__plays ::#
    """Draw the loss over optimizer steps, and the return over environment steps."""
    #:: else ::#
    """Draw the loss, and the metric that selects the best checkpoint, over steps."""
    #:: endif ::#
    from matplotlib.figure import Figure  # Slow to import, so only here. It needs no display.

    records = read_metrics(metrics)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    #:: if cookiecutter.__plays ::#
    for axes, event, unit, key in (
        (left, "train", "step", "loss"),
        *((right, "eval", "environment_steps", key) for key in ("max_return", best_metric, "min_return")),
    ):
        points = [(record[unit], record[key]) for record in records if record["event"] == event and unit in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=key.replace("_", " "))
            axes.legend()
        axes.set_xlabel(unit.replace("_", " "))
    #:: else ::#
    for axes, event, key, label in (
        (left, "train", "loss", "training loss"),
        (left, "eval", "loss", "test loss"),
        (right, "eval", best_metric, f"test {best_metric}"),
    ):
        points = [(record["step"], record[key]) for record in records if record["event"] == event and key in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
            axes.legend()
        axes.set_xlabel("step")
    #:: endif ::#
    figure.savefig(image, dpi=150)


class Throughput:
    """Counts the samples per second between two log records, without evaluation and saving."""

    def __init__(self, samples_per_step: int) -> None:
        self.samples_per_step, self.clock, self.step = samples_per_step, 0.0, 0

    def start(self, step: int) -> None:
        """Start counting after ``step``."""
        self.clock, self.step = time.perf_counter(), step

    def measure(self, step: int) -> dict[str, float]:
        """Return ``samples_per_second``, or nothing if no step was taken, and start again."""
        samples, seconds = (step - self.step) * self.samples_per_step, time.perf_counter() - self.clock
        self.start(step)
        return {"samples_per_second": round(samples / seconds, 1)} if samples else {}


def append_record(record: dict[str, Any], run_dir: str) -> None:
    """Print a record as one line of JSON; if a run directory is given, also append it to its metrics."""
    line = json.dumps(record)
    print(line)
    if run_dir:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with open(Path(run_dir) / "metrics.jsonl", "a", encoding="utf-8") as metrics:
            metrics.write(line + "\n")
