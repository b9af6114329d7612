"""Every line that only an accelerator reaches runs on a CPU: on devices without values, one rank after the other."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BIN, TEMPLATE, Bake, edit, render, run, weekly
from messages import differences, replay

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="g++ makes the library of devices.cpp, and is not installed"
    ),
]

FOLDER = TEMPLATE / "tests" / "runs" / "accelerators"
WORDS = "--train.max_steps 4 --train.log_every 2 --data.global_batch_size 32 --data.micro_batch_size 4".split()
SHORT = {
    "language": "--dataset.max_bytes 50000 --dataset.test_bytes 2000",
    "control": "--dataset.steps 8 --dataset.minibatches 1 --dataset.passes 1",
}
# The sizes of each strategy, by the number of ranks.
LAYOUTS: dict[str, dict[int, str]] = {
    "pipeline": {4: "--parallel.replicas 2", 8: "--parallel.replicas 2 --parallel.schedule Interleaved1F1B"},
    "tensor": {4: "--parallel.replicas 2", 8: "--parallel.replicas 4"},
    "mesh": {4: "--parallel.pipeline 2", 8: "--parallel.pipeline 2 --parallel.tensor 2"},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes PyTorch find devices."""
    path, installed = tmp_path_factory.mktemp("library") / "devices.so", Path(torch.__file__).parent
    places = (f"-I{installed}/include", f"-L{installed}/lib")
    words = ("-std=c++20", "-shared", "-fPIC", *places, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
    run("g++", FOLDER / "devices.cpp", "-o", path, *words, cwd=FOLDER)
    return path


@pytest.fixture(scope="module")
def checkpoint(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the default project, from which every strategy resumes."""
    folder = tmp_path_factory.mktemp("first")
    start(render(folder), library, folder / "result", 1)
    (path,) = folder.glob("result-run0/checkpoints/*.pt")
    return path


def start(project: Path, library: Path, output: Path, world_size: int, *words: str) -> dict[int, Any]:
    """Train a project as all ranks; returns what each did."""
    command = (BIN / "python", FOLDER / "run_ranks.py", project, str(world_size), output, *WORDS, *words)
    run(*command, cwd=project, DEVICES=str(library))
    results: dict[int, Any] = pickle.loads(output.read_bytes())
    return results


def check(results: dict[int, Any], strategy: str, task: str) -> None:
    """Check what ranks did: where their tensors are, when they waited for a device, and what they sent."""
    for rank, result in results.items():
        assert "error" not in result, f"rank {rank}: {result['error']}"
        count = 2 if strategy == "model_parallel" else 1
        own = [f"cuda:{index}" for index in range(count * rank, count * (rank + 1))]
        assert result["places"] == {"batches": {own[0]}, "parameters": {*own}, "moments": {*own}}, (rank, own)
        if task != "control":  # Its environments, on the host, wait for actions in each step.
            first_step, second_step, *steps = result["waits"]["step"]
            # In the first step, stages agree on whether shapes may differ; in the second, DDP on the order of buckets.
            assert len(first_step) <= 4 and all("schedule.step" in line for line in first_step), (rank, first_step)
            assert len(second_step) <= 2 and all("self.ddp(" in line for line in second_step), (rank, second_step)
            assert not any(steps), (rank, steps)
        lines = [line for lines in result["waits"]["log"] for line in lines]
        expected = ("losses.py:", "scaler.get_scale", "total != self.state_before")
        assert all(any(part in line for part in expected) for line in lines), (rank, lines)
        assert len(result["kept"]) == 1 and result["kept"][0] <= 0, (rank, result["kept"])
    messages = {rank: result["messages"] for rank, result in results.items()}
    assert not differences(messages)
    assert not replay(messages)


STRATEGIES, TASKS = ("ddp", "fsdp", "model_parallel", "pipeline", "tensor", "mesh"), ("digits", "language")
PRECISE = "--train.precision bf16 --train.activation_checkpointing true"
CASES = [
    ("ddp", "digits", 4, "--train.precision fp16"),
    ("fsdp", "language", 4, "--train.precision bf16 --checkpoint.format sharded"),
    ("pipeline", "language", 4, "--train.activation_checkpointing true"),
    ("tensor", "digits", 4, "--train.precision bf16"),
    *weekly(
        *((strategy, task, world_size, "") for strategy in STRATEGIES for task in TASKS for world_size in (1, 4)),
        # Eight ranks of model parallelism would need sixteen devices.
        *((strategy, "digits", 8, "") for strategy in STRATEGIES if strategy != "model_parallel"),
        *((strategy, "digits", 4, PRECISE) for strategy in STRATEGIES),
        *((strategy, "control", 4, "") for strategy in ("ddp", "model_parallel")),
    ),
]


@pytest.mark.parametrize(("strategy", "task", "world_size", "words"), CASES)
def test_a_run_on_devices_is_sound(
    bake: Bake, library: Path, tmp_path: Path, strategy: str, task: str, world_size: int, words: str
) -> None:
    project = bake(parallelism=strategy, task=task)
    words = f"{words} {SHORT.get(task, '')} {LAYOUTS.get(strategy, {}).get(world_size, '')}"
    check(start(project, library, tmp_path / "result", world_size, *words.split()), strategy, task)


@pytest.mark.parametrize("strategy", ["model_parallel", "mesh", *weekly("ddp", "fsdp", "pipeline", "tensor")])
def test_a_run_resumes_on_devices(bake: Bake, library: Path, checkpoint: Path, tmp_path: Path, strategy: str) -> None:
    words = f"--checkpoint.resume {checkpoint} --train.max_steps 6 {LAYOUTS.get(strategy, {}).get(4, '')}"
    check(start(bake(parallelism=strategy), library, tmp_path / "result", 4, *words.split()), strategy, "digits")


# Features between two layers stay a DTensor, and some of them are dropped.
DROPPED = {
    ("plan.py", '"up": columns, "down": rows}'): '"up": ColwiseParallel(use_local_output=False), "down": rows}',
    ("model.py", "hidden = F.gelu(self.up(self.norm2(features)))"): "hidden = F.gelu(self.up(self.norm2(features)))\n"
    "        hidden = F.dropout(hidden, 0.1, self.training)",
}


def test_stages_may_draw_random_numbers_on_shards(bake: Bake, library: Path, tmp_path: Path) -> None:
    project = bake(parallelism="mesh", task="language")
    edit(project, DROPPED)
    words = f"--parallel.pipeline 2 --parallel.tensor 2 {SHORT['language']}"
    check(start(project, library, tmp_path / "result", 4, *words.split()), "mesh", "language")
