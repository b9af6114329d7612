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
        self.agreed_names = ""
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
        # Ranks need equal weights without an all-reduce. A multiple of the samples hints at that.
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
        names = sorted(losses) if isinstance(losses, dict) else []  # [] is rejected below.
        if not self.agreed_names:
            # The first rank that computes a loss decides on the names for all.
            self.agreed_names = self.process.store.compare_set("losses", "", str(names)).decode()
        if str(names) != self.agreed_names or "loss" not in names or "grad_norm" in names:
            problem = f"Task.losses returns {list(losses) if names else losses}"
            raise UserError(f"{problem}; give each batch `loss`, and the same other names")

    def average(self, steps: list[Step]) -> list[Step]:
        """Average losses and gradient norms of ``steps`` over ranks; waits for the device."""
        local_numbers = []
        for step in steps:
            local_numbers.append({name: float(value) for name, value in step.items()})
        averages = []
        for numbers_of_ranks in zip(*self.process.all_gather(local_numbers), strict=True):
            # Under some strategies, only some ranks have outputs: dictionaries of others are empty.
            filled = [numbers for numbers in numbers_of_ranks if numbers]
            means = {}
            for name in filled[0]:
                means[name] = sum(numbers[name] for numbers in filled) / len(filled)
            averages.append(means)
        return averages
