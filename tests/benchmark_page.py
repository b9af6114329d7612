"""Writes what tests/benchmark.py has measured into docs/benchmarks.md, between its two markers.

.venv/bin/python tests/benchmark_page.py    # of each comparison, the commit that was measured last
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmark import COMPARED, COMPARISONS, RESULTS, TEMPLATE, ratios

PAGE = TEMPLATE / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: written by make benchmark -->\n", "<!-- end -->\n"
Rows = list[dict[str, Any]]


def write_page() -> None:
    """Replace what is between the markers."""
    rows = newest([json.loads(line) for line in RESULTS.read_text().splitlines()])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    measured = {row["comparison"] for row in rows}
    compared = [each.name for each in COMPARISONS if each.arms == COMPARED and each.name in measured]
    tables = [steps_table(name, rows) for name in compared]
    text = "\n".join([describe(rows), *tables, surroundings(rows)])
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def newest(rows: Rows) -> Rows:
    """Return, of each comparison, the rows of the commit that was measured last."""
    last = {row["comparison"]: row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == last[row["comparison"]]]


def describe(rows: Rows) -> str:
    """Return what was measured, when and with what."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        commits.setdefault(row["commit"], {})[row["comparison"]] = None
    measured = "; ".join(f"commit {commit} ({', '.join(names)})" for commit, names in commits.items())
    date = datetime.fromtimestamp(RESULTS.stat().st_mtime, UTC).date()
    packages = "|".join(("torch", "accelerate", "lightning"))
    pinned = (TEMPLATE / "tests/peers/requirements.txt").read_text()
    versions = ", ".join(map(" ".join, re.findall(rf"^({packages})==(\S+)", pinned, re.MULTILINE)))
    rounds = 1 + max(row["round"] for row in rows)
    return (
        f"Measured on two cores of a virtual machine ({cpu()}) by `make benchmark`: {measured}; "
        f"{date}, Python {platform.python_version()}, {versions} (Fabric is part of it), {rounds} rounds.\n"
    )


def cpu() -> str:
    """Return the model of the processor."""
    lines = subprocess.check_output(["lscpu"], text=True).splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name"))


def select(rows: Rows, comparison: str, arm: str, name: str) -> dict[int, float]:
    """Return what an arm measured, by round."""
    return {
        row["round"]: row[name] for row in rows if (row["comparison"], row["arm"]) == (comparison, arm) and name in row
    }


def spread(values: Sequence[float], show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Return the median of some values, and the lowest and highest."""
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def steps_table(comparison: str, rows: Rows) -> str:
    """Return the steps per second of all arms, and how they compare with the project's."""
    project = select(rows, comparison, "project", "steps_per_second")
    lines = []
    for arm in COMPARED:
        steps = select(rows, comparison, arm, "steps_per_second")
        ratio = "" if arm == "project" else spread(ratios(project, steps))
        lines.append([arm, f"{statistics.median(steps.values()):.1f}", ratio])
    return table([comparison, "steps per second", "the project's steps per second in relation to it"], lines)


def surroundings(rows: Rows) -> str:
    """Return what surrounds a step: what the loop adds, a save, a start, and rendering."""
    starts = ratios(*(select(rows, "digits", arm, "first_step") for arm in ("project", "hand-written loop")))
    stall, plain, size = (select(rows, "saving", "saving", name) for name in ("stall", "plain", "mebibytes"))
    share = list(select(rows, "bare", "bare", "share").values())
    one = list(select(rows, "rendering", "one project", "seconds").values())
    every = list(select(rows, "rendering all", "all projects", "seconds").values())
    percent = "{:.1%}".format
    lines = {
        "logging, stop agreement, seeding and progress of digits, in relation to a step without them": (share, percent),
        f"how long a sharded save of {max(size.values(), default=0)} MiB keeps training waiting, in relation to "
        "`torch.save` of the same": (ratios(stall, plain), percent),
        "from the command to the end of the first step, in relation to the hand-written loop": (
            starts,
            "{:.2f}".format,
        ),
        "seconds to render one project": (one, "{:.2f}".format),
        "seconds to render all combinations of answers, in one process": (every, "{:.0f}".format),
    }
    measured = [[what, spread(values, show)] for what, (values, show) in lines.items() if values]
    return table(["what", "median (lowest to highest)"], measured)


if __name__ == "__main__":
    write_page()
