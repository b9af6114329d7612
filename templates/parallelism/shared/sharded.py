"""Sharded checkpoints: every rank writes its part while training continues; a folder is complete or absent.

The format is that of ``torch.distributed.checkpoint``. A run resumes from it under any strategy. Resume only from files
that you trust: unlike a full checkpoint, it is read with pickle, and has no checksums.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from . import checkpoint
from .config import Config, UserError
from .distributed import FILE_TIMEOUT, Process
from .files import write_atomically


class Checkpointer(checkpoint.Checkpointer):
    """Saves a run in ``checkpoint.format``, and resumes it from either format."""

    def __init__(self, config: Config, process: Process) -> None:
        super().__init__(config, process)
        if config.checkpoint.format == "sharded":  # For its threads alone.
            self.group = dist.new_group(backend="gloo", timeout=FILE_TIMEOUT)
        self.stager: Any = None

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Read a checkpoint; of a sharded one, what all ranks hold."""
        if path.suffix != ".dcp":
            return checkpoint.read(path)
        try:
            header = json.loads((path / "header.json").read_text())
            metadata = dcp.FileSystemReader(path).read_metadata()
            sizes = {file.name: file.stat().st_size for file in path.iterdir()}
            if any(sizes.get(p.relative_path, 0) < p.offset + p.length for p in metadata.storage_data.values()):
                raise ValueError("a part of it is damaged or missing")
            stateful = {n.removeprefix("optimizer.state.").rpartition(".")[0] for n in metadata.state_dict_metadata}
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):  # A disk that fails.
                raise
            raise UserError(f"{path} is not a readable checkpoint: {error}") from None
        return header | {"shards": str(path), "stateful": stateful}

    @staticmethod
    def load(parallel: Any, content: dict[str, Any], *optimizers: Any) -> None:
        """Load a checkpoint that was read, or this rank's part of a sharded one."""
        if "shards" not in content:
            return checkpoint.Checkpointer.load(parallel, content, *optimizers)
        state = local_state(parallel.module, *optimizers)
        for name in state["optimizer"]["state"].keys() - content["stateful"]:
            del state["optimizer"]["state"][name]
        try:
            dcp.load(state, checkpoint_id=content["shards"])
        except dcp.CheckpointException as error:  # It is no Exception.
            raise UserError(f"{content['shards']} cannot be loaded: {str(error).splitlines()[-1]}") from None
        dsd.set_model_state_dict(parallel.module, state["model"])
        for optimizer in optimizers:
            whole = dsd.get_optimizer_state_dict(parallel.module, optimizer) | state["optimizer"]
            dsd.set_optimizer_state_dict(parallel.module, optimizer, whole, options=dsd.StateDictOptions(strict=False))

    def save(self, progress: dict[str, int]) -> None:
        """Save in the format. Shards get a thread of their own: a failing run must not wait for others."""
        #:: if fact("plans_layers") ::#
        whole = [x for x in self.parallel.module.named_parameters() if "tensor" not in x[1].device_mesh.mesh_dim_names]
        own = {(self.parallel.dp_rank, name): p.to_local().norm().item() for name, p in whole}
        if wrong := [n for each in self.process.all_gather(own) for n, v in each.items() if own.get(n, v) > 1.0001 * v]:
            raise UserError(f"copies of {wrong[0][1]} drift apart; plan it in plan.py, or set train.exact")
        #:: endif ::#
        if self.config.checkpoint.format == "full":
            return super().save(progress)
        header = json.dumps(self.prepare(progress))
        final = self.folder / f"step-{progress['step']:08d}.dcp"
        partial = final.with_suffix(".dcp.tmp")
        if self.stager is None or torch.__version__ < "2.13":  # There, a stager is used once.
            accelerated = self.process.device.type == "cuda"  # To pinned memory.
            self.stager = DefaultStager(StagingOptions(accelerated, False, False, accelerated))
        content = self.stager.stage(local_state(self.parallel.module, self.optimizer))
        self.pending = type(self.writer)(1).submit(self.write_shards, content, header, partial, final)

    def write_shards(self, content: Any, header: str, partial: Path, final: Path) -> None:
        """Write this rank's part; the folder gets its name when all is written."""
        try:
            writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)  # Else it waits for the device.
            dcp.save(content, storage_writer=writer, process_group=self.group)
        except (Exception, dcp.CheckpointException) as error:
            raise UserError(f"{final} was not written; disk full? {str(error).splitlines()[-1]}") from None
        if self.process.rank == 0:
            write_atomically(partial / "header.json", header)
            os.replace(partial, final)


def local_state(module: Any, *optimizers: Any) -> dict[str, Any]:
    """Return this rank's part of model and optimizer, by name."""
    model, optimizer = dsd.get_state_dict(module, optimizers)
    return {"model": model, "optimizer": {"state": optimizer.get("state", {})}}
