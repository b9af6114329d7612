"""The stages of a pipeline: consecutive blocks of the model, and the rank that holds each stage.

2 ranks, 2 stages per rank, 8 blocks             1F1B, Interleaved, ...    V-shaped schedules
blocks   0 1 | 2 3 | 4 5 | 6 7                   rank 0: stages 0 and 2    rank 0: stages 0 and 3
stage      0     1     2     3                   rank 1: stages 1 and 3    rank 1: stages 1 and 2
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from ..config import DistributedConfig, ParallelConfig
from ..launch import collective_timeout
from .nested import to_device
from .replication import GradientBuckets
from .sequence import balance


class Stage(nn.Module):
    """Consecutive blocks that compute in ``train.precision``, output ``dtype``, and sum gradients over ``group``."""

    def __init__(
        self,
        blocks: nn.Sequential,
        autocast: Callable[[], torch.autocast],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.blocks, self.autocast, self.dtype = blocks, autocast, dtype
        self.buckets = GradientBuckets(self, group)

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.blocks(x).to(self.dtype)


class ScheduledStage(PipelineStage):
    """A ``Stage`` in a schedule, which passes on what the schedule says to the stage's buckets of gradients.

    A backward that is split in two completes no gradient by itself, so the buckets start after the last one; other
    stages of the rank may still be at work then.
    """

    submod: Stage

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run one backward: a whole one, or the part for inputs, or the one for weights."""
        self.submod.buckets.is_last_backward = last_backward
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Start what is left, when the schedule has run all backwards of this stage."""
        super().perform_reduce_grad(grad_scale_factor)
        self.submod.buckets.start_rest()


def split_into_stages(model: nn.Module, config: ParallelConfig, pipeline_size: int) -> list[nn.Sequential]:
    """Split ``model`` into the stages of a pipeline of ``pipeline_size`` ranks; blocks keep their names."""
    weights = [sum(p.numel() for p in block.parameters()) for block in model.children()]
    lengths = config.split or balance(weights, pipeline_size * config.stages())
    blocks = list(model.named_children())
    return [nn.Sequential(OrderedDict(blocks[a:b])) for a, b in pairwise([0, *accumulate(lengths)])]


def trace_stages(
    stages: Iterable[nn.Module], dtypes: Iterable[torch.dtype], inputs: Any
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the inputs and the outputs of each stage, without their values.

    The ``stages`` are on the meta device, in fp32; ``dtypes`` are those of what each outputs.
    """
    outputs = received = to_device(inputs, torch.device("meta"))
    for stage, dtype in zip(stages, dtypes, strict=False):
        outputs = stage(outputs).detach()
        inputs, received = received, outputs.to(dtype).requires_grad_()
        yield inputs, received


def assign_stages(stages: int, pipeline_size: int, schedule: str) -> list[int]:
    """Return the pipeline rank of each stage: round-robin, or back and forth for V-shaped schedules."""
    there = list(range(pipeline_size))
    laps = [there, there[::-1] if schedule in ("ZBVZeroBubble", "DualPipeV") else there]
    return [rank for lap in range(stages // pipeline_size) for rank in laps[lap % 2]]


def build_group_after_startup(mesh: DeviceMesh, config: DistributedConfig) -> dist.ProcessGroup:
    """Return this rank's pipeline of a mesh ("pipeline", "data"), whose waits end after the timeout of training.

    gloo cannot change the timeout of point-to-point messages, so it needs another group, which is created at the start,
    while all ranks are known to be alive.
    """
    group = mesh["pipeline"].get_group()
    if dist.get_backend(group) == "gloo":
        group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.T.tolist(), collective_timeout(config.timeout_seconds))
    return group


def schedule_stages(
    stages: Mapping[int, Stage], shapes: Sequence[tuple[Any, Tensor]], device: torch.device, group: dist.ProcessGroup
) -> list[ScheduledStage]:
    """Return a rank's stages for a schedule; ``shapes`` are what ``trace_stages`` yields for a micro-batch."""
    return [
        ScheduledStage(stage, index, len(shapes), device, *shapes[index], group=group)
        for index, stage in stages.items()
    ]


def build_schedule(
    name: str, stages: Sequence[PipelineStage], microbatches: int, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Build the schedule that runs a rank's ``stages`` for each micro-batch; it adds up gradients, without a mean."""
    kind: Any = get_schedule_class(name)
    own = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(own, microbatches, loss_fn=loss_fn, scale_grads=False)
