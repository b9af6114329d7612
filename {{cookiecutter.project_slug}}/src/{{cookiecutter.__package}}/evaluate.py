"""Exact evaluation: every sample counts once, for any number of ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from .checkpoint import read_on_main
from .config import Config, UserError
from .dataset import build_datasets
from .distributed import Process, seed_everything
from .loader import build_loader, to_device
from .parallel import Parallel
from .task import Task


def build_experiment(config: Config, process: Process) -> tuple[Task, Parallel, tuple[Any, Any, Any]]:
    """Build task, model and the three sets by the seed."""
    seed_everything(config.run.seed)
    datasets = build_datasets(config)
    if any(isinstance(dataset, IterableDataset) for dataset in datasets):
        raise UserError("an IterableDataset has no length; see docs/recipes/stream.md of ddp-template")
    lengths = process.all_gather([len(dataset) for dataset in datasets])
    if len(lengths[0]) != 3 or not all(lengths[0]) or lengths != [lengths[0]] * process.world_size:
        raise UserError(f"the datasets have {lengths} samples; return three, none empty, equal on all ranks")
    task = Task(config, process.device)
    for part in tree_leaves(vars(task)):
        if isinstance(part, nn.Module):  # Such as a teacher.
            part.to(process.device).eval().requires_grad_(False)
    if config.train.compile:  # Otherwise, the logits would be kept in fp32.
        setattr(task, "losses", torch.compile(task.losses))  # noqa: B010 (a method has another type)
    seed_everything(config.run.seed)  # Whatever was drawn before.
    return task, Parallel(config, process), datasets


class Evaluator:
    """Evaluates a model on a dataset when called; a collective."""

    def __init__(self, task: Task, parallel: Parallel, dataset: Any, config: Config) -> None:
        self.task, self.parallel, self.length = task, parallel, len(dataset)
        self.indices = range(parallel.dp_rank, self.length, parallel.dp_size)
        self.keys = [(0, i) for i in (*self.indices, 0)[: -(-self.length // parallel.dp_size)]]  # 0 fills up.
        self.loader = build_loader(dataset, self.keys, config.data.eval_batch_size, config, parallel.device)

    def __call__(self, process: Process) -> dict[str, Any]:
        """Return on rank 0 what ``Task.aggregate`` makes of all samples."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        parts: list[Any] | None = [None] * process.world_size if process.rank == 0 else None
        dist.gather_object(self.measure(), parts, group=process.cpu_group)
        self.parallel.module.train()
        return self.aggregate(parts) if parts else {}

    #:: if fact("loop") ::#
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/measure.py" ::#
    #:: endfilter ::#
    #:: else ::#
    @torch.no_grad()
    def measure(self) -> dict[str, np.ndarray]:
        """Return metrics of the samples whose outputs this rank has, and their ``index``."""
        collected: dict[str, list[Tensor]] = {}
        for batch in self.loader:
            inputs, targets = self.task.prepare(*to_device(batch, self.parallel.device))
            if (outputs := self.parallel.predict(inputs)) is not None:
                if not isinstance(measured := self.task.metrics(outputs, targets), dict):
                    raise UserError("Task.metrics returns no dictionary")
                for name, values in measured.items():
                    # Copied: a loader's is an open file. NumPy lacks bfloat16.
                    copy = values.float() if values.dtype == torch.bfloat16 else values.clone()
                    collected.setdefault(name, []).append(torch.atleast_1d(copy))
        count = len(self.indices) if collected else 0
        metrics = {"index": np.array(self.indices[:count], dtype=np.int64)}
        for name, batches in collected.items():
            whole = torch.cat(batches)
            if len(whole) != len(self.keys):
                raise UserError(f"Task.metrics has to return one value of {name} for each sample")
            metrics[name] = whole[:count].cpu().numpy()
        return metrics
    #:: endif ::#

    def aggregate(self, parts: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Merge the ranks' metrics in the dataset's order: sums over it do not depend on the split."""
        parts = [part for part in parts if len(part["index"])]
        order = np.argsort(np.concatenate([part["index"] for part in parts]))
        merged = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
        try:  # Numbers of NumPy and PyTorch become built-in ones, or null if not finite.
            text = json.dumps(self.task.aggregate(merged), default=lambda part: part.tolist())
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"Task.aggregate returns what JSON cannot hold: {error}") from None
        metrics: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        if not isinstance(metrics.get(self.task.best_metric, ""), int | float | None):
            raise UserError(f"Task.aggregate returns no number as {self.task.best_metric!r}, its best_metric")
        return metrics


def load_experiment(path: str, config: Config, given: set[str], process: Process) -> tuple[Task, Parallel, Any, int]:
    """Return task, model, test set and step of a checkpoint, with its own settings unless they are ``given``."""
    content = read_on_main(lambda: Parallel.checkpointer.read(Path(path)), process)
    if "config" not in content:
        raise UserError(f"{path} is no checkpoint of a run: it has no settings")
    for section, settings in vars(config).items():
        for name, value in content["config"].get(section, {}).items():
            if (section in ("model", "dataset") or name in ("seed", "precision")) and hasattr(settings, name):
                if not {section, f"{section}.{name}"} & given:
                    setattr(settings, name, value)
                elif process.rank == 0 and getattr(settings, name) != value:
                    print(f"{section}.{name}: {getattr(settings, name)} instead of {value}", file=sys.stderr)
    config.check(process.world_size, trains=False)
    task, parallel, (_, _, test_set) = build_experiment(config, process)
    Parallel.checkpointer.load(parallel, content)
    return task, parallel, test_set, content["progress"]["step"]


def evaluate(path: str, config: Config, given: set[str], process: Process) -> None:
    """Evaluate a checkpoint on the test set, and print its metrics as one line of JSON."""
    task, parallel, test_set, step = load_experiment(path, config, given, process)
    metrics = Evaluator(task, parallel, test_set, config)(process)
    if process.rank == 0:
        print(json.dumps(dict(event="eval", step=step, split="test", num_samples=len(test_set), **metrics)))
