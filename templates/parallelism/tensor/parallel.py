"""Tensor parallelism: every rank holds a shard of each layer and computes its part of the layer's output.

A block's ``tensor_plan`` defines how to shard it; a block without one is replicated, and all ranks compute the same in
it. The ranks of one group read the same samples. With several groups, each reads its share of the batch, and ranks with
the same shards sum their gradients; or each holds only a part of these shards.
"""

import logging
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .config import Config
from .model import blocks
from .runtime import Process, get_rng_state, set_rng_state
from .splitting import (
    GradientBuckets,
    build_by_block,
    check_plan,
    check_replicated,
    parallelize_block,
    shard_replica,
    split_batch,
    sum_parts,
)
from .strategy import BuildFn, LossFn, Strategy


class Parallel(Strategy):
    """The model as DTensors: sharded where a block has a plan, replicated elsewhere."""

    waits_in_forward = True

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        layout = config.parallel
        shape = (layout.replicas, process.world_size // layout.replicas)
        mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=("data", "tensor"))
        dp_rank, dp_group = mesh.get_local_rank("data"), mesh["data"].get_group()
        super().__init__(loss_fn, config, process, dp_rank, dp_group)
        self.group, self.is_first = mesh["tensor"].get_group(), mesh.get_local_rank("tensor") == 0

        def parallelize(block: nn.Module) -> None:
            parallelize_block(block.to(self.device), mesh["tensor"], layout.sequence_parallel)
            if layout.shard_replicas:
                shard_replica(block, mesh["data"], self.dtype)

        # Each block, when it is built, so that the whole model is never on the device, nor on the CPU.
        self.module, parts = build_by_block(build, lambda model: blocks(model) or [model], config.train, parallelize)
        check_plan(self.module)
        if self.module not in parts:
            parallelize(self.module)
        if isinstance(last := parts[-1], FSDPModule):
            # Its backward follows its forward at once, so its weights stay.
            last.set_reshard_after_forward(False, recurse=False)
        if layout.shard_replicas:
            self.autocast = partial(self.autocast, enabled=False)  # FSDP casts parameters and inputs.
            silence_warnings()
        self.buckets = GradientBuckets(self.module, dp_group)

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        pieces = split_batch((inputs, targets), self.microbatches)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            with self.autocast():
                loss = self.add_loss(self.module(some_inputs), some_targets)
            # Gradients accumulate on each rank; the last backward starts the all-reduces.
            self.buckets.is_last_backward = number == len(pieces)
            scaler.scale(loss).backward()
        self.buckets.wait()
        sum_parts(self.module.parameters(), self.group)
        if not self.losses.is_agreed:  # In the first step.
            check_replicated(self.module, self.group)
        if scaler.is_enabled():
            # If one shard overflows, all have to skip the step: its NaN reaches every rank through the norm.
            self.gradients()[0].to_local().add_(self.gradient_norm() * 0)
        # All ranks of a group have the same losses.
        return {name: loss * self.is_first for name, loss in self.finish_losses().items()}

    def predict(self, inputs: Any) -> Any:
        with self.autocast():
            outputs = self.module(inputs)
        # Also where they are dropped: PyTorch warns of messages that nobody waited for.
        outputs = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.wait, outputs)
        return outputs if self.is_first else None  # All ranks of a group have the same outputs.

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def align_random_state(self) -> None:
        # Replicated activations would otherwise drop other units on each rank of a group.
        state = [get_rng_state(self.device)]
        dist.broadcast_object_list(state, group=self.group, group_src=0)
        set_rng_state(state[0], self.device)

    def gradients(self) -> list[DTensor]:
        """Return the gradients of this rank's shards, and of replicated parameters."""
        return [p.grad for p in self.module.parameters() if isinstance(p.grad, DTensor)]

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, over all shards."""
        norm: DTensor = nn.utils.get_total_norm(self.gradients())  # type: ignore[assignment]
        return norm.full_tensor()


def silence_warnings() -> None:
    """Ignore what PyTorch warns of when DTensors are sharded in two dimensions.

    A block may return what is a view for DTensor, so no block should change its input in place; and two messages that
    cannot be one are needed to gather a tensor, for a checkpoint, and to sum the norm.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
