"""What the tests share: starting the shipped launcher, ending runs, and reading what they left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGE = next(path.parent.name for path in ROOT.glob("src/*/parallel.py"))
STEPS = 20
TOLERANCE = 1e-5  # A split changes only rounding, by less than this.
# The experiment is small: two epochs on the CPU, where all of optimizer and schedule has an effect.
SMALL = [
    *"--data.eval_batch_size 17 --distributed.device cpu --run.seed 7".split(),
    *f"--train.max_steps {STEPS} --train.log_every 1 --train.eval_every 10".split(),
    *"--checkpoint.every_steps 4 --optim.lr 1e-3 --optim.warmup_steps 5".split(),
    *"--optim.min_lr_ratio 0.1 --optim.weight_decay 0.1 --optim.eps 1e-6".split(),
    *("--optim.betas", "[0.8, 0.95]", "--train.clip_grad_norm", "0.1"),
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/small.py" ::#
    #:: endfilter ::#
]
# Most tests run on RANKS ranks, and some resume on MORE_RANKS. A split is a number of ranks and the
# settings that divide the work among them. EVALUATES_ON has numbers of ranks.
#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/splits.py" ::#


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


def end_at(
    step: int, run_dir: Path, end: Callable[[int], object], *words: str, nproc: int = RANKS
) -> tuple[int, str, str]:
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
    members = [pid]
    for child in children(pid):
        members.extend(family(child))
    return members


def kill_last_rank(launcher: int) -> None:
    """Kill the last rank, which writes no files if there are several."""
    os.kill(children(launcher)[-1], signal.SIGKILL)


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
    for our_tensor, their_tensor in zip(tensors(load(ours)), tensors(load(theirs)), strict=True):
        assert torch.equal(our_tensor, their_tensor)
    assert read_records(ours, "eval") == read_records(theirs, "eval")
    assert (ours / "checkpoints/best").read_text() == (theirs / "checkpoints/best").read_text()
    for our_record, their_record in zip(read_records(ours), read_records(theirs), strict=True):
        assert all(our_record[key] == their_record[key] for key in ("step", "loss", "grad_norm"))


def tensors(content: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors of a checkpoint in one order: weights, and the optimizer's by name."""
    found = list(content["model"].values())
    for _, state in sorted(content["optimizer"]["state"].items()):
        found.extend(tensor for _, tensor in sorted(state.items()))
    return found
