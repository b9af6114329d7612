"""Tensor parallelism: every rank holds a shard of each large layer, and computes its part of the layer's output.

``plan.py`` says which layers are sharded, and how: their parameters are DTensors. All other parameters are plain
tensors, which every rank holds. The ranks of a group read the same samples. A pair of layers costs one all-reduce:

    rank 0   x ── first layer, upper half of its outputs ── second layer, their sums ──┐
                                                                              all-reduce ── the same y on both
    rank 1   x ── first layer, lower half of its outputs ── second layer, their sums ──┘

With several groups, each reads a local batch, and ranks with the same shards average their gradients.
"""

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
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .checkpoint import Checkpointer as Checkpointer
from .config import Config, UserError
from .distributed import Process
from .model import build_model
from .plan import tensor_plan
from .task import Task

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Parallel:
    """The model with sharded layers. Every strategy has these methods and attributes; the loop uses nothing else.

    Attributes:
        module: This rank's part of the model; its parameters have the same names as in the whole model.
        dp_rank, dp_size: Which local batch this rank reads, and the number of local batches.
        scaler: Does nothing, because ``ParallelConfig`` rejects fp16.
    """

    def __init__(self, task: Task, config: Config, process: Process) -> None:
        self.task, self.device, self.microbatches = task, process.device, config.train.microbatches
        kind, shape = self.device.type, (config.parallel.replicas, process.world_size // config.parallel.replicas)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))
        self.dp_group, self.dp_rank, self.dp_size = mesh.get_group("data"), mesh.get_local_rank("data"), shape[0]
        self.mesh, self.group = mesh["tensor"], mesh.get_group("tensor")
        self.is_first = self.mesh.get_local_rank() == 0
        self.autocast = partial(torch.autocast, kind, torch.bfloat16, enabled=config.train.precision == "bf16")
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        self.users: dict[nn.Parameter, tuple[str, bool]] = {}  # The layer of a parameter, and whether it is sharded.
        self.allow_unused, self.steps = config.train.allow_unused, 0

        def wrap(block: nn.Module) -> nn.Module:
            self.shard(block.to(self.device))
            return prepare_block(block, config)

        self.module: nn.Module = build_model(config.model, wrap).to(self.device)
        if not any(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            raise UserError("plan.py shards no layer of this model: the ranks of a group would all compute the same")

    def shard(self, block: nn.Module) -> None:
        """Shard a block by its plan; rejects weights that layers share, because sharding would separate them."""
        before = dict(block.named_parameters(remove_duplicate=False))
        if not any(isinstance(parameter, DTensor) for parameter in before.values()):
            # All ranks have drawn the same values, so each keeps its shard of them without a message.
            parallelize_module(block, self.mesh, tensor_plan(block), src_data_rank=None)
        for name, parameter in block.named_parameters(remove_duplicate=False):
            original, user = before[name], f"{type(block).__name__}.{name}"
            is_sharded = isinstance(parameter, DTensor)
            other, was_sharded = self.users.get(original, ("", False))
            if other and (is_sharded or was_sharded):
                raise UserError(f"{user} is also {other}, so plan.py cannot shard it; untie or replicate them")
            self.users[original] = self.users[parameter] = user, is_sharded
            if is_sharded:
                original.data = original.new_empty(0)  # Another layer that uses it is still recognized.

    def forward_backward(self, inputs: Any, targets: Any, weight: int | Tensor) -> dict[str, Tensor]:
        """Leave in each parameter the gradient of the mean loss over the global batch; a collective.

        ``weight`` is what the losses of a local batch are divided by, on average over the ranks. Returns the losses by
        name: detached scalars on the device, whose sum over the ranks is the mean over the global batch.
        """
        totals: dict[str, Tensor] = {}
        for inputs, targets in split_batch((inputs, targets), self.microbatches):
            # The ranks of a group draw the same random numbers. So dropout is the same where activations are, and drops
            # features at the same places of all shards.
            with self.autocast():
                losses = self.task.losses(self.module(inputs), targets)
            (losses["loss"] / weight).backward()
            for name, loss in losses.items():
                # All ranks of a group have the same losses.
                totals[name] = totals.get(name, 0) + loss.detach() / weight / self.dp_size * self.is_first
        self.steps += 1
        if self.steps.bit_count() == 1:  # 1, 2, 4, 8, ...: at first, layers that start with zeros hide gradients.
            self.check_gradients()
        self.average_gradients()
        return totals

    def check_gradients(self) -> None:
        """Reject plain parameters of which the ranks of a group have different gradients."""
        named = [(name, p.grad) for name, p in self.module.named_parameters() if not isinstance(p, DTensor)]
        norms = {name: gradient.norm() for name, gradient in named if gradient is not None}
        largest = torch.stack([torch.zeros((), device=self.device), *norms.values()])
        smallest = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.group)
        _, *differ = (largest > 1.05 * smallest).tolist()  # Some kernels add in any order.
        if names := ", ".join(name for name, differs in zip(norms, differ, strict=True) if differs):
            raise UserError(f"plan.py does not shard {names}, but each rank computes with it on a shard; shard it too")

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients of shards over the groups, and those of whole parameters over all ranks.

        So the copies of a whole parameter stay bitwise equal, in whatever order kernels and messages add.
        """
        if self.allow_unused and self.dp_size > 1:
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            users = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
            dist.all_reduce(users, group=self.dp_group)
            for parameter, count in zip(parameters, users.tolist(), strict=True):
                if count and parameter.grad is None:  # Only another group used it.
                    parameter.grad = torch.zeros_like(parameter)
        whole, shards = self.gradients()
        for gradients, group in ((whole, dist.group.WORLD), (shards, self.dp_group)):
            if gradients and dist.get_world_size(group) > 1:
                vector = nn.utils.parameters_to_vector(gradients) / dist.get_world_size(group)
                dist.all_reduce(vector, group=group)
                nn.utils.vector_to_parameters(vector, gradients)

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of parameters that every rank holds whole, and of this rank's shards."""
        whole, shards = list[Tensor](), list[Tensor]()
        for parameter in self.module.parameters():
            gradient: Any = parameter.grad
            if gradient is not None and isinstance(parameter, DTensor):
                # Of a whole parameter on sharded activations (SequenceParallel), each rank has a part of the gradient.
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
                (shards if parameter.placements[0].is_shard() else whole).append(gradient.to_local())
            elif gradient is not None:
                whole.append(gradient)
        return whole, shards

    def predict(self, inputs: Any) -> Any:
        """Return the outputs for this rank's inputs, or None if another rank has them; a collective."""
        with self.autocast():
            outputs = self.module(inputs)
        return outputs if self.is_first else None  # All ranks of a group have the same outputs.

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        whole, shards = (nn.utils.get_total_norm(each).to(self.device) ** 2 for each in self.gradients())
        dist.all_reduce(shards, group=self.group)
        norm = (whole + shards).sqrt()
        for is_sharded in (False, True):  # One kernel cannot scale plain tensors and DTensors together.
            some = [p for p in self.module.parameters() if isinstance(p, DTensor) is is_sharded]
            nn.utils.clip_grads_with_norm_(some, max_norm, norm)
        return norm

#:: include "parallelism/shared/state.py" ::#


#:: include "parallelism/shared/blocks.py" ::#
