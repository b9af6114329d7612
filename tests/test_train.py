"""Rendered projects train for real, through the launcher that they ship: what a run leaves, and how it goes on."""

from __future__ import annotations

import json
import os
import pickle
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
from conftest import CHOICES, Bake, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

SHORT = "--train.max_steps 6 --train.log_every 1 --distributed.device cpu".split()
LONGER = (
    "--train.max_steps 25 --train.log_every 5 --train.eval_every 10 --checkpoint.every_steps 5 --distributed.device cpu"
).split()


VARIANTS = [
    {"parallelism": "ddp", "launcher": "torchrun", "tracker": "none"},
    {"parallelism": "fsdp", "launcher": "spawn", "tracker": "tensorboard"},
]
for question in ("parallelism", "launcher", "tracker"):
    assert {variant[question] for variant in VARIANTS} == set(CHOICES[question]), f"a {question} is not trained"


@pytest.fixture(scope="session", params=VARIANTS, ids=lambda variant: "-".join(variant.values()))
def project(request: pytest.FixtureRequest, baked: Bake) -> Path:
    """Projects that have every way to split the work, every launcher and every tracker among them."""
    return baked(**request.param)


@pytest.fixture(scope="session")
def plain(baked: Bake) -> Path:
    """The default project, where the choices make no difference."""
    return baked()


@pytest.fixture(scope="session", params=CHOICES["parallelism"])
def strategy(request: pytest.FixtureRequest, baked: Bake) -> Path:
    """A project for each way to split the work."""
    return baked(parallelism=request.param)


def launch(project: Path, *words: str | Path, nproc: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(project / "scripts/launch.sh", *words, cwd=project, NPROC=str(nproc), **options)


def alone(project: Path, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """One process, as `python -m <package>`."""
    package = next((project / "src").iterdir()).name
    return run(sys.executable, "-m", package, *words, cwd=project, PYTHONPATH="src", **options)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["event"] == event]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("*.pt"))[-1]
    return torch.load(newest, weights_only=True)["model"]


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="session")
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
        (step, "test", 360) for step in (10, 20, 25)
    ]
    best = max(evaluations, key=lambda e: e["accuracy"])["step"]
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
        accuracies = [event.value for event in board.Scalars("test/accuracy")]
        assert accuracies == pytest.approx([r["accuracy"] for r in records(finished, "eval")])
    else:
        assert "tensorboard" not in (project / "pyproject.toml").read_text().split("[tool.ddp-template]")[0]


def test_the_settings_that_a_run_wrote_repeat_it(project: Path, finished: Path, tmp_path: Path) -> None:
    launch(project, "train", "--config", finished / "config.yaml", "--run.dir", tmp_path)
    assert_same_weights(tmp_path, finished)
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (finished, tmp_path)]
    assert settings[0].pop("run").pop("seed") == settings[1].pop("run").pop("seed")
    assert settings[0] == settings[1]


def test_a_run_that_stopped_goes_on(project: Path, finished: Path, tmp_path: Path) -> None:
    launch(project, "train", *LONGER, "--train.max_steps", "13", "--run.dir", tmp_path)
    again = launch(project, "train", *LONGER, "--run.dir", tmp_path)
    assert "step 13 of 25" in again.stdout
    assert_same_weights(tmp_path, finished)
    assert [r["loss"] for r in records(tmp_path, "train")][-2:] == [r["loss"] for r in records(finished, "train")][-2:]
    assert len(json.loads((tmp_path / "provenance.json").read_text())["earlier"]) == 1


