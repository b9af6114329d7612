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
from .distributed import Process, wide_dtype
from .model import build_model

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Gradients = dict[Any, Tensor]  # By parameter: a gradient, or a sum of gradients.


class Parallel:
    """The model under DDP. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.dp_rank = process.rank
        self.dp_size = process.world_size
        count = config.data.num_microbatches // self.dp_size
        # The numbers of this rank's micro-batches: a contiguous range of the global batch's.
        first = count * self.dp_rank
        self.microbatches = range(first, first + count)
        # Ranks join sums as one rank would if each has a subtree: 1, 2, 4, ... micro-batches.
        self.matches_one_rank = self.dp_size == 1 or count & (count - 1) == 0
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
        self.partial_sums = list[Gradients]()
        self.exact = config.train.exact
        self.ddp = DistributedDataParallel(
            self.module,
            find_unused_parameters=config.train.allow_unused,
            gradient_as_bucket_view=True,
        )
        # Each forward reads this attribute. Its argument has another name since PyTorch 2.13.
        self.ddp.broadcast_buffers = False  # Rank 0's would replace all: see average_buffers().
        self.ddp.register_comm_hook(None, self.all_reduce)

    def forward_backward(
        self, microbatches: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        self.is_reduced = False
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            # Gradients add up. During the last backward, DDP calls all_reduce() for each bucket.
            is_last = number == len(self.microbatches)
            self.ddp.require_backward_grad_sync = is_last
            with self.autocast:
                loss = mean_loss(self.ddp(inputs), targets)
            self.scaler.scale(loss).backward()
            if self.exact and not is_last:
                add_as_tree(self.module, number, self.partial_sums)
        self.partial_sums.clear()

    def all_reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Add up a bucket of gradients, which backward has finished, over all ranks."""
        # A bucket has the last micro-batches' gradients. Add earlier ones' sums, small ones first.
        for sums in reversed(self.partial_sums):
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                gradient += sums.get(parameter, 0)
        gradients = bucket.buffer()
        self.is_reduced = bucket.is_last()
        if self.dp_size <= 2 or not self.exact:
            # Two ranks are a tree. With more, PyTorch's all-reduce may add in any order.
            message = dist.all_reduce(gradients, async_op=True)
            return message.get_future().then(lambda _: gradients)
        # Zeros complete the last of equal parts, of which each rank adds up one.
        padded = nn.functional.pad(gradients, (0, -len(gradients) % self.dp_size))
        part = reduce_scatter_as_tree(padded)
        message = dist.all_gather(list(padded.chunk(self.dp_size)), part, async_op=True)
        return message.get_future().then(lambda _: gradients.copy_(padded[: len(gradients)]))

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs."""
        with self.autocast:
            return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        # DDP keeps a bucket that waits for a gradient, and all that come after it.
        if not self.is_reduced:
            raise UserError(
                "a parameter is unused in the last micro-batch; use it, or set train.allow_unused"
            )
        gradients = [value.grad for value in self.module.parameters() if value.grad is not None]
        total_norm = norm(gradients).to(wide_dtype())
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, total_norm)
        return total_norm

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over the ranks before a save; a collective."""
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG)

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


def add_as_tree(module: nn.Module, number: int, partial_sums: list[Gradients]) -> None:
    """Add up gradients as a binary tree, when this rank has run backward ``number`` times.

    ``partial_sums`` is a binary counter. Of gradients 1 to 8, it holds the sum of 1-2 after the
    second; of 1-4 after the fourth; of 1-4 and of 5-6 after the sixth.
    """
    if number % 2:
        return  # The next backward adds its gradients to those of this one, which makes a pair.
    sums = Gradients()
    for parameter in module.parameters():
        if parameter.grad is not None:
            sums[parameter] = parameter.grad.clone()
    # What later micro-batches lack keeps a gradient, zero, to which the sums are added.
    module.zero_grad(set_to_none=False)
    # While 4 divides the number, a sum over as many gradients waits: both become one.
    while number % 4 == 0:
        for parameter, gradient in partial_sums.pop().items():
            sums[parameter] += gradient
        number //= 2
    partial_sums.append(sums)


def reduce_scatter_as_tree(buffer: Tensor) -> Tensor:
    """Add up all ranks' buffers as a tree; returns part r of N on rank r of N; a collective."""
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer)
    parts = received.chunk(dist.get_world_size())
    while len(parts) > 1:
        # The last of an odd number of parts waits for the next round.
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
        block.compile()
    return block
