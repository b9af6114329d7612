"""Which rank reads which sample: a step has the same samples on any number of ranks."""

import signal
from collections.abc import Iterator
from multiprocessing import parent_process, resource_tracker
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only  # Private; optree has the same.
from torch.utils.data import DataLoader, Dataset, Sampler

from .config import Config, UserError
from .dataset import collate_fn
from .distributed import STOP_SIGNALS, derive_seed, exit_now, seed_everything, wide_dtype

# Loader processes hold a copy of the dataset, so keys bring them the epoch: (epoch, index).
Key = tuple[int, int]


class TrainSampler(Sampler[list[Key]]):
    """Yields this rank's micro-batches of an epoch, up to the last complete global batch."""

    def __init__(self, length: int, numbers: range, config: Config) -> None:
        """Sample from ``length`` samples the micro-batches of these numbers in a global batch."""
        self.length = length
        self.numbers = numbers
        self.num_microbatches = config.data.num_microbatches
        self.global_batch_size = config.data.global_batch_size
        self.seed = config.run.seed
        self.steps_per_epoch = length // self.global_batch_size
        if not self.steps_per_epoch:
            raise UserError(
                f"data.global_batch_size is {self.global_batch_size}, "
                f"but the training set has {length} samples"
            )
        self.set_epoch(0)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch after ``step`` steps, and how many of its samples were consumed."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch, step_in_epoch * self.global_batch_size

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the epoch, and how many of its samples all ranks together have consumed."""
        self.epoch = epoch
        self.consumed_samples = consumed_samples

    def __iter__(self) -> Iterator[list[Key]]:
        # The order is a function of seed and epoch: a resumed run slices it, and replays nothing.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        order = torch.randperm(self.length, generator=generator)
        end = self.steps_per_epoch * self.global_batch_size
        # The micro-batch of a number has the same samples on any number of ranks.
        steps = order[:end].view(self.steps_per_epoch, self.num_microbatches, -1)
        first_step = self.consumed_samples // self.global_batch_size
        for indices in steps[first_step:, self.numbers].flatten(0, 1):
            yield [(self.epoch, index) for index in indices.tolist()]


class Seeded(Dataset[Any]):
    """A dataset whose random transforms depend on (seed, epoch, index), and not on who reads it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.dtype = torch.get_default_dtype()

    def __getitem__(self, key: Key) -> Any:
        # A loader process starts with fp32 as its default type, whatever its rank has.
        torch.set_default_dtype(self.dtype)
        epoch, index = key
        seed_everything(derive_seed(self.seed, epoch, index))
        return self.dataset[index]


class Loader(DataLoader[Any]):
    """A ``DataLoader`` whose processes ignore stop signals, so that their rank can save first."""

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        # Starting Python's resource tracker would unblock the signals, so it starts before.
        resource_tracker.ensure_running()
        # A new process inherits the signals that are blocked here, and never sees them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def build_loader(dataset: Any, batches: Any, config: Config, device: torch.device) -> Loader:
    """Build a loader of batches of keys, whose tensors are on the CPU."""
    num_workers = config.data.num_workers
    return Loader(
        Seeded(dataset, config.run.seed),
        batch_sampler=batches,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        # A fork of gloo's threads could deadlock.
        multiprocessing_context="spawn" if num_workers else None,
        worker_init_fn=end_without_rank,
    )


def end_without_rank(_: int) -> None:
    """End a loader process whose rank was killed before PyTorch began to watch it."""
    rank = parent_process()
    if rank is None or not rank.is_alive():
        exit_now(1)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of any nesting with its tensors on ``device``; the copies do not block."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"a batch is a pair (inputs, targets), not a {type(batch).__name__}")

    def move(tensor: Tensor) -> Tensor:
        # Data sets have tensors in fp32, such as those of files, under train.precision fp64 too.
        dtype = tensor.dtype
        if dtype == torch.float32:
            dtype = wide_dtype()
        return tensor.to(device, dtype, non_blocking=True)

    return tree_map_only(Tensor, move, batch)
