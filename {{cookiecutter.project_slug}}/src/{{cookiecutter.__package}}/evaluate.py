"""Exact evaluation: every sample counts once, for any number of ranks."""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config, UserError
from .distributed import Process
from .experiment import load_experiment
from .loader import build_loader, to_device
from .parallel import Parallel
from .task import Task


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


def evaluate(path: str, config: Config, given: set[str], process: Process) -> None:
    """Evaluate a checkpoint on the test set, and print its metrics as one line of JSON."""
    task, parallel, test_set, step = load_experiment(path, config, given, process)
    metrics = Evaluator(task, parallel, test_set, config)(process)
    if process.rank == 0:
        print(json.dumps(dict(event="eval", step=step, split="test", num_samples=len(test_set), **metrics)))
