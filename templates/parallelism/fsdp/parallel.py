"""Fully sharded data parallel: every rank holds a shard of each block and reads its share of each batch.

Before a block runs, its weights are gathered from all ranks; afterwards, they are freed. Its gradients are averaged and
scattered, so that each rank gets those of its own shard and updates only that shard. The result is the same as with the
whole model on each rank, in 1/N of the memory.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .config import Config, ParallelConfig
from .model import blocks
from .runtime import Process
from .splitting import build_by_block, split_batch
from .strategy import BuildFn, LossFn, Strategy


class Parallel(Strategy):
    """The model under FSDP2."""

    waits_in_forward = True

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        super().__init__(loss_fn, config, process, dp_rank=process.rank)
        layout, mesh = config.parallel, build_mesh(config.parallel, process)
        # Blocks compute in this precision; shards stay in fp32, and gradients are averaged in it.
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if layout.cpu_offload else OffloadPolicy()
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
        # Each block, when it is built, moves to the device and is sharded, so that the whole model is never on it, nor
        # on the CPU. It is then gathered as a unit; parameters outside of blocks are sharded at the root.
        shard_block = partial(shard, reshard_after_forward=layout.reshard_after_forward)
        self.module, parts = build_by_block(build, blocks, config.train, shard_block)
        self.fsdp = shard(self.module)
        if parts and isinstance(last := parts[-1], FSDPModule):
            # Its backward follows its forward at once, so its weights stay.
            last.set_reshard_after_forward(False, recurse=False)

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        pieces = split_batch((inputs, targets), self.microbatches)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            # Gradients are scattered after each micro-batch: waiting for the last would keep full ones on each rank.
            # Ranks with the same shards average them once, after the last.
            self.fsdp.set_requires_all_reduce(number == len(pieces))
            loss = self.add_loss(self.module(some_inputs), some_targets)
            # FSDP averages over the ranks what has to be summed.
            scaler.scale(loss * self.dp_size).backward()
        return self.finish_losses()

    def predict(self, inputs: Any) -> Any:
        return self.module(inputs)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def build_mesh(config: ParallelConfig, process: Process) -> DeviceMesh:
    """Return a mesh of all ranks: 1-D to shard each block over all, or 2-D, where each row holds the whole model."""
    if config.replicas == 1:
        return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("shard",))
    shape = (config.replicas, process.world_size // config.replicas)
    return init_device_mesh(process.device.type, shape, mesh_dim_names=("replicate", "shard"))
