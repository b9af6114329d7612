"""The first steps are those of the script that this project was adopted from: docs/adopt.md of ddp-template.

The script leaves witness/weights.pt, its state_dict before the first step, and witness/steps.json: [loss, lr] of each.
"""

import json
from pathlib import Path
from typing import Any

from support import ROOT, TOLERANCE, launch, read_records

WITNESS, STEPS = ROOT / "witness", 20
CAUSE = TOLERANCE / 10  # Rounding alone stays below; what has another cause rises above, and then grows.
SPLIT = "on 2 ranks alone: the result depends on the split; .venv/bin/pytest tests/test_experiment.py says on what"
JUMP = 30 * TOLERANCE  # Another batch differs by more at once; another optimizer by less, before it grows.


def explain(losses: list[float], rates: list[float], records: list[dict[str, Any]]) -> str:
    """Return what is known to differ, by the first step at which a loss or a learning rate does."""
    step = next((step for step, each in enumerate(losses, start=1) if each > CAUSE), len(losses) + 1)
    rate = next((step for step, each in enumerate(rates, start=1) if each > CAUSE), step)
    if rate < step:  # It acts on the loss of the next step.
        return f"from step {rate}: schedule (the learning rate is {records[rate - 1]['lr']:g})"
    if step == 1:
        return "from step 1: initial weights, loss scaling or data differ"
    if step == 2:
        return "from step 2: optimizer (epsilon, weight decay, momentum), scale of the gradient, or second batch"
    begins = " (an epoch begins)" if records[step - 2]["epoch"] > records[step - 3]["epoch"] else ""
    if losses[step - 1] > JUMP:
        return f"from step {step}{begins}, at once: order, so that this batch is another one"
    return f"from step {step}{begins}, growing: optimizer (betas, momentum, clipping, small epsilon or weight decay)"


def test_the_first_steps_are_those_of_the_script(tmp_path: Path) -> None:
    expected = json.loads((WITNESS / "steps.json").read_text())[:STEPS]
    words = f"--train.max_steps {len(expected)} --train.log_every 1 --distributed.device cpu".split()
    words += ["--model.weights", str(WITNESS / "weights.pt")]
    for nproc in (1, 2):
        launch("train", *words, "--run.dir", str(tmp_path / str(nproc)), nproc=nproc)
        records = read_records(tmp_path / str(nproc))
        losses = [abs(ours["loss"] / loss - 1) for ours, (loss, _) in zip(records, expected, strict=True)]
        rates = [abs(ours["lr"] - lr) / max(abs(lr), 1e-12) for ours, (_, lr) in zip(records, expected, strict=True)]
        for ours, (loss, _), difference in zip(records, expected, losses, strict=True):
            print(f"step {ours['step']}: loss {ours['loss']:.6f}, script {loss:.6f}, difference {difference:.1e}")
        print(f"{nproc} rank(s): largest relative difference of {len(losses)} losses {max(losses):.1e}")
        assert max(losses + rates) <= TOLERANCE, SPLIT if nproc > 1 else explain(losses, rates, records)
