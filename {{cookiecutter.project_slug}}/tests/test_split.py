"""Losses and weights do not depend on how the work is split."""

from collections.abc import Callable
from pathlib import Path

import pytest

import plain
from support import LENGTH, SPLITS, STEPS, TOLERANCE, assert_close, load_model, read_records, settings, split_id


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
    for record, theirs in zip(read_records(run, "train"), expected.records, strict=True):
        for name, value in theirs.items():
            # The norm of a small gradient is what rounding changes most.
            assert record[name] == pytest.approx(value, rel=TOLERANCE * (10 if name == "grad_norm" else 1)), name
    assert_close(load_model(run), expected.weights)
