"""Fully sharded data parallel: every rank holds a shard of each block and reads its local batch.

Before a block runs, its weights are gathered from all ranks; afterwards, they are freed. Its
gradients are added up and scattered, so that each rank gets those of its own shard and updates only
that shard.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process, wide_dtype
from .model import build_model
from .sharded import Checkpointer, collect_state, load_state

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Gradients = dict[Any, Tensor]  # By parameter: a gradient, or a sum of gradients.


class Parallel:
    """The model under FSDP2. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.dp_rank = process.rank
        self.dp_size = process.world_size
        self.dp_group = dist.group.WORLD
        count = config.data.num_microbatches // self.dp_size
        # The numbers of this rank's micro-batches in the global batch. Ranks take turns: each
        # backward leaves the sum over one turn's neighbors, as add_as_tree() does at higher levels.
        self.microbatches = range(self.dp_rank, count * self.dp_size, self.dp_size)
        self.matches_one_rank = self.dp_size & (self.dp_size - 1) == 0
        self.allow_unused = config.train.allow_unused
        self.exact = config.train.exact
        dtype = DTYPES.get(config.train.precision, wide_dtype())
        # fp16 rounds small gradients to zero: the scaler multiplies the loss, and so gradients.
        # A micro-batch has a small part of the mean loss: more of them allow a larger scale.
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=2.0**16 * config.data.num_microbatches,
            enabled=dtype == torch.float16,
        )
        # Blocks compute in this precision; shards stay in fp32, and so do sums of gradients.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide_dtype())
        mesh = self.build_mesh(config.parallel.replicas)
        self.shard_model(config, partial(fully_shard, mesh=mesh, mp_policy=policy))
        self.partial_sums = list[Gradients]()
        # The parameters that forward sees, and those that the last backward has reached.
        self.gathered = dict[str, Tensor]()
        self.reached = set[Tensor]()
        self.watch_parameters()

    def build_mesh(self, replicas: int) -> DeviceMesh:
        """Return the mesh to shard over; with replicas, its first dimension is theirs."""
        shape = (replicas, self.dp_size // replicas)
        names = ("replicate", "shard")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self.shard_group = mesh.get_group("shard")
        if replicas > 1:
            return mesh
        # FSDP would all-reduce gradients over the dimension of replicas, even with only one.
        return mesh["shard"]

    def shard_model(self, config: Config, shard: Callable[..., Any]) -> None:
        """Build the model; shard each block at once, so that no rank holds all weights whole."""
        blocks = list[nn.Module]()

        def wrap(block: nn.Module) -> nn.Module:
            refuse_shared(block)
            # FSDP comes last: its hooks gather weights around forward, and around recomputation.
            prepare_block(block, config)
            shard(block, reshard_after_forward=config.parallel.reshard_after_forward)
            blocks.append(block)
            return block

        self.module = build_model(config.model, wrap)
        # The model may have let its blocks share parameters after they were wrapped.
        for block in blocks:
            refuse_shared(block)
        # This shards parameters outside of the blocks, and returns self.module as an FSDPModule.
        self.fsdp = shard(self.module)
        tree: Any = TreeReduceScatter()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                # Gradients add up to that of the mean.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if self.exact:
                    module.set_custom_reduce_scatter(tree)
        # Backward starts with the last block, whose weights forward would have freed for nothing.
        self.last_block = cast(FSDPModule, blocks[-1])
        self.last_block.set_reshard_after_forward(False)

    def forward_backward(
        self, microbatches: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            self.reached.clear()
            is_last = number == len(self.microbatches)
            # FSDP scatters gradients after every micro-batch: keeping them whole until the last
            # would take the memory of a whole model. Replicas add up shards once, after the last.
            self.fsdp.set_requires_all_reduce(is_last)
            loss = mean_loss(self.module(inputs), targets)
            self.check_unchanged()
            self.scaler.scale(loss).backward()
            self.check_used()
            if self.exact and not is_last:
                add_as_tree(self.module, number, self.partial_sums)
        for sums in reversed(self.partial_sums):  # Small sums come first.
            for parameter, gradient in sums.items():
                parameter.grad += gradient
        self.partial_sums.clear()

    def watch_parameters(self) -> None:
        """Keep gathered parameters; a backward adds those that it reaches to ``reached``."""
        # The whole model comes last: its unshard() gathers only parameters outside of the blocks.
        for prefix, block in reversed(list(self.module.named_modules())):
            if not isinstance(block, FSDPModule):
                continue
            # Hooks belong on gathered parameters. FSDP frees their memory, but keeps these objects.
            block.unshard()
            for name, parameter in cast(nn.Module, block).named_parameters(prefix):
                if name not in self.gathered:
                    self.gathered[name] = parameter
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(self.reached.add)
            block.reshard()

    def check_unchanged(self) -> None:
        """Reject a forward that changes a parameter: it has changed a copy, which is freed."""
        for name, parameter in self.gathered.items():
            # A version counts writes in place. FSDP excludes those of its all-gathers.
            if parameter._version > 0:
                raise UserError(f"micro-batches change {name}; do so at the end of train_step")

    def check_used(self) -> None:
        """Reject a micro-batch without a gradient of a parameter that other ranks may have."""
        # FSDP has concatenated the gradients that a rank has, and added the results up over the
        # ranks: where one rank lacked a gradient, those of different parameters were added.
        unused = set[str]()
        for name, parameter in self.gathered.items():
            if parameter.requires_grad and parameter not in self.reached:
                unused.add(name)
        if unused and not self.allow_unused:
            raise UserError(
                f"the loss does not depend on {sorted(unused)[:5]} in each micro-batch; "
                "use or freeze them, or set train.allow_unused"
            )
        if self.allow_unused:
            unused_by_rank = self.process.all_gather(unused)
            used_by_some = set.union(*unused_by_rank) - set.intersection(*unused_by_rank)
            if used_by_some:
                raise UserError(f"only some ranks use {min(used_by_some)}; all have to, or none")

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs; a collective."""
        outputs = self.module(inputs)
        # No backward follows that would free the last block's weights.
        self.last_block.reshard()
        return outputs

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        gradient_shards = list[Tensor]()
        for parameter in self.module.parameters():
            gradient: Any = parameter.grad
            if gradient is not None:
                gradient_shards.append(gradient.to_local())
        local_norm = norm(gradient_shards)
        # An all-reduce may add in any order. Gathered norms have the order of ranks, so all scale
        # their shards by the same bits. Replicas have equal gradients, and each counts its own.
        norms = [torch.empty_like(local_norm) for _ in range(dist.get_world_size(self.shard_group))]
        dist.all_gather(norms, local_norm, group=self.shard_group)
        # Shards add up in another order than a whole tensor. In float64, that changes the rounded
        # norm in one of about 10**5 to 10**7 steps, depending on the tensors' sizes.
        total_norm = norm(norms).to(wide_dtype())
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, total_norm)
        return total_norm

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over the data-parallel ranks; a collective."""
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return copies of all weights and optimizer state on rank 0's CPU; a collective."""
        return collect_state(self.module, optimizer, keeps=self.process.rank == 0)

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None, state: Any) -> None:
        """Load rank 0's weights of the whole model and, if given, an optimizer's state."""
        load_state(self.module, optimizer, model, state, self.process)


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


def reduce_scatter_as_tree(buffer: Tensor, group: Any) -> Tensor:
    """Add up all ranks' buffers as a tree; returns part r of N on rank r of N; a collective."""
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer, group=group)
    parts = received.chunk(dist.get_world_size(group))
    while len(parts) > 1:
        # The last of an odd number of parts waits for the next round.
        for part, neighbor in zip(parts[::2], parts[1::2], strict=False):
            part += neighbor
        parts = parts[::2]
    return parts[0]


class TreeReduceScatter:
    """What FSDP calls to add up a block's gradients: each rank gets the sum of its shard."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add up and scatter on the current stream, which is FSDP's; ``op`` is always a sum."""
        output_tensor.copy_(reduce_scatter_as_tree(input_tensor, group))


def refuse_shared(block: nn.Module) -> None:
    """Reject a parameter that another block has, too: each block would train its own copy."""
    parameter: Any
    for name, parameter in block.named_parameters():
        if hasattr(parameter, "is_in_a_block"):
            raise UserError(
                f"{name} of the {type(block).__name__} is shared with another block; use a copy"
            )
        # A parameter loses the mark when a shard replaces it; a later call marks the shard.
        parameter.is_in_a_block = True


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    for name, buffer in block.named_buffers():
        if not buffer.is_contiguous():
            raise UserError(f"buffer {name} cannot be loaded; make it contiguous")
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
