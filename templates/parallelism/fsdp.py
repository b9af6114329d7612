"""Fully sharded data parallel: every rank holds a shard of each block and reads its share of each batch.

Before a block runs, its weights are gathered from all ranks, and freed after it; its gradients are averaged and
scattered, so that a rank keeps those of its own shard and updates that alone. The ranks compute what they would compute
with the whole model in each of them, in 1/N of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .blocks import prepare_blocks
from .config import Config, ParallelConfig
from .distributed import World

# What blocks compute in; shards stay in fp32, and gradients are averaged in it.
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel:
    """The model, spread over the ranks. All that the rest of the package knows of how the work is split is this class.

    Attributes:
        module: What this rank holds of the model; its parameters have the names that they have in the whole one.
        device: Where inputs and targets have to be.
        data_rank: Which share of every batch this rank reads.
        data_size: Number of such shares.
        data_group: The ranks that hold the same part of the model and read other shares; None if that is all ranks.
    """

    def __init__(
        self, model: nn.Sequential, loss_fn: Callable[[Tensor, Tensor], Tensor], config: Config, world: World
    ) -> None:
        """Spread ``model``, which has to hold the same weights on every rank.

        Args:
            model: A sequence of named blocks, on the CPU.
            loss_fn: Takes outputs and targets, gives their mean loss as a scalar.
            config: The run's settings.
            world: This process's place.
        """
        self.data_rank, self.data_size = world.rank, config.parallel.data_size(world.size)
        self.data_group = None
        self.device = world.device
        self.loss_fn = loss_fn
        self.microbatches = config.train.microbatches
        prepare_blocks(model, config.train)
        dtype = COMPUTE[config.train.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        self.module = model
        shard(model, build_mesh(config.parallel, world), policy, config.parallel)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """Forward and backward of one global batch, of which this rank has a share.

        Leaves in every shard the gradient of the mean loss over the global batch (times the scaler's factor).

        Args:
            inputs: This rank's inputs, ``global_batch_size / data_size`` of them.
            targets: Their targets.
            scaler: Scales the loss of fp16, and nothing else.

        Returns:
            This rank's part of the mean loss, a detached scalar on the device: the sum over all ranks is the mean.
        """
        total = torch.zeros((), device=self.device)
        pieces = list(zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True))
        for some_inputs, some_targets in pieces:
            # Gradients are scattered after each micro-batch: to wait for the last would hold all of them on every rank.
            loss = self.loss_fn(self.module(some_inputs), some_targets) / len(pieces)
            scaler.scale(loss).backward()
            total += loss.detach()
        return total / self.data_size

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for this rank's ``inputs``; a collective, for blocks are gathered on the way."""
        return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` where it is larger; gives its norm before, on the device."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def build_mesh(config: ParallelConfig, world: World) -> DeviceMesh:
    """The ranks in a line, over which each block is sharded; or in a grid, whose rows each hold the whole model."""
    if config.replicas == 1:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shape = (config.replicas, world.size // config.replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Sequential, mesh: DeviceMesh, precision: MixedPrecisionPolicy, config: ParallelConfig) -> None:
    """Shard each block, which is then gathered as one; and at the root whatever belongs to no block."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.cpu_offload else OffloadPolicy()
    # Each block moves to the device by itself, so that the whole model never lies there.
    shard_module = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for block in model:
        shard_module(block, reshard_after_forward=config.reshard_after_forward)
    shard_module(model)
