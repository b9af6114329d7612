"""Every strategy on 1, 2 and 4 ranks gives what a plain loop gives, killed and resumed, or changed within one run."""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import CHOICES, Bake, edit, launch, launch_and_kill, read_records, weekly

import check_answers

pytestmark = pytest.mark.independent

TOLERANCE = 1e-5  # How much a split may change a result, relative to it: what different rounding does, and some more.
STEPS = 20  # In two epochs or three, during which each rule of the oracle acts.
COMMON = {
    "run.seed": 7,
    "data.eval_batch_size": 50,
    "optim.lr": 4e-3,
    "optim.min_lr_ratio": 0.1,
    "optim.warmup_steps": 3,
    "optim.weight_decay": 0.1,
    "optim.betas": [0.8, 0.95],
    "optim.eps": 1e-6,
    "train.epochs": 3,
    "train.max_steps": STEPS,
    "train.log_every": 1,
    "train.eval_every": 10,
    "checkpoint.every_steps": 3,
    "distributed.device": "cpu",
}
TASKS = {
    "digits": {
        "data.global_batch_size": 128,
        "data.micro_batch_size": 8,
        "dataset.max_shift": 1,
        "model.width": 8,
        "model.depth": 2,
        "train.clip_grad_norm": 0.07,
    },
    "language": {
        "data.global_batch_size": 32,
        "data.micro_batch_size": 2,
        "dataset.path": argparse.__file__,
        "dataset.max_bytes": 21_000,
        "dataset.test_bytes": 4_500,
        "model.width": 32,
        "model.layers": 4,
        "model.heads": 4,
        "model.context": 32,
        "train.clip_grad_norm": 0.5,
    },
}


def ranks(parallelism: str) -> list[int]:
    """Return numbers of ranks that a strategy runs on; one that is a single process states so."""
    single = check_answers.read_json(f"templates/parallelism/{parallelism}/facts.json").get("nproc")
    return [int(single)] if single else [1, 2, 4]


def refused(task: str) -> set[str]:
    """Return the strategies that a task refuses."""
    return {*check_answers.read_json(f"templates/task/{task}/facts.json").get("refuses", {}).get("parallelism", {})}


def is_weekly(parallelism: str, task: str, nproc: int) -> bool:
    """Return whether a case is left to the weekly run; every time, strategies run digits on 4 ranks."""
    if parallelism == "mesh":  # By default, its ranks only shard; LAYOUTS has more.
        return True
    if parallelism == "data_parallel":
        return False
    if task == "language":
        return nproc != 2 or parallelism not in ("ddp", "fsdp")
    return parallelism != "ddp" and nproc != 4


CASES = [
    pytest.param(
        parallelism,
        task,
        nproc,
        id=f"{parallelism}-{task}-{nproc}",
        marks=[pytest.mark.weekly] * is_weekly(parallelism, task, nproc),
    )
    for parallelism in CHOICES["parallelism"]
    for task in TASKS
    if parallelism not in refused(task)
    for nproc in ranks(parallelism)
]
ORACLES: dict[str, oracle.Result] = {}


def arguments(task: str, **changes: Any) -> list[str]:
    """Return the settings of a task as arguments."""
    settings = COMMON | TASKS[task] | changes
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def expected(project: Path, task: str) -> oracle.Result:
    """Return what the runs of a task have to give; the model is the same under every strategy."""
    if task not in ORACLES:
        settings = COMMON | TASKS["language" if task == "letters" else task]
        ORACLES[task] = oracle.train(next((project / "src").iterdir()), task, settings)
    return ORACLES[task]


@pytest.mark.parametrize(("parallelism", "task", "nproc"), CASES)
def test_a_killed_and_resumed_run_matches_a_plain_loop(
    bake: Bake, tmp_path: Path, parallelism: str, task: str, nproc: int
) -> None:
    project, folder, step = bake(parallelism=parallelism, task=task), tmp_path / "run", random.randrange(4, STEPS - 5)
    print(f"killed after step {step}")
    words = ["train", *arguments(task), "--run.dir", folder]
    launch_and_kill(project, *words, when=lambda: last_step(folder) >= step, nproc=nproc, seconds=240)
    assert step <= last_step(folder) < STEPS
    resumed = launch(project, *words, nproc=nproc)
    assert any(f"step {before} of {STEPS}" in resumed.stdout for before in range(3, STEPS)), resumed.stdout
    assert_matches(folder, expected(project, task))
    assert "warning" not in resumed.stderr.lower()


