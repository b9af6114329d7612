"""Blocks of a model: what is compiled, recomputed, sharded or placed as a unit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config import TrainConfig, UserError

Block = TypeVar("Block", bound=nn.Module)
PlaceFn = Callable[[nn.Module], object]  # Changes where the weights of a block are, in place.

_place_fn: PlaceFn | None = None


def place(block: Block) -> Block:
    """Return a block that was just built, after the strategy has moved, sharded or dropped its weights, in place.

    If ``build_model`` calls this for each block, a rank holds at most its part of the model and one block. The block
    has its initial values by then, and shares no parameter with another. Outside of a strategy, it stays as it is.
    """
    if _place_fn is not None:
        _place_fn(block)
    return block


@contextmanager
def placing(place_fn: PlaceFn) -> Iterator[None]:
    """Make ``place`` call ``place_fn`` in a ``with`` block."""
    global _place_fn
    before, _place_fn = _place_fn, place_fn
    try:
        yield
    finally:
        _place_fn = before


def build_by_block(
    build: Callable[[], nn.Module],
    blocks: Callable[[nn.Module], Iterable[nn.Module]],
    config: TrainConfig,
    place_fn: PlaceFn,
) -> tuple[nn.Module, list[nn.Module]]:
    """Build a model; each block is prepared (``prepare_blocks``) and given to ``place_fn`` as soon as it is built.

    Returns:
        The model, and its blocks: those that it gives to ``place``. If it gives none, they are ``blocks(model)``, and
        the whole model is built first.
    """
    parts: list[nn.Module] = []

    def prepare_and_place(block: nn.Module) -> None:
        prepare_blocks([block], config)
        place_fn(block)
        parts.append(block)

    with placing(prepare_and_place):
        model = build()
    if not parts:
        parts += blocks(model)
        prepare_blocks(parts or [model], config)
        for block in parts:
            place_fn(block)
    return model, parts


def prepare_blocks(blocks: Iterable[nn.Module], config: TrainConfig) -> None:
    """Set up each block for ``train.activation_checkpointing`` and ``train.compile``; parameter names do not change.

    Rejects blocks that are inside of others, and lists of modules, which are not called.
    """
    blocks = list(blocks)
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    for block in blocks:
        if id(block) in inner or isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise UserError(
                f"one of the blocks in model.py is a {type(block).__name__} that is inside another block, or is not "
                "called itself; list modules that are called once in a forward pass, none inside another"
            )
        if config.compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            # Backward runs the block again, so only its input has to be kept.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
