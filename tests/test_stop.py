"""How a run ends after a stop signal, an error or a failure: the last line, the exit code, and what is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import CHOICES, Bake, run
from runs import (
    ENDLESS,
    SHORT,
    checkpoints,
    find_marked_processes,
    find_ranks,
    plant,
    processes,
    started,
    wait_for_step,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc"),
]

every_launcher = pytest.mark.parametrize("launcher", CHOICES["launcher"])
# What launchers and Python's multiprocessing leave in the temporary directory; PyTorch's compiler keeps a cache there.
TEMPORARY = ("torchelastic_*", "pytorch-errorfile-*", "pymp-*")
TRAIN = ["train", *SHORT, *ENDLESS, "--train.eval_every", "null"]
WORKERS = ["--data.num_workers", "2"]


class Run:
    """A run that a launcher has started in a session of its own, with its files in ``folder``."""

    def __init__(self, launcher: subprocess.Popen[str], folder: Path) -> None:
        self.launcher, self.folder = launcher, folder
        self.log = folder / "log"

    def signal_all(self, number: int) -> None:
        """Signal all processes, as Slurm may do for a job."""
        for pid in find_marked_processes(str(self.folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_group(self, number: int) -> None:
        """Signal the launcher's process group, as a terminal does for Ctrl-C; ranks of torchrun are not part of it."""
        os.killpg(self.launcher.pid, number)

    def wait(self) -> list[str]:
        """Wait until it has ended, and check that it leaves nothing; return the lines that are not of single steps."""
        self.launcher.wait(240)
        # Python's resource tracker needs a moment to end.
        wait_until(lambda: not find_marked_processes(str(self.folder)), f"all ends\n{self.log.read_text()}", 10)
        lines = self.log.read_text().splitlines()
        return [line for line in lines if not line.startswith("train step ")]

    def temporary(self) -> list[str]:
        """Return what is left in the temporary directory."""
        return [path.name for pattern in TEMPORARY for path in (self.folder / "tmp").glob(pattern)]


@contextmanager
def running(project: Path, folder: Path, *arguments: str, step: int = 3, **environment: str) -> Iterator[Run]:
    """Start a run on two ranks, and yield it after a step; at the end, kill what is left of it."""
    (folder / "tmp").mkdir()
    environment = {"NPROC": "2", "MARK": str(folder), "TMPDIR": str(folder / "tmp")} | environment
    command = (project / "scripts/launch.sh", *TRAIN, *arguments, "--run.dir", folder / "run")
    with started(*command, cwd=project, log=folder / "log", **environment) as launcher:
        if step:
            wait_for_step(step, folder / "run", launcher, folder / "log")
        yield Run(launcher, folder)


SEND: dict[str, Callable[[Run, int], None]] = {"all": Run.signal_all, "group": Run.signal_group}


@pytest.mark.parametrize(
    ("name", "to"), [("SIGTERM", "all"), ("SIGTERM", "group"), ("SIGUSR1", "all"), ("SIGINT", "group")]
)
@every_launcher
def test_a_stop_signal_is_one_line(baked: Bake, tmp_path: Path, launcher: str, name: str, to: str) -> None:
    """A run with loader processes saves, whoever of its processes gets the signal, and however often."""
    number = signal.Signals[name]
    with running(baked(launcher=launcher), tmp_path, *WORKERS) as stopped:
        SEND[to](stopped, number)
        for _ in range(3):
            time.sleep(0.1)
            stopped.launcher.send_signal(number)
        lines = stopped.wait()[2:]  # The first two lines are those of its start.
        assert stopped.launcher.returncode == 128 + number, lines
    saved = re.fullmatch(rf"stopped by {name} after step (\d+); the same command resumes from there", "\n".join(lines))
    assert saved is not None and int(saved[1]) >= 3, lines
    assert checkpoints(tmp_path / "run") == [f"step-{int(saved[1]):08d}.pt"]
    assert stopped.temporary() == []


