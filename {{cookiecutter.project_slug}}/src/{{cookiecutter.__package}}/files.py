"""Files: written whole or not at all, set aside if damaged, and the lock of a run's directory."""

import fcntl
import os
import shutil
import zlib
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import BinaryIO

from .config import UserError


def digest(path: Path) -> str:
    """Return a digest of a file: of its first MiB, and its size."""
    with open(path, "rb") as file:
        return f"{zlib.crc32(file.read(2**20)):08x} and {path.stat().st_size} bytes"


def write_atomically(path: Path, content: str | Callable[[BinaryIO], object]) -> None:
    """Write a file so that it is complete or absent, even if the machine stops in the middle or the disk is full."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode()) if isinstance(content, str) else content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written; is the disk full? {error}") from None
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # Makes the new name durable.
    os.close(folder)


def set_aside(path: Path, reason: str, move: Callable[[Path, str], object] = os.replace) -> None:
    """Rename what cannot be read, and warn of it."""
    shutil.rmtree(new := f"{path}.damaged", ignore_errors=True)  # Of an earlier start.
    move(path, new)
    getLogger(__name__).warning(f"{reason}; it is now {path.name}.damaged")


def lock(run_dir: Path) -> None:
    """Keep other runs out of ``run_dir`` as long as this process lives."""
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{run_dir} is in use by another run; wait for it, or give another run.dir") from None
    except OSError as error:  # A file system without locks.
        getLogger(__name__).warning(f"{run_dir} cannot be locked ({error.strerror}); let no other run use it")
