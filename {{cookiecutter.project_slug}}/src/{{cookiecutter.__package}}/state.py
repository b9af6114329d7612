"""The state of model and optimizer as named tensors: put together on rank 0, and handed out from there.

A tensor may lie whole on every rank, in shards, or on some of the ranks alone; its name is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from .config import UserError


def named_tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """What this rank holds, as ``model.<name>`` and ``optimizer.<name>.<key>``: the tensors themselves, no copies."""
    tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    if optimizer is not None:
        # Gives an optimizer that has done no step yet a state to be filled.
        state: Any = get_optimizer_state_dict(module, optimizer)["state"]
        tensors |= {f"optimizer.{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}
    return tensors


def saved_alone(
    tensors: dict[str, Tensor], saved: Iterable[str], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """What of ``tensors`` a checkpoint can fill: a parameter that had no gradient yet has no state in it.

    Args:
        tensors: What this rank holds, by name.
        saved: The names of all that was saved.
        module: What this rank holds of the model.
        optimizer: Its optimizer; loses the state of such parameters, for it has to be as it was.
    """
    known = {name.rpartition(".")[0] for name in saved}
    missing = {name for name in tensors if name.startswith("optimizer.") and name.rpartition(".")[0] not in known}
    parameters = dict(module.named_parameters())
    for name in {name.removeprefix("optimizer.").rpartition(".")[0] for name in missing}:
        del optimizer.state[parameters[name]]
    return {name: tensor for name, tensor in tensors.items() if name not in missing}


def average_buffers(module: nn.Module, size: int, group: dist.ProcessGroup | None) -> None:
    """Make the running statistics of BatchNorm the mean over ranks, each of which saw other samples; a collective.

    Args:
        module: What this rank holds of the model.
        size: The number of ranks in ``group``.
        group: The ranks that hold the same part of the model; None for all.
    """
    for buffer in module.buffers():
        if buffer.is_floating_point() and size > 1:
            dist.all_reduce(buffer, group=group)
            buffer /= size


def collect(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Put the tensors of all ranks together on rank 0, whole and on the CPU; a collective.

    Args:
        tensors: What this rank holds, by name.
        device: Where this rank sends from and receives to.

    Returns:
        The full tensors by name on rank 0; nothing elsewhere.
    """
    outlines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outlines, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    # All ranks go through the names in the same order, so that those with a shard of a tensor gather it together.
    owners: dict[str, int] = {}
    for rank, outline in enumerate(outlines):
        owners |= {name: rank for name in outline if name not in owners}
    rank, full = dist.get_rank(), {}
    for name, owner in owners.items():
        if name in tensors:
            tensor = tensors[name]
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank == owner and rank != 0:
                dist.send(tensor.to(device).contiguous(), dst=0)
        elif rank == 0:
            shape, dtype = outlines[owner][name]
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, src=owner)
        if rank == 0:
            full[name] = tensor.detach().cpu()
    return full


def hand_out(full: Mapping[str, Tensor], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Copy the full tensors that rank 0 has into those that the ranks hold, one at a time; a collective.

    Args:
        full: Full tensors by name, on rank 0 (elsewhere not looked at).
        tensors: What this rank holds, by name; written to.
        device: Where this rank sends from and receives to.

    Raises:
        UserError: on every rank, if something that the model holds is not among them, or has another shape.
    """
    outline: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in full.items()}]
    dist.broadcast_object_list(outline, src=0)
    unfit: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(unfit, [name for name, t in tensors.items() if outline[0].get(name, (None,))[0] != t.shape])
    if any(unfit):
        raise UserError(f"the checkpoint does not fit the model: {next(filter(None, unfit))[0]} is missing or differs")
    for name, (shape, dtype) in outline[0].items():
        whole = full[name].to(device) if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(whole, src=0)
        mine = tensors.get(name)
        if isinstance(mine, DTensor):
            shard = distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)
            mine.to_local().copy_(shard.to_local())
        elif mine is not None:
            mine.copy_(whole)


def fold(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Named tensors as they lie in a file: ``model`` is a plain state dict, ``optimizer`` is keyed by parameter."""
    model: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        part, name = path.split(".", maxsplit=1)
        if part == "model":
            model[name] = tensor
        else:
            parameter, key = name.rsplit(".", maxsplit=1)
            optimizer.setdefault(parameter, {})[key] = tensor
    return {"model": model, "optimizer": optimizer}


def unfold(state: dict[str, Any]) -> dict[str, Tensor]:
    """The named tensors of a file; the opposite of ``fold``."""
    tensors = {f"model.{name}": tensor for name, tensor in state.get("model", {}).items()}
    for name, entry in state.get("optimizer", {}).items():
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in entry.items()}
    return tensors
