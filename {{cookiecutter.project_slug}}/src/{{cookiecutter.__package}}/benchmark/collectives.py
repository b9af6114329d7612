"""Averaging a tensor over N ranks in two ways, compared with what the slowest link between neighbors allows:

all-reduce          as a ring, each rank sends and receives 2(N-1)/N times the tensor's bytes
parameter server    rank 0 receives every tensor, and sends the mean to each rank: (N-1) times, twice
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..doctor import measure_links, median_seconds
from ..runtime import all_gather_object

KIB, MIB = 2**10, 2**20
# Less on a CPU, where the ranks compute the sums themselves.
ON_CPU, ON_ACCELERATOR = (4 * KIB, 64 * KIB, MIB, 16 * MIB), (64 * KIB, MIB, 16 * MIB, 256 * MIB)


def measure_collectives(device: torch.device) -> dict[str, Any]:
    """Measure both ways for tensors of several sizes, and the link; a collective. One rank has nothing to measure."""
    if dist.get_world_size() == 1:
        return {"link_gb_per_second": None, "collectives": []}
    sizes = ON_CPU if device.type == "cpu" else ON_ACCELERATOR
    _, link = measure_links(sizes[-1], device)
    return {
        "link_gb_per_second": round(link, 3),
        "collectives": [measure_size(size, 1e9 * link, device) for size in sizes],
    }


def measure_size(size: int, link: float, device: torch.device) -> dict[str, float]:
    """Measure both ways for a tensor of ``size`` bytes; ``link`` is in bytes per second."""
    tensor, world_size = torch.zeros(size // 4, device=device), dist.get_world_size()
    other = torch.empty_like(tensor)

    def measure(action: Callable[[], object]) -> float:
        """Return the milliseconds of the slowest rank."""
        return round(1000 * max(all_gather_object(median_seconds(action, device))), 3)

    return {
        "bytes": size,
        "all_reduce_ms": measure(lambda: dist.all_reduce(tensor)),
        "ring_bound_ms": round(1000 * ring_bytes(size, world_size) / link, 3),
        "server_ms": measure(lambda: average_at_server(tensor, other)),
        "server_bound_ms": round(1000 * server_bytes(size, world_size) / link, 3),
    }


def average_at_server(tensor: Tensor, other: Tensor) -> None:
    """Replace each rank's tensor by the mean of all, by way of rank 0, which receives one after the other in ``other``.

    Room for all of them at once would be more than a large job has.
    """
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.scatter(tensor)
        return
    world_size = dist.get_world_size()
    for rank in range(1, world_size):
        dist.recv(other, rank)
        tensor += other
    tensor /= world_size
    dist.scatter(tensor, [other.copy_(tensor)] * world_size)


def ring_bytes(size: int, world_size: int) -> float:
    """Return the bytes that each rank sends, and receives, in a ring all-reduce.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (world_size - 1) / world_size * size


def server_bytes(size: int, world_size: int) -> float:
    """Return the bytes that a parameter server receives, and then sends."""
    return 2 * (world_size - 1) * size
