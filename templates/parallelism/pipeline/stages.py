"""The stages of a pipeline: consecutive blocks of the model, and the rank that holds each stage.

2 ranks, 2 stages per rank, 8 blocks             1F1B, Interleaved, ...    V-shaped schedules
blocks   0 1 | 2 3 | 4 5 | 6 7                   rank 0: stages 0 and 2    rank 0: stages 0 and 3
stage      0     1     2     3                   rank 1: stages 1 and 3    rank 1: stages 1 and 2
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ParallelConfig
from .nested import to_device
from .sequence import balance


class Stage(nn.Module):
    """Consecutive blocks that compute in ``train.precision`` and output ``dtype``."""

    def __init__(self, blocks: nn.Sequential, autocast: Callable[[], torch.autocast], dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks, self.autocast, self.dtype = blocks, autocast, dtype

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.blocks(x).to(self.dtype)


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
