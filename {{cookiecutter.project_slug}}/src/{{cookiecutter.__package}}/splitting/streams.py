"""Streams: how an ``IterableDataset`` is split over ranks and loader processes, and where all of them end.

    sample of the stream     0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13       global batch of 4, 2 ranks,
    rank, loader process     0a 1a 0a 1a| 0b 1b 0b 1b | 0a 1a 0a 1a | dropped     2 loader processes each: a, b

Every process reads the whole stream and keeps its share, so that the batches are the same for any split. A dataset with
a method ``shard(num_shards, index)``, as Hugging Face's have, is split by it instead: each process then reads only its
part, but what a batch contains depends on the number of processes, and parts may end at different steps.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, _utils, get_worker_info

from ..config import UserError
from .seeding import COLLATE, restored_generators, seed_generators


class Stream(IterableDataset[Any]):
    """This rank's share of a stream as collated batches, then None; incomplete global batches are dropped.

    Args:
        dataset: An ``IterableDataset``; its length need not be known.
        collate_fn: Makes a batch of a list of samples.
        dp_rank: The share of each global batch that this rank reads.
        dp_size: Number of shares.
        global_batch_size: Samples per step over all shares.
        num_workers: Loader processes per rank.
        seed: The run's seed; the generators are seeded with it, the epoch and the sample's number.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        dp_rank: int,
        dp_size: int,
        global_batch_size: int,
        num_workers: int,
        seed: int,
    ) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self.dp_rank, self.dp_size, self.global_batch_size = dp_rank, dp_size, global_batch_size
        self.is_sharded = hasattr(dataset, "shard")
        if self.is_sharded and getattr(dataset, "num_shards", math.inf) < dp_size * max(num_workers, 1):
            raise UserError(
                f"the stream has {dataset.num_shards} shard(s), too few for {dp_size} rank(s) with --data.num_workers "
                f"{num_workers}: each loader process needs one; start fewer, or remove shard() from the dataset"
            )
        # Parts may have different lengths, so the length of the whole says little.
        has_length = hasattr(dataset, "__len__") and not self.is_sharded
        self.steps_per_epoch = len(dataset) // global_batch_size if has_length else None
        self.layout = {"dp_size": dp_size, "num_workers": num_workers}
        self.saved_layout = self.layout
        # Shared with loader processes, which live longer than an epoch.
        self.position = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.process = 0, 1  # The number of this loader process, and how many the rank has.

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, and how many of its samples (over all ranks) have been consumed; rejects another layout."""
        if self.is_sharded and start and self.saved_layout != self.layout:
            saved = self.saved_layout
            raise UserError(
                f"the run stopped in the middle of a sharded stream that {saved['dp_size']} rank(s) with "
                f"--data.num_workers {saved['num_workers']} were reading; resume with the same, or remove shard() from "
                "the dataset"
            )
        self.position.copy_(torch.tensor([epoch, start]))

    def state_dict(self) -> dict[str, int]:
        """Return the layout that a sharded stream's order depends on; the position itself is the run's progress."""
        return self.layout

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the layout with which the stream was read so far."""
        self.saved_layout = state

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.position.tolist()
        done = start // self.global_batch_size
        number, count = self.find_process()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        batches = (self.read_shard if self.is_sharded else self.read_share)(epoch, done, number, count)
        # The loader asks its processes in turn, the first one for the first batch after those that are done.
        for batch, samples in zip(itertools.count(done + number, count), batches, strict=False):
            with restored_generators():
                seed_generators(self.seed, epoch, batch, self.dp_rank, COLLATE)
                collated = self.collate_fn(samples)
            yield collated
        yield None

    def find_process(self) -> tuple[int, int]:
        """Return the number of this loader process and their number, and hide them from the dataset.

        A dataset that divides itself among the loader processes would otherwise be divided twice.
        """
        if worker := get_worker_info():
            self.process = worker.id, worker.num_workers
            _utils.worker._worker_info = None
        return self.process

    def read_share(self, epoch: int, done: int, number: int, count: int) -> Iterator[list[Any]]:
        """Yield this rank's share of each global batch that is for this process, the ``number``-th of ``count``."""
        batches = self.read_batches(self.dataset, (epoch, 0), self.global_batch_size)
        for samples in itertools.islice(batches, done + number, None, count):
            yield samples[self.dp_rank :: self.dp_size]

    def read_shard(self, epoch: int, done: int, number: int, count: int) -> Iterator[list[Any]]:
        """Yield the batches of a part of the stream that only this process reads, without those that are done.

        The parts were assigned at the start of the epoch: after a resume, another process may be asked first.
        """
        turn = (number + done) % count
        index = self.dp_size * turn + self.dp_rank
        part = self.dataset.shard(num_shards=self.dp_size * count, index=index)
        batches = self.read_batches(part, (epoch, index), self.global_batch_size // self.dp_size)
        return itertools.islice(batches, len(range(turn, done, count)), None)

    def read_batches(self, part: Any, key: tuple[int, int], size: int) -> Iterator[list[Any]]:
        """Yield ``size`` consecutive samples at a time; each is drawn with generators of its own."""
        ended, number = object(), itertools.count()
        with restored_generators():
            seed_generators(self.seed, *key)
            samples = iter(part)
        while True:
            batch = []
            with restored_generators():
                for _ in range(size):
                    seed_generators(self.seed, *key, next(number))
                    batch.append(next(samples, ended))
            if batch[-1] is ended:
                return
            yield batch


class InStep:
    """The batches of a loader, up to the first that a rank does not have: all ranks take the same number of steps."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        # A separate group on the CPU: its messages never mix with others, and wait for no device.
        self.group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self.group is None:
            yield from iter(partial(next, batches), None)
            return
        following = next(batches)
        everyone = self.start_all_reduce(following)
        while True:
            everyone[1].wait()
            if not everyone[0]:
                return
            batch, following = following, None if following is None else next(batches)
            everyone = self.start_all_reduce(following)  # Read after the step, when the message has long arrived.
            yield batch

    def start_all_reduce(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Start the all-reduce of whether every rank has a batch."""
        has_batch = torch.tensor(int(batch is not None))
        return has_batch, dist.all_reduce(has_batch, dist.ReduceOp.MIN, self.group, async_op=True)
