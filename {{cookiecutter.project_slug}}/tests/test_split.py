"""Guarantee 1: losses and weights do not depend on how the batch is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import STEPS
from support import load_model, read_records

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("nproc", "settings"),
    [(2, []), (4, ["--train.microbatches", "2"])],
    ids=["2 ranks", "4 ranks, 2 micro-batches"],
)
def test_split_gives_the_result_of_one_process(trained: Callable[..., Path], nproc: int, settings: list[str]) -> None:
    one, split = trained(1), trained(nproc, *settings)
    losses = [[record["loss"] for record in read_records(run, "train")] for run in (one, split)]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
    expected, weights = load_model(one), load_model(split)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= TOLERANCE * expected[name].norm(), name
