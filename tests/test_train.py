"""Training in rendered projects, started with their launcher: the files of a run, resuming, and failures."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
import yaml
from conftest import CHOICES, Bake, leave_to_weekly
from PIL import Image
from runs import (
    ENDLESS,
    SHORT,
    alone,
    assert_same_weights,
    checkpoints,
    commit,
    edit,
    find_marked_processes,
    free_port,
    kill_after,
    last_step,
    launch,
    losses,
    plant,
    processes,
    records,
    resume,
    started,
    task_of,
    wait_for_step,
    wait_until,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

LONGER = (
    "--train.max_steps 25 --train.log_every 5 --train.eval_every 10 --checkpoint.every_steps 5 --distributed.device cpu"
).split()
SAMPLES = {"digits": 360, "language": 624, "control": 9}
STEPS_PER_EPOCH = {"digits": 22, "language": 22, "control": 4}
METRIC = {"digits": "accuracy", "language": "bits_per_byte", "control": "mean_return"}

VARIANTS = [
    {"parallelism": "ddp", "task": "digits", "launcher": "torchrun", "tracker": "none"},
    {"parallelism": "pipeline", "task": "language", "launcher": "spawn", "tracker": "tensorboard"},
    {"parallelism": "fsdp", "task": "control", "launcher": "torchrun", "tracker": "none"},
]
for question in ("task", "launcher", "tracker"):
    others = {"wandb", "mlflow"}  # They are for tests/test_trackers.py.
    assert {variant[question] for variant in VARIANTS} == set(CHOICES[question]) - others, (
        f"a {question} has no variant"
    )


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: "-".join(variant.values()))
def project(request: pytest.FixtureRequest, baked: Bake) -> Path:
    """A project per variant; together they cover every task, launcher and tracker."""
    return baked(**request.param)


@pytest.fixture(scope="module")
def finished_run(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 25 steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    launch(project, "train", *LONGER, "--run.dir", folder)
    return folder


def test_a_run_writes_metrics_checkpoints_and_provenance(project: Path, finished_run: Path) -> None:
    logged = [(record["step"], record["epoch"]) for record in records(finished_run, "train")]
    per_epoch = STEPS_PER_EPOCH[task_of(project)]
    assert logged == [(step, (step - 1) // per_epoch) for step in (5, 10, 15, 20, 25)]
    assert all(record.keys() >= {"loss", "lr", "grad_norm"} for record in records(finished_run, "train"))
    evaluations = records(finished_run, "eval")
    assert [(record["step"], record["split"], record["num_samples"]) for record in evaluations] == [
        (step, "test", SAMPLES[task_of(project)]) for step in (10, 20, 25)
    ]
    metric = METRIC[task_of(project)]
    best = max(evaluations, key=lambda record: record[metric] * (-1 if metric == "bits_per_byte" else 1))["step"]
    assert checkpoints(finished_run) == [f"step-{step:08d}.pt" for step in sorted({best, 20, 25})]
    pictures = {"digits": ["confusion.png", "misread.png"], "control": ["episode.png"]}.get(task_of(project), [])
    for name in ("curves.png", *pictures):
        with Image.open(finished_run / name) as image:
            assert min(image.size) > 100 and len(image.convert("L").getcolors()) > 5, f"{name} is blank"

    provenance = json.loads((finished_run / "provenance.json").read_text())
    assert provenance["world_size"] == 2
    assert provenance["packages"]["torch"] == torch.__version__
    assert "train" in provenance["command"] and str(finished_run) in provenance["command"]
    assert provenance["template"]["launcher"] in project.joinpath("pyproject.toml").read_text()
    assert {"git_commit", "git_dirty", "host", "python", "time"} <= provenance.keys()


def test_tensorboard_shows_the_logged_metrics(project: Path, finished_run: Path) -> None:
    if (finished_run / "tensorboard").exists():
        events = EventAccumulator(str(finished_run / "tensorboard")).Reload()
        shown = {event.step: event.value for event in events.Scalars("train/loss")}
        assert shown == pytest.approx({record["step"]: record["loss"] for record in records(finished_run, "train")})
        metric = METRIC[task_of(project)]
        values = [event.value for event in events.Scalars(f"test/{metric}")]
        assert values == pytest.approx([record[metric] for record in records(finished_run, "eval")])
    else:
        assert "tensorboard" not in (project / "pyproject.toml").read_text().split("[tool.ddp-template]")[0]


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(baked: Bake, tmp_path: Path) -> None:
    project, folder = baked(tracker="tensorboard"), tmp_path / "run"
    words = (*SHORT, "--train.max_steps", "60", "--checkpoint.every_steps", "20")
    kill_after(22, project, folder, *words, nproc=1)
    killed = last_step(folder)
    assert resume(project, folder, *words, nproc=1) < killed
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(1, 61)]


# A clock that takes a second from one reading to the next.
CLOCK = """import itertools
from types import SimpleNamespace

