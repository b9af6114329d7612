"""A project's own tests pass as rendered, and judge an experiment of one's own."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys

import pytest
from conftest import BIN, TEMPLATE, Bake, blocks, edit, run, weekly
from lines import HEAD, LOADED, MEASURED, POOLED, SAMPLE, Changes, after, before, instead
from verify import verify

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


@pytest.mark.parametrize(("answers", "tests"), CASES)
def test_a_project_passes_its_own_tests(bake: Bake, answers: dict[str, str], tests: list[str]) -> None:
    result = run(BIN / "pytest", "-q", *tests, cwd=bake(**answers))
    assert "skipped" not in result.stdout


DROPOUT = before(("model.py", "        hidden = self.norm2(self.conv2(hidden))\n"), "hidden = F.dropout(hidden, 0.1)")


@pytest.mark.weekly
@pytest.mark.parametrize("changes", [{}, DROPOUT], ids=["right", "dropout"])
def test_a_proof_says_what_holds(bake: Bake, changes: Changes) -> None:
    project = bake()
    edit(project, changes)
    (project / ".venv").mkdir()
    (project / ".venv" / "installed").touch()
    run("make", "proof", f"BIN={BIN}", cwd=project, code=2 if changes else 0)
    proof, rows = (project / "proof.md").read_text(), json.loads((project / "proof.json").read_text())["rows"]
    assert len(rows) == proof.count("| test_") > 20 and all(f"| {row['test']} |" in proof for row in rows)
    fails = [row["test"] for row in rows if row["outcome"] != "holds"]
    assert f"**{len(rows) - len(fails)} of {len(rows)} rows hold" in proof
    if changes:  # Of the layouts, one process is another one than the loop too: it draws other numbers.
        assert any("plain_loop" in test for test in fails) and not any("bitwise" in test for test in fails), fails
        assert "; 1 failed: AssertionError: weights, loss, grad_norm beyond" in proof
    else:
        numbers = {row["test"].split("[")[0]: row.keys() & {"loss", "grad_norm", "weights"} for row in rows}
        assert {"loss"} == numbers["test_every_sample_counts_once"] and "CPU" in proof
        assert {"weights"} == numbers["test_another_number_of_ranks_resumes"]
        assert not fails and all(float(row["loss"].split()[0]) < 1e-5 for row in rows if "loss" in row)
        faults, edited = verify(project)
        assert faults == [] and edited == []


# Each way to bend a proof: files with the text that is added or replaced, the rows that run, and the lines of the
# certificate and of `make verify` that show it.
REUSED = """

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    train(run_dir, nproc=1)
    return lambda *words: run_dir
"""
OWN_RECORDS = """

def train(config):
    import tempfile, support
    run_dir = support.Path(tempfile.mkdtemp())
    support.train(run_dir, *support.FP64, nproc=1)
    return support.read_records(run_dir), support.load(run_dir)["model"]
