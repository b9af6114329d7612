"""What ``plan`` has to know of pipeline parallelism: which ranks are alike, and which settings take less memory."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import schedules

from ..launch import PlanOptions
from ..reporting import expected_bubble
from .fakes import replaced
from .messages import spans

# The strategy that shards the memory of each layer.
OTHER_STRATEGY = "fsdp"
# Settings of the strategy that take less memory; the first ones cost least.
THRIFTY: tuple[tuple[str, Any], ...] = (("schedule", "1F1B"), ("replicas", 1))


def mesh_shape(layout: Any, ranks: int) -> tuple[int, int]:
    """Return the shape of the mesh of all ranks."""
    return ranks // layout.replicas, layout.replicas


def role(layout: Any, rank: int, options: PlanOptions, lengths: Collection[int]) -> Any:
    """Return what distinguishes a rank from others: its place in the pipeline, and links to the next ones."""
    neighbors = (rank - layout.replicas, rank + layout.replicas)
    return rank // layout.replicas, *(spans({rank, neighbor}, options.ranks_per_node()) for neighbor in neighbors)


def host_kinds(layout: Any) -> Collection[str]:
    """Return the kinds of memory that are the host's, not the device's: none."""
    return ()


def waiting(strategy: Any) -> float:
    """Return the share of a step in which ranks wait for each other: the bubble of the schedule."""
    return expected_bubble(strategy)


@contextmanager
def simulated() -> Iterator[None]:
    """Let stages not ask their neighbors for the shapes of messages: they are given, so the answer is known."""

    def skip_votes(_: Any, stages: Any, *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    with replaced(schedules._PipelineSchedule, "_warmup_p2p", skip_votes):
        yield
