"""What the tests share: starting the shipped launcher, ending runs, and reading what they left."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rules import SMALL, STEPS

torch.set_num_threads(1)  # More threads wait for each other where tests share processors.
ROOT = Path(__file__).parents[1]
PACKAGE = next(path.parent.name for path in ROOT.glob("src/*/parallel.py"))
TOLERANCE = 1e-5  # A split changes only rounding, by less than this in fp32, unless it grows.
FP64, FP64_TOLERANCE = ["--train.precision", "fp64"], 1e-10
# A split is a number of ranks and settings. Most tests run on RANKS; some resume on MORE_RANKS.
#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/splits.py" ::#
FIRST: tuple[Any, ...] = (SPLITS[0][0], *SPLITS[0][1])


def module(name: str) -> Any:
    """Import a module of the package."""
    return import_module(f"{PACKAGE}.{name}")


def settings(*words: str) -> Any:
    """Return the settings of a command line, made small."""
    _, config, _ = module("__main__").parse(["train", *SMALL, *words])
    return config


@contextmanager
def start(*words: str, nproc: int = RANKS, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``scripts/launch.sh``, and leave no process of it behind."""
    variables = os.environ | {"NPROC": str(nproc), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        variables.pop(name, None)  # The tests themselves may run under a launcher.
    command = [str(ROOT / "scripts" / "launch.sh"), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launcher = subprocess.Popen(command, env=variables | environment, text=True, **pipes)
    try:
        yield launcher
    finally:
        launcher.kill()  # The ranks end with their launcher.
        launcher.wait()


def launch(*words: str, nproc: int = RANKS, code: int = 0, **environment: str) -> tuple[str, str]:
    """Run ``scripts/launch.sh`` and check its exit code; returns its output and its errors."""
    with start(*words, nproc=nproc, **environment) as launcher:
        out, err = launcher.communicate(timeout=300)  # Until all ranks, which print, have ended.
    assert launcher.returncode == code, f"exit code {launcher.returncode}\n{out}\n{err}"
    return out, err


def train(run_dir: Path, *words: str, **options: Any) -> tuple[str, str]:
    """Train in a run directory, or resume there; takes the options of ``launch``."""
    return launch("train", *SMALL, "--run.dir", str(run_dir), *words, **options)


def end_at(step: int, run_dir: Path, end: Any, *words: str, nproc: int = RANKS) -> Any:
    """Train until a step, and ``end`` the launcher; returns its exit code, output and errors."""
    with start("train", *SMALL, "--run.dir", str(run_dir), *words, nproc=nproc) as launcher:
        deadline = time.monotonic() + 120
        while last_step(run_dir) < step:
            assert launcher.poll() is None, launcher.communicate(timeout=60)
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.005)
        end(launcher.pid)
        out, err = launcher.communicate(timeout=120)
    assert last_step(run_dir) < STEPS, "the ranks continued without their launcher"
    return launcher.returncode, out, err


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, on Linux; a launcher's are the ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid] + [member for child in children(pid) for member in family(child)]


def send(number: int, pids: list[int]) -> None:
    """Send a signal to processes, the last one first."""
    for pid in reversed(pids):
        os.kill(pid, number)


def read_records(run_dir: Path, event: str = "train") -> list[dict[str, Any]]:
    """Return the records of one event; the last line of a live run may be incomplete."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["event"] == event]


def last_step(run_dir: Path) -> int:
    """Return the last step that a run has logged."""
    return max([record["step"] for record in read_records(run_dir)], default=0)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step-*.pt"))


def load(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's newest checkpoint, which any PyTorch program can load."""
    return torch.load(checkpoints(run_dir)[-1], weights_only=True)


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two tensors of one name, relative to the norm of theirs."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


def assert_same(ours: Path, theirs: Path) -> None:
    """Assert that two runs have bitwise the same weights, optimizer, losses, norms and metrics."""
    for content in ("model", "optimizer"):
        torch.testing.assert_close(load(ours)[content], load(theirs)[content], rtol=0, atol=0)
    assert read_records(ours, "eval") == read_records(theirs, "eval")
    assert (ours / "checkpoints/best").read_text() == (theirs / "checkpoints/best").read_text()
    for our_record, their_record in zip(read_records(ours), read_records(theirs), strict=True):
        assert all(our_record[key] == their_record[key] for key in ("step", "loss", "grad_norm"))
