"""Samplers, streams and batches: which rank reads which sample, and when."""

import itertools
import math
import multiprocessing
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
#:: if not cookiecutter.__plays ::#
from torch.utils._pytree import tree_leaves
#:: endif ::#
from torch.utils.data import BatchSampler, IterableDataset

#:: if cookiecutter.__plays ::#
from support import module
#:: else ::#
from support import global_batches, module, settings
#:: endif ::#

config, data, splitting = module("config"), module("data"), module("splitting")

LENGTH, BATCH = 100, 12


def step_keys(dp_size: int, epoch: int, start: int = 0) -> list[set[tuple[int, int]]]:
    """Return the samples of each step of an epoch, over all ranks."""
    samplers = [data.TrainSampler(range(LENGTH), dp_rank, dp_size, BATCH, seed=0) for dp_rank in range(dp_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch, start)
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    local = BATCH // dp_size
    return [{key for share in shares for key in share[i : i + local]} for i in range(0, len(shares[0]), local)]


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_a_step_sees_the_same_samples_on_any_number_of_ranks(dp_size: int) -> None:
    assert step_keys(dp_size, epoch=3) == step_keys(1, epoch=3)


def test_an_epoch_reads_no_sample_twice_and_drops_the_incomplete_batch() -> None:
    batches = step_keys(2, epoch=0)
    assert len(batches) == LENGTH // BATCH
    assert len(set().union(*batches)) == len(batches) * BATCH


def test_every_epoch_has_its_own_order() -> None:
    indices = [[{index for _, index in batch} for batch in step_keys(1, epoch)] for epoch in (0, 1)]
    assert indices[0] != indices[1]


def test_an_epoch_resumes_in_the_middle() -> None:
    assert step_keys(4, epoch=1, start=5 * BATCH) == step_keys(2, epoch=1)[5:]


def test_a_batch_larger_than_the_dataset_is_rejected() -> None:
    with pytest.raises(config.UserError, match="global_batch_size is 101"):
        data.TrainSampler(range(LENGTH), 0, 1, 101, seed=0)


@pytest.mark.parametrize("length", [1, 2, 3, 65, 1437])
def test_an_order_has_every_sample_once(length: int) -> None:
    orders = [list(splitting.permuted(range(length), length, 7, epoch)) for epoch in range(20)]
    assert all(sorted(order) == list(range(length)) for order in orders)
    assert len({tuple(order) for order in orders}) >= min(math.factorial(length), 20)


def test_every_sample_is_as_often_in_every_position() -> None:
    """By a chi-square of 81 degrees of freedom, which exceeds 146 in one of 100,000 cases."""
    counts = np.zeros((10, 10))
    for epoch in range(1000):
        counts[range(10), list(splitting.permuted(range(10), 10, 7, epoch))] += 1
    assert (np.square(counts - 100) / 100).sum() < 146


def test_neighbours_in_an_order_are_as_far_apart_as_any_two_samples() -> None:
    """On average by a third of the length, plus or minus what chance makes of it."""
    order = np.array(list(splitting.permuted(range(100_000), 100_000, 7, 0)))
    assert abs(np.abs(np.diff(order)).mean() / 100_000 - 1 / 3) < 0.004


def test_an_epoch_of_a_billion_samples_takes_no_memory_and_starts_anywhere() -> None:
    tracemalloc.start()
    sampler = data.TrainSampler(range(10**9), 1, 2, BATCH, seed=0)
    sampler.set_epoch(3, start=41_666_666 * BATCH)
    keys = list(itertools.islice(sampler, 10_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert len(set(keys)) == 10_000 and all(epoch == 3 and 0 <= index < 10**9 for epoch, index in keys)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7, 101])
def test_evaluation_reads_every_sample_once(dp_size: int) -> None:
    samplers = [data.EvalSampler(LENGTH, dp_rank, dp_size, 12) for dp_rank in range(dp_size)]
    assert sorted(index for sampler in samplers for index in sampler.indices) == list(range(LENGTH))
    for sampler in samplers:
        read = [index for _, index in sampler]
        assert read[: len(sampler.indices)] == list(sampler.indices)
        assert set(read[len(sampler.indices) :]) <= {max(sampler.indices, default=0)}


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7, 101])
def test_evaluation_has_as_many_batches_on_every_rank_all_of_one_size(dp_size: int) -> None:
    samplers = [data.EvalSampler(LENGTH, dp_rank, dp_size, 12) for dp_rank in range(dp_size)]
    ((size, read),) = {(sampler.batch_size, len(list(sampler))) for sampler in samplers}
    assert read == len(samplers[0]) and read % size == 0 and size <= 12
    assert read - len(samplers[0].indices) < read // size, "more is padded than one sample per batch"


