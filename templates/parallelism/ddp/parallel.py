"""Distributed data parallel: every rank holds the whole model and reads its share of each batch.

Backward computes the gradients of a rank's share. While it runs, DDP averages finished buckets of gradients over the
ranks with an all-reduce, so every rank takes the same optimizer step and the copies of the model stay equal.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .config import Config, UserError
from .runtime import Process
from .strategy import LossFn, Strategy, prepare_blocks


class Parallel(Strategy):
    """The model under DDP."""

    def __init__(self, model: nn.Sequential, loss_fn: LossFn, config: Config, process: Process) -> None:
        super().__init__(loss_fn, config, process, dp_rank=process.rank)
        layout, on_cpu = config.parallel, self.device.type == "cpu"
        if layout.sync_batch_norm:
            if on_cpu and process.world_size > 1:
                raise UserError("parallel.sync_batch_norm needs accelerators: SyncBatchNorm does not support the CPU")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        prepare_blocks(model.to(self.device), config.train)
        self.module = model
        self.ddp = DistributedDataParallel(
            model,
            device_ids=None if on_cpu else [self.device],
            # Buffers are averaged before they are used (Strategy.average_buffers), not broadcast in every forward.
            forward_sync_buffers=False,
            bucket_cap_mb=layout.bucket_cap_mb,
            gradient_as_bucket_view=layout.gradient_as_bucket_view,
            static_graph=layout.static_graph,
            find_unused_parameters=layout.find_unused_parameters,
        )
        # With these settings, DDP itself detects parameters without a gradient.
        self.gradients_checked = layout.find_unused_parameters or layout.static_graph

    def forward_backward(self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        total = torch.zeros((), device=self.device)
        pieces = self.split_batch(inputs, targets)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            # Gradients accumulate locally; only the last micro-batch starts the all-reduce.
            with self.ddp.no_sync() if number < len(pieces) else nullcontext():
                with self.autocast():
                    loss = self.loss_fn(self.ddp(some_inputs), some_targets) / len(pieces)
                scaler.scale(loss).backward()
            total += loss.detach()
        if not self.gradients_checked:
            check_gradients(self.module)
            self.gradients_checked = True
        return total / self.dp_size

    def predict(self, inputs: Tensor) -> Tensor | None:
        with self.autocast():
            return self.module(inputs)


#:: include "parallelism/shared/gradients.py" ::#
