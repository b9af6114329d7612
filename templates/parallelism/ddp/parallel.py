"""Distributed data parallel: every rank holds the whole model and reads its local batch.

During backward, DDP hands over finished buckets of gradients, which are added up over the ranks. So
every rank takes the same optimizer step, and the copies of the model stay equal.
"""

from collections.abc import Callable, Iterable
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
from .model import build_model

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Gradients = dict[Any, Tensor]  # The gradient of each parameter.


class Parallel:
    """The model under DDP. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.dp_rank = process.rank
        self.dp_size = process.world_size
        count = config.data.num_microbatches // self.dp_size
        # The numbers of this rank's micro-batches in the global batch, where they are neighbors.
        first = count * self.dp_rank
        self.microbatches = range(first, first + count)
        # Ranks continue the tree of a rank if that is complete. For one rank, any is.
        self.is_tree = self.dp_size == 1 or count & (count - 1) == 0
        # This computes in train.precision where that is safe; weights and gradients stay in fp32.
        dtype = AUTOCAST_DTYPES.get(config.train.precision)
        self.autocast = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        # fp16 rounds small gradients to zero: the scaler multiplies the loss, and so gradients.
        # A micro-batch has a small part of the mean loss: more of them allow a larger scale.
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=2.0**16 * config.data.num_microbatches,
            enabled=dtype == torch.float16,
        )
        # Blocks are prepared while the model is built: first recomputation, then compilation.
        model = build_model(config.model, partial(prepare_block, config=config))
        self.module: nn.Module = model.to(self.device)
        self.waiting: list[Gradients] = []
        self.exact = config.train.exact
        self.ddp = DistributedDataParallel(
            self.module,
            find_unused_parameters=config.train.allow_unused,
            gradient_as_bucket_view=True,
        )
        # Each forward reads this. The argument has another name since PyTorch 2.13.
        self.ddp.broadcast_buffers = False  # That would keep rank 0's alone: see average_buffers().
        self.ddp.register_comm_hook(None, self.all_reduce)

    def forward_backward(
        self, microbatches: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            # Gradients add up. During the last backward, all_reduce() adds those of all ranks.
            is_last = number == len(self.microbatches)
            self.ddp.require_backward_grad_sync = is_last
            with self.autocast:
                loss = mean_loss(self.ddp(inputs), targets)
            self.scaler.scale(loss).backward()
            if self.exact and not is_last:
                set_aside(self.module, number, self.waiting)
        self.waiting.clear()

    def all_reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Add up a bucket of gradients, which backward has finished, over all ranks."""
        # The last micro-batches' gradients are here, and sums that wait for them: small ones first.
        for sums in reversed(self.waiting):
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                gradient += sums.get(parameter, 0)
        gradients = bucket.buffer()
        # If a message failed, so does the next one, before anything is saved.
        if self.dp_size <= 2 or not self.exact:
            # Two ranks are a tree. With more, PyTorch's all-reduce may add in any order.
            message = dist.all_reduce(gradients, async_op=True)
            return message.get_future().then(lambda _: gradients)
        # A rank adds up one of equal parts. A copy has zeros at its end that complete the last.
        parts = nn.functional.pad(gradients, (0, -len(gradients) % self.dp_size))
        message = dist.all_gather(
            list(parts.chunk(self.dp_size)),
            add_ranks(parts),
            async_op=True,
        )
        return message.get_future().then(lambda _: gradients.copy_(parts[: len(gradients)]))

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        with self.autocast:
            return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        gradients = [value.grad for value in self.module.parameters() if value.grad is not None]
        total_norm = norm(gradients).float()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, total_norm)
        return total_norm

    def average_buffers(self) -> None:
        """Average BatchNorm's statistics over the ranks, and reject copies that drift apart."""
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG)
        for name, parameter in self.module.named_parameters():
            # The sum of the bytes is the same in any order, and for NaN.
            checksum = parameter.flatten().view(torch.uint8).sum()
            highest = checksum.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            if highest != checksum:
                raise UserError(f"copies of {name} drift apart: by forward, or unused")

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return copies of all weights and optimizer state on rank 0's CPU."""
        if self.process.rank != 0:
            return {}
        return copy_state(self.module, optimizer, lambda tensor: tensor.to("cpu", copy=True))

    def load_full_state_dict(
        self,
        model: Any,
        optimizer: Optimizer | None,
        state: Any,
    ) -> None:
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


def norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all numbers, in float64: then, their order hardly matters."""
    norms = []
    for tensor in tensors:
        wide = torch.float32 if tensor.is_mps else torch.float64  # MPS has no other.
        dtype = torch.promote_types(tensor.dtype, wide)  # A tensor may be complex.
        norms.append(torch.linalg.vector_norm(tensor, dtype=dtype))
    return nn.utils.get_total_norm(norms)


def set_aside(module: nn.Module, number: int, waiting: list[Gradients]) -> None:
    """Add up the gradients of a rank's micro-batches as a binary tree, when ``number`` are done.

    A rank with half of the micro-batches computes half of this tree, and ranks add up the halves:
    on 1, 2, 4, ... ranks, each sum is rounded in the same way. ``waiting`` has sums over 2, 4, 8,
    ... micro-batches, each until as many more have been added up.
    """
    if number % 2:
        return  # The next backward adds its gradients to those of this one.
    sums: Gradients = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            sums[parameter] = parameter.grad.clone()
    # Later micro-batches may lack a gradient, which has to be zero: ranks add up what is there.
    module.zero_grad(set_to_none=False)
    while number % 4 == 0:
        for parameter, gradient in waiting.pop().items():
            sums[parameter] += gradient
        number //= 2
    waiting.append(sums)


def add_ranks(buffer: Tensor) -> Tensor:
    """Return this rank's part of the sum of all ranks' buffers, added up as a tree; a collective.

    Rank r of N gets the part r of N equal parts.
    """
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer)
    parts = received.chunk(dist.get_world_size())
    while len(parts) > 1:
        for part, neighbor in zip(parts[::2], parts[1::2], strict=False):
            part += neighbor
        parts = parts[::2]
    return parts[0]


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
        # The compiled code includes the recomputation, which is a part of forward by now.
        block.compile()
    return block
