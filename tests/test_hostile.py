"""Damaged files, crafted files and nonsense are refused in one line or survived: never run, never half used.

The cases are in `hostile.py` and `nonsense.py`, each of which tries hundreds in one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHOICES, SHARED, Bake, run

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent


def outcome(project: Path, folder: Path, program: str, *words: str) -> Any:
    """Run a program in one process of a project, and return how often each outcome was seen; none may be wrong.

    With ``-s``, pytest shows these figures.
    """
    arguments = [words[0], folder, *words[1:]] if program == "nonsense.py" else [folder, *words]
    environment = {"PYTHONPATH": f"src:{TESTS}", "CUDA_VISIBLE_DEVICES": ""}
    run(sys.executable, TESTS / program, "my_experiment", *arguments, cwd=project, **environment)
    found = json.loads((folder / "outcome.json").read_text())
    print(program, *words, json.dumps(found["outcomes"], indent=1))
    assert not found["wrong"], "\n".join(found["wrong"])
    return found


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_damaged_and_crafted_checkpoints_are_rejected_or_harmless(plain: Path, tmp_path: Path, form: str) -> None:
    counts = outcome(plain, tmp_path, "hostile.py", form)["outcomes"]
    assert counts["cut: one before"] == (100 if form == "full" else 300)
    assert counts["flip: one before"] > 100 and counts["flip: the same"] > 10
    assert counts["craft: one before"] > 200 and counts["attack: one before"] > 10
    assert counts["craft for evaluate: refused"] > 10 and counts["attack for evaluate: refused"] > 10


def test_odd_files_weights_and_metrics_are_rejected_or_harmless(plain: Path, tmp_path: Path) -> None:
    counts = outcome(plain, tmp_path, "hostile.py", "other")["outcomes"]
    assert counts["weights: refused"] > 100 and counts["exported: refused"] > 500 and counts["metrics: survived"] > 500


@pytest.mark.parametrize(
    ("parallelism", "task"),
    [*((name, "digits") for name in CHOICES["parallelism"]), ("ddp", "language"), ("ddp", "control")],
)
def test_nonsense_is_refused_in_one_line(baked: Bake, tmp_path: Path, parallelism: str, task: str) -> None:
    """With the default choices, all settings are judged, and what is accepted is trained with."""
    project, trains = baked(parallelism=parallelism, task=task), (parallelism, task) == ("ddp", "digits")
    left_out = "" if trains else " ".join(SHARED)
    found = outcome(project, tmp_path, "nonsense.py", task, left_out, *(["train"] if trains else []))
    counts = found["outcomes"]
    assert counts["variable: refused"] > 300 and counts["setting: accepted"] > 5
    # A number is no text, and no text a number.
    assert not [name for name, value in found["accepted"] if value in ("{a: 1}", ".nan") and name.startswith("optim.")]
    if trains:
        assert counts["run: finished"] > 50
