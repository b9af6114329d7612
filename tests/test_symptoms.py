"""When it goes wrong: every symptom that the README's table quotes is reproduced, and is what users see."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Bake, run
from runs import SHORT, alone, launch, losses, plant, processes, records, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc"),
]

SOON = ("--distributed.timeout_seconds", "5", "--data.global_batch_size", "48")
REPRODUCED: set[str] = set()


def reproduces(text: str) -> pytest.MarkDecorator:
    """Mark the test that reproduces what the README quotes as ``text``; the test is given it as ``symptom``."""
    REPRODUCED.add(text)
    return pytest.mark.parametrize("symptom", [text])


def quoted(project: Path) -> set[str]:
    """What the README's table says that one sees: all that its first column quotes."""
    text = (project / "README.md").read_text().split("## When it goes wrong\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows and all(len(row) == 3 for row in rows), rows
    return {quote for symptom, _, _ in rows for quote in re.findall("`(.+?)`", symptom)}


def left_over(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment, as all have that a marked one starts."""
    return processes(lambda environment, _: mark.encode() in environment)


def fails(project: Path, *words: str | Path, nproc: int = 2, **environment: str) -> str:
    """Launch what is to fail, and make sure that nothing is left of it; gives all that it told."""
    mark = f"MARK={project}"
    done = subprocess.run(
        [project / "scripts/launch.sh", *words],
        cwd=project,
        env=os.environ | {"PYTHON": sys.executable, "NPROC": str(nproc), "MARK": str(project)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode not in (0, 124), done.stdout
    assert left_over(mark) == []
    return done.stdout + done.stderr


def train_with_fault(project: Path, fault: str, nproc: int) -> str:
    """Train with a fault in the fourth step of rank 1; gives the one line in which another rank tells of it."""
    rank_1 = f"if progress.step == 3 and self.world.rank == 1:\n    {fault}"
    plant(project, "train.py", "        loss, norm = self.step(inputs, targets)\n", rank_1)
    told = fails(project, "train", *SHORT, *SOON, "--run.dir", project / "run", nproc=nproc, STOP_SECONDS="8")
    assert len(records(project / "run", "train")) == 3
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: after step 3, "), told
    assert "See 'When it goes wrong' in README.md" in lines[0]
    return told


SILENT = {  # Faults after which a rank says nothing, and what the launcher says of them.
    "hangs": ("__import__('time').sleep(1000)", {"torchrun": "SIGKILL", "spawn": ""}),
    "killed": ("__import__('os').kill(__import__('os').getpid(), 9)", {"torchrun": "SIGKILL", "spawn": "SIGKILL"}),
}


@reproduces("no word from rank")
@pytest.mark.parametrize(
    ("fault", "parallelism", "launcher", "nproc"),
    [
        ("hangs", "ddp", "torchrun", 3),
        ("hangs", "pipeline", "spawn", 2),
        ("killed", "fsdp", "torchrun", 2),
        ("killed", "tensor", "spawn", 2),
    ],
)
def test_a_rank_that_is_lost_is_named(
    bake: Bake, symptom: str, fault: str, parallelism: str, launcher: str, nproc: int
) -> None:
    project = bake(parallelism=parallelism, launcher=launcher)
    code, seen = SILENT[fault]
    told = train_with_fault(project, code, nproc)
    assert symptom in quoted(project)
    assert re.search(rf"{symptom} 1: .*; rank 0 waited at \w+\.py:\d+, \w+", told), told
    assert seen[launcher] in told


@reproduces("failed at")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_rank_that_fails_is_named_by_the_others(bake: Bake, symptom: str, launcher: str) -> None:
    project = bake(parallelism="model_parallel", launcher=launcher)
    told = train_with_fault(project, "raise ZeroDivisionError('planted')", nproc=2)
    assert symptom in quoted(project)
    assert re.search(rf"rank 1 {symptom} train\.py:\d+, advance: ZeroDivisionError: planted", told), told
    assert "Traceback" in told


@reproduces("Is there a distributed collective mismatch in your code?")
def test_a_rank_in_another_collective_is_named(bake: Bake, symptom: str) -> None:
    project = bake()
    told = train_with_fault(project, "dist.all_reduce(torch.ones(1))", nproc=2)
    assert symptom in quoted(project) and symptom in told
    assert "rank 0 waited at parallel.py" in told or "rank 1 waited at train.py" in told


SPARE = "        self.linear = nn.Linear(width, CLASSES)\n", "self.spare = nn.GroupNorm(1, 1)"


@reproduces("the loss does not depend on")
@pytest.mark.parametrize("parallelism", ["ddp", "model_parallel"])
def test_a_parameter_without_a_gradient_is_named(bake: Bake, symptom: str, parallelism: str) -> None:
    project = bake(parallelism=parallelism, launcher="spawn")
    plant(project, "model.py", *SPARE)
    told = fails(project, "train", *SHORT, "--run.dir", project / "run")
    assert symptom in quoted(project)
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"{symptom} head.spare.weight, head.spare.bias:" in lines[0], told
    assert "--parallel.find_unused_parameters true" in lines[0] and "Traceback" not in told


@reproduces("Expected to have finished reduction in the prior iteration")
def test_a_parameter_that_loses_its_gradient_later(bake: Bake, symptom: str) -> None:
    project = bake()
    plant(project, "model.py", *SPARE)
    plant(
        project,
        "model.py",
        "        return self.linear(features.mean(dim=(2, 3)))\n",
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "if self.calls < 3:\n    features = features + self.spare.weight + self.spare.bias",
    )
    assert symptom in quoted(project)
    words = ("train", *SHORT, "--run.dir", project / "run")
    assert symptom in alone(project, *words, expect=1).stderr
    alone(project, *words, "--parallel.find_unused_parameters", "true")


@pytest.fixture(scope="module")
def sound(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a short run in one process, of a model without a fault."""
    folder = tmp_path_factory.mktemp("sound")
    alone(plain, "train", *SHORT, "--run.dir", folder)
    return losses(folder)


@pytest.mark.parametrize(
    ("parallelism", "words"),
    [("ddp", "--parallel.find_unused_parameters true"), ("fsdp", "--checkpoint.format sharded"), ("tensor", "")],
)
def test_parameters_without_a_gradient_change_no_result(
    bake: Bake, sound: list[float], parallelism: str, words: str, tmp_path: Path
) -> None:
    project = bake(parallelism=parallelism)
    plant(project, "model.py", *SPARE)
    for steps in ("3", "6"):  # The second start goes on from what the first one saved.
        launch(project, "train", *SHORT, *words.split(), "--train.max_steps", steps, "--run.dir", tmp_path)
    assert len(sound) == 6 and losses(tmp_path) == pytest.approx(sound, rel=1e-5)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@reproduces("port in use on this machine")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_port_in_use_is_refused_in_one_line(
    baked: Bake, symptom: str, launcher: str, taken_port: int, tmp_path: Path
) -> None:
    project = baked(launcher=launcher)
    words, place = ("train", *SHORT, "--run.dir", tmp_path / "run"), f"tcp://127.0.0.1:{taken_port}"
    nodes = {"NODES": "2", "NODE_RANK": "0", "HEAD": "127.0.0.1", "PORT": str(taken_port)}
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken_port)}
    refused = {
        "--distributed.init_method": launch(project, *words, "--distributed.init_method", place, expect=2),
        "PORT": run(project / "scripts/multinode.sh", *words, cwd=project, expect=2, **nodes),
        "MASTER_PORT": alone(project, *words, expect=2, **by_hand),
    }
    assert symptom in quoted(project)
    for setting, done in refused.items():
        assert done.stderr.startswith(f"error: {symptom}: ") and done.stderr.count("\n") == 1, done.stderr
        assert str(taken_port) in done.stderr and setting in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.fixture
