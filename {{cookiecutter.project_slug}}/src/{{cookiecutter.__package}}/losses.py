"""The losses of a step: sums over micro-batches and ranks, and what these are divided by."""

from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import UserError
from .distributed import wide_dtype

# The losses of each micro-batch of a step by name, and the step's grad_norm.
StepLosses = list[dict[str, Tensor]]


class MeanLosses:
    """Turns the sums that ``Task.losses`` returns into parts of means over the global batch."""

    def __init__(self, task: Any, parallel: Any, num_microbatches: int) -> None:
        self.task = task
        self.parallel = parallel
        self.num_microbatches = num_microbatches  # Those of the global batch.
        # Ranks that have parts of one copy of the model read the same samples.
        self.num_copies = parallel.process.world_size // parallel.dp_size

    @torch.no_grad()
    def set_weight(self, microbatches: list[Any]) -> None:
        """Begin a step: find what losses are divided by, the mean weight of all micro-batches."""
        self.parts = StepLosses()
        self.weights = torch.zeros(
            self.num_microbatches, dtype=wide_dtype(), device=self.parallel.device
        )
        for number, (_, targets) in zip(self.parallel.microbatches, microbatches, strict=True):
            # An assignment would copy a number to the device, and wait for it.
            self.weights[number].fill_(self.task.weight(targets))
        # Ranks with other samples have zeros there: the sum is exact, and overlaps with forward.
        self.message = dist.all_reduce(self.weights, async_op=True)

    def mean_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return what a micro-batch adds to the mean loss; adds all its losses to ``parts``."""
        losses = self.task.losses(outputs, targets)
        if not isinstance(losses, dict) or losses.keys() & {"loss", "grad_norm"} != {"loss"}:
            raise UserError(f"Task.losses returns {losses}; return a dictionary with `loss`")
        self.message.wait()
        mean_weight = self.weights.mean() / self.num_copies
        mean_weight = mean_weight.clamp(min=1e-30)  # Never divide by 0.
        means = {name: loss / mean_weight for name, loss in losses.items()}
        self.parts.append({name: mean.detach() for name, mean in means.items()})
        # Gradients are added up over all micro-batches, and so become those of the mean.
        return means["loss"] / self.num_microbatches

    def average(self, steps: list[StepLosses]) -> list[dict[str, float]]:
        """Return the mean losses and the gradient norm of each step; waits for the device."""
        local_numbers = []
        for step in steps:
            local_numbers.append([{name: float(part[name]) for name in part} for part in step])
        averages = []
        names = None
        for parts_of_ranks in zip(*self.parallel.process.all_gather(local_numbers), strict=True):
            # Under some strategies, only some ranks have any.
            parts = [part for parts in parts_of_ranks for part in parts]
            names = names or parts[0].keys()
            if any(part.keys() != names for part in parts):
                raise UserError(f"only some micro-batches have {list(names)}; give all losses")
            # fmean adds up exactly: it does not matter which rank has which part, or in what order.
            averages.append({name: fmean(part[name] for part in parts) for name in names})
        return averages
