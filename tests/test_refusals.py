"""Settings and layouts that cannot work are rejected before any rank starts, in one line that says what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, run
from runs import SHORT, alone


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("--parallel.static_graph true --train.microbatches 2", "parallel.static_graph"),
        ("--run.seed 4294967296", "run.seed"),
        ("--optim.betas [0.9,1.5]", "optim.betas"),
        ("--distributed.backend mpi", "distributed.backend"),
        ("--distributed.backend nccl", "distributed.backend"),
        ("--model.width 12", "model.width"),
        ("--data.global_batch_size 2000", "data.global_batch_size"),
        ("--optim.lr .inf", "optim.lr"),
        ("--run.dir /proc/nowhere", "/proc/nowhere"),
    ],
)
def test_an_invalid_setting_is_rejected_in_one_line(plain: Path, tmp_path: Path, settings: str, problem: str) -> None:
    rejected = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "run", *settings.split(), expect=2)
    assert problem in rejected.stderr and rejected.stderr.count("\n") == 1, rejected.stderr


@pytest.mark.parametrize(
    ("answers", "nproc", "settings", "problem", "suggestion"),
    [
        ({"parallelism": "fsdp"}, 4, "--parallel.replicas 3", "parallel.replicas", "[1, 2, 4]"),
        ({"parallelism": "fsdp"}, 2, "--model.norm batch --train.precision bf16", "model.norm", "train.precision fp32"),
        ({"parallelism": "pipeline"}, 4, "--parallel.replicas 3", "parallel.replicas", "[1, 2, 4]"),
        ({"parallelism": "pipeline"}, 9, "", "9 stages", "at most 8 rank(s)"),
        ({"parallelism": "pipeline"}, 4, "--train.microbatches 2", "train.microbatches", "give 4 or more"),
        ({"parallelism": "pipeline"}, 2, "--parallel.schedule DualPipeV --train.microbatches 2", "4 stages", "GPipe"),
        ({"parallelism": "pipeline"}, 2, "--parallel.schedule ZBVZeroBubble --train.compile true", "train.compile", ""),
        (
            {"parallelism": "pipeline"},
            2,
            "--parallel.schedule GPipe --parallel.stages_per_rank 2",
            "stages_per_rank",
            "1",
        ),
        ({"parallelism": "pipeline"}, 2, "--parallel.split [4,5]", "parallel.split", "2 numbers whose sum is 8"),
        ({"parallelism": "pipeline"}, 2, "--data.global_batch_size 60", "data.global_batch_size", "56 or 64"),
        ({"parallelism": "tensor"}, 4, "--parallel.replicas 3", "parallel.replicas", "[1, 2, 4]"),
        (
            {"parallelism": "tensor"},
            2,
            "--parallel.sequence_parallel true",
            "parallel.sequence_parallel",
            "leave it off",
        ),
        ({"parallelism": "tensor", "task": "language"}, 3, "", "model.heads", "[1, 2, 4]"),
        ({"parallelism": "model_parallel"}, 2, "--parallel.devices 9", "parallel.devices", "8 blocks"),
        ({"parallelism": "data_parallel"}, 2, "", "one process", "NPROC=1"),
        ({"parallelism": "data_parallel"}, 1, "--train.compile true", "train.compile", "leave it off"),
    ],
)
def test_an_invalid_layout_is_rejected_in_one_line_with_a_suggestion(
    baked: Bake, tmp_path: Path, answers: dict[str, Any], nproc: int, settings: str, problem: str, suggestion: str
) -> None:
    arguments = (*SHORT, *settings.split(), "--run.dir", tmp_path / "run")
    rejected = run(
        baked(**answers) / "scripts/launch.sh", "train", *arguments, cwd=tmp_path, NPROC=str(nproc), expect=2
    )
    assert rejected.stderr.startswith("error: ") and rejected.stderr.count("\n") == 1, rejected.stderr
    assert problem in rejected.stderr and suggestion in rejected.stderr, rejected.stderr
    assert not (tmp_path / "run").exists()
