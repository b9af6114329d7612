"""Checkpoints: one file of the whole model, complete or absent, that any PyTorch program can load.

    {"model": state_dict, "optimizer": {"state": {"stem.conv.weight": {"exp_avg": ...}, ...}},
     "progress": {"step": 440, "epoch": 20, "samples": 0}, "config": {...}, "scaler": {...}}
Every step seeds its own random numbers: no random state is saved."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; the package optree has the same.

from . import files
from .config import Config, UserError
from .distributed import Process
from .files import Content


def read_on_main(read_content: Callable[[], Content], process: Process) -> Content:
    """Return on rank 0 what ``read_content`` returns, and on the other ranks only its header."""
    content = Content()

    def read_header() -> Content:
        content.update(read_content())
        if "progress" not in content:
            return {}  # Weights alone have no header.
        return {key: content[key] for key in content.keys() - {"model", "optimizer"}}

    # The store passes the small header on. The content stays empty where it was not read.
    return content | process.on_main(read_header)


class Checkpointer:
    """Saves and restores one run. All ranks call ``restore``, ``save`` and ``wait`` together."""

    # Strategies that shard have a function of their own, which leaves the shards to load().
    read = staticmethod(files.read)

    def __init__(self, config: Config, process: Process) -> None:
        """Read what the run starts from, so that an error comes before the model is built."""
        self.config = config
        self.process = process
        self.folder = Path(config.run.dir) / "checkpoints"
        self.initial_content = read_on_main(self.read_initial_content, process)
        self.pending: Any = None  # The future of a write.

    def read_initial_content(self) -> Content:
        """Return a checkpoint to resume from, or initial weights, or an empty dictionary."""
        # This fails at a link to a disk that is not mounted, where a run would start anew.
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = files.lock_run_dir(self.folder.parent)
        for leftover in self.folder.glob("*.tmp"):
            files.remove(leftover)
        checkpoints = files.list_checkpoints(self.folder)
        resume = self.config.checkpoint.resume
        if checkpoints and resume == "never":
            raise UserError(
                f"checkpoint.resume is never, but there is {checkpoints[-1]}; give another run.dir"
            )
        for path in reversed(checkpoints):  # A PATH in checkpoint.resume comes last.
            try:
                return self.read(path)
            except UserError as error:
                files.set_aside(path, str(error))
        damaged = list(self.folder.glob("step-*.damaged"))
        if damaged:
            raise UserError(f"{damaged[0]} and all others are damaged; give another run.dir")
        if resume not in ("auto", "never"):
            content = self.read(Path(resume))
            if "progress" in content:
                return content
            raise UserError(
                f"checkpoint.resume is {resume}, which holds no run; give weights as model.weights"
            )
        if self.config.model.weights is not None:
            return {"model": files.read_weights(Path(self.config.model.weights))}
        return {}

    def restore(self, parallel: Any, optimizer: Optimizer, set_sizes: Any) -> tuple[int, list[str]]:
        """Load the initial content; returns the number of steps taken, and the changed settings."""
        self.parallel = parallel
        self.optimizer = optimizer
        self.trained_parameters = {
            parameter for group in optimizer.param_groups for parameter in group["params"]
        }
        self.settings = asdict(self.config)
        self.settings["content"] = {"number of samples": set_sizes}
        for setting, path in self.config.files().items():
            # A file of the same name may have another content when the run resumes.
            digest = self.process.on_main(partial(files.digest, Path(path)))
            self.settings["content"][f"content of {setting}"] = digest
        source = Path(__file__).parent.glob("*.py")
        self.settings["code"] = {path.name: files.digest(path) for path in source}
        content = self.initial_content
        if "progress" not in content:
            if self.config.model.weights is not None:
                self.load(parallel, content)
            return 0, []
        changes = self.compare_settings(content["config"])
        self.load(parallel, content, optimizer)
        for group in optimizer.param_groups:
            group.update(content.get("numbers", {}))  # Those of begin_save().
        if content["scaler"]:  # The state is empty unless the run scaled its loss, as fp16 does.
            parallel.scaler.load_state_dict(content["scaler"])
        return content["progress"]["step"], changes

    @staticmethod
    def load(parallel: Any, content: Content, optimizer: Optimizer | None = None) -> None:
        """Load what ``read_on_main`` returned into the model, and into the optimizer if given."""
        # The tensors leave the content, so that their memory is free after they were loaded.
        weights = content.pop("model", {})
        optimizer_state = content.pop("optimizer", {}).get("state", {})
        parallel.load_full_state_dict(weights, optimizer, optimizer_state)

    def compare_settings(self, saved_settings: Content) -> list[str]:
        """Return which settings changed; raises UserError if it is one that a run has to keep."""
        # A change here would give weights another meaning, or the rest of the epoch other samples.
        fixed_sections = {"content", "dataset", "model"}
        fixed_settings = {"run.seed", "data.global_batch_size"}
        # A file or run.dir may have moved, and a resumed run does not read the initial weights.
        ignored = {*self.config.files(), "run.dir", "model.weights", "content of model.weights"}
        defaults = asdict(Config())
        changes = []
        for section, settings in self.settings.items():
            for key, value in settings.items():
                name = key if section in ("content", "code") else f"{section}.{key}"
                # An older checkpoint lacks newer settings, whose defaults held. JSON has no tuples.
                saved_value = saved_settings.get(section, {}).get(
                    key, defaults.get(section, {}).get(key)
                )
                if json.dumps(value) == json.dumps(saved_value) or name in ignored:
                    continue
                if section in fixed_sections or name in fixed_settings:
                    raise UserError(
                        f"{name} is {value}, and {saved_value} in the checkpoint; "
                        "give that, or another run.dir"
                    )
                changes.append(f"{name} from {saved_value} to {value}")
        return changes

    def save(self, progress: dict[str, int]) -> Path:
        """Copy the state of the run, and return the path to which a thread writes the copy."""
        path = self.folder / f"step-{progress['step']:08d}.pt"
        content = self.begin_save(progress) | self.parallel.full_state_dict(self.optimizer)
        if self.process.rank != 0:
            return path
        self.pending = self.process.writer.submit(self.write, content, path)
        return path

    def begin_save(self, progress: dict[str, int]) -> Content:
        """Wait, check the weights, average buffers, and return what is equal on all ranks."""
        self.wait_for_writers()
        module = self.parallel.module
        trained_shards = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:  # A frozen one may be a mask, and hold infinity.
                if parameter not in self.trained_parameters:
                    # A resumed run would not train it: it builds its optimizer at the start.
                    raise UserError(
                        f"step {progress['step']} is not saved: "
                        f"{name} is trained, but the optimizer lacked it at the start"
                    )
                # A rank that finds infinity in its shards ends all: nothing has to be sent.
                is_sharded = hasattr(parameter, "to_local")
                trained_shards.append(parameter.to_local() if is_sharded else parameter)
        if not nn.utils.get_total_norm(trained_shards).isfinite():
            raise UserError(f"step {progress['step']} is not saved: weights are not finite")
        self.parallel.average_buffers()
        for name, buffer in module.named_buffers():
            if buffer.isnan().any():  # A mask may hold infinity.
                raise UserError(f"step {progress['step']} is not saved: {name} has NaN")
        # Some optimizers, such as Prodigy, keep numbers in their groups. The settings have others.
        numbers = {}
        for key, default in self.optimizer.defaults.items():
            if isinstance(default, int | float) and not hasattr(self.config.optim, key):
                values = {group[key] for group in self.optimizer.param_groups}
                if len(values) == 1 and values != {default}:
                    numbers[key] = values.pop()
        return {
            "progress": progress,
            "config": self.settings,
            "scaler": self.parallel.scaler.state_dict(),
            "numbers": numbers,
        }

    def write(self, content: Content, path: Path) -> None:
        """Write a checkpoint, and check that a run's first one can be read."""
        files.write_atomically(path, lambda file: torch.save(content, file))
        # torch.save accepts what weights_only rejects, such as NumPy's numbers: reading shows it.
        if files.list_checkpoints(self.folder) == [path]:
            files.read(path)

    def wait_for_writers(self, raises: bool = False) -> None:
        """Wait until neither rank 0 nor this rank writes; print or raise why a write failed."""

        def wait_for_thread() -> None:
            if self.pending:
                self.pending.exception()  # This waits, and raises nothing.
            # After `mv`, run.dir may be another run's, and this one would write into it.
            if not os.path.samefile(self.lock, self.folder.parent / ".lock"):
                raise UserError(f"{self.folder.parent} was moved, and is another run's now")

        # A collective would time out while rank 0 writes. In a sharded save, each rank writes.
        self.process.on_main(wait_for_thread)
        error = self.pending and self.pending.exception()
        self.pending = None
        if error and raises:
            raise error
        if error and self.process.rank == 0:
            getLogger(__name__).error(f"error: {error}; the run continues and saves again when due")

    def prune(self, best_first: list[int]) -> None:
        """Let rank 0 remove all checkpoints but the newest ``checkpoint.keep`` and the best."""
        if self.process.rank != 0:
            return
        checkpoints = files.list_checkpoints(self.folder)
        kept = set(checkpoints[-self.config.checkpoint.keep :])
        paths = {path.stem: path for path in checkpoints}
        names = [f"step-{step:08d}" for step in best_first]
        # A checkpoint that could not be written is missing; then, the next best is kept.
        saved = [paths[name] for name in names if name in paths]
        best_file = self.folder / "best"
        if best_file.is_file():
            # Another process may read the previous best now. One whose record is lost stays best.
            previous = self.folder / best_file.read_text()
            kept.add(previous)
            if previous in checkpoints and previous.stem not in names:
                saved = [previous]
        if saved:
            files.write_atomically(best_file, saved[0].name)
            kept.add(saved[0])
        for path in checkpoints:
            if path not in kept:
                files.remove(path)


