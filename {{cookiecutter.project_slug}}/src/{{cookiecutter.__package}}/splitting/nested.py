"""Batches of any nesting: tensors in tuples, lists and dictionaries, whose first dimension is the batch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..config import UserError


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch; rejects what is not a pair of them."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        kind = type(batch).__name__
        raise UserError(f"a batch is a {kind}; have collate_fn in dataset.py return a pair (inputs, targets)")
    return batch[0], batch[1]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on ``device``, without waiting for the copies."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split the tensors of a batch into ``count`` micro-batches, as ``torch.chunk`` does; the rest is in each of them.

    Rejects tensors whose first dimensions differ, because one of them is then not the batch.
    """
    if count == 1:
        return [batch]
    sizes = sorted({len(leaf) if leaf.dim() else 0 for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)})
    if len(sizes) != 1:
        raise UserError(
            f"a batch has tensors whose first dimensions are {sizes}, so it cannot be split into micro-batches; have "
            "collate_fn in dataset.py put the samples there, or set train.microbatches 1"
        )
    pieces = len(torch.empty(sizes[0], device="meta").chunk(count))
    return [tree_map_only(Tensor, lambda tensor: tensor.chunk(count)[i], batch) for i in range(pieces)]  # noqa: B023
