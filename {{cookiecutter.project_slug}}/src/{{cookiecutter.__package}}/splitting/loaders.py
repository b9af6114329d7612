"""Loaders that share one set of loader processes, which read for one of them at a time.

    training      batch 0, batch 1, ... ──┐                          ┌── batch 7, batch 8, ...
    evaluation                            └── batch 0, ..., batch 3 ─┘      the same processes

A second set would take as much memory again, some 200 MiB per process, or seconds to start for each evaluation.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from ..config import DataConfig, UserError
from ..launch import LoaderContext, init_loader_worker
from .agreement import check_same_dataset
from .seeding import Key, SeededDataset, identity

Request = tuple[int, list[Key]]  # The number of a dataset, and the keys of a batch of it.


class Turns(Dataset[Any]):
    """All datasets that the processes read; each process has a copy."""

    def __init__(self) -> None:
        self.datasets: list[SeededDataset] = []

    def __getitem__(self, request: Request) -> Any:
        number, keys = request
        return self.datasets[number].__getitems__(keys)


class Requests:
    """What the processes read now, as the sampler of their ``DataLoader``."""

    def __init__(self) -> None:
        self.current: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.current


class Processes:
    """A ``DataLoader`` that loads what is requested of it; its processes start with the first request, and stay.

    The ``DataLoader`` does not refer to this object, so that its processes end in order when this object is gone.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.turns, self.requests = Turns(), Requests()
        self.loader: DataLoader[Any] = DataLoader(self.turns, batch_size=None, sampler=self.requests, **options)

    def load(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yield what is requested, until the end or until something else is loaded; what is under way is dropped then.

        Loading something else resets the processes, as a new iterator of any ``DataLoader`` does.
        """
        self.requests.current = requests
        for batch in self.loader:
            yield batch
            if self.requests.current is not requests:
                return


class Batches:
    """A loader of the batches of one dataset, collated.

    Args:
        dataset: Its samples.
        sampler: Their keys, in order.
        batch_size: Samples per batch.
        options: Those of a ``DataLoader``.
        beside: A loader to share the processes with, before either is read. One that is interrupted goes on where it
            was, and loads again what was under way.
    """

    def __init__(
        self, dataset: SeededDataset, sampler: Sampler[Key], batch_size: int, options: dict[str, Any], beside: Any
    ) -> None:
        self.dataset = dataset
        self.batches: Any = BatchSampler(sampler, batch_size, drop_last=False)  # type: ignore[arg-type]
        self.processes: Processes = beside.processes if isinstance(beside, Batches) else Processes(options)
        self.number = len(self.processes.turns.datasets)
        self.processes.turns.datasets.append(dataset)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        number, upcoming, under_way = self.number, iter(self.batches), deque[list[Key]]()

        def request(keys: list[Key]) -> Request:  # The processes keep it, so it must not refer to this object.
            under_way.append(keys)
            return number, keys

        while True:
            again = [under_way.popleft() for _ in range(len(under_way))]
            requests = map(request, itertools.chain(again, upcoming))
            for batch in self.processes.load(requests):
                under_way.popleft()
                yield batch
            if self.processes.requests.current is requests:
                return


def seed_dataset(dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> SeededDataset:
    """Return a map-style dataset whose random numbers are a function of (seed, epoch, index); a collective.

    Rejects any other dataset, and one that is not the same on all ranks.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"build_datasets returned a {type(dataset).__name__} without __len__ or __getitem__; give it both, or make "
            "the training set an IterableDataset"
        )
    seeded = SeededDataset(dataset, collate_fn, seed)
    check_same_dataset(type(dataset).__name__, len(dataset), lambda index: seeded.get_samples([(0, index)]))
    return seeded


def build_loader(
    dataset: Any, sampler: Sampler[Key], batch_size: int, config: DataConfig, device: torch.device, beside: Any = None
) -> Batches:
    """Build a loader of ``batch_size`` samples at a time on the CPU, with the processes of the loader ``beside`` it."""
    return Batches(dataset, sampler, batch_size, loader_options(config, device), beside)


def loader_options(config: DataConfig, device: torch.device) -> dict[str, Any]:
    """Return the options of any ``DataLoader`` here."""
    return {
        "collate_fn": identity,
        "num_workers": config.num_workers,
        "persistent_workers": config.num_workers > 0,
        "multiprocessing_context": LoaderContext() if config.num_workers else None,
        "worker_init_fn": init_loader_worker,
        "pin_memory": device.type == "cuda",
        # A separate generator: a new iterator would otherwise draw from the global one, and a resumed run would differ.
        "generator": torch.Generator(),
    }
