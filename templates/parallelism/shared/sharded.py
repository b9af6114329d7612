"""Sharded checkpoints: every rank writes its shards while training continues.

A checkpoint is a folder, complete or absent, from which a run resumes under any strategy. Resume
only from one that you trust: it is read with pickle, and has no checksums.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from . import checkpoint, files
from .config import Config, UserError
from .distributed import FILE_TIMEOUT, Process


class Checkpointer(checkpoint.Checkpointer):
    """Saves a run in ``checkpoint.format``, and resumes it from either format."""

    def __init__(self, config: Config, process: Process) -> None:
        super().__init__(config, process)
        if config.checkpoint.format == "sharded":
            # In the loop's groups, collectives of the threads would mix with others, and time out.
            self.group = dist.new_group(backend="gloo", timeout=FILE_TIMEOUT)
        self.stager: DefaultStager | None = None

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Read a checkpoint; of a sharded one only the header, and leave the shards to ``load``."""
        if path.suffix != ".dcp":
            return files.read(path)
        try:
            return read_header(path)
        except FileNotFoundError:
            reason = "a part of it is damaged or missing"
        except OSError:
            # The disk failed, and the files may be intact: they must not be set aside as damaged.
            raise
        except Exception as error:
            reason = str(error)
        raise UserError(f"{path} is not a readable checkpoint: {reason}")

    @staticmethod
    def load(parallel: Any, content: dict[str, Any], optimizer: Optimizer | None = None) -> None:
        """Load what ``read_on_main`` returned, or this rank's shards of a sharded checkpoint."""
        if "shards" not in content:
            checkpoint.Checkpointer.load(parallel, content, optimizer)
            return
        # dcp.load fails on what the file lacks, such as the state of a parameter without gradients.
        state = local_state_dict(parallel.module, optimizer)
        optimizer_state = state["optimizer"]["state"]
        for name in optimizer_state.keys() - content["parameters_with_state"]:
            del optimizer_state[name]
        try:
            dcp.load(state, checkpoint_id=content["shards"])
        except dcp.CheckpointException as error:
            reason = str(error).splitlines()[-1]
            raise UserError(f"{content['shards']} cannot be loaded: {reason}") from None
        dsd.set_model_state_dict(parallel.module, state["model"])
        if optimizer is None:
            return
        # Hyperparameters are this run's. Strict loading rejects a parameter that has no state.
        loaded = dsd.get_optimizer_state_dict(parallel.module, optimizer) | state["optimizer"]
        options = dsd.StateDictOptions(strict=False)
        dsd.set_optimizer_state_dict(parallel.module, optimizer, loaded, options=options)

    def save(self, progress: dict[str, int]) -> Path:
        """Copy this rank's shards, wait for them, and return the path that a thread writes to."""
        if self.config.checkpoint.format == "full":
            return super().save(progress)
        header = json.dumps(self.begin_save(progress))
        path = self.folder / f"step-{progress['step']:08d}.dcp"
        # A stager reuses its buffers on the CPU for the next save, which fails before PyTorch 2.13.
        if self.stager is None or torch.__version__ < "2.13":
            is_cuda = self.process.device.type == "cuda"
            options = StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_cuda,
            )
            self.stager = DefaultStager(options)
        shards = self.stager.stage(local_state_dict(self.parallel.module, self.optimizer))
        # `with writer` would wait for this thread, whose collective never ends if a rank failed.
        writer = ThreadPoolExecutor(max_workers=1)
        self.pending = writer.submit(self.write_shards, shards, header, path)
        return path

    def write_shards(self, shards: Any, header: str, path: Path) -> None:
        """Write this rank's shards; the folder gets its final name when all ranks have written."""
        temporary = path.with_suffix(".dcp.tmp")
        try:
            # The shards are on the CPU already; the default copies ahead from a GPU, and waits.
            writer = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0)
            dcp.save(shards, storage_writer=writer, process_group=self.group)
        except (Exception, dcp.CheckpointException) as error:
            # CheckpointException is no Exception; the errors of the ranks are in its last lines.
            reason = str(error).splitlines()[-1]
            raise UserError(f"{path} was not written; disk full? {reason}") from None
        if self.process.rank == 0:
            files.write_atomically(temporary / "header.json", header)
            os.replace(temporary, path)


def read_header(path: Path) -> dict[str, Any]:
    """Return what all ranks need of a sharded checkpoint, after a look at the size of its files."""
    header = json.loads((path / "header.json").read_text())
    metadata = dcp.FileSystemReader(path).read_metadata()
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    for part in metadata.storage_data.values():
        if sizes.get(part.relative_path, 0) < part.offset + part.length:
            raise ValueError("a part of it is damaged or missing")
    # A key is "model.PARAMETER" or "optimizer.state.PARAMETER.exp_avg".
    prefix = "optimizer.state."
    parameters_with_state = set()
    for key in metadata.state_dict_metadata:
        if key.startswith(prefix):
            parameter_name = key.removeprefix(prefix).rpartition(".")[0]
            parameters_with_state.add(parameter_name)
    return header | {"shards": str(path), "parameters_with_state": parameters_with_state}


def local_state_dict(module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return this rank's shards of the model and of the optimizer's state, by parameter."""
    optimizers = () if optimizer is None else (optimizer,)
    model, optimizer_state = dsd.get_state_dict(module, optimizers)
    return {"model": model, "optimizer": {"state": optimizer_state.get("state", {})}}