time = SimpleNamespace(perf_counter=itertools.count().__next__)
"""


@pytest.mark.parametrize(
    ("parallelism", "file", "line", "every"),
    [
        ("ddp", "model.py", "        return self.linear(features.mean(dim=(2, 3)))\n", "5"),
        ("ddp", "train.py", "        self.scaler.step(self.optimizer)\n", "1"),
        ("fsdp", "splitting/seeding.py", "        seed_generators(self.seed, epoch, index)\n", "5"),
    ],
)
def test_each_record_says_which_rank_is_slow_and_how_much_memory_is_used(
    bake: Bake, tmp_path: Path, parallelism: str, file: str, line: str, every: str
) -> None:
    project = bake(parallelism=parallelism)
    seconds = 0.05 if parallelism == "ddp" else 0.05 / 24  # In each step, or for each of the samples of a rank.
    code = f"import time; time.sleep({seconds} * __import__('torch').distributed.get_rank())"
    plant(project, file, line, code)
    words = ("--train.log_every", every, "--train.max_steps", "15", "--data.global_batch_size", "48")
    launch(project, "train", *SHORT, *words, "--run.dir", tmp_path / "run")
    *_, record = records(tmp_path / "run", "train")
    assert record["slowest_rank"] == 1 and record["behind_ms"] > 25
    assert 50 < record["memory_mib"] <= record["peak_memory_mib"] < 5000


@pytest.mark.parametrize("parallelism", leave_to_weekly(["ddp", "fsdp"], ["fsdp"]))
def test_each_record_says_which_rank_has_slow_environments(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project = bake(parallelism=parallelism, task="control")
    line = "        observations, rewards, terminated, truncated, _ = self.vector.step(valid)\n"
    plant(project, "splitting/environments.py", line, "time.sleep(0.05 * torch.distributed.get_rank())")
    # Each record is about one collection of 16 steps, and 12 steps of the optimizer.
    words = "--train.log_every 12 --train.max_steps 36 --distributed.device cpu".split()
    launch(project, "train", *words, "--run.dir", tmp_path / "run")
    for record in records(tmp_path / "run", "train")[1:]:
        assert record["slowest_rank"] == 1 and record["behind_ms"] == pytest.approx(1000 * 0.05 * 16 / 12, rel=0.5)


def test_a_run_records_its_commit_and_the_throughput_of_all_ranks(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    edit(project, "reporting/pace.py", "import time\n", CLOCK)
    commits = [commit(project)]
    launch(project, "train", *SHORT, "--data.global_batch_size", "64", "--run.dir", tmp_path)
    rates = [record.get("samples_per_second") for record in records(tmp_path, "train")]
    # The first step is part of the start. Each other one reads the clock five times, which takes five seconds.
    assert rates == [None] + 5 * [64 / 5]

    (project / "note.txt").touch()
    commits.append(commit(project))
    (project / "README.md").write_text("Changed.\n")
    alone(project, "train", *SHORT, "--data.global_batch_size", "64", "--run.dir", tmp_path)
    newest = json.loads((tmp_path / "provenance.json").read_text())
    recorded = [(start["git_commit"], start["git_dirty"]) for start in (*newest["earlier"], newest)]
    assert recorded == [(commits[0], False), (commits[1], True)]


def test_a_resumed_run_with_a_saved_config_matches_the_original_run(
    project: Path, finished_run: Path, tmp_path: Path
) -> None:
    arguments = ("train", "--config", finished_run / "config.yaml", "--run.dir", tmp_path)
    launch(project, *arguments, "--train.max_steps", "13")
    resumed = launch(project, *arguments)
    assert "step 13 of 25" in resumed.stdout
    assert_same_weights(tmp_path, finished_run)
    assert losses(tmp_path)[-2:] == losses(finished_run)[-2:]
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (finished_run, tmp_path)]
    assert settings[0].pop("run").pop("seed") == settings[1].pop("run").pop("seed")
    assert settings[0] == settings[1]
    assert len(json.loads((tmp_path / "provenance.json").read_text())["earlier"]) == 1


def test_repeating_the_command_does_not_change_a_finished_run(project: Path, finished_run: Path) -> None:
    before = (finished_run / "metrics.jsonl").read_text(), checkpoints(finished_run)
    repeated = launch(project, "train", *LONGER, "--run.dir", finished_run)
    assert "step 25 of 25" in repeated.stdout
    assert before == ((finished_run / "metrics.jsonl").read_text(), checkpoints(finished_run))


def test_a_run_that_has_taken_more_steps_than_it_is_to_take_ends_at_once(plain: Path, tmp_path: Path) -> None:
    words = ("train", *SHORT, "--optim.decay_steps", "6", "--checkpoint.every_steps", "1", "--run.dir", tmp_path)
    alone(plain, *words)
    before = checkpoints(tmp_path)
    assert "step 6 of 4" in alone(plain, *words, "--train.max_steps", "4").stdout
    assert checkpoints(tmp_path) == before and records(tmp_path, "train")[-1]["step"] == 6


def find_loaders(mark: str) -> list[int]:
    """Return the ids of the loader processes of a run with this text in its environment."""
    return processes(lambda environment, command: mark.encode() in environment and b"spawn_main" in command)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loader_process_that_is_killed_is_named(plain: Path, tmp_path: Path, nproc: int) -> None:
    log, mark = tmp_path / "log", str(tmp_path)
    command = ("scripts/launch.sh", "train", *SHORT, *ENDLESS, "--data.num_workers", "1", "--run.dir", tmp_path / "run")
    with started(*command, cwd=plain, log=log, NPROC=str(nproc), MARK=mark) as launcher:
        wait_for_step(2, tmp_path / "run", launcher, log)
        victim = max(find_loaders(mark))
        os.kill(victim, signal.SIGKILL)
        assert launcher.wait(60) == 1
    lines = log.read_text().splitlines()
    assert re.search(rf"DataLoader worker \(pid(\(s\))? {victim}\) (is killed|exited)", lines[-1]), log.read_text()
    assert "lower data.num_workers" in lines[-1] and re.search(r"after step \d+", lines[-1])
    assert sum(line.startswith("Traceback") or "]: Traceback" in line for line in lines) <= 1


def test_evaluate_reports_the_same_metrics_as_the_run(project: Path, finished_run: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", "--checkpoint", finished_run / "checkpoints" / "step-00000025.pt")
    record = json.loads(launch(project, *arguments, "--run.dir", tmp_path / "new", nproc=3).stdout.splitlines()[-1])
    assert records(tmp_path / "new", "eval") == [record]
    expected = records(finished_run, "eval")[-1]
    assert record.keys() == expected.keys()
    assert record["num_samples"] == SAMPLES[task_of(project)]
    for name in ({"loss", METRIC[task_of(project)]} & record.keys()) - {"accuracy"}:
        assert record[name] == pytest.approx(expected[name], rel=1e-6)
    assert record.get("accuracy") == expected.get("accuracy")


def test_a_run_directory_rejects_a_different_run(plain: Path, saved_run: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_run, tmp_path / "a")
    never = launch(plain, "train", *SHORT, "--run.dir", tmp_path / "a", "--checkpoint.resume", "never", expect=2)
    assert "checkpoint.resume is never" in never.stderr and never.stderr.count("\n") == 1
    alone(plain, "train", *SHORT, "--run.dir", tmp_path / "b", "--run.seed", "1")
    checkpoint = tmp_path / "b" / "checkpoints" / "step-00000006.pt"
    mixed = launch(plain, "train", *SHORT, "--run.dir", tmp_path / "a", "--checkpoint.resume", checkpoint, expect=2)
    assert "give another run.dir" in mixed.stderr and mixed.stderr.count("\n") == 1
    settings = (tmp_path / "a" / "config.yaml").read_text()
    wider = alone(plain, "train", *SHORT, "--run.dir", tmp_path / "a", "--model.width", "64", expect=2)
    assert "model.width is 64, and 32 in the checkpoint" in wider.stderr and wider.stderr.count("\n") == 1
    assert (tmp_path / "a" / "config.yaml").read_text() == settings


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip_bit(path: Path) -> None:
    """Flip one bit of the largest record, which leaves the structure of the archive intact."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(content)