def test_a_finished_run_is_left_as_it_is(project: Path, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_text(), checkpoints(finished)
    done = launch(project, "train", *LONGER, "--run.dir", finished)
    assert "step 25 of 25" in done.stdout
    assert before == ((finished / "metrics.jsonl").read_text(), checkpoints(finished))


@pytest.mark.parametrize("nproc", [1, 3])
def test_evaluate_tells_the_figures(project: Path, finished: Path, nproc: int, tmp_path: Path) -> None:
    words = ("evaluate", "--checkpoint", finished / "checkpoints" / "step-00000025.pt")
    record = json.loads(launch(project, *words, "--run.dir", tmp_path / "new", nproc=nproc).stdout.splitlines()[-1])
    assert records(tmp_path / "new", "eval") == [record]
    expected = records(finished, "eval")[-1]
    assert record.keys() == expected.keys()
    assert record["num_samples"] == 360 and record["accuracy"] == expected["accuracy"]
    assert record["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("parallelism", "settings"),
    [
        ("ddp", "--parallel.static_graph true"),
        ("ddp", "--parallel.find_unused_parameters true --parallel.bucket_cap_mb 0.1"),
        ("fsdp", "--parallel.reshard_after_forward false --train.microbatches 2"),
        ("fsdp", "--parallel.replicas 2"),
    ],
)
def test_settings_of_a_strategy_leave_the_result_alone(
    baked: Bake, alone_losses: list[float], tmp_path: Path, parallelism: str, settings: str
) -> None:
    launch(baked(parallelism=parallelism), "train", *SHORT, *settings.split(), "--run.dir", tmp_path, nproc=4)
    assert [r["loss"] for r in records(tmp_path, "train")] == pytest.approx(alone_losses, rel=1e-5)


@pytest.fixture(scope="session")
def alone_losses(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a short run in one process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    alone(plain, "train", *SHORT, "--run.dir", folder)
    return [record["loss"] for record in records(folder, "train")]


@pytest.mark.parametrize("first", CHOICES["parallelism"])
@pytest.mark.parametrize("then", CHOICES["parallelism"])
def test_a_run_goes_on_under_another_strategy_and_number_of_ranks(
    baked: Bake, alone_losses: list[float], tmp_path: Path, first: str, then: str
) -> None:
    launch(baked(parallelism=first), "train", *SHORT, "--train.max_steps", "3", "--run.dir", tmp_path / "a")
    start = tmp_path / "a" / "checkpoints" / "step-00000003.pt"
    words = ("--run.dir", tmp_path / "b", "--checkpoint.resume", start)
    launch(baked(parallelism=then), "train", *SHORT, *words, nproc=4)
    assert [r["loss"] for r in records(tmp_path / "b", "train")] == pytest.approx(alone_losses[3:], rel=1e-5)


@pytest.mark.parametrize(("first", "then", "nproc"), [("ddp", "fsdp", 4), ("fsdp", "ddp", 1), ("fsdp", "fsdp", 4)])
def test_a_run_goes_on_from_a_sharded_checkpoint(
    baked: Bake, alone_losses: list[float], tmp_path: Path, first: str, then: str, nproc: int
) -> None:
    words = ("--checkpoint.format", "sharded", "--train.max_steps", "3", "--run.dir", tmp_path / "a")
    launch(baked(parallelism=first), "train", *SHORT, *words)
    start = tmp_path / "a" / "checkpoints" / "step-00000003.dcp"
    words = ("--run.dir", tmp_path / "b", "--checkpoint.resume", start)
    launch(baked(parallelism=then), "train", *SHORT, *words, nproc=nproc)
    assert [r["loss"] for r in records(tmp_path / "b", "train")] == pytest.approx(alone_losses[3:], rel=1e-5)


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
    assert [r["loss"] for r in records(tmp_path / "b", "train")] == pytest.approx(alone_losses[3:], rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_full_disk_is_told_in_one_line(plain: Path, tmp_path: Path, kind: str) -> None:
    words = ["-m", "my_experiment", "train", *SHORT, "--checkpoint.format", kind, "--run.dir", str(tmp_path)]
    limited = ("bash", "-c", 'ulimit -f 1000 && exec "$@"', "limited", sys.executable, *words)  # No file above 1 MB.
    done = run(*limited, cwd=plain, PYTHONPATH="src", expect=2)
    assert "File too large" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not [name for name in checkpoints(tmp_path) if not name.endswith(".tmp")]


def test_resume_refuses_what_would_mix_two_runs(plain: Path, tmp_path: Path) -> None:
    alone(plain, "train", *SHORT, "--run.dir", tmp_path / "a")
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


@pytest.mark.parametrize("damage", [cut_short, alter, craft, replace])
def test_a_damaged_checkpoint_is_refused(plain: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    alone(plain, "train", *SHORT, "--checkpoint.every_steps", "3", "--run.dir", tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006.pt"
    damage(newest)
    refused = alone(plain, "evaluate", "--checkpoint", newest, expect=2)
    assert str(newest) in refused.stderr and refused.stderr.count("\n") == 1
    done = alone(plain, "train", *SHORT, "--run.dir", tmp_path)
    assert "going on from the one before" in done.stderr and "step 3 of 6" in done.stdout
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "checkpoints" / "hacked").exists()


@pytest.mark.parametrize(
    "settings",
    [
        "--train.precision bf16",
        "--train.precision fp16",
        "--train.compile true --train.max_steps 3",
        "--model.norm batch --train.microbatches 2 --data.num_workers 1 --train.clip_grad_norm null",
    ],
)
def test_settings_train(strategy: Path, tmp_path: Path, settings: str) -> None:
    launch(strategy, "train", *SHORT, *settings.split(), "--run.dir", tmp_path)
    losses = [record["loss"] for record in records(tmp_path, "train")]
    assert len(losses) in (3, 6) and all(1.5 < loss < 3.5 for loss in losses)


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
    """The process ids of the ranks that were started for ``folder``, from the kernel's table of processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, words = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:  # It ended just now.
            continue
        if b"\0LOCAL_RANK=" in environment and str(folder).encode() in words:
            found.append(int(process.name))
    return sorted(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc")
def test_a_rank_that_dies_ends_the_job(plain: Path, tmp_path: Path) -> None:
    launcher = start(plain, tmp_path / "run", "--train.epochs", "1000", "--distributed.device", "cpu")
    ranks = ranks_of(tmp_path / "run")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    output = launcher.communicate(timeout=60)[0]
    assert launcher.returncode != 0
    assert "SIGKILL" in output or "exitcode" in output
    assert ranks_of(tmp_path / "run") == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc")
def test_a_run_directory_has_one_run(plain: Path, tmp_path: Path) -> None:
    launcher = start(plain, tmp_path / "run", "--train.epochs", "1000", "--distributed.device", "cpu")
    second = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "run", expect=2)
    assert "in use by another run" in second.stderr and second.stderr.count("\n") == 1
    launcher.kill()
    launcher.communicate()
    give_up = time.monotonic() + 10
    while ranks_of(tmp_path / "run"):
        assert time.monotonic() < give_up, "ranks outlived their launcher"
        time.sleep(0.1)


def test_a_spawned_rank_that_fails_tells_why(bake: Bake, tmp_path: Path) -> None:
    broken = bake(launcher="spawn")
    loop = broken / "src" / "my_experiment" / "train.py"
    line = "        device, clip = "
    fault = "        if self.world.rank == 1:\n            raise ZeroDivisionError('planted')\n"
    assert loop.read_text().count(line) == 1
    loop.write_text(loop.read_text().replace(line, fault + line))
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
