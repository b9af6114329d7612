"""The mean loss over the global batch, of which each rank and each micro-batch sees a part.

    loss_fn returns       the sum of the loss over its samples, and the weight that the sum counts for
    weight is a number    it is the same for every micro-batch, so each part is divided by the known total
    weight is a tensor    it depends on the samples (tokens that are not padding), so it is summed over the ranks at the
                          end of the step, to correct losses and gradients

A number costs no message; a tensor costs one of four bytes per step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import UserError

Loss = Tensor | dict[str, Tensor]  # A sum, or named sums, of which "loss" is differentiated.
Weight = Tensor | float


class GlobalMean:
    """Adds up the losses of a step and divides them by the weight of the global batch.

    Args:
        samples: Number of samples in the global batch.
        microbatches: Number of micro-batches in it, over all ranks.
        device: Where the losses are added.
    """

    def __init__(self, samples: int, microbatches: int, device: torch.device) -> None:
        self.samples, self.microbatches, self.device = samples, microbatches, device
        self.sums: dict[str, Tensor] = {}
        self.weight: Tensor | None = None  # Of this rank's samples, if it varies.
        self.constant: float | None = None  # Of every micro-batch, if it does not.

    def add(self, result: tuple[Loss, Weight]) -> Tensor:
        """Add one micro-batch; returns its part of the mean loss, relative to ``samples`` if the weight varies."""
        losses, weight = read_loss(result)
        if isinstance(weight, Tensor):
            total: float = self.samples
            weight = weight.detach().to(self.device, torch.float32)
            self.weight = weight if self.weight is None else self.weight + weight
        else:
            total = self.check_constant(weight) * self.microbatches
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().to(self.device) / total
        return losses["loss"] / total

    def check_constant(self, weight: float) -> float:
        """Return the weight; reject one that differs from that of an earlier micro-batch."""
        if self.constant not in (None, weight):
            raise UserError(
                f"loss_fn returned a weight of {weight}, and of {self.constant} before; return a weight that varies as "
                "a tensor, so that it is summed over the global batch"
            )
        self.constant = weight
        return weight

    def finish(self, module: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """Return this rank's part of each mean loss of the step; the gradients in ``module`` are complete.

        If the weight varies, it is summed over ``group``, to correct losses and gradients.
        """
        losses, self.sums = self.sums, {}
        if self.weight is None:
            return losses
        weight, self.weight = self.weight, None
        dist.all_reduce(weight, group=group)
        factor = self.samples / weight.clamp(min=1e-12)  # A batch of nothing but padding has a loss of 0.
        scale_gradients(module, factor)
        return {name: value * factor for name, value in losses.items()}


def read_loss(result: tuple[Loss, Weight]) -> tuple[dict[str, Tensor], Weight]:
    """Return what a ``loss_fn`` returned, with losses by name; reject anything else."""
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = type(result).__name__
        raise UserError(f"loss_fn in dataset.py returned a {kind}; return (sum of the loss over the batch, weight)")
    loss, weight = result
    losses = loss if isinstance(loss, dict) else {"loss": loss}
    if "loss" not in losses:
        raise UserError(f"loss_fn in dataset.py names its losses {list(losses)}; call the one to differentiate 'loss'")
    return losses, weight


def scale_gradients(module: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients, or this rank's shards of them, by a factor on the device, without waiting for it."""
    gradients: list[Any] = [p.grad for p in module.parameters() if p.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for device in {gradient.device for gradient in local}:
        torch._foreach_mul_([gradient for gradient in local if gradient.device == device], factor.to(device))
