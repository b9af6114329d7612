"""Losses and weights do not depend on how the work is split."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plain
from support import SPLITS, STEPS, TOLERANCE, deviation, load, module, read_records, settings

BOUNDS = {"loss": TOLERANCE, "grad_norm": TOLERANCE, "lr": TOLERANCE, "step": 0.0, "weights": TOLERANCE}


@pytest.fixture(scope="module")
def expected() -> tuple[plain.Records, dict[str, plain.Tensor]]:
    """What a loop gives that splits nothing."""
    return plain.train(settings(), STEPS)


def compare(run: Path, records: Any, weights: Any) -> dict[str, float]:
    """Return the largest relative deviation of a run's losses, norms and rates of all steps, and of its weights."""
    pairs = [*zip(read_records(run), records, strict=True)]
    # NumPy's maximum of what is not a number is none either.
    worst = {name: np.max([abs(ours[name] / theirs[name] - 1) for ours, theirs in pairs]) for name in [*BOUNDS][:-1]}
    return {**worst, "weights": deviation(load(run)["model"], weights)}


def check(found: dict[str, float], bounds: dict[str, float], record_property: Callable[[str, object], None]) -> None:
    """Reject deviations beyond their bounds; ``make proof`` prints them."""
    for name, value in found.items():
        record_property(name, f"{value:.1e} (&le; {bounds[name]:.0e})" + (", bitwise" if value == 0 else ""))
    assert all(value <= bounds[name] for name, value in found.items()), (
        f"{found} beyond {bounds}: by padding, batch statistics or random numbers? See test_experiment.py"
    )


def skip_if_refused(nproc: int, *words: str) -> None:
    """Skip a row of ``make proof`` that this strategy refuses."""
    try:
        settings(*words).check(nproc, trains=True)
    except module("config").UserError as error:
        pytest.skip(f"refused: {error}")


def test_every_epoch_has_every_sample_in_an_order_of_its_own() -> None:
    sampler, orders = module("loader").TrainSampler(60, 0, 1, 10, seed=7), set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.add(tuple(index for _, index in sampler))
    assert len(orders) == 3 and all(sorted(order) == [*range(60)] for order in orders)


@pytest.mark.parametrize("compiled", [[], pytest.param(["--train.compile", "true"], marks=pytest.mark.proof)], ids=str)
@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=str)
def test_a_split_gives_the_result_of_a_plain_loop(
    expected: Any, trained: Any, record_property: Any, nproc: int, words: list[str], compiled: list[str]
) -> None:
    if compiled:
        skip_if_refused(nproc, *words, *compiled)
    check(compare(trained(nproc, *words, *compiled), *expected), BOUNDS, record_property)


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("nproc", "words"), SPLITS[1:], ids=str)
def test_a_split_rounds_low_precision_as_other_micro_batches_do(
    trained: Any, record_property: Any, nproc: int, words: list[str], precision: str
) -> None:
    skip_if_refused(nproc, *words, "--train.precision", precision)
    first = (SPLITS[0][0], *SPLITS[0][1], "--train.precision", precision)
    records, weights = read_records(trained(*first)), load(trained(*first))["model"]
    others = compare(trained(*first, "--train.microbatches", "2"), records, weights)
    found = compare(trained(nproc, *words, "--train.precision", precision), records, weights)
    check(found, {name: 2 * value for name, value in others.items()}, record_property)
