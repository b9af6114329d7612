"""Guarantee 3: a run that was killed and started again ends as one that never was."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import torch

from support import RANKS, command, environment, launch, load_model, read_records

STEPS = 30
SETTINGS = f"--train.max_steps {STEPS} --train.log_every 1 --train.eval_every 15 --checkpoint.every_steps 4".split()


def kill_at(step: int, run: Path) -> None:
    """Start the run, and SIGKILL its launcher when it has logged ``step``; the ranks have to end by themselves."""
    launcher = subprocess.Popen(
        command("train", *SETTINGS, "--run.dir", str(run)),
        env=environment(RANKS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    give_up = time.monotonic() + 120
    while not reached(step, run):
        assert launcher.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < give_up, f"step {step} was not reached"
        time.sleep(0.01)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()  # Returns when the last process that holds the launcher's output is gone.
    assert not reached(STEPS, run), "the ranks went on without their launcher"


def reached(step: int, run: Path) -> bool:
    """Whether the run has logged ``step``."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launch("train", *SETTINGS, "--run.dir", str(whole), nproc=RANKS)
    kill_at(14, killed)
    again = launch("train", *SETTINGS, "--run.dir", str(killed), nproc=RANKS)

    assert "step 0 of" not in again.stdout  # It went on, and did not start afresh.
    expected, weights = load_model(whole), load_model(killed)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    for event in ("train", "eval"):
        told = [[(record["step"], record["loss"]) for record in read_records(run, event)] for run in (whole, killed)]
        assert told[0] == told[1]
