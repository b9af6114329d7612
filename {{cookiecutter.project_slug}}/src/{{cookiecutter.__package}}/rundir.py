"""The directory of a run: where it may start, its lock, what is written there and when it goes.

Imports no PyTorch, so that a command can be refused before anything is started.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from .config import Config, UserError, to_dict

PROJECT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "jsonargparse")


class DamagedError(UserError):
    """A checkpoint cannot be read; one before it may do."""


def checkpoint_folder(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.dir) / "checkpoints"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first: full ones are files, sharded ones are folders."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+\.(pt|dcp)", path.name))


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove what a killed write left, and all checkpoints but the ``keep`` newest and the best."""
    for path in folder.glob("step-*.tmp"):
        remove(path)
    for path in list_checkpoints(folder)[:-keep]:
        if path.stem != f"step-{best_step or 0:08d}":
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder first loses its name, so that half of one is never taken for a whole."""
    if path.is_dir():
        nameless = path.with_suffix(".old.tmp")
        shutil.rmtree(nameless, ignore_errors=True)
        shutil.rmtree(path.rename(nameless))
    else:
        path.unlink()


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill a file so that ``path`` is complete or absent, also if the machine stops in the middle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with disk_errors(temporary), open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Tell of a full disk: ``torch.save`` raises an error of its own then, behind which the system's is hidden."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from None
        raise


def publish(temporary: Path, path: Path) -> None:
    """Give a file or a folder that is complete its name."""
    os.replace(temporary, path)
    # The new name is an entry of the folder, which has to reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def find_start(config: Config, restarted: bool) -> list[Path]:
    """The checkpoints that a run may go on from, first choice first; none for a fresh start.

    Args:
        config: The run's settings.
        restarted: This very job has been started before, and goes on from what it saved then, whatever they say.

    Raises:
        UserError: if ``checkpoint.resume`` does not allow what is in ``run.dir``.
    """
    resume, saved = config.checkpoint.resume, list_checkpoints(checkpoint_folder(config))
    if resume == "auto" or (saved and restarted):
        return saved[::-1]
    newest = f"{config.run.dir} holds {saved[-1].name}" if saved else ""
    if resume == "never":
        if saved:
            raise UserError(f"{newest} and checkpoint.resume is never; give another run.dir")
        return []
    path = Path(resume)
    if not path.exists():
        raise UserError(f"checkpoint.resume is {resume}: no such file; give auto, never or the path of a checkpoint")
    if saved and path.resolve() != saved[-1].resolve():
        raise UserError(f"{newest} already; to start from {resume}, give another run.dir")
    return [path]


def is_restart() -> bool:
    """Whether a launcher or the cluster has started this process before, in this very job.

    One rank may have been started again because another one failed, and know nothing of it: ask all.
    """
    return any(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def take_run(config: Config, restarted: bool) -> list[Path]:
    """Take the run directory for this job, which holds it until its process ends.

    Returns:
        The checkpoints that the run may go on from, first choice first.

    Raises:
        UserError: if the directory is in use, or ``checkpoint.resume`` forbids it.
        OSError: if it cannot be written.
    """
    find_start(config, restarted)  # Refuses before anything is written.
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    return find_start(config, restarted)  # Whoever had the lock until now may have saved.


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
