"""The mean loss over the global batch, of which each rank and each micro-batch sees a part.

    loss_fn returns       the sum of the loss over its samples, and the weight that the sum counts for
    weight is a number    it is the same for every micro-batch, so each part is divided by the known total
    weight is a tensor    it depends on the samples (tokens that are not padding), so it is summed over the ranks at the
                          end of the step, to correct losses and gradients

A number costs no message; a tensor costs one of four bytes per step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import UserError
from ..runtime import all_gather_object

Loss = Tensor | dict[str, Tensor]  # A sum, or named sums, of which "loss" is differentiated.
Weight = Tensor | float
# What a record holds besides.
LOGGED = {"event", "step", "epoch", "lr", "grad_norm", "skipped_steps", "samples_per_second", "tokens_per_second"}
LOGGED |= {"memory_mib", "peak_memory_mib", "slowest_rank", "behind_ms"}


@dataclass(frozen=True)
class LossKind:
    """What is the same for all micro-batches: the names of the losses, and the weight (None if it varies)."""

    names: list[str]
    weight: float | None


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
        self.weight = torch.zeros((), device=device)  # Of this rank's samples, if it varies.
        self.kind: LossKind | None = None  # Known from the first micro-batch on.
        self.is_agreed = False

    def add(self, result: tuple[Loss, Weight]) -> Tensor:
        """Add one micro-batch; returns its part of the mean loss, relative to ``samples`` if the weight varies."""
        losses, weight = read_loss(result)
        self.check_kind(LossKind(sorted(losses), None if isinstance(weight, Tensor) else weight))
        if isinstance(weight, Tensor):
            total: float = self.samples
            self.weight = self.weight + weight.detach().to(self.device, torch.float32)
        else:
            total = weight * self.microbatches
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().to(self.device) / total
        return losses["loss"] / total

    def finish(self, module: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """Return this rank's part of each mean loss of the step, when the gradients in ``module`` are complete.

        A collective in the first step, and if the weight varies: it is summed over ``group``, to correct losses and
        gradients.
        """
        kind = self.agree()
        zero = torch.zeros((), device=self.device)
        losses, self.sums = {name: self.sums.get(name, zero) for name in kind.names}, {}
        if kind.weight is not None:
            return losses
        weight, self.weight = self.weight, zero
        dist.all_reduce(weight, group=group)
        factor = self.samples / weight.clamp(min=1e-12)  # A batch of nothing but padding has a loss of 0.
        scale_gradients(module, factor)
        return {name: value * factor for name, value in losses.items()}

    def agree(self) -> LossKind:
        """Return what kind of loss it is; the ranks compare it in the first step, for not all of them have seen it."""
        if not self.is_agreed:
            for kind in all_gather_object(self.kind):
                if kind is not None:
                    self.check_kind(kind)
            self.is_agreed = True
        assert self.kind is not None
        return self.kind

    def check_kind(self, kind: LossKind) -> None:
        """Reject a loss that differs from that of an earlier micro-batch, or of another rank."""
        self.kind = self.kind or kind
        if kind.names != self.kind.names:
            raise UserError(f"loss_fn returned losses named {kind.names}, then {self.kind.names}; name all of them")
        if kind.weight != self.kind.weight:
            one, other = ("a tensor" if each is None else each for each in (kind.weight, self.kind.weight))
            raise UserError(
                f"loss_fn returned a weight of {one}, and of {other} before or on another rank; return a weight that "
                "varies as a tensor, so that it is summed over the global batch"
            )


def read_loss(result: object) -> tuple[dict[str, Tensor], Weight]:
    """Return what a ``loss_fn`` returned, with losses by name; reject anything else."""
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = type(result).__name__
        raise UserError(f"loss_fn in dataset.py returned a {kind}; return (sum of the loss over the batch, weight)")
    loss, weight = result
    losses = loss if isinstance(loss, dict) else {"loss": loss}
    if "loss" not in losses:
        raise UserError(f"loss_fn in dataset.py names its losses {list(losses)}; call the one to differentiate 'loss'")
    for name, value in losses.items():
        if not isinstance(value, Tensor) or value.dim():
            raise UserError(f"loss_fn in dataset.py returned a {name} that is no scalar; return a sum over the batch")
        if name in LOGGED:
            raise UserError(f"loss_fn in dataset.py named a loss {name}, which is logged already; choose another name")
    if weight.dim() if isinstance(weight, Tensor) else weight <= 0:
        raise UserError("loss_fn in dataset.py returned a weight that is neither a scalar tensor nor a number above 0")
    return losses, weight


def scale_gradients(module: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients, or this rank's shards of them, by a factor on the device, without waiting for it."""
    gradients: list[Any] = [p.grad for p in module.parameters() if p.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for device in {gradient.device for gradient in local}:
        torch._foreach_mul_([gradient for gradient in local if gradient.device == device], factor.to(device))
