"""Weights & Biases: the records of a run.

Without a key for the service, records are kept in ``run.dir``, and ``wandb sync`` sends them later.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from .config import UserError
from .distributed import derive_seed
from .files import write_atomically


class Tracker:
    """Sends the records of rank 0 to W&B; a resumed run continues its W&B run."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        """Continue the W&B run after ``step``; a run that starts at step 0 gets a new one."""
        self.has_failed = False
        # The next start finds the id of the W&B run here.
        id_file = run_dir / "wandb_id"
        if step == 0 or not id_file.exists():
            write_atomically(id_file, os.urandom(8).hex())
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            has_key = wandb.login(prompt=False, verify=False)
            # Without a key, records stay on the disk until `wandb sync` sends them.
            mode = "online" if has_key else "offline"
        earlier_folders = list(run_dir.glob("wandb/offline-run-*"))
        # A copy of run.dir has another path, and gets a W&B run of its own, with all records.
        run_id = f"{derive_seed(id_file.read_text(), str(run_dir.resolve())):x}"
        self.run = start_run(run_dir, run_id, mode)
        self.run.config.update(settings, allow_val_change=True)
        # The x axis of each split is its step, instead of the number of calls.
        for split in ("train", "validation"):
            self.run.define_metric(f"{split}/*", step_metric=f"{split}/step")
        # After a kill or a failure, W&B may lack the last records of metrics.jsonl. So all of them
        # are logged again, and `log` skips those that W&B has.
        self.sent_metrics = dict(self.run.summary)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            self.log(json.loads(line))
        # Offline, W&B does not know what earlier starts have logged, so the new folder has got all
        # records. `wandb sync` would send those of the earlier folders a second time.
        if mode == "offline":
            for folder in earlier_folders:
                shutil.rmtree(folder)

    def log(self, record: dict[str, Any]) -> None:
        """Send the numbers of a record, named such as ``train/loss``, unless W&B has them."""
        split = record.get("split", "train")
        # A resumed run repeats steps that the killed one has sent. W&B would keep both numbers.
        if record["step"] <= self.sent_metrics.get(f"{split}/step", -1):
            return
        numbers = {}
        for name, value in record.items():
            if isinstance(value, int | float):
                numbers[f"{split}/{name}"] = value
        self.try_to_send(self.run.log, numbers)

    def close(self) -> None:
        """Wait until W&B has sent everything."""
        self.try_to_send(self.run.finish)

    def try_to_send(self, send: Callable[..., object], *arguments: Any) -> None:
        """Call ``send``; after its first error, print a warning and call it no more."""
        # The run continues without its tracker, and does not wait for a server that is down.
        if self.has_failed:
            return
        try:
            send(*arguments)
        except Exception as error:
            self.has_failed = True
            advice = "the next start sends what it lacks"
            print(f"warning: W&B has failed ({error!r}); {advice}", file=sys.stderr)


def start_run(run_dir: Path, run_id: str, mode: Any) -> Any:
    """Start the W&B run with this id, or continue it; raises UserError if W&B cannot start."""
    project = os.environ.get("WANDB_PROJECT", "{{ cookiecutter.project_slug }}")
    quiet = wandb.Settings(console="off", silent=True)
    try:
        return wandb.init(
            project=project,
            id=run_id,
            name=run_dir.name,
            dir=str(run_dir),
            mode=mode,
            resume="allow",
            settings=quiet,
        )
    except wandb.Error as error:
        advice = "WANDB_MODE=offline works without a network"
        raise UserError(f"W&B cannot start: {error}; {advice}") from None