"""
LAYOUTS = "not compile and not precision and not num_workers and plain_loop"
NOTHING, FAULT = "nothing_at_all", "seen and seed"
BENT: dict[str, tuple[str, str, str, str, str, str]] = {
    "a row is reused": (
        "tests/conftest.py",
        "",
        REUSED,
        LAYOUTS,
        "failed: AssertionError: the run had 1 ranks",
        "tests/conftest.py: differs",
    ),
    "a root conftest.py": (
        "conftest.py",
        "",
        "import torch\n",
        NOTHING,
        "not rendered: `conftest.py`",
        "conftest.py: not rendered",
    ),
    "deviation returns 0": (
        "tests/support.py",
        "    assert ours.keys() == theirs.keys()\n",
        "    return 0.0\n",
        FAULT,
        "failed: AssertionError: Regex",
        "tests/support.py: differs",
    ),
    "splits are deleted": (
        "tests/support.py",
        ", (4, [])",
        "",
        NOTHING,
        "layouts: 1 rank(s), 2 rank(s) --data.num_workers 2;",
        "proof.md: no row test_a_split_gives_the_result_of_a_plain_loop[4-[]-[]]",
    ),
    "the report is edited": (
        "proof.md",
        "**0 of 35",
        "**35 of 35",
        NOTHING,
        "**35 of 35 rows",
        "proof.md: not what tests/proof.py writes of proof.json",
    ),
    "the witness is the project itself": (
        "tests/plain.py",
        "",
        OWN_RECORDS,
        FAULT,
        "failed: Failed: DID NOT RAISE",
        "tests/plain.py: differs",
    ),
    "a recorded witness is the project itself": (
        "witness/steps.json",
        "",
        "[[2.3, 0.1]]\n",
        NOTHING,
        "  witness/steps.json",
        "witness/steps.json: not rendered; only",
    ),
    "settings of pytest": (
        "pyproject.toml",
        '"-m not proof"]',
        '"-m not proof", "-p no:logging"]',
        NOTHING,
        "  pyproject.toml",
        "pyproject.toml: the settings of pytest differ",
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_a_bent_proof_shows_it(bake: Bake, name: str) -> None:
    file, before, after, rows, in_certificate, in_verify = BENT[name]
    project = bake()

    def bend() -> None:
        path = project / file
        path.parent.mkdir(exist_ok=True)
        text = path.read_text() if path.exists() else ""
        assert not before or text.count(before) == 1
        path.write_text(text.replace(before, after) if before else text + after)

    if file != "proof.md":
        bend()
    fails = "failed" in in_certificate
    run(BIN / "python", "tests/proof.py", cwd=project, code=1 if fails else 5, PYTEST_ADDOPTS=f"-k '{rows}'")
    if file == "proof.md":
        bend()
    assert in_certificate in (project / "proof.md").read_text()
    faults, edited = verify(project)
    assert any(fault.startswith(in_verify) for fault in faults), faults
    assert edited == []


def test_what_an_experiment_may_change_is_printed(bake: Bake) -> None:
    project = bake(parallelism="pipeline", task="language", project_slug="other")
    rules = project / "tests/rules.py"
    rules.write_text(rules.read_text().replace("STEPS = 20", "STEPS = 12"))
    run(BIN / "python", "tests/proof.py", cwd=project, code=5, PYTEST_ADDOPTS=f"-k {NOTHING}")
    assert "\nSTEPS = 12\n" in (project / "proof.md").read_text()
    faults, edited = verify(project)
    assert edited == ["tests/rules.py"] and all(fault.endswith(" not run") for fault in faults), faults


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


# What makes a result depend on the split: the task, an edit, and what the tests name.
FAULTY: dict[str, tuple[str, Changes, str]] = {
    "batch statistics behind a layer that starts at zero": (
        "digits",
        {
            (
                "model.py",
                "nn.GroupNorm(ModelConfig.groups, outputs)\n        # A",
            ): "nn.BatchNorm2d(outputs)\n        # A"
        },
        "depends on the other samples of its batch",
    ),
    "padding that leaks": (
        "language",
        {("model.py", "inputs.shape[1]]"): "inputs.shape[1]] * (1 + inputs.sum() / 1e6)"},
        "depends on the other samples of its batch",
    ),
    "a mean for a sum": ("digits", {("task.py", '"sum")'): '"mean")'}, "return sums from Task.losses"),
    "a split that is another one at each start": (
        "digits",
        {("dataset.py", "(images) / 16"): "(np.random.default_rng().permutation(images)) / 16"},
        "returns other samples when it is called again",
    ),
    "a layer that follows another": (
        "digits",
        after(HEAD, "self.slow = nn.Linear(width, CLASSES).requires_grad_(False)")
        | before(POOLED, "self.slow.weight.data.lerp_(self.linear.weight.data, 0.5)"),
        "forward changes head.slow.weight",
    ),
    "spectral norm": (
        "digits",
        instead(HEAD, "self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, CLASSES))"),
        "forward changes head.linear.parametrizations.weight.0._",
    ),
    "drop-path": (
        "digits",
        before(POOLED, "features = features * (features.new_empty(1).uniform_() > 0.5)"),
        "loss depends on random numbers",
    ),
    "noise in evaluation": (
        "digits",
        before(MEASURED, "outputs = outputs + torch.randn_like(outputs)"),
        "loss depends on random numbers",
    ),
    "a number that each forward changes": (
        "digits",
        after(HEAD, "self.calls = 0")
        | before(POOLED, "self.calls += 1\n        features = features * (1 + self.calls / 100)"),
        "loss depends on random numbers or earlier batches",
    ),
    "augmented samples that are kept": (
        "digits",
        after(LOADED, "self.kept = {}")
        | instead(SAMPLE, "return self.kept.setdefault(index, image), self.labels[index]")
        | {("config.py", "7] = 0"): "7] = 1"},
        "after another epoch",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_makes_a_result_depend_on_the_split_is_named(bake: Bake, name: str) -> None:
    task, changes, reason = FAULTY[name]
    project = bake(task=task)
    edit(project, changes)
    result = run(BIN / "pytest", "-q", "tests/test_experiment.py", cwd=project, code=1)
    assert reason in result.stdout


def test_a_kink_and_a_large_learning_rate_do_not_fail_for_rounding(bake: Bake) -> None:
    project = bake()
    for name, before, after in (
        ("src/my_experiment/model.py", "F.silu", "F.relu"),
        ("tests/rules.py", "--optim.lr 1e-3", "--optim.lr 1"),
    ):
        path = project / name
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))
    run(BIN / "pytest", "-q", SPLIT, "-k", "not 4-", cwd=project)
