"""Checkpoints: one file, written by rank 0, complete or absent, that loads into any PyTorch program.

    {"model": state_dict, "optimizer": {"state": {"stem.conv.weight": {"exp_avg": ...}, ...}},
     "progress": {"step": 440, "epoch": 20, "samples": 0}, "config": {...}, "scaler": {...}}

It is the state of the whole model, for any strategy and number of ranks, and without random state: steps are seeded.
"""

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_map_only  # Private; optree has it.

from .config import Config, UserError
from .distributed import Process
from .files import digest, lock, set_aside, write_atomically


def read_on_main(read_content: Callable[[], dict[str, Any]], process: Process) -> dict[str, Any]:
    """Return what rank 0 reads; the other ranks get the part of it that is not large."""
    content: dict[str, Any] = {}

    def read_header() -> dict[str, Any]:
        content.update(read_content())
        stateful = {"stateful": {*content.get("optimizer", {}).get("state", {})}}  # Parameters, by name.
        return stateful | {name: part for name, part in content.items() if name not in ("model", "optimizer")}

    return process.on_main(read_header) | content


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first: files (``.pt``) and sharded ones (``.dcp``)."""
    found = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}\.(pt|dcp)", path.name))
    return sorted(found, key=lambda path: int(path.stem[5:]))


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU, without running code from a file."""
    try:
        if path.suffix == ".dcp" or (path / ".metadata").exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                dcp_to_torch_save(path, Path(folder, "full.pt"))
                sharded = torch.load(Path(folder, "full.pt"), map_location="cpu", weights_only=True)
            return sharded | json.loads((path / "header.json").read_text())
        if path.suffix == ".safetensors":
            return load_file(path)
        with zipfile.ZipFile(path) as archive:  # torch.load does not verify the checksums.
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # Read when it is loaded.
    except OSError:  # A disk that fails is no damaged file.
        raise
    except CheckpointException:  # It is no Exception.
        raise UserError(f"{path} is not a readable checkpoint: a part of it is damaged or missing") from None
    except Exception as error:
        reason = str(error).split("WeightsUnpickler error: ")[-1].split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable checkpoint: {reason}") from None


def read_weights(path: Path) -> dict[str, Any]:
    """Return the weights in a file of any kind, by their names before DistributedDataParallel and torch.compile."""
    content = (whole := read(path)).get("model") or whole.get("state_dict") or whole
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in content.items()}


