"""Models that are split between the blocks of a sequence."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn

from ..config import UserError
from .blocks import placing
from .seeding import restored_generators


def build_outline(build: Callable[[], nn.Module]) -> nn.Sequential:
    """Build a sequence of blocks without their values, for which no random numbers are drawn; reject any other model.

    Also rejects one that gives to ``place`` anything but its blocks, or only some of them.
    """
    placed: list[nn.Module] = []
    with restored_generators(), torch.device("meta"), placing(placed.append):
        model = build()
    if not isinstance(model, nn.Sequential):
        raise UserError(
            "{{ cookiecutter.parallelism }} splits a sequence of blocks, but build_model in model.py returns a "
            f"{type(model).__name__}; return an nn.Sequential whose blocks each take and return one tensor"
        )
    if placed and placed != list(model):
        raise UserError(
            f"build_model in model.py returns a sequence of {len(model)} blocks, but gives {len(placed)} modules to "
            "place(); give it each block, in order, or none"
        )
    return model


def balance(weights: Sequence[int], parts: int) -> list[int]:
    """Split a sequence of blocks into ``parts`` contiguous groups so that the heaviest group is as light as possible.

    Args:
        weights: The weight of each block.
        parts: Number of groups, at most the number of blocks.

    Returns:
        The number of blocks in each group, 1 or more.
    """

    @cache
    def best(start: int, parts: int) -> tuple[int, int, list[int]]:
        """Return the heaviest group, the sum of squares (to even out the rest), and the lengths, from ``start`` on."""
        if parts == 1:
            total = sum(weights[start:])
            return total, total**2, [len(weights) - start]
        options = []
        for end in range(start + 1, len(weights) - parts + 2):
            first, (heaviest, squares, lengths) = sum(weights[start:end]), best(end, parts - 1)
            options.append((max(first, heaviest), first**2 + squares, [end - start, *lengths]))
        return min(options)

    return best(0, parts)[2]
