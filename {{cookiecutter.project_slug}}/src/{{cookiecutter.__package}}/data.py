"""Samplers and loaders: which rank reads which sample, and when.

For any number of ranks, step i of an epoch trains on the same samples, and evaluation reads each sample once:

    training     order of the epoch, from (seed, epoch)     7 2 9 4 | 0 5 1 8 | 3 6      2 ranks, global batch of 4:
                 rank 0 reads 7 9 | 0 1, rank 1 reads 2 4 | 5 8; the incomplete batch 3 6 is dropped
    evaluation   rank 0 reads 0 2 4 | 6 8 8, rank 1 reads 1 3 5 | 7 9 9; what completes the last batch does not count
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from .config import DataConfig, UserError
from .dataset import collate_fn
from .runtime import Context
from .splitting import InStep, Key, Stream, build_loader, loader_options, permuted, seed_dataset
from .strategy import Strategy


class TrainSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that can start in the middle of an epoch and ends with the last complete global batch.

    An epoch is one permutation of the dataset, determined by (seed, epoch) and never held in memory. Global batch i is
    its i-th slice of ``global_batch_size`` samples; this rank reads every ``dp_size``-th of them. Rejects a dataset
    smaller than that.
    """

    def __init__(self, dataset: Any, dp_rank: int, dp_size: int, global_batch_size: int, seed: int) -> None:
        super().__init__(dataset, num_replicas=dp_size, rank=dp_rank, seed=seed)
        if len(dataset) < global_batch_size:
            raise UserError(
                f"data.global_batch_size is {global_batch_size}, but the training set has {len(dataset)} samples; "
                "give at most that many"
            )
        self.global_batch_size, self.steps_per_epoch = global_batch_size, len(dataset) // global_batch_size
        self.start = self.end = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, and how many of its samples (over all ranks) have already been consumed."""
        super().set_epoch(epoch)
        length = len(self.dataset)  # type: ignore[arg-type]
        self.start, self.end = start, length - (length - start) % self.global_batch_size

    def __iter__(self) -> Iterator[Key]:
        epoch, own = self.epoch, range(self.start, self.end)[self.rank :: self.num_replicas]
        length = len(self.dataset)  # type: ignore[arg-type]
        return ((epoch, index) for index in permuted(own, length, self.seed, epoch))

    def __len__(self) -> int:
        return max(0, self.end - self.start) // self.num_replicas


class EvalSampler(Sampler[Key]):
    """Every ``dp_size``-th sample from ``dp_rank`` on; then its last one again, which does not count.

    So all ranks run the same number of batches, as the model's collectives need, and all of one size, for which it is
    compiled once: the largest share is divided evenly into batches of at most ``largest_batch``.
    """

    def __init__(self, length: int, dp_rank: int, dp_size: int, largest_batch: int) -> None:
        self.indices = range(dp_rank, length, dp_size)
        share = -(-length // dp_size)
        batches = -(-share // largest_batch)
        self.batch_size = -(-share // batches)
        self.padded = range(dp_rank, dp_rank + batches * self.batch_size * dp_size, dp_size)

    def __iter__(self) -> Iterator[Key]:
        last = max(self.indices, default=0)
        return ((0, min(index, last)) for index in self.padded)

    def __len__(self) -> int:
        return len(self.padded)


def build_train_loader(
    dataset: Any, strategy: Strategy, config: DataConfig, seed: int, register: Callable[..., None], guard: Context
) -> tuple[Any, Iterable[Any]]:
    """Build the sampler, whose ``set_epoch`` starts an epoch, and the loader of this rank's ``(inputs, targets)``.

    A training set that depends on the model, such as the experience of an agent, has a method ``build_loader`` of its
    own, with the same other arguments: it wraps what it does between steps in ``guard``. Its sampler may have
    ``metrics`` for the records, and ``busy_seconds``, which it has spent without waiting for other ranks.
    """
    if hasattr(dataset, "build_loader"):
        return dataset.build_loader(strategy, config, seed, register, guard)
    dp_rank, dp_size, batch = strategy.dp_rank, strategy.dp_size, config.global_batch_size
    if isinstance(dataset, IterableDataset):
        stream = Stream(dataset, collate_fn, dp_rank, dp_size, batch, config.num_workers, seed)
        register("stream", stream)
        return stream, InStep(DataLoader(stream, batch_size=None, **loader_options(config, strategy.device)))
    seeded = seed_dataset(dataset, collate_fn, seed)
    sampler = TrainSampler(dataset, dp_rank, dp_size, batch, seed)
    return sampler, build_loader(seeded, sampler, batch // dp_size, config, strategy.device)
