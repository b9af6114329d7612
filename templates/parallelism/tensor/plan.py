"""What a simulation has to know of tensor parallelism: ranks do the same if their shards have the same size."""

from collections.abc import Collection
from typing import Any

from .traits import Traits


class Layout(Traits):
    """Ranks that hold a shard of each layer."""

    other_strategy = "fsdp"
    thrifty = (("sequence_parallel", True), ("replicas", 1))

    def mesh_shape(self) -> tuple[int, int]:
        return self.layout.replicas, self.options.ranks // self.layout.replicas

    def role(self, rank: int, lengths: Collection[int]) -> Any:
        """Return how many rows a rank's shards have: the last ones may be smaller, as those of ``torch.chunk``."""
        _, size = self.mesh_shape()
        sizes = [(length, -(-length // size)) for length in lengths]
        return tuple(min(max(length - rank % size * rows, 0), rows) for length, rows in sizes)
