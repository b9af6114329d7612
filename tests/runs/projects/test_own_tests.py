"""A project's own tests pass as rendered, and judge an experiment of one's own."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys

import pytest
from conftest import BIN, TEMPLATE, Bake, blocks, edit, run, weekly

pytestmark = [pytest.mark.long, pytest.mark.independent]

# All tests of the default project, in three parts, which run in parallel.
SPLIT, RESUME = "tests/test_split.py", "tests/test_resume.py"
RENDERED = {
    "default-split": ({}, [SPLIT]),
    "default-resume": ({}, [RESUME]),
    "default-others": ({}, ["tests", f"--ignore={SPLIT}", f"--ignore={RESUME}"]),
}
WEEKLY = [
    {"launcher": "spawn", "parallelism": "fsdp", "task": "language"},
    {"launcher": "spawn", "parallelism": "model_parallel"},
    {"parallelism": "pipeline", "task": "language"},
    {"parallelism": "tensor"},
    {"parallelism": "mesh", "task": "language"},
    {"parallelism": "data_parallel"},
    {"task": "control"},
]
CASES = [pytest.param(*each, id=name) for name, each in RENDERED.items()]
CASES += [pytest.param(each, ["tests"], id="-".join(each.values()), marks=pytest.mark.weekly) for each in WEEKLY]
BATCH_NORM = {
    ("model.py", "self.norm2 = nn.GroupNorm(ModelConfig.groups, outputs)"): "self.norm2 = nn.BatchNorm2d(outputs)"
}
LEAK = {
    (
        "model.py",
        "self.position.weight[: inputs.shape[1]]",
    ): "self.position.weight[: inputs.shape[1]] * (1 + inputs.sum() / 1e6)"
}
# A split of one's own, which is another one at each start.
DRAWN = {
    ("dataset.py", "import random\n"): "import random\nimport secrets\n",
    (
        "dataset.py",
        "pixels = torch.from_numpy(images) / 16",
    ): "order = np.random.default_rng(secrets.randbits(32)).permutation(len(images))\n"
    "        pixels = torch.from_numpy(images[order]) / 16",
}
MEAN = {("task.py", 'reduction="sum")'): 'reduction="mean")'}
POOLED = ("model.py", "        return self.linear(features.mean(dim=(2, 3)))\n")
LINEAR = ("model.py", "        self.linear = nn.Linear(width, CLASSES)\n")
# A layer that follows another one, and changes whenever the model runs.
FOLLOWER = {
    LINEAR: LINEAR[1] + "        self.slow = nn.Linear(width, CLASSES).requires_grad_(False)\n",
    POOLED: "        self.slow.weight.data.lerp_(self.linear.weight.data, 0.5)\n" + POOLED[1],
}
SPECTRAL = {
    LINEAR: "        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, CLASSES))\n",
}
DROP_PATH = {POOLED: "        features = features * (features.new_empty(1).uniform_() > 0.5)\n" + POOLED[1]}
NOISE = {
    (
        "task.py",
        'losses = F.cross_entropy(outputs.float(), targets, reduction="none")',
    ): 'losses = F.cross_entropy(outputs + torch.randn_like(outputs), targets, reduction="none")'
}


@pytest.mark.parametrize(("answers", "tests"), CASES)
def test_a_project_passes_its_own_tests(bake: Bake, answers: dict[str, str], tests: list[str]) -> None:
    result = run(BIN / "pytest", "-q", *tests, cwd=bake(**answers))
    assert "skipped" not in result.stdout


HIDDEN = "F.silu(self.norm1(self.conv1(features)))"
DROPOUT = {("model.py", HIDDEN): f"F.dropout({HIDDEN}, 0.1)"}


@pytest.mark.weekly
@pytest.mark.parametrize("changes", [{}, DROPOUT], ids=["right", "dropout"])
def test_a_proof_says_what_holds(bake: Bake, changes: dict[tuple[str, str], str]) -> None:
    project = bake()
    edit(project, changes)
    (project / ".venv").mkdir()
    (project / ".venv" / "installed").touch()
    run("make", "proof", f"BIN={BIN}", cwd=project, code=2 if changes else 0)
    proof, rows = (project / "proof.md").read_text(), json.loads((project / "proof.json").read_text())["rows"]
    assert len(rows) == proof.count("| test_") > 20 and all(f"| {row['test']} |" in proof for row in rows)
    fails = [row["test"] for row in rows if not row["holds"]]
    if changes:  # Of the layouts, one process is another one than the loop too: it draws other numbers.
        assert any("plain_loop" in test for test in fails) and not any("bitwise" in test for test in fails), fails
    else:
        numbers = {row["test"].split("[")[0]: row.keys() & {"loss", "grad_norm", "weights"} for row in rows}
        assert {"loss"} == numbers["test_every_sample_counts_once"] and "CPU" in proof
        assert {"weights"} == numbers["test_another_number_of_ranks_resumes"]
        assert not fails and all(float(row["loss"].split()[0]) < 1e-5 for row in rows if "plain_loop" in row["test"])


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.parametrize("active", [True, False], ids=["active", "not active"])
def test_commands_of_the_readme_work_with_the_environment_active_and_not(
    bake: Bake, active: bool, parallelism: str
) -> None:
    project = bake(parallelism=parallelism)
    (project / ".venv").symlink_to(BIN.parent)
    path = f"{project}/.venv/bin:/usr/bin:/bin" if active else "/usr/bin:/bin"
    commands = "scripts/launch.sh train\n" + blocks(project / "README.md", "bash")[1]
    out = run("bash", "-ec", commands, cwd=project, PATH=path, PYTHON="").stdout
    assert '"split": "test"' in out and "--optim.lr" in out and ("GiB" in out) == (parallelism == "fsdp")
    assert (project / "model.safetensors").exists() and (project / "curves.png").exists()


@pytest.mark.weekly
def test_uv_installs_and_runs_a_project_as_it_is(bake: Bake) -> None:
    project = bake()
    # A folder of wheels, such as that of PyTorch's build for CPUs, serves uv as it serves pip.
    wheels = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", str(project))}
    run(BIN / "uv", "sync", "--quiet", "--python", sys.executable, cwd=project, **wheels)
    (pin,) = re.findall("^torch==(.*)$", (TEMPLATE / "requirements.txt").read_text(), re.MULTILINE)
    assert f'name = "torch"\nversion = "{pin}' in (project / "uv.lock").read_text()
    words = ("scripts/launch.sh", "train", "--train.max_steps", "2", "--distributed.device", "cpu")
    out = run(BIN / "uv", "run", *words, cwd=project, PYTHON="", **wheels).stdout
    assert "step 0 of 2 on 2 rank(s), cpu" in out and (project / ".venv").is_dir()


@pytest.mark.parametrize("parallelism", ["ddp", *weekly("fsdp", "pipeline", "tensor")])
def test_a_loss_of_ragged_weight_does_not_depend_on_the_split(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    run(BIN / "python", "scripts/prepare.py", "lines.bin", argparse.__file__, "--lines", cwd=project)
    with (project / "configs" / "default.yaml").open("a") as file:  # Local batches differ in their ends of lines.
        file.write(f"\ndataset:\n  path: {project}/lines.bin\n")
    tests = ("tests/test_experiment.py", SPLIT, RESUME)
    run(BIN / "pytest", "-q", *tests[: 2 + (parallelism == "fsdp")], cwd=project)


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ("digits", BATCH_NORM, "depends on the other samples of its batch"),
        ("language", LEAK, "depends on the other samples of its batch"),
        ("digits", MEAN, "return sums from Task.losses"),
        ("digits", DRAWN, "returns other samples when it is called again"),
        ("digits", FOLLOWER, "forward changes head.slow.weight"),
        ("digits", SPECTRAL, "forward changes head.linear.parametrizations.weight.0._"),
        ("digits", DROP_PATH, "loss depends on random numbers"),
        ("digits", NOISE, "loss depends on random numbers"),
    ],
    ids=[
        "batch statistics behind a layer that starts at zero",
        "padding that leaks",
        "a mean for a sum",
        "a split",
        "a layer that follows another",
        "spectral norm",
        "drop-path",
        "noise in evaluation",
    ],
)
def test_what_makes_a_result_depend_on_the_split_is_named(
    bake: Bake, task: str, changes: dict[tuple[str, str], str], reason: str
) -> None:
    project = bake(task=task)
    edit(project, changes)
    result = run(BIN / "pytest", "-q", "tests/test_experiment.py", cwd=project, code=1)
    assert reason in result.stdout
