"""Distributed data parallel: every rank holds the whole model and reads its share of each batch.

Backward computes the gradient of a rank's share; while it still runs, DDP averages finished buckets of gradients over
the ranks by all-reduce. So every rank takes the same optimizer step, and the copies of the model stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .blocks import prepare_blocks
from .config import Config, UserError
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
        self.data_rank, self.data_size = world.rank, config.parallel.data_size(world.size)
        self.data_group = None
        self.device = world.device
        self.loss_fn = loss_fn
        self.microbatches = config.train.microbatches
        self.autocast = build_autocast(self.device, config.train.precision)
        if config.parallel.sync_batch_norm:
            if self.device.type == "cpu" and world.size > 1:
                raise UserError("parallel.sync_batch_norm needs accelerators: PyTorch's SyncBatchNorm refuses the CPU")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model.to(self.device)
        prepare_blocks(model, config.train)
        # Nothing to look at where DDP itself finds out which parameters get no gradient.
        self.checked = config.parallel.find_unused_parameters or config.parallel.static_graph
        self.module = model
        self.ddp = DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            # Buffers are averaged when they are looked at (see state.py), not sent around in every forward.
            forward_sync_buffers=False,
            bucket_cap_mb=config.parallel.bucket_cap_mb,
            gradient_as_bucket_view=config.parallel.gradient_as_bucket_view,
            static_graph=config.parallel.static_graph,
            find_unused_parameters=config.parallel.find_unused_parameters,
        )

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
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            # Gradients add up locally; the all-reduce waits for the last micro-batch.
            with self.ddp.no_sync() if number < len(pieces) else nullcontext():
                with self.autocast():
                    loss = self.loss_fn(self.ddp(some_inputs), some_targets) / len(pieces)
                scaler.scale(loss).backward()
            total += loss.detach()
        if not self.checked:
            check_gradients(self.module)
            self.checked = True
        return total / self.data_size

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for this rank's ``inputs``; ranks may differ in how often they call it."""
        with self.autocast():
            return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` where it is larger; gives its norm before, on the device."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


#:: include "parallelism/autocast.py" ::#


#:: include "parallelism/gradients.py" ::#
