"""What a run leaves but checkpoints: settings, provenance, and one JSON object per record in ``metrics.jsonl``."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from .checkpoint import write_atomically
from .config import Config
from .distributed import Process
#:: if file("tracker", "tracker.py") ::#
from .tracker import Tracker
#:: endif ::#


class Logger:
    """Writes records and prints them on rank 0; on the other ranks, its methods do nothing."""

    def __init__(self, config: Config, process: Process, step: int, total_steps: int, changes: list[str]) -> None:
        self.is_main, self.total_steps = process.rank == 0, total_steps
        self.evaluations: dict[int, dict[str, Any]] = {}  # By step.
        if not self.is_main:
            return
        run_dir = Path(config.run.dir)
        write_text(run_dir / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
        write_provenance(run_dir / "provenance.json", process, step, changes)
        records = drop_records_after(run_dir / "metrics.jsonl", step)
        self.evaluations = {record["step"]: record for record in records if record["event"] == "eval"}
        self.file = open(run_dir / "metrics.jsonl", "a", buffering=1)
        self.print(f"{run_dir}: step {step} of {total_steps} on {process.world_size} rank(s), {process.device}")
        for change in changes:
            self.print(f"changed: {change}")
        #:: if file("tracker", "tracker.py") ::#
        self.tracker = Tracker(run_dir, asdict(config), step)
        #:: endif ::#

    def log(self, record: dict[str, Any]) -> None:
        """Write a record, and print its numbers."""
        if not self.is_main:
            return
        self.file.write(json.dumps(record) + "\n")
        step, event = record["step"], record["event"]
        numbers = "  ".join(f"{name} {value:.5g}" for name, value in record.items() if isinstance(value, float))
        self.print(f"{event:5}  step {step}/{self.total_steps}  {numbers}")
        if event == "eval":
            self.evaluations[step] = record
        #:: if file("tracker", "tracker.py") ::#
        self.tracker.log(record)
        #:: endif ::#

    def best_step(self, metric: str, higher_is_better: bool) -> int:
        """Return the step with the best value of a metric, the earliest of equal ones; 0 if there is none."""
        sign = -1 if higher_is_better else 1
        values = [(sign * r[metric], step) for step, r in self.evaluations.items() if r.get(metric) is not None]
        return min(values, default=(0, 0))[1]

    def print(self, text: str) -> None:
        """Print one line."""
        if self.is_main:
            print(text, flush=True)
    #:: if file("tracker", "tracker.py") ::#

    def close(self) -> None:
        """Close the tracker."""
        if self.is_main:
            self.tracker.close()
    #:: endif ::#


def drop_records_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop records after ``step``, which a resumed run writes again, and an unfinished line; returns the others."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    records = [record for record in records if record["step"] <= step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


def write_provenance(path: Path, process: Process, step: int, changes: list[str]) -> None:
    """Write where this start of the run came from, followed by the same of its earlier starts."""
    last = json.loads(path.read_text()) if path.exists() else {}
    content: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    content |= {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    content |= {"torch": torch.__version__, "host": platform.node(), "device": str(process.device)}
    content |= {"world_size": process.world_size, "step": step, "changes": changes}
    content["earlier"] = [last, *last.pop("earlier")] if last else []
    write_text(path, json.dumps(content, indent=2) + "\n")


def git(*arguments: str) -> str | None:
    """Return what git prints about this project; None without git or a repository."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_text(path: Path, text: str) -> None:
    """Write a text file, complete or not at all."""
    write_atomically(path, lambda file: file.write(text.encode()))


def plot(run_dirs: Sequence[str], output: str) -> None:
    """Draw the numbers in the records of one or several runs into one picture, a panel for each name."""
    from matplotlib.figure import Figure  # Takes a second to import.

    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run_dir in run_dirs:
        for record in map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines()):
            for name, value in record.items():
                if isinstance(value, float):
                    runs = curves.setdefault(f"{record['event']}: {name}", {})
                    runs.setdefault(run_dir, []).append((record["step"], value))
    figure = Figure(figsize=(8, 2.5 * len(curves)), layout="constrained")
    for axes, (name, runs) in zip(figure.subplots(len(curves), squeeze=False).flat, curves.items(), strict=True):
        for run_dir, points in runs.items():
            axes.plot(*zip(*points, strict=True), label=run_dir)
        axes.set(xlabel="step", ylabel=name)
        axes.legend()
    figure.savefig(output)
