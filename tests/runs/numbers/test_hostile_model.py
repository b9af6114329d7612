"""A model with what breaks strategies is right under each on 4 ranks, killed and resumed, or refused by name."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHOICES, Bake, find_processes, launch, started, wait_until, weekly

pytestmark = pytest.mark.long

SETTINGS = {
    "run.seed": 7,
    "data.global_batch_size": 32,
    "dataset.path": argparse.__file__,
    "dataset.max_bytes": 21_000,
    "dataset.test_bytes": 4_500,
    "model.width": 32,
    "model.layers": 2,
    "model.heads": 4,
    "model.context": 32,
    "optim.warmup_steps": 2,
    "train.epochs": 2,
    "train.max_steps": 12,
    "data.micro_batch_size": 2,
    "train.log_every": 1,
    "train.eval_every": 6,
    "checkpoint.every_steps": 3,
    "distributed.device": "cpu",
}
WORDS = ["train", *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value)))]
# A mesh is a pipeline of groups of tensor ranks, data_parallel one process, and model_parallel DDP on several devices.
RARE = ("model_parallel", "pipeline", "tensor", "data_parallel", "mesh")
CASES = [name for name in CHOICES["parallelism"] if name not in RARE] + weekly(*RARE)
# What splits blocks, or moves them to several devices.
SPLITS_BLOCKS = ("fsdp", "model_parallel", "pipeline", "tensor", "mesh")
LAYOUTS = {"mesh": ["--parallel.pipeline", "2", "--parallel.tensor", "2"]}


def nproc_of(strategy: str, least: int = 4) -> int:
    """Return the number of ranks of a run: at least that of the parts of a mesh."""
    return {"data_parallel": 1, "mesh": 4}.get(strategy, least)


def hostile(baked: Bake, strategy: str, **constants: bool) -> Path:
    """Return a project of task=language with the hostile model."""
    project = baked(parallelism=strategy, task="language", project_name=f"Hostile {' '.join(constants)}".strip())
    text = Path(__file__).with_name("hostile_model.py").read_text()
    values = ", ".join(str(constants.get(name, False)) for name in ("TIED", "UNUSED"))
    next((project / "src").iterdir()).joinpath("model.py").write_text(
        text.replace("TIED, UNUSED = False, False", f"TIED, UNUSED = {values}")
    )
    return project


def content(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "step-00000012.pt", weights_only=True)


@pytest.fixture(scope="module")
def reference(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What DDP gives on 4 ranks, which compute the same micro-batches as under FSDP and model parallelism."""
    run = tmp_path_factory.mktemp("reference")
    launch(hostile(baked, "ddp"), *WORDS, "--run.dir", run, nproc=4)
    return content(run)


@pytest.mark.parametrize("strategy", ["fsdp", *weekly("ddp", *RARE)])
def test_a_killed_run_resumes_bitwise(baked: Bake, reference: dict[str, Any], tmp_path: Path, strategy: str) -> None:
    project, nproc = hostile(baked, strategy), nproc_of(strategy)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = [*WORDS, *LAYOUTS.get(strategy, [])]
    launch(project, *settings, "--run.dir", whole, nproc=nproc)
    words = (project / "scripts/launch.sh", *settings, "--run.dir", killed)
    with started(*words, cwd=project, NPROC=str(nproc), MARK=str(tmp_path)) as launcher:
        wait_until(lambda: (killed / "checkpoints" / "step-00000006.pt").exists() or launcher.poll(), "step 6")
        for pid in find_processes(f"MARK={tmp_path}"):
            os.kill(pid, signal.SIGKILL)
    launch(project, *settings, "--run.dir", killed, nproc=nproc)
    ours, theirs = content(killed), content(whole)
    for name, value in theirs["model"].items():
        assert torch.equal(ours["model"][name], value), name
    for name, state in theirs["optimizer"]["state"].items():
        assert all(torch.equal(ours["optimizer"]["state"][name][key], value) for key, value in state.items()), name
    assert theirs["model"]["block1.mask"].isinf().any() and "block1.angles" not in theirs["model"]
    # A step has 16 micro-batches, of which a rank computes those of its local batch.
    local_batches = 4 if strategy in ("ddp", "model_parallel", "fsdp") else 1
    assert theirs["model"]["embedding.norm.num_batches_tracked"] == 12 * 16 // local_batches
    assert torch.equal(theirs["model"]["embedding.frozen"], reference["model"]["embedding.frozen"])
    if strategy in ("fsdp", "model_parallel"):
        # Ranks take turns under fsdp, so running statistics have seen other micro-batches.
        others = ("mask", "running_mean", "running_var") if strategy == "fsdp" else ("mask",)
        for name, value in reference["model"].items():
            if not name.endswith(others):
                difference = (theirs["model"][name] - value).float().norm()
                assert difference <= 1e-5 * value.float().norm(), name


@pytest.mark.parametrize("strategy", CASES)
def test_shared_weights_stay_shared_or_are_refused_by_name(baked: Bake, tmp_path: Path, strategy: str) -> None:
    project, refused = hostile(baked, strategy, TIED=True), strategy in SPLITS_BLOCKS
    words = (*WORDS, *LAYOUTS.get(strategy, []), "--run.dir", tmp_path)
    result = launch(project, *words, nproc=nproc_of(strategy, 2), code=2 if refused else 0)
    if refused:
        assert "linear.weight" in result.stderr and result.stderr.startswith("error: "), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
    else:
        model = content(tmp_path)["model"]
        assert torch.equal(model["head.linear.weight"], model["embedding.byte.weight"])


@pytest.mark.parametrize("strategy", CASES)
def test_an_unused_parameter_is_refused_by_name_unless_it_may_be(baked: Bake, tmp_path: Path, strategy: str) -> None:
    project, nproc = hostile(baked, strategy, UNUSED=True), nproc_of(strategy, 2)
    words = [*WORDS, *LAYOUTS.get(strategy, [])]
    result = launch(project, *words, "--run.dir", tmp_path / "refused", nproc=nproc, code=2)
    # Under pipeline parallelism, only one rank has the parameter, and the others name that rank and its reason.
    assert all("head.unused" in line for line in result.stderr.splitlines()) and result.stderr, result.stderr
    launch(project, *words, "--run.dir", tmp_path / "run", "--train.allow_unused", "true", nproc=nproc)
    assert not content(tmp_path / "run")["model"]["head.unused"].any()
