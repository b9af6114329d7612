"""Guarantees 3 and 5: a run that was stopped or killed, and started again, ends as one that never was."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from support import LENGTH, RANKS, STEPS, command, environment, launch, load_model, read_records


def end_at(step: int, number: signal.Signals, run: Path) -> str:
    """Start the run, and send its launcher a signal when it has logged ``step``; gives what it told, to its end."""
    launcher = subprocess.Popen(
        command("train", *LENGTH, "--run.dir", str(run)),
        env=environment(RANKS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    give_up = time.monotonic() + 120
    while not reached(step, run):
        assert launcher.poll() is None, "the run ended too soon"
        assert time.monotonic() < give_up, f"step {step} was not reached"
        time.sleep(0.01)
    launcher.send_signal(number)
    told = launcher.communicate()[0]  # Returns when the last process that holds the launcher's output is gone.
    assert launcher.returncode != 0
    assert not reached(STEPS, run), "the ranks went on without their launcher"
    return told


def reached(step: int, run: Path) -> bool:
    """Whether the run has logged ``step``."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def test_a_run_that_was_killed_and_stopped_ends_with_the_same_weights(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    whole, run = trained(RANKS), tmp_path / "run"
    end_at(6, signal.SIGKILL, run)
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", end_at(11, signal.SIGTERM, run))
    assert stopped, "it was not asked to stop in order"
    last = launch("train", *LENGTH, "--run.dir", str(run), nproc=RANKS)

    assert f"step {stopped[1]} of {STEPS}" in last.stdout  # No step is lost.
    expected, weights = load_model(whole), load_model(run)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    for event in ("train", "eval"):
        told = [[(record["step"], record["loss"]) for record in read_records(folder, event)] for folder in (whole, run)]
        assert told[0] == told[1]
