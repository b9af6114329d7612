"""nn.DataParallel: one process copies the model to all accelerators in every forward.

Each accelerator computes a part of the batch; outputs and gradients return to the first one, where
the loss is computed and the optimizer steps. On a machine without accelerators, the model runs
unchanged.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer, copy_state, load_parameter_state
from .config import Config, UserError
from .distributed import Process, wide_dtype
from .model import build_model

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel:
    """The model under nn.DataParallel. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        # One process reads the whole global batch, whatever the number of its accelerators.
        self.dp_rank = 0
        self.dp_size = 1
        self.dp_group = dist.group.WORLD
        self.microbatches = range(config.data.num_microbatches)
        self.matches_one_rank = False  # Accelerators' gradients are added up in one order.
        self.precision = config.train.precision
        # fp16 rounds small gradients to zero: the scaler multiplies the loss, and so gradients.
        # A micro-batch has a small part of the mean loss: more of them allow a larger scale.
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=2.0**16 * config.data.num_microbatches,
            enabled=self.precision == "fp16",
        )
        # Blocks are prepared while the model is built: first recomputation, then compilation.
        model = build_model(config.model, partial(prepare_block, config=config))
        self.module: nn.Module = model.to(self.device)
        self.copies: nn.Module = Autocast(self.module, self.autocast)
        # nn.DataParallel takes all accelerators of the machine, also when a run is to use the CPU.
        if self.device.type != "cpu":
            self.copies = nn.DataParallel(self.copies)

    def forward_backward(
        self, microbatches: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        for inputs, targets in microbatches:
            outputs = self.copies(inputs)
            with self.autocast():
                loss = mean_loss(outputs, targets)
            self.scaler.scale(loss).backward()

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs."""
        return self.copies(inputs)

    def autocast(self) -> torch.autocast:
        """Compute in ``train.precision`` where that is safe; weights and gradients stay in fp32."""
        dtype = AUTOCAST_DTYPES.get(self.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        gradients = [value.grad for value in self.module.parameters() if value.grad is not None]
        total_norm = norm(gradients).to(wide_dtype())
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, total_norm)
        return total_norm

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over the data-parallel ranks; a collective."""
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

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
        for name in self.process.all_gather(list(model))[0]:
            entry = [model.get(name), state.get(name, {})]
            dist.broadcast_object_list(entry, 0, self.process.cpu_group)
            weights[name] = entry[0]
            if optimizer is not None and name in parameters:
                load_parameter_state(optimizer, parameters[name], entry[1])
        self.module.load_state_dict(weights)  # PyTorch names what is missing or unknown.


def norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all numbers, in float64: then, their order hardly matters."""
    norms = []
    for tensor in tensors:
        wide = torch.float32 if tensor.is_mps else torch.float64  # MPS has no other.
        dtype = torch.promote_types(tensor.dtype, wide)  # A tensor may be complex.
        norms.append(torch.linalg.vector_norm(tensor, dtype=dtype))
    return nn.utils.get_total_norm(norms)


class Autocast(nn.Module):
    """Runs a module under autocast, which the threads of nn.DataParallel do not inherit."""

    def __init__(self, module: nn.Module, autocast: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.module = module
        self.autocast = autocast

    def forward(self, inputs: Any) -> Any:
        with self.autocast():
            return self.module(inputs)


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            raise UserError(
                "train.activation_checkpointing updates BatchNorm's statistics twice; turn it off"
            )
        # A wrapper module would do the same, but change the names of parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()
    return block
