"""What ``plan`` has to know of nn.DataParallel: there is one rank, and which settings take less memory.

Its first device is simulated, as if it computed the whole batch: it has at least the weights, the gradients and the
optimizer's state of this, and its part of the activations.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..launch import PlanOptions

# The strategy that shards what this one replicates.
OTHER_STRATEGY = "fsdp"
# Settings of the strategy that take less memory; the first ones cost least.
THRIFTY: tuple[tuple[str, Any], ...] = ()


def mesh_shape(layout: Any, ranks: int) -> tuple[int, int]:
    """Return the shape of the mesh of all ranks."""
    return 1, ranks


def role(layout: Any, rank: int, options: PlanOptions, lengths: Collection[int]) -> Any:
    """Return what distinguishes a rank from others; there is one."""
    return 0


def host_kinds(layout: Any) -> Collection[str]:
    """Return the kinds of memory that are the host's, not the device's: none."""
    return ()


def waiting(strategy: Any) -> float:
    """Return the share of a step in which ranks wait for each other by design: none."""
    return 0.0


def simulated() -> AbstractContextManager[None]:
    """Return a context in which the strategy can be simulated: any."""
    return nullcontext()
