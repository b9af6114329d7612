"""Model parallelism: the blocks of one model are on several devices of one process, which a batch visits in turn.

Each rank has its own devices and holds a copy of the model. The ranks read local batches, and DDP averages their
gradients while backward runs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

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
from .loader import split_batch, to_device
from .model import build_model


class Parallel:
    """The model on this rank's devices. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.device, self.microbatches = process.device, config.train.microbatches
        self.dp_rank, self.dp_size, self.dp_group = process.rank, process.world_size, dist.group.WORLD
        precision, kind = config.train.precision, self.device.type
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        self.autocast = partial(torch.autocast, kind, dtype, enabled=precision != "fp32")
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")
        self.cpu_group, seen = process.cpu_group, WeakValueDictionary[int, nn.Parameter]()
        self.module: nn.Module = build_model(config.model, partial(prepare_block, config=config))
        blocks = list(self.module.children())
        for number, block in enumerate(blocks):
            refuse_shared(block, seen)
            place(block, choose_device(self.device, number * config.parallel.devices // len(blocks)))
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
                    outputs = self.ddp(inputs)
                    loss = mean_loss(*to_device((outputs, targets), outputs.device))
                self.scaler.scale(loss).backward()

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        with self.autocast():
            return self.module(inputs).to(self.device)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/buffers.py" ::#

#:: include "parallelism/shared/gather.py" ::#
#:: endfilter ::#

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
        """Load rank 0's weights of the whole model, and the optimizer's state if given."""
        content = [model, state]  # Not tensor by tensor, which would have to be on one device.
        dist.broadcast_object_list(content, src=0, group=self.cpu_group)
        dsd.set_model_state_dict(self.module, content[0])
        if optimizer:
            whole = dsd.get_optimizer_state_dict(self.module, optimizer) | {"state": content[1] or {}}
            dsd.set_optimizer_state_dict(self.module, optimizer, whole, options=dsd.StateDictOptions(strict=False))


def choose_device(first: torch.device, index: int) -> torch.device:
    """Return the device that is ``index`` after a rank's ``first`` one; a CPU stands in for all of them."""
    if first.type == "cpu":
        return first
    # Ranks may share devices.
    return torch.device(first.type, (first.index + index) % torch.accelerator.device_count())


def place(block: nn.Module, device: torch.device) -> None:
    """Move a block to a device, and make it move its inputs there."""
    block.to(device).register_forward_pre_hook(lambda _, inputs: to_device((inputs, None), device)[0])


#:: include "parallelism/shared/ties.py" ::#


#:: include "parallelism/shared/blocks.py" ::#
