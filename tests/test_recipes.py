"""Each recipe of a rendered project's ``docs/``, applied as written, trains the same on any number of ranks."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHOICES, Bake, leave_to_weekly, run
from recipes import Edit, apply
from runs import TOLERANCE, alone, assert_close, assert_same_weights, kill_after, launch, losses, records, resume

STEPS = "--train.max_steps 8 --train.log_every 1 --train.eval_every 4 --checkpoint.every_steps 2".split()
CPU = ("--distributed.device", "cpu")
NAMES = ["any_model", "contrastive", "ema", "finetune", "gan", "images", "stream", "table", "transformers"]
OF_CONTROL = ["environment"]
# Pages that are no edits of the project; tests/test_teaching.py and tests/test_sweep.py do what they say.
LESSONS = {"coming_from", "exercises", "from_a_loop", "sweep", "walk"}
# The files that only the GAN may change; `checkpoint/` and `parallel.py` stay as they are in all recipes.
UNTOUCHED = re.compile(r"/(checkpoint/|parallel\.py)")


def prepare(recipe: str, project: Path) -> None:
    """Do what the reader has to do before training: its shell commands that make data or weights."""
    for block in re.findall(r"^```bash\n(.*?)^```", (project / "docs" / f"{recipe}.md").read_text(), re.M | re.S):
        if "launch.sh" not in block and "pip install" not in block:
            run("bash", "-euc", block.replace(".venv/bin/python", sys.executable), cwd=project)


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
@pytest.mark.parametrize("task", CHOICES["task"])
def test_a_recipe_fits_the_project_and_its_tools(bake: Bake, tmp_path: Path, parallelism: str, task: str) -> None:
    original = bake("original", parallelism=parallelism, task=task)
    shown = {path.stem for path in (original / "docs").iterdir()} - LESSONS
    if task == "control":
        assert shown == set(OF_CONTROL)
    else:
        assert shown == set(NAMES) or shown == set(NAMES) - {"any_model", "contrastive", "gan", "transformers"}
    for recipe in sorted(shown):
        project = Path(shutil.copytree(original, tmp_path / "applied" / recipe))
        edits = apply(project / "docs" / f"{recipe}.md", project)
        lines, files = count_changes(edits, project)
        counted = f"It changes {lines} lines in {files} file{'s' if files > 1 else ''}."
        assert counted in (project / "docs" / f"{recipe}.md").read_text(), counted
        for edit in edits:
            assert not UNTOUCHED.search(edit.path) and (recipe == "gan" or "train.py" not in edit.path), edit.path
    # At once; it reports what cannot be parsed, too.
    run(sys.executable, "-m", "ruff", "check", "--no-cache", tmp_path / "applied", cwd=tmp_path)


def count_changes(edits: list[Edit], project: Path) -> tuple[int, int]:
    """Return how many lines a recipe adds or changes, once they are formatted, and in how many files."""
    before = {edit.path: edit.before for edit in reversed(edits)}  # An edit may follow another one of the same file.
    lines = [
        line
        for path, text in before.items()
        for line in difflib.ndiff(text.splitlines(), (project / path).read_text().splitlines())
    ]
    return sum(line.startswith("+ ") for line in lines), len(before)


def arguments(recipe: str, project: Path) -> list[str]:
    """Return the arguments with which the recipe trains, but for a few steps, and without its run directory."""
    text = (project / "docs" / f"{recipe}.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^scripts/launch\.sh train(.*)$", text, re.MULTILINE)
    words = shlex.split(commands[-1]) if commands else []
    if "--run.dir" in words:
        at = words.index("--run.dir")
        del words[at : at + 2]
    return [*words, *STEPS, *CPU]


# The slowest of them.
WEEKLY = ("contrastive", "ema", "gan", "images", "stream", "table", "transformers")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", leave_to_weekly([*NAMES, *OF_CONTROL], WEEKLY))
def test_a_recipe_trains_resumes_and_evaluates_the_same(bake: Bake, tmp_path: Path, recipe: str) -> None:
    project = bake(task="control") if recipe in OF_CONTROL else bake()
    if recipe == "finetune":
        # The recipe starts from the weights of the shipped task.
        text = (project / "docs/finetune.md").read_text()
        weights_path = re.search(r"--model\.weights (\S+)", text)
        assert weights_path is not None
        saved = project / weights_path[1]
        alone(project, "train", "--train.max_steps", "2", *CPU, "--run.dir", tmp_path / "pretrained")
        saved.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pretrained/checkpoints/step-00000002.pt").rename(saved)
    apply(project / "docs" / f"{recipe}.md", project)
    prepare(recipe, project)
    words = arguments(recipe, project)
    launch(project, "train", *words, "--run.dir", tmp_path / "one", nproc=1)
    launch(project, "train", *words, "--run.dir", tmp_path / "two", nproc=2)
    assert len(losses(tmp_path / "one")) == 8
    assert_close(tmp_path / "two", tmp_path / "one")
    assert_same_metrics(tmp_path / "two", tmp_path / "one")

    kill_after(3, project, tmp_path / "killed", *words)
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    resume(project, tmp_path / "killed", *words)
    assert_same_weights(tmp_path / "killed", tmp_path / "two")
    resume(project, tmp_path / "moved", *words, nproc=1)
    assert_close(tmp_path / "moved", tmp_path / "one")

    checkpoint = tmp_path / "two/checkpoints/step-00000008.pt"
    printed = json.loads(alone(project, "evaluate", "--checkpoint", checkpoint, *CPU).stdout.splitlines()[-1])
    assert_metrics(printed, records(tmp_path / "two", "eval")[-1])


def assert_same_metrics(actual: Path, expected: Path) -> None:
    """Assert that two runs evaluated the same samples and got the same metrics."""
    for ours, theirs in zip(records(actual, "eval"), records(expected, "eval"), strict=True):
        assert_metrics(ours, theirs)


def assert_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        expected = value if isinstance(value, str) else pytest.approx(value, rel=10 * TOLERANCE, abs=1e-6)
        assert ours[name] == expected, name
