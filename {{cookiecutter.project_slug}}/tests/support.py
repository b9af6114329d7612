"""What the tests share: start the shipped launcher, read what a run left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGE = "{{ cookiecutter.__package }}"
# What the tests train, so that they are done soon; words of the command line.
#:: if cookiecutter.task == "digits" ::#
SMALL = ("--data.global_batch_size", "128")
#:: else ::#
SMALL = (
    *("--dataset.max_bytes", "43000", "--data.global_batch_size", "64"),
    # The ranks of an evaluation have different numbers of batches.
    *("--dataset.test_bytes", "20520", "--data.eval_batch_size", "80"),
    *("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32"),
    *("--train.epochs", "2"),
)
#:: endif ::#
# How long the runs are that several tests look at: they end in their second epoch.
STEPS = 20
LENGTH = f"--train.max_steps {STEPS} --train.log_every 1 --train.eval_every 10 --checkpoint.every_steps 4".split()
# How much the split may change, relative to the result: what rounding in another order does, and some more.
TOLERANCE = 1e-5
# A setting of runs whose checkpoints no rank holds whole.
SHARDED = ("--checkpoint.format", "sharded")
#:: include "parallelism/" ~ cookiecutter.parallelism ~ ".tests.py" ::#


def name_of_split(value: int | list[str]) -> str:
    """What a test is called for a number of ranks and for settings."""
    return f"{value} rank(s)" if isinstance(value, int) else " ".join(value)


def environment(nproc: int) -> dict[str, str]:
    """The environment of a launch of ``nproc`` ranks with this interpreter; tests never see the caller's launcher."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"NPROC": str(nproc), "PYTHON": sys.executable}


def command(*words: str, small: Sequence[str] = SMALL) -> list[str]:
    """The command line of a launch; on the CPU, so that any machine can start any number of ranks."""
    return [str(ROOT / "scripts" / "launch.sh"), *words[:1], *small, *words[1:], "--distributed.device", "cpu"]


def launch(
    *words: str, nproc: int, exit_code: int = 0, small: Sequence[str] = SMALL
) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/launch.sh`` to its end, and expect its exit code.

    Returns when the last process is gone that holds the launcher's output: one left behind runs into the timeout.
    """
    line = command(*words, small=small)
    done = subprocess.run(line, env=environment(nproc), capture_output=True, text=True, timeout=300)
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def end_at(step: int, run: Path, end: Callable[[subprocess.Popen[str]], None], *words: str) -> tuple[int, str]:
    """Start the run, with more settings in ``words``, and have ``end`` end it when it has logged ``step``.

    Returns:
        The launcher's exit code, and all that was told until the last process was gone that holds its output.
    """
    line = command("train", *LENGTH, *words, "--run.dir", str(run))
    with subprocess.Popen(
        line, env=environment(RANKS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            give_up = time.monotonic() + 120
            while not has_reached(step, run):
                assert launcher.poll() is None, "the run ended too soon"
                assert time.monotonic() < give_up, f"step {step} was not reached"
                time.sleep(0.01)
            end(launcher)
            told, _ = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert not has_reached(STEPS, run), "the ranks went on without their launcher"
    return launcher.returncode, told


def has_reached(step: int, run: Path) -> bool:
    """Whether the run has logged ``step``."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def settings(*words: str) -> Any:
    """The settings of such a command line."""
    return import_module(f"{PACKAGE}.commandline").parse(["train", *SMALL, *words])[1]


def read_records(run: Path, event: str) -> list[dict[str, Any]]:
    """The records of one kind that a run wrote."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event]


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint of a run, full or sharded."""
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint; a sharded one is made a full one first."""
    with TemporaryDirectory() as folder:
        if path.is_dir():
            full = Path(folder) / "full.pt"
            import_module(f"{PACKAGE}.convert").convert(path, full)
            path = full
        return torch.load(path, weights_only=True)


def load_model(run: Path) -> dict[str, torch.Tensor]:
    """The weights that a run ended with."""
    return read_checkpoint(newest_checkpoint(run))["model"]


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Every tensor differs by no more than ``TOLERANCE`` of its norm."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value - theirs[name]).norm() <= TOLERANCE * theirs[name].norm(), name


def alter(file: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