def free_port(taken_port: int) -> str:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


WAIT_SHORTLY = ("--distributed.startup_timeout_seconds", "5")


@reproduces("did not meet the other")
def test_a_rank_that_never_comes(baked: Bake, symptom: str, free_port: str, tmp_path: Path) -> None:
    words = ("train", *SHORT, *WAIT_SHORTLY, "--run.dir", tmp_path / "run")
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    done = alone(baked(), *words, expect=2, **by_hand)
    assert symptom in quoted(baked())
    assert done.stderr.startswith("error: rank 0 ") and symptom in done.stderr and done.stderr.count("\n") == 1


@reproduces("clients joined")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_machine_that_never_comes(baked: Bake, symptom: str, launcher: str, free_port: str, tmp_path: Path) -> None:
    project = baked(launcher=launcher)
    words = ("train", *SHORT, *WAIT_SHORTLY, "--run.dir", tmp_path / "run")
    nodes = {"NODES": "2", "NODE_RANK": "0", "HEAD": "127.0.0.1", "PORT": free_port, "NPROC": "1"}
    torchrun = launcher == "torchrun"  # Waits itself for the other machines.
    done = run(project / "scripts/multinode.sh", *words, cwd=project, expect=1 if torchrun else 2, **nodes)
    told = done.stderr.splitlines()[-1]
    assert (symptom in quoted(project)) == torchrun
    assert (symptom if torchrun else "did not meet the other") in told, done.stderr
    assert not (tmp_path / "run").exists()


