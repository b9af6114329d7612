"""Sharded checkpoints hold what full ones hold, and damaged ones are rejected."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import RANKS, SPLITS, assert_close, flip_bit, module, newest_checkpoint, read_checkpoint

convert = module("checkpoint").convert
loading = module("checkpoint.loading")
UserError = module("config").UserError

NPROC, WORDS = SPLITS[-1]


def test_damaged_checkpoints_of_later_steps_cost_none_that_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (80, 90, 100, 110, 200, 300):
        (folder / f"step-{step:08d}.pt").touch()
    module("checkpoint.checkpointer").prune(tmp_path, keep=2, step=110, best_step=80)
    kept = [int(path.stem.removeprefix("step-")) for path in sorted(folder.iterdir())]
    assert kept == [80, 100, 110, 200, 300]


@pytest.fixture
def run(trained: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a run with sharded checkpoints of steps 16 and 20."""
    return Path(shutil.copytree(trained(NPROC, *WORDS), tmp_path / "run"))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of model and optimizer in a checkpoint."""
    content = read_checkpoint(path)
    state = {f"{name} {key}": value for name, entry in content["optimizer"].items() for key, value in entry.items()}
    return content["model"] | state


class Attack:
    """Would create a folder if loading ran it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def test_a_sharded_checkpoint_holds_the_same_as_a_full_one(trained: Callable[..., Path], run: Path) -> None:
    full = newest_checkpoint(trained(RANKS))
    expected = tensors(full)
    assert_close(tensors(newest_checkpoint(run)), expected)
    convert(full, run / "converted.dcp")
    converted = tensors(run / "converted.dcp")
    assert all(torch.equal(converted[name], expected[name]) for name in expected)


def test_exported_weights_are_those_of_the_checkpoint(run: Path) -> None:
    file, back = run / "weights.safetensors", run / "weights.pt"
    convert(newest_checkpoint(run), file)
    convert(file, back)
    expected, weights = read_checkpoint(newest_checkpoint(run))["model"], torch.load(back, weights_only=True)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    flip_bit(file)
    with pytest.raises(UserError, match="its checksum is wrong"):
        loading.read(file)


@pytest.mark.parametrize("name", [f"__{NPROC - 1}_0.distcp", ".metadata", "header.pt"])
def test_an_altered_folder_is_rejected(run: Path, name: str) -> None:
    folder = newest_checkpoint(run)
    flip_bit(folder / name)
    with pytest.raises(UserError, match=folder.name):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["header.pt", ".metadata"])
def test_a_crafted_folder_is_rejected_and_runs_nothing(run: Path, name: str) -> None:
    folder = newest_checkpoint(run)
    attack = Attack(run / "hacked")
    if name == "header.pt":
        # Not in place: what was read may be mapped into memory.
        torch.save(loading.read(folder) | {"rng": attack}, run / name)
        os.replace(run / name, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(attack))
    with pytest.raises(UserError, match=folder.name):
        read_checkpoint(folder)
    assert not attack.target.exists()
