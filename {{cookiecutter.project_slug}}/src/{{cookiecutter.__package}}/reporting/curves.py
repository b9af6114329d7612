"""``curves.png``: the loss, the metric that selects the best checkpoint, and the throughput of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .examples import new_figure
from .metrics import read_metrics
from .provenance import read_resumed_steps

SPLITS = {"train": "training", "eval": "test"}  # By event.
MARKERS = {"train": "", "eval": "."}


def draw_curves(run_dir: Path, best_metric: str, units: Mapping[str, str]) -> Any:
    """Return a figure of a run's metrics; a dashed line marks each step that the run was resumed from.

    ``units`` has the unit of each metric, by name.
    """
    records, _ = read_metrics(run_dir / "metrics.jsonl")
    resumed = read_resumed_steps(run_dir, max((record["step"] for record in records), default=0))
    rates = ("tokens_per_second", "samples_per_second")
    rate = next((name for name in rates if any(name in record for record in records)), rates[-1])
    figure = new_figure(15, 4)
    left, middle, right = figure.subplots(1, 3)
    draw_panel(left, records, "step", ["loss"], resumed)
    #:: if cookiecutter.__plays ::#
    draw_panel(middle, records, "environment_steps", ["max_return", best_metric, "min_return"], resumed)
    #:: else ::#
    draw_panel(middle, records, "step", [best_metric], resumed)
    #:: endif ::#
    draw_panel(right, records, "step", [rate], resumed)
    for axes, name in ((left, "loss"), (middle, best_metric), (right, rate)):
        unit = units.get(name, "")
        axes.set_ylabel(f"{words(name)} ({unit})" if unit else words(name))
    return figure


def draw_panel(axes: Any, records: list[dict[str, Any]], x: str, names: list[str], resumed: list[int]) -> None:
    """Draw metrics of both splits, as far as they are recorded, over ``x``, which is a name in the records too."""
    for event, split in SPLITS.items():
        for name in names:
            points = read_points(records, event, x, name)
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{split} {words(name)}", marker=MARKERS[event])
    for number, step in enumerate(resumed):
        # Another unit than steps: what the last record before it has.
        earlier = [point for event in SPLITS for point in read_points(records, event, "step", x) if point[0] <= step]
        at = step if x == "step" else max(earlier, default=[0, 0])[1]
        axes.axvline(at, color="gray", linestyle="--", linewidth=1, label="" if number else "resumed")
    axes.set_xlabel("optimizer step" if x == "step" else words(x))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def words(name: str) -> str:
    """Return the name of a metric in words."""
    return name.replace("_", " ")


def read_points(records: list[dict[str, Any]], event: str, *keys: str) -> list[list[Any]]:
    """Return the values under ``keys`` in the records of an event, where all of them are numbers that can be drawn."""

    def is_drawable(value: Any) -> bool:
        return isinstance(value, int | float) and not abs(value) > 1e300

    found = [[record.get(key) for key in keys] for record in records if record["event"] == event]
    return [point for point in found if all(map(is_drawable, point))]
