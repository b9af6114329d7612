"""Tensor parallelism: every rank holds a shard of each large layer, and computes its part of the layer's output.

``plan.py`` lists which layers are sharded, and how. Their parameters are DTensors; every rank holds all others whole.
The ranks of a group read the same samples:

    rank 0   x ── half of the features of layer 1 ── half of the terms of layer 2 ──┐
                                                                               all-reduce ── y
    rank 1   x ── the other half ─────────────────── the other half ────────────────┘

With several groups, each reads a local batch, and ranks with the same shards average their gradients.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model
from .plan import tensor_plan
from .sharded import Checkpointer as Checkpointer


class Parallel:
    """The model with sharded layers. The loop uses only what all strategies have."""

    def __init__(self, config: Config, process: Process) -> None:
        self.device, self.microbatches = process.device, config.train.microbatches
        self.allow_unused, self.steps = config.train.allow_unused, 0
        precision, kind = config.train.precision, self.device.type
        self.autocast = partial(torch.autocast, kind, torch.bfloat16, enabled=precision == "bf16")
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        self.dp_size = config.parallel.replicas
        shape = (self.dp_size, process.world_size // self.dp_size)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))
        self.dp_group, self.dp_rank = mesh.get_group("data"), mesh.get_local_rank("data")
        self.group, self.mesh = mesh.get_group("tensor"), mesh["tensor"]
        self.is_first = self.mesh.get_local_rank() == 0
        self.users: dict[nn.Parameter, tuple[str, bool]] = {}  # Names; whether plan.py shards them.

        def wrap(block: nn.Module) -> nn.Module:
            self.shard(block.to(self.device))
            return prepare_block(block, config)

        self.module: nn.Module = build_model(config.model, wrap).to(self.device)
        if not any(is_sharded for _, is_sharded in self.users.values()):
            raise UserError("plan.py shards no layer, so its ranks would compute the same")

    def shard(self, block: nn.Module) -> None:
        """Shard a block by its plan; rejects weights that layers share."""
        before = dict(block.named_parameters(remove_duplicate=False))
        if not any(isinstance(p, DTensor) for p in before.values()):
            # All ranks drew the same values, so each keeps its shard.
            parallelize_module(block, self.mesh, tensor_plan(block), src_data_rank=None)
        for name, p in block.named_parameters(remove_duplicate=False):
            original, user = before[name], f"{type(block).__name__}.{name}"
            is_sharded = isinstance(p, DTensor)
            other, was_sharded = self.users.get(original, ("", False))
            if other and (is_sharded or was_sharded):
                raise UserError(f"{user} is also {other}; plan.py cannot shard both: untie them, or shard neither")
            self.users[original] = self.users[p] = user, is_sharded
            if is_sharded:
                original.data = original.new_empty(0)  # Kept to recognize it.

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
        for some_inputs, some_targets in split_batch((inputs, targets), self.microbatches):
            # The ranks of a group draw the same random numbers: dropout is the same where activations are, and drops
            # the same places of all shards where they are sharded.
            with self.autocast():
                loss = mean_loss(self.module(some_inputs), some_targets)
            loss.backward()
        self.average_gradients()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients of shards over the groups, and of whole parameters over all ranks.

        So its copies stay bitwise equal, in whatever order kernels and messages add.
        """
        if self.allow_unused:
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            users = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
            dist.all_reduce(users, group=self.dp_group)
            for p, count in zip(parameters, users.tolist(), strict=True):
                if count and p.grad is None:  # Another group used it.
                    p.grad = torch.zeros_like(p)
        whole, shards = self.gradients()
        self.steps += 1
        if self.steps.bit_count() == 1:  # 1, 2, 4, ...: at first, layers of zeros hide gradients.
            self.check_equal(whole)
        for gradients, group in ((whole, dist.group.WORLD), (shards, self.dp_group)):
            if gradients and dist.get_world_size(group) > 1:
                vector = nn.utils.parameters_to_vector(gradients.values())
                vector /= dist.get_world_size(group)
                dist.all_reduce(vector, group=group)
                nn.utils.vector_to_parameters(vector, gradients.values())

    def gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return by name the gradients of parameters that every rank holds whole, and of this rank's shards."""
        whole, shards = dict[str, Tensor](), dict[str, Tensor]()
        for name, p in self.module.named_parameters():
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor):
                # SequenceParallel leaves a part of the gradient on each rank.
                p.grad = gradient = p.grad.redistribute(placements=p.placements)
                part = shards if p.placements[0].is_shard() else whole
                part[name] = gradient.to_local()
            elif p.grad is not None:
                whole[name] = p.grad
        return whole, shards

    def check_equal(self, gradients: dict[str, Tensor]) -> None:
        """Reject a whole parameter of which the ranks of a group have different gradients."""
        norms = [gradient.norm().item() for gradient in gradients.values()]
        largest = torch.tensor(norms, device=self.device)
        smallest = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.group)
        for i, name in enumerate(gradients):
            if largest[i] > 1.05 * smallest[i]:  # Some kernels add in any order.
                raise UserError(f"plan.py leaves {name} whole, but ranks compute with it on shards; shard it too")

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        with self.autocast():
            outputs = self.module(inputs)
        return outputs if self.is_first else None  # The ranks of a group have the same.

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        whole, shards = (list(gradients.values()) for gradients in self.gradients())
        own = nn.utils.get_total_norm(shards).to(self.device)
        norms = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, own, group=self.group)  # Summed in one order on all.
        norm = torch.stack([*norms, nn.utils.get_total_norm(whole)]).norm()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        for gradient in (*whole, *shards):
            gradient.mul_(scale)
        return norm

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/state.py" ::#
#:: endfilter ::#


#:: include "parallelism/shared/blocks.py" ::#
