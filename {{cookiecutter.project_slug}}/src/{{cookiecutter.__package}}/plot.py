"""Pictures of runs: one panel for each number of their records."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = 3


def plot(run_dirs: Sequence[str], output: str) -> None:
    """Draw the records of runs into a picture: a panel for each number, a color for each run."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = choose_panels(run_dirs)
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure((12, 1.5 + 0.8 * len(panels)), layout="constrained")
    axes = None
    for number, name in enumerate(sorted(panels), start=1):
        axes = figure.add_subplot(rows, COLUMNS, number, sharex=axes, xlabel="step", title=name)
        for (event, color, _), points in panels[name].items():
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, ".--" if event == "eval" else "-", color=color)
    samples = [Line2D([], [], color=f"C{index}") for index in range(len(run_dirs))]
    figure.legend(samples, run_dirs, loc="outside upper left")
    figure.savefig(output)


def choose_panels(run_dirs: Sequence[str]) -> dict[str, Any]:
    """Return panels by name; a panel has lists of (step, value) by (event, color, entry)."""
    panels: Any = defaultdict(lambda: defaultdict(list))
    for index, run_dir in enumerate(run_dirs):
        text = Path(run_dir, "metrics.jsonl").read_text()
        # A live run may have written only a part of its last line, without the newline at its end.
        for line in text.split("\n")[:-1]:
            record = json.loads(line)
            for name, value in record.items():
                # Several numbers, such as one for each class, have a curve for each entry.
                if isinstance(value, list):
                    value = dict(enumerate(value))
                entries = value if isinstance(value, dict) else {"": value}
                for entry, number in entries.items():
                    # Counts are integers, and null stands for what is not finite: neither is drawn.
                    if isinstance(number, float):
                        panels[name][record["event"], f"C{index}", entry].append(
                            (record["step"], number)
                        )
    return panels
