"""Sums over ranks with different samples: of buffers."""

import torch.distributed as dist
from torch import nn


def average_buffers(module: nn.Module, group: dist.ProcessGroup | None, size: int) -> None:
    """Make floating-point buffers the same on the ``size`` ranks of ``group``; a collective.

    BatchNorm's statistics are averaged; others become those of the group's first rank.
    """
    for part in module.modules():
        for buffer in part.buffers(recurse=False):
            if not buffer.is_floating_point() or size == 1:
                continue
            if isinstance(part, nn.modules.batchnorm._NormBase):
                dist.all_reduce(buffer, group=group)
                buffer /= size
            else:
                dist.broadcast(buffer, group=group, group_src=0)
