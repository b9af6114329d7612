"""Blocks of a model: what is compiled, recomputed, sharded or placed as a unit."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config import TrainConfig, UserError


def prepare_blocks(blocks: Iterable[nn.Module], config: TrainConfig) -> None:
    """Set up each block for ``train.activation_checkpointing`` and ``train.compile``; parameter names do not change.

    Rejects blocks that are inside of others, and lists of modules, which are not called.
    """
    blocks = list(blocks)
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    for block in blocks:
        if id(block) in inner or isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise UserError(
                f"blocks(model) in model.py lists a {type(block).__name__} that is inside another block, or is not "
                "called itself; list modules that are called once in a forward pass, none inside another"
            )
        if config.compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            # Backward runs the block again, so only its input has to be kept.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
