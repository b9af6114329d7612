"""Guarantees 3 and 8 for sharded checkpoints: they hold what full ones hold, and damaged ones are refused."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from support import LENGTH, RANKS, launch, newest_checkpoint

checkpoint = import_module("{{ cookiecutter.__package }}.checkpoint")
config = import_module("{{ cookiecutter.__package }}.config")
convert = import_module("{{ cookiecutter.__package }}.convert").convert

SETTINGS = ("--checkpoint.format", "sharded", "--checkpoint.every_steps", "10")


@pytest.fixture
def run(trained: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a run with sharded checkpoints of steps 10 and 20."""
    return Path(shutil.copytree(trained(RANKS, *SETTINGS), tmp_path / "run"))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model and optimizer, from a sharded checkpoint that is made a full one."""
    file = folder.with_suffix(".pt")
    convert(folder, file)
    return tensors(file)


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of model and optimizer in a full checkpoint."""
    content = torch.load(file, weights_only=True)
    state = {(name, key): value for name, entry in content["optimizer"].items() for key, value in entry.items()}
    return content["model"] | state


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def alter(file: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Attack:
    """Would make a folder, if loading ran it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def test_a_sharded_checkpoint_holds_what_a_full_one_holds(trained: Callable[..., Path], run: Path) -> None:
    expected = newest_checkpoint(trained(RANKS))
    assert_same(whole(run / "checkpoints" / "step-00000020.dcp"), tensors(expected))
    again = run / "again.dcp"
    convert(expected, again)
    assert_same(whole(again), tensors(expected))


def test_a_run_goes_on_from_the_last_checkpoint_that_is_whole(trained: Callable[..., Path], run: Path) -> None:
    newest = run / "checkpoints" / "step-00000020.dcp"
    alter(newest / f"__{RANKS - 1}_0.distcp")
    torn = newest.with_suffix(".tmp")  # What a save that was killed leaves.
    torn.mkdir()
    (torn / "__9_0.distcp").touch()
    done = launch("train", *LENGTH, *SETTINGS, "--run.dir", str(run), nproc=RANKS)
    assert "step-00000020.dcp is not" in done.stderr and "going on from the one before" in done.stderr
    assert "step 10 of 20" in done.stdout
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-00000010.dcp", "step-00000020.dcp"]
    assert_same(whole(newest), tensors(newest_checkpoint(trained(RANKS))))


@pytest.mark.parametrize("name", [f"__{RANKS - 1}_0.distcp", ".metadata", "header.pt"])
def test_a_folder_that_was_altered_is_refused(run: Path, name: str) -> None:
    folder = run / "checkpoints" / "step-00000020.dcp"
    alter(folder / name)
    with pytest.raises(config.UserError, match=folder.name):
        whole(folder)


@pytest.mark.parametrize("name", ["header.pt", ".metadata"])
def test_a_crafted_folder_is_refused_and_runs_nothing(run: Path, name: str) -> None:
    folder = run / "checkpoints" / "step-00000020.dcp"
    attack = Attack(run / "hacked")
    if name == "header.pt":
        torch.save(checkpoint.read(folder) | {"rng": attack}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(attack))
    with pytest.raises(config.UserError, match=folder.name):
        whole(folder)
    assert not attack.target.exists()
