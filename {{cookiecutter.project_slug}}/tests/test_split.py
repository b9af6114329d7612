"""Losses and weights do not depend on how the work is split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plain
from support import (
    SPLITS,
    STEPS,
    TOLERANCE,
    #:: if fact("exact") and not fact("loop") ::#
    assert_same,
    #:: endif ::#
    deviation,
    load,
    module,
    read_records,
    settings,
)

# The largest relative deviations from the plain loop that are allowed.
BOUNDS = {"loss": TOLERANCE, "grad_norm": TOLERANCE, "lr": TOLERANCE, "step": 0.0}
BOUNDS["weights"] = TOLERANCE
MORE = [pytest.param([]), pytest.param(["--train.compile", "true"], marks=pytest.mark.proof)]
#:: if fact("exact") and not fact("loop") ::#
for name in ("bf16", "fp16"):
    MORE.append(pytest.param(["--train.precision", name], marks=pytest.mark.proof))
#:: endif ::#
Weights = dict[str, plain.Tensor]
Words = list[str]


@pytest.fixture(scope="module")
def expected() -> tuple[plain.Records, Weights]:
    """The records and the weights of a loop that splits nothing."""
    return plain.train(settings(), STEPS)


def compare(run_dir: Path, records: plain.Records, weights: Weights) -> dict[str, float]:
    """Return the largest relative deviations of a run from other records and weights."""
    deviations = {"weights": deviation(load(run_dir)["model"], weights)}
    pairs = list(zip(read_records(run_dir), records, strict=True))
    for name in ("loss", "grad_norm", "lr", "step"):
        # NumPy's maximum is NaN if one of the numbers is; Python's may be another one.
        deviations[name] = np.max([abs(ours[name] / theirs[name] - 1) for ours, theirs in pairs])
    return deviations


def check(found: dict[str, float], bounds: dict[str, float], record_property: Any) -> None:
    """Reject deviations beyond their bounds; ``make proof`` prints them."""
    for name, value in found.items():
        bitwise = ", bitwise" if value == 0 else ""
        record_property(name, f"{value:.1e} (&le; {bounds[name]:.0e}){bitwise}")
    assert all(found[name] <= bounds[name] for name in found), (
        f"{found} beyond {bounds}: by padding, batch statistics or random numbers? "
        "See test_experiment.py"
    )


def skip_if_refused(nproc: int, *words: str) -> None:
    """Skip a row of ``make proof`` that this strategy refuses."""
    try:
        settings(*words).check(nproc, trains=True)
    except module("config").UserError as error:
        pytest.skip(f"refused: {error}")


@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=str)
def test_a_split_gives_the_result_of_a_plain_loop(
    expected: Any, trained: Any, record_property: Any, nproc: int, words: Words, more: Words
) -> None:
    skip_if_refused(nproc, *words, *more)
    run_dir = trained(nproc, *words, *more)
    if "--train.precision" not in more:
        check(compare(run_dir, *expected), BOUNDS, record_property)
    #:: if fact("exact") and not fact("loop") ::#
    if "--train.exact" not in words:
        first_nproc, first_words = SPLITS[0]
        assert_same(run_dir, trained(first_nproc, *first_words, *more))
        record_property("ranks", "bitwise")
    #:: endif ::#
#:: if not fact("exact") or fact("loop") ::#


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("nproc", "words"), SPLITS[1:], ids=str)
def test_a_split_rounds_low_precision_as_other_micro_batches_do(
    trained: Any, record_property: Any, nproc: int, words: Words, precision: str
) -> None:
    low_precision = ["--train.precision", precision]
    skip_if_refused(nproc, *words, *low_precision)
    first_nproc, first_words = SPLITS[0]
    first = trained(first_nproc, *first_words, *low_precision)
    records = read_records(first)
    weights = load(first)["model"]
    # Smaller micro-batches are another order of the same sums: a split may change as much, twice.
    halved = trained(first_nproc, *first_words, *low_precision, "--data.micro_batch_size", "16")
    bounds = {name: 2 * value for name, value in compare(halved, records, weights).items()}
    found = compare(trained(nproc, *words, *low_precision), records, weights)
    check(found, bounds, record_property)
#:: endif ::#
