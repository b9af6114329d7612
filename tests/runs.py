"""Helpers for tests that train: start rendered projects and read the files of their runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from conftest import run

# How much a split may change a result, relative to it: what different rounding does, and some more.
TOLERANCE = 1e-5
SHORT = "--train.max_steps 6 --train.log_every 1 --distributed.device cpu".split()
# After SHORT: a run that lasts until it is ended.
ENDLESS = "--train.max_steps 1000000 --train.epochs 100000".split()
# For the language task: a short text, and a small model with as many blocks as the model of the digits task.
SMALL_LANGUAGE = (
    "--dataset.max_bytes 43000 --dataset.test_bytes 20000 --data.global_batch_size 32 --train.epochs 20 "
    "--model.width 32 --model.layers 6 --model.heads 4 --model.context 32"
).split()
# For the control task: little experience, a small model with as many blocks, and few episodes.
SMALL_CONTROL = (
    "--control.environments 8 --control.steps 16 --control.passes 3 --data.global_batch_size 32 --train.epochs 20 "
    "--model.width 16 --model.depth 7 --control.evaluation_episodes 9"
).split()
SMALL = {"language": SMALL_LANGUAGE, "control": SMALL_CONTROL}


@contextmanager
def started(
    *words: str | Path, cwd: Path, log: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a command, with its output in ``log`` or in pipes, and kill what is left of it after the ``with`` block.

    So a test has to see within the block that processes end by themselves. All of them have the variable MARK.
    """
    environment.setdefault("MARK", uuid4().hex)
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w")) if log else subprocess.PIPE
        process = subprocess.Popen(
            [str(word) for word in words],
            cwd=cwd,
            env=os.environ | {"PYTHON": sys.executable} | environment,
            stdout=output,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stack.enter_context(process)
        stack.callback(kill_all, process, environment["MARK"])
        yield process


def kill_all(process: subprocess.Popen[str], mark: str) -> None:
    """Kill a process, its group, and what it started in other groups, as torchrun does."""
    if process.returncode is None:  # Otherwise its number may belong to another process by now.
        with suppress(PermissionError):  # What macOS says of a group that has ended.
            os.killpg(process.pid, signal.SIGKILL)
    for pid in find_marked_processes(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def task_of(project: Path) -> str:
    """Return the task that a project was rendered with."""
    return tomllib.loads((project / "pyproject.toml").read_text())["tool"]["ddp-template"]["task"]


def small(project: Path, command: str, *words: str | Path) -> list[str | Path]:
    """Return a command and its arguments, with settings that make the task small enough for a test."""
    return [command, *(SMALL.get(task_of(project), []) if command != "convert" else []), *words]


def launch(project: Path, *words: str | Path, nproc: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with the shipped launcher, and return the completed process."""
    return run(project / "scripts/launch.sh", *small(project, *words), cwd=project, NPROC=str(nproc), **options)


def alone(project: Path, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in one process with `python -m <package>`, and return the completed process."""
    package = next((project / "src").iterdir()).name
    return run(sys.executable, "-m", package, *small(project, *words), cwd=project, PYTHONPATH="src", **options)


def world_size(parallelism: str, wanted: int = 2) -> int:
    """Return the world size to start: 1 for data_parallel, which supports no other, or ``wanted``."""
    return 1 if parallelism == "data_parallel" else wanted


def kill_after(step: int, project: Path, folder: Path, *words: str | Path, nproc: int = 2) -> None:
    """Start a run, kill its launcher after a step, and wait until the ranks have ended as well."""
    mark, log = str(folder), folder.with_suffix(".log")
    command = (project / "scripts/launch.sh", *small(project, "train", *words, "--run.dir", folder))
    with started(*command, cwd=project, log=log, NPROC=str(nproc), MARK=mark) as launcher:
        wait_for_step(step, folder, launcher, log)
        launcher.kill()
        wait_until(lambda: not find_marked_processes(mark), "the ranks end", 30)


def resume(project: Path, folder: Path, *words: str | Path, nproc: int = 2) -> int:
    """Finish a run that was killed; return the step from which it was resumed, which is within what was killed."""
    killed = last_step(folder)
    output = launch(project, "train", *words, "--run.dir", folder, nproc=nproc).stdout
    resumed = re.search(r": step (\d+) of ", output)
    assert resumed is not None, output
    assert 0 < int(resumed[1]) <= killed < last_step(folder), f"killed after step {killed}\n{output}"
    return int(resumed[1])


def wait_for_step(step: int, folder: Path, launcher: subprocess.Popen[str], log: Path) -> None:
    """Wait until a run has logged a step; show its log if the launcher ends before, or after four minutes."""
    deadline = time.monotonic() + 240
    while last_step(folder) < step:
        assert launcher.poll() is None and time.monotonic() < deadline, f"no step {step}:\n{log.read_text()}"
        time.sleep(0.005)  # A step of a small model takes some milliseconds.


def checkpoints(folder: Path) -> list[str]:
    """Return the sorted names of a run's checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of one event in a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    complete = [json.loads(line) for line in lines if line.endswith("\n")]  # The run may be writing the last one.
    return [record for record in complete if record["event"] == event]


def last_step(folder: Path) -> int:
    """Return the last step that a run has logged, or 0."""
    logged = records(folder, "train") if (folder / "metrics.jsonl").exists() else []
    return logged[-1]["step"] if logged else 0


def losses(folder: Path) -> list[float]:
    """Return the training losses of a run, one per record."""
    return [record["loss"] for record in records(folder, "train")]


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest full checkpoint of a run."""
    return sorted((folder / "checkpoints").glob("*.pt"))[-1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the model's weights from a run's newest checkpoint."""
    return torch.load(newest_checkpoint(folder), weights_only=True)["model"]


def assert_close(actual: Path, expected: Path) -> None:
    """Assert that two runs have the same losses and weights, to rounding."""
    assert losses(actual) == pytest.approx(losses(expected), rel=TOLERANCE)
    assert_close_weights(weights(actual), weights(expected))


def assert_close_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert that tensors have the same names, shapes and types, and differ by no more than rounding."""
    assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {
        name: (t.shape, t.dtype) for name, t in theirs.items()
    }
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= TOLERANCE * theirs[name].norm(), name


def assert_same_weights(actual: Path, expected: Path) -> None:
    """Assert that two runs end with bitwise the same weights."""
    ours, theirs = weights(actual), weights(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def commit(folder: Path) -> str:
    """Commit all files of a folder, in a git repository that is created if there is none; return the commit's hash."""
    if not (folder / ".git").exists():
        run("git", "init", "--quiet", "--initial-branch=main", cwd=folder)
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    run("git", "add", "--all", cwd=folder)
    run("git", *identity, "commit", "--quiet", "--no-verify", "--message", "all", cwd=folder)
    return run("git", "rev-parse", "HEAD", cwd=folder).stdout.strip()


def plant(project: Path, name: str, line: str, fault: str) -> None:
    """Insert ``fault`` before a line of a file of the package, with the same indentation."""
    indent = line[: len(line) - len(line.lstrip())]
    planted = "".join(f"{indent}{part}\n" for part in fault.splitlines())
    edit(project, name, line, planted + line)


def edit(project: Path, name: str, old: str, new: str) -> None:
    """Replace a piece of a file of the package."""
    replace_once(next((project / "src").iterdir()) / name, old, new)


def replace_once(path: Path, old: str, new: str) -> None:
    """Replace a piece of a file, which has to occur there once."""
    source = path.read_text()
    assert source.count(old) == 1, f"{path} has {source.count(old)} times {old!r}"
    path.write_text(source.replace(old, new))


def processes(wanted: Callable[[bytes, bytes], bool]) -> list[int]:
    """Return the ids of the processes in /proc for which ``wanted(environment, command line)`` is true."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted((process / "environ").read_bytes(), (process / "cmdline").read_bytes()):
                found.append(int(process.name))
        except OSError:  # The process has ended.
            continue
    return sorted(found)


def find_marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes whose variable MARK has this value, which child processes inherit."""
    return processes(lambda environment, _: f"MARK={mark}".encode() in environment.split(b"\0"))


def find_ranks(launcher: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of a launcher's ranks, sorted: a launcher starts its ranks in order."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return sorted(
        pid for pid, line in commands.items() if b" train" in line.replace(b"\0", b" ") or b"spawn_main" in line
    )


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of 4 MiB at a folder until the end of the ``with`` block; only root may."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def taken_port() -> Iterator[int]:
    """Listen at a port of this machine until the end of the ``with`` block, and yield the port."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def free_ports(number: int) -> list[int]:
    """Return ports that are not in use."""
    with ExitStack() as stack:
        return [stack.enter_context(taken_port()) for _ in range(number)]


def free_port() -> int:
    """Return a port that is not in use."""
    return free_ports(1)[0]


def wait_until(condition: Callable[[], object], description: str, seconds: float) -> None:
    """Wait until ``condition()`` is true, and fail after ``seconds``, a timeout that no machine should need."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {description}"
        time.sleep(0.05)
