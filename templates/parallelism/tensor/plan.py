"""What a simulation has to know of tensor parallelism: ranks do the same if their shards have the same size."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from .messages import Message
from .traits import Traits
#:: include "parallelism/shared/rows.py" ::#


class Layout(Traits):
    """Ranks that hold a shard of each layer."""

    other_strategy = "fsdp"
    thrifty = (("sequence_parallel", True), ("shard_replicas", True), ("replicas", 1))

    def mesh_shape(self) -> tuple[int, int]:
        return self.layout.replicas, self.options.ranks // self.layout.replicas

    def role(self, rank: int, lengths: Collection[int]) -> Any:
        """Return how many rows a rank has of each tensor, by the dimension of shards and by that of replicas."""
        replicas, size = self.mesh_shape()
        rows = [count_rows(length, size, rank % size) for length in lengths]
        whole_and_sharded = [*lengths, *rows] if self.layout.shard_replicas else []
        return *rows, *(count_rows(length, replicas, rank // size) for length in whole_and_sharded)

    def blocks(self, message: Message) -> bool:
        """Return whether ranks wait for it: activations, inside a group; gradients are summed during backward."""
        _, size = self.mesh_shape()
        return len({rank // size for rank in message.ranks}) == 1

    @contextmanager
    def simulated(self) -> Iterator[None]:
        """Forget how operations on shards were split before: that names the process groups of another rank."""
        _clear_sharding_prop_cache()
        yield
