"""Checkpoints: what a run is at a step, complete or absent, under names that no way to split the work can change.

A full one is a file of whole tensors, so ``model.load_state_dict(torch.load(path)["model"])`` works in any single
process; a sharded one (see ``sharded.py``) is a folder. A run may go on from either with any number of ranks.
"""

from __future__ import annotations

import copy
import pickle
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import sharded
from .config import Config, UserError, to_dict
from .distributed import World, get_rng_state, on_main, set_rng_state
from .parallel import Parallel
from .rundir import DamagedError, checkpoint_folder, prune, write_atomically
from .state import average_buffers, collect, fold, hand_out, named_tensors, unfold

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
        evaluation_due: Whether the run was stopped in the evaluation that belongs to this step.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best_step: int | None = None
    best_value: float | None = None
    evaluation_due: bool = False


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
        self.pending: tuple[Future[Any], Path] | None = None
        if config.checkpoint.format == "sharded":
            timeout = timedelta(seconds=config.distributed.timeout_seconds)
            self.group: Any = dist.new_group(backend="gloo", timeout=timeout)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a save that is under way, also when the run has failed; then that is what is to be told."""
        try:
            self.wait()
        except UserError:
            if kind is None:
                raise

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one.

        Raises:
            UserError: on every rank, if one of them could not write.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            sharded.finish_save(*pending)

    def save(self, progress: Progress) -> None:
        """Write the run as it is after ``progress.step`` steps, and remove what is no longer to be kept.

        A sharded checkpoint is copied to the CPU and written while training goes on; the next save waits for it.

        Raises:
            UserError: on every rank, if this or the save before it could not be written.
        """
        self.wait()
        average_buffers(self.parallel.module, self.parallel.data_size, self.parallel.data_group)
        tensors = named_tensors(self.parallel.module, self.optimizer)
        header = self.describe(progress)
        path = self.folder / f"step-{progress.step:08d}.pt"
        tidy = partial(prune, self.folder, self.config.checkpoint.keep, progress.best_step)

        if self.config.checkpoint.format == "sharded":
            path = path.with_suffix(".dcp")
            writer = sharded.Writer(path, header, then=tidy)
            on_main(writer.make_folder, self.world)
            self.pending = sharded.start_save(tensors, writer, self.group), path
            return

        full = collect(tensors, self.world.device)

        def write() -> None:
            write_atomically(path, lambda file: torch.save(fold(full) | header, file))
            tidy()

        on_main(write, self.world)

    def describe(self, progress: Progress) -> dict[str, Any]:
        """All of a checkpoint but its tensors, complete on rank 0; a collective."""
        rng: list[Any] | None = [None] * self.world.size if self.world.is_main else None
        dist.gather_object(get_rng_state(self.world.device), rng)
        header = {name: other.state_dict() for name, other in self.others.items()}
        header["param_groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        header.update(format=FORMAT, progress=asdict(progress), rng=rng, config=to_dict(self.config))
        return copy.deepcopy(header)  # It may be written when the next steps are done.

    def restore(self, candidates: Sequence[Path]) -> Progress:
        """Go on from the first of ``candidates`` that can be read; from the start, if there are none.

        Raises:
            UserError: if none can be read, or its network is not the one of this run.
        """
        for path in candidates:
            try:
                header, state = read_on_main(path, self.world)
                self.check_network(header)
                load(path, header, state, self.parallel, self.optimizer)
                return self.take_over(header)
            except DamagedError as error:
                if path == candidates[-1]:
                    raise
                if self.world.is_main:
                    print(f"{error}; going on from the one before", file=sys.stderr)
        return Progress()

    def check_network(self, header: dict[str, Any]) -> None:
        """Refuse a checkpoint of another network."""
        saved, wanted = header["config"]["model"], to_dict(self.config)["model"]
        for key in wanted:
            if saved.get(key) != wanted[key]:
                raise UserError(
                    f"the checkpoint's network has model.{key} = {saved.get(key)}, this run's has {wanted[key]}; "
                    "give the same, or another run.dir"
                )

    def take_over(self, header: dict[str, Any]) -> Progress:
        """Go on from what ``describe`` said."""
        for group, options in zip(self.optimizer.param_groups, header["param_groups"], strict=True):
            group.update(options)
        for name, other in self.others.items():
            other.load_state_dict(header[name])
        if len(header["rng"]) == self.world.size:
            set_rng_state(header["rng"][self.world.rank], self.world.device)
        return Progress(**header["progress"])


def load(
    path: Path,
    header: dict[str, Any],
    state: dict[str, Any],
    parallel: Parallel,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Take over the tensors of a checkpoint; a collective.

    Args:
        path: Where it is; of a folder, each rank reads what it needs.
        header: Its small parts.
        state: The whole content of a file, on rank 0 (elsewhere empty).
        parallel: The model to fill.
        optimizer: The optimizer to fill.
    """
    tensors = named_tensors(parallel.module, optimizer)
    if "metadata" in header:
        sharded.load(path, header, tensors)
    else:
        wanted = state if optimizer is not None else {"model": state.get("model", {})}
        hand_out(unfold(wanted), tensors, parallel.device)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU, of a folder the header; runs no code from it.

    Raises:
        DamagedError: if it cannot be read, was cut short or altered, or is of another format.
    """
    folder = path.is_dir()
    file = path / sharded.HEADER if folder else path
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise DamagedError(f"{path} is damaged: the checksum of {damaged} is wrong")
        with torch.serialization.safe_globals(sharded.DESCRIPTIONS if folder else []):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise DamagedError(f"{path} is not a readable checkpoint: {str(error).splitlines()[0]}") from None
    parts = {"metadata", "checksums"} if folder else {"model", "optimizer"}
    if not isinstance(content, dict) or content.get("format") != FORMAT or not parts <= content.keys():
        raise DamagedError(f"{path} is not a checkpoint of format {FORMAT}")
    return content


def read_on_main(path: Path, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint on rank 0; of a full one, no other rank has to see the disk. A collective.

    Returns:
        The small parts, on every rank; and the whole content on rank 0 (elsewhere empty).

    Raises:
        DamagedError: on every rank, if it cannot be read.
    """
    content: dict[str, Any] = {}

    def load() -> dict[str, Any]:
        content.update(read(path))
        return {name: part for name, part in content.items() if name not in ("model", "optimizer")}

    return on_main(load, world), content
