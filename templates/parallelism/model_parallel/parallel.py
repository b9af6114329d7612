"""Model parallelism: the layers of one model are on several devices of one process, which a batch visits in turn.

Each rank has its own devices and holds a copy of the model. The ranks read shares of the batch, and DDP averages their
gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .config import Config, UserError
from .runtime import Process
from .splitting import balance, build_by_block, build_outline, name_some, split_batch, to_device
from .strategy import BuildFn, LossFn, Strategy


class Parallel(Strategy):
    """The model on this rank's devices, the first of which takes the inputs."""

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        super().__init__(loss_fn, config, process, dp_rank=process.rank)
        layout = config.parallel
        # Each block moves to its device when it is built, so that the whole model is never on the CPU.
        devices = assign_devices(build_outline(build), list_devices(self.device, layout.devices), layout.split)
        place_next = partial(move_block, devices)
        self.module, _ = build_by_block(build, nn.Module.children, config.train, place_next)
        self.ddp = DistributedDataParallel(
            self.module,
            device_ids=None,  # The parameters are on several devices already.
            # Buffers are averaged before they are used (Strategy.average_buffers), not broadcast in every forward.
            forward_sync_buffers=False,
            bucket_cap_mb=layout.bucket_cap_mb or choose_bucket_cap(self.module),
            gradient_as_bucket_view=True,
            find_unused_parameters=layout.find_unused_parameters,
        )
        # With this setting, DDP itself detects parameters without a gradient.
        self.gradients_checked = layout.find_unused_parameters

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        pieces = split_batch((inputs, targets), self.microbatches)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            # Gradients accumulate locally; only the last micro-batch starts the all-reduce.
            with self.ddp.no_sync() if number < len(pieces) else nullcontext():
                with self.autocast():
                    outputs = self.ddp(some_inputs)
                    loss = self.add_loss(outputs, to_device(some_targets, outputs.device))
                # DDP averages over the ranks what has to be summed.
                scaler.scale(loss * self.dp_size).backward()
        if not self.gradients_checked:
            check_gradients(self.module)
            self.gradients_checked = True
        return self.finish_losses()

    def predict(self, inputs: Any) -> Any:
        with self.autocast():
            return self.module(inputs).to(self.device)


def list_devices(first: torch.device, count: int) -> list[torch.device]:
    """Return the ``count`` devices of this rank, starting with ``first``; on a CPU, ``count`` times the CPU."""
    if first.type == "cpu":
        return [first] * count
    # Modulo, because ranks may share devices.
    return [torch.device(first.type, (first.index + i) % torch.accelerator.device_count()) for i in range(count)]


def assign_devices(
    outline: nn.Sequential, devices: Sequence[torch.device], split: Sequence[int] | None
) -> Iterator[torch.device]:
    """Yield the device of each block: consecutive blocks are on the same one."""
    weights = [sum(p.numel() for p in block.parameters()) for block in outline.children()]
    for device, length in zip(devices, split or balance(weights, len(devices)), strict=True):
        yield from repeat(device, length)


def move_block(devices: Iterator[torch.device], block: nn.Module) -> None:
    """Move a block to the next of the ``devices``, and make it move its input there."""
    device = next(devices)
    block.to(device).register_forward_pre_hook(partial(move_input, device))


def move_input(device: torch.device, block: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the input of a block, moved to the block's device; a forward pre-hook."""
    return to_device(inputs, device)


#:: include "parallelism/shared/gradients.py" ::#
