"""Losses and weights do not depend on how the work is split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plain
import support
from support import FIRST, FP64, SPLITS, deviation, load, module, read_records, settings

# The largest relative deviations from the plain loop that are allowed, in fp64.
BOUNDS = dict.fromkeys(["loss", "grad_norm", "weights", "lr", "step"], support.FP64_TOLERANCE)
MORE = [FP64]
IN_PROOF = ["--train.compile true --train.precision fp64"]
#:: if fact("exact") and not fact("loop") ::#
MORE.append([])
IN_PROOF += ["--train.compile true", "--train.precision bf16", "--train.precision fp16"]
#:: endif ::#
MORE += [pytest.param(words.split(), marks=pytest.mark.proof) for words in IN_PROOF]


@pytest.fixture(scope="module")
def expected() -> tuple[plain.Records, dict[str, torch.Tensor]]:
    """The records and the weights of a loop that splits nothing, in fp64."""
    return plain.train(settings(*FP64))


def compare(run_dir: Path, records: plain.Records, weights: Any) -> dict[str, float]:
    """Return the largest relative deviations of a run from other records and weights."""
    deviations = {"weights": deviation(load(run_dir)["model"], weights)}
    pairs = list(zip(read_records(run_dir), records, strict=True))
    for name in ("loss", "grad_norm", "lr", "step"):
        # NumPy's maximum is NaN if one of the numbers is; Python's may be another one.
        found = [abs(ours[name] / theirs[name] - 1) for ours, theirs in pairs]
        deviations[name] = float(np.max(found))
    return deviations


def check(found: dict[str, float], bounds: dict[str, float], record_property: Any) -> None:
    """Reject deviations beyond their bounds; ``make proof`` prints them."""
    for name, value in found.items():
        sign = "&le;" if value <= bounds[name] else "&gt;"
        record_property(name, f"{value:.1e} ({sign} {bounds[name]:.0e})")
    beyond = ", ".join(name for name in found if not found[name] <= bounds[name])
    assert not beyond, f"{beyond} beyond their bounds, {found}: test_experiment.py may tell why"


def train_row(trained: Any, nproc: int, words: list[str], record_property: Any) -> Path:
    """Train as a row says, which the run has to confirm; skip what this strategy refuses."""
    try:
        settings(*words).check(nproc, trains=True)
    except module("config").UserError as error:
        pytest.skip(f"refused: {error}")
    run_dir = trained(nproc, *words)
    provenance = json.loads((run_dir / "provenance.json").read_text())
    confirms = provenance["world_size"] == nproc and {*words} <= {*provenance["command"].split()}
    assert confirms, f"the run had {provenance['world_size']} ranks and {provenance['command']}"
    losses = [record["loss"] for record in read_records(run_dir)]
    record_property("losses", f"{losses[0]:.7g} to {losses[-1]:.7g}")
    return run_dir


@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=str)
def test_a_split_gives_the_result_of_a_plain_loop(
    expected: Any, trained: Any, record_property: Any, nproc: int, words: list[str], more: list[str]
) -> None:
    run_dir = train_row(trained, nproc, [*words, *more], record_property)
    if "fp64" in more:
        check(compare(run_dir, *expected), BOUNDS, record_property)
    #:: if fact("exact") and not fact("loop") ::#
    elif "--train.exact" not in words:  # In fp64, shards may change the last bit of a norm.
        support.assert_same(run_dir, trained(*FIRST, *more))
        record_property("ranks", "bitwise")
    #:: endif ::#


def test_fp32_begins_as_the_plain_loop_does(trained: Any, record_property: Any) -> None:
    run_dir = train_row(trained, *SPLITS[0], record_property)
    records, weights = plain.train(settings())
    for name, value in compare(run_dir, records, weights).items():
        record_property(name, f"{value:.1e}")  # No bound: a kink or a large step lets it grow.
    assert read_records(run_dir)[0]["loss"] == pytest.approx(records[0]["loss"], rel=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("fault", ["another seed", "one sample twice"])
def test_a_fault_is_seen(trained: Any, monkeypatch: Any, record_property: Any, fault: str) -> None:
    if fault == "one sample twice":
        randperm = torch.randperm
        monkeypatch.setattr(torch, "randperm", lambda *n, **to: randperm(*n, **to).clip(min=1))
    seed = "8" if fault == "another seed" else "7"
    found = compare(trained(*FIRST, *FP64), *plain.train(settings(*FP64, "--run.seed", seed)))
    with pytest.raises(AssertionError, match="weights, loss, grad_norm beyond"):
        check(found, BOUNDS, record_property)
#:: if fact("exact") and not fact("loop") ::#


@pytest.mark.proof
def test_other_bits_are_seen(trained: Any) -> None:
    other = trained(*FIRST, "--data.micro_batch_size", "64")  # It rounds differently.
    with pytest.raises(AssertionError):
        support.assert_same(trained(*FIRST), other)
#:: else ::#


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("nproc", "words"), SPLITS[1:], ids=str)
def test_a_split_rounds_low_precision_as_other_micro_batches_do(
    trained: Any, record_property: Any, nproc: int, words: list[str], precision: str
) -> None:
    low_precision = ["--train.precision", precision]
    run_dir = train_row(trained, nproc, [*words, *low_precision], record_property)
    first = trained(*FIRST, *low_precision)
    records = read_records(first)
    weights = load(first)["model"]
    # Smaller micro-batches are another order of the same sums: a split may change as much, twice.
    halves = ["--data.micro_batch_size", str(settings().data.micro_batch_size // 2)]
    halved = trained(*FIRST, *low_precision, *halves)
    bounds = {name: 2 * value for name, value in compare(halved, records, weights).items()}
    check(compare(run_dir, records, weights), bounds, record_property)
#:: endif ::#
