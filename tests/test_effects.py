"""Each setting of a rendered project acts, and `effects.py` has a function that shows it for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import CHOICES, Bake, run
from runs import world_size

EFFECTS = Path(__file__).with_name("effects.py")
# Either task under some of the strategies; layers of the language model can also be sharded along the sequence.
COMBINATIONS = [
    (name, "language" if name in ("fsdp", "pipeline", "tensor") else "digits") for name in CHOICES["parallelism"]
] + [("ddp", "control")]


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "task"), COMBINATIONS)
def test_each_setting_acts(bake: Bake, tmp_path: Path, parallelism: str, task: str) -> None:
    project, ranks = bake(parallelism=parallelism, task=task), world_size(parallelism)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": ""}
    run(*launcher, EFFECTS, "my_experiment", task, tmp_path, cwd=project, **environment)
    for rank in range(ranks):
        outcome = json.loads((tmp_path / f"{rank}.json").read_text())
        unknown = [name for name, problems in outcome.items() if problems is None]
        assert not unknown, f"{EFFECTS.name} has no function that shows what these settings do: {unknown}"
        problems = [f"{name}: {problem}" for name, found in outcome.items() for problem in found if problem]
        assert not problems, "\n".join(problems)
