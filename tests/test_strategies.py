"""Every strategy matches one process in many layouts, and saves and resumes the same checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CHOICES, ONE_STRATEGY, STRATEGIES, Bake, leave_to_weekly, run
from runs import (
    SHORT,
    TOLERANCE,
    alone,
    assert_close,
    assert_close_weights,
    checkpoints,
    launch,
    losses,
    plant,
    weights,
    world_size,
)

pytestmark = pytest.mark.slow

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
Layout = tuple[str, str, int, str]
# A layout: task, strategy, number of ranks, settings. The tests of the rendered projects cover the default layouts of
# every strategy and task; these are additional ones.
LAYOUTS: list[Layout] = [
    ("digits", "ddp", 4, "--parallel.static_graph true"),
    ("digits", "ddp", 2, "--parallel.find_unused_parameters true --parallel.bucket_cap_mb 0.1 --train.microbatches 2"),
    ("digits", "fsdp", 4, "--parallel.reshard_after_forward false --train.microbatches 2"),
    ("digits", "fsdp", 2, "--parallel.cpu_offload true --train.activation_checkpointing true --data.num_workers 1"),
    ("digits", "model_parallel", 4, "--parallel.devices 3 --train.activation_checkpointing true"),
    ("language", "model_parallel", 2, "--parallel.split [3,5]"),
    *[
        ("digits", "pipeline", 4, f"--parallel.replicas 2{shard} --parallel.schedule {schedule}")
        for shard in (" --parallel.shard_replicas true", "")
        for schedule in SCHEDULES
    ],
    ("language", "pipeline", 4, "--parallel.schedule InterleavedZeroBubble --train.activation_checkpointing true"),
    ("digits", "pipeline", 2, "--parallel.split [3,5] --train.activation_checkpointing true"),
    (
        "digits",
        "tensor",
        4,
        "--parallel.replicas 2 --parallel.shard_replicas true --train.activation_checkpointing true",
    ),
    ("digits", "tensor", 4, "--train.activation_checkpointing true"),
    ("language", "tensor", 4, "--parallel.replicas 2 --parallel.sequence_parallel true"),
    ("digits", "data_parallel", 1, "--train.microbatches 2"),
]


# Schedules that differ from another one in the order of the steps alone.
WEEKLY = [layout for layout in LAYOUTS if layout[-1].endswith((" LoopedBFS", " InterleavedZeroBubble", " DualPipeV"))]
# The rendered project's own tests have ZBVZeroBubble with sharded replicas.
WEEKLY += [
    layout for layout in LAYOUTS if "shard_replicas" in layout[-1] and layout[-1].endswith(("1F1B", "ZBVZeroBubble"))
]

# Of strategies whose replicas can be sharded.
TWO_DIMENSIONS = dict.fromkeys(("pipeline", "tensor"), "--parallel.replicas 2 --parallel.shard_replicas true".split())
# Per strategy: the layout whose checkpoint every strategy resumes. It has four ranks, or one for data_parallel.
SAVING_LAYOUTS = {
    strategy: (task, strategy, nproc, settings)
    for task, strategy, nproc, settings in reversed(LAYOUTS)
    if task == "digits" and nproc == world_size(strategy, 4)
}


@pytest.fixture(scope="module")
def reference_runs(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A short run in one process, per task, with a checkpoint of step 3."""
    runs = {task: tmp_path_factory.mktemp(task) for task in CHOICES["task"]}
    for task, folder in runs.items():
        alone(baked(task=task), "train", *SHORT, "--checkpoint.every_steps", "3", "--run.dir", folder)
    return runs


@pytest.fixture(scope="module")
def reference_losses(reference_runs: dict[str, Path]) -> list[float]:
    """The losses of a short run of the digits task in one process."""
    return losses(reference_runs["digits"])


