"""What a run leaves besides checkpoints: its settings, its provenance, and ``metrics.jsonl``."""

import json
import platform
import shlex
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
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

Record = dict[str, Any]  # A line of metrics.jsonl: {"event": "train", "step": 10, ...}.


class Logger:
    """Writes and prints the records of a run on rank 0; on other ranks, its methods do nothing."""

    def __init__(
        self, config: Config, process: Process, step: int, total_steps: int, changes: list[str]
    ) -> None:
        """Continue the records of a run after ``step``; prints the ``changes`` of its settings."""
        self.is_main = process.rank == 0
        self.total_steps = total_steps
        self.evaluations = dict[int, Record]()  # The key is the evaluated step.
        if not self.is_main:
            return
        self.run_dir = Path(config.run.dir)
        settings = asdict(config)
        write_atomically(self.run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        write_provenance(self.run_dir / "provenance.json", process, step)
        for record in restore_records(self.run_dir / "metrics.jsonl", step):
            if record.get("event") == "eval":
                self.evaluations[record["step"]] = record
        self.print(
            f"{self.run_dir}: step {step} of {total_steps} on {process.world_size} rank(s), "
            f"{process.device}, in micro-batches of {config.data.micro_batch_size}; "
            f"train.precision {config.train.precision}"
        )
        for change in changes:
            self.print(f"changed: {change}")
        #:: if file("tracker", "tracker.py") ::#
        self.tracker = Tracker(self.run_dir, settings, step)
        #:: endif ::#

    def log(self, *parts: Record) -> None:
        """Write one record, merged from its parts, and print its numbers."""
        if not self.is_main:
            return
        record = Record()
        for part in parts:
            if record.keys() & part.keys():
                raise UserError(f"two of these have one name: {[*record, *part]}; rename task.py's")
            record.update(part)
        with open(self.run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        line = f"{record['event']:5}  step {record['step']}/{self.total_steps}"
        for name, value in record.items():
            if isinstance(value, float):
                line += f"  {name} {value:.5g}"
        self.print(line)
        if record["event"] == "eval":
            self.evaluations[record["step"]] = record
        #:: if file("tracker", "tracker.py") ::#
        self.tracker.log(record)
        #:: endif ::#

    def print(self, text: str) -> None:
        """Print one line on rank 0."""
        if self.is_main:
            with suppress(OSError):  # The reader of a pipe, such as `head`, may be gone.
                print(text, flush=True)

    def best_steps(self, task: Any) -> list[int]:
        """Return the evaluated steps, sorted by ``Task.best_metric`` with the best step first."""
        values = {}
        for step, record in self.evaluations.items():
            value = record.get(task.best_metric)
            # null stands for what is not finite, and a damaged record may hold anything.
            if isinstance(value, int | float):
                values[step] = value
        # Steps with equal values keep their order, earlier ones first, in reverse order too.
        return sorted(values, key=values.__getitem__, reverse=task.higher_is_better)
    #:: if file("tracker", "tracker.py") ::#

    def close(self) -> None:
        """Close the tracker."""
        if self.is_main:
            self.tracker.close()
    #:: endif ::#


def restore_records(path: Path, last_step: int) -> list[Record]:
    """Return the records up to ``last_step``; remove later ones, which will be written again."""
    path.touch()
    records = []
    is_damaged = False
    # Bytes that are no UTF-8 must not end the run: json.loads rejects their line.
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            if record["step"] <= last_step:
                records.append(record)
        except (LookupError, RecursionError, TypeError, ValueError):
            is_damaged = True
    if is_damaged:
        set_aside(path, f"{path} has a damaged line; the best evaluation may be lost")
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


def write_provenance(path: Path, process: Process, step: int) -> None:
    """Write where this start of the run came from; ``earlier`` has the starts before it."""
    earlier = []  # A damaged file is replaced.
    with suppress(OSError, ValueError):
        previous = json.loads(path.read_text())
        earlier = [previous, *previous.pop("earlier", [])]
    content = {
        "time": str(datetime.now(UTC)),
        "command": shlex.join(sys.argv),
        "torch": torch.__version__,
        "host": platform.node(),
        "device": str(process.device),
        "world_size": process.world_size,
        "step": step,
        "earlier": earlier,
    }
    command = ["git", "status", "--branch", "--porcelain=v2"]
    # Nothing is known of the commit without git, or outside of a repository.
    with suppress(OSError, subprocess.SubprocessError):
        # The first line is "# branch.oid COMMIT". Lines about changed files come last, without "#".
        lines = subprocess.check_output(
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True, timeout=30
        ).splitlines()
        content["git_commit"] = lines[0].split()[2]
        content["git_dirty"] = not lines[-1].startswith("#")
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def profile_steps(config: Config, process: Process) -> Any:
    """Return a profiler that writes a trace of five steps, or a context manager of None."""
    if not config.train.profile:
        return nullcontext()
    # The first nine steps compile and allocate memory, and the tenth warms the profiler up.
    steps = schedule(skip_first=9, wait=0, warmup=1, active=5, repeat=1)
    write_trace = tensorboard_trace_handler(config.run.dir, worker_name=f"rank{process.rank}")
    return profile(schedule=steps, on_trace_ready=write_trace)
