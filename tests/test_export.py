"""Exported weights: the project's commands take them, and any other program loads them as the README says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import Bake, leave_to_weekly, run
from documents import fences
from runs import SHORT, alone, launch
from safetensors import safe_open

pytestmark = pytest.mark.slow
EXPORTS = [("fsdp", "control", "sharded"), ("tensor", "language", "full"), ("ddp", "digits", "full")]
CPU = ("--distributed.device", "cpu")
SAVE = '\nimport torch\ntorch.save(model.state_dict(), "loaded.pt")\n'
TIED = """
import sys
from pathlib import Path
import torch
from my_experiment.checkpoint import exported
weight = torch.randn(4, 3)
model = {"embedding": weight, "head": weight, "transposed": weight.T, "part": weight[1:3], "steps": torch.tensor(7)}
progress = {"step": 1, "epoch": 0, "samples": 0}
exported.write(Path(sys.argv[1]), {"config": {}, "progress": progress, "tensors": []}, model)
loaded = exported.read(Path(sys.argv[1]))["model"]
print(loaded.keys() == model.keys() and all(torch.equal(loaded[name], model[name]) for name in model))
"""


def evaluate(project: Path, path: Path) -> dict[str, float]:
    """Return the metrics of a checkpoint, or of exported weights."""
    record: dict[str, float] = json.loads(
        alone(project, "evaluate", *CPU, "--checkpoint", path).stdout.splitlines()[-1]
    )
    return record


@pytest.mark.parametrize(
    ("parallelism", "task", "kind"),
    leave_to_weekly(EXPORTS, EXPORTS[1:]),
)
def test_exported_weights_are_evaluated_and_loaded_elsewhere(
    baked: Bake, tmp_path: Path, parallelism: str, task: str, kind: str
) -> None:
    project, file = baked(parallelism=parallelism, task=task), tmp_path / "weights.safetensors"
    arguments = ("--checkpoint.format", kind, "--train.max_steps", "2", "--run.dir", tmp_path / "run")
    launch(project, "train", *SHORT, *arguments)
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    launch(project, "convert", "--checkpoint", checkpoint, "--output", file)
    assert evaluate(project, file) == evaluate(project, checkpoint)
    if task == "language":
        words = ("--generate.length", "9", *CPU, "--checkpoint")
        assert alone(project, "generate", *words, file).stdout == alone(project, "generate", *words, checkpoint).stdout

    with safe_open(file, framework="pt") as opened:  # Others get the file, and need not know where it was made.
        assert "cache" not in opened.metadata()["config"] and "runs" not in opened.metadata()["config"]
    (code,) = [code for code in fences((project / "README.md").read_text(), "python") if "load_file" in code]
    assert len([line for line in code.splitlines() if line and "import" not in line]) == 3
    run(sys.executable, "-c", code + SAVE, cwd=tmp_path, PYTHONPATH=str(project / "src"))
    alone(project, "convert", "--checkpoint", file, "--output", tmp_path / "weights.pt")
    loaded, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("loaded.pt", "weights.pt"))
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)

    # Only weights: nothing to resume from.
    refused = launch(project, "train", *SHORT, "--checkpoint.resume", file, expect=2).stderr
    assert "which has weights alone; start from them with --model.weights" in refused and refused.count("\n") == 1


def test_tensors_that_share_memory_are_exported(plain: Path, tmp_path: Path) -> None:
    result = run(sys.executable, "-c", TIED, tmp_path / "tied.safetensors", cwd=plain, PYTHONPATH="src")
    assert result.stdout.split() == ["True"]
