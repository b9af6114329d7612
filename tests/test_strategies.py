"""Every way to split the work gives the result of one process, goes on from every other, and refuses what cannot be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHOICES, Bake, run
from runs import SHORT, alone, checkpoints, launch, losses, plant, weights

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
Layout = tuple[str, str, int, str]
# Ways to lay out the work: task, strategy, ranks, settings. The tests of the rendered projects look at every strategy
# and task in its plainest layouts; these are others.
LAYOUTS: list[Layout] = [
    ("digits", "ddp", 4, "--parallel.static_graph true"),
    ("digits", "ddp", 2, "--parallel.find_unused_parameters true --parallel.bucket_cap_mb 0.1 --train.microbatches 2"),
    ("digits", "fsdp", 4, "--parallel.reshard_after_forward false --train.microbatches 2"),
    ("digits", "fsdp", 2, "--parallel.cpu_offload true --train.activation_checkpointing true --data.num_workers 1"),
    ("digits", "model_parallel", 4, "--parallel.devices 3 --train.activation_checkpointing true"),
    ("language", "model_parallel", 2, "--parallel.split [3,5]"),
    *[("digits", "pipeline", 4, f"--parallel.replicas 2 --parallel.schedule {schedule}") for schedule in SCHEDULES],
    ("language", "pipeline", 4, "--parallel.schedule InterleavedZeroBubble --train.activation_checkpointing true"),
    ("digits", "pipeline", 2, "--parallel.split [3,5] --train.activation_checkpointing true"),
    ("digits", "tensor", 4, "--train.activation_checkpointing true"),
    ("language", "tensor", 4, "--parallel.replicas 2 --parallel.sequence_parallel true"),
    ("digits", "data_parallel", 1, "--train.microbatches 2"),
]


def ranks(parallelism: str, wanted: int) -> int:
    """Ranks to start: one process is all that data_parallel has."""
    return 1 if parallelism == "data_parallel" else wanted


# For each strategy, the layout on four ranks from whose checkpoint every other one goes on.
FIRST = {
    how: (task, how, n, more) for task, how, n, more in reversed(LAYOUTS) if task == "digits" and n == ranks(how, 4)
}


@pytest.fixture(scope="module")
def references(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each task, a short run in one process."""
    runs = {task: tmp_path_factory.mktemp(task) for task in CHOICES["task"]}
    for task, folder in runs.items():
        alone(baked(task=task), "train", *SHORT, "--run.dir", folder)
    return runs


@pytest.fixture(scope="module")
def alone_losses(references: dict[str, Path]) -> list[float]:
    """The losses of a short run with the digits, in one process."""
    return losses(references["digits"])


@pytest.fixture(scope="module")
def trained(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """Make a short run of a layout, with a checkpoint in its middle, once; gives the run directory."""
    runs: dict[Layout, Path] = {}

    def train(layout: Layout) -> Path:
        if layout not in runs:
            task, parallelism, nproc, settings = layout
            runs[layout] = tmp_path_factory.mktemp(parallelism)
            words = (*settings.split(), "--checkpoint.every_steps", "3", "--run.dir", runs[layout])
            launch(baked(parallelism=parallelism, task=task), "train", *SHORT, *words, nproc=nproc)
        return runs[layout]

    return train


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(map(str, layout)))
def test_a_layout_gives_the_result_of_one_process(
    trained: Callable[[Layout], Path], references: dict[str, Path], layout: Layout
) -> None:
    folder, reference = trained(layout), references[layout[0]]
    assert losses(folder) == pytest.approx(losses(reference), rel=TOLERANCE)
    ours, expected = weights(folder), weights(reference)
    assert ours.keys() == expected.keys()
    assert all((ours[name] - expected[name]).norm() <= TOLERANCE * expected[name].norm() for name in ours)


@pytest.mark.parametrize("first", CHOICES["parallelism"])
@pytest.mark.parametrize("then", CHOICES["parallelism"])
def test_a_run_goes_on_under_another_strategy_and_number_of_ranks(
    baked: Bake,
    trained: Callable[[Layout], Path],
    alone_losses: list[float],
    tmp_path: Path,
    first: str,
    then: str,
) -> None:
    half = trained(FIRST[first]) / "checkpoints" / "step-00000003.pt"
    words = ("--run.dir", tmp_path, "--checkpoint.resume", half)
    launch(baked(parallelism=then), "train", *SHORT, *words, nproc=ranks(then, 2))
    assert losses(tmp_path) == pytest.approx(alone_losses[3:], rel=TOLERANCE)


def test_a_run_goes_on_from_sharded_checkpoints(baked: Bake, alone_losses: list[float], tmp_path: Path) -> None:
    sharded = ("--checkpoint.format", "sharded", "--run.dir", tmp_path)
    legs = {"fsdp": (2, 1), "tensor": (4, 3), "pipeline": (2, 5), "data_parallel": (1, 6)}
    for parallelism, (nproc, steps) in legs.items():
        words = (*SHORT, *sharded, "--train.max_steps", str(steps))
        launch(baked(parallelism=parallelism), "train", *words, nproc=nproc)
    assert checkpoints(tmp_path)[-1] == "step-00000006.dcp"
    assert losses(tmp_path) == pytest.approx(alone_losses, rel=TOLERANCE)


