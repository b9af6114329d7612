"""Fully sharded data parallel: every rank holds a shard of each block and reads its local batch.

Before a block runs, its weights are gathered from all ranks; afterwards, they are freed. Its gradients are averaged and
scattered, so that each rank gets those of its own shard and updates only that shard.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model
from .sharded import Checkpointer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel:
    """The model under FSDP2. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device = process, process.device
        self.dp_rank, self.dp_size, self.dp_group = process.rank, process.world_size, dist.group.WORLD
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.precision == "fp16")
        layout, blocks, seen = config.parallel, list[nn.Module](), WeakValueDictionary[int, nn.Parameter]()
        # Blocks compute in it; shards stay in fp32, as do sums of gradients.
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.train.precision], reduce_dtype=torch.float32)
        shape = (layout.replicas, self.dp_size // layout.replicas)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        shard = partial(fully_shard, mesh=mesh if layout.replicas > 1 else mesh["shard"], mp_policy=policy)

        def wrap(block: nn.Module) -> nn.Module:
            refuse_shared(block, seen)
            blocks.append(prepare_block(block, config))
            shard(block, reshard_after_forward=layout.reshard_after_forward)
            return block

        self.module = build_model(config.model, wrap)
        self.group = mesh.get_group("shard")
        for block in blocks:  # Once more: the model may share parameters later.
            refuse_shared(block, seen)
        self.fsdp = shard(self.module)
        self.head = cast(FSDPModule, blocks[-1])
        self.head.set_reshard_after_forward(False)  # Backward starts with it.
        self.microbatches, self.allow_unused = config.train.microbatches, config.train.allow_unused

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
#:: filter indent(8, true) ::#
#:: include "parallelism/shared/micro_batches.py" ::#
#:: endfilter ::#

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/compare_used.py" ::#
#:: endfilter ::#

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        outputs = self.module(inputs)
        self.head.reshard()  # There is no backward.
        return outputs

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        own = nn.utils.get_total_norm([g.to_local() for g in gradients]).to(self.device)
        norms = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, own, group=self.group)  # Summed in one order on all.
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm := torch.stack(norms).norm())
        return norm

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/state.py" ::#
#:: endfilter ::#


#:: include "parallelism/shared/ties.py" ::#


#:: include "parallelism/shared/blocks.py" ::#
