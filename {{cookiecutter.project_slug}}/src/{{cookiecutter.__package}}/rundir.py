"""The directory of a run: where it may start, its lock, ``config.yaml`` and ``provenance.json``.

Imports no PyTorch, so that a command can be refused before anything is started.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from .config import Config, UserError, to_dict

PROJECT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "jsonargparse")


def checkpoint_folder(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.dir) / "checkpoints"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name))


def find_start(config: Config) -> list[Path]:
    """The checkpoints that a run may go on from, first choice first; none for a fresh start.

    Raises:
        UserError: if ``checkpoint.resume`` does not allow what is in ``run.dir``.
    """
    resume, saved = config.checkpoint.resume, list_checkpoints(checkpoint_folder(config))
    if resume == "auto":
        return saved[::-1]
    newest = f"{config.run.dir} holds {saved[-1].name}" if saved else ""
    if resume == "never":
        if saved:
            raise UserError(f"{newest} and checkpoint.resume is never; give another run.dir")
        return []
    path = Path(resume)
    if not path.is_file():
        raise UserError(f"checkpoint.resume is {resume}: no such file; give auto, never or the path of a checkpoint")
    if saved and path.resolve() != saved[-1].resolve():
        raise UserError(f"{newest} already; to start from {resume}, give another run.dir")
    return [path]


def take_run(config: Config) -> list[Path]:
    """Take the run directory for this job, which holds it until its process ends.

    Returns:
        The checkpoints that the run may go on from, first choice first.

    Raises:
        UserError: if the directory is in use, or ``checkpoint.resume`` forbids it.
        OSError: if it cannot be written.
    """
    find_start(config)  # Refuses before anything is written.
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    return find_start(config)  # Whoever had the lock until now may have saved.


def sign_run(config: Config, world_size: int, device: str) -> None:
    """Say in the run directory what the job is: its settings and where it came from."""
    folder = Path(config.run.dir)
    replace_text(folder / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
    write_provenance(folder / "provenance.json", world_size, device)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it is there as a whole, old or new, at any moment."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def lock(folder: Path, patience: float = 10.0) -> None:
    """Keep other jobs out of ``folder`` while this process lives.

    A POSIX record lock ends with its process, however that ends, and no child inherits it.

    Raises:
        UserError: if another job still has it after ``patience`` seconds (a killed one needs a moment to go).
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    give_up = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > give_up:
                os.close(descriptor)
                raise UserError(f"{folder} is in use by another run; wait for it, or give another run.dir") from None
            time.sleep(0.2)


def write_provenance(path: Path, world_size: int, device: str) -> None:
    """Say where this run came from. A run that goes on keeps what was said of its earlier starts, newest first."""
    earlier: list[Any] = []
    if path.exists():
        last = json.loads(path.read_text(encoding="utf-8"))
        earlier = [last, *last.pop("earlier", [])]
    content = describe(world_size, device) | {"earlier": earlier}
    replace_text(path, json.dumps(content, indent=2) + "\n")


def describe(world_size: int, device: str) -> dict[str, Any]:
    """Everything that one needs to know to repeat a run, beside its settings."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", __package__ or "", *sys.argv[1:]]),
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if (status := git("status", "--porcelain")) is None else bool(status),
        "template": template(),
        "python": sys.version.split()[0],
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "world_size": world_size,
        "device": device,
    }


def git(*words: str) -> str | None:
    """What git says of this project; None where there is no git or no repository."""
    try:
        command = ["git", "-C", str(PROJECT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def template() -> dict[str, Any] | None:
    """The template's version and the answers that made this project, from ``pyproject.toml``."""
    path = PROJECT / "pyproject.toml"
    if not path.is_file():
        return None
    return tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("ddp-template")
