"""nn.DataParallel: one process copies the model to all accelerators in every forward.

Each accelerator computes a part of the batch; outputs and gradients return to the first one, where the loss is computed
and the optimizer steps. On a machine without accelerators, the model runs unchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .model import blocks
from .runtime import Process
from .splitting import build_by_block, split_batch
from .strategy import BuildFn, LossFn, Strategy


class Parallel(Strategy):
    """The model under nn.DataParallel."""

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        super().__init__(loss_fn, config, process, dp_rank=0)
        devices = None if config.parallel.devices is None else list(range(config.parallel.devices))
        # Each block moves to the device when it is built, so that the whole model is never on the CPU as well.
        model, _ = build_by_block(build, blocks, config.train, lambda block: block.to(self.device))
        self.module = model.to(self.device)
        self.copies = nn.DataParallel(self.module, devices if self.device.type != "cpu" else None)

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        for some_inputs, some_targets in split_batch((inputs, targets), self.microbatches):
            with self.autocast():
                loss = self.add_loss(self.copies(some_inputs), some_targets)
            scaler.scale(loss).backward()
        return self.finish_losses()

    def predict(self, inputs: Any) -> Any:
        with self.autocast():
            return self.copies(inputs)
