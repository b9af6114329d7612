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

    def forward_backward(self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]) -> None:
        """Leave in each parameter the gradient of the mean loss over all micro-batches; a collective."""
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

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over ranks with other samples."""
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole model's weights, and the optimizer's state by parameter, on rank 0's CPU."""
        options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = dsd.get_state_dict(self.module, optimizer, options=options)
        return {"model": model, "optimizer": {"state": optim.get("state", {})}}  # On other ranks, there is none.

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
        """Load rank 0's weights of the whole model, and the optimizer's state if given."""
        options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dsd.set_model_state_dict(self.module, model, options=options)
        options.strict = False  # A parameter that never had a gradient has no state.
        if optimizer and (own := dsd.get_optimizer_state_dict(self.module, optimizer))["state"]:  # Plain SGD has none.
            dsd.set_optimizer_state_dict(self.module, optimizer, {**own, "state": state or {}}, options=options)


class Autocast(nn.Module):
    """Runs a module in its precision, which a thread of nn.DataParallel does not inherit."""

    def __init__(self, module: nn.Module, autocast: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.module, self.autocast = module, autocast

    def forward(self, inputs: Any) -> Any:
        with self.autocast():
            return self.module(inputs)


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            raise UserError("train.activation_checkpointing updates BatchNorm's statistics twice; turn it off")
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()
    return block