# Writes what changes no number: which blocks are compiled or recomputed, and whether they free weights after forward.
SPY = """import os
if "RANK" in os.environ:
    import torch.distributed.fsdp as fsdp
    import torch.utils.checkpoint as recomputing
    from functools import wraps
    from torch.nn import Module
    shard, compile, checkpoint = fsdp.fully_shard, Module.compile, recomputing.checkpoint
    def write(*words):
        with open(__file__.replace(".py", ".txt"), "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")
    @wraps(shard)  # It has attributes, which a pipeline reads.
    def shard_and_write(module, **options):
        if "reshard_after_forward" in options:
            write("frees", options["reshard_after_forward"])
        return shard(module, **options)
    def compile_and_write(module):
        write("compiles", type(module).__name__)
        compile(module)
    def checkpoint_and_write(forward, *inputs, **options):
        write("recomputes", type(forward.__self__).__name__.removeprefix("FSDP"))
        return checkpoint(forward, *inputs, **options)
    fsdp.fully_shard, Module.compile, recomputing.checkpoint = shard_and_write, compile_and_write, checkpoint_and_write
"""
BLOCKS = {"digits": ("Stem", "ResidualBlock", "Head"), "language": ("Embedding", "Block", "Head")}


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """A function that returns what SPY has written of the ranks so far: the words after a verb."""
    (tmp_path / "sitecustomize.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (written := tmp_path / "sitecustomize.txt").touch()
    return lambda verb: {*re.findall(f"^{verb} (.*)$", written.read_text(), re.MULTILINE)}


def assert_acts(spy: Callable[[str], set[str]], task: str, settings: Iterable[str]) -> None:
    """Assert that all blocks are compiled or recomputed if that is set, and none otherwise."""
    for name, verb in {"train.compile": "compiles", "train.activation_checkpointing": "recomputes"}.items():
        assert spy(verb) == ({*BLOCKS[task]} if name in settings else set()), name


LAYOUTS = {
    "pipeline x tensor": (4, {"parallel.pipeline": 2, "parallel.tensor": 2}),
    "pipeline x shard": (4, {"parallel.pipeline": 2, "data.micro_batch_size": "null"}),
    "tensor x shard": (4, {"parallel.tensor": 2}),
    "pipeline x shard x tensor": (8, {"parallel.pipeline": 2, "parallel.tensor": 2}),
    "pipeline x replicate x tensor": (8, {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.replicas": 2}),
}


# Local batches have other weights: the letter e is no target.
LETTERS = {
    ("dataset.py", "window[:-1] == self.end"): "window[1:] == 101",
    ("task.py", 'if self.description["end"] < 0:'): "if False:",
}
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {  # What the oracle trains, and settings.
    "plain": ("language", {}),
    "weighted": ("letters", {}),
    "compiled": ("language", {"train.compile": "true"}),
    "recomputed": ("language", {"train.activation_checkpointing": "true"}),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.weekly] * (LAYOUTS[name][0] > 4)) for name in LAYOUTS]
)
@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.weekly] * (v != "plain")) for v in VARIANTS])
def test_a_mesh_of_several_dimensions_matches_a_plain_loop(
    bake: Bake, tmp_path: Path, spy: Callable[[str], set[str]], layout: str, variant: str
) -> None:
    project = bake(parallelism="mesh", task="language")
    (nproc, sizes), (task, settings) = LAYOUTS[layout], VARIANTS[variant]
    edit(project, LETTERS if task == "letters" else {})
    for steps in (STEPS // 2, STEPS):  # The second start loads each rank's parts.
        words = arguments("language", **sizes, **settings, **{"train.max_steps": steps})
        launch(project, "train", *words, "--run.dir", tmp_path / "run", nproc=nproc)
    assert_matches(tmp_path / "run", expected(project, task))
    assert_acts(spy, "language", settings)


# The line of plan.py, and a print.
LOSSES = "        loss = F.cross_entropy("
SHAPES = "        print(f'{outputs.to_local().shape[-1]} of {outputs.shape[-1]} logits\\n', end='')\n"
SPLIT_LOSSES = LETTERS | {
    ("plan.py", "output_layouts=Replicate())}"): "use_local_output=False)}",
    ("task.py", LOSSES): SHAPES + LOSSES,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallelism", "nproc", "sizes"),
    [("tensor", 4, {"parallel.tensor": 2}), ("mesh", 4, {"parallel.tensor": 2, "parallel.pipeline": 2})],
    ids=["tensor", "mesh"],
)
def test_each_rank_computes_the_losses_of_its_part_of_the_logits(
    bake: Bake, tmp_path: Path, parallelism: str, nproc: int, sizes: dict[str, int]
) -> None:
    project = bake(parallelism=parallelism, task="language")
    edit(project, SPLIT_LOSSES)
    words = ["train", *arguments("language", **sizes), "--run.dir", tmp_path / "run"]
    printed = launch(project, *words, nproc=nproc).stdout
    assert {*re.findall(r"\d+ of \d+ logits", printed)} == {"128 of 256 logits"}
    assert_matches(tmp_path / "run", expected(project, "letters"))


@pytest.mark.long
@pytest.mark.parametrize(
    "parallelism",  # data_parallel refuses both settings; of mesh, VARIANTS.
    [
        "ddp",
        *weekly("fsdp", "model_parallel", "pipeline", "tensor"),
    ],
)
@pytest.mark.parametrize("task", ["digits", *weekly(*(name for name in TASKS if name != "digits"))])
@pytest.mark.parametrize("setting", ["train.compile", "train.activation_checkpointing"])
def test_a_compiled_or_recomputed_run_matches_a_plain_loop(
    bake: Bake, tmp_path: Path, spy: Callable[[str], set[str]], parallelism: str, task: str, setting: str
) -> None:
    project = bake(parallelism=parallelism, task=task)
    words = arguments(task, **{setting: "true"})
    launch(project, "train", *words, "--run.dir", tmp_path / "run")
    assert_matches(tmp_path / "run", expected(project, task))
    assert_acts(spy, task, [setting])


@pytest.mark.weekly
def test_ranks_do_not_share_what_is_compiled_for_their_part_of_the_logits(bake: Bake, tmp_path: Path) -> None:
    project = bake(parallelism="tensor", task="language")
    edit(project, SPLIT_LOSSES)
    words = ["train", *arguments("language", **{"train.compile": "true"})]
    for start in ("first", "second"):  # Which finds what the first has compiled.
        launch(project, *words, "--run.dir", tmp_path / start, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert_matches(tmp_path / start, expected(project, "letters"))


# Settings of strategies that no other test here has.
RARE = {
    "fsdp": {"parallel.reshard_after_forward": "false", "checkpoint.format": "sharded"},
    "pipeline": {"parallel.schedule": "LoopedBFS"},
    "tensor": {"checkpoint.format": "sharded"},
    "mesh": {"parallel.pipeline": 2},
}


@pytest.mark.parametrize("task", ["digits", *weekly("language")])
def test_a_run_that_changes_its_strategy_matches_a_plain_loop(
    bake: Bake, tmp_path: Path, spy: Callable[[str], set[str]], task: str
) -> None:
    folder, freed = tmp_path / "run", set[str]()
    strategies = [each for each in ("ddp", "fsdp", "pipeline", "tensor", "mesh", "ddp") if each not in refused(task)]
    for number, parallelism in enumerate(strategies, start=1):
        project = bake(str(number), parallelism=parallelism, task=task)
        words = arguments(task, **{"train.max_steps": STEPS * number // len(strategies)}, **RARE.get(parallelism, {}))
        launch(project, "train", *words, "--run.dir", folder)
        freed |= spy("frees") if parallelism == "fsdp" else set()  # The first strategy that shards.
    assert_matches(folder, expected(project, task))
    assert freed == {"False"}


def last_step(folder: Path) -> int:
    """Return the last step that a run has logged, or 0."""
    return max([record["step"] for record in read_records(folder, "train")], default=0)


def assert_matches(folder: Path, theirs: oracle.Result) -> None:
    """Assert that a run has logged what the plain loop gives, and ended with its weights."""
    assert_records_match(records := read_records(folder, "train"), theirs.records)
    for name in ("loss", "grad_norm"):
        print(name, f"{max(abs(a[name] / b[name] - 1) for a, b in zip(records, theirs.records, strict=True)):.1e}")
    due = [each for each in read_records(folder, "eval") if each["step"] % COMMON["train.eval_every"] == 0]
    assert_records_match(due, theirs.evaluations)  # Where max_steps ended an earlier start, there is one more.
    newest = torch.load(sorted((folder / "checkpoints").glob("step-*.pt"))[-1], weights_only=True)
    assert_weights_match(newest["model"], theirs.weights)


def assert_records_match(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Assert that records hold the same values, to rounding, under the names that the oracle has."""
    for record, wanted in zip(ours, theirs, strict=True):
        for name, value in wanted.items():
            assert record[name] == pytest.approx(value, rel=TOLERANCE), f"{name} of step {record['step']}"


def assert_weights_match(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert that weights differ by no more than rounding; relative to a tensor that started at zero, it is larger."""
    assert ours.keys() == theirs.keys()
    norms = {name: tensor.norm() for name, tensor in theirs.items()}
    differences = {name: (ours[name] - theirs[name]).norm() for name in theirs}
    difference, norm = math.hypot(*differences.values()), math.hypot(*norms.values())
    print("weights", f"{difference / norm:.1e}")
    assert difference <= TOLERANCE * norm
    for name, difference in differences.items():
        assert difference <= 10 * TOLERANCE * norms[name], name
