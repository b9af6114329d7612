"""The run directory before a run: which checkpoint it may resume from, and the lock that keeps other runs out."""

import errno
import fcntl
import os
import re
import sys
import time
from pathlib import Path

import yaml

from ..config import UserError

# The open lock file of each run directory that belongs to this process.
LOCKS: dict[Path, int] = {}


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first: full ones are files, sharded ones are folders.

    Rejects a file in place of their folder, which would be taken for a fresh start.
    """
    folder = run_dir / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; move it away, or give another run.dir")
    paths = folder.glob("step-*")
    return sorted(path for path in paths if re.fullmatch(r"step-\d+\.(pt|dcp)", path.name))


def find_resume_candidates(run_dir: Path, resume: str, restarted: bool) -> list[Path]:
    """Return the checkpoints that a run may resume from, first choice first; none for a fresh start.

    Rejects a directory whose content ``checkpoint.resume`` forbids. A ``restarted`` job always resumes what it saved,
    and so does a command that is repeated: the run in the directory started from the same path.
    """
    saved = list_checkpoints(run_dir)
    if resume == "auto" or (saved and (restarted or read_resume(run_dir) == resume != "never")):
        return saved[::-1]
    newest = f"{run_dir} holds {saved[-1].name}" if saved else ""
    if resume == "never":
        if saved:
            raise UserError(f"{newest} and checkpoint.resume is never; give another run.dir")
        return []
    path = Path(resume)
    if not path.exists():
        raise UserError(f"checkpoint.resume is {resume}: no such file; give auto, never or the path of a checkpoint")
    if path.suffix == ".safetensors":
        raise UserError(f"checkpoint.resume is {resume}, which has weights alone; start from them with --model.weights")
    if saved and path.resolve() != saved[-1].resolve():
        raise UserError(f"{newest} already; to start from {resume}, give another run.dir")
    return [path]


def read_resume(run_dir: Path) -> str | None:
    """Return the ``checkpoint.resume`` with which the run in a directory was started; None if that is unknown."""
    try:
        settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        resume: str = settings["checkpoint"]["resume"]
        return resume
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return None


def acquire_run_directory(run_dir: Path, resume: str, restarted: bool) -> list[Path]:
    """Create and lock the run directory, which then belongs to this process until it ends.

    Rejects a directory that is in use, or that ``find_resume_candidates`` rejects. Raises OSError if not writable.
    """
    find_resume_candidates(run_dir, resume, restarted)  # Rejects before anything is written.
    run_dir.mkdir(parents=True, exist_ok=True)
    lock(run_dir)
    return find_resume_candidates(run_dir, resume, restarted)  # The previous owner of the lock may have saved.


def lock(run_dir: Path, patience: float = 10.0) -> None:
    """Keep other runs out of ``run_dir`` as long as this process lives; rejects it if another run holds the lock.

    A POSIX record lock is released when its process ends in any way, and no child inherits it. A killed run needs a
    moment to end, so wait up to ``patience`` seconds for it. Some network filesystems have no locks.
    """
    descriptor = LOCKS[run_dir] = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise UserError(f"{run_dir} is in use by another run; wait for it, or give another run.dir") from None
            time.sleep(0.2)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            warning = "its filesystem has no locks, so nothing but you keeps a second run out of it"
            print(f"warning: {run_dir} is not locked ({error.strerror}): {warning}", file=sys.stderr)
            return


def check_run_directory(run_dir: Path) -> None:
    """Reject a run directory that was deleted or replaced since it was locked: a save would be lost with it."""
    if run_dir in LOCKS:
        path = run_dir / ".lock"
        if not path.exists() or path.stat().st_ino != os.fstat(LOCKS[run_dir]).st_ino:
            raise UserError(f"{run_dir} was deleted or replaced during the run, which cannot be saved there any more")
