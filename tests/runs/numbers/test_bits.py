"""With one micro-batch size, a run has the same bits on any number of ranks: weights, moments and records."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bake, edit, launch, launch_and_kill, read_records, weekly
from lines import AUGMENTED, HEAD, LOSSES, POOLED, STEM, WEIGHT, Changes, after, before, instead

pytestmark = pytest.mark.long

STEPS = 12
SIZES = ["--model.width", "8", "--model.depth", "1"]
WORDS = {
    "digits": [*"--data.global_batch_size 64 --data.micro_batch_size 8".split(), *SIZES],
    "language": [
        *"--data.global_batch_size 16 --data.micro_batch_size 2 --model.width 32 --model.layers 2".split(),
        *f"--model.heads 4 --model.context 32 --dataset.path {json.__file__}".split(),
        *"--dataset.max_bytes 12000 --dataset.test_bytes 2000".split(),
    ],
}
COMMON = [
    *f"train --train.max_steps {STEPS} --train.log_every 1 --train.eval_every 4 --checkpoint.every_steps 2".split(),
    *"--data.eval_batch_size 50 --train.clip_grad_norm 0.1 --optim.lr 4e-3 --distributed.device cpu".split(),
]
MEASURED = ("samples_per_second", "seconds_per_step", "tokens_per_second")
# Their random numbers, weights or unused layers would depend on the ranks.
DROPS = instead(POOLED, "return self.linear(nn.functional.dropout(features.mean(dim=(2, 3)), 0.3, self.training))")
EXPERIMENTS: dict[str, tuple[Changes, list[str]]] = {
    "dropout": (DROPS, []),
    "mixup": (
        before(
            AUGMENTED,
            "share = torch.distributions.Beta(0.4, 0.4).sample()",
            "inputs = inputs * share + inputs.roll(1, 0) * (1 - share)",
        ),
        [],
    ),
    "weights": (
        instead(WEIGHT, "return (0.1 + targets).sum()")
        | instead(
            LOSSES,
            "loss = (F.cross_entropy(outputs.float(), targets, reduction='none') * (0.1 + targets)).sum()",
            'return {"loss": loss, "second": loss.detach() / 3}',
        ),
        ["--data.num_workers", "1"],
    ),
    # A micro-batch has a layer only if its first label is even.
    "partly unused": (
        after(HEAD, "self.extra = nn.Linear(width, width)")
        | instead(
            POOLED,
            "features = features.mean(dim=(2, 3))",
            "if int(features[0].sum() * 1e4) % 2:",
            "    features = features + self.extra(features)",
            "return self.linear(features)",
        ),
        ["--train.allow_unused", "true"],
    ),
    "compiled": ({}, ["--train.compile", "true"]),
    "recomputed": (DROPS, ["--train.activation_checkpointing", "true"]),
}
# Of digits in fp32; weights are compared on 1, 2 and 4 ranks in the long tests, too.
RANKS = {"ddp": (1, 8), "model_parallel": (4,), "fsdp": (2,)}
LONG = {("digits", "fp32"), ("weights", "fsdp")}


def result(run: Path) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Return all tensors of a run's last checkpoint in one order, and its records without what was measured."""
    content = torch.load(sorted((run / "checkpoints").glob("step-*.pt"))[-1], weights_only=True)
    tensors = [*content["model"].values()]
    for _, state in sorted(content["optimizer"]["state"].items()):
        tensors += [value for _, value in sorted(state.items())]
    records = read_records(run)
    return tensors, [{key: value for key, value in each.items() if key not in MEASURED} for each in records]


def assert_same_bits(ours: Path, theirs: Path) -> None:
    """Assert that two runs have bitwise the same weights, moments and records; prints how many numbers there are."""
    (our_tensors, our_records), (their_tensors, their_records) = result(ours), result(theirs)
    differ = sum(int((a != b).sum()) for a, b in zip(our_tensors, their_tensors, strict=True))
    numbers = sum(each.numel() for each in our_tensors)
    print(f"BITS {ours.name}: {differ} of {numbers} numbers differ from {theirs.name}")
    assert differ == 0 and our_records == their_records


def cases(*choices: list[str]) -> list[Any]:
    """Return all combinations of choices; those that are not in LONG run weekly."""
    found = []
    for case in product(*choices):
        found.append(pytest.param(*case, marks=[] if case in LONG else pytest.mark.weekly))
    return found


