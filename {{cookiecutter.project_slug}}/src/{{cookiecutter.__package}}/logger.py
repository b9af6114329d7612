"""What a run leaves but checkpoints: settings, provenance, and a JSON object per record in ``metrics.jsonl``."""

import json
import platform
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import profile, schedule, tensorboard_trace_handler

from .config import Config, UserError
from .distributed import Process
from .files import set_aside, write_atomically
#:: if file("tracker", "tracker.py") ::#
from .tracker import Tracker
#:: endif ::#


class Logger:
    """Writes records and prints them on rank 0; on others, its methods do nothing."""

    def __init__(self, config: Config, process: Process, step: int, total_steps: int, changes: list[str]) -> None:
        self.is_main, self.total_steps = process.rank == 0, total_steps
        self.erase = "\r\x1b[K" if self.is_main and sys.stdout and sys.stdout.isatty() else ""  # Of a terminal.
        self.evaluations: dict[int, dict[str, Any]] = {}  # By step.
        if not self.is_main:
            return
        self.run_dir = run_dir = Path(config.run.dir)
        write_atomically(run_dir / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
        write_provenance(run_dir / "provenance.json", process, step, changes)
        records = records_until(run_dir / "metrics.jsonl", step)
        self.evaluations = {r["step"]: r for r in records if r.get("event") == "eval"}
        self.print(f"{run_dir}: step {step} of {total_steps} on {process.world_size} rank(s), {process.device}")
        if process.device.type != "cpu":
            how = "full fp32, deterministic algorithms" if config.train.exact else "TF32, the fastest algorithms"
            self.print(f"{config.train.precision} (train.precision), {how} (train.exact)")
        self.print("".join(f"changed: {change}\n" for change in changes), end="")
        #:: if file("tracker", "tracker.py") ::#
        self.tracker = Tracker(run_dir, asdict(config), step)
        #:: endif ::#

    def log(self, *parts: dict[str, Any]) -> None:
        """Write a record, and print its numbers."""
        if not self.is_main:
            return
        record = {name: value for part in parts for name, value in part.items()}
        if len(record) < sum(map(len, parts)):
            raise UserError(f"the record {record} has two numbers of one name; rename that of task.py")
        with open(self.run_dir / "metrics.jsonl", "a") as file:  # Fails if run.dir was removed.
            file.write(json.dumps(record) + "\n")
        step, event = record["step"], record["event"]
        numbers = "  ".join(f"{name} {value:.5g}" for name, value in record.items() if isinstance(value, float))
        seconds = (self.total_steps - step) * record.get("seconds_per_step", 0)
        left = f"  {timedelta(seconds=round(seconds))} left" if seconds else ""
        self.print(f"{event:5}  step {step}/{self.total_steps}  {numbers}{left}")
        if event == "eval":
            self.evaluations[step] = record
        #:: if file("tracker", "tracker.py") ::#
        self.tracker.log(record)
        #:: endif ::#

    def best_steps(self, task: Any) -> list[int]:
        """Return the evaluated steps, the best ``Task.best_metric`` first, earlier ones first if equal."""
        values = {step: r[name] for step, r in self.evaluations.items() if r.get(name := task.best_metric) is not None}
        return sorted(values, key=values.__getitem__, reverse=task.higher_is_better)

    def print(self, text: str, end: str = "\n") -> None:
        """Print one line."""
        if self.is_main:
            with suppress(OSError):  # Nobody may read it; the records are in the file.
                print(self.erase + text, end=end, flush=True)
    #:: if file("tracker", "tracker.py") ::#

    def close(self) -> None:
        """Close the tracker."""
        if self.is_main:
            self.tracker.close()
    #:: endif ::#


def records_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the records up to ``step``, and drop the others, which a resumed run writes again."""
    lines, found = path.read_text(errors="replace").splitlines() if path.exists() else [], []
    for line in lines:
        with suppress(LookupError, RecursionError, TypeError, ValueError):
            found.append(((record := json.loads(line))["step"] <= step, record))
    if len(found) < len(lines):
        set_aside(path, f"{path} has a damaged line, of the best checkpoint perhaps", shutil.copy)
    records = [record for is_kept, record in found if is_kept]
    write_atomically(path, "".join(json.dumps(r) + "\n" for r in records))
    return records


def write_provenance(path: Path, process: Process, step: int, changes: list[str]) -> None:
    """Write where this start of the run came from, followed by that of its earlier starts."""
    last: dict[str, Any] = {}
    try:
        last = {**json.loads(path.read_text())} if path.exists() else {}
    except (RecursionError, TypeError, ValueError):
        set_aside(path, f"{path} is no JSON object")
    content: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    with suppress(OSError, subprocess.SubprocessError):  # Without a repository, nothing is known of the code.
        command = ["git", "-C", str(Path(__file__).parent), "status", "--branch", "--porcelain=v2"]
        status = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=30)
        content |= {"git_commit": status.split()[2], "git_dirty": status.splitlines()[-1][0] != "#"}
    content |= {"torch": torch.__version__, "host": platform.node(), "device": str(process.device)}
    content |= {"world_size": process.world_size, "step": step, "changes": changes}
    content["earlier"] = [last, *last.pop("earlier", [])] if last else []
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def profile_steps(config: Config, process: Process) -> Any:
    """Return a profiler of five steps, or what does nothing."""
    steps = schedule(skip_first=9, wait=0, warmup=1, active=5, repeat=1)
    write = tensorboard_trace_handler(config.run.dir, worker_name=f"rank{process.rank}")
    return profile(schedule=steps, on_trace_ready=write) if config.train.profile else nullcontext()