@pytest.mark.parametrize(("kind", "suffix", "other"), [("full", ".pt", ".dcp"), ("sharded", ".dcp", ".pt")])
def test_a_run_goes_on_from_a_converted_checkpoint(
    baked: Bake, plain: Path, alone_losses: list[float], tmp_path: Path, kind: str, suffix: str, other: str
) -> None:
    words = ("--checkpoint.format", kind, "--train.max_steps", "3", "--run.dir", tmp_path / "a")
    alone(plain, "train", *SHORT, *words)
    saved, converted = tmp_path / "a" / "checkpoints" / f"step-00000003{suffix}", tmp_path / f"converted{other}"
    launch(plain, "convert", "--checkpoint", saved, "--output", converted)
    for output, named in [(converted, "there already"), (tmp_path / f"again{suffix}", f"ends in {other}")]:
        refused = alone(plain, "convert", "--checkpoint", saved, "--output", output, expect=2)
        assert named in refused.stderr and refused.stderr.count("\n") == 1
    words = ("--run.dir", tmp_path / "b", "--checkpoint.resume", converted)
    launch(baked(parallelism="fsdp"), "train", *SHORT, *words)
    assert losses(tmp_path / "b") == pytest.approx(alone_losses[3:], rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_full_disk_is_told_in_one_line(plain: Path, tmp_path: Path, kind: str) -> None:
    words = ["-m", "my_experiment", "train", *SHORT, "--checkpoint.format", kind, "--run.dir", str(tmp_path)]
    limited = ("bash", "-c", 'ulimit -f 1000 && exec "$@"', "limited", sys.executable, *words)  # No file above 1 MB.
    done = run(*limited, cwd=plain, PYTHONPATH="src", expect=2)
    assert "File too large" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not [name for name in checkpoints(tmp_path) if not name.endswith(".tmp")]


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
@pytest.mark.parametrize(
    "settings",
    [
        "--train.precision bf16 --train.compile true --train.max_steps 2 --model.depth 1",
        "--model.norm batch --train.microbatches 4 --train.clip_grad_norm null",
    ],
)
def test_settings_train(baked: Bake, tmp_path: Path, parallelism: str, settings: str) -> None:
    if parallelism == "data_parallel":
        settings = settings.replace("--train.compile true", "")  # Which it refuses, as another test sees.
    words = (*SHORT, *settings.split(), "--run.dir", tmp_path)
    launch(baked(parallelism=parallelism), "train", *words, nproc=ranks(parallelism, 2))
    told = losses(tmp_path)
    assert len(told) in (2, 6) and all(1.5 < loss < 3.5 for loss in told)


PLACES = {
    "fsdp": ("train.py", "        norm = None\n", "gradient = next(self.parallel.module.parameters()).grad.to_local()"),
    "tensor": ("parallel.py", "        if scaler.is_enabled():\n", "gradient = self.gradients()[-2].to_local()"),
    "pipeline": ("parallel.py", "        if scaler.is_enabled():\n", "gradient = self.gradients()[0]"),
}


@pytest.mark.parametrize("parallelism", PLACES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    broken = bake(parallelism=parallelism)
    name, line, gradient = PLACES[parallelism]
    fault = f"{gradient}\nif dist.get_rank() == 1 and not hasattr(self, 'planted'):\n"
    plant(broken, name, line, fault + "    self.planted = True\n    gradient.view(-1)[0] = torch.inf")
    words = "--train.max_steps 3 --train.precision fp16 --model.depth 1".split()
    launch(broken, "train", *SHORT, *words, "--run.dir", tmp_path)
    state = torch.load(tmp_path / "checkpoints" / "step-00000003.pt", weights_only=True)
    assert {float(entry["step"]) for entry in state["optimizer"].values()} == {2.0}
    assert state["scaler"]["scale"] == 2.0**15


@pytest.mark.parametrize(
    ("answers", "nproc", "settings", "named", "fits"),
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
def test_a_layout_that_cannot_be_is_refused_in_one_line_that_says_what_would_fit(
    baked: Bake, tmp_path: Path, answers: dict[str, Any], nproc: int, settings: str, named: str, fits: str
) -> None:
    words = (*SHORT, *settings.split(), "--run.dir", tmp_path / "run")
    done = run(baked(**answers) / "scripts/launch.sh", "train", *words, cwd=tmp_path, NPROC=str(nproc), expect=2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert named in done.stderr and fits in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_the_benchmark_tells_time_memory_and_bubble(baked: Bake, tmp_path: Path) -> None:
    words = ("benchmark", "--train.max_steps", "3", "--distributed.device", "cpu", "--run.dir", tmp_path / "run")
    told = json.loads(launch(baked(parallelism="pipeline"), *words).stdout.splitlines()[-1])
    assert told["samples_per_second"] > 0 and told["world_size"] == len(told["ranks"]) == 2
    for rank in told["ranks"]:
        parts = rank["ms_per_step"]
        assert 0 < parts["computing"] < parts["schedule"] <= parts["forward_backward"] < parts["whole_step"]
        assert rank["peak_memory_mib"] > 0
    assert told["bubble_expected"] == pytest.approx(1 / 9, abs=1e-4)  # Two stages, eight micro-batches.
    assert 0 < told["bubble_measured"] < 1
    assert not (tmp_path / "run").exists()
