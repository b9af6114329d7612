"""Which rank reads which sample: a step has the same samples on any number of ranks."""

import signal
from collections.abc import Iterator
from multiprocessing import parent_process, resource_tracker
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten  # Private.
from torch.utils.data import DataLoader, Dataset, Sampler

from .config import Config, UserError
from .dataset import collate_fn
from .distributed import STOP_SIGNALS, derive_seed, exit_now, seed_everything

# Loader processes hold a copy of the dataset, so a sampler tells them the epoch: (epoch, index).
Key = tuple[int, int]


class TrainSampler(Sampler[Key]):
    """Yields this rank's samples of an epoch, up to the last complete global batch."""

    def __init__(
        self, length: int, dp_rank: int, dp_size: int, global_batch_size: int, seed: int
    ) -> None:
        if length < global_batch_size:
            raise UserError(
                f"data.global_batch_size is {global_batch_size}, "
                f"but the training set has {length} samples"
            )
        self.length = length
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.steps_per_epoch = length // global_batch_size
        self.set_epoch(0)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch after ``step`` steps, and how many of its samples were consumed."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch, step_in_epoch * self.global_batch_size

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the epoch, and how many of its samples all ranks together have consumed."""
        self.epoch = epoch
        self.consumed_samples = consumed_samples

    def __iter__(self) -> Iterator[Key]:
        # The order is a function of seed and epoch: a resumed run slices it, and replays nothing.
        order_seed = derive_seed(self.seed, "order", self.epoch)
        generator = torch.Generator().manual_seed(order_seed)
        order = torch.randperm(self.length, generator=generator)
        end = self.steps_per_epoch * self.global_batch_size
        remaining = order[self.consumed_samples : end]
        # Rank r of N reads r, r + N, r + 2N, ...: a global batch is the same for any N.
        for index in remaining[self.dp_rank :: self.dp_size].tolist():
            yield self.epoch, index


class Seeded(Dataset[Any]):
    """A dataset whose random transforms depend on (seed, epoch, index), and not on who reads it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed_everything(derive_seed(self.seed, epoch, index))
        return self.dataset[index]


class Loader(DataLoader[Any]):
    """A ``DataLoader`` whose processes ignore stop signals, so that their rank can save first."""

    def __iter__(self) -> Any:
        if self.num_workers == 0:
            return super().__iter__()
        # Starting Python's resource tracker would unblock the signals, so it starts before.
        resource_tracker.ensure_running()
        # A new process inherits the signals that are blocked here, and never sees them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        except (AttributeError, PicklingError, TypeError) as error:
            problem = "the dataset and collate_fn cannot be pickled"
            raise UserError(f"data.num_workers: {problem}: {error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def build_loader(
    dataset: Any, sampler: Any, batch_size: int, config: Config, device: torch.device
) -> Loader:
    """Build a loader of this rank's batches, whose tensors are on the CPU."""
    options: dict[str, Any] = {
        "sampler": sampler,
        "collate_fn": collate_fn,
        "pin_memory": device.type == "cuda",
    }
    if config.data.num_workers > 0:
        options |= {
            "num_workers": config.data.num_workers,
            "persistent_workers": True,
            "multiprocessing_context": "spawn",  # A fork of gloo's threads could deadlock.
            "worker_init_fn": end_without_rank,
        }
    return Loader(Seeded(dataset, config.run.seed), batch_size, **options)


def end_without_rank(_: int) -> None:
    """End a loader process whose rank was killed before PyTorch began to watch it."""
    rank = parent_process()
    if rank is None or not rank.is_alive():
        exit_now(1)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of any nesting with its tensors on ``device``; the copies do not block."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"a batch is a pair (inputs, targets), not a {type(batch).__name__}")
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split the tensors of a batch into ``count`` micro-batches; numbers and None go into all."""
    leaves, structure = tree_flatten(batch)
    first_dimensions = {leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}
    if len(first_dimensions) > 1:
        problem = "the tensors of a batch differ in their first dimension, the samples"
        raise UserError(f"{problem}; pad them in Task.prepare")
    can_be_split = all(isinstance(leaf, Tensor | int | float | None) for leaf in leaves)
    if count > 1 and not can_be_split:
        # A list of texts, say, would go into each micro-batch as a whole.
        problem = "only tensors can be split into micro-batches"
        raise UserError(f"{problem}; let Task.prepare or collate_fn return tensors")
    pieces_of_leaves = []
    for leaf in leaves:
        pieces = leaf.tensor_split(count) if isinstance(leaf, Tensor) else [leaf] * count
        pieces_of_leaves.append(pieces)
    microbatches = zip(*pieces_of_leaves, strict=True)
    return [tree_unflatten(microbatch, structure) for microbatch in microbatches]
