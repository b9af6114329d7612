"""Random numbers that belong to a sample: what a dataset draws is a function of (run.seed, epoch, index) alone.

A transform draws from the global generators of ``torch``, ``random`` or NumPy. Each loader process has its own, and the
number of draws before a sample depends on what else it loaded. So all three are seeded anew before each sample, and
before the samples of a batch are collated; the rank's own state, which dropout uses, is restored after the batch.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import Dataset

# A sample of a dataset: (epoch, index). The epoch is part of the key because loader processes hold a copy of the
# dataset and would not see it change.
Key = tuple[int, int]
COLLATE = -1  # Distinguishes the numbers that a batch draws from those of its first sample.
SAMPLES = np.random.MT19937(0)  # What samples draw from with NumPy; it is seeded anew for each.


class SeededDataset(Dataset[Any]):
    """A map-style dataset that is asked for a batch of keys, as ``DataLoader`` does if ``__getitems__`` exists.

    Its own ``__getitems__`` is used if it has one, unless it draws random numbers: they would belong to the batch.
    What ``collate_fn`` draws belongs to the batch, so it is the same for any number of loader processes, but not of
    ranks.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self.gets_batches = hasattr(dataset, "__getitems__")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the collated samples of a batch."""
        with restored_generators():
            samples = self.get_samples(keys)
            seed_generators(self.seed, *keys[0], COLLATE)
            return self.collate_fn(samples)

    def get_samples(self, keys: Sequence[Key]) -> list[Any]:
        """Return samples; it changes the state of the generators."""
        if self.gets_batches:
            seed_generators(self.seed)
            before = get_state()
            samples: list[Any] = self.dataset.__getitems__([index for _, index in keys])
            if is_same_state(before, get_state()):
                return samples
            self.gets_batches = False
        return [self.get_sample(epoch, index) for epoch, index in keys]

    def get_sample(self, epoch: int, index: int) -> Any:
        """Return one sample; it changes the state of the generators."""
        seed_generators(self.seed, epoch, index)
        return self.dataset[index]


def identity(batch: Any) -> Any:
    """Return a batch as it is: a ``collate_fn`` for batches that were collated with their own random numbers."""
    return batch


def seed_generators(*key: int) -> None:
    """Seed the CPU's global generators with a hash of ``key``, in about 7 microseconds."""
    digest = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest())
    random.seed(digest)
    np.random.seed(digest & 0xFFFFFFFF)
    torch.default_generator.manual_seed(digest)  # torch.manual_seed, which also seeds devices, takes ten times as long.


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the state of the generators at the end of a ``with`` block."""
    python, numpy, pytorch = random.getstate(), get_bit_generator(), torch.get_rng_state()
    set_bit_generator(SAMPLES)  # NumPy's own state would take longer to copy than those of the others.
    try:
        yield
    finally:
        random.setstate(python)
        set_bit_generator(numpy)
        torch.set_rng_state(pytorch)


def get_state() -> tuple[Any, Any, torch.Tensor]:
    """Return the state of the CPU's global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def is_same_state(one: tuple[Any, Any, torch.Tensor], other: tuple[Any, Any, torch.Tensor]) -> bool:
    """Return whether no random number was drawn between two states."""
    same_numpy = np.array_equal(one[1][1], other[1][1]) and one[1][2:] == other[1][2:]
    return one[0] == other[0] and same_numpy and torch.equal(one[2], other[2])