@reproduces("unable to allocate shared memory")
@pytest.mark.parametrize("docker", [False, True])
def test_a_small_dev_shm(baked: Bake, symptom: str, docker: bool, tmp_path: Path) -> None:
    allowed = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True)
    if allowed.returncode:
        pytest.skip(f"no /dev/shm of its own for a test: {allowed.stderr.decode().strip()}")
    project = baked(docker=docker)
    assert symptom in quoted(project)
    small = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "small")
    words = ("-m", "my_experiment", "train", *SHORT, "--run.dir", tmp_path, "--data.num_workers", "1")
    done = run(*small, sys.executable, *words, cwd=project, PYTHONPATH="src", expect=1)
    assert symptom in done.stderr


@reproduces("is in use by another run")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_what_is_left_over_is_found_and_ends(bake: Bake, symptom: str, launcher: str) -> None:
    project = bake(launcher=launcher)
    command = next(iter(re.findall(r"`(pgrep [^`]+)`", (project / "README.md").read_text())))
    (project / ".venv").symlink_to(Path(shutil.which("pytest", path=str(Path(sys.executable).parent)) or "").parents[1])
    words = ["train", *SHORT, "--train.max_steps", "1000000", "--train.epochs", "100000", "--run.dir", "run"]
    environment = os.environ | {"NPROC": "2"}
    launcher_process = subprocess.Popen(
        [project / "scripts/launch.sh", *words, "--data.num_workers", "1"],
        cwd=project,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listed() -> list[int]:
        """What the README's command finds of this project."""
        lines = subprocess.run(command.split(), capture_output=True, text=True).stdout.splitlines()
        return [int(line.split()[0]) for line in lines if str(project) in line]

    try:
        folder = project / "run"
        wait_until(lambda: (folder / "metrics.jsonl").exists() and records(folder, "train"), "it trains", 120)
        assert launcher_process.pid in listed() and len(listed()) >= 5  # Two ranks, and a loader process of each.
        second = subprocess.run(
            [project / ".venv/bin/python", "-m", "my_experiment", *words],
            cwd=project,
            env=environment | {"PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert second.returncode == 2 and second.stderr.count("\n") == 1, second.stderr
        assert symptom in second.stderr and symptom in quoted(project)
    finally:
        launcher_process.send_signal(signal.SIGKILL)
        launcher_process.wait()
    try:
        wait_until(lambda: listed() == [], "nothing is left", 120)
    finally:  # Not even where the test has failed.
        for pid in listed():
            os.kill(pid, signal.SIGKILL)


def test_every_row_of_the_table_is_reproduced(baked: Bake) -> None:
    projects = [
        baked(**answers)
        for answers in (
            {},
            {"launcher": "spawn", "docker": True},
            {"parallelism": "model_parallel"},
            {"parallelism": "pipeline"},
            {"parallelism": "data_parallel"},
        )
    ]
    assert set().union(*(quoted(project) for project in projects)) == REPRODUCED
