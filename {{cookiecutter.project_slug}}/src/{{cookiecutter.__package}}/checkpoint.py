"""Checkpoints: one canonical file, written by rank 0, complete or absent.

A checkpoint holds full tensors under the model's own names, so ``model.load_state_dict(torch.load(path)["model"])``
works in any single process, and a run may go on with another number of ranks.
"""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config, UserError, to_dict
from .distributed import World, get_rng_state, on_main, set_rng_state
from .parallel import Parallel
from .rundir import checkpoint_folder, list_checkpoints
from .state import collect, hand_out, named_tensors

# Written into each file; a reader refuses a format that it does not know.
FORMAT = 1


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: Optimizer steps done.
        epoch: Passes over the training set done.
        samples: Samples of this epoch consumed, over all ranks.
        best_step: Step of the best evaluation so far.
        best_value: Its figure, ``dataset.BEST_BY``.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best_step: int | None = None
    best_value: float | None = None


class Checkpointer:
    """Saves and restores one run; its methods are collectives.

    Args:
        parallel: The model.
        optimizer: Its optimizer.
        others: What else has a state of its own (scheduler, scaler), by name.
        config: The run's settings.
        world: This process's place.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        others: dict[str, Any],
        config: Config,
        world: World,
    ) -> None:
        self.parallel, self.optimizer, self.others = parallel, optimizer, others
        self.config, self.world = config, world
        self.folder = checkpoint_folder(config)

    def save(self, progress: Progress) -> None:
        """Write the run as it is after ``progress.step`` steps, and remove what is no longer to be kept.

        Raises:
            UserError: on every rank, if rank 0 could not write.
        """
        self.parallel.average_buffers()
        tensors = collect(named_tensors(self.parallel.module, self.optimizer), self.world.device)
        rng: list[Any] | None = [None] * self.world.size if self.world.is_main else None
        dist.gather_object(get_rng_state(self.world.device), rng)

        def write() -> None:
            state = fold(tensors) | {name: other.state_dict() for name, other in self.others.items()}
            state["param_groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
            state.update(format=FORMAT, progress=asdict(progress), rng=rng, config=to_dict(self.config))
            write_atomically(self.folder / f"step-{progress.step:08d}.pt", state)
            prune(self.folder, self.config.checkpoint.keep, progress.best_step)

        on_main(write, self.world)

    def restore(self, candidates: Sequence[Path]) -> Progress:
        """Go on from the first of ``candidates`` that can be read; from the start, if there are none.

        Raises:
            UserError: if none can be read, or its network is not the one of this run.
        """
        if not candidates:
            return Progress()
        header, state = read_on_main(candidates, self.world)
        saved, wanted = header["config"]["model"], to_dict(self.config)["model"]
        for key in wanted:
            if saved.get(key) != wanted[key]:
                raise UserError(
                    f"the checkpoint's network has model.{key} = {saved.get(key)}, this run's has {wanted[key]}; "
                    "give the same, or another run.dir"
                )
        load(state, self.parallel, self.optimizer)
        for group, options in zip(self.optimizer.param_groups, header["param_groups"], strict=True):
            group.update(options)
        for name, other in self.others.items():
            other.load_state_dict(header[name])
        if len(header["rng"]) == self.world.size:
            set_rng_state(header["rng"][self.world.rank], self.world.device)
        return Progress(**header["progress"])


def fold(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Named tensors as they lie in a file: ``model`` is a plain state dict, ``optimizer`` is keyed by parameter."""
    folded: dict[str, Any] = {"model": {}, "optimizer": {}}
    for path, tensor in tensors.items():
        part, name = path.split(".", maxsplit=1)
        if part == "model":
            folded["model"][name] = tensor
        else:
            parameter, key = name.rsplit(".", maxsplit=1)
            folded["optimizer"].setdefault(parameter, {})[key] = tensor
    return folded


def unfold(state: dict[str, Any]) -> dict[str, Tensor]:
    """The named tensors of a file; the opposite of ``fold``."""
    tensors = {f"model.{name}": tensor for name, tensor in state.get("model", {}).items()}
    for name, entry in state.get("optimizer", {}).items():
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in entry.items()}
    return tensors


def load(state: dict[str, Any], parallel: Parallel, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take over the tensors of a checkpoint that rank 0 has read (elsewhere ``state`` is empty); a collective."""
    wanted = state if optimizer is not None else {"model": state.get("model", {})}
    hand_out(unfold(wanted), named_tensors(parallel.module, optimizer), parallel.device)


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the ``keep`` newest and the best, and what a killed write left."""
    for path in list_checkpoints(folder)[:-keep]:
        if path.stem != f"step-{best_step or 0:08d}":
            path.unlink()
    for path in folder.glob("step-*.tmp"):
        path.unlink()


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` so that ``path`` is complete or absent, also if the machine stops in the middle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The new name is an entry of the folder, which has to reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; runs no code from it.

    Raises:
        UserError: if it cannot be read, was cut short or altered, or is of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"{path} is damaged: the checksum of {damaged} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is not a readable checkpoint: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    return content


def read_on_main(candidates: Sequence[Path], world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the first readable of ``candidates`` on rank 0, the only one that has to see the disk; a collective.

    Returns:
        The small parts, on every rank; and the whole checkpoint on rank 0 (elsewhere empty).

    Raises:
        UserError: on every rank, if none can be read.
    """
    content: dict[str, Any] = {}

    def load() -> dict[str, Any]:
        for path in candidates:
            try:
                content.update(read(path))
                break
            except UserError as error:
                if path == candidates[-1]:
                    raise
                print(f"{error}; going on from the one before", file=sys.stderr)
        return {name: part for name, part in content.items() if name not in ("model", "optimizer")}

    return on_main(load, world), content
