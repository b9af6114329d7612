"""Data parallel by nn.DataParallel: one process copies the model to all accelerators, in every forward.

Each accelerator computes a part of the batch; outputs and gradients come back to the first one, where the loss is
computed and the optimizer steps. On a machine without accelerators the model is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .config import Config
from .distributed import World


class Parallel:
    """The model, spread over the ranks. All that the rest of the package knows of how the work is split is this class.

    Attributes:
        module: What this rank holds of the model; its parameters have the names that they have in the whole one.
        device: Where inputs and targets have to be.
        data_rank: Which share of every batch this rank reads.
        data_size: Number of such shares.
        data_group: The ranks that hold the same part of the model and read other shares; None if that is all ranks.
    """

    def __init__(
        self, model: nn.Sequential, loss_fn: Callable[[Tensor, Tensor], Tensor], config: Config, world: World
    ) -> None:
        """Spread ``model``, which has to hold the same weights on every rank.

        Args:
            model: A sequence of named blocks, on the CPU.
            loss_fn: Takes outputs and targets, gives their mean loss as a scalar.
            config: The run's settings.
            world: This process's place.
        """
        self.data_rank, self.data_size = 0, 1
        self.data_group = None
        self.device = world.device
        self.loss_fn = loss_fn
        self.microbatches = config.train.microbatches
        self.autocast = build_autocast(self.device, config.train.precision)
        self.module = model.to(self.device)
        devices = None if config.parallel.devices is None else list(range(config.parallel.devices))
        self.copies = nn.DataParallel(self.module, devices if self.device.type != "cpu" else None)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """Forward and backward of one global batch, of which this rank has a share.

        Leaves in every parameter the gradient of the mean loss over the global batch (times the scaler's factor).

        Args:
            inputs: This rank's inputs, ``global_batch_size / data_size`` of them.
            targets: Their targets.
            scaler: Scales the loss of fp16, and nothing else.

        Returns:
            This rank's part of the mean loss, a detached scalar on the device: the sum over all ranks is the mean.
        """
        total = torch.zeros((), device=self.device)
        pieces = list(zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True))
        for some_inputs, some_targets in pieces:
            with self.autocast():
                loss = self.loss_fn(self.copies(some_inputs), some_targets) / len(pieces)
            scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for ``inputs``."""
        with self.autocast():
            return self.copies(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` where it is larger; gives its norm before, on the device."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


#:: include "parallelism/autocast.py" ::#
