"""Settings and layouts that cannot work are rejected before any rank starts, in one line that says what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CHOICES, Bake, run
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


# Settings, as YAML so that a value may be null, and what the error names. Each was once a traceback, or trained.
NONSENSE = [
    ("model: {norm: null}", "model.norm is null"),
    ("checkpoint: {keep: null}", "checkpoint.keep is null"),
    ("checkpoint: {keep: }", "checkpoint.keep is null"),
    ("optim: {lr: null}", "optim.lr is null"),
    ("run: {dir: null}", "run.dir is null"),
    ("optim: null", "optim is null"),
    ("train: {max_steps: 0}", "does not conform to restriction v>0; or null"),
    ("optim: {betas: null}", "optim.betas is null"),
    ("optim: {lr: .nan}", "optim.lr"),
    ("run: {dir: ''}", "run.dir is empty"),
    ("checkpoint: {resume: ''}", "checkpoint.resume is empty"),
    (f"run: {{dir: {'x' * 301}}}", "run.dir is too long"),
    (f"run: {{dir: {'x/' * 3000}}}", "run.dir is too long"),
    ('run: {dir: "a\\0b"}', "run.dir contains a zero byte"),
    (f"checkpoint: {{resume: {'y' * 20000}}}", "checkpoint.resume is too long"),
    ("distributed: {init_method: nan}", "distributed.init_method is nan"),
    ("distributed: {init_method: 'tcp://host'}", "distributed.init_method is tcp://host"),
    ("distributed: {init_method: 'tcp://host:99999'}", "distributed.init_method is tcp://host:99999"),
    ("distributed: {timeout_seconds: 1e30}", "distributed.timeout_seconds is 1e+30"),
    ("distributed: {startup_timeout_seconds: 1e-300}", "a timeout of distributed is 1e-300 seconds"),
    ("parallel: {bucket_cap_mb: 1e30}", "parallel.bucket_cap_mb is 1e+30"),
    ("dataset: {max_shift: 1000000}", "dataset.max_shift is 1000000"),
    ("data: {eval_batch_size: 9223372036854775808}", "data.eval_batch_size is 9.2"),
    (f"model: {{norm: {'z' * 20000}}}", "model.norm"),
]


@pytest.mark.parametrize(("settings", "problem"), NONSENSE, ids=[settings[:60] for settings, _ in NONSENSE])
def test_nonsense_is_rejected_in_one_short_line_by_launcher_and_rank(
    plain: Path, tmp_path: Path, settings: str, problem: str
) -> None:
    file = tmp_path / "nonsense.yaml"
    file.write_text(settings)
    words = ("train", *SHORT, "--config", file)
    launched = run(plain / "scripts/launch.sh", *words, cwd=tmp_path, expect=2).stderr
    assert launched.startswith("error: ") and launched.count("\n") == 1 and problem in launched, launched
    assert len(launched) < 1100
    assert alone(plain, *words, expect=2).stderr == launched
    assert [path.name for path in tmp_path.iterdir()] == ["nonsense.yaml"]


@pytest.mark.parametrize("launcher", CHOICES["launcher"])
@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("NPROC=0", "NPROC is '0'"),
        ("NODES=abc", "NODES is 'abc', but 'NODE_RANK' is not set"),
        ("NODES=2", "'NODE_RANK' is not set"),
        ("NODES=0 NODE_RANK=0 HEAD=localhost PORT=29400", "NODES is '0'"),
        ("NODES=2 NODE_RANK=2 HEAD=localhost PORT=29400", "NODE_RANK is '2'"),
        ("NODES=2 NODE_RANK=0 HEAD=localhost PORT=abc", "PORT is 'abc'"),
        ("NODES=2 NODE_RANK=0 HEAD=localhost PORT=0", "PORT is '0'"),
        ("STOP_SECONDS=x", "STOP_SECONDS is 'x'"),
        ("STOP_CODE=x", "STOP_CODE is 'x'"),
        ("SLURM_RESTART_COUNT=x", "SLURM_RESTART_COUNT is 'x'"),
    ],
)
def test_a_variable_of_the_launch_script_that_cannot_work_is_rejected(
    baked: Bake, tmp_path: Path, launcher: str, variables: str, problem: str
) -> None:
    environment = dict(word.split("=") for word in variables.split())
    script = baked(launcher=launcher) / "scripts/launch.sh"
    rejected = run(script, "train", *SHORT, "--run.dir", tmp_path / "run", cwd=tmp_path, expect=2, **environment).stderr
    assert rejected.startswith("error: ") and rejected.count("\n") == 1 and problem in rejected, rejected
    assert not (tmp_path / "run").exists()


def test_restarts_that_are_no_number_are_rejected(plain: Path, tmp_path: Path) -> None:
    words = ("train", *SHORT, "--run.dir", tmp_path / "run")
    rejected = run(plain / "scripts/launch.sh", *words, cwd=tmp_path, expect=2, MAX_RESTARTS="x").stderr
    assert rejected == "error: MAX_RESTARTS is 'x'; give a whole number, 0 or more\n"


SLURM = (
    "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 SLURM_STEP_NODELIST=n1 SLURM_JOB_ID=1 "
    "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0"
)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("WORLD_SIZE=2", "RANK is not set"),
        ("RANK=0", "WORLD_SIZE"),
        ("RANK=x WORLD_SIZE=2", "RANK is set"),
        ("RANK=2 WORLD_SIZE=2", "contradict"),
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=abc", "MASTER_PORT"),
        (
            f"{SLURM} SLURM_NODEID=9",
            "SLURM_STEP_NUM_TASKS is set, but the launcher's other variables do not match it: no node 9",
        ),
        (f"{SLURM} MASTER_PORT=abc", "MASTER_PORT is 'abc'"),
    ],
)
def test_a_rank_rejects_variables_of_a_launcher_that_cannot_work(
    plain: Path, tmp_path: Path, variables: str, problem: str
) -> None:
    environment = dict(word.split("=") for word in variables.split())
    rejected = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "run", expect=2, **environment).stderr
    assert rejected.startswith("error: ") and rejected.count("\n") == 1 and problem in rejected, rejected
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("answers", "nproc", "settings", "problem", "suggestion"),
    [
        ({"parallelism": "fsdp"}, 4, "--parallel.replicas 3", "parallel.replicas", "[1, 2, 4]"),
        ({"parallelism": "fsdp"}, 2, "--model.norm batch --train.precision bf16", "model.norm", "train.precision fp32"),
        *[
            (
                {"parallelism": name},
                2,
                "--parallel.shard_replicas true --model.norm batch --train.precision bf16",
                "model.norm",
                "train.precision fp32",
            )
            for name in ("pipeline", "tensor")
        ],
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