class Attack:
    """Creates a directory next to the checkpoint if it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def insert_code(path: Path) -> None:
    torch.save({"format": 1, "model": Attack(path.parent / "hacked")}, path)


def write_plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"format": 1}))


@pytest.fixture(scope="module")
def saved_run(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved_run")
    alone(plain, "train", *SHORT, "--checkpoint.every_steps", "3", "--run.dir", folder)
    return folder


@pytest.mark.parametrize("damage", [truncate, flip_bit, insert_code, write_plain_pickle])
def test_a_damaged_checkpoint_is_rejected_and_the_previous_one_is_resumed(
    plain: Path, saved_run: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(saved_run, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "step-00000006.pt"
    damage(newest)
    rejected = alone(plain, "evaluate", "--checkpoint", newest, expect=2)
    assert str(newest) in rejected.stderr and rejected.stderr.count("\n") == 1
    resumed = alone(plain, "train", *SHORT, "--run.dir", tmp_path)
    assert "resuming from the one before" in resumed.stderr and "step 3 of 6" in resumed.stdout
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "checkpoints" / "hacked").exists()


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_init_method_sets_the_rendezvous(plain: Path, tmp_path: Path, method: str) -> None:
    init_method = f"file://{tmp_path}/meet" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    launch(plain, "train", *SHORT, "--run.dir", tmp_path / "run", "--distributed.init_method", init_method)
    assert len(records(tmp_path / "run", "train")) == 6


def test_a_rank_that_hangs_ends_the_job(bake: Bake, tmp_path: Path) -> None:
    """The timeout also applies to the process groups of a device mesh, which contain only some of the ranks."""
    broken = bake(parallelism="tensor")
    fault = "if self.process.rank == 1 and self.progress.step == 2:\n    time.sleep(100_000)"
    plant(broken, "train.py", "        device, clip = ", fault)
    command = ["train", *SHORT, "--parallel.replicas", "2", "--distributed.timeout_seconds", "5", "--run.dir", tmp_path]
    failed = launch(broken, *command, nproc=4, expect=1, STOP_SECONDS="10")
    assert "timed out" in failed.stderr.lower() and "after step 2, no report from rank 1: " in failed.stderr
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_ranks_wait_for_a_save_that_takes_longer_than_a_step_may(bake: Bake, tmp_path: Path, form: str) -> None:
    slow = bake(launcher="spawn")
    plant(slow, "runtime/files.py", "        with disk_errors(temporary), open(", "__import__('time').sleep(2.5)")
    words = ("--distributed.timeout_seconds", "1", "--checkpoint.every_steps", "3", "--checkpoint.format", form)
    launch(slow, "train", *SHORT, *words, "--train.eval_every", "null", "--run.dir", tmp_path)
    assert [record["step"] for record in records(tmp_path, "train")] == list(range(1, 7))
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc")
def test_a_run_directory_in_use_is_rejected(plain: Path, tmp_path: Path) -> None:
    folder, log, mark = tmp_path / "run", tmp_path / "log", str(tmp_path)
    command = ("scripts/launch.sh", "train", *SHORT, *ENDLESS, "--run.dir", folder)
    with started(*command, cwd=plain, log=log, NPROC="2", MARK=mark) as launcher:
        wait_for_step(1, folder, launcher, log)
        second = alone(plain, "train", *SHORT, "--run.dir", folder, expect=2)
        assert "in use by another run" in second.stderr and second.stderr.count("\n") == 1
        launcher.kill()
        wait_until(lambda: not find_marked_processes(mark), "the ranks end with their launcher", 10)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc")
@pytest.mark.parametrize("at", ["start", "step 2"])
def test_loader_processes_end_with_their_rank_and_leave_nothing(plain: Path, tmp_path: Path, at: str) -> None:
    mark, log, temporary = str(tmp_path), tmp_path / "log", tmp_path / "tmp"
    temporary.mkdir()
    command = ("scripts/launch.sh", "train", *SHORT, *ENDLESS, "--data.num_workers", "1", "--run.dir", tmp_path / "run")
    environment = {"NPROC": "2", "MARK": mark, "TMPDIR": str(temporary)}
    with started(*command, cwd=plain, log=log, **environment) as launcher:
        if at == "start":
            wait_until(lambda: find_loaders(mark) or launcher.poll() is not None, "loader processes start", 120)
            assert launcher.poll() is None, log.read_text()
        else:
            wait_for_step(2, tmp_path / "run", launcher, log)
        launcher.kill()
        wait_until(lambda: not find_loaders(mark), "the loader processes end with their rank", 30)
    # All runs of a user share PyTorch's cache.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def test_a_failed_rank_under_spawn_reports_its_exception(bake: Bake, tmp_path: Path) -> None:
    broken = bake(launcher="spawn")
    fault = "if self.process.rank == 1:\n    raise ZeroDivisionError('planted')"
    plant(broken, "train.py", "        device, clip = ", fault)
    failed = launch(broken, "train", *SHORT, "--run.dir", tmp_path, expect=1)
    assert failed.stderr.count("[rank1]: ZeroDivisionError: planted\n") == 1


def test_a_terminal_shows_a_progress_bar(plain: Path, tmp_path: Path) -> None:
    arguments = ["train", *SHORT, "--run.dir", str(tmp_path)]
    environment = os.environ | {"PYTHON": sys.executable, "NPROC": "2", "TERM": "xterm"}
    terminal = pexpect.spawn(
        str(plain / "scripts/launch.sh"), arguments, env=environment, encoding="utf-8", timeout=120
    )
    terminal.expect("first step done [0-9.]+ s after the start")
    terminal.expect(r"100%.* 6/6 \[00:00 left, loss \d[\d.]*, [\d,]+ samples/s, accuracy \d[\d.]*\]")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
