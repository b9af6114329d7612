"""Tensor parallelism: every rank holds a shard of each large layer, and computes its part of the layer's output.

``plan.py`` lists which layers are sharded, and how. The ranks of a group read the same samples:

    rank 0   x ── half of the features of layer 1 ── half of the terms of layer 2 ──┐
                                                                               all-reduce ── y
    rank 1   x ── the other half ─────────────────── the other half ────────────────┘

With several groups, each reads a local batch, and what a rank holds is sharded over them once more, by FSDP2.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from logging import getLogger
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; optree has it.
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model
from .plan import tensor_plan
from .sharded import Checkpointer

warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view")  # Nothing changes outputs in place.
getLogger("torch.distributed.tensor").setLevel("ERROR")  # It warns of saving.


class Parallel:
    """The model with sharded layers. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device = process, process.device
        layout, kind = config.parallel, self.device.type
        blocks, seen = list[nn.Module](), WeakValueDictionary[int, nn.Parameter]()
        self.dp_size = layout.dp_size(process.world_size)
        self.replicas = layout.replicas
        shape = (self.replicas, self.dp_size // self.replicas, process.world_size // self.dp_size)
        self.dp_rank, rank_in_group = divmod(process.rank, shape[-1])
        self.is_first = rank_in_group == 0
        self.dp_group = dist.group.WORLD
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        # Blocks compute in it; shards stay in fp32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        torch.compiler.config.cache_key_tag = str(process.rank)  # Else shared.
        group = mesh["tensor"]  # Compiled blocks compare it.
        data = mesh["replicate", "shard"] if self.replicas > 1 else mesh["shard"]
        shard = partial(fully_shard, mesh=data, mp_policy=policy)

        def wrap(block: nn.Module) -> nn.Module:
            refuse_shared(block.to(self.device), seen)
            shard_layers(block, group)
            blocks.append(prepare_block(block, config))
            shard(block, reshard_after_forward=layout.reshard_after_forward)
            return block

        self.module = build_model(config.model, wrap)
        for block in blocks:  # Once more: the model may share parameters later.
            refuse_shared(block, seen)
        if not any(map(tensor_plan, blocks)):
            raise UserError("plan.py shards no layer, so ranks would compute the same")
        self.fsdp = shard(self.module)
        self.head = cast(FSDPModule, blocks[-1])
        self.head.set_reshard_after_forward(False)  # Backward starts with it.
        self.microbatches, self.allow_unused = config.train.microbatches, config.train.allow_unused

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
        # A group's ranks draw the same, as dropout of whole activations needs.
#:: filter indent(8, true) ::#
#:: include "parallelism/shared/micro_batches.py" ::#
#:: endfilter ::#

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/compare_used.py" ::#
#:: endfilter ::#

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        outputs = tree_map_only(DTensor, DTensor.full_tensor, self.module(inputs))
        self.head.reshard()  # There is no backward.
        return outputs if self.is_first else None  # Its group has the same.

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        # A group's ranks have equal gradients of what plan.py leaves whole.
        own = nn.utils.get_total_norm([g.to_local() for g in gradients if self.is_first or is_split(g)])
        norms = [torch.empty_like(own, device=self.device) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, own.to(self.device))  # Summed in one order.
        norm = torch.stack(norms).norm() / self.replicas**0.5
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.to_local().mul_(scale)
        return norm

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/state.py" ::#
#:: endfilter ::#


def shard_layers(block: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a block's layers over a group of ranks, by its plan; rejects weights that layers share."""
#:: filter indent(4, true) ::#
#:: include "parallelism/shared/layer_steps.py" ::#
#:: endfilter ::#


def is_split(p: Any) -> bool:
    """Return whether ``plan.py`` shards a parameter, or what is its gradient."""
    return "tensor" in p.device_mesh.mesh_dim_names and not p.placements[-1].is_replicate()


#:: include "parallelism/shared/ties.py" ::#


#:: include "parallelism/shared/blocks.py" ::#
