"""A project's own tests pass as rendered, and judge an experiment of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BIN, Bake, run

pytestmark = [pytest.mark.slow, pytest.mark.long]

RENDERED = [
    {},
    {"parallelism": "fsdp", "task": "language", "launcher": "spawn"},
    {"parallelism": "pipeline", "task": "language"},
    {"parallelism": "tensor"},
    {"parallelism": "model_parallel", "launcher": "spawn"},
    {"parallelism": "data_parallel"},
    {"task": "control"},
]
WEEKLY = {"pipeline", "tensor", "model_parallel", "data_parallel"}
# Targets that do not count, in numbers that differ between samples, so that the weight of a local batch is a tensor.
RAGGED = {
    ("dataset.py", "return window[:-1], window[1:]"): "targets = window[1:].clone()\n"
    "        targets[3 + index % 20 :] = -1\n        return window[:-1], targets",
    ("task.py", 'reduction="sum")'): 'reduction="sum", ignore_index=-1)',
    ("task.py", 'reduction="none")'): 'reduction="none", ignore_index=-1)',
    ("task.py", "return targets.numel()"): "return (targets >= 0).sum()",
}
BATCH_NORM = {("model.py", "self.norm2 = nn.GroupNorm(GROUPS, outputs)"): "self.norm2 = nn.BatchNorm2d(outputs)"}
LEAK = {
    (
        "model.py",
        "self.position.weight[: inputs.shape[1]]",
    ): "self.position.weight[: inputs.shape[1]] * (1 + inputs.sum() / 1e6)"
}
MEAN = {("task.py", 'reduction="sum")'): 'reduction="mean")'}


def edit(project: Path, changes: dict[tuple[str, str], str]) -> None:
    """Change a line in files of the package."""
    for (name, before), after in changes.items():
        file = next((project / "src").iterdir()) / name
        text = file.read_text()
        assert text.count(before) == 1, (name, before)
        file.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(
            each, id="-".join(each.values()) or "default", marks=[pytest.mark.weekly] * bool(WEEKLY & {*each.values()})
        )
        for each in RENDERED
    ],
)
def test_a_project_passes_its_own_tests(bake: Bake, answers: dict[str, str]) -> None:
    result = run(BIN / "pytest", "-q", "tests", cwd=bake(**answers))
    assert "failed" not in result.stdout and "skipped" not in result.stdout


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp", "pipeline", "tensor"])
def test_a_loss_of_ragged_weight_does_not_depend_on_the_split(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    edit(project, RAGGED)
    run(BIN / "pytest", "-q", "tests/test_experiment.py", "tests/test_split.py", cwd=project)


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ("digits", BATCH_NORM, "depends on the other samples of its batch"),
        ("language", LEAK, "depends on the other samples of its batch"),
        ("digits", MEAN, "return sums from Task.losses"),
    ],
    ids=["batch statistics behind a layer that starts at zero", "padding that leaks", "a mean in place of a sum"],
)
def test_what_makes_a_result_depend_on_the_split_is_named(
    bake: Bake, task: str, changes: dict[tuple[str, str], str], reason: str
) -> None:
    project = bake(task=task)
    edit(project, changes)
    result = run(BIN / "pytest", "-q", "tests/test_experiment.py", cwd=project, code=1)
    assert reason in result.stdout
