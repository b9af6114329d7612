"""Whether all ranks have the same dataset: with other files on one machine, a run would train on something else."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..config import UserError
from ..runtime import all_gather_object
from .nested import PLAIN
from .seeding import restored_generators

REMEDY = "give all ranks the same files, and draw random numbers only from the generators of torch, random and numpy"


def check_same_dataset(name: str, length: int, load: Callable[[int], Any]) -> None:
    """Reject a dataset whose length, or whose first, middle or last sample, is not the same on all ranks; a collective.

    Args:
        name: What the message calls the dataset.
        length: Number of samples on this rank.
        load: Returns a sample, given its index.
    """
    if not dist.is_initialized():  # A dataset that is only looked at.
        return
    indices = sorted({0, length // 2, length - 1}) if length else []
    with restored_generators():
        hashes = {index: fingerprint(load(index)) for index in indices}
    everyone = all_gather_object((length, hashes))
    expected_length, expected = everyone[0]
    for rank, (length, hashes) in enumerate(everyone):
        if length != expected_length:
            raise UserError(f"{name} has {expected_length} samples on rank 0 and {length} on rank {rank}; {REMEDY}")
        for index in indices:
            if hashes[index] != expected[index]:
                raise UserError(f"sample {index} of {name} is not the same on ranks 0 and {rank}; {REMEDY}")


def fingerprint(sample: Any) -> str:
    """Return a hash of a sample's tensors, arrays, numbers and texts; of anything else, only the type counts."""
    digest = blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor | np.ndarray):
            values = torch.as_tensor(leaf).detach().cpu().contiguous()
            digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, PLAIN):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__name__.encode())
    return digest.hexdigest()
