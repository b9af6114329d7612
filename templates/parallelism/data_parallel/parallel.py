"""nn.DataParallel: one process copies the model to all accelerators in every forward.

Each accelerator computes a part of the batch; outputs and gradients return to the first one, where the loss is computed
and the optimizer steps. On a machine without accelerators, the model runs unchanged.
"""

import torch
from torch import Tensor, nn

from .config import Config
from .runtime import Process
from .strategy import LossFn, Strategy


class Parallel(Strategy):
    """The model under nn.DataParallel."""

    def __init__(self, model: nn.Sequential, loss_fn: LossFn, config: Config, process: Process) -> None:
        super().__init__(loss_fn, config, process, dp_rank=0)
        devices = None if config.parallel.devices is None else list(range(config.parallel.devices))
        self.module = model.to(self.device)
        self.copies = nn.DataParallel(self.module, devices if self.device.type != "cpu" else None)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        total = torch.zeros((), device=self.device)
        pieces = self.split_batch(inputs, targets)
        for some_inputs, some_targets in pieces:
            with self.autocast():
                loss = self.loss_fn(self.copies(some_inputs), some_targets) / len(pieces)
            scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def predict(self, inputs: Tensor) -> Tensor | None:
        with self.autocast():
            return self.copies(inputs)
