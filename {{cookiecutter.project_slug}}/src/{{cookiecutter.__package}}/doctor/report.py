"""``doctor``'s input (requirements), its results (rows), and the table of all ranks' results.

device               pass  cpu, 2 processor(s), 2 rank(s) on this machine with 1 thread(s) each
/dev/shm             fail  64 of 64 MiB free
                     ----> too little for loader processes; give it 1 GiB or more: mount -o remount,size=1g /dev/shm
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..config import CheckpointConfig, DistributedConfig

State = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Requirements:
    """What the run needs, which ``doctor`` checks."""

    run_dir: Path
    checkpoint: CheckpointConfig
    distributed: DistributedConfig
    devices_per_rank: int
    num_workers: int
    parameters: int
    settings: Mapping[str, Any]  # All settings: they have to be the same on all ranks.


@dataclass(frozen=True)
class Row:
    """One check: its name, what it found, and what to do about it.

    ``fail`` would break the run, ``warn`` may slow it down or cause surprises, ``pass`` is as it should be.
    """

    name: str
    found: str
    state: State = "pass"
    advice: str = ""


def failed(ranks: list[list[Row]]) -> set[str]:
    """Return the names of the rows that failed on any rank."""
    return {row.name for rows in ranks for row in rows if row.state == "fail"}


def format_table(ranks: list[list[Row]]) -> str:
    """Format the rows of all ranks: one line if the ranks agree, otherwise one for each result."""
    table: dict[str, dict[Row, list[int]]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            table.setdefault(row.name, {}).setdefault(row, []).append(rank)
    width, lines = max(20, *map(len, table)), []
    for findings in table.values():
        for row, of_ranks in findings.items():
            prefix = f"rank {format_ranges(of_ranks)}: " if len(findings) > 1 else ""
            lines.append(f"{row.name.ljust(width)} {row.state:<5} {prefix}{row.found}")
            if row.advice:
                lines.append(f"{' ' * width} ----> {row.advice}")
    return "\n".join(lines)


def format_ranges(numbers: list[int]) -> str:
    """Format ascending numbers as ranges: ``0-3,5``."""
    gaps = [(before, after) for before, after in pairwise(numbers) if after != before + 1]
    starts, ends = [numbers[0], *(after for _, after in gaps)], [*(before for before, _ in gaps), numbers[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def format_count(ranks: list[list[Row]]) -> str:
    """Format how many different rows pass, warn and fail."""
    rows = {row for rows in ranks for row in rows}
    return ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in ("pass", "warn", "fail"))
