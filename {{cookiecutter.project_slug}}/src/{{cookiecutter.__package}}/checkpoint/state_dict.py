"""The state of model and optimizer as one flat dictionary, gathered to rank 0 and broadcast from there.

    model.head.linear.weight        optimizer.head.linear.weight.exp_avg        average.head.linear.weight

A tensor may be whole on every rank, a shard on each (DTensor), or on some ranks only; its name is the same on all.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config import UserError
from ..runtime import all_gather_object


def flat_state_dict(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    named: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the tensors that this rank holds, by name, and the parts in ``named``; they are not copies."""
    tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for part, of_part in named.items():
        tensors |= {f"{part}.{name}": tensor for name, tensor in of_part.items()}
    for optimizer in optimizers:
        # This creates the state of an optimizer that has taken no step yet, so that it can be filled.
        state: Any = get_optimizer_state_dict(module, optimizer)["state"]
        check_tensors(state)
        tensors |= {f"optimizer.{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}
    return tensors


def check_tensors(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject the state of an optimizer that is not in tensors."""
    for name, entry in state.items():
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise UserError(f"the optimizer keeps {key} of {name} as {kind}; only tensors can be saved")


def drop_missing_state(
    tensors: dict[str, Tensor],
    saved: Collection[str],
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Delete the optimizer state of parameters that have none in a checkpoint: they had no gradient when it was saved.

    Their entries are removed from ``tensors``, and from the optimizers; ``saved`` are the names in the checkpoint.
    """
    with_state = {name.rpartition(".")[0] for name in saved}
    for name, parameter in module.named_parameters():
        if f"optimizer.{name}" not in with_state:
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
            for key in [key for key in tensors if key.rpartition(".")[0] == f"optimizer.{name}"]:
                del tensors[key]


def gather_full_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Gather the ranks' tensors to rank 0, whole and on the CPU, through ``device``; a collective.

    Rank 0 then holds everything: a model that is too large for its memory is saved in shards.

    Returns:
        The full tensors by name on rank 0; an empty dictionary on the others.
    """
    outlines = all_gather_object({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    # All ranks take the names in the same order, so that those with a shard of a tensor gather it together.
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


def broadcast_full_tensors(full: Mapping[str, Tensor], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Copy rank 0's ``full`` tensors into what each rank holds of them, one at a time through ``device``; a collective.

    Rejects ``full``, on every rank, if a tensor that a rank holds is missing or has another shape.
    """
    outline: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in full.items()}]
    dist.broadcast_object_list(outline, src=0)
    unfit = [name for name, tensor in tensors.items() if outline[0].get(name, (None,))[0] != tensor.shape]
    if names := [name for of_rank in all_gather_object(unfit) for name in of_rank]:
        raise UserError(f"the checkpoint does not fit the model: {names[0]} is missing or differs")
    sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in outline[0].items()}
    # One buffer for all of them: gloo's threads keep what they received for a while, so many would be in memory.
    buffer = torch.empty(max(sizes.values(), default=0), dtype=torch.uint8, device=device)
    for name, (shape, dtype) in outline[0].items():
        whole = buffer[: sizes[name]].view(dtype).view(shape)
        if dist.get_rank() == 0:
            whole.copy_(full[name].detach())
        dist.broadcast(whole, src=0)
        own = tensors.get(name)
        if isinstance(own, DTensor):
            shard = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
            own.to_local().copy_(shard.to_local())
        elif own is not None:
            own.copy_(whole)


def unflatten(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the stored form of a flat state: ``model`` is a plain state dict, ``optimizer`` is keyed by parameter."""
    state: dict[str, Any] = {part: {} for part in ("model", "optimizer")}
    for path, tensor in tensors.items():
        part, name = path.split(".", maxsplit=1)
        if part == "optimizer":
            parameter, key = name.rsplit(".", maxsplit=1)
            state[part].setdefault(parameter, {})[key] = tensor
        else:
            state.setdefault(part, {})[name] = tensor
    return state


def list_parts(content: Mapping[str, Any]) -> list[str]:
    """Return the keys of a checkpoint's content that hold tensors by name."""
    return ["model", "optimizer", *content["tensors"]]


def flatten(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the flat form of a stored state; the inverse of ``unflatten``."""
    tensors: dict[str, Tensor] = {}
    for part in list_parts(state) if state else ():
        for name, entry in state[part].items():
            if part == "optimizer":
                tensors |= {f"{part}.{name}.{key}": tensor for key, tensor in entry.items()}
            else:
                tensors[f"{part}.{name}"] = entry
    return tensors
