"""Exact evaluation: every sample counts once, for any number of ranks."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .checkpoint import read
from .config import Config, UserError
from .dataset import build_datasets
from .distributed import Process, seed_everything
from .loader import EvalSampler, build_loader, to_device
from .parallel import Parallel
from .task import Task

Metrics = dict[str, np.ndarray]


def build_experiment(config: Config, process: Process) -> tuple[Task, Parallel, Any, Any]:
    """Build the task, the model, the training set and the test set, from the seed."""
    seed_everything(config.run.seed)
    train_set, test_set = build_datasets(config)
    lengths = process.all_gather((len(train_set), len(test_set)))
    if len(set(lengths)) > 1:
        raise UserError(f"ranks have datasets of different lengths: {lengths}; give each machine the same files")
    task = Task(config, process.device)
    for module in vars(task).values():
        if isinstance(module, nn.Module):  # Such as a teacher, which is not trained.
            module.to(process.device).eval().requires_grad_(False)
    seed_everything(config.run.seed)  # What was drawn so far does not change the model's initial values.
    return task, Parallel(task, config, process), train_set, test_set


class Evaluator:
    """Evaluates a model on a dataset each time it is called; a collective."""

    def __init__(self, task: Task, parallel: Parallel, test_set: Any, config: Config) -> None:
        self.task, self.parallel, self.length = task, parallel, len(test_set)
        self.sampler = EvalSampler(self.length, parallel.dp_rank, parallel.dp_size)
        size, device = config.data.eval_batch_size, parallel.device
        self.loader = build_loader(test_set, self.sampler, size, config.data, device, config.run.seed)

    def __call__(self, process: Process) -> dict[str, Any]:
        """Return ``num_samples`` and what ``Task.aggregate`` makes of all samples, the same on every rank."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        metrics = self.measure()
        self.parallel.module.train()
        shares: list[Any] = [None] * process.world_size
        dist.all_gather_object(shares, metrics, group=process.cpu_group)
        return process.on_main(lambda: {"num_samples": self.length, **self.aggregate(shares)})

    @torch.no_grad()
    def measure(self) -> Metrics:
        """Return the metrics of the samples whose outputs this rank has, and their ``index``."""
        collected: dict[str, list[Tensor]] = {}
        for batch in self.loader:
            inputs, targets = self.task.prepare(*to_device(batch, self.parallel.device))
            outputs = self.parallel.predict(inputs)
            if outputs is not None:
                for name, values in self.task.metrics(outputs, targets).items():
                    # A copy: a loader process shares memory with the batch, and a file descriptor for each tensor.
                    collected.setdefault(name, []).append(values.detach().clone())
        count = self.sampler.count if collected else 0
        arrays = {name: torch.cat(values)[:count].cpu().numpy() for name, values in collected.items()}
        return {"index": np.array(self.sampler.indices[:count], dtype=np.int64)} | arrays

    def aggregate(self, shares: list[Metrics]) -> dict[str, Any]:
        """Merge the ranks' metrics in the order of the dataset, so that sums over it do not depend on the split."""
        index = np.concatenate([share["index"] for share in shares])
        if len(index) != self.length or len(np.unique(index)) != self.length:
            raise UserError(f"{len(np.unique(index))} of {self.length} samples were evaluated, {len(index)} in all")
        order, filled = np.argsort(index), [share for share in shares if len(share["index"])]
        merged = {name: np.concatenate([share[name] for share in filled])[order] for name in filled[0]}
        metrics = self.task.aggregate(merged)
        return {name: to_plain(name, value) for name, value in metrics.items()}


def to_plain(name: str, value: Any) -> Any:
    """Return a metric as what JSON and a checkpoint can hold: a number, a text, or a list of these."""
    if name in ("event", "step", "split", "num_samples"):
        raise UserError(f"Task.aggregate returns {name}, which is the name of another part of a record; rename it")
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [to_plain("", each) for each in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise UserError(f"Task.aggregate returns {name} as {type(value).__name__}; return a number, a text or a list")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_experiment(path: str, config: Config, given: set[str], process: Process) -> tuple[Any, ...]:
    """Build the experiment of a checkpoint, with its settings of model and dataset, and load its weights.

    Args:
        path: The checkpoint.
        config: The settings, which are changed to those of the checkpoint.
        given: Settings of the command line, such as ``dataset.path``, which win.
        process: This rank.

    Returns:
        The task, the model, the test set, and how far the run had come.
    """
    content: dict[str, Any] = {}

    def read_header() -> dict[str, Any]:
        content.update(read(Path(path)))
        if "config" not in content:
            raise UserError(f"{path} is not a checkpoint of this project: it has no settings")
        return {name: content[name] for name in ("config", "progress")}

    header = process.on_main(read_header)
    for section in ("model", "dataset"):
        for name, saved in header["config"][section].items():
            value = getattr(getattr(config, section), name, saved)
            if f"{section}.{name}" not in given:
                setattr(getattr(config, section), name, saved)
            elif value != saved and process.is_main:
                print(f"{section}.{name} is {value}, and {saved} in the checkpoint", flush=True)
    task, parallel, _, test_set = build_experiment(config, process)
    parallel.load_full_state_dict(content.get("model", {}))
    return task, parallel, test_set, header["progress"]


def evaluate(path: str, config: Config, given: set[str], process: Process) -> None:
    """Evaluate a checkpoint on the test set, and print its metrics as one line of JSON."""
    task, parallel, test_set, progress = load_experiment(path, config, given, process)
    record = Evaluator(task, parallel, test_set, config)(process)
    if process.is_main:
        print(json.dumps({"event": "eval", "step": progress["step"], "split": "test", **record}))
