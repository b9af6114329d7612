"""What ``plan`` has to know of tensor parallelism: which ranks are alike, and which settings take less memory."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..launch import PlanOptions

# The strategy that shards everything, whatever the layers compute.
OTHER_STRATEGY = "fsdp"
# Settings of the strategy that take less memory; the first ones cost least.
THRIFTY: tuple[tuple[str, Any], ...] = (("sequence_parallel", True), ("replicas", 1))


def mesh_shape(layout: Any, ranks: int) -> tuple[int, int]:
    """Return the shape of the mesh of all ranks."""
    return layout.replicas, ranks // layout.replicas


def role(layout: Any, rank: int, options: PlanOptions, lengths: Collection[int]) -> Any:
    """Return what distinguishes a rank from others: the rows of its shards, of tensors of these lengths."""
    size = options.ranks // layout.replicas
    index = rank % size
    return tuple(min(max(length - index * -(-length // size), 0), -(-length // size)) for length in lengths)


def host_kinds(layout: Any) -> Collection[str]:
    """Return the kinds of memory that are the host's, not the device's: none."""
    return ()


def waiting(strategy: Any) -> float:
    """Return the share of a step in which ranks wait for each other by design: none."""
    return 0.0


def simulated() -> AbstractContextManager[None]:
    """Return a context in which the strategy can be simulated: any."""
    return nullcontext()
