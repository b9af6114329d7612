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
STEPS, TOLERANCE = 20, 1e-5  # How much a split may change the result: what different rounding does, and some more.
# configs/default.yaml, made small: two epochs on the CPU, in which each setting has an effect.
SMALL = [
    *"--data.eval_batch_size 17 --distributed.device cpu --run.seed 7 --optim.warmup_steps 5".split(),
    *f"--train.max_steps {STEPS} --train.log_every 1 --train.eval_every 10 --checkpoint.every_steps 4".split(),
    *"--optim.min_lr_ratio 0.1 --optim.weight_decay 0.1 --optim.eps 1e-6 --train.clip_grad_norm 0.1".split(),
    *("--optim.lr", "1e-3", "--optim.betas", "[0.8, 0.95]"),
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/small.py" ::#
    #:: endfilter ::#
]
#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/splits.py" ::#


def module(name: str) -> Any:
    """Import a module of the package."""
    return import_module(f"{PACKAGE}.{name}")


def settings(*words: str) -> Any:
    """Return the settings of a command line."""
    return module("__main__").parse(["train", *SMALL, *words])[1]


@contextmanager
def start(*words: str, nproc: int = RANKS, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``scripts/launch.sh``, and leave nothing of it behind."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"NPROC": str(nproc), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    command = [str(ROOT / "scripts" / "launch.sh"), *words]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launcher = subprocess.Popen(command, env=clean, text=True, **pipe)
    try:
        yield launcher
    finally:
        launcher.kill()  # Its ranks end with it.
        launcher.wait()


def launch(*words: str, nproc: int = RANKS, code: int = 0, **environment: str) -> tuple[str, str]:
    """Run ``scripts/launch.sh`` until the last process that holds its output is gone; returns what it printed."""
    with start(*words, nproc=nproc, **environment) as launcher:
        out, err = launcher.communicate(timeout=300)
    assert launcher.returncode == code, f"exit code {launcher.returncode}\n{out}\n{err}"
    return out, err


def train(run: Path, *words: str, nproc: int = RANKS, code: int = 0, **environment: str) -> tuple[str, str]:
    """Train in a run directory, or resume there."""
    return launch("train", *SMALL, "--run.dir", str(run), *words, nproc=nproc, code=code, **environment)


def end_at(
    step: int, run: Path, end: Callable[[int], object], *words: str, nproc: int = RANKS, **environment: str
) -> tuple[int, str, str]:
    """Train, and let ``end`` end the launcher with this id at a step; returns its exit code and what was printed."""
    with start("train", *SMALL, "--run.dir", str(run), *words, nproc=nproc, **environment) as launcher:
        deadline = time.monotonic() + 120
        while last_step(run) < step:
            assert launcher.poll() is None, launcher.communicate(timeout=60)
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.005)
        end(launcher.pid)
        out, err = launcher.communicate(timeout=120)
    assert last_step(run) < STEPS, "the ranks continued without their launcher"
    return launcher.returncode, out, err


def children(pid: int) -> list[int]:
    """Return the processes that a process started, from Linux's process table; those of a launcher are the ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(member for child in children(pid) for member in family(child))]


def kill_last_rank(launcher: int) -> None:
    """Kill a rank; the last one writes no files, if there are several."""
    os.kill(children(launcher)[-1], signal.SIGKILL)


def read_records(run: Path, event: str = "train") -> list[dict[str, Any]]:
    """Return the complete records of one kind that a run wrote."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["event"] == event]


def last_step(run: Path) -> int:
    """Return the last step that a run has logged."""
    return max([record["step"] for record in read_records(run)], default=0)


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*.pt"))


def load(run: Path) -> dict[str, Any]:
    """Return the content of a run's newest checkpoint, which any PyTorch program can load."""
    return torch.load(checkpoints(run)[-1], weights_only=True)


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return by how much of its norm a tensor differs at most."""
    assert ours.keys() == theirs.keys()
    return max(float((value - theirs[name]).norm() / theirs[name].norm()) for name, value in ours.items())


def assert_same(ours: Path, theirs: Path) -> None:
    """Assert that two runs ended with bitwise the same weights, optimizer, losses and metrics."""
    a, b = load(ours), load(theirs)
    for part in zip(tensors(a), tensors(b), strict=True):
        assert torch.equal(*part)
    assert read_records(ours, "eval") == read_records(theirs, "eval")
    logged = [[(r["step"], r["loss"]) for r in read_records(run)] for run in (ours, theirs)]
    assert logged[0] == logged[1]


def tensors(content: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors of a checkpoint."""
    state = content["optimizer"]["state"]
    return [*content["model"].values(), *(state[name][key] for name in sorted(state) for key in sorted(state[name]))]