@pytest.fixture(scope="module")
def train_layout(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """A function that trains a layout once and returns its run directory, which holds a checkpoint of step 3."""
    runs: dict[Layout, Path] = {}

    def train(layout: Layout) -> Path:
        if layout not in runs:
            task, parallelism, nproc, settings = layout
            runs[layout] = tmp_path_factory.mktemp(parallelism)
            arguments = (*settings.split(), "--checkpoint.every_steps", "3", "--run.dir", runs[layout])
            launch(baked(parallelism=parallelism, task=task), "train", *SHORT, *arguments, nproc=nproc)
        return runs[layout]

    return train


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.weekly] if layout in WEEKLY else []) for layout in LAYOUTS],
    ids=lambda layout: " ".join(map(str, layout)),
)
def test_a_layout_matches_one_process(
    train_layout: Callable[[Layout], Path], reference_runs: dict[str, Path], layout: Layout
) -> None:
    folder, reference = train_layout(layout), reference_runs[layout[0]]
    assert_close(folder, reference)


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_every_strategy_saves_the_checkpoint_of_one_process(
    train_layout: Callable[[Layout], Path], reference_runs: dict[str, Path], parallelism: str
) -> None:
    """With the next test: a run resumes the checkpoint of any other strategy, because all save and resume the same."""
    folders = train_layout(SAVING_LAYOUTS[parallelism]), reference_runs["digits"]
    ours, theirs = (torch.load(each / "checkpoints" / "step-00000003.pt", weights_only=True) for each in folders)
    assert ours.keys() == theirs.keys() and len(ours["rng"]) == SAVING_LAYOUTS[parallelism][2]
    assert ours["progress"].pop("run_id") != theirs["progress"].pop("run_id")
    for name in theirs.keys() - {"model", "optimizer", "rng", "config"}:
        assert ours[name] == theirs[name], name
    tensors = [
        {"model": state["model"]} | {f"optimizer {name}": values for name, values in state["optimizer"].items()}
        for state in (ours, theirs)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, expected in tensors[1].items():
        assert_close_weights(tensors[0][name], expected)


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_every_strategy_resumes_the_checkpoint_of_one_process(
    baked: Bake, reference_runs: dict[str, Path], tmp_path: Path, parallelism: str
) -> None:
    checkpoint = reference_runs["digits"] / "checkpoints" / "step-00000003.pt"
    layout = TWO_DIMENSIONS.get(parallelism, ())
    arguments = (*layout, "--run.dir", tmp_path, "--checkpoint.resume", checkpoint)
    launch(baked(parallelism=parallelism), "train", *SHORT, *arguments, nproc=4 if layout else world_size(parallelism))
    assert losses(tmp_path) == pytest.approx(losses(reference_runs["digits"])[3:], rel=TOLERANCE)
    assert_close_weights(weights(tmp_path), weights(reference_runs["digits"]))


def test_a_run_resumes_from_sharded_checkpoints(baked: Bake, reference_losses: list[float], tmp_path: Path) -> None:
    sharded = ("--checkpoint.format", "sharded", "--run.dir", tmp_path)
    segments = {"fsdp": (2, 1), "tensor": (4, 3), "pipeline": (4, 5), "data_parallel": (1, 6)}
    for parallelism, (nproc, steps) in segments.items():
        arguments = (*SHORT, *sharded, *TWO_DIMENSIONS.get(parallelism, ()), "--train.max_steps", str(steps))
        launch(baked(parallelism=parallelism), "train", *arguments, nproc=nproc)
    assert checkpoints(tmp_path)[-1] == "step-00000006.dcp"
    assert losses(tmp_path) == pytest.approx(reference_losses, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("parallelism", "nproc", "layout"),
    [("ddp", 2, ()), ("pipeline", 4, ("--parallel.replicas", "2")), ("fsdp", 4, ("--parallel.replicas", "2"))],
)
def test_a_rank_copies_only_its_share_of_what_others_hold_too(
    bake: Bake, tmp_path: Path, parallelism: str, nproc: int, layout: tuple[str, ...]
) -> None:
    """While ranks copy what they save, no rank trains."""
    project = bake(parallelism=parallelism)
    count = "held, copied = (sum(local_part(tensor).nbytes for tensor in each.values()) for each in (tensors, share))\n"
    count += f'open(f"{tmp_path}/{{dist.get_rank()}}", "w").write(f"{{held}} {{copied}}")'
    plant(project, "checkpoint/sharded.py", "    pending = state_dict_saver.async_save(", count)
    arguments = (*SHORT, *layout, "--checkpoint.format", "sharded", "--run.dir", tmp_path / "run")
    launch(project, "train", *arguments, nproc=nproc)
    for rank in range(nproc):
        held, copied = map(int, (tmp_path / str(rank)).read_text().split())
        assert 0.4 * held < copied < 0.6 * held


@pytest.mark.parametrize(("kind", "suffix", "other"), [("full", ".pt", ".dcp"), ("sharded", ".dcp", ".pt")])
def test_a_run_resumes_from_a_converted_checkpoint(
    baked: Bake, plain: Path, reference_losses: list[float], tmp_path: Path, kind: str, suffix: str, other: str
) -> None:
    arguments = ("--checkpoint.format", kind, "--train.max_steps", "3", "--run.dir", tmp_path / "a")
    alone(plain, "train", *SHORT, *arguments)
    saved, converted = tmp_path / "a" / "checkpoints" / f"step-00000003{suffix}", tmp_path / f"converted{other}"
    launch(plain, "convert", "--checkpoint", saved, "--output", converted)
    for output, message in [(converted, "exists already"), (tmp_path / f"again{suffix}", f"ends in {other}")]:
        rejected = alone(plain, "convert", "--checkpoint", saved, "--output", output, expect=2)
        assert message in rejected.stderr and rejected.stderr.count("\n") == 1
    arguments = ("--run.dir", tmp_path / "b", "--checkpoint.resume", converted)
    launch(baked(parallelism="fsdp"), "train", *SHORT, *arguments)
    assert losses(tmp_path / "b") == pytest.approx(reference_losses[3:], rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_full_disk_is_reported_in_one_line(plain: Path, tmp_path: Path, kind: str) -> None:
    arguments = ["-m", "my_experiment", "train", *SHORT, "--checkpoint.format", kind, "--run.dir", str(tmp_path)]
    # No file above 1 MB.
    command = ("bash", "-c", 'ulimit -f 1000 && exec "$@"', "limited", sys.executable, *arguments)
    failed = run(*command, cwd=plain, PYTHONPATH="src", expect=2)
    assert "File too large" in failed.stderr and failed.stderr.count("\n") == 1, failed.stderr
    assert not [name for name in checkpoints(tmp_path) if not name.endswith(".tmp")]


# Counts the graphs that are compiled; the eager backend makes that quick.
COMPILE = """
import sys, torch
from functools import partial
from torch._dynamo.utils import counters
torch.compile = partial(torch.compile, backend="eager")
from my_experiment.config import Config
from my_experiment.model import build_model
from my_experiment.splitting import prepare_blocks
config = Config()
config.train.compile, config.train.activation_checkpointing = (word in sys.argv for word in ("compile", "checkpoint"))
model = build_model(config.model)
prepare_blocks(model, config.train)
model(torch.randn(2, 1, 8, 8)).sum().backward()
print(counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize("words", [["compile"], ["compile", "checkpoint"], ["checkpoint"]], ids=" ".join)
def test_blocks_are_compiled_with_and_without_checkpointing(plain: Path, words: list[str]) -> None:
    graphs = int(run(sys.executable, "-c", COMPILE, *words, cwd=plain, PYTHONPATH="src").stdout)
    assert graphs >= 4 if "compile" in words else graphs == 0


FREEZE = """
from my_experiment.config import Config
from my_experiment.dataset import loss_fn
from my_experiment.model import build_model
from my_experiment.parallel import Parallel
from my_experiment.runtime import process_group
config = Config()
def build():
    model = build_model(config.model)
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    return model
with process_group(config.distributed, devices_per_rank=1) as process:
    module = Parallel(build, loss_fn, config, process).module
    print(*(name for name, parameter in module.named_parameters() if not parameter.requires_grad))
    del module
"""


@pytest.mark.parametrize("parallelism", STRATEGIES)
def test_frozen_parameters_stay_frozen(baked: Bake, parallelism: str) -> None:
    project = baked(parallelism=parallelism)
    frozen = run(sys.executable, "-c", FREEZE, cwd=project, PYTHONPATH="src").stdout.split()
    assert frozen == ["stem.conv.weight", "stem.norm.weight", "stem.norm.bias"]


def train_with(project: Path, folder: Path, settings: str, parallelism: str) -> list[float]:
    """Train a few steps, and return their losses, which have to be about those of a guess among ten digits."""
    arguments = (*SHORT, *settings.split(), "--run.dir", folder)
    launch(project, "train", *arguments, nproc=world_size(parallelism))
    logged = losses(folder)
    assert all(1.5 < loss < 3.5 for loss in logged)
    return logged


# PyTorch compiles for a minute; tests/effects.py compiles under every strategy, with a quicker backend.
@pytest.mark.parametrize("parallelism", ONE_STRATEGY)
def test_a_strategy_trains_compiled(baked: Bake, tmp_path: Path, parallelism: str) -> None:
    settings = "--train.precision bf16 --train.max_steps 2 --model.depth 1"
    if parallelism != "data_parallel":  # Which rejects it.
        settings += " --train.compile true"
    assert len(train_with(baked(parallelism=parallelism), tmp_path, settings, parallelism)) == 2


@pytest.mark.parametrize("parallelism", STRATEGIES)
def test_a_strategy_trains_with_batch_norm(baked: Bake, tmp_path: Path, parallelism: str) -> None:
    settings = "--model.norm batch --train.microbatches 4 --train.clip_grad_norm null"
    assert len(train_with(baked(parallelism=parallelism), tmp_path, settings, parallelism)) == 6


# Per strategy, and whether its replicas are sharded: the file and the line before which a gradient of rank 1 overflows,
# and how to get that gradient.
UNSCALE = "        self.scaler.unscale_(self.optimizer)  # Otherwise the scaled gradient would be clipped.\n"
ENABLED = "        if scaler.is_enabled():\n"
OVERFLOWS = {
    ("fsdp", False): ("train.py", UNSCALE, "gradient = next(self.parallel.module.parameters()).grad.to_local()"),
    ("tensor", False): ("parallel.py", ENABLED, "gradient = self.gradients()[-2].to_local()"),
    ("tensor", True): ("parallel.py", ENABLED, "gradient = self.gradients()[-2].to_local()"),
    ("pipeline", False): ("parallel.py", ENABLED, "gradient = self.gradients()[0]"),
    ("pipeline", True): ("parallel.py", ENABLED, "gradient = self.gradients()[0]"),
}


@pytest.mark.parametrize(("parallelism", "is_sharded"), OVERFLOWS)
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(
    bake: Bake, tmp_path: Path, parallelism: str, is_sharded: bool
) -> None:
    broken, layout = bake(parallelism=parallelism), TWO_DIMENSIONS[parallelism] if is_sharded else ()
    name, line, gradient = OVERFLOWS[parallelism, is_sharded]
    fault = f"{gradient}\nif torch.distributed.get_rank() == 1 and not hasattr(self, 'planted'):\n"
    plant(broken, name, line, fault + "    self.planted = True\n    gradient.view(-1)[0] = torch.inf")
    arguments = "--train.max_steps 3 --train.precision fp16 --model.depth 1".split()
    launch(broken, "train", *SHORT, *layout, *arguments, "--run.dir", tmp_path, nproc=4 if layout else 2)
    state = torch.load(tmp_path / "checkpoints" / "step-00000003.pt", weights_only=True)
    assert {float(entry["step"]) for entry in state["optimizer"].values()} == {2.0}
    assert state["scaler"]["scale"] == 2.0**15


BENCHMARKS = [("pipeline", "digits"), ("fsdp", "language"), ("ddp", "control")]
RARE = [("model_parallel", "digits"), ("tensor", "language"), ("data_parallel", "digits")]


@pytest.mark.parametrize(("parallelism", "task"), leave_to_weekly([*BENCHMARKS, *RARE], RARE))
def test_the_benchmark_reports_a_step(baked: Bake, tmp_path: Path, parallelism: str, task: str) -> None:
    steps = "12" if task == "control" else "3"  # Experience is collected every 12 steps.
    arguments = ("benchmark", "--train.max_steps", steps, "--distributed.device", "cpu", "--run.dir", tmp_path / "run")
    nproc = world_size(parallelism)
    done = launch(baked(parallelism=parallelism, task=task), *arguments, nproc=nproc)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["samples_per_second"] > 0 and printed["world_size"] == len(printed["ranks"]) == nproc
    assert ("tokens_per_second" in printed) == (task == "language")
    assert printed["flops_per_step"] > 0
    assert 0 < printed["saves"]["sharded"]["stall_seconds"] <= printed["saves"]["sharded"]["seconds"]
    assert len(printed["collectives"]) == (4 if nproc > 1 else 0)
    for rank in printed["ranks"]:
        times, parts = rank["ms_per_step"], rank["parts_ms"]
        assert 0 < times["backward"] < times["forward_backward"] < times["whole_step"]
        assert min(parts.values()) >= 0 and parts["forward"] > 0 and parts["backward"] > 0
        assert sum(parts.values()) == pytest.approx(times["whole_step"], rel=0.2)
        assert rank["peak_memory_mib"] > 0
    if parallelism == "pipeline":
        assert all(0 < each["ms_per_step"]["computing"] < each["ms_per_step"]["schedule"] for each in printed["ranks"])
        assert printed["bubble_expected"] == pytest.approx(1 / 9, abs=1e-4)  # Two stages, eight micro-batches.
        assert 0 < printed["bubble_measured"] < 1
    if task == "control":
        assert 0 < printed["stepping_share"] < printed["collecting_share"] < 1
        assert printed["environment_steps_per_second"] > 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "benchmark.json", "benchmark.png"}
