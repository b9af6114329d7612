"""Odd experiments are as on one rank, and as without a stop; or a line refuses them before they are saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bake, edit, launch, read_losses, read_records, render, run
from experiments import CASES, EDITS, Case, params
from lines import IMPORTS, POOLED
from small import refuse

pytestmark = [pytest.mark.long, pytest.mark.independent]

STEPS = 6
SETTINGS = {
    "run.seed": 5,
    "train.max_steps": STEPS,
    "train.log_every": 1,
    "train.eval_every": 2,
    "data.global_batch_size": 32,
    "model.width": 8,
    "model.depth": 1,
    "distributed.device": "cpu",
}
WORDS = ["train", *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value)))]
# Two ranks share the work in the way of the strategy, or with it another dimension.
RANKS = {"data_parallel": 1, "mesh": 4}
LAYOUTS = {"mesh": ["--parallel.tensor", "2"]}


@pytest.mark.parametrize("case", params([case for case in CASES if case.named]))
def test_an_experiment_is_refused_in_one_line(bake: Bake, case: Case) -> None:
    project = bake(parallelism=case.strategy)
    edit(project, IMPORTS | EDITS[case.name])
    line = refuse(project, *case.words, nproc=case.ranks or 1)
    assert all(part in line for part in case.named.split("...")), line
    # A save comes before its evaluation, and before it is read.
    is_saved = any(part in line for part in ("Task.metrics", "Task.aggregate", "is not a readable checkpoint"))
    assert is_saved == bool([*project.glob("run/checkpoints/*.pt")])


def result(run_dir: Path) -> dict[str, Any]:
    """Return the losses of all steps and evaluations, and the final weights."""
    records = [record for event in ("train", "eval") for record in read_records(run_dir, event)]
    losses = [record[name] for record in records for name in ("loss", "squares") if name in record]
    content = torch.load(run_dir / "checkpoints" / f"step-{STEPS:08}.pt", weights_only=True)
    return {"losses": losses, "model": content["model"]}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Return the largest relative deviations of losses, and of all weights together."""
    loss = max(abs(mine / other - 1) for mine, other in zip(ours["losses"], theirs["losses"], strict=True))
    squares = sum(float((ours["model"][name] - value).abs().square().sum()) for name, value in theirs["model"].items())
    norm = sum(float(value.abs().square().sum()) for value in theirs["model"].values())
    return loss, (squares / norm) ** 0.5


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return by experiment what DDP gives on one rank, in one micro-batch."""
    known: dict[str, Any] = {}

    def on_one_rank(case: Case) -> dict[str, Any]:
        if case.name not in known:
            project = render(tmp_path_factory.mktemp("one"))
            edit(project, IMPORTS | EDITS[case.name])
            launch(project, *WORDS, *case.words, "--run.dir", "run", nproc=1)
            known[case.name] = result(project / "run")
        return known[case.name]

    return on_one_rank


@pytest.mark.parametrize("case", params([case for case in CASES if not case.named]))
def test_an_experiment_is_right_or_refused(bake: Bake, expected: Any, case: Case) -> None:
    project, nproc = bake(parallelism=case.strategy), RANKS.get(case.strategy, 2)
    edit(project, IMPORTS | EDITS[case.name])
    words = [*WORDS, *LAYOUTS.get(case.strategy, []), *case.words, "--data.micro_batch_size", "8"]
    script = 'scripts/launch.sh "$@"; echo "code $?"'
    out = run("bash", "-c", script, "bash", *words, "--run.dir", "straight", cwd=project, NPROC=str(nproc))
    if "code 2" in out.stdout and not case.ranks:
        # PyTorch may warn before, such as of a layer in plan.py that the model lacks.
        errors = re.findall("^error: (.*)", out.stderr, re.MULTILINE)
        # Rank 0 repeats what another rank alone reports.
        reason = min(errors, key=len)
        assert len(errors) <= 2 and all(error.endswith(reason) for error in errors), errors
        pytest.skip(f"refused: {reason}")
    if "code 1" in out.stdout and not case.ranks:
        # A tensor that plan.py shards, or one without values, does not take every operation: PyTorch says so.
        assert "model.py" in out.stderr or "DTensor" in out.stderr, out.stderr
        pytest.skip(f"error: {out.stderr.splitlines()[-1]}")
    assert "code 0" in out.stdout, out.stderr
    loss, weights = differences(result(project / "straight"), expected(case))
    print("DEVIATION", case.name, case.strategy, loss, weights)
    assert loss < 1e-5 and weights < 1e-4
    evaluate = ("evaluate", "--split", "validation", "--distributed.device", "cpu", "--checkpoint", "straight")
    evaluated = json.loads(launch(project, *evaluate, nproc=1).stdout)
    (recorded,) = [each for each in read_records(project / "straight", "eval") if each["step"] == evaluated["step"]]
    assert evaluated["loss"] == pytest.approx(recorded["loss"], rel=1e-5)
    if (project / "scripts" / "rehearse.py").exists():
        rehearsed = run("scripts/launch.sh", "rehearse", "--ranks", str(nproc), *words[1:], cwd=project).stdout
        assert "messages match" in rehearsed
    for steps in (STEPS // 2, STEPS):
        launch(project, *words, "--run.dir", "run", "--train.max_steps", str(steps), nproc=nproc)
    assert read_losses(project / "run") == read_losses(project / "straight")


@pytest.mark.parametrize("name", ["losses in another order", "an optimizer without state that draws"])
def test_an_experiment_has_the_same_bits_on_two_ranks(bake: Bake, name: str) -> None:
    project = bake()
    edit(project, IMPORTS | EDITS[name])
    for nproc in (1, 2):
        launch(project, *WORDS, "--data.micro_batch_size", "8", "--run.dir", f"run{nproc}", nproc=nproc)
    ours, theirs = (result(project / f"run{nproc}") for nproc in (1, 2))
    assert ours["losses"] == theirs["losses"]
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())


@pytest.mark.weekly
@pytest.mark.parametrize(("parallelism", "turn"), [("ddp", 1), ("ddp", 0), ("fsdp", 0)])
def test_a_layer_that_a_micro_batch_lacks_has_a_gradient_of_zero_there(bake: Bake, parallelism: str, turn: int) -> None:
    changes, runs = EDITS["a layer that every other micro-batch lacks"], []
    text = changes[POOLED].replace("torch.distributed.get_rank()", f"{turn} * torch.distributed.get_rank()")
    for folder, last in (("lacks", "if uses else features"), ("zero", "* uses")):
        project = bake(folder, parallelism=parallelism)
        edit(project, IMPORTS | changes | {POOLED: text.replace("if uses else features", last)})
        launch(project, *WORDS, "--data.micro_batch_size", "8", "--train.allow_unused", "true", "--run.dir", "run")
        runs.append([[each["loss"], each["grad_norm"]] for each in read_records(project / "run", "train")])
    assert runs[0] == [pytest.approx(numbers, rel=1e-6) for numbers in runs[1]] and len(runs[0]) == STEPS
