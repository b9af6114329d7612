"""The samplers: which rank reads which sample, and when."""

import pytest
import torch

from support import module, settings

config, data, dataset = module("config"), module("data"), module("dataset")

LENGTH, BATCH = 100, 12


def global_batches(dp_size: int, epoch: int, start: int = 0) -> list[set[tuple[int, int]]]:
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
    assert global_batches(dp_size, epoch=3) == global_batches(1, epoch=3)


def test_an_epoch_reads_no_sample_twice_and_drops_the_incomplete_batch() -> None:
    batches = global_batches(2, epoch=0)
    assert len(batches) == LENGTH // BATCH
    assert len(set().union(*batches)) == len(batches) * BATCH


def test_every_epoch_has_its_own_order() -> None:
    indices = [[{index for _, index in batch} for batch in global_batches(1, epoch)] for epoch in (0, 1)]
    assert indices[0] != indices[1]


def test_an_epoch_resumes_in_the_middle() -> None:
    assert global_batches(4, epoch=1, start=5 * BATCH) == global_batches(2, epoch=1)[5:]


def test_a_batch_larger_than_the_dataset_is_rejected() -> None:
    with pytest.raises(config.UserError, match="global_batch_size is 101"):
        data.TrainSampler(range(LENGTH), 0, 1, 101, seed=0)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7])
def test_evaluation_reads_every_sample_once(dp_size: int) -> None:
    read = [index for dp_rank in range(dp_size) for _, index in data.EvalSampler(LENGTH, dp_rank, dp_size)]
    assert sorted(read) == list(range(LENGTH))


def test_a_sample_does_not_depend_on_the_number_of_loader_processes() -> None:
    train_set, _ = dataset.build_datasets(settings())
    batches = []
    for num_workers in (0, 2):
        sampler = data.TrainSampler(train_set, 0, 1, 64, seed=0)
        loader_config = config.DataConfig(num_workers=num_workers)
        loader = data.build_loader(train_set, sampler, 64, loader_config, torch.device("cpu"))
        sampler.set_epoch(1)
        batches.append([inputs for inputs, _ in loader])
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))
