"""Rendered projects train for real, through the launcher that they ship: what a run leaves, and how it goes on."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
import yaml
from conftest import CHOICES, Bake
from runs import SHORT, alone, checkpoints, launch, losses, plant, processes, records, task_of, wait_until, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

LONGER = (
    "--train.max_steps 25 --train.log_every 5 --train.eval_every 10 --checkpoint.every_steps 5 --distributed.device cpu"
).split()
SAMPLES = {"digits": 360, "language": 624}
METRIC = {"digits": "accuracy", "language": "bits_per_byte"}

VARIANTS = [
    {"parallelism": "ddp", "task": "digits", "launcher": "torchrun", "tracker": "none"},
    {"parallelism": "pipeline", "task": "language", "launcher": "spawn", "tracker": "tensorboard"},
]
for question in ("task", "launcher", "tracker"):
    assert {variant[question] for variant in VARIANTS} == set(CHOICES[question]), f"a {question} is not trained"


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: "-".join(variant.values()))
def project(request: pytest.FixtureRequest, baked: Bake) -> Path:
    """Projects that have every task, every launcher and every tracker among them."""
    return baked(**request.param)


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def finished(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 25 steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    launch(project, "train", *LONGER, "--run.dir", folder)
    return folder


def test_a_run_leaves_what_it_should(project: Path, finished: Path) -> None:
    told = [(record["step"], record["epoch"]) for record in records(finished, "train")]
    assert told == [(5, 0), (10, 0), (15, 0), (20, 0), (25, 1)]
    assert all(record.keys() >= {"loss", "lr", "grad_norm"} for record in records(finished, "train"))
    evaluations = records(finished, "eval")
    assert [(e["step"], e["split"], e["num_samples"]) for e in evaluations] == [
        (step, "test", SAMPLES[task_of(project)]) for step in (10, 20, 25)
    ]
    best = max(evaluations, key=lambda e: e.get("accuracy", -e["loss"]))["step"]
    assert checkpoints(finished) == [f"step-{step:08d}.pt" for step in sorted({best, 20, 25})]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")

    origin = json.loads((finished / "provenance.json").read_text())
    assert origin["world_size"] == 2
    assert origin["packages"]["torch"] == torch.__version__
    assert "train" in origin["command"] and str(finished) in origin["command"]
    assert origin["template"]["launcher"] in project.joinpath("pyproject.toml").read_text()
    assert {"git_commit", "git_dirty", "host", "python", "time"} <= origin.keys()


def test_tensorboard_reads_what_a_run_wrote(project: Path, finished: Path) -> None:
    if (finished / "tensorboard").exists():
        board = EventAccumulator(str(finished / "tensorboard")).Reload()
        losses = {event.step: event.value for event in board.Scalars("train/loss")}
        assert losses == pytest.approx({r["step"]: r["loss"] for r in records(finished, "train")})
        metric = METRIC[task_of(project)]
        values = [event.value for event in board.Scalars(f"test/{metric}")]
        assert values == pytest.approx([r[metric] for r in records(finished, "eval")])
    else:
        assert "tensorboard" not in (project / "pyproject.toml").read_text().split("[tool.ddp-template]")[0]


def test_a_run_with_the_settings_of_another_stops_and_goes_on_as_that_one(
    project: Path, finished: Path, tmp_path: Path
) -> None:
    words = ("train", "--config", finished / "config.yaml", "--run.dir", tmp_path)
    launch(project, *words, "--train.max_steps", "13")
    again = launch(project, *words)
    assert "step 13 of 25" in again.stdout
    assert_same_weights(tmp_path, finished)
    assert losses(tmp_path)[-2:] == losses(finished)[-2:]
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (finished, tmp_path)]
    assert settings[0].pop("run").pop("seed") == settings[1].pop("run").pop("seed")
    assert settings[0] == settings[1]
    assert len(json.loads((tmp_path / "provenance.json").read_text())["earlier"]) == 1


def test_a_finished_run_is_left_as_it_is(project: Path, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_text(), checkpoints(finished)
    done = launch(project, "train", *LONGER, "--run.dir", finished)
    assert "step 25 of 25" in done.stdout
    assert before == ((finished / "metrics.jsonl").read_text(), checkpoints(finished))


def test_evaluate_tells_the_figures(project: Path, finished: Path, tmp_path: Path) -> None:
    words = ("evaluate", "--checkpoint", finished / "checkpoints" / "step-00000025.pt")
    record = json.loads(launch(project, *words, "--run.dir", tmp_path / "new", nproc=3).stdout.splitlines()[-1])
    assert records(tmp_path / "new", "eval") == [record]
    expected = records(finished, "eval")[-1]
    assert record.keys() == expected.keys()
    assert record["num_samples"] == SAMPLES[task_of(project)]
    assert record.get("accuracy") == expected.get("accuracy")
    assert record["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_resume_refuses_what_would_mix_two_runs(plain: Path, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "a")
    never = launch(plain, "train", *SHORT, "--run.dir", tmp_path / "a", "--checkpoint.resume", "never", expect=2)
    assert "checkpoint.resume is never" in never.stderr and never.stderr.count("\n") == 1
    alone(plain, "train", *SHORT, "--run.dir", tmp_path / "b", "--run.seed", "1")
    start = tmp_path / "b" / "checkpoints" / "step-00000006.pt"
    mixed = launch(plain, "train", *SHORT, "--run.dir", tmp_path / "a", "--checkpoint.resume", start, expect=2)
    assert "give another run.dir" in mixed.stderr and mixed.stderr.count("\n") == 1
    settings = (tmp_path / "a" / "config.yaml").read_text()
    wider = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "a", "--model.width", "64", expect=2)
    assert "model.width = 32" in wider.stderr and wider.stderr.count("\n") == 1
    assert (tmp_path / "a" / "config.yaml").read_text() == settings


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def alter(path: Path) -> None:
    """Flip one bit of the largest part, which the format alone would not show."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(content)


