"""Distributed data parallel: every rank holds the whole model and reads its local batch.

During backward, DDP averages finished buckets of gradients over the ranks with an all-reduce. So
every rank takes the same optimizer step, and the copies of the model stay equal.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer, copy_state, load_parameter_state
from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel:
    """The model under DDP. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.dp_rank = process.rank
        self.dp_size = process.world_size
        self.dp_group = dist.group.WORLD
        self.microbatches = config.train.microbatches
        self.precision = config.train.precision
        # fp16 rounds small gradients to zero: the scaler multiplies the loss, and so gradients.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        # Blocks are prepared while the model is built: first recomputation, then compilation.
        model = build_model(config.model, partial(prepare_block, config=config))
        self.module: nn.Module = model.to(self.device)
        self.ddp = self.build_ddp(config.train.allow_unused)

    def build_ddp(self, find_unused: bool) -> DistributedDataParallel:
        """Wrap the module in DDP, and fix which gradients DDP adds up together in a bucket.

        A gradient's position in its bucket decides how its sum is rounded. After a first backward,
        DDP fills new buckets in the order in which gradients became ready, and keeps them. This
        happens here, with the parameters' sum, so that no step of a resumed run is rounded anew.
        """
        ddp = DistributedDataParallel(
            self.module, find_unused_parameters=find_unused, gradient_as_bucket_view=True
        )
        # Each forward reads this. The argument has another name since PyTorch 2.13.
        ddp.broadcast_buffers = False  # That would keep rank 0's alone: see average_buffers().
        # Sums may be on several devices, and complex: only what is real has a backward.
        total = sum(
            weight.sum().abs().to(self.device)
            for weight in self.module.parameters()
            if weight.requires_grad
        )
        # DDP calls whatever is its module now, and the model itself would need a batch.
        ddp.module = nn.Identity()
        ddp(total).backward()
        ddp.module = self.module
        self.module.zero_grad()
        return ddp

    def forward_backward(
        self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        microbatches = split_batch((inputs, targets), self.microbatches)
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            # mean_loss divides by the whole weight, so gradients add up. The last all-reduces them.
            is_last = number == len(microbatches)
            with nullcontext() if is_last else self.ddp.no_sync():
                with self.autocast():
                    loss = mean_loss(self.ddp(inputs), targets)
                self.scaler.scale(loss).backward()

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        with self.autocast():
            return self.module(inputs)

    def autocast(self) -> torch.autocast:
        """Compute in ``train.precision`` where that is safe; weights and gradients stay in fp32."""
        dtype = AUTOCAST_DTYPES.get(self.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def average_buffers(self) -> None:
        """Average BatchNorm's statistics over data-parallel ranks, and reject copies that drift."""
        self.check_copies()
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def check_copies(self) -> None:
        """Reject parameters whose copies on the ranks have drifted apart."""
        sums = {}
        for name, parameter in self.module.named_parameters():
            # The sum of the bytes is the same in any order, and for NaN.
            sums[name] = parameter.flatten().view(torch.uint8).sum().item()
        for other_sums in self.process.all_gather(sums):
            differing = sums.items() - other_sums.items()
            if differing:
                raise UserError(f"copies of {min(differing)[0]} drift apart: by forward, or unused")

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return copies of all weights and optimizer state on rank 0's CPU."""
        if self.process.rank != 0:
            return {}
        return copy_state(self.module, optimizer, lambda tensor: tensor.to("cpu", copy=True))

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None, state: Any) -> None:
        """Load rank 0's weights of the whole model and, if given, an optimizer's state."""
        weights = {}
        parameters = dict(self.module.named_parameters())
        # Rank 0 sends one tensor after the other, with its state.
        names = self.process.all_gather(list(model))[0]
        for name in names:
            entry = [model.get(name), state.get(name, {})]
            dist.broadcast_object_list(entry, 0, self.process.cpu_group)
            weights[name] = entry[0]
            if optimizer is not None and name in parameters:
                load_parameter_state(optimizer, parameters[name], entry[1])
        self.module.load_state_dict(weights)  # PyTorch names what is missing or unknown.


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            problem = "train.activation_checkpointing updates BatchNorm's statistics twice"
            raise UserError(f"{problem}; turn it off")
        # A wrapper module would do the same, but change the names of parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        # The compiled code includes the recomputation, which is a part of forward by now.
        block.compile()
    return block
