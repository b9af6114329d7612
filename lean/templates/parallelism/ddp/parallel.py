"""Distributed data parallel: every rank holds the whole model and reads its local batch, a part of the global one.

Backward computes the gradients of the local batch. While it runs, DDP averages finished buckets of gradients over the
ranks with an all-reduce, so every rank takes the same optimizer step and the copies of the model stay equal.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer as Checkpointer
from .config import Config, UserError
from .distributed import Process
from .model import build_model
from .task import Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Parallel:
    """The model under DDP. Every strategy has these methods and attributes; the loop uses nothing else.

    Attributes:
        module: This rank's part of the model; its parameters have the same names as in the whole model.
        dp_rank, dp_size: Which local batch this rank reads, and the number of local batches.
        scaler: Scales the loss under fp16; otherwise it does nothing.
    """

    def __init__(self, task: Task, config: Config, process: Process) -> None:
        self.task, self.device, self.microbatches = task, process.device, config.train.microbatches
        self.dp_rank, self.dp_size = process.rank, process.world_size
        self.dtype = DTYPES[config.train.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.precision == "fp16")

        def wrap(block: nn.Module) -> nn.Module:
            prepare_block(block, config)
            return block.to(self.device)

        self.module: nn.Module = build_model(config.model, wrap).to(self.device)
        if config.parallel.sync_batch_norm:
            if self.device.type == "cpu":
                raise UserError("parallel.sync_batch_norm needs accelerators; turn it off on a CPU")
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module)
        self.ddp = DistributedDataParallel(
            self.module,
            device_ids=None if self.device.type == "cpu" else [self.device],
            forward_sync_buffers=False,  # average_buffers does that before they are used.
            gradient_as_bucket_view=True,
            find_unused_parameters=config.train.allow_unused,
        )
        self.arrange_buckets()

    def arrange_buckets(self) -> None:
        """Let DDP arrange its buckets now, by a backward of its own, and not by that of the first step.

        The arrangement decides in which order gradients are summed, and so how sums are rounded: the first step after a
        resume would differ from the same step of a run that was not interrupted.
        """
        forward = self.module.forward
        self.module.forward = lambda: sum(p.sum() for p in self.module.parameters() if p.requires_grad)
        self.ddp().backward()
        self.module.forward = forward
        self.module.zero_grad()

    def forward_backward(self, inputs: Any, targets: Any, weight: int | Tensor) -> dict[str, Tensor]:
        """Leave in each parameter the gradient of the mean loss over the global batch.

        Args:
            inputs, targets: This rank's local batch, on its device.
            weight: What the losses of a local batch are divided by, on average over the ranks.

        Returns:
            The losses by name: detached scalars on the device, whose sum over ranks is the mean over the global batch.
        """
        totals: dict[str, Tensor] = {}
        microbatches = split_batch((inputs, targets), self.microbatches)
        for number, (some_inputs, some_targets) in enumerate(microbatches, start=1):
            # Gradients accumulate locally; only the last micro-batch starts the all-reduce.
            with self.ddp.no_sync() if number < len(microbatches) else nullcontext():
                with self.autocast():
                    losses = self.task.losses(self.ddp(some_inputs), some_targets)
                # DDP divides the sum of the ranks' gradients by their number, so this becomes the mean.
                self.scaler.scale(losses["loss"] / weight).backward()
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0) + loss.detach() / weight / self.dp_size
        return totals

    def predict(self, inputs: Any) -> Any:
        """Return the outputs for this rank's inputs, or None if another rank has them; a collective."""
        with self.autocast():
            return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def average_buffers(self) -> None:
        """Average the running statistics of BatchNorm over the ranks that have seen other samples."""
        average_batch_norm(self.module)

#:: include "parallelism/shared/state.py" ::#

    def autocast(self) -> torch.autocast:
        """Return a context that computes in ``train.precision``."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not torch.float32)


#:: include "parallelism/shared/blocks.py" ::#
