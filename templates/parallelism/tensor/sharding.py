"""Layers that are sharded by their plan, beside parameters that every rank of the group holds whole.

    a module computes on            the gradient of a parameter that it holds whole, on each rank

    what the other ranks have       is complete, and the same
    a DTensor that is a shard       is a part (Partial); all of them are summed in one message
    a plain tensor that is one      is wrong, and another: the first step finds it

The ranks of a group read the same samples, so between sharded layers they have the same activations.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from ..config import UserError
from .metrics import name_some
from .replication import Bucket, to_local

SAME = 0.05  # How far sums and norms of a gradient may be apart, relative to its norm: kernels add in any order.


def check_plan(model: nn.Module) -> None:
    """Reject a model of which nothing would be sharded."""
    if not any(hasattr(module, "tensor_plan") for module in model.modules()):
        raise UserError(
            f"tensor shards layers by a plan, but no module of the {type(model).__name__} has one; give the modules in "
            "model.py a method tensor_plan(sequence_parallel) that returns a plan for parallelize_module"
        )


def parallelize_block(block: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard modules of a block by their ``tensor_plan``; replicate the rest, so the optimizer sees only DTensors."""
    replicated = []
    for module in block.modules():
        plan: Any = getattr(module, "tensor_plan", None)
        if plan is not None and not any(isinstance(p, DTensor) for p in module.parameters()):
            parallelize_module(module, mesh, plan(sequence_parallel), src_data_rank=None)
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
                replicated.append((module, name))
    if replicated:
        compute_on_local(block, replicated)


def compute_on_local(block: nn.Module, parameters: Sequence[tuple[nn.Module, str]]) -> None:
    """Make a block compute on replicated parameters as plain tensors, as ``torch.func.functional_call`` would.

    It does so wherever its forward runs, because activation checkpointing runs it again in backward.
    """
    forward = block.forward

    def forward_on_local(*args: Any, **kwargs: Any) -> Any:
        replicated: list[Any] = [module._parameters[name] for module, name in parameters]
        for (module, name), parameter in zip(parameters, replicated, strict=True):
            module._parameters[name] = parameter.to_local()
        try:
            return forward(*args, **kwargs)
        finally:
            for (module, name), parameter in zip(parameters, replicated, strict=True):
                module._parameters[name] = parameter

    block.forward = forward_on_local


def sum_parts(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of which each rank of the group has a part, all in one message."""
    partial: list[Any] = [p for p in parameters if is_placed(p.grad, Partial)]
    if partial:
        Bucket(partial, group).finish()
    for parameter in partial:
        gradient, placements = parameter.grad, [*parameter.grad.placements[:-1], Replicate()]
        parameter.grad = DTensor.from_local(gradient.to_local(), gradient.device_mesh, placements, run_check=False)


def check_replicated(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Reject parameters that each rank of the group holds whole, but has another gradient for; a collective."""
    parameters: list[Any] = list(module.named_parameters())
    whole = {name: to_local(p.grad) for name, p in parameters if is_placed(p.grad, Replicate)}
    own = {name: (gradient.sum().item(), gradient.norm().item()) for name, gradient in whole.items()}
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    first, *others = everyone
    different = [
        name
        for name, (total, norm) in first.items()
        if any(max(abs(other[name][0] - total), abs(other[name][1] - norm)) > SAME * norm for other in others)
    ]
    if different:
        raise UserError(
            f"the ranks of a group have different gradients of {name_some(different)}, which each of them holds whole: "
            "a module computes with it on a shard; shard it too, by the tensor_plan of that module"
        )


def is_placed(gradient: Any, kind: type[Placement]) -> bool:
    """Return whether a gradient is placed in this way over the ranks of a group, the last dimension of the mesh."""
    return isinstance(gradient, DTensor) and isinstance(gradient.placements[-1], kind)