@pytest.mark.parametrize(("task", "precision"), cases([*WORDS], ["fp32", "bf16", "fp16"]))
def test_strategies_and_ranks_give_the_same_bits(bake: Bake, tmp_path: Path, task: str, precision: str) -> None:
    first = None
    for parallelism in RANKS:
        project = bake(parallelism, parallelism=parallelism, task=task)
        # In fp32, all runs are compared with that of ddp on one rank.
        for nproc in RANKS[parallelism] if (task, precision) == ("digits", "fp32") else (1, 2, 4, 8):
            run = tmp_path / f"{parallelism} {task} {precision} {nproc}"
            words = [*COMMON, *WORDS[task], "--train.precision", precision, "--run.dir", run]
            launch(project, *words, nproc=nproc)
            first = first or run
            assert_same_bits(run, first)
        if precision != "fp32":
            first = None  # Autocast and the mixed precision of FSDP are different computations.


@pytest.mark.parametrize(("name", "parallelism"), cases([*EXPERIMENTS], ["ddp", "fsdp"]))
def test_layouts_of_one_micro_batch_size_have_the_same_bits(
    bake: Bake, tmp_path: Path, parallelism: str, name: str
) -> None:
    changes, words = EXPERIMENTS[name]
    if (parallelism, name) == ("fsdp", "partly unused"):
        pytest.skip("FSDP refuses what only some ranks use")
    project = bake(parallelism=parallelism)
    edit(project, changes)
    for nproc in (1, 2, 4):
        run = tmp_path / f"{parallelism} {name} {nproc}"
        launch(project, *COMMON, *WORDS["digits"], *words, "--run.dir", run, nproc=nproc)
        assert_same_bits(run, tmp_path / f"{parallelism} {name} 1")


@pytest.mark.weekly
def test_six_micro_batches_have_the_same_bits_on_1_3_and_6_ranks(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    for nproc in (1, 3, 6):
        words = [*COMMON, *WORDS["digits"], "--data.global_batch_size", "48", "--run.dir", tmp_path / f"six {nproc}"]
        launch(project, *words, nproc=nproc)
        assert_same_bits(tmp_path / f"six {nproc}", tmp_path / "six 1")


@pytest.mark.parametrize("parallelism", ["ddp", *weekly("fsdp")])
def test_a_run_that_is_killed_and_changes_its_ranks_has_the_same_bits(
    bake: Bake, tmp_path: Path, parallelism: str
) -> None:
    project, run, whole = bake(parallelism=parallelism), tmp_path / "killed", tmp_path / "whole"
    launch(project, *COMMON, *WORDS["digits"], "--run.dir", whole, nproc=1)
    words = [*COMMON, *WORDS["digits"], "--run.dir", run]
    for nproc, step in ((4, 3), (2, 7)):
        launch_and_kill(
            project,
            *words,
            when=lambda step=step: any(record["step"] == step for record in read_records(run)),
            nproc=nproc,
        )
    launch(project, *words, nproc=8)
    assert_same_bits(run, whole)


def test_steps_of_a_run_on_8_ranks_are_replayed_by_one_process(bake: Bake, tmp_path: Path) -> None:
    project, run, replay = bake(), tmp_path / "run", tmp_path / "replay"
    launch(project, *COMMON, *WORDS["digits"], "--checkpoint.keep", "9", "--run.dir", run, nproc=8)
    resume = ["--checkpoint.resume", run / "checkpoints/step-00000004.pt", "--run.dir", replay]
    # The checkpoint brings the size of micro-batches.
    launch(project, *COMMON, *SIZES, "--data.global_batch_size", "64", *resume, nproc=1)
    (our_tensors, our_records), (their_tensors, their_records) = result(replay), result(run)
    # The replay evaluates the step from which it resumes, as the run has.
    assert our_records == [record for record in their_records if record["step"] > 4 or record["event"] == "eval"]
    for ours, theirs in zip(our_tensors, their_tensors, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("answers", "norm", "words"),
    [
        ({"parallelism": "pipeline"}, "", []),
        ({"task": "control"}, "", []),
        ({}, "BatchNorm2d", []),
        ({}, "", ["--data.micro_batch_size", "8", "--data.global_batch_size", "48"]),  # Each rank has three.
    ],
)
def test_a_line_says_where_the_last_bits_depend_on_the_ranks(
    bake: Bake, answers: dict[str, str], norm: str, words: list[str]
) -> None:
    project = bake(**answers)
    if norm:
        edit(project, instead(STEM, f"self.norm = nn.{norm}(width)"))
    launched = launch(project, "train", "--train.max_steps", "1", "--distributed.device", "cpu", *words)
    assert launched.stdout.count("the last bits depend on the number of ranks") == 1
