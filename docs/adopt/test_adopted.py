"""The first steps are those of the script that this project was adopted from: docs/adopt.md.

The script leaves witness/weights.pt, its state_dict before the first step, and witness/steps.json:
of each step, the loss and the optimizer's groups, [loss, [{"params": 1000, "lr": 0.1, ...}, ...]].
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from support import FP64, FP64_TOLERANCE, ROOT, TOLERANCE, launch, module, read_records

WITNESS = ROOT / "witness"
STEPS = 20  # The steps that are trained. Optimizer and schedule are compared in all steps.
# Rounding alone stays below, in fp64; a difference that has another cause rises above.
CAUSE = FP64_TOLERANCE
# Another batch differs by more at once; another optimizer differs by less, before it grows.
JUMP = 30 * TOLERANCE
# These decide how an optimizer computes, and not what.
IGNORED = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
EXPERIMENT = ".venv/bin/pytest tests/test_experiment.py finds on what"


def read_witness() -> list[Any]:
    """Return what the script recorded of each step; fails if no step can be compared."""
    steps: list[Any] = json.loads((WITNESS / "steps.json").read_text() or "[]")
    assert len(steps) >= STEPS, f"witness/steps.json has {len(steps)} steps; {STEPS} are compared"
    for number, (loss, groups) in enumerate(steps, start=1):
        is_comparable = math.isfinite(loss) and loss != 0 and isinstance(groups, list)
        assert is_comparable, f"step {number} of witness/steps.json is [{loss}, {groups}]"
    return steps


def read_settings() -> Any:
    """Return the settings of ``configs/default.yaml``."""
    _, config, _ = module("__main__").parse(["train"])
    return config


def count_values(groups: list[Any], option: str) -> dict[str, int]:
    """Return how many numbers an optimizer trains with each value of an option."""
    counts = Counter[str]()
    for group in groups:
        counts[str(group[option])] += group["params"]
    return dict(counts)


def is_close(ours: dict[str, int], theirs: dict[str, int]) -> bool:
    """Return whether values that as many numbers have are equal but for the order of operations."""
    pairs = zip(sorted(ours.items()), sorted(theirs.items()), strict=False)
    for (our_value, our_count), (their_value, their_count) in pairs:
        try:
            is_equal = math.isclose(float(our_value), float(their_value), rel_tol=1e-9)
        except ValueError:  # It is no number: a pair of betas, True or None.
            is_equal = our_value == their_value
        if not is_equal or our_count != their_count:
            return False
    return len(ours) == len(theirs)


def test_optimizer_and_schedule_are_those_of_the_script() -> None:
    steps = read_witness()
    config = read_settings()
    train_set, *_ = module("dataset").build_datasets(config)
    steps_per_epoch = len(train_set) // config.data.global_batch_size
    scheduled_steps = config.train.epochs * steps_per_epoch
    expected_steps = min(scheduled_steps, config.train.max_steps or scheduled_steps)
    assert len(steps) == expected_steps, (
        f"steps: the script has taken {len(steps)}, and the project takes {expected_steps}; look "
        "at train.epochs, train.max_steps, and the incomplete batch at the end of an epoch"
    )
    optim = module("optim")
    optimizer = optim.build_optimizer(module("model").build_model(config.model), config.optim)
    for number, (_, their_groups) in enumerate(steps):
        optim.set_learning_rate(optimizer, number, scheduled_steps, config.optim)
        our_groups = json.loads(json.dumps(describe(optimizer)))
        our_size = sum(group["params"] for group in our_groups)
        their_size = sum(group["params"] for group in their_groups)
        assert our_size == their_size, f"model: {our_size} numbers, and {their_size} in the script"
        options = our_groups[0].keys() & their_groups[0].keys() - IGNORED
        for option in sorted(options, key=lambda option: option == "lr"):
            ours, theirs = (count_values(groups, option) for groups in (our_groups, their_groups))
            part = "schedule" if option == "lr" else "optimizer"
            assert is_close(ours, theirs), (
                f"from step {number + 1}: {part} ({option} is {ours}, in the script {theirs}; each "
                "value with how many numbers of the model have it)"
            )


def describe(optimizer: Any) -> list[Any]:
    """Return the options of an optimizer's groups, with how many numbers each group has."""
    described = []
    for group in optimizer.param_groups:
        described.append({**group, "params": sum(each.numel() for each in group["params"])})
    return described


def test_the_first_steps_are_those_of_the_script(tmp_path: Path) -> None:
    losses = [loss for loss, _ in read_witness()[:STEPS]]
    records = train(tmp_path / "1", 1)
    differences = compare(records, losses, "1 rank and the script")
    # What explains a difference looks for one, so it is only called if there is one.
    assert max(differences) <= CAUSE, explain(differences, records)
    # Two ranks have micro-batches that one rank may have, too: what differs there is no split.
    data = read_settings().data
    size = math.gcd(data.micro_batch_size or data.global_batch_size, data.global_batch_size // 2)
    words = ("--data.micro_batch_size", str(size))
    smaller = train(tmp_path / "smaller", 1, *words)
    differences = compare(smaller, losses, f"1 rank, micro-batches of {size}, and the script")
    assert max(differences) <= CAUSE, (
        f"on micro-batches of {size}: the result depends on the micro-batch; {EXPERIMENT}"
    )
    split = train(tmp_path / "2", 2, *words)
    differences = compare(split, [each["loss"] for each in smaller], "2 ranks and 1 rank")
    assert max(differences) <= CAUSE, f"on 2 ranks: the result depends on the split; {EXPERIMENT}"


def train(run_dir: Path, nproc: int, *words: str) -> list[Any]:
    """Train the first steps from the script's weights; returns their records."""
    words += ("--train.max_steps", str(STEPS), "--train.log_every", "1")
    words += (*FP64, "--distributed.device", "cpu", "--model.weights", str(WITNESS / "weights.pt"))
    launch("train", *words, "--run.dir", str(run_dir), nproc=nproc)
    return read_records(run_dir)


def compare(records: list[Any], losses: list[float], name: str) -> list[float]:
    """Print and return the relative differences of the losses."""
    differences = []
    for record, loss in zip(records, losses, strict=True):
        differences.append(abs(record["loss"] / loss - 1))
        shown = f"loss {record['loss']:.6f}, expected {loss:.6f}, difference {differences[-1]:.1e}"
        print(f"step {record['step']}: {shown}")
    print(f"{name}: largest relative difference of {len(losses)} losses {max(differences):.1e}")
    return differences


def explain(differences: list[float], records: list[Any]) -> str:
    """Return what is known to differ on one rank, by the first step at which a loss does."""
    step = next(step for step, each in enumerate(differences, start=1) if each > CAUSE)
    if step == 1:
        return "from step 1: initial weights, loss scaling or data differ"
    if step == 2:
        return "from step 2: optimizer (its kind), gradient (scale, clipping), or second batch"
    begins = ""
    if records[step - 2]["epoch"] > records[step - 3]["epoch"]:
        begins = " (an epoch begins)"
    if differences[step - 1] > JUMP:
        return f"from step {step}{begins}, at once: order, so that this batch is another one"
    return f"from step {step}{begins}, growing: optimizer (its kind, momentum), or clipping"
