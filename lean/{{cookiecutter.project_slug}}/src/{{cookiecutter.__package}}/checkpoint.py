"""Checkpoints: one file, written by rank 0, complete or absent, that loads into any PyTorch program.

    {"model": state_dict, "optimizer": {"state": {"stem.conv.weight": {"exp_avg": ...}, ...}},
     "progress": {"step": 440, "epoch": 20, "samples": 0}, "config": {...}, "dataset": {...}, "scaler": {...}}

It is the state of the whole model, so a run resumes under any strategy and on any number of ranks. It has no random
state: each step and each sample is seeded by its number.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Optimizer

from .config import Config, UserError
from .distributed import Process

if TYPE_CHECKING:
    from .parallel import Parallel

FIXED = ("run.seed", "data.global_batch_size")  # They decide which samples an epoch still has.


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0  # Optimizer steps done.
    epoch: int = 0  # Passes over the training set done.
    samples: int = 0  # Samples of the current epoch consumed, over all ranks.


class Checkpointer:
    """Saves and restores one run; ``save`` and ``restore`` are collectives."""

    def __init__(
        self, parallel: "Parallel", optimizer: Optimizer, lengths: list[int], config: Config, process: Process
    ) -> None:
        self.parallel, self.optimizer, self.config, self.process = parallel, optimizer, config, process
        self.folder, self.was_read_back = Path(config.run.dir) / "checkpoints", False
        digests = process.on_main(lambda: {name: digest(Path(path)) for name, path in config.files().items()})
        self.dataset = {"lengths": lengths, **digests}

    def save(self, progress: Progress) -> None:
        """Save the run as it is after ``progress.step`` steps."""
        self.parallel.average_buffers()
        model, state = self.parallel.full_state_dict(self.optimizer)
        content = {"model": model, "optimizer": {"state": state}, **self.header(progress)}
        self.process.on_main(lambda: self.write(content, progress.step))

    def header(self, progress: Progress) -> dict[str, Any]:
        """Return the part of a checkpoint that all ranks hold."""
        header = {"progress": asdict(progress), "config": self.config.to_dict(), "dataset": self.dataset}
        return header | {"scaler": self.parallel.scaler.state_dict()}

    def write(self, content: dict[str, Any], step: int) -> None:
        """Write a checkpoint; the first one of this start is read back, as a check that it can be."""
        for name in content["optimizer"]["state"]:  # Not buffers: a mask may hold inf.
            if not content["model"][name].isfinite().all():
                raise UserError(f"{name} is not finite after step {step}, which is not saved")
        path = self.folder / f"step-{step:08d}.pt"
        write_atomically(path, lambda file: torch.save(content, file))
        if not self.was_read_back:
            read(path)
            self.was_read_back = True

    def finish(self) -> None:
        """Wait until everything is written."""

    def prune(self, best_step: int | None) -> None:
        """Remove all checkpoints but the newest ``checkpoint.keep`` and the best one; on rank 0."""
        for path in list_checkpoints(self.folder)[: -self.config.checkpoint.keep]:
            if step_of(path) != best_step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def restore(self) -> tuple[Progress, list[str]]:
        """Resume from the newest checkpoint that can be read, or start from ``checkpoint.resume`` or ``model.weights``.

        Returns:
            How far the run had come, and the settings that have changed since then.
        """
        content: dict[str, Any] = {}

        def read_start() -> dict[str, Any]:
            content.update(self.read_start())
            return {name: part for name, part in content.items() if name not in ("model", "optimizer")}

        header = self.process.on_main(read_start)
        if "progress" in header:
            changes = compare(self.config, self.dataset, header)
            self.parallel.load_full_state_dict(
                content.get("model", {}), self.optimizer, content.get("optimizer", {}).get("state")
            )
            self.parallel.scaler.load_state_dict(header["scaler"] if self.parallel.scaler.is_enabled() else {})
            return Progress(**header["progress"]), changes
        if self.config.model.weights is not None:
            self.parallel.load_full_state_dict(content.get("model", {}))
        return Progress(), []

    def read_start(self) -> dict[str, Any]:
        """Return what the run starts from, empty if from nothing; on rank 0."""
        lock(Path(self.config.run.dir))
        resume, weights, found = self.config.checkpoint.resume, self.config.model.weights, list_checkpoints(self.folder)
        if found and resume == "never":
            raise UserError(f"checkpoint.resume is never, but there is {found[-1]}; give another run.dir")
        for path in reversed(found):
            try:
                return read(path)
            except UserError as error:
                print(f"{error}; it is now {path.name}.damaged", file=sys.stderr)
                path.rename(f"{path}.damaged")
        if resume not in ("auto", "never"):
            return read(Path(resume))
        return {"model": read_weights(Path(weights))} if weights is not None else {}


def compare(config: Config, dataset: dict[str, Any], header: dict[str, Any]) -> list[str]:
    """Return which settings changed; rejects another model, dataset, batch size or seed."""
    changes = []
    for name in dataset.keys() - {"model.weights"}:
        if dataset[name] != header["dataset"].get(name):
            raise UserError(f"dataset: {name} differ(s) from the checkpoint's; give the same data, or another run.dir")
    for section, values in config.to_dict().items():
        for key, value in values.items():
            name, saved = f"{section}.{key}", header["config"].get(section, {}).get(key)
            # Files are compared by their content.
            is_fixed = (section in ("model", "dataset") or name in FIXED) and name not in config.files()
            if is_fixed and value != saved:
                raise UserError(f"{name} is {value}, and {saved} in the checkpoint; give that, or another run.dir")
            if value != saved and name != "run.dir":
                changes.append(f"{name} from {saved} to {value}")
    return changes


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first: files (``.pt``) and sharded ones (``.dcp``)."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+\.(pt|dcp)", path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU, without running code from a file; one that cannot be read is a UserError."""
    try:
        if path.is_dir():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                dcp_to_torch_save(path, Path(folder, "full.pt"))
                return torch.load(Path(folder, "full.pt"), map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:  # torch.load does not verify the checksums.
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:  # A disk that fails is no damaged file.
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path} is not a readable checkpoint: {reason}") from None


def read_weights(path: Path) -> dict[str, Any]:
    """Return the weights in a checkpoint, in a file of a state_dict, or in a .safetensors file."""
    if path.suffix == ".safetensors":
        return load_file(path)
    content = read(path)
    for key in ("model", "state_dict"):
        content = content.get(key, content)
    for prefix in ("module.", "_orig_mod."):  # Added by DistributedDataParallel and torch.compile.
        content = {name.removeprefix(prefix): value for name, value in content.items()}
    return content


def export(path: Path, output: Path) -> None:
    """Write the weights of a checkpoint as a .safetensors file, for programs that have no PyTorch."""
    save_file({name: value.contiguous() for name, value in read(path)["model"].items()}, output)


def digest(path: Path) -> str:
    """Return a digest of a file: of its size, and of up to 1,024 blocks of 64 KiB all over it."""
    size = path.stat().st_size
    content = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(path, "rb") as file:
        for start in range(0, size, max(2**16, size // 1024)):
            file.seek(start)
            content.update(file.read(2**16))
    return content.hexdigest()


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it is complete or absent, even if the machine stops in the middle or the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # Makes the new name durable.
    os.close(folder)


def lock(run_dir: Path) -> None:
    """Keep other runs out of ``run_dir`` as long as this process lives."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{run_dir} is in use by another run; wait for it, or give another run.dir") from None
    except OSError as error:  # A file system without locks.
        print(f"{run_dir} cannot be locked ({error.strerror}); let no other run use it", file=sys.stderr)
