"""Checkpoints: one file of the whole model, complete or absent, that any PyTorch program can load.

    {"model": state_dict, "optimizer": {"state": {"stem.conv.weight": {"exp_avg": ...}, ...}},
     "progress": {"step": 440, "epoch": 20, "samples": 0}, "config": {...}, "scaler": {...}}

Random states are not saved, because every step seeds its own random numbers.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from logging import getLogger
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; the package optree has the same.

from . import files
from .config import Config, UserError
from .distributed import Process


def read_on_main(read_content: Callable[[], dict[str, Any]], process: Process) -> dict[str, Any]:
    """Return on rank 0 what ``read_content`` returns, and on the other ranks only its header."""
    content: dict[str, Any] = {}

    def read_header() -> dict[str, Any]:
        content.update(read_content())
        optimizer_state = content.get("optimizer", {}).get("state", {})
        header = {"parameters_with_state": set(optimizer_state)}
        for name, part in content.items():
            # A sharded checkpoint has no "optimizer" here, but its own "parameters_with_state".
            if name not in ("model", "optimizer"):
                header[name] = part
        return header

    # The store passes the small header on. The content stays empty where it was not read.
    header = process.on_main(read_header)
    return content | header


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
        # A thread writes while training continues; `with writer` waits for it even after a failure.
        self.writer = ThreadPoolExecutor(max_workers=1)
        # The save that goes on, or one that has ended and whose error was not read yet.
        self.pending: Future[None] | None = None

    def read_initial_content(self) -> dict[str, Any]:
        """Return a checkpoint to resume from, or initial weights, or an empty dictionary."""
        # mkdir fails at a link to an unmounted disk, where the run would otherwise start anew.
        self.folder.mkdir(parents=True, exist_ok=True)
        files.lock_run_dir(self.folder.parent)
        for leftover in self.folder.glob("*.tmp"):
            files.remove(leftover)
        checkpoints = files.list_checkpoints(self.folder)
        resume = self.config.checkpoint.resume
        if checkpoints and resume == "never":
            conflict = f"checkpoint.resume is never, but there is {checkpoints[-1]}"
            raise UserError(f"{conflict}; give another run.dir")
        for path in reversed(checkpoints):
            try:
                return self.read(path)
            except UserError as error:
                files.set_aside(path, str(error))
        # A run whose checkpoints are all damaged must not start anew unnoticed.
        damaged = list(self.folder.glob("step-*.damaged"))
        if damaged:
            raise UserError(f"{damaged[0]} and all others are damaged; give another run.dir")
        if resume not in ("auto", "never"):
            content = self.read(Path(resume))
            if "progress" in content:
                return content
            problem = f"checkpoint.resume is {resume}, which holds no run"
            raise UserError(f"{problem}; give weights as model.weights")
        if self.config.model.weights is not None:
            return {"model": files.read_weights(Path(self.config.model.weights))}
        return {}

    def restore(self, parallel: Any, optimizer: Optimizer, set_sizes: Any) -> tuple[int, list[str]]:
        """Load the initial content; returns the number of steps taken, and the changed settings."""
        self.parallel = parallel
        self.optimizer = optimizer
        self.trained_parameters = set[Tensor]()
        for group in optimizer.param_groups:
            self.trained_parameters.update(group["params"])
        # Some ranks may train nothing, if all of their parameters are frozen.
        if not any(self.process.all_gather(len(self.trained_parameters))):
            raise UserError("all parameters are frozen; leave some for the loss to change")
        # A file of the same name may have another content when the run resumes.
        digests = self.process.on_main(lambda: files.digest_files(self.config.files()))
        self.settings = asdict(self.config)
        self.settings["content"] = {"number of samples": set_sizes, **digests}
        content = self.initial_content
        if "progress" not in content:
            if self.config.model.weights is not None:
                self.load(parallel, content)
            return 0, []
        changes = self.compare_settings(content["config"])
        self.load(parallel, content, optimizer)
        self.repair_optimizer_state()
        # The state is empty unless the saved run scaled its loss, as fp16 requires.
        if content["scaler"]:
            parallel.scaler.load_state_dict(content["scaler"])
        return content["progress"]["step"], changes

    @staticmethod
    def load(parallel: Any, content: dict[str, Any], optimizer: Optimizer | None = None) -> None:
        """Load what ``read_on_main`` returned into the model, and into the optimizer if given."""
        # The tensors leave the content, so that their memory is free after they were loaded.
        state = {
            "model": content.pop("model", {}),
            "optimizer": content.pop("optimizer", {}),
        }
        # load_full_state_dict sends raw memory: channels_last would arrive permuted.
        state = tree_map_only(Tensor, Tensor.contiguous, state)
        parallel.load_full_state_dict(state["model"], optimizer, state["optimizer"].get("state"))

    def repair_optimizer_state(self) -> None:
        """Undo what loading has changed in the optimizer's state beyond its values."""
        for name, parameter in self.parallel.module.named_parameters():
            if name not in self.initial_content["parameters_with_state"]:
                # Loading has created a state here too, whose step count AdamW would go on from.
                self.optimizer.state.pop(parameter, None)
                continue
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                # A fused optimizer requires the memory layout of its parameter.
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter).copy_(value)

    def compare_settings(self, saved_settings: dict[str, Any]) -> list[str]:
        """Return which settings changed; raises UserError if it is one that a run has to keep."""
        # A change here would give weights another meaning, or the rest of the epoch other samples.
        fixed_sections = {"content", "dataset", "model"}
        fixed_settings = {"run.seed", "data.global_batch_size"}
        # A file or run.dir may have moved, and a resumed run does not read the initial weights.
        ignored = {*self.config.files(), "run.dir", "model.weights", "the content of model.weights"}
        defaults = asdict(Config())
        changes = []
        for section, settings in self.settings.items():
            for key, value in settings.items():
                name = f"the {key}" if section == "content" else f"{section}.{key}"
                # A checkpoint of an older version lacks newer settings, whose defaults then held.
                default = defaults.get(section, {}).get(key)
                saved_value = saved_settings.get(section, {}).get(key, default)
                if value == saved_value or name in ignored:
                    continue
                if section in fixed_sections or name in fixed_settings:
                    problem = f"{name} is {value}, and {saved_value} in the checkpoint"
                    raise UserError(f"{problem}; give that, or another run.dir")
                changes.append(f"{name} from {saved_value} to {value}")
        return changes

    def save(self, progress: dict[str, int]) -> Path:
        """Copy the state of the run, and return the path to which a thread writes the copy."""
        path = self.folder / f"step-{progress['step']:08d}.pt"
        content = self.begin_save(progress) | self.parallel.full_state_dict(self.optimizer)
        if self.process.rank != 0:
            return path
        # The next step changes the tensors, so the thread needs a copy. full_state_dict has copied
        # those on an accelerator; an optimizer that is not fused has step counts on the CPU, too.
        is_copy = self.process.device.type != "cpu" and self.optimizer.defaults.get("fused")
        if not is_copy:
            content = deepcopy(content)
        self.pending = self.writer.submit(self.write, content, path)
        return path

    def begin_save(self, progress: dict[str, int]) -> dict[str, Any]:
        """Wait for the previous save, check the weights, and return what is equal on all ranks."""
        self.wait_for_writers()
        self.report_failed_save()
        self.parallel.average_buffers()
        for name, parameter in self.parallel.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter not in self.trained_parameters:
                # A resumed run would not train it, because it builds its optimizer at the start.
                problem = f"{name} is trained, but the optimizer lacked it at the start"
                raise UserError(f"step {progress['step']} is not saved: {problem}")
            if not parameter.sum().isfinite():
                raise UserError(f"step {progress['step']} is not saved: {name} is not finite")
        scaler_state = self.parallel.scaler.state_dict()
        return {"progress": progress, "config": self.settings, "scaler": scaler_state}

    def write(self, content: dict[str, Any], path: Path) -> None:
        """Write a checkpoint, and check that a run's first one can be read."""
        files.write_atomically(path, lambda file: torch.save(content, file))
        # torch.save accepts what weights_only rejects, such as NumPy's numbers: reading shows it.
        if files.list_checkpoints(self.folder) == [path]:
            files.read(path)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raises its error if it fails."""
        self.wait_for_writers()
        error = self.pop_error()
        if error is not None:
            raise error

    def report_failed_save(self) -> None:
        """Print once why the last checkpoint could not be written; never waits for it."""
        error = self.pop_error()
        if error is not None and self.process.rank == 0:
            getLogger(__name__).error(f"error: {error}; the run continues and saves again when due")

    def wait_for_writers(self) -> None:
        """Wait until no rank writes a checkpoint; errors of the writers are left for later."""

        def wait_for_thread() -> None:
            if self.pending is not None:
                self.pending.exception()  # This waits, and raises nothing.

        # All ranks wait for rank 0 at the store, whose timeout is hours: a collective would time
        # out while rank 0 still writes. In a sharded save, each rank has a thread that writes.
        self.process.on_main(wait_for_thread)
        wait_for_thread()

    def pop_error(self) -> BaseException | None:
        """Return the error of a save that has ended, once; None if it succeeded or goes on."""
        if self.pending is None or not self.pending.done():
            return None
        error = self.pending.exception()
        self.pending = None
        return error

    def prune(self, best_first: list[int]) -> None:
        """Let rank 0 remove all checkpoints but the newest ``checkpoint.keep`` and the best."""
        if self.process.rank != 0:
            return
        checkpoints = files.list_checkpoints(self.folder)
        kept = set(checkpoints[-self.config.checkpoint.keep :])
        paths = {path.stem: path for path in checkpoints}
        for step in best_first:
            # A checkpoint that could not be written is missing; then, the next best is kept.
            best = paths.get(f"step-{step:08d}")
            if best is not None:
                files.write_atomically(self.folder / "best", best.name)
                kept.add(best)
                break
        for path in checkpoints:
            if path not in kept:
                files.remove(path)


def export(path: Path, output: Path) -> None:
    """Write a checkpoint's weights to a .safetensors file, with the settings in its metadata."""
    weights = {}
    for name, value in files.read_weights(path).items():
        # The format rejects tensors that are not contiguous, or share memory, as tied ones do.
        weights[name] = value.clone(memory_format=torch.contiguous_format)
    metadata = {"config": json.dumps(files.read(path).get("config"))}
    content = safetensors.torch.save(weights, metadata)
    files.write_atomically(output, lambda file: file.write(content))
