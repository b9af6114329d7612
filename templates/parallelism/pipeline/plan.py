"""What a simulation has to know of pipeline parallelism: ranks do the same if they have the same stages and links."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import schedules

from ..benchmark import expected_bubble
from .fakes import replaced
from .messages import spans
from .traits import Traits
#:: include "parallelism/shared/rows.py" ::#


class Layout(Traits):
    """Ranks that hold some stages."""

    other_strategy = "fsdp"
    thrifty = (("schedule", "1F1B"), ("shard_replicas", True), ("replicas", 1))

    def mesh_shape(self) -> tuple[int, int]:
        return self.options.ranks // self.layout.replicas, self.layout.replicas

    def role(self, rank: int, lengths: Collection[int]) -> Any:
        """Return a rank's place in its pipeline, whether its neighbors are on another node, and its shard's rows."""
        replicas, per_node = self.layout.replicas, self.options.ranks_per_node()
        links = [spans((rank, other), per_node) for other in (rank - replicas, rank + replicas)]
        sharded = lengths if self.layout.shard_replicas else ()
        return rank // replicas, *links, *(count_rows(length, replicas, rank % replicas) for length in sharded)

    def waiting(self, strategy: Any) -> float:
        """Return the bubble of the schedule."""
        return expected_bubble(strategy)

    @contextmanager
    def simulated(self) -> Iterator[None]:
        """Let stages not ask their neighbors for the shapes of messages: they are given, so the answer is known."""

        def skip_votes(_: Any, stages: Any, *__: Any) -> None:
            for stage in stages:
                stage._inference_mode = schedules.InferenceMode.STATIC

        with replaced(schedules._PipelineSchedule, "_warmup_p2p", skip_votes):
            yield
