"""What a run leaves besides checkpoints: settings, provenance, and one JSON object per record in ``metrics.jsonl``."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from .checkpoint import write_atomically
from .config import Config, UserError
from .distributed import Process

PROJECT = Path(__file__).parents[2]


class Logger:
    """Writes records and prints them on rank 0; on the other ranks, its methods do nothing."""

    def __init__(self, config: Config, process: Process, step: int, total_steps: int, changes: list[str]) -> None:
        self.is_main, self.total_steps = process.is_main, total_steps
        self.evaluations: dict[int, dict[str, Any]] = {}  # By step.
        if not self.is_main:
            return
        run_dir = Path(config.run.dir)
        write_text(run_dir / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        write_provenance(run_dir / "provenance.json", process, step, changes)
        for record in truncate(run_dir / "metrics.jsonl", step):
            if record["event"] == "eval":
                self.evaluations[record["step"]] = record
        self.file = open(run_dir / "metrics.jsonl", "a", buffering=1)
        self.bar = tqdm(total=total_steps, initial=step, unit="step", disable=not sys.stderr.isatty())
        self.print(f"{config.run.dir}: step {step} of {total_steps} on {process.world_size} rank(s), {process.device}")
        for change in changes:
            self.print(f"changed: {change}")
#:: include "tracker/" ~ cookiecutter.tracker ~ "/open.py" ignore missing ::#

    def log(self, record: dict[str, Any]) -> None:
        """Write a record, and print its numbers."""
        if not self.is_main:
            return
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        if record["event"] == "eval":
            self.evaluations[record["step"]] = record
        hidden = ("step", "epoch", "num_samples")
        numbers = {n: v for n, v in record.items() if isinstance(v, int | float) and n not in hidden}
        shown = "  ".join(f"{name} {value:.5g}" for name, value in numbers.items())
        self.print(f"{record['event']:5}  step {record['step']}/{self.total_steps}  {shown}")
        self.bar.update(record["step"] - self.bar.n)
#:: include "tracker/" ~ cookiecutter.tracker ~ "/log.py" ignore missing ::#

    def best_step(self, metric: str, higher_is_better: bool) -> int | None:
        """Return the step with the best value of a metric, the earliest of equal ones; None if there is none."""
        sign = -1 if higher_is_better else 1
        values = [(sign * r[metric], step) for step, r in self.evaluations.items() if r.get(metric) is not None]
        return min(values)[1] if values else None

    def print(self, text: str) -> None:
        """Print one line above the progress bar."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Close the files."""
        if self.is_main:
            self.bar.close()
            self.file.close()
#:: include "tracker/" ~ cookiecutter.tracker ~ "/close.py" ignore missing ::#


def truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the records after ``step``, which a resumed run writes again, and what a kill left unfinished.

    Returns:
        The other records.
    """
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
            if line.endswith("\n") and record["step"] <= step:
                records.append(record)
        except (ValueError, TypeError, KeyError):
            continue
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


def write_text(path: Path, text: str) -> None:
    """Write a text file, complete or not at all."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_provenance(path: Path, process: Process, step: int, changes: list[str]) -> None:
    """Write where this start of the run came from, with the same of earlier starts."""
    try:
        earlier = json.loads(path.read_text())
        earlier = [{k: v for k, v in earlier.items() if k != "earlier"}, *earlier["earlier"]]
    except (OSError, ValueError, KeyError, AttributeError):  # This is the first start, or the file is damaged.
        earlier = []
    content = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "step": step,
        "changes": changes,
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "numpy")},
        "host": platform.node(),
        "world_size": process.world_size,
        "device": torch.get_device_module(process.device).get_device_name() if process.device.type == "cuda" else "cpu",
        "earlier": earlier,
    }
    write_text(path, json.dumps(content, indent=2) + "\n")


def git(*arguments: str) -> str | None:
    """Return what git prints about this project; None without git or a repository."""
    try:
        command = ["git", "-C", str(PROJECT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def plot(run_dirs: Sequence[str], output: str) -> None:
    """Draw the losses and the metrics of one or several runs into one picture, a panel for each."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot needs matplotlib: pip install matplotlib") from None
    curves: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for run_dir in run_dirs:
        for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            for name, value in record.items():
                if isinstance(value, float):
                    runs = curves.setdefault((record["event"], name), {})
                    runs.setdefault(run_dir, []).append((record["step"], value))
    figure = Figure(figsize=(8, 2.5 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), squeeze=False).flat
    for axes, ((event, name), runs) in zip(panels, curves.items(), strict=True):
        for run_dir, points in runs.items():
            axes.plot(*zip(*points, strict=True), label=run_dir)
        axes.set(xlabel="step", ylabel=f"{event}: {name}")
        axes.legend()
    figure.savefig(output)
