"""Every strategy, task and launcher: a run that is killed and resumed gives what a plain loop gives."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import CHOICES, Bake
from runs import (
    TOLERANCE,
    alone,
    kill_after,
    last_step,
    launch,
    newest_checkpoint,
    records,
    resume,
    weights,
    world_size,
)
from test_doctor import failed_rows, states_of

pytestmark = pytest.mark.slow

every_strategy = pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
every_task = pytest.mark.parametrize("task", CHOICES["task"])
every_launcher = pytest.mark.parametrize("launcher", CHOICES["launcher"])

STEPS = 21  # In three epochs, during which each rule of the oracle acts.
COMMON = {
    "run.seed": 7,
    "optim.lr": 4e-3,
    "optim.min_lr_ratio": 0.1,
    "optim.warmup_steps": 3,
    "optim.weight_decay": 0.1,
    "optim.betas": [0.8, 0.95],
    "optim.eps": 1e-6,
    "train.epochs": 3,
    "train.log_every": 1,
    "train.eval_every": 7,
    "checkpoint.every_steps": 4,
    "distributed.device": "cpu",
}
TASKS = {
    "digits": {
        "data.global_batch_size": 200,
        "dataset.max_shift": 1,
        "model.width": 8,
        "model.depth": 2,
        "train.clip_grad_norm": 0.07,
    },
    "language": {
        "data.global_batch_size": 32,
        "dataset.path": argparse.__file__,
        "dataset.max_bytes": 16_500,
        "dataset.test_bytes": 9_000,
        "model.width": 32,
        "model.layers": 4,
        "model.heads": 4,
        "model.context": 32,
        "train.clip_grad_norm": 0.5,
        "train.microbatches": 2,
    },
    "control": {
        "data.global_batch_size": 16,
        "control.environments": 8,
        "control.steps": 14,
        "control.passes": 2,  # The second collection is after the kill.
        "control.discount": 0.9,
        "control.gae_lambda": 0.7,
        "control.clip": 0.02,
        "control.value_weight": 0.4,
        "control.entropy_weight": 0.3,
        "control.evaluation_episodes": 9,
        "model.width": 16,
        "model.depth": 3,
        "model.observations": 4,
        "model.actions": 2,
        "model.action_dims": 0,
        "train.clip_grad_norm": 0.3,
    },
}
ORACLES: dict[str, oracle.Oracle] = {}


def settings_of(task: str) -> dict[str, Any]:
    return COMMON | TASKS[task]


def arguments_of(task: str, sections: str = "") -> list[str]:
    """Return the settings of a task, or of some sections (``a|b``), as arguments."""
    chosen = {name: value for name, value in settings_of(task).items() if re.match(sections, name)}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def train_oracle(project: Path, task: str, **changes: Any) -> oracle.Oracle:
    """Train the oracle with the network of a project, which is the same under every strategy and launcher."""
    return oracle.train(next((project / "src").iterdir()), task, settings_of(task) | changes)


@pytest.fixture
def expected(baked: Bake, task: str) -> oracle.Oracle:
    """What the runs of a task have to give."""
    if task not in ORACLES:
        ORACLES[task] = train_oracle(baked(task=task), task)
    return ORACLES[task]


@every_launcher
@every_task
@every_strategy
def test_a_killed_and_resumed_run_matches_a_plain_loop(
    bake: Bake, expected: oracle.Oracle, tmp_path: Path, parallelism: str, task: str, launcher: str
) -> None:
    project, nproc = bake(parallelism=parallelism, task=task, launcher=launcher), world_size(parallelism)
    folder = tmp_path / "run"
    words = arguments_of(task)
    kill_after(9, project, folder, *words, nproc=nproc)  # The checkpoint of step 8 is in the second epoch.
    assert resume(project, folder, *words, nproc=nproc) >= 8 and last_step(folder) == STEPS
    assert_records_match(records(folder, "train"), expected.records)
    assert_records_match(records(folder, "eval"), expected.evaluations)
    assert_weights_match(weights(folder), expected.weights)

    # The model's settings are those of the checkpoint; an episode's seed depends on that of the run.
    sections = r"dataset|control|run\.seed|distributed"
    evaluate = ("evaluate", "--checkpoint", newest_checkpoint(folder), *arguments_of(task, sections))
    evaluated = alone(project, *evaluate)
    assert_records_match([json.loads(evaluated.stdout.splitlines()[-1])], expected.evaluations[-1:])
    assert "warning" not in (folder.with_suffix(".log").read_text() + evaluated.stderr).lower()


def assert_records_match(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Assert that records hold the same values, to rounding, under the names that the oracle knows."""
    for record, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=TOLERANCE), name


def assert_weights_match(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert that weights differ by no more than rounding; relative to a tensor that started at zero, it is larger."""
    assert ours.keys() == theirs.keys()
    norms = {name: tensor.norm() for name, tensor in theirs.items()}
    differences = {name: (ours[name] - theirs[name]).norm() for name in theirs}
    assert math.hypot(*differences.values()) <= TOLERANCE * math.hypot(*norms.values())
    for name, difference in differences.items():
        assert difference <= 10 * TOLERANCE * norms[name], name


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        ("digits", "run.seed", 8),
        ("digits", "dataset.max_shift", 0),
        ("digits", "optim.lr", 2e-3),
        ("digits", "optim.min_lr_ratio", 0.0),
        ("digits", "optim.warmup_steps", 1),
        ("digits", "optim.weight_decay", 0.0),
        ("digits", "optim.betas", [0.9, 0.95]),
        ("digits", "optim.betas", [0.8, 0.99]),
        ("digits", "optim.eps", 1e-4),
        ("digits", "train.clip_grad_norm", 1e9),
        ("language", "train.clip_grad_norm", 1e9),
        ("language", "optim.weight_decay", 0.0),
        ("control", "run.seed", 8),
        ("control", "control.steps", 28),
        ("control", "control.passes", 1),
        ("control", "control.discount", 0.95),
        ("control", "control.gae_lambda", 0.8),
        ("control", "control.clip", 0.2),
        ("control", "control.value_weight", 0.5),
        ("control", "control.entropy_weight", 0.0),
        ("control", "train.clip_grad_norm", 1e9),
    ],
)
def test_a_run_that_ignored_a_setting_would_be_seen(
    baked: Bake, expected: oracle.Oracle, task: str, name: str, value: Any
) -> None:
    other = train_oracle(baked(task=task), task, **{name: value})
    with pytest.raises(AssertionError):
        assert_records_match(other.records, expected.records)
    with pytest.raises(AssertionError):
        assert_weights_match(other.weights, expected.weights)


@every_launcher
@every_strategy
def test_the_doctor_passes(bake: Bake, tmp_path: Path, parallelism: str, launcher: str) -> None:
    project, nproc = bake(parallelism=parallelism, launcher=launcher), world_size(parallelism)
    words = ("doctor", "--distributed.device", "cpu", "--run.dir", tmp_path / "run")
    states = states_of(launch(project, *words, nproc=nproc).stdout)
    assert not failed_rows(states)
    assert states["rendezvous"] == states["backend"] == states["device"] == {"pass"}
    assert ("all-reduce of 8 MiB" in states) == (nproc > 1)