class Checkpointer:
    """Saves and restores one run; all ranks call save, restore and finish together."""

    read = staticmethod(read)

    def __init__(self, config: Config, process: Process) -> None:
        """Read what the run starts from, before the model is built."""
        self.config, self.process = config, process
        self.folder = Path(config.run.dir) / "checkpoints"
        self.start = read_on_main(self.read_start, process)
        self.writer = ThreadPoolExecutor(1)
        self.pending: Any = None  # The checkpoint that is being written.

    def restore(self, parallel: Any, optimizer: Any, lengths: list[int]) -> tuple[int, list[str]]:
        """Load what was read; returns how many steps the run has taken, and the settings that have changed since."""
        self.parallel, self.optimizer, files = parallel, optimizer, self.config.files()
        self.trained = {p for group in optimizer.param_groups for p in group["params"]}
        if not any(self.process.all_gather(len(self.trained))):
            raise UserError("all parameters are frozen; leave some for the loss to change")
        digests = self.process.on_main(lambda: {f"content of {k}": digest(Path(v)) for k, v in files.items()})
        self.settings = asdict(self.config) | {"content": {"number of samples": lengths, **digests}}
        if "progress" not in self.start:
            if self.config.model.weights is not None:
                self.load(parallel, self.start)
            return 0, []
        changes, scaler = self.compare(self.start["config"]), parallel.scaler
        self.load(parallel, self.start, optimizer)
        for name, p in parallel.module.named_parameters():
            for key, v in optimizer.state.pop(p, {}).items():
                if name in self.start["stateful"]:  # Else, it never had a gradient; loading counts a step for it.
                    optimizer.state[p][key] = torch.empty_like(p).copy_(v) if getattr(v, "shape", 0) == p.shape else v
        scaler.load_state_dict(self.start["scaler"] or scaler.state_dict())
        return self.start["progress"]["step"], changes

    @staticmethod
    def load(parallel: Any, content: dict[str, Any], *optimizers: Any) -> None:
        """Load what ``read_on_main`` has returned, with the state of the optimizer if one is given."""
        parts = tree_map_only(Tensor, Tensor.contiguous, (content.pop("model", {}), content.pop("optimizer", {})))
        parallel.load_full_state_dict(parts[0], *optimizers, state=parts[1].get("state"))  # Sent as they lie in memory.

    def save(self, progress: dict[str, int]) -> None:
        """Copy the run after a ``step``, at an ``epoch`` and a number of its ``samples``; a thread writes the copy."""
        content = self.prepare(progress) | self.parallel.full_state_dict(self.optimizer)
        if self.process.rank == 0:
            is_copy = self.process.device.type != "cpu" and self.optimizer.defaults.get("fused")  # With all its state.
            self.pending = self.writer.submit(self.write, content if is_copy else deepcopy(content), progress["step"])

    def prepare(self, progress: dict[str, int]) -> dict[str, Any]:
        """Wait until the next checkpoint can be saved; returns the part of it that all ranks hold."""
        self.finish(raises=False)
        self.parallel.average_buffers()
        for name, p in self.parallel.module.named_parameters():
            if p.requires_grad and not (p in self.trained and p.sum().isfinite()):
                why = "not finite" if p in self.trained else "trained, but the optimizer lacked it at the start"
                raise UserError(f"step {progress['step']} is not saved: {name} is {why}")
        return {"progress": progress, "config": self.settings, "scaler": self.parallel.scaler.state_dict()}

    def write(self, content: dict[str, Any], step: int) -> None:
        """Write a checkpoint; the first one of a run is read back, as a check that it can be."""
        path = self.folder / f"step-{step:08d}.pt"
        write_atomically(path, lambda file: torch.save(content, file))
        if list_checkpoints(self.folder) == [path]:
            read(path)

    def finish(self, wait: bool = True, raises: bool = True) -> None:
        """Wait for the checkpoint that is being written; raise why it failed, or print that once."""
        if wait:  # However long rank 0 writes.
            self.process.on_main(lambda: self.pending and self.pending.exception() and None)
        if self.pending and (wait or self.pending.done()):
            error, self.pending = self.pending.exception(), None
            if error and raises:
                raise error
            if error and self.process.rank == 0:
                getLogger(__name__).error(f"error: {error}; the run continues, and saves again when due")

    def prune(self, best_first: list[int]) -> None:
        """Let rank 0 remove all complete checkpoints but the newest ``checkpoint.keep`` and the best one."""
        found = list_checkpoints(self.folder) if self.process.rank == 0 else []
        best = next((path for step in best_first for path in found if path.stem == f"step-{step:08d}"), None)
        if best:
            write_atomically(self.folder / "best", best.name)
        for path in {*found[: -self.config.checkpoint.keep]} - {best}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def compare(self, saved: dict[str, Any]) -> list[str]:
        """Return which settings changed; rejects another model or dataset, and what decides which samples are left."""
        ignored, changes = {*self.config.files(), "model.weights", "the content of model.weights", "run.dir"}, []
        for section, values in self.settings.items():
            for key, value in values.items():
                name = f"the {key}" if section == "content" else f"{section}.{key}"
                before = saved.get(section, {}).get(key, asdict(Config()).get(section, {}).get(key))
                if value == before or name in ignored:
                    continue
                if section in ("content", "dataset", "model") or name in ("run.seed", "data.global_batch_size"):
                    raise UserError(f"{name} is {value}, and {before} in the checkpoint; give that, or another run.dir")
                changes.append(f"{name} from {before} to {value}")
        return changes

    def read_start(self) -> dict[str, Any]:
        """Return the newest checkpoint that can be read, else that of ``checkpoint.resume``, else ``model.weights``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock(self.folder.parent)
        for path in self.folder.glob("*.tmp"):  # What a kill left, or a full disk.
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        resume, found = self.config.checkpoint.resume, list_checkpoints(self.folder)
        if found and resume == "never":
            raise UserError(f"checkpoint.resume is never, but there is {found[-1]}; give another run.dir")
        for path in reversed(found):
            try:
                return self.read(path)
            except UserError as error:
                set_aside(path, str(error))
        if damaged := [*self.folder.glob("step-*.damaged")]:
            raise UserError(f"{damaged[0]} and all others are damaged; give another run.dir")
        if resume not in ("auto", "never"):
            if "progress" in (content := self.read(Path(resume))):
                return content
            raise UserError(f"checkpoint.resume is {resume}, which holds no run; give weights as model.weights")
        weights = self.config.model.weights
        return {"model": read_weights(Path(weights))} if weights is not None else {}


def export(path: Path, output: Path) -> None:
    """Write the weights of a checkpoint as a .safetensors file, with the run's settings in its metadata."""
    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in read_weights(path).items()}
    settings = {"config": json.dumps(read(path).get("config"))}
    write_atomically(output, lambda file: file.write(save(weights, settings)))
