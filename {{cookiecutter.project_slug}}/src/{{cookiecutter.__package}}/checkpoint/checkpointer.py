"""Saving and restoring a run, and whatever is registered with it. This is what a full checkpoint holds, as
``torch.load`` returns it:

{"model": {"head.linear.weight": tensor, ...},                       a plain state dict
 "optimizer": {"head.linear.weight": {"exp_avg": ...}, ...},         keyed by parameter
 "param_groups": [...], "built_groups": [...],                       their options, now and before the first step
 "scheduler": {...}, "scaler": {...},
 "progress": {"step": 440, "epoch": 20, ...},
 "rng": [...],                                                       one state per rank
 "tensors": [...], "ranks": [...],                                   names of what else is registered, by kind
 "config": {...}, "format": 2}
"""

import copy
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..config import CheckpointConfig, UserError
from ..launch import check_run_directory, list_checkpoints
from ..runtime import Process, get_rng_state, new_patient_group, on_main, remove, set_rng_state, write_atomically
from . import sharded
from .changes import check_changes
from .content import FORMAT, DamagedCheckpointError, Progress, is_alike
from .loading import damage_on_any_rank, load, read_on_main
from .state_dict import drop_missing_state, flat_state_dict, gather_full_tensors, unflatten

RESERVED = {"param_groups", "built_groups", "progress", "rng", "tensors", "ranks", "config", "format"}
RESERVED |= {"metadata", "checksums", "names", "world_size"}  # Of a sharded checkpoint, and of a header that was read.


