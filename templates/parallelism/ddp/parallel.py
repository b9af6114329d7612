"""Distributed data parallel: every rank holds the whole model and reads its share of each batch.

Backward computes the gradients of a rank's share. While it runs, DDP averages finished buckets of gradients over the
ranks with an all-reduce, so every rank takes the same optimizer step and the copies of the model stay equal.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .config import Config, UserError
from .model import blocks
from .runtime import Process
from .splitting import build_by_block, name_some, split_batch
from .strategy import BuildFn, LossFn, Strategy


class Parallel(Strategy):
    """The model under DDP."""

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        super().__init__(loss_fn, config, process, dp_rank=process.rank)
        layout, on_cpu = config.parallel, self.device.type == "cpu"
        # Each block moves to the device when it is built, so that the whole model is never on the CPU as well.
        model, _ = build_by_block(build, blocks, config.train, lambda block: block.to(self.device))
        if layout.sync_batch_norm:
            if on_cpu and process.world_size > 1:
                raise UserError("parallel.sync_batch_norm needs accelerators: SyncBatchNorm does not support the CPU")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.module = model.to(self.device)
        self.ddp = DistributedDataParallel(
            self.module,
            device_ids=None if on_cpu else [self.device],
            # Buffers are averaged before they are used (Strategy.average_buffers), not broadcast in every forward.
            forward_sync_buffers=False,
            bucket_cap_mb=layout.bucket_cap_mb or choose_bucket_cap(self.module),
            gradient_as_bucket_view=layout.gradient_as_bucket_view,
            static_graph=layout.static_graph,
            find_unused_parameters=layout.find_unused_parameters,
        )
        # With these settings, DDP itself detects parameters without a gradient.
        self.gradients_checked = layout.find_unused_parameters or layout.static_graph

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        pieces = split_batch((inputs, targets), self.microbatches)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            # Gradients accumulate locally; only the last micro-batch starts the all-reduce.
            with self.ddp.no_sync() if number < len(pieces) else nullcontext():
                with self.autocast():
                    loss = self.add_loss(self.ddp(some_inputs), some_targets)
                # DDP averages over the ranks what has to be summed.
                scaler.scale(loss * self.dp_size).backward()
        if not self.gradients_checked:
            check_gradients(self.module)
            self.gradients_checked = True
        return self.finish_losses()

    def predict(self, inputs: Any) -> Any:
        with self.autocast():
            return self.module(inputs)


#:: include "parallelism/shared/gradients.py" ::#
