"""What ``doctor`` finds, one row a thing that it looked at, and the table of what all ranks found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

State = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        found: What is there.
        state: ``fail`` would break a run, ``warn`` may slow it down or surprise, ``pass`` is as it should be.
        advice: What to do about it; empty where there is nothing to do.
    """

    name: str
    found: str
    state: State = "pass"
    advice: str = ""


def to_plain(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as dictionaries, from which ``Row(**each)`` makes them again."""
    return [asdict(row) for row in rows]


def failed(ranks: list[list[Row]]) -> set[str]:
    """The names of all rows that failed on any rank."""
    return {row.name for rows in ranks for row in rows if row.state == "fail"}


def format_table(ranks: list[list[Row]]) -> str:
    """The rows of all ranks as lines: one where those that looked found the same, else one for each finding."""
    said: dict[str, dict[Row, list[int]]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            said.setdefault(row.name, {}).setdefault(row, []).append(rank)
    width, lines = max(20, *map(len, said)), []
    for findings in said.values():
        for row, who in findings.items():
            speaker = f"rank {spans(who)}: " if len(findings) > 1 else ""
            lines.append(f"{row.name.ljust(width)} {row.state:<5} {speaker}{row.found}")
            if row.advice:
                lines.append(f"{' ' * width} ----> {row.advice}")
    return "\n".join(lines)


def spans(numbers: list[int]) -> str:
    """Ascending numbers in short: ``0-3,5``."""
    starts = [numbers[0]] + [after for before, after in pairwise(numbers) if after != before + 1]
    ends = [before for before, after in pairwise(numbers) if after != before + 1] + [numbers[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def format_count(ranks: list[list[Row]]) -> str:
    """How many different findings passed, warn and failed."""
    rows = {row for rows in ranks for row in rows}
    return ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in ("pass", "warn", "fail"))
