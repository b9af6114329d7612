"""A choice is its folder: a new one, made by the steps of CONTRIBUTING, shows its own facts and none of the others'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import BIN, CHOICES, TEMPLATE, copy_template, read_tree, render_copy, run
from renders import PARTS, File, Project, mixed
from traces import find_traces

pytestmark = pytest.mark.independent

EXISTING = [(path.parent.name, path.name) for path in sorted(PARTS.glob("*/*")) if path.name != "shared"]
NEW = {
    "parallelism": ("ddp", {"Distributed data parallel": "New data parallel"}),
    "task": ("digits", {"accuracy": "hit_rate", "  max_shift: 1": "  max_shift: 2", "a small ResNet": "a new network"}),
    "launcher": ("spawn", {"torch.multiprocessing.spawn": "new.start"}),
    "cluster": ("slurm", {"#SBATCH": "#NEW"}),
    "tracker": ("tensorboard", {"[tensorboard]": "[pictures]", "tensorboard = ": "pictures = "}),
    "license": ("Proprietary", {"LicenseRef-Proprietary": "LicenseRef-New", "proprietary": "new"}),
}

# The task.py of a task that predicts the digit as a number, with a loss and a metric that no other task has.
REGRESSION = '''"""What is learned and measured: the digit as a number."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .config import Config


class Task:
    """Squared errors, and the coefficient of determination."""

    best_metric = "r2"
    higher_is_better = True

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build nothing."""

    def augment(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        return inputs, targets

    def prepare(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        return inputs, targets

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        return {"loss": self.squares(outputs, targets).sum()}

    def squares(self, outputs: Any, targets: Any) -> Tensor:
        return F.mse_loss(outputs.float()[:, 0], targets.float(), reduction="none")

    def weight(self, targets: Any) -> int | Tensor:
        return len(targets)

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        squares = self.squares(outputs, targets)
        return {"loss": squares, "prediction": outputs[:, 0], "target": targets}

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        loss = metrics["loss"].mean(dtype=np.float64)
        return {"loss": loss, "r2": 1 - loss / metrics["target"].var()}

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        return {}
'''
ITS_ORACLE = """

def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[:, 0], targets.double())


def r2(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return {"r2": 1 - squares(outputs, targets).item() / targets.numpy().var()}


TASKS["new"] = Task(digits, squares, r2)
"""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A copy of the template."""
    return copy_template(tmp_path / "template")


def add_choice(template: Path, question: str, like: str, changes: dict[str, str], name: str = "new") -> None:
    """Follow the steps: copy a folder and change it, and name the choice and its label in cookiecutter.json."""
    folder = template / "templates" / question
    shutil.copytree(folder / like, folder / name)
    texts = {path: path.read_text() for path in (folder / name).iterdir()}
    for before, after in changes.items():
        assert any(before in text for text in texts.values()), before
        texts = {path: text.replace(before, after) for path, text in texts.items()}
    for path, text in texts.items():
        path.write_text(text)
    context = json.loads((template / "cookiecutter.json").read_text())
    context[question].append(name)
    context["__prompts__"][question][name] = f"{name}: pick it to try the steps"
    (template / "cookiecutter.json").write_text(json.dumps(context, indent=2))


def test_copies_of_all_choices_under_other_names_render_the_same_projects(template: Path) -> None:
    """So no file outside its folder names a choice, and nothing in the template takes it for one of the others."""
    names = {(question, choice): f"copy-of-{choice}" for question, choice in EXISTING}
    for (question, choice), name in names.items():
        add_choice(template, question, choice, {}, name)
    for number, answers in enumerate(mixed()):
        copies = {question: names.get((question, choice), choice) for question, choice in answers.items()}
        original = read_tree(render_copy(template, template.parent / f"original-{number}", **answers))
        copy = read_tree(render_copy(template, template.parent / f"copy-{number}", **copies))
        for question, choice in answers.items():
            if (question, choice) in names:
                line = f'{question} = "{choice}"\n'.encode()
                assert line in original["pyproject.toml"]
                renamed = f'{question} = "{copies[question]}"\n'.encode()
                original["pyproject.toml"] = original["pyproject.toml"].replace(line, renamed)
        assert copy == original, answers


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


@pytest.mark.long
def test_a_task_with_a_loss_of_its_own_is_compared_with_the_plain_loop(template: Path) -> None:
    """By the steps: the folder, the dialogue, and what the oracle has to know of it."""
    add_choice(template, "task", "digits", {"CLASSES = 10": "CLASSES = 1"})
    (template / "templates" / "task" / "new" / "task.py").write_text(REGRESSION)
    project = render_copy(template, template.parent / "out", task="new")
    for check in (["format", "--check"], ["check"]):
        run(BIN / "ruff", *check, "--no-cache", ".", cwd=project)
    numbers = template / "tests" / "runs" / "numbers"
    with (numbers / "oracle.py").open("a") as file:
        file.write(ITS_ORACLE)
    parity, before = numbers / "test_parity.py", "\n\n\ndef ranks("
    parity.write_text(parity.read_text().replace(before, f'\nTASKS["new"] = TASKS["digits"]{before}'))
    test = "test_a_killed_and_resumed_run_matches_a_plain_loop[ddp-new-2]"
    run(BIN / "pytest", "-q", f"tests/runs/numbers/test_parity.py::{test}", cwd=template)