def copy_state(module: nn.Module, optimizer: Optimizer, copy: Any) -> Content:
    """Return weights and optimizer state by name, with a copy of each tensor."""
    state = {}
    for name, parameter in module.named_parameters():
        if parameter in optimizer.state:  # A parameter that never had a gradient has no state.
            state[name] = optimizer.state[parameter]
    content = {"model": module.state_dict(), "optimizer": {"state": state}}
    return tree_map_only(Tensor, copy, content)


def load_parameter_state(optimizer: Optimizer, parameter: Tensor, state: Content) -> None:
    """Give a parameter its saved optimizer state; the optimizer itself would change its types."""
    # Steps are counted on the CPU, unless one of these options says that the device does.
    device_counts = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for key, value in state.items():
        if isinstance(value, Tensor):
            moves = key != "step" or device_counts
            value = value.to(parameter.device if moves else "cpu", copy=True)  # Not the file's.
        optimizer.state[parameter][key] = value


def export(path: Path, output: Path) -> None:
    """Write a checkpoint's weights to a .safetensors file, with the settings in its metadata."""
    weights = {}
    for name, value in files.read_weights(path).items():
        # The format rejects tensors that are not contiguous, or share memory, as tied ones do.
        if isinstance(value, Tensor):  # A module's extra state may be anything.
            weights[name] = value.clone(memory_format=torch.contiguous_format)
    metadata = {"config": json.dumps(files.read(path).get("config"))}
    content = safetensors.torch.save(weights, metadata)
    files.write_atomically(output, lambda file: file.write(content))
