"""Pictures of runs: a panel for each number of their records."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def plot(run_dirs: Sequence[str], output: str) -> None:
    """Draw runs: a panel per number; for each run, or entry of a list, points and a mean."""
    from matplotlib.figure import Figure  # Takes a second to import.

    panels: Any = defaultdict(lambda: defaultdict(list))  # By event and name, then by run and entry.
    for run in run_dirs:
        for record in map(json.loads, Path(run, "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()):
            for name, value in record.items():
                for entry, number in enumerate(value if isinstance(value, list) else [value]):
                    if type(number) is float:  # Else null.
                        panels[record["event"], name][run, entry].append((record["step"], number))
    axes, lines, figure = None, {}, Figure((12, 1.5 + 0.8 * len(panels)), layout="constrained")
    for place, (event, name) in enumerate(sorted(panels), 1):
        axes = figure.add_subplot(-(-len(panels) // 3), 3, place, sharex=axes, xlabel="step", title=f"{event}: {name}")
        for (run, _), points in panels[event, name].items():
            mean = torch.tensor(points).unfold(0, 1 + len(points) // 20, 1).mean(2)
            color = f"C{run_dirs.index(run)}"
            axes.plot(*zip(*points, strict=True), ".-", color=color, markersize=3, linewidth=0.5)
            (lines[run],) = axes.plot(*mean.T, color=color)
        axes.set_yscale("log" if 0 < 100 * axes.dataLim.ymin < axes.dataLim.ymax else "linear")
    figure.legend(lines.values(), lines.keys(), loc="outside upper left")
    figure.savefig(output)
