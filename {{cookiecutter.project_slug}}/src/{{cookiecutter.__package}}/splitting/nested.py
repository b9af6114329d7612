"""Batches of any nesting: tensors in tuples, lists and dictionaries, whose first dimension is the batch."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..config import UserError

PLAIN = (bool, int, float, str, bytes, type(None))


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch; rejects what is not a pair of them."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        kind = type(batch).__name__
        raise UserError(f"a batch is a {kind}; have collate_fn in dataset.py return a pair (inputs, targets)")
    return batch[0], batch[1]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on ``device``, without waiting for the copies; rejects what may hide tensors."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        if isinstance(leaf, PLAIN):
            return leaf
        kind = type(leaf).__name__
        raise UserError(
            f"a batch holds a {kind}, whose tensors cannot be found; have collate_fn in dataset.py return tensors in "
            "tuples, lists and dictionaries, for example dict(batch)"
        )

    return tree_map(move, batch)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split a batch into ``count`` micro-batches, as ``torch.chunk`` does.

    Tensors are split, and lists without tensors (one text for each sample); numbers are the same for all micro-batches.
    Rejects tensors and lists whose lengths differ, because one of them is then not the batch.
    """
    if count == 1:
        return [batch]
    parts = [leaf for leaf in tree_leaves(batch, is_plain_list) if isinstance(leaf, Tensor | list)]
    sizes = sorted({0 if isinstance(part, Tensor) and not part.dim() else len(part) for part in parts})
    if len(sizes) != 1:
        raise UserError(
            f"a batch has parts whose first dimensions are {sizes}, so it cannot be split into micro-batches; have "
            "collate_fn in dataset.py put the samples there, or set train.microbatches 1"
        )
    length = math.ceil(sizes[0] / count)

    def piece(start: int) -> Any:
        def cut(leaf: Any) -> Any:
            return leaf[start : start + length] if isinstance(leaf, Tensor | list) else leaf

        return tree_map(cut, batch, is_leaf=is_plain_list)

    return [piece(start) for start in range(0, sizes[0], length)]


def is_plain_list(part: Any) -> bool:
    """Return whether a part of a batch is a list without tensors."""
    return isinstance(part, list) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(part))
