"""Sums over ranks with different samples: of buffers{{ ', and of gradients' if cookiecutter.__has_stages or cookiecutter.__shards_layers else '' }}."""

#:: if cookiecutter.__has_stages or cookiecutter.__shards_layers ::#
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
#:: else ::#
import torch.distributed as dist
from torch import nn
#:: endif ::#


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
#:: if cookiecutter.__has_stages or cookiecutter.__shards_layers ::#


def all_reduce_sum(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each tensor over the ranks of ``group``, all of them at the same time; a collective."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()
#:: endif ::#