@every_launcher
def test_a_stop_code_takes_the_place_of_the_signal(baked: Bake, tmp_path: Path, launcher: str) -> None:
    with running(baked(launcher=launcher), tmp_path, STOP_CODE="75") as stopped:
        stopped.signal_group(signal.SIGTERM)
        assert stopped.wait()[2:] and stopped.launcher.returncode == 75


def listens(pid: int) -> bool:
    """Return whether a process has a handler of its own for SIGINT, which the script that started it ignores."""
    with suppress(FileNotFoundError, ProcessLookupError):  # It may have ended.
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGINT - 1) & 1)
    return False


@pytest.mark.parametrize("moment", ["check", "launcher", "ranks"])
@every_launcher
def test_ctrl_c_during_the_start_prints_no_traceback(baked: Bake, tmp_path: Path, launcher: str, moment: str) -> None:
    mark = str(tmp_path).encode()

    def has_begun() -> bool:
        if moment == "ranks":
            return len(find_ranks(interrupted.launcher)) == 2
        word = {"check": b"--preflight", "launcher": b".launch."}[moment]
        begun = processes(lambda environment, command: mark in environment and word in command)
        # The launcher does not listen while Python starts.
        return any(map(listens, begun)) if moment == "launcher" else bool(begun)

    with running(baked(launcher=launcher), tmp_path, step=0) as interrupted:
        wait_until(has_begun, "the moment has come", 60)
        time.sleep(0.05)
        while interrupted.launcher.poll() is None:  # Between two programs, one signal may be lost.
            interrupted.signal_group(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                interrupted.launcher.wait(3)
        lines = interrupted.wait()
        assert interrupted.launcher.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    # On a busy machine, the start may be further than the moment that was waited for.
    ended = r"(rank \d \(process \d+\) was )?ended by SIGINT(, without saving)?|stopped by SIGINT after .*"
    assert lines == ["ended by SIGINT, without saving"] or moment != "ranks"
    assert [line for line in lines if not re.fullmatch(ended, line) and "step" not in line] == []
    assert interrupted.temporary() == []


@every_launcher
def test_an_error_that_ranks_find_is_one_line(baked: Bake, tmp_path: Path, launcher: str) -> None:
    """It is not repeated by a restart either."""
    wrong = ["--data.global_batch_size", "4000"]
    with running(baked(launcher=launcher), tmp_path, *wrong, step=0, MAX_RESTARTS="2") as rejected:
        lines = rejected.wait()
        assert len(lines) == 1 and rejected.launcher.returncode == 2, lines
    assert lines[0].startswith("error: data.global_batch_size is 4000, but the training set has 1437 samples")
    assert rejected.temporary() == []


@every_launcher
def test_the_last_line_names_the_failed_rank(bake: Bake, tmp_path: Path, launcher: str) -> None:
    """The only traceback is that of the failed rank, and is printed before; the two others were waiting."""
    project = bake(launcher=launcher)
    fault = "if progress.step == 3 and self.process.rank == 1:\n    raise ZeroDivisionError('planted')"
    plant(project, "train.py", "        losses, norm = self.step(inputs, targets)\n", fault)
    batch = ["--data.global_batch_size", "48"]
    with running(project, tmp_path, *batch, step=0, NPROC="3") as failed:
        *lines, last = failed.wait()
        assert failed.launcher.returncode == 1
    assert re.match(r"error: after step 3, rank 1 failed at train\.py:\d+, run_step: ZeroDivisionError: planted", last)
    assert sum(line.endswith("Traceback (most recent call last):") for line in lines) == 1
    assert sum("[rank1]: ZeroDivisionError: planted" in line for line in lines) == 1
    assert failed.temporary() == []


@every_launcher
def test_a_killed_rank_is_named_before_the_last_line(baked: Bake, tmp_path: Path, launcher: str) -> None:
    with running(baked(launcher=launcher), tmp_path, *WORKERS) as failed:
        killed = find_ranks(failed.launcher)[1]
        os.kill(killed, signal.SIGKILL)
        *lines, last = failed.wait()
        assert failed.launcher.returncode == 128 + signal.SIGKILL
    assert re.match(r"error: after step \d+, no report from rank 1: ", last)
    assert lines.count(f"rank 1 (process {killed}) was ended by SIGKILL") == 1


@every_launcher
def test_stop_seconds_bounds_the_wait_for_a_rank_that_hangs(baked: Bake, tmp_path: Path, launcher: str) -> None:
    """Before that, the other rank waits for the timeout of collectives, and for a report: 1 + 5 seconds."""
    timeout = ["--distributed.timeout_seconds", "1"]
    with running(baked(launcher=launcher), tmp_path, *timeout, STOP_SECONDS="4") as failed:
        os.kill(find_ranks(failed.launcher)[1], signal.SIGSTOP)
        begun = time.monotonic()
        lines = failed.wait()
        seconds = time.monotonic() - begun
        assert failed.launcher.returncode == 1
    assert seconds < 25, f"{seconds} s\n{lines}"
    assert re.fullmatch(r"rank 1 \(process \d+\) still ran after 4 s: SIGKILL", lines[-1])
    assert re.match(r"error: after step \d+, no report from rank 1: ", lines[-2])
    assert failed.temporary() == []


RANKS = """
import subprocess, sys
from my_experiment.launch.ranks import Ranks
ranks = Ranks({rank: subprocess.Popen(["sh", "-c", line]) for rank, line in enumerate(sys.argv[1:])}, patience=4)
while ranks.running():
    ranks.check()
print(ranks.exit_code())
"""


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (("exit 1", "sleep 0.5; exit 2"), 2),
        (("sleep 0.5; exit 2", "exit 1"), 2),
        (("exit 2", "exit 2"), 2),
        (("exit 1", "exit 3"), 1),
        (("exit 1", "sleep 0.5; kill -9 $$"), 137),
        (("exit 0", "exit 0"), 0),
        (("exit 1", "sleep 100"), 1),
    ],
)
def test_the_exit_code_is_that_of_the_cause(plain: Path, lines: tuple[str, ...], code: int) -> None:
    """A rank that waited for another one may end before it, with 1."""
    assert run(sys.executable, "-c", RANKS, *lines, cwd=plain, PYTHONPATH="src").stdout == f"{code}\n"


