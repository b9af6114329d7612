"""Model parallel: the layers of one model lie on several devices of one process, which a batch visits in turn.

Ranks, each with devices of its own, hold copies of the model: they read shares of the batch, and DDP averages their
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial

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
        device: Where inputs and targets have to be: the first device of this rank.
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
        prepare_blocks(model, config.train)
        spread(model, own_devices(world.device, config.parallel.devices), config.parallel.split)
        # Nothing to look at where DDP itself finds out which parameters get no gradient.
        self.checked = config.parallel.find_unused_parameters
        self.module = model
        self.ddp = DistributedDataParallel(
            model,
            device_ids=None,  # The model says itself on which devices it lies.
            # Buffers are averaged when they are looked at (see state.py), not sent around in every forward.
            forward_sync_buffers=False,
            bucket_cap_mb=config.parallel.bucket_cap_mb,
            gradient_as_bucket_view=True,
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
                    outputs = self.ddp(some_inputs)
                    loss = self.loss_fn(outputs, some_targets.to(outputs.device)) / len(pieces)
                scaler.scale(loss).backward()
            total += loss.detach().to(self.device)
        if not self.checked:
            check_gradients(self.module)
            self.checked = True
        return total / self.data_size

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for this rank's ``inputs``; ranks may differ in how often they call it."""
        with self.autocast():
            return self.module(inputs).to(self.device)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` where it is larger; gives its norm before, on the device."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


def own_devices(first: torch.device, count: int) -> list[torch.device]:
    """The ``count`` devices of this rank, from the first on; on a CPU, the CPU so many times."""
    if first.type == "cpu":
        return [first] * count
    # Modulo, for ranks that share devices.
    return [torch.device(first.type, (first.index + i) % torch.accelerator.device_count()) for i in range(count)]


def spread(model: nn.Sequential, devices: Sequence[torch.device], split: Sequence[int] | None) -> None:
    """Put a run of blocks on each device, and have what enters a block move to where it is."""
    weights = [sum(p.numel() for p in block.parameters()) for block in model]
    blocks = iter(model)
    for device, length in zip(devices, split or balance(weights, len(devices)), strict=True):
        for _ in range(length):
            next(blocks).to(device).register_forward_pre_hook(partial(move, device))


def move(device: torch.device, block: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The input of a block, on the device of the block."""
    return (inputs[0].to(device),)


#:: include "parallelism/balance.py" ::#


#:: include "parallelism/autocast.py" ::#


#:: include "parallelism/gradients.py" ::#
