"""Losses and weights do not depend on how the work is split."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import plain
from support import LENGTH, SPLITS, STEPS, TOLERANCE, assert_close, load_model, read_records, settings, split_id

# Where to look if a value is the first to differ.
HINTS = {
    "lr": "look at the schedule",
    "loss": "in step 1, look at the samples and the loss; later, at clipping, the optimizer and the order of the data",
    "grad_norm": "with equal losses, look at how gradients are summed over ranks and micro-batches",
}


@pytest.fixture(scope="module")
def expected() -> plain.Plain:
    """What a loop gives that splits nothing."""
    config = settings(*LENGTH)
    result = plain.train(config, STEPS)
    # Otherwise a run without clipping would give the same.
    assert max(record["grad_norm"] for record in result.records) > config.train.clip_grad_norm
    return result


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=split_id)
def test_a_split_gives_the_result_of_a_plain_loop(
    expected: plain.Plain, trained: Callable[..., Path], nproc: int, words: list[str]
) -> None:
    run = trained(nproc, *words)
    records, weights = read_records(run, "train"), load_model(run)
    for step, (record, theirs) in enumerate(zip(records, expected.records, strict=True), start=1):
        for name, value in theirs.items():
            # The norm of a small gradient is what rounding changes most.
            tolerance = TOLERANCE * (10 if name == "grad_norm" else 1)
            assert record[name] == pytest.approx(value, rel=tolerance), (
                f"{name} of step {step} is the first to differ from the plain loop, {record[name] / value:.6g} times "
                f"its value; {HINTS.get(name, 'see what computes it')}"
            )
    assert_close(weights, expected.weights)

    # What `pytest -rP` shows.
    ours, others = (np.array([record["loss"] for record in each]) for each in (records, expected.records))
    changes = [(weights[name] - value).norm() / value.norm() for name, value in expected.weights.items()]
    print(f"largest relative deviation: {abs(ours / others - 1).max():.1e} of a loss,", end=" ")
    print(f"{max(changes):.1e} of a weight tensor")