class Checkpointer:
    """Saves and restores one run: its module, its settings and what is registered. Its methods are collectives."""

    def __init__(
        self,
        module: nn.Module,
        settings: Mapping[str, Mapping[str, Any]],
        run_dir: Path,
        config: CheckpointConfig,
        process: Process,
    ) -> None:
        self.module, self.settings, self.run_dir, self.config, self.process = module, settings, run_dir, config, process
        self.optimizers: list[torch.optim.Optimizer] = []
        self.built_groups: list[dict[str, Any]] = []  # The options of their groups before a schedule changed them.
        self.stateful: dict[str, dict[str, Any]] = {kind: {} for kind in ("run", "rank", "tensors")}
        self.is_restored = False
        self.pending: tuple[Future[Any], Path] | None = None
        # Sharded saves exchange messages in a thread while training does, so they need their own group.
        self.group: Any = new_patient_group(config.timeout_seconds) if config.format == "sharded" else None

    def register(self, name: str, stateful: Any, kind: Literal["run", "rank", "tensors"] = "run") -> None:
        """Save and restore ``stateful``, which has ``state_dict`` and ``load_state_dict``, under ``name``.

        An optimizer is saved by the names of its parameters, together with the others. Anything else is of a kind:

            run        the same on all ranks, such as a scheduler; rank 0's is saved, but all of them are asked for
                       it, so that they may gather it
            rank       each rank's own, such as a buffer of samples; restored if the world size is the same
            tensors    ``state_dict`` returns tensors named like the parameters that this rank holds, such as their
                       average; they are sharded, gathered and converted as those are, and restored in place, without
                       ``load_state_dict``

        Its state consists of tensors and built-in types, because loading runs no code. Everything is registered before
        the run is restored.
        """
        if self.is_restored:
            raise ValueError(f"{name!r} is registered too late to be restored; do it before Checkpointer.restore")
        names = {"model", "optimizer", *RESERVED, *(name for kind in self.stateful.values() for name in kind)}
        if isinstance(stateful, torch.optim.Optimizer):
            self.optimizers.append(stateful)
            self.built_groups += [options(group) for group in stateful.param_groups]
        elif name in names or "." in name:
            raise ValueError(f"{name!r} is not a free name for state in checkpoints")
        elif kind == "tensors" and copies_tensors(stateful):
            raise ValueError(f"the state_dict of {name!r} returns copies, into which nothing can be restored")
        else:
            self.stateful[kind][name] = stateful

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a pending save, unless the run has failed: then other ranks may never finish theirs."""
        if kind is None:
            self.wait()

    def wait(self) -> None:
        """Wait for the pending save, if there is one; raises UserError on every rank if one could not write."""
        pending, self.pending = self.pending, None
        if pending is not None:
            future, path = pending
            try:
                with sharded.one_line_errors(f"{path} could not be written", UserError):
                    future.result()
            except UserError:
                if self.process.is_main:
                    shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)  # The disk may be full.
                raise

    def save(self, progress: Progress) -> None:
        """Save the run as it is after ``progress.step`` steps, and remove checkpoints that are no longer kept.

        A sharded checkpoint is copied to the CPU and written while training continues; the next save waits for it.
        Raises UserError on every rank if this or the previous save could not be written.
        """
        self.wait()
        on_main(partial(check_run_directory, self.run_dir))
        tensors = self.state()
        header = self.build_header(progress)
        path = self.run_dir / "checkpoints" / f"step-{progress.step:08d}.pt"
        clean_up = partial(prune, self.run_dir, self.config.keep, progress.step, progress.best_step)

        if self.config.format == "sharded":
            path = path.with_suffix(".dcp")
            writer = sharded.Writer(path, header, tensors, on_finish=clean_up)
            on_main(writer.make_folder)
            self.pending = sharded.start_save(tensors, writer, self.group), path
            return

        full = gather_full_tensors(tensors, self.process.device)

        def write() -> None:
            write_atomically(path, lambda file: torch.save(unflatten(full) | header, file))
            clean_up()

        on_main(write)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors that this rank holds, by name."""
        named = {name: each.state_dict() for name, each in self.stateful["tensors"].items()}
        return flat_state_dict(self.module, self.optimizers, named)

    def replicable_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that ranks may hold in common; buffers are each rank's own until they are averaged."""
        buffers = {f"model.{name}" for name, _ in self.module.named_buffers()}
        return {name: tensor for name, tensor in self.state().items() if name not in buffers}

    def build_header(self, progress: Progress) -> dict[str, Any]:
        """Return everything in a checkpoint except its tensors, complete only on rank 0; a collective."""
        own = {name: to_cpu(each.state_dict()) for name, each in self.stateful["rank"].items()}
        header = {name: each.state_dict() for name, each in self.stateful["run"].items()}
        check_savable(own | header)
        ranks: list[Any] | None = [{}] * self.process.world_size if self.process.is_main else None
        dist.gather_object(own | {"rng": get_rng_state(self.process.device)}, ranks)
        header |= {name: [state.get(name) for state in ranks or []] for name in ("rng", *own)}
        header.update(tensors=list(self.stateful["tensors"]), ranks=list(own))
        header["param_groups"] = [options(group) for group in self.param_groups()]
        header["built_groups"] = self.built_groups
        header.update(format=FORMAT, progress=asdict(progress), config=self.settings)
        return copy.deepcopy(header)  # It may be written after the next steps.

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def restore(self, candidates: Sequence[Path]) -> Progress:
        """Resume from the first of ``candidates`` that can be read; start fresh if there are none.

        Rejects candidates if none can be read, and the checkpoint of another model or dataset.
        """
        self.is_restored = True
        for path in candidates:
            try:
                header, state = read_on_main(path)
                self.check_settings(header)
                self.check_registered(header, path)
                tensors = self.state()
                drop_missing_state(tensors, header["names"], self.module, self.optimizers)
                load(path, header, state, tensors, self.process.device)
                own = self.scatter_ranks(header, state)
                with damage_on_any_rank(path):
                    self.restore_ranks(own)
                    self.restore_header(header)
                progress = Progress(**header["progress"])
                if path.absolute().parent.parent.resolve() != self.run_dir.resolve():
                    progress.run_id = ""  # A branch of another run is a new one.
                return progress
            except DamagedCheckpointError as error:
                if path == candidates[-1]:
                    raise DamagedCheckpointError(f"{error}; restore a copy, or give another run.dir") from None
                if self.process.is_main:
                    print(f"{error}; resuming from the one before", file=sys.stderr)
        return Progress()

    def check_settings(self, header: Mapping[str, Any]) -> None:
        """Print the settings that changed; reject changes that cannot take effect, or a run that started elsewhere."""
        saved, wanted = header["config"], self.settings["model"]["weights"]
        if wanted is not None and saved.get("model", {}).get("weights") != wanted:
            raise UserError(
                f"run.dir is {self.run_dir}, with a run that did not start from model.weights {wanted}; leave the "
                "setting out to resume that run, or give another run.dir to start a new one"
            )
        for line in check_changes(saved, self.settings, header["progress"]["samples"]):
            if self.process.is_main:
                print(line, file=sys.stderr)

    def check_registered(self, header: Mapping[str, Any], path: Path) -> None:
        """Reject a checkpoint without the state that is registered, or with other parameter groups."""
        remedy = f"start another run.dir from its weights: --model.weights {path}"
        kinds = {"run": header.keys(), "rank": header["ranks"], "tensors": header["tensors"]}
        missing = [name for kind, saved in kinds.items() for name in self.stateful[kind] if name not in saved]
        if missing:
            raise UserError(f"{path} lacks the state of {', '.join(missing)}, which is registered now; {remedy}")
        saved_groups, groups = len(header["param_groups"]), len(self.param_groups())
        if saved_groups != groups:
            raise UserError(f"{path} has {saved_groups} parameter groups, and the optimizers have {groups}; {remedy}")

    def scatter_ranks(self, header: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's own state, which rank 0 has in ``state``; nothing if there was another number of ranks."""
        names = ["rng", *self.stateful["rank"]]
        if header["world_size"] != self.process.world_size:
            if self.process.is_main and len(names) > 1:
                ranks = f"{header['world_size']} rank(s) saved it, {self.process.world_size} resume"
                print(f"{', '.join(names[1:])} of each rank starts anew: {ranks}", file=sys.stderr)
            return {}
        own: list[Any] = [None]
        everyone = [{name: state[name][rank] for name in names} for rank in range(self.process.world_size) if state]
        dist.scatter_object_list(own, everyone if self.process.is_main else None, src=0)
        state_of_rank: dict[str, Any] = own[0]
        return state_of_rank

    def restore_ranks(self, own: Mapping[str, Any]) -> None:
        """Restore this rank's own state, if it has any."""
        for name, state in own.items():
            if name == "rng":
                set_rng_state(state, self.process.device)
            else:
                self.stateful["rank"][name].load_state_dict(state)

    def restore_header(self, header: Mapping[str, Any]) -> None:
        """Restore what all ranks have in common."""
        before = zip(header["built_groups"], header["param_groups"], strict=True)
        for group, built, (built_before, saved) in zip(self.param_groups(), self.built_groups, before, strict=True):
            # An option that is built otherwise now was changed in the settings.
            names = [name for name in group.keys() & saved.keys() if built.get(name) == built_before.get(name)]
            if unfit := [name for name in names if not is_alike(saved[name], group[name])]:
                raise TypeError(f"the optimizer's {unfit[0]} is {saved[unfit[0]]}")
            group.update({name: saved[name] for name in names})
        for name, each in self.stateful["run"].items():
            if header[name]:  # A scaler that is off has no state.
                each.load_state_dict(header[name])


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {name: value for name, value in group.items() if name != "params"}


def copies_tensors(stateful: Any) -> bool:
    """Return whether ``state_dict`` returns copies of its tensors, and not the tensors themselves."""
    one, other = (
        [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in stateful.state_dict().values()]
        for _ in range(2)
    )
    return any(a.data_ptr() != b.data_ptr() for a, b in zip(one, other, strict=True))


def to_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU: other ranks may not have the device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)


def check_savable(states: Mapping[str, Any]) -> None:
    """Reject states that could be saved but not loaded, because loading would have to run code."""
    for name, state in states.items():
        for leaf in tree_leaves(state):
            if not isinstance(leaf, torch.Tensor) and type(leaf) not in (bool, int, float, str, bytes, type(None)):
                kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
                raise UserError(f"the state of {name} holds a {kind}; let state_dict return tensors and built-in types")


def prune(run_dir: Path, keep: int, step: int, best_step: int | None) -> None:
    """Remove what a killed save left behind, and all checkpoints except the ``keep`` newest and the best.

    Those after ``step`` do not count: they are damaged, or the run would have resumed from them. What cannot be removed
    stays, with a warning: the new checkpoint is complete.
    """
    newest, best = (f"step-{each:08d}" for each in (step, best_step or 0))
    own = [path for path in list_checkpoints(run_dir) if path.stem <= newest]
    surplus = [path for path in own[:-keep] if path.stem != best]
    for path in [*(run_dir / "checkpoints").glob("step-*.tmp"), *surplus]:
        try:
            remove(path)
        except OSError as error:
            print(f"warning: {path} could not be removed: {error.strerror}", file=sys.stderr)
