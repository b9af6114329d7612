"""``metrics.jsonl``: reading it, and truncating it when a run resumes."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from ..runtime import replace_text


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of a metrics file in order, and whether it is intact: all its lines are records.

    A last line without its end was left by a killed run; it is no record, and no damage.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    complete = [line for line in lines if line.endswith(b"\n")]
    records = [record for record in map(parse, complete) if record is not None]
    return records, len(records) == len(complete)


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of one line, or None if it is something else."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)  # NaN and inf are no JSON.
    except (ValueError, RecursionError):  # It is no JSON, or no text.
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    is_record = is_record and isinstance(record.get("event"), str)
    return record if is_record else None


def format_record(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON, which has no inf or NaN: they become null."""
    is_bad = {name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({name: None if name in is_bad else value for name, value in record.items()}, allow_nan=False)


def truncate_metrics(path: Path, step: int, evaluated_step: int) -> None:
    """Drop the records that a run writes again; set a damaged file aside.

    They are those after ``step``, which it resumes from, and evaluations after ``evaluated_step``.
    """
    records, is_intact = read_metrics(path)
    if not is_intact:
        set_aside(path)
    last = {"eval": evaluated_step}
    kept = [record for record in records if record["step"] <= last.get(record["event"], step)]
    replace_text(path, "".join(format_record(record) + "\n" for record in kept))


def set_aside(path: Path) -> None:
    """Rename a damaged file, and print that."""
    damaged = path.with_name(f"{path.name}.damaged")
    path.replace(damaged)
    print(f"{path} is damaged; it is now {damaged.name}", file=sys.stderr)


def append_record(record: dict[str, Any], run_dir: str) -> None:
    """Print a record as one line of JSON; if a run directory is given, also append it to its metrics."""
    line = format_record(record)
    print(line)
    if run_dir:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with open(Path(run_dir) / "metrics.jsonl", "a", encoding="utf-8") as metrics:
            metrics.write(line + "\n")
