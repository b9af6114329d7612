"""Samplers and loaders: which rank reads which sample, and when.

Whatever the number of ranks, step i of an epoch trains on the same samples, and evaluation sees each sample once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from .config import DataConfig, UserError
from .launcher_watch import end_with

# A dataset is asked for (epoch, index). The epoch travels with the index because loader processes hold a copy of the
# dataset and would not see it change; so a sample's augmentation is a function of both, whoever loads it.
Key = tuple[int, int]


class TrainSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that can start in the middle of an epoch and ends with its last whole global batch.

    An epoch is one permutation of the dataset, given by (seed, epoch) alone. Global batch i is its i-th slice of
    ``global_batch_size`` samples, of which rank r takes every ``num_replicas``-th, from the r-th on.

    Raises:
        UserError: if the dataset holds less than one global batch.
    """

    def __init__(self, dataset: Any, rank: int, size: int, global_batch_size: int, seed: int) -> None:
        super().__init__(dataset, num_replicas=size, rank=rank, seed=seed)
        if len(dataset) < global_batch_size:
            raise UserError(
                f"data.global_batch_size is {global_batch_size}, but the training set has {len(dataset)} samples; "
                "give at most that many"
            )
        self.global_batch_size = global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its samples (over all ranks) were consumed already."""
        super().set_epoch(epoch)
        length = len(self.dataset)  # type: ignore[arg-type]
        self.start, self.end = start, length - (length - start) % self.global_batch_size

    def __iter__(self) -> Iterator[Key]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        mine = order[self.start : self.end][self.rank :: self.num_replicas]
        return iter([(self.epoch, index) for index in mine.tolist()])

    def __len__(self) -> int:
        return max(0, self.end - self.start) // self.num_replicas


class EvalSampler(Sampler[Key]):
    """Every ``size``-th sample from the ``rank``-th on, unpadded: over all ranks each sample once."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        self.indices = range(rank, length, size)

    def __iter__(self) -> Iterator[Key]:
        return iter([(0, index) for index in self.indices])

    def __len__(self) -> int:
        return len(self.indices)


def build_loader(
    dataset: Dataset[Any], sampler: Sampler[Key], batch_size: int, config: DataConfig, device: torch.device
) -> DataLoader[Any]:
    """A loader of ``batch_size`` samples at a time, as ``(inputs, targets)`` on the CPU."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=config.num_workers,
        persistent_workers=config.num_workers > 0,
        # Not a fork: it would take over the locks that other threads (of collectives, of backward) hold just then, and
        # may wait for one forever.
        multiprocessing_context="spawn" if config.num_workers else None,
        worker_init_fn=start_loading,
        pin_memory=device.type == "cuda",
        # Its own generator: a new iterator would otherwise draw from the global one, and a resumed run would differ.
        generator=torch.Generator(),
    )


def start_loading(_: int) -> None:
    """What a loader process does first: it ties its life to the rank's, and leaves requests to stop to it."""
    rank = parent_process()
    assert rank is not None and rank.pid is not None
    # PyTorch has it end with whoever is its parent by now: not the rank, if that was killed while this process started.
    end_with(rank.pid)
    # Slurm may signal all processes of a job, and this one loads what is due.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
