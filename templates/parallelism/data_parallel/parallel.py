"""nn.DataParallel: one process copies the model to all accelerators in every forward.

Each accelerator computes a part of the batch; outputs and gradients return to the first one, where the loss is computed
and the optimizer steps. On a machine without accelerators, the model runs unchanged.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer as Checkpointer
from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model
from .task import Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel:
    """The model under nn.DataParallel. The loop uses only what all strategies have."""

    def __init__(self, task: Task, config: Config, process: Process) -> None:
        self.task, self.device, self.microbatches = task, process.device, config.train.microbatches
        self.dp_rank, self.dp_size, self.dp_group = 0, 1, dist.group.WORLD
        precision, kind = config.train.precision, self.device.type
        self.autocast = partial(torch.autocast, kind, DTYPES[precision], enabled=precision != "fp32")
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")
        self.module: nn.Module = build_model(config.model, partial(prepare_block, config=config)).to(self.device)
        self.copies = nn.DataParallel(self.module)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
        totals: dict[str, Tensor] = {}
        microbatches = split_batch((inputs, targets), self.microbatches)
        for inputs, targets in microbatches:
            with self.autocast():
                losses = self.task.losses(self.copies(inputs), targets)
            losses = {name: loss / weight for name, loss in losses.items()}
            self.scaler.scale(losses["loss"]).backward()
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0) + loss.detach()
        return totals

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        with self.autocast():
            return self.copies(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/state.py" ::#
#:: endfilter ::#


#:: include "parallelism/shared/blocks.py" ::#
