"""What a simulation has to know of FSDP2: ranks do the same if their shards have the same size."""

from collections.abc import Collection
from typing import Any

from .traits import Traits
#:: include "parallelism/shared/rows.py" ::#


class Layout(Traits):
    """Ranks that hold a shard of each block."""

    thrifty = (("reshard_after_forward", True), ("replicas", 1), ("cpu_offload", True))
    other_strategy = "tensor"

    def mesh_shape(self) -> tuple[int, int]:
        return self.layout.replicas, self.options.ranks // self.layout.replicas

    def role(self, rank: int, lengths: Collection[int]) -> Any:
        """Return how many rows a rank has of each tensor."""
        _, size = self.mesh_shape()
        return tuple(count_rows(length, size, rank % size) for length in lengths)

    def host_kinds(self) -> Collection[str]:
        return ("weights", "gradients", "optimizer") if self.layout.cpu_offload else ()
