"""Losses and weights do not depend on how the work is split."""

from collections.abc import Callable
from pathlib import Path

import pytest

import plain
from support import SPLITS, STEPS, TOLERANCE, assert_close, load, module, read_records, settings


@pytest.fixture(scope="module")
def expected() -> tuple[plain.Records, dict[str, plain.Tensor]]:
    """What a loop gives that splits nothing."""
    return plain.train(settings(), STEPS)


def test_every_epoch_has_every_sample_in_an_order_of_its_own() -> None:
    sampler, orders = module("loader").TrainSampler(60, 0, 1, 10, seed=7), set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.add(tuple(index for _, index in sampler))
    assert len(orders) == 3 and all(sorted(order) == [*range(60)] for order in orders)


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=str)
def test_a_split_gives_the_result_of_a_plain_loop(
    expected: tuple[plain.Records, dict[str, plain.Tensor]], trained: Callable[..., Path], nproc: int, words: list[str]
) -> None:
    run = trained(nproc, *words)
    worst = 0.0
    for ours, theirs in zip(read_records(run), expected[0], strict=True):
        for name, value in theirs.items():
            # The norm of a small gradient is what rounding changes most.
            tolerance = TOLERANCE * (10 if name == "grad_norm" else 1)
            where = f"{name} of step {theirs['step']}: by padding or batch statistics? See test_experiment.py"
            assert ours[name] == pytest.approx(value, rel=tolerance), where
        worst = max(worst, abs(ours["loss"] / theirs["loss"] - 1))
    print(f"largest relative deviation: {worst:.1e} of a loss, {assert_close(load(run)['model'], expected[1]):.1e}")
