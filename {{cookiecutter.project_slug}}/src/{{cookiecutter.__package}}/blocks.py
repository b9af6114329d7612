"""What is done to every block of the model, however the work is split."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from .config import TrainConfig


def prepare_blocks(model: nn.Sequential, config: TrainConfig) -> None:
    """Set each block up for ``train.activation_checkpointing`` and ``train.compile``; names stay as they are."""
    for block in model:
        if config.activation_checkpointing:
            # Backward runs the block again, so that only its input has to be kept.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.compile:
            block.compile()
