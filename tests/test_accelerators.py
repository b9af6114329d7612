"""How many ranks `scripts/launch.sh` starts on machines with 0, 1, 2, ... accelerators, and what it rejects there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from accelerators import install
from conftest import Bake, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a backend that has as many accelerators as the variable ACCELERATORS says."""
    return install(tmp_path_factory.mktemp("backend"))


def launch(project: Path, backend: Path, accelerators: int, *settings: str, expect: int = 0, **options: str) -> str:
    """Start `train` as `make train` does on a machine with accelerators, and return what it printed on stderr."""
    options |= {"PYTHONPATH": str(backend), "ACCELERATORS": str(accelerators)}
    return run("scripts/launch.sh", "train", *settings, cwd=project, expect=expect, **options).stderr


def count_ranks(project: Path, backend: Path, accelerators: int, *settings: str) -> int:
    """Return how many ranks `scripts/launch.sh` would start on a machine with accelerators."""
    words = [sys.executable, "-m", "my_experiment", "--preflight", "train", *settings]
    options = {"PYTHONPATH": f"src:{backend}", "ACCELERATORS": str(accelerators)}
    return int(run(*words, cwd=project, **options).stdout.split()[0])


@pytest.mark.parametrize(
    ("parallelism", "accelerators", "ranks"),
    [
        ("ddp", 2, 2),
        ("model_parallel", 0, 2),
        ("model_parallel", 2, 1),
        ("model_parallel", 3, 1),
        ("data_parallel", 2, 1),
    ],
)
def test_a_machine_gets_as_many_ranks_as_fit(
    baked: Bake, backend: Path, parallelism: str, accelerators: int, ranks: int
) -> None:
    assert count_ranks(baked(parallelism=parallelism), backend, accelerators) == ranks


def test_a_rank_with_more_devices_than_the_machine_is_rejected(baked: Bake, backend: Path) -> None:
    project = baked(parallelism="model_parallel")
    rejected = launch(project, backend, 1, expect=2)
    assert rejected.startswith("error: 1 process(es) on this machine with 2 device(s) each, but 1 device(s)")
    assert rejected.count("\n") == 1 and "NPROC" not in rejected
    remedies = [remedy.split() for remedy in re.findall(r"\((--[^)]+)\)", rejected)]
    assert len(remedies) == 3
    assert [count_ranks(project, backend, 1, *remedy) for remedy in remedies] == [1, 2, 1]


def test_too_many_ranks_are_rejected_with_a_number_that_fits(baked: Bake, backend: Path) -> None:
    project = baked(parallelism="model_parallel", launcher="spawn")
    rejected = launch(project, backend, 3, expect=2, NPROC="2")
    assert "2 process(es) on this machine with 2 device(s) each, but 3 device(s): start fewer (NPROC=1)" in rejected


def test_stages_do_not_share_a_device(baked: Bake, backend: Path) -> None:
    """gloo, with which other strategies may, sends nothing from an accelerator to one rank alone."""
    project = baked(parallelism="pipeline")
    rejected = launch(project, backend, 1, expect=2, NPROC="2")
    assert "start fewer (NPROC=1), or use the CPU (--distributed.device cpu)\n" in rejected and "gloo" not in rejected
    rejected = launch(project, backend, 2, "--distributed.backend", "gloo", expect=2)
    assert rejected.startswith("error: distributed.backend is gloo, which sends no stage's output from an accelerator")
    assert rejected.count("\n") == 1
