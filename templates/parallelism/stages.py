"""Stages of a pipeline: runs of the model's blocks, and the rank that holds each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from .config import ParallelConfig


class Stage(nn.Module):
    """A run of blocks that computes as ``train.precision`` says and passes on fp32, whatever its last block gave."""

    def __init__(self, blocks: nn.Sequential, autocast: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.blocks, self.autocast = blocks, autocast

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.blocks(x).float()


def cut(model: nn.Sequential, config: ParallelConfig, length: int) -> list[nn.Sequential]:
    """The stages of ``model`` for a pipeline of ``length`` ranks: runs of blocks, which keep their names."""
    weights = [sum(p.numel() for p in block.parameters()) for block in model]
    lengths = config.split or balance(weights, length * config.stages())
    blocks = list(model.named_children())
    return [nn.Sequential(OrderedDict(blocks[a:b])) for a, b in pairwise([0, *accumulate(lengths)])]


def place(stages: int, length: int, schedule: str) -> list[int]:
    """The rank of each stage in its pipeline: round and round, or forth and back where the schedule is a V."""
    forth = list(range(length))
    laps = [forth, forth[::-1] if schedule in ("ZBVZeroBubble", "DualPipeV") else forth]
    return [rank for lap in range(stages // length) for rank in laps[lap % 2]]


#:: include "parallelism/balance.py" ::#
