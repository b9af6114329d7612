"""No rank ever holds the whole model, unless it keeps it: not while it is built, and not while it is loaded.

The ranks measure what they hold, and compare their values with a whole build, in `start.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, leave_to_weekly, run

pytestmark = pytest.mark.slow
START = Path(__file__).with_name("start.py")
# What a start allocates besides the model: counters, sums of losses.
SLACK = 16 * 1024


def observe(project: Path, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank observed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run(*launcher, START, "my_experiment", folder, cwd=project, PYTHONPATH="src", CUDA_VISIBLE_DEVICES="")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


SPLIT = [(name, ranks) for name in ("fsdp", "tensor", "pipeline") for ranks in (4, 2)]


@pytest.mark.parametrize(("parallelism", "ranks"), leave_to_weekly(SPLIT, [split for split in SPLIT if split[1] == 2]))
def test_a_rank_holds_its_part_and_one_block(baked: Bake, tmp_path: Path, parallelism: str, ranks: int) -> None:
    for seen in observe(baked(parallelism=parallelism, task="language"), tmp_path, ranks):
        share = seen["share"]
        assert share < 1.1 * seen["whole"] / ranks, seen  # What tensor parallelism replicates is small.
        assert seen["start"] <= share + seen["block"] + SLACK, seen
        assert seen["same values"]
        for form in ("full", "sharded"):
            # The optimizer's state is created with gradients of zero, then filled.
            assert seen[f"resume, {form}"] < 3.5 * share, seen
        weights = [seen[name] for name in seen if name.startswith("weights")]
        assert len(weights) == 3 and max(weights) < 0.5 * share, seen


@pytest.mark.parametrize(("parallelism", "ranks"), [("ddp", 2), ("model_parallel", 2), ("data_parallel", 1)])
def test_the_cpu_holds_one_block_of_a_model_on_accelerators(
    baked: Bake, tmp_path: Path, parallelism: str, ranks: int
) -> None:
    for seen in observe(baked(parallelism=parallelism, task="language"), tmp_path, ranks):
        assert seen["host"] <= seen["block"] + SLACK and seen["same values"], seen
