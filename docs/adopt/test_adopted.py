"""The first steps are those of the script that this project was adopted from: docs/adopt.md.

The script leaves witness/weights.pt, its state_dict before the first step, and witness/steps.json,
a list of [loss, learning rate] of each step.
"""

import json
from pathlib import Path
from typing import Any

from support import ROOT, TOLERANCE, launch, read_records

WITNESS = ROOT / "witness"
STEPS = 20
# Rounding alone stays below; a difference that has another cause rises above, and then grows.
CAUSE = TOLERANCE / 10
# Another batch differs by more at once; another optimizer differs by less, before it grows.
JUMP = 30 * TOLERANCE
EXPERIMENT = ".venv/bin/pytest tests/test_experiment.py says on what"
SPLIT = f"on 2 ranks alone: the result depends on the split; {EXPERIMENT}"


def explain(nproc: int, losses: list[float], rates: list[float], records: Any) -> str:
    """Return what is known to differ, by the first step at which a loss or a rate does."""
    if nproc > 1:
        return SPLIT
    step = find_first(losses, len(losses) + 1)
    rate_step = find_first(rates, step)
    if rate_step < step:
        # A learning rate changes the loss of the next step.
        rate = records[rate_step - 1]["lr"]
        return f"from step {rate_step}: schedule (the learning rate is {rate:g})"
    if step == 1:
        return "from step 1: initial weights, loss scaling or data differ"
    if step == 2:
        causes = "optimizer (epsilon, weight decay, momentum), scale of the gradient"
        return f"from step 2: {causes}, or second batch"
    begins = ""
    if records[step - 2]["epoch"] > records[step - 3]["epoch"]:
        begins = " (an epoch begins)"
    if losses[step - 1] > JUMP:
        return f"from step {step}{begins}, at once: order, so that this batch is another one"
    causes = "optimizer (betas, momentum, clipping, small epsilon or weight decay)"
    return f"from step {step}{begins}, growing: {causes}"


def find_first(differences: list[float], default: int) -> int:
    """Return the first step whose difference has a cause, or a default."""
    for step, difference in enumerate(differences, start=1):
        if difference > CAUSE:
            return step
    return default


def test_the_first_steps_are_those_of_the_script(tmp_path: Path) -> None:
    expected = json.loads((WITNESS / "steps.json").read_text())[:STEPS]
    words = ["--train.max_steps", str(len(expected)), "--train.log_every", "1"]
    words += ["--distributed.device", "cpu", "--model.weights", str(WITNESS / "weights.pt")]
    for nproc in (1, 2):
        launch("train", *words, "--run.dir", str(tmp_path / str(nproc)), nproc=nproc)
        records = read_records(tmp_path / str(nproc))
        losses = []
        rates = []
        for record, (loss, lr) in zip(records, expected, strict=True):
            losses.append(abs(record["loss"] / loss - 1))
            rates.append(abs(record["lr"] - lr) / max(abs(lr), 1e-12))
            shown = f"loss {record['loss']:.6f}, script {loss:.6f}, difference {losses[-1]:.1e}"
            print(f"step {record['step']}: {shown}")
        worst = max(losses)
        print(f"{nproc} rank(s): largest relative difference of {len(losses)} losses {worst:.1e}")
        # What explains a difference looks for one, so it is only called if there is one.
        assert max(losses + rates) <= TOLERANCE, explain(nproc, losses, rates, records)
