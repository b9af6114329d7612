"""Files: read without running code, written completely or not at all, and locked for one run."""

import fcntl
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch

from .config import UserError

Content = dict[str, Any]  # What a file holds by name: a checkpoint or a part of one, or weights.


def read(path: Path) -> Content:
    """Read a checkpoint, or a file of weights, to the CPU; raises UserError if it is damaged."""
    try:
        if path.is_dir():
            raise OSError(
                f"{path} is sharded; this makes it a file of weights: "
                f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE"
            )
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        # A checkpoint is a zip archive with checksums, which torch.load does not verify.
        with zipfile.ZipFile(path) as archive:
            damaged_member = archive.testzip()
        if damaged_member is not None:
            raise ValueError(f"the checksum of {damaged_member} is wrong")
        # weights_only runs no code of a pickle; mmap reads the bytes of a tensor when it is used.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise  # The disk failed, and the file may be intact: it must not be set aside as damaged.
    except Exception as error:
        reason = str(error).split("WeightsUnpickler error: ")[-1].split("\n")[0]
        reason = reason or type(error).__name__
    raise UserError(f"{path} is not a readable checkpoint: {reason}")


def read_weights(path: Path) -> Content:
    """Return the weights in a file of any kind, by the names of the bare model."""
    content = read(path)
    # Other programs save weights under one of these keys, or nothing but weights.
    weights = content.get("model") or content.get("state_dict") or content
    # DistributedDataParallel and torch.compile put these in front of every name.
    prefixes = re.compile(r"^(module\.|_orig_mod\.)+")
    return {prefixes.sub("", name): value for name, value in weights.items()}


def list_checkpoints(folder: Path) -> list[Path]:
    """Return a folder's checkpoints, files (.pt) and folders (.dcp) but no pipes, oldest first."""
    pattern = re.compile(r"step-[0-9]{8,}\.(pt|dcp)")
    checkpoints = []
    for path in folder.glob("step-*"):
        if pattern.fullmatch(path.name) and (path.is_file() or path.suffix == ".dcp"):
            checkpoints.append(path)
    # The names have the order of the steps only as long as these are below 100,000,000.
    return sorted(checkpoints, key=lambda path: int(path.stem.removeprefix("step-")))


def digest(path: Path) -> str:
    """Return a checksum of a file's first MiB, and the file's size in bytes."""
    with open(path, "rb") as file:
        start = file.read(2**20)  # All of a large data set would take minutes at every start.
    return f"{zlib.crc32(start):08x} and {path.stat().st_size} bytes"


def write_atomically(path: Path, content: str | Callable[[BinaryIO], object]) -> None:
    """Write a text, or what ``content(file)`` writes, completely or not at all, even in a crash."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
            # A crash of the machine could otherwise leave the new name with half of the data.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written; is the disk full? {error}") from None
    # A name is data of its folder: the new name survives a crash once the folder is synced, too.
    folder = os.open(path.parent, os.O_RDONLY)
    with suppress(OSError):  # Some network file systems sync files alone.
        os.fsync(folder)
    os.close(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all its files."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def set_aside(path: Path, reason: str) -> None:
    """Rename a file or folder that cannot be read to ``*.damaged``, and print the reason."""
    damaged_path = f"{path}.damaged"
    # An earlier start may have left a folder of this name, which os.replace cannot overwrite.
    shutil.rmtree(damaged_path, ignore_errors=True)
    os.replace(path, damaged_path)
    getLogger(__name__).warning(f"{reason}; it is now {path.name}.damaged")


def lock_run_dir(run_dir: Path) -> int:
    """Keep other runs out of ``run_dir`` while the returned descriptor is open, even in a crash."""
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{run_dir} is in use by another run; wait, or give another") from None
    except OSError as error:
        # Some network file systems have no locks. The run continues without this protection.
        getLogger(__name__).warning(f"{run_dir} has no lock ({error.strerror}); use it alone")
    return descriptor
