"""A choice is its folder: a new one, made by the steps of CONTRIBUTING, shows its own facts and none of the others'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import BIN, CHOICES, TEMPLATE, copy_template, read_tree, render_copy, run
from renders import PARTS, File, Project
from traces import find_traces

EXISTING = [(path.parent.name, path.name) for path in sorted(PARTS.glob("*/*")) if path.name != "shared"]
NEW = {
    "parallelism": ("ddp", {"Distributed data parallel": "New data parallel"}),
    "task": ("digits", {"accuracy": "hit_rate", "  max_shift: 1": "  max_shift: 2", "a small ResNet": "a new network"}),
    "launcher": ("spawn", {"torch.multiprocessing.spawn": "new.start"}),
    "cluster": ("slurm", {"#SBATCH": "#NEW"}),
    "tracker": ("tensorboard", {"[tensorboard]": "[pictures]", "tensorboard = ": "pictures = "}),
    "license": ("Proprietary", {"LicenseRef-Proprietary": "LicenseRef-New", "proprietary": "new"}),
}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A copy of the template."""
    return copy_template(tmp_path / "template")


def add_choice(template: Path, question: str, like: str, changes: dict[str, str]) -> None:
    """Follow the steps: copy a folder and change it, and name the choice and its label in cookiecutter.json."""
    folder = template / "templates" / question
    shutil.copytree(folder / like, folder / "new")
    texts = {path: path.read_text() for path in (folder / "new").iterdir()}
    for before, after in changes.items():
        assert any(before in text for text in texts.values()), before
        texts = {path: text.replace(before, after) for path, text in texts.items()}
    for path, text in texts.items():
        path.write_text(text)
    context = json.loads((template / "cookiecutter.json").read_text())
    context[question].append("new")
    context["__prompts__"][question]["new"] = "new: pick it to try the steps"
    (template / "cookiecutter.json").write_text(json.dumps(context, indent=2))


@pytest.mark.parametrize(("question", "choice"), EXISTING)
def test_a_copy_of_a_choice_under_another_name_renders_the_same_project(
    template: Path, question: str, choice: str
) -> None:
    """So no file outside its folder names it, and nothing in the template takes it for one of the others."""
    add_choice(template, question, choice, {})
    projects = [render_copy(template, template.parent / name, **{question: name}) for name in (choice, "new")]
    original, copy = map(read_tree, projects)
    line = f'{question} = "{choice}"\n'.encode()
    assert line in original["pyproject.toml"]
    original["pyproject.toml"] = original["pyproject.toml"].replace(line, f'{question} = "new"\n'.encode())
    assert copy == original


@pytest.mark.parametrize("question", NEW)
def test_a_new_choice_shows_its_own_facts_alone(template: Path, question: str) -> None:
    like, changes = NEW[question]
    add_choice(template, question, like, changes)
    files = read_tree(render_copy(template, template.parent / "out", **{question: "new"}))
    text = b"".join(files.values()).decode(errors="ignore")
    assert all(after in text and before not in text for before, after in changes.items())
    copied = [Project({name: values[0] for name, values in CHOICES.items()} | {question: like}, {})]
    for path, data in files.items():
        if not path.endswith(".npz"):
            assert not [*find_traces(File(path, data, False), copied)]


@pytest.mark.long
@pytest.mark.parametrize("question", ["task", pytest.param("parallelism", marks=pytest.mark.weekly)])
def test_a_new_task_and_a_new_strategy_train_and_evaluate(template: Path, question: str) -> None:
    like, changes = NEW[question]
    add_choice(template, question, like, changes)
    project = render_copy(template, template.parent / "out", **{question: "new"})
    output = run(TEMPLATE / "tests" / "demo.sh", project, cwd=template, BIN=str(BIN)).stdout
    assert changes.get("accuracy", "accuracy") in output
