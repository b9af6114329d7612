"""Each setting of a rendered project acts, and `effects.py` has a function that shows it for each."""

from __future__ import annotations

import ast
import itertools
import json
import sys
from pathlib import Path

import pytest
from conftest import CHOICES, SHARED, Bake, run
from runs import world_size

EFFECTS, CONTROL = (Path(__file__).with_name(f"{name}.py") for name in ("effects", "control_effects"))
# Either task under some of the strategies; layers of the language model can also be sharded along the sequence.
COMBINATIONS = [
    (name, "language" if name in ("fsdp", "pipeline", "tensor") else "digits") for name in CHOICES["parallelism"]
] + [("ddp", "control")]

LIST_SETTINGS = """
from dataclasses import fields
from my_experiment.config import sections
print(*(f"{name}.{field.name}" for name, kind in sections().items() for field in fields(kind)))
"""


def list_shown(path: Path) -> set[str]:
    """Return the settings that have a function in a file: the arguments of its decorators."""
    nodes = ast.walk(ast.parse(path.read_text()))
    decorators = [each for node in nodes if isinstance(node, ast.FunctionDef) for each in node.decorator_list]
    words = [word for each in decorators if isinstance(each, ast.Call) for word in each.args]
    return {word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}


def test_each_setting_has_an_effect_to_show(baked: Bake) -> None:
    """At once, what the next test would say after a launch; and no function is left of a setting that is gone."""
    settings = set()
    for parallelism, task in itertools.product(CHOICES["parallelism"], CHOICES["task"]):
        project = baked(parallelism=parallelism, task=task)
        settings |= set(run(sys.executable, "-c", LIST_SETTINGS, cwd=project, PYTHONPATH="src").stdout.split())
    shown = list_shown(EFFECTS) | list_shown(CONTROL)
    assert not settings - shown, f'add a function to {EFFECTS.name}, with @shows("NAME"), for {settings - shown}'
    assert not shown - settings, f"{EFFECTS.name} shows settings that no project has: {shown - settings}"


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "task"), COMBINATIONS)
def test_each_setting_acts(bake: Bake, tmp_path: Path, parallelism: str, task: str) -> None:
    project, ranks = bake(parallelism=parallelism, task=task), world_size(parallelism)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": ""}
    left_out = () if (parallelism, task) == ("ddp", "digits") else SHARED
    run(*launcher, EFFECTS, "my_experiment", task, tmp_path, *left_out, cwd=project, **environment)
    for rank in range(ranks):
        outcome = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name for name, found in outcome.items() if not found} == {
            name for name in outcome if name.split(".")[0] in left_out
        }
        problems = [f"{name}: {problem}" for name, found in outcome.items() for problem in found or [] if problem]
        assert not problems, "\n".join(problems)
