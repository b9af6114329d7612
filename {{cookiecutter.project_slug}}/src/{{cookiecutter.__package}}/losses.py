"""The losses of a step: sums over micro-batches and ranks, and what these are divided by."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import UserError
from .distributed import Process

Step = dict[str, Any]  # The losses of a step by name, and its grad_norm.


class MeanLosses:
    """Turns the sums that ``Task.losses`` returns into means over the global batch."""

    def __init__(self, task: Any, process: Process, local_batch_size: int) -> None:
        self.task = task
        self.process = process
        self.local_batch_size = local_batch_size
        self.names = list[str]()
        self.denominator: int | Tensor = 1
        self.sums: Step = {}

    def set_denominator(self, targets: Any) -> None:
        """Begin a step: find what losses are divided by, the global batch's weight per rank."""
        self.sums = {}
        local_weight = self.task.weight(targets)
        if isinstance(local_weight, Tensor):
            # A tensor means that local batches differ in weight. The all-reduce must not change it.
            weight = local_weight.detach().to(self.process.device, torch.float32, copy=True)
            dist.all_reduce(weight)
            # Gradients are averaged over ranks, so each divides by a rank's mean weight, never 0.
            self.denominator = weight.clamp(min=1e-30) / self.process.world_size
            return
        # Without an all-reduce, all ranks need the same weight, such as a length per sample.
        if local_weight < self.local_batch_size or local_weight % self.local_batch_size:
            problem = f"Task.weight is {local_weight} for {self.local_batch_size} samples"
            raise UserError(f"{problem}; return a multiple, or a tensor")
        self.denominator = local_weight

    def mean_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return what a micro-batch adds to the mean loss; adds all its losses to ``sums``."""
        losses = self.task.losses(outputs, targets)
        self.check_names(losses)
        means = {}
        for name, loss in losses.items():
            mean = torch.as_tensor(loss, device=self.process.device) / self.denominator
            means[name] = mean
            self.sums[name] = self.sums.get(name, 0) + mean.detach()
        return means["loss"]

    def check_names(self, losses: Any) -> None:
        """Reject losses whose names differ between ranks, steps or micro-batches."""
        names = []
        if isinstance(losses, dict):
            # All ranks use one order, because ``average`` adds up losses by their position.
            names = sorted(losses, key=lambda name: (name != "loss", name))
        if not self.names:
            # The first rank that computes a loss decides on the names for all.
            agreed_names = self.process.store.compare_set("losses", "", "\n".join(names))
            self.names = agreed_names.decode().split("\n")
        if names != self.names or names[0] != "loss" or "grad_norm" in names:
            problem = f"Task.losses returns {names or losses}"
            raise UserError(f"{problem}; give each batch `loss`, and the same other names")

    def average(self, steps: list[Step]) -> list[Step]:
        """Average losses and gradient norms of ``steps`` over ranks; waits for the device."""
        # Under some strategies, only some ranks have outputs: dictionaries of others are empty.
        names = self.names
        if not names:
            names = self.process.store.get("losses").decode().split("\n")
        columns = [*names, "grad_norm"]
        rows = []
        for numbers in steps:
            values = [float(numbers.get(name, 0)) for name in columns]
            has_outputs = float(bool(numbers))
            rows.append([*values, has_outputs])
        totals = torch.tensor(rows, dtype=torch.float64)
        dist.all_reduce(totals, group=self.process.cpu_group)
        ranks_with_outputs = totals[:, -1:]
        means = totals[:, :-1] / ranks_with_outputs
        averages = []
        for row in means.tolist():
            averages.append(dict(zip(columns, row, strict=True)))
        return averages
