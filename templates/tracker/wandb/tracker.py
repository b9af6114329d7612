"""Weights & Biases: the records of a run, sent if there is a key; without one, ``wandb sync`` sends them later.

W&B keeps what it got first. Each start sends what it lacks of ``metrics.jsonl``, after a kill or a failure.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import wandb

from .config import UserError
from .files import write_atomically


class Tracker:
    """Sends what rank 0 logs; a run that resumes from a ``step`` above 0 is the same one for W&B, by its id."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        path, offline_runs = run_dir / "wandb_id", [*run_dir.glob("wandb/offline-run-*")]
        if step == 0 or not path.exists():
            write_atomically(path, lambda file: file.write(os.urandom(8).hex().encode()))
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        options: dict[str, Any] = {"id": path.read_text(), "name": run_dir.name, "dir": str(run_dir), "mode": mode}
        options["project"] = os.environ.get("WANDB_PROJECT", "{{ cookiecutter.project_slug }}")
        try:
            self.run = wandb.init(**options, resume="allow", settings=wandb.Settings(console="off", silent=True))
        except wandb.Error as error:
            raise UserError(f"W&B cannot start: {error}; WANDB_MODE=offline works without a network") from None
        self.run.config.update(settings, allow_val_change=True)
        for split in ("train", "validation"):
            self.run.define_metric(f"{split}/*", step_metric=f"{split}/step")
        self.known, self.has_failed = dict(self.run.summary), False
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            self.log(json.loads(line))
        for folder in offline_runs if mode == "offline" else []:
            shutil.rmtree(folder)  # The new one has its records.

    def log(self, record: dict[str, Any]) -> None:
        """Send the numbers of a record, unless W&B has them."""
        split = record.get("split", "train")
        if record["step"] > self.known.get(f"{split}/step", -1):
            numbers = {f"{split}/{name}": value for name, value in record.items() if isinstance(value, int | float)}
            self.attempt(lambda: self.run.log(numbers))

    def close(self) -> None:
        """Wait until everything is sent."""
        self.attempt(self.run.finish)

    #:: set service = "W&B" ::#
    #:: filter indent(4, true) ::#
    #:: include "tracker/shared/attempt.py" ::#
    #:: endfilter ::#
