"""Replicas: what several ranks hold of one tensor has to be the same on all of them, bit for bit."""

import zlib
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..config import UserError
from ..runtime import all_gather_object

SHOWN = 3  # Tensors that a message names.
Place = tuple[str, tuple[int, ...]]  # The name of a tensor, and where in it this rank's shard begins.


def check_replicas(tensors: Mapping[str, Tensor], step: int) -> None:
    """Reject tensors of which ranks that hold the same part hold different values; a collective.

    It reads everything that it is given, and waits for the device.
    """
    parts = {locate(name, tensor): local_part(tensor) for name, tensor in tensors.items()}
    checksums = {place: zlib.crc32(read_bytes(part)) for place, part in parts.items()}
    holders: defaultdict[Place, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(all_gather_object(checksums)):
        for place, value in own.items():
            holders[place][value].append(rank)
    different = {place[0]: list(groups.values()) for place, groups in holders.items() if len(groups) > 1}
    if different:
        shown = "; ".join(f"{name} on {describe(different[name])}" for name in list(different)[:SHOWN])
        more = f", and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise UserError(f"after step {step}, ranks that should hold the same tensor do not: {shown}{more}")


def locate(name: str, tensor: Tensor) -> Place:
    """Return the name of a tensor and the offset of this rank's shard in it, which is 0 if it is whole."""
    if not isinstance(tensor, DTensor):
        return name, (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return name, tuple(offset)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def read_bytes(tensor: Tensor) -> bytes:
    """Return the values of a tensor, which may be empty, as bytes."""
    return tensor.cpu().flatten().view(torch.uint8).numpy().tobytes()


def describe(groups: list[list[int]]) -> str:
    """Return groups of ranks in words: ``rank 0 and ranks 1, 2``."""
    return " and ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in groups)
