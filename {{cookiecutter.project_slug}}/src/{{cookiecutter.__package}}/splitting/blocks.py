"""Blocks of a model: what is compiled, recomputed, sharded or placed as a unit."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config import TrainConfig


def prepare_blocks(blocks: Iterable[nn.Module], config: TrainConfig) -> None:
    """Set up each block for ``train.activation_checkpointing`` and ``train.compile``; parameter names do not change."""
    for block in blocks:
        if config.compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            # Backward runs the block again, so only its input has to be kept.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
