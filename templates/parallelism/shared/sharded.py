"""Sharded checkpoints: every rank writes its shards while training continues.

A checkpoint is a folder, complete or absent. Resume only from one that you trust: it is read with
pickle, and has no checksums.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from . import checkpoint, files
from .config import Config, UserError
from .distributed import FILE_TIMEOUT, Process
from .files import Content


class Checkpointer(checkpoint.Checkpointer):
    """Saves a run in ``checkpoint.format``, and resumes it from either format."""

    def __init__(self, config: Config, process: Process) -> None:
        super().__init__(config, process)
        if config.checkpoint.format == "sharded":
            # In the loop's groups, collectives of the threads would mix with others, and time out.
            self.group = dist.new_group(backend="gloo", timeout=FILE_TIMEOUT)
        self.stager: DefaultStager | None = None

    @staticmethod
    def read(path: Path) -> Content:
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
    def load(parallel: Any, content: Content, optimizer: Optimizer | None = None) -> None:
        """Load what ``read_on_main`` returned, or this rank's shards of a sharded checkpoint."""
        if "shards" not in content:
            checkpoint.Checkpointer.load(parallel, content, optimizer)
            return
        # get_state_dict has made a state for each parameter; dcp.load fails if the file lacks it.
        state = local_state_dict(parallel.module, optimizer)
        optimizer_state = state["optimizer"]["state"]
        made_up = optimizer_state.keys() - set(content["parameters_with_state"])
        for name in made_up:
            del optimizer_state[name]
        try:
            dcp.load(state, checkpoint_id=content["shards"])
        except dcp.CheckpointException as error:
            reason = str(error).splitlines()[-1]
            raise UserError(f"{content['shards']} cannot be loaded: {reason}") from None
        dsd.set_model_state_dict(parallel.module, state["model"])
        if optimizer is None:
            return
        # dcp.load has filled the optimizer's own tensors, and those that it left out are made up.
        for name, parameter in parallel.module.named_parameters():
            if name in made_up:
                del optimizer.state[parameter]

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


def read_header(path: Path) -> Content:
    """Return what all ranks need of a sharded checkpoint, after a look at the size of its files."""
    header = json.loads((path / "header.json").read_text())
    metadata = dcp.FileSystemReader(path).read_metadata()
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    for part in metadata.storage_data.values():
        if sizes.get(part.relative_path, 0) < part.offset + part.length:
            raise ValueError("a part of it is damaged or missing")
    # A key is "model.PARAMETER" or "optimizer.state.PARAMETER.exp_avg".
    prefix = "optimizer.state."
    parameters_with_state = list[str]()
    for key in metadata.state_dict_metadata:
        if key.startswith(prefix):
            parameter_name = key.removeprefix(prefix).rpartition(".")[0]
            parameters_with_state.append(parameter_name)
    return header | {"shards": str(path), "parameters_with_state": parameters_with_state}


def local_state_dict(module: nn.Module, optimizer: Optimizer | None) -> Content:
    """Return this rank's shards of the model and of the optimizer's state, by parameter."""
    optimizers = () if optimizer is None else (optimizer,)
    model, optimizer_state = dsd.get_state_dict(module, optimizers)
    return {"model": model, "optimizer": {"state": optimizer_state.get("state", {})}}


def collect_state(module: nn.Module, optimizer: Optimizer, keeps: bool) -> Content:
    """Return whole weights and optimizer state on the CPU, by name, if this rank keeps them."""

    def copy(tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, DTensor):
            # This is a collective: all ranks that have shards of the tensor call it.
            tensor = tensor.full_tensor()
        return tensor.to("cpu", copy=True) if keeps else None

    return checkpoint.copy_state(module, optimizer, copy)


def load_state(
    module: nn.Module,
    optimizer: Optimizer | None,
    weights: Content,
    state: Content,
    process: Process,
    other_names: Any = (),
) -> None:
    """Load this rank's part of rank 0's weights and optimizer state; a collective."""
    local_tensors = module.state_dict()
    local_weights = {}
    parameters = dict(module.named_parameters())
    # Rank 0 sends one parameter after the other, so that no other rank holds the whole model.
    for name in process.all_gather(list(weights))[0]:
        entry = [weights.get(name), state.get(name, {})]
        dist.broadcast_object_list(entry, 0, process.cpu_group)
        if name in other_names:
            continue  # Other ranks have this one.
        # A name that no rank has stays, so that PyTorch rejects it below.
        local_weights[name] = shard_like(entry[0], local_tensors.get(name))
        if optimizer is not None and name in parameters:
            parameter = parameters[name]
            shards = {}
            for key, value in entry[1].items():
                shards[key] = shard_like(value, parameter)
            checkpoint.load_parameter_state(optimizer, parameter, shards)
    module.load_state_dict(local_weights)


def shard_like(value: Any, tensor: Any) -> Any:
    """Return this rank's shard of a value with the shape of a sharded tensor; others stay whole."""
    if not isinstance(tensor, DTensor) or getattr(value, "shape", None) != tensor.shape:
        return value
    # Every rank has the whole value, so nothing is sent. A copy of the shard frees its memory.
    mesh = tensor.device_mesh
    return distribute_tensor(value, mesh, tensor.placements, src_data_rank=None).clone()
