"""Which rank reads which sample: a step is the same on any number of ranks."""

import signal
from collections.abc import Iterator
from multiprocessing import parent_process, resource_tracker
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten  # Private; optree has them.
from torch.utils.data import DataLoader, Dataset, Sampler

from .config import Config, UserError
from .dataset import collate_fn
from .distributed import STOP_SIGNALS, derive_seed, exit_now, seed_everything

Key = tuple[int, int]  # (epoch, index), by a sampler: loader processes hold a copy of it, and see no epoch change.


class TrainSampler(Sampler[Key]):
    """This rank's samples of an epoch, from any position in it up to the last complete global batch."""

    def __init__(self, length: int, dp_rank: int, dp_size: int, global_batch_size: int, seed: int) -> None:
        if length < global_batch_size:
            raise UserError(f"data.global_batch_size is {global_batch_size}, but the training set has {length} samples")
        self.length, self.dp_rank, self.dp_size, self.seed = length, dp_rank, dp_size, seed
        self.batch, self.steps_per_epoch, self.epoch, self.start = global_batch_size, length // global_batch_size, 0, 0

    def position(self, steps: int) -> tuple[int, int]:
        """Return the epoch after ``steps`` steps, and how many of its samples, over all ranks, have been consumed."""
        epoch, steps = divmod(steps, self.steps_per_epoch)
        return epoch, steps * self.batch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, and at which of its samples, over all ranks, it starts."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[Key]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        order = torch.randperm(self.length, generator=generator)[self.start : self.steps_per_epoch * self.batch]
        return ((self.epoch, index) for index in order[self.dp_rank :: self.dp_size].tolist())


class Seeded(Dataset[Any]):
    """A dataset whose random transforms are a function of (seed, epoch, index), for any rank and loader process."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        seed_everything(derive_seed(self.seed, *key))
        return self.dataset[key[1]]


class Loader(DataLoader[Any]):
    """A ``DataLoader`` whose processes see no stop signal, and end with their rank."""

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        resource_tracker.ensure_running()  # It would unblock signals when the first process starts it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # A process inherits the mask.
        try:
            return super().__iter__()
        except (AttributeError, PicklingError, TypeError) as error:  # Such as of a lambda, or of an open file.
            raise UserError(f"data.num_workers: the dataset and collate_fn cannot be pickled: {error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def build_loader(dataset: Any, sampler: Any, batch_size: int, config: Config, device: torch.device) -> Loader:
    """Build a loader of this rank's batches on the CPU."""
    options: dict[str, Any] = {"sampler": sampler, "collate_fn": collate_fn, "pin_memory": device.type == "cuda"}
    if config.data.num_workers:  # A fork could deadlock.
        options |= {"num_workers": config.data.num_workers, "persistent_workers": True}
        options |= {"multiprocessing_context": "spawn", "worker_init_fn": end_without_rank}
    return Loader(Seeded(dataset, config.run.seed), batch_size, **options)


def end_without_rank(_: int) -> None:
    """End a loader process whose rank was killed before PyTorch began to watch it."""
    if not (rank := parent_process()) or not rank.is_alive():
        exit_now(1)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of any nesting with its tensors on ``device``, without waiting for the copies."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"a batch is a pair (inputs, targets), not a {type(batch).__name__}: change dataset.py")
    return tree_map_only(Tensor, lambda part: part.to(device, non_blocking=True), batch)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Split a batch of any nesting into micro-batches; what is no tensor is part of each."""
    leaves, structure = tree_flatten(batch)
    if len({leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}) > 1:
        raise UserError("the tensors of a batch differ in their first dimension, the samples; pad them in Task.prepare")
    if parts > 1 and not all(isinstance(leaf, Tensor | int | float | None) for leaf in leaves):
        raise UserError("only tensors can be split into micro-batches; let Task.prepare or collate_fn return tensors")
    chunks = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(micro), structure) for micro in zip(*chunks, strict=True)]
