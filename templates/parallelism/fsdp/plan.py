"""What ``plan`` has to know of FSDP2: which ranks are alike, and which settings take less memory."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..launch import PlanOptions

# The strategy that also divides what a layer computes.
OTHER_STRATEGY = "tensor"
# Settings of the strategy that take less memory; the first ones cost least.
THRIFTY: tuple[tuple[str, Any], ...] = (("reshard_after_forward", True), ("replicas", 1), ("cpu_offload", True))


def mesh_shape(layout: Any, ranks: int) -> tuple[int, int]:
    """Return the shape of the mesh of all ranks."""
    return layout.replicas, ranks // layout.replicas


def role(layout: Any, rank: int, options: PlanOptions, lengths: Collection[int]) -> Any:
    """Return what distinguishes a rank from others: how many rows its shards have, of tensors of these lengths."""
    size = options.ranks // layout.replicas
    return tuple(count_rows(length, size, rank % size) for length in lengths)


def count_rows(length: int, size: int, index: int) -> int:
    """Return the rows of a shard; the last ones may be smaller, or empty, as those of ``torch.chunk``."""
    rows = -(-length // size)
    return min(max(length - index * rows, 0), rows)


def host_kinds(layout: Any) -> Collection[str]:
    """Return the kinds of memory that are the host's, not the device's."""
    return ("weights", "gradients", "optimizer") if layout.cpu_offload else ()


def waiting(strategy: Any) -> float:
    """Return the share of a step in which ranks wait for each other by design: none."""
    return 0.0


def simulated() -> AbstractContextManager[None]:
    """Return a context in which the strategy can be simulated: any."""
    return nullcontext()
