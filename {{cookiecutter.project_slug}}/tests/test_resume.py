"""A run that was killed, stopped, or lost a checkpoint ends as if nothing had happened."""

import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from conftest import signal_last_rank
from support import LENGTH, RANKS, SHARDED, STEPS, end_at, flip_bit, launch, load_model, module, read_records


def test_a_killed_and_stopped_run_ends_with_the_same_weights(
    trained: Callable[..., Path], killed: tuple[Path, int, str], tmp_path: Path
) -> None:
    whole, run = trained(RANKS), Path(shutil.copytree(killed[0], tmp_path / "run"))
    # One rank is signalled, and all of them stop. The launcher exits with 0 then, unless it was signalled instead.
    exit_code, output = end_at(9, run, partial(signal_last_rank, signal.SIGTERM), *SHARDED)
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", output)
    assert (exit_code == 0) == Path("/proc/self/task").exists() and stopped, "it was not stopped in order"
    *_, before, newest = sorted((run / "checkpoints").iterdir())
    assert newest.name == f"step-{int(stopped[1]):08d}.dcp"  # No step is lost.

    flip_bit(newest / f"__{RANKS - 1}_0.distcp")
    torn = newest.with_suffix(".tmp")  # What a killed save leaves.
    torn.mkdir()
    (torn / "__9_0.distcp").touch()
    last = launch("train", *LENGTH, "--run.dir", str(run), nproc=RANKS)
    assert f"{newest.name} is not" in last.stderr and "resuming from the one before" in last.stderr
    assert f"step {int(before.stem[5:])} of {STEPS}" in last.stdout and not torn.exists()

    expected, weights = load_model(whole), load_model(run)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    for event, name in (("train", "loss"), ("eval", module("dataset").BEST_METRIC)):
        ours, theirs = (
            [(record["step"], record[name]) for record in read_records(folder, event)] for folder in (run, whole)
        )
        assert ours == theirs