STOP = """
import os, signal
from my_experiment.config import DistributedConfig
from my_experiment.runtime import StopSignal, process_group
with process_group(DistributedConfig(), devices_per_rank=1), StopSignal(0.15) as stop:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
    print(signal.Signals(stop.received).name, flush=True)
    stop.received_at -= 60
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_only_a_later_stop_signal_ends_a_rank_at_once(plain: Path) -> None:
    done = run(sys.executable, "-c", STOP, cwd=plain, PYTHONPATH="src", expect=-signal.SIGUSR1)
    assert done.stdout == "SIGUSR1\n"


LOAD = """
import os, signal
import torch
from my_experiment.config import Config
from my_experiment.data import EvalSampler
from my_experiment.dataset import build_datasets, collate_fn
from my_experiment.splitting import build_loader, seed_dataset
config = Config()
config.data.num_workers = 1
dataset = seed_dataset(build_datasets(config)[1], collate_fn, seed=0)
loader = build_loader(dataset, EvalSampler(len(dataset), 0, 1, 10), 10, config.data, torch.device("cpu"))
batches = iter(loader)
next(batches)
(worker,) = loader.processes.loader._iterator._workers
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    os.system(f"kill -{number.value} {worker.pid}")
print(1 + len(list(batches)))
worker.terminate()
worker.join(20)
print(worker.exitcode)
"""


def test_a_loader_process_ends_only_for_its_rank(plain: Path) -> None:
    done = run(sys.executable, "-c", LOAD, cwd=plain, PYTHONPATH="src")
    assert done.stdout == "36\n0\n" and done.stderr == ""
