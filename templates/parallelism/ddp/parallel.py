"""Distributed data parallel: every rank holds the whole model and reads its local batch, a part of the global one.

Backward computes the gradients of the local batch. While it runs, DDP averages finished buckets of gradients over the
ranks with an all-reduce, so every rank takes the same optimizer step and the copies of the model stay equal.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer
from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model


class Parallel:
    """The model under DDP. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.device, self.microbatches = process.device, config.train.microbatches
        self.dp_rank, self.dp_size, self.dp_group = process.rank, process.world_size, dist.group.WORLD
        precision, kind = config.train.precision, self.device.type
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        self.autocast = partial(torch.autocast, kind, dtype, enabled=precision != "fp32")
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")
        self.module: nn.Module = build_model(config.model, partial(prepare_block, config=config)).to(self.device)
        self.ddp = self.build_ddp(config.train.allow_unused)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/ddp.py" ::#
#:: endfilter ::#

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
        microbatches = split_batch((inputs, targets), self.microbatches)
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            # Gradients accumulate locally; only the last micro-batch starts the all-reduce.
            with self.ddp.no_sync() if number < self.microbatches else nullcontext():
                with self.autocast():
                    loss = mean_loss(self.ddp(inputs), targets)
                self.scaler.scale(loss).backward()

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        with self.autocast():
            return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/state.py" ::#
#:: endfilter ::#


#:: include "parallelism/shared/blocks.py" ::#
