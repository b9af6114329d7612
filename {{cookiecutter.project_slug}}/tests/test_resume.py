"""Guarantees 3 and 5: a run that was stopped or killed, and started again, ends as one that never was."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from support import LENGTH, RANKS, STEPS, end_at, launch, load_model, read_records


def test_a_run_that_was_killed_and_stopped_ends_with_the_same_weights(
    trained: Callable[..., Path], killed: tuple[Path, int, str], tmp_path: Path
) -> None:
    whole, run = trained(RANKS), Path(shutil.copytree(killed[0], tmp_path / "run"))
    exit_code, told = end_at(11, run, lambda launcher: launcher.terminate())
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", told)
    assert exit_code != 0 and stopped, "it was not asked to stop in order"
    last = launch("train", *LENGTH, "--run.dir", str(run), nproc=RANKS)

    assert f"step {stopped[1]} of {STEPS}" in last.stdout  # No step is lost.
    expected, weights = load_model(whole), load_model(run)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    for event in ("train", "eval"):
        ours, theirs = (
            [(record["step"], record["loss"]) for record in read_records(folder, event)] for folder in (run, whole)
        )
        assert ours == theirs