class Attack:
    """Would make a file beside the checkpoint, if loading ran it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def craft(path: Path) -> None:
    torch.save({"format": 1, "model": Attack(path.parent / "hacked")}, path)


def replace(path: Path) -> None:
    path.write_bytes(pickle.dumps({"format": 1}))


@pytest.fixture(scope="module")
def sound(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("sound")
    alone(plain, "train", *SHORT, "--checkpoint.every_steps", "3", "--run.dir", folder)
    return folder


@pytest.mark.parametrize("damage", [cut_short, alter, craft, replace])
def test_a_damaged_checkpoint_is_refused(
    plain: Path, sound: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "step-00000006.pt"
    damage(newest)
    refused = alone(plain, "evaluate", "--checkpoint", newest, expect=2)
    assert str(newest) in refused.stderr and refused.stderr.count("\n") == 1
    done = alone(plain, "train", *SHORT, "--run.dir", tmp_path)
    assert "going on from the one before" in done.stderr and "step 3 of 6" in done.stdout
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "checkpoints" / "hacked").exists()


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_ranks_meet_where_they_are_told(plain: Path, tmp_path: Path, method: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = f"file://{tmp_path}/meet" if method == "file" else f"tcp://127.0.0.1:{port}"
    launch(plain, "train", *SHORT, "--run.dir", tmp_path / "run", "--distributed.init_method", place)
    assert len(records(tmp_path / "run", "train")) == 6


@pytest.mark.parametrize(
    ("settings", "named"),
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
def test_what_cannot_work_is_refused_in_one_line(plain: Path, tmp_path: Path, settings: str, named: str) -> None:
    done = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "run", *settings.split(), expect=2)
    assert named in done.stderr and done.stderr.count("\n") == 1, done.stderr


def start(project: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run of many steps, in the background, when it has done its first ones."""
    launcher = subprocess.Popen(
        [project / "scripts/launch.sh", "train", "--train.log_every", "1", "--run.dir", folder, *words],
        cwd=project,
        env=os.environ | {"PYTHON": sys.executable, "NPROC": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    give_up = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not records(folder, "train"):
        assert launcher.poll() is None and time.monotonic() < give_up, launcher.communicate()[0]
        time.sleep(0.05)
    return launcher


def ranks_of(folder: Path) -> list[int]:
    """The process ids of the ranks that were started for ``folder``."""
    return processes(lambda environment, words: b"\0LOCAL_RANK=" in environment and str(folder).encode() in words)


def test_a_rank_that_falls_behind_ends_the_job(bake: Bake, tmp_path: Path) -> None:
    """Within the timeout, also where the others wait for it in groups that are not of all ranks: those of a mesh."""
    broken = bake(parallelism="tensor")
    fault = "if self.world.rank == 1 and self.progress.step == 2:\n    time.sleep(100_000)"
    plant(broken, "train.py", "        device, clip = ", fault)
    words = ["train", *SHORT, "--parallel.replicas", "2", "--distributed.timeout_seconds", "5", "--run.dir", tmp_path]
    done = launch(broken, *words, nproc=4, expect=1, STOP_SECONDS="1")
    assert "timed out" in done.stderr.lower()
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc")
def test_a_run_directory_has_one_run(plain: Path, tmp_path: Path) -> None:
    launcher = start(plain, tmp_path / "run", "--train.epochs", "1000", "--distributed.device", "cpu")
    second = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "run", expect=2)
    assert "in use by another run" in second.stderr and second.stderr.count("\n") == 1
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not ranks_of(tmp_path / "run"), "the ranks have ended with their launcher", 10)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc")
def test_loader_processes_that_still_start_end_with_their_rank(plain: Path, tmp_path: Path) -> None:
    def loaders() -> list[int]:
        return processes(lambda environment, words: mark.encode() in environment and b"spawn_main" in words)

    mark = f"MARK={tmp_path}"
    launcher = subprocess.Popen(
        [plain / "scripts/launch.sh", "train", "--data.num_workers", "1", "--run.dir", tmp_path / "run"],
        cwd=plain,
        env=os.environ | {"PYTHON": sys.executable, "NPROC": "2", "MARK": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: loaders() or launcher.poll() is not None, "loader processes start", 120)
        assert launcher.poll() is None
    finally:
        launcher.kill()
        launcher.wait()
    try:
        wait_until(lambda: not loaders(), "the loader processes have ended with their rank", 30)
    finally:
        for process in loaders():
            os.kill(process, signal.SIGKILL)


def test_a_spawned_rank_that_fails_tells_why(bake: Bake, tmp_path: Path) -> None:
    broken = bake(launcher="spawn")
    fault = "if self.world.rank == 1:\n    raise ZeroDivisionError('planted')"
    plant(broken, "train.py", "        device, clip = ", fault)
    done = launch(broken, "train", *SHORT, "--run.dir", tmp_path, expect=1)
    assert "ZeroDivisionError: planted" in done.stderr and "Process 1 terminated" in done.stderr


def test_a_terminal_shows_a_progress_bar(plain: Path, tmp_path: Path) -> None:
    words = ["train", *SHORT, "--run.dir", str(tmp_path)]
    terminal = os.environ | {"PYTHON": sys.executable, "NPROC": "2", "TERM": "xterm"}
    child = pexpect.spawn(str(plain / "scripts/launch.sh"), words, env=terminal, encoding="utf-8", timeout=120)
    child.expect("first step done [0-9.]+ s after the start")
    child.expect(r"100%.* 6/6 \[")
    child.expect("accuracy")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
