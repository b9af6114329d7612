"""What ``plan`` has to know of model parallelism: which ranks are alike, and which settings take less memory.

A rank's devices are simulated as one, so its memory is that of all of them together.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import distributed

from ..launch import PlanOptions
from .fakes import replaced

# The strategy that shards what this one replicates.
OTHER_STRATEGY = "pipeline"
# Settings of the strategy that take less memory; the first ones cost least.
THRIFTY: tuple[tuple[str, Any], ...] = ()


def mesh_shape(layout: Any, ranks: int) -> tuple[int, int]:
    """Return the shape of the mesh of all ranks."""
    return 1, ranks


def role(layout: Any, rank: int, options: PlanOptions, lengths: Collection[int]) -> Any:
    """Return what distinguishes a rank from others: nothing, because all hold the whole model."""
    return 0


def host_kinds(layout: Any) -> Collection[str]:
    """Return the kinds of memory that are the host's, not the device's: none."""
    return ()


def waiting(strategy: Any) -> float:
    """Return the share of a step in which ranks wait for each other by design: none."""
    return 0.0


@contextmanager
def simulated() -> Iterator[None]:
    """Let DDP compare no shapes between ranks: it would read what they have sent."""
    with replaced(distributed, "_verify_param_shape_across_processes", lambda *_: None):
        yield
