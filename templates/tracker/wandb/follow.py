#:: extends "tracker/shared/follow.py" ::#
#:: block title ::#Weights & Biases, online if there is a key and otherwise into ``run.dir``#:: endblock ::#
#:: block imports ::#
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
#:: endblock ::#
#:: block service ::#
SERVICE = "wandb"


class Service:
    """The W&B run that has the run's id, with one row of its history for each step.

    Args:
        run_dir: It gets W&B's files, under ``wandb``, and its name is the run's.
        settings: The run's settings.
        provenance: What ``provenance.json`` holds.
    """

    def __init__(self, run_dir: Path, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_CACHE_DIR", str(run_dir / "wandb" / "cache"))
        import wandb

        self.wandb, self.run_dir, self.run_id = wandb, run_dir, provenance["run_id"]
        self.config = settings | {"provenance": provenance}
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        try:
            self.start(mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            say(f"warning: wandb cannot go online ({type(error).__name__}: {error}); recording offline")
            self.start("offline")
        self.known = dict(self.run.summary)
        self.first_row = self.row = self.run.step
        self.splits: set[str] = set()  # Of the row.

    def start(self, mode: Any) -> None:
        """Start the W&B run, or resume it; offline, it is recorded anew, because the records are all there."""
        earlier = self.run_dir.glob(f"wandb/offline-run-*-{self.run_id}")
        self.replaced = [*earlier] if mode == "offline" else []
        options: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "{{ cookiecutter.project_slug }}"),
            id=self.run_id,
            name=self.run_dir.name,
            dir=str(self.run_dir),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=self.config,
            allow_val_change=True,
            settings=self.wandb.Settings(**options, x_stats_pid=os.getppid()),  # Measures rank 0, not this program.
        )
        if self.run.resumed:  # With the settings that W&B had, which may have changed.
            self.run.config.update(self.config, allow_val_change=True)
        if mode == "offline":
            program, folder = Path(sys.executable).with_name("wandb"), Path(self.run.dir).parent
            say(f"wandb: recording offline; to upload it: {os.path.relpath(program)} sync {os.path.relpath(folder)}")

    def log(self, rows: Sequence[Row]) -> None:
        """Send the records that W&B does not have; it never changes a row before the last."""
        for split, step, values in rows:
            if step > self.known.get(f"{split}/step", self.first_row - 1):
                row = max(step, self.row)  # ``evaluate`` may add a record of an earlier step.
                if row > self.row or split in self.splits:
                    self.row, self.splits = max(row, self.row + 1), set()
                self.splits.add(split)
                self.run.log(values, step=self.row)

    def finish(self, outcome: str, files: Sequence[Path]) -> None:
        """Send files, and wait until everything is sent."""
        if self.splits or "curves" not in self.known:  # Otherwise W&B has the pictures of all records.
            images = {path.stem: self.wandb.Image(str(path)) for path in files if path.suffix == ".png"}
            self.run.log(images, step=self.row)
        for path in files:
            self.run.save(str(path), base_path=str(self.run_dir), policy="now")
        self.run.finish(exit_code=0 if outcome == "finished" else 1)
        for folder in self.replaced:  # Not earlier: until here, what they hold is nowhere else.
            shutil.rmtree(folder, ignore_errors=True)


def has_key() -> bool:
    """Return whether the environment or ``~/.netrc`` has a key of the W&B server."""
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return True
    with suppress(OSError, NetrcParseError):
        return netrc(os.environ.get("NETRC")).authenticators(server.partition("//")[2].partition("/")[0]) is not None
    return False
#:: endblock ::#