@pytest.mark.parametrize("workers", [0, 2])
def test_training_and_evaluation_are_loaded_by_the_same_processes_in_turn(workers: int) -> None:
    cpu, options = torch.device("cpu"), config.DataConfig(num_workers=workers)
    samples = splitting.SeededDataset(range(LENGTH), list, seed=0)
    order, rest = data.TrainSampler(samples, 0, 1, BATCH, seed=0), data.EvalSampler(LENGTH, 0, 1, 30)
    expected = [[index for _, index in step] for step in BatchSampler(order, BATCH, drop_last=False)]
    training = splitting.build_loader(samples, order, BATCH, options, cpu)
    evaluation = splitting.build_loader(samples, rest, rest.batch_size, options, cpu, training)
    steps, read = iter(training), []
    for _ in range(2):
        read += [next(steps), next(steps)]
        assert list(itertools.chain(*evaluation)) == list(range(LENGTH))
        assert len(multiprocessing.active_children()) == workers
    assert [*read, *steps] == expected
    assert list(training) == expected


class Stream(IterableDataset[int]):
    """The numbers from 0 to 99, each with random numbers of three kinds."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(LENGTH):
            yield number, random.random(), np.random.rand(), torch.rand(1).item()


class ShardedStream(Stream):
    """The same, which knows how to split itself."""

    def shard(self, num_shards: int, index: int) -> list[int]:
        return list(range(index, LENGTH, num_shards))


def read_stream(dataset: Any, dp_size: int, epoch: int = 0, start: int = 0) -> list[list[Any]]:
    """Return the global batches of a stream, each in order."""
    streams = [splitting.Stream(dataset, list, dp_rank, dp_size, BATCH, 0, seed=0) for dp_rank in range(dp_size)]
    for stream in streams:
        stream.set_epoch(epoch, start)
    shares = [list(stream)[:-1] for stream in streams]
    return [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)]


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_a_stream_is_the_same_on_any_number_of_ranks(dp_size: int) -> None:
    whole = read_stream(Stream(), 1)
    assert [number for batch in whole for number, *_ in batch] == list(range(LENGTH // BATCH * BATCH))
    assert read_stream(Stream(), dp_size) == whole
    assert read_stream(Stream(), dp_size, start=3 * BATCH) == whole[3:]
    assert read_stream(Stream(), dp_size, epoch=1) != whole


def add_random(samples: list[Any]) -> list[Any]:
    """Collate samples as they are, and a random number."""
    return [*samples, random.random()]


def test_what_a_batch_draws_belongs_to_it() -> None:
    seeded = splitting.SeededDataset(range(10), add_random, seed=1)
    first = seeded.__getitems__([(0, 1), (0, 2)])
    random.random()
    assert seeded.__getitems__([(0, 1), (0, 2)]) == first
    # Not the state that the last sample left, and no number that a sample drew itself.
    assert seeded.__getitems__([(0, 9), (0, 2)])[-1] != first[-1]
    sample, collated = splitting.SeededDataset(Batched(), add_random, seed=1).__getitems__([(0, 7)])
    assert sample != collated
    stream = splitting.Stream(Stream(), add_random, 0, 1, BATCH, 0, seed=0)
    whole = list(stream)
    stream.set_epoch(0, start=3 * BATCH)
    assert list(stream) == whole[3:]


def test_a_stream_that_splits_itself_resumes_only_with_the_same_ranks() -> None:
    whole = read_stream(ShardedStream(), 2)
    assert sorted(itertools.chain(*whole)) == list(range(LENGTH // BATCH * BATCH))
    assert read_stream(ShardedStream(), 2, start=3 * BATCH) == whole[3:]
    stream = splitting.Stream(ShardedStream(), list, 0, 1, BATCH, 0, seed=0)
    stream.load_state_dict({"dp_size": 2, "num_workers": 0, "global_batch_size": BATCH})
    stream.set_epoch(1)
    with pytest.raises(config.UserError, match="2 rank"):
        stream.set_epoch(1, start=BATCH)


def test_batches_of_any_nesting_are_split() -> None:
    batch = {"ids": torch.arange(6), "pair": (torch.ones(6, 2), [torch.zeros(6)]), "name": "a", "texts": list("uvwxyz")}
    pieces = splitting.split_batch(batch, 3)
    assert [piece["texts"] for piece in pieces] == [["u", "v"], ["w", "x"], ["y", "z"]]
    assert [piece["ids"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert [len(piece["pair"][1][0]) for piece in pieces] == [2, 2, 2] and pieces[1]["name"] == "a"
    with pytest.raises(config.UserError, match="first dimensions are"):
        splitting.split_batch((torch.ones(6), torch.ones(5)), 2)
    with pytest.raises(config.UserError, match="collate_fn"):
        splitting.unpack({"inputs": 1, "targets": 2})
    with pytest.raises(config.UserError, match="holds a set"):
        splitting.to_device((torch.ones(2), {3}), torch.device("cpu"))


LOSS = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (LOSS, "sum of the loss"),
        ((LOSS.expand(4), 4), "loss that is no scalar"),
        (({"loss": LOSS, "kl": 0.5}, 4), "kl that is no scalar"),
        (({"kl": LOSS}, 4), "differentiate"),
        (({"loss": LOSS, "lr": LOSS}, 4), "logged already"),
        ((LOSS, 0), "above 0"),
        ((LOSS, torch.ones(4)), "scalar tensor"),
        ((LOSS, 5), "varies as a tensor"),
        ((LOSS, torch.tensor(4)), "varies as a tensor"),
        (({"loss": LOSS, "kl": LOSS}, 4), "name all of them"),
    ],
)
def test_a_loss_that_cannot_be_averaged_is_rejected(result: Any, words: str) -> None:
    mean = splitting.GlobalMean(8, 2, torch.device("cpu"))
    assert mean.add((LOSS, 4)) == 3 / 8
    with pytest.raises(config.UserError, match=words):
        mean.add(result)


def test_a_global_batch_has_the_same_rows_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = module("splitting.gather")
    monkeypatch.setattr(gather, "_shares", gather.Shares(0, 1, None, 1, samples=4))
    assert len(splitting.gather_global_batch(torch.ones(8, 2))[0]) == 8
    with pytest.raises(config.UserError, match="3 rows for 4 samples"):
        splitting.gather_global_batch(torch.ones(3, 2))


class Batched:
    """A dataset that can give many samples at once; those of index 7 and above are random."""

    def __getitem__(self, index: int) -> float:
        return random.random() if index >= 7 else float(index)

    def __getitems__(self, indices: list[int]) -> list[float]:
        self.asked = len(indices)
        return [self[index] for index in indices]


def test_a_dataset_that_gives_many_samples_is_asked_so_unless_it_draws() -> None:
    dataset, key = Batched(), [(2, 6), (2, 7), (2, 8)]
    seeded = splitting.SeededDataset(dataset, list, seed=1)
    assert seeded.__getitems__([(0, 3), (0, 4)]) == [3.0, 4.0] and dataset.asked == 2
    state = random.getstate()
    alone = [splitting.SeededDataset(Batched(), list, seed=1).__getitems__([each])[0] for each in key]
    assert seeded.__getitems__(key) == alone and len(set(alone)) == 3
    assert random.getstate() == state, "reading samples changed the rank's own random numbers"
#:: if not cookiecutter.__plays ::#


def test_a_sample_does_not_depend_on_the_number_of_loader_processes() -> None:
    _, alone = global_batches(settings())
    _, spread = global_batches(settings("--data.num_workers", "2"))
    for one, other in itertools.islice(zip(alone, spread, strict=True), 30):
        assert all(map(torch.equal, tree_leaves(one), tree_leaves(other)))
#:: endif ::#
