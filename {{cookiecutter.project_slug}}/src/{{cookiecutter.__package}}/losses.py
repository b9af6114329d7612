"""The losses of a step: sums over micro-batches and ranks, divided by the weight of the global batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import UserError
from .distributed import Process


class MeanLosses:
    """The losses of a task, divided by the weight of the global batch; ``loss`` is minimized, all are recorded."""

    def __init__(self, task: Any, process: Process, samples: int) -> None:
        self.task, self.process, self.samples, self.names = task, process, samples, ""

    def weigh(self, targets: Any) -> None:
        """Find what the losses of a local batch are divided by, on average over the ranks."""
        weight = self.task.weight(targets)
        if isinstance(weight, Tensor):
            total = weight.detach().to(self.process.device, torch.float32, copy=True)
            dist.all_reduce(total)
            weight = total.clamp(min=1e-30) / self.process.world_size  # Without targets, losses of 0 are 0.
        elif weight < self.samples or weight % self.samples:
            raise UserError(f"Task.weight is {weight} for {self.samples} samples; return a multiple, or a tensor")
        self.weight, self.sums = weight, dict[str, Any]()

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return a micro-batch's part of the mean loss, and add up all losses."""
        losses = self.task.losses(outputs, targets)
        names = sorted(losses if isinstance(losses, dict) else (), key=lambda name: (name != "loss", name))
        self.names = self.names or self.process.store.compare_set("losses", "", "\n".join(names)).decode()
        if "\n".join(names) != self.names or names[:1] != ["loss"] or "grad_norm" in names:  # The first rank's.
            raise UserError(f"Task.losses returns {names or losses}; give each batch `loss`, and the same other names")
        for name, loss in losses.items():
            losses[name] = part = torch.as_tensor(loss, device=self.process.device) / self.weight
            self.sums[name] = self.sums.get(name, 0) + part.detach()
        return losses["loss"]

    def average(self, steps: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the numbers of some steps, averaged over the ranks that have outputs; waits for the device."""
        names = [*(self.names or self.process.store.get("losses").decode()).split("\n"), "grad_norm"]
        rows = [[*(float(each.get(name, 0)) for name in names), float(bool(each))] for each in steps]
        totals = torch.tensor(rows, device=self.process.device)
        dist.all_reduce(totals)
        return [dict(zip(names, row, strict=True)) for row in (totals[:, :-1] / totals[:, -1:]).tolist()]
