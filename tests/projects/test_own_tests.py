"""A project's own tests pass as rendered, and judge an experiment of one's own."""

from __future__ import annotations

import pytest
from conftest import BIN, Bake, edit, run

pytestmark = pytest.mark.long

# All tests of the default project, and for control, which test_parity.py does not cover, the comparison with its loop.
RENDERED = [
    ({}, "tests"),
    ({"task": "control"}, "tests/test_split.py"),
]
WEEKLY = [
    {"launcher": "spawn", "parallelism": "fsdp", "task": "language"},
    {"launcher": "spawn", "parallelism": "model_parallel"},
    {"parallelism": "pipeline", "task": "language"},
    {"parallelism": "tensor"},
    {"parallelism": "data_parallel"},
    {"task": "control"},
]
CASES = [pytest.param(*each, id="-".join(each[0].values()) or "default") for each in RENDERED]
CASES += [pytest.param(each, "tests", id="-".join(each.values()) + "-all", marks=pytest.mark.weekly) for each in WEEKLY]
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
# A split of one's own, which is another one at each start.
SPLIT = {
    ("dataset.py", "import random\n"): "import random\nimport secrets\n",
    (
        "dataset.py",
        "self.images = torch.from_numpy(np.pad(images.astype(np.float32) / 16, margin))",
    ): "order = np.random.default_rng(secrets.randbits(32)).permutation(len(images))\n"
    "        self.images = torch.from_numpy(np.pad(images[order].astype(np.float32) / 16, margin))",
}
MEAN = {("task.py", 'reduction="sum")'): 'reduction="mean")'}


@pytest.mark.parametrize(("answers", "tests"), CASES)
def test_a_project_passes_its_own_tests(bake: Bake, answers: dict[str, str], tests: str) -> None:
    result = run(BIN / "pytest", "-q", tests, cwd=bake(**answers))
    assert "failed" not in result.stdout and "skipped" not in result.stdout


@pytest.mark.parametrize(
    "parallelism", ["ddp", *(pytest.param(each, marks=pytest.mark.weekly) for each in ("fsdp", "pipeline", "tensor"))]
)
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
        ("digits", SPLIT, "returns other samples when it is called again"),
    ],
    ids=["batch statistics behind a layer that starts at zero", "padding that leaks", "a mean for a sum", "a split"],
)
def test_what_makes_a_result_depend_on_the_split_is_named(
    bake: Bake, task: str, changes: dict[tuple[str, str], str], reason: str
) -> None:
    project = bake(task=task)
    edit(project, changes)
    result = run(BIN / "pytest", "-q", "tests/test_experiment.py", cwd=project, code=1)
    assert reason in result.stdout
