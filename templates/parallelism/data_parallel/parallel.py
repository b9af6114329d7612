"""nn.DataParallel: one process copies the model to all accelerators in every forward.

Each accelerator computes a part of the batch; outputs and gradients return to the first one, where the loss is computed
and the optimizer steps. On a machine without accelerators, the model runs unchanged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer
from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model


class Parallel:
    """The model under nn.DataParallel. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.device, self.microbatches = process.device, config.train.microbatches
        self.dp_rank, self.dp_size, self.dp_group = 0, 1, dist.group.WORLD
        precision, kind = config.train.precision, self.device.type
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        self.autocast = partial(torch.autocast, kind, dtype, enabled=precision != "fp32")
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")
        self.module: nn.Module = build_model(config.model, partial(prepare_block, config=config)).to(self.device)
        whole = Autocast(self.module, self.autocast)
        self.copies = nn.DataParallel(whole) if kind != "cpu" else whole  # It would take the machine's devices.

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
        microbatches = split_batch((inputs, targets), self.microbatches)
        for inputs, targets in microbatches:
            outputs = self.copies(inputs)
            with self.autocast():
                loss = mean_loss(outputs, targets)
            self.scaler.scale(loss).backward()

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        return self.copies(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/state.py" ::#
#:: endfilter ::#


class Autocast(nn.Module):
    """Runs a module in its precision, which a thread of nn.DataParallel does not inherit."""

    def __init__(self, module: nn.Module, autocast: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.module, self.autocast = module, autocast

    def forward(self, inputs: Any) -> Any:
        with self.autocast():
            return self.module(inputs)


#:: include "parallelism/shared/blocks.py" ::#
