"""Exact evaluation: every sample counts once, on any number of ranks."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import Config, UserError
from .distributed import Process, seed_everything
from .experiment import load_experiment
from .loader import build_loader, to_device
from .parallel import Parallel
from .task import Task

Metrics = dict[str, np.ndarray]  # One value of each sample, by the metric's name.


class Evaluator:
    """Evaluates a model on a dataset when it is called, which is a collective."""

    def __init__(self, task: Task, parallel: Parallel, dataset: Any, config: Config) -> None:
        self.task = task
        self.parallel = parallel
        batches = torch.arange(len(dataset)).split(config.data.eval_batch_size)
        # All ranks run equally many batches, as forward may be a collective: some repeat one.
        end = len(batches) + -len(batches) % parallel.dp_size
        self.batches = [
            batches[turn % len(batches)] for turn in range(parallel.dp_rank, end, parallel.dp_size)
        ]
        keys = [[(0, index) for index in batch.tolist()] for batch in self.batches]
        self.loader = build_loader(dataset, keys, config, parallel.device)

    def __call__(self, process: Process) -> dict[str, Any]:
        """Return on rank 0 what ``Task.aggregate`` makes of all samples; {} on the other ranks."""
        # An experiment may keep a part of the model in eval mode: train() would end that.
        training_modules = [module for module in self.parallel.module.modules() if module.training]
        self.parallel.module.eval()
        measured = self.measure()
        for module in training_modules:
            module.training = True
        parts = process.all_gather(measured)
        return self.aggregate(parts) if process.rank == 0 else {}

    #:: if fact("loop") ::#
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/measure.py" ::#
    #:: endfilter ::#
    #:: else ::#
    @torch.no_grad()
    def measure(self) -> Metrics:
        """Return the metrics of the samples whose outputs this rank has, and their ``index``."""
        collected = dict[str, list[Tensor]]()
        for indices, batch in zip(self.batches, self.loader, strict=True):
            # Loaders draw, too: so all is seeded anew, in the same way on any number of ranks.
            seed_everything(int(indices[0]), self.parallel.device)
            inputs, targets = to_device(batch, self.parallel.device)
            inputs, targets = self.task.prepare(inputs, targets)
            outputs = self.parallel.predict(inputs)
            if outputs is None:
                continue
            measured: Any = self.task.metrics(outputs, targets)
            if not isinstance(measured, dict) or "index" in measured:
                raise UserError("Task.metrics returns no dictionary, or a metric named index")
            for name, values in {"index": indices, **measured}.items():
                # A loader process's tensor keeps a file open, so a copy is kept. NumPy has no bf16.
                copy = values.float() if values.dtype == torch.bfloat16 else values.clone()
                collected.setdefault(name, []).append(torch.atleast_1d(copy))
        return self.to_numpy(collected)
    #:: endif ::#

    def to_numpy(self, collected: dict[str, list[Tensor]]) -> Metrics:
        """Join the batches' metrics."""
        metrics = {}
        for name, batches in collected.items():
            metrics[name] = torch.cat(batches).cpu().numpy()
            if len(metrics[name]) != len(metrics["index"]):
                raise UserError(f"Task.metrics has to return one value of {name} for each sample")
        return metrics

    def aggregate(self, parts: list[Metrics]) -> dict[str, Any]:
        """Merge the metrics of all ranks, and aggregate them."""
        parts = [part for part in parts if part]
        merged = {}
        for name in parts[0]:
            merged[name] = np.concatenate([part[name] for part in parts])
        # Sums depend on the order, here the dataset's. A repeated batch's samples stay once.
        order = np.unique(merged["index"], return_index=True)[1]
        merged = {name: values[order] for name, values in merged.items()}
        aggregated = self.task.aggregate(merged)
        # JSON knows neither the numbers of NumPy and PyTorch, nor those that are not finite.
        try:
            text = json.dumps(aggregated, default=lambda array: array.tolist())
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"Task.aggregate returns what JSON cannot hold: {error}") from None
        metrics = json.loads(text, parse_constant=lambda _: None)
        best_metric = metrics.get(self.task.best_metric, "missing")
        if not isinstance(best_metric, int | float | None):
            raise UserError(f"Task.aggregate returns no number as {self.task.best_metric!r}")
        return dict(num_samples=len(order), **metrics)  # An error, if Task.aggregate has one too.


def evaluate(options: Any, config: Config, given: set[str], process: Process) -> None:
    """Evaluate a checkpoint on ``options.split``, and print its metrics as one line of JSON."""
    task, parallel, datasets, step = load_experiment(options.checkpoint, config, given, process)
    dataset = datasets[1 if options.split == "validation" else 2]
    metrics = Evaluator(task, parallel, dataset, config)(process)
    if process.rank == 0:
        head = {"event": "eval", "step": step, "split": options.split}
        print(json.dumps(head | metrics))
