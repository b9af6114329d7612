"""docs/adopt.md: each script's first 20 losses are those of the project that it became, and a wrong edit is named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from conftest import BIN, TEMPLATE, Bake, blocks, run

ADOPT = TEMPLATE / "docs" / "adopt"
PAGE = ADOPT.with_suffix(".md").read_text()
NAMES = ["image", "text", "table"]
WEEKLY = [pytest.param(name, marks=pytest.mark.long if name == "image" else pytest.mark.weekly) for name in NAMES]
WRONG: dict[str, tuple[str, str, dict[str, str], str]] = {  # Script, file, {right: wrong}, and what is reported.
    "mean": ("image", "task.py", {'"sum")}': '"mean")}'}, "from step 1: initial weights, loss scaling or data differ"),
    "epsilon": ("text", "optim.py", {"eps=config.eps": "eps=1e-6"}, "from step 1: optimizer (eps is {'1e-06': "),
    "schedule": ("text", "optim.py", {"config.decay_steps -": "total_steps -"}, "from step 12: schedule"),
    "length": (
        "text",
        "text.py",
        {"STEPS, WARMUP = 32, 8, 4, 200,": "STEPS, WARMUP = 32, 8, 4, 190,"},
        "steps: the script has taken 190, and the project takes 200",
    ),
    "order": (
        "image",
        "image.py",
        {"sampler.set_epoch(epoch)": "pass"},
        "from step 10 (an epoch begins), at once: order",
    ),
    "split": (
        "table",
        "task.py",
        {" ** 2).sum()}": " ** 2).sum() / weight.sum() * len(y)}", "targets[1].sum()": "len(targets[0])"},
        "on micro-batches of 64: the result depends on the micro-batch",
    ),
}


def adopt(project: Path, name: str) -> None:
    """Edit a project as a script requires, and add the check."""
    out = run("bash", "-c", f"patch -p1 --fuzz=0 < {ADOPT / name}.diff", cwd=project).stdout
    assert "src/my_experiment/optim.py" in out
    (project / "tests" / "test_adopted.py").write_text((ADOPT / "test_adopted.py").read_text())


def record(project: Path, script: str) -> None:
    """Run a script that leaves its weights, and the loss and the learning rate of each step."""
    (project / "witness").mkdir()
    run(BIN / "python", "-c", script, cwd=project, PYTHONPATH="src")


def check(project: Path, code: int = 0) -> str:
    """Return what the check prints."""
    return run(BIN / "pytest", "-q", "-rP", "tests/test_adopted.py", cwd=project, code=code).stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_applies_and_is_clean(bake: Bake, name: str) -> None:
    project = bake()
    adopt(project, name)
    for words in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        run(BIN / words[0], *words[1:], cwd=project)
    assert 40 <= len((ADOPT / f"{name}.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", WEEKLY)
def test_the_first_losses_are_those_of_the_script(bake: Bake, name: str) -> None:
    project = bake()
    (project / ".venv").symlink_to(BIN.parent)
    (project.parent / "ddp-template").symlink_to(TEMPLATE)
    (commands,) = blocks(ADOPT.with_suffix(".md"), "bash")
    printed = run("bash", "-ec", commands.replace("image", name), cwd=project).stdout
    measured = re.findall(r"^(\d) rank.* of 20 losses (\S+)$", printed, re.MULTILINE)
    assert [nproc for nproc, _ in measured] == ["1", "1", "2"]
    assert max(float(value) for _, value in measured) <= 1e-10  # Above it, the check looks for a cause.
    shown = re.findall(rf"^\| \[{name}.py\].*? \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    print(f"{name}: {measured}, and on the page {shown}")
    assert len(shown) == 1 and max(map(float, shown[0])) <= 1e-10


@pytest.mark.weekly
@pytest.mark.parametrize("name", NAMES)
def test_the_project_passes_its_own_proof(bake: Bake, name: str) -> None:
    project = bake()
    adopt(project, name)
    run(BIN / "pytest", "-q", "tests/test_experiment.py", "tests/test_split.py", cwd=project)


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.long if name == "mean" else pytest.mark.weekly) for name in WRONG]
)
def test_a_wrong_edit_is_named(bake: Bake, fault: str) -> None:
    name, file, changes, sentence = WRONG[fault]
    project = bake()
    adopt(project, name)
    script = (ADOPT / f"{name}.py").read_text()
    if file == f"{name}.py":
        script = replace(script, changes)
    else:
        path = project / "src" / "my_experiment" / file
        path.write_text(replace(path.read_text(), changes))
    record(project, script)
    assert f"AssertionError: {sentence}" in check(project, code=1)
    assert sentence in PAGE


STEP = [2.3, [{"params": 9, "lr": 0.1}]]


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ("", "witness/steps.json has 0 steps; 20 are compared"),
        (json.dumps([STEP]), "witness/steps.json has 1 steps"),
        (json.dumps([STEP, [math.nan, STEP[1]]] * 10), "step 2 of witness/steps.json is [nan, "),
        (json.dumps([[0.0, STEP[1]]] * 20), "step 1 of witness/steps.json is [0.0, "),
    ],
)
def test_a_record_that_shows_nothing_is_refused(bake: Bake, steps: str, named: str) -> None:
    project = bake()
    adopt(project, "table")
    (project / "witness").mkdir()
    (project / "witness" / "steps.json").write_text(steps)
    assert f"AssertionError: {named}" in check(project, code=1)


def replace(text: str, changes: dict[str, str]) -> str:
    """Replace texts that occur once each."""
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text
