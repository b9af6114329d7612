"""Sharded checkpoints: folders, complete or absent, to which every rank writes its shards."""

import json
import os
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from . import checkpoint, files
from .config import Config, UserError
from .distributed import FILE_SECONDS, Process, seed_everything
from .files import Content
from .model import build_model

INDEX_NAMES = {  # What a sharded checkpoint's index is made of, by module.
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
    "torch": "Size",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata ChunkStorageMetadata _MEM_FORMAT_ENCODING",
}


class Checkpointer(checkpoint.Checkpointer):
    """Saves a run in ``checkpoint.format``, and resumes it from either format."""

    def __init__(self, config: Config, process: Process) -> None:
        super().__init__(config, process)
        if config.checkpoint.format == "sharded":
            # In the loop's groups, collectives of the threads would mix with others, and time out.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=FILE_SECONDS))
        self.stager: DefaultStager | None = None

    @staticmethod
    def read(path: Path) -> Content:
        """Read a checkpoint; of a sharded one only the header, and leave the shards to ``load``."""
        if path.suffix != ".dcp":
            return files.read(path)
        try:
            return read_header(path)
        except (FileNotFoundError, NotADirectoryError):
            reason = "a part of it is damaged or missing"
        except OSError:
            raise  # The files may be intact: they must not be set aside as damaged.
        except Exception as error:
            reason = str(error)
        raise UserError(f"{path} is not a readable checkpoint: {reason}")

    @staticmethod
    def load(parallel: Any, content: Content, optimizer: Any = None) -> None:
        """Load what ``read_on_main`` returned, or this rank's shards of a sharded checkpoint."""
        if "shards" not in content:
            checkpoint.Checkpointer.load(parallel, content, optimizer)
            return
        path = Path(content["shards"])
        parameters = dict(parallel.module.named_parameters())
        # The index lists the tensors of all ranks; this one makes room for its own shards of them.
        states = defaultdict[str, Content](dict)
        index = read_index(path)
        for key, names in index.planner_data.items():
            # These are ("model", NAME), or ("optimizer", "state", PARAMETER, "exp_avg").
            if optimizer is None or names[0] == "model" or names[2] not in parameters:
                continue
            entry = index.state_dict_metadata[key]
            room = torch.empty(entry.size, dtype=entry.properties.dtype)
            parameter = parameters[names[2]]
            if room.shape == parameter.shape:
                room = torch.empty_like(parameter, dtype=room.dtype)  # Moments are sharded, too.
            states[names[2]][names[3]] = room
        state = {"model": parallel.module.state_dict(), "optimizer": {"state": states}}
        try:
            dcp.load(state, checkpoint_id=path)
        except dcp.CheckpointException as error:
            reason = str(error).splitlines()[-1]
            raise UserError(f"{path} cannot be loaded: {reason}") from None
        for name in list(states):  # The weights are in place by now.
            checkpoint.load_parameter_state(optimizer, parameters[name], states.pop(name))

    def restore(self, parallel: Any, optimizer: Optimizer, set_sizes: Any) -> tuple[int, list[str]]:
        """Give a new run the weights of a whole model, and do what every strategy does."""
        if "progress" not in self.initial_content:
            # What build_model draws after wrap(), it draws shard by shard; a whole model is right.
            seed_everything(self.config.run.seed)
            weights = Content()
            if self.process.rank == 0:
                with torch.device("meta" if self.config.model.weights else "cpu"):
                    model = build_model(self.config.model)
                refuse_hooks(model)
                weights = model.state_dict()
            if self.config.model.weights is None:
                parallel.load_full_state_dict(weights, None, {})
        refuse_hooks(parallel.module)  # The optimizer's builder may have added some.
        trains = any(group["params"] for group in optimizer.param_groups)
        if True not in self.process.all_gather(trains):  # Some ranks may train nothing.
            raise UserError("all parameters are frozen; leave some for the loss to change")
        return super().restore(parallel, optimizer, set_sizes)

    def begin_save(self, progress: dict[str, int]) -> Content:
        """Do what every strategy does, and reject an optimizer whose numbers depend on shards."""
        content = super().begin_save(progress)
        numbers = self.process.all_gather(content["numbers"])
        if any(others != numbers[0] for others in numbers):
            raise UserError(f"the optimizer's numbers differ between ranks: {numbers[:2]}")
        return content

    def save(self, progress: dict[str, int]) -> Path:
        """Copy this rank's shards, wait for them, and return the path that a thread writes to."""
        if self.config.checkpoint.format == "full":
            return super().save(progress)
        header = json.dumps(self.begin_save(progress))
        path = self.folder / f"step-{progress['step']:08d}.dcp"
        # A stager uses its buffers again for the next save. Before version 2.13, that fails.
        if self.stager is None or torch.__version__ < "2.13":
            is_cuda = self.process.device.type == "cuda"
            options = StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_cuda,
            )
            self.stager = DefaultStager(options)
        state = checkpoint.copy_state(self.parallel.module, self.optimizer, lambda tensor: tensor)
        for tensors in (state["model"], *state["optimizer"]["state"].values()):
            for name, value in tensors.items():
                if not isinstance(value, Tensor):
                    raise UserError(
                        f"a sharded checkpoint holds tensors alone, and {name} is none; "
                        "set checkpoint.format to full"
                    )
        shards = self.stager.stage(state)
        # A failed run waits for process.writer. The collective of this thread would never end then.
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
            if self.process.rank == 0:
                files.write_atomically(temporary / "header.json", header)
                os.replace(temporary, path)
        except (Exception, dcp.CheckpointException) as error:
            # CheckpointException is no Exception; the errors of the ranks are in its last lines.
            reason = str(error).splitlines()[-1]
            if self.process.rank == 0 and temporary.exists():
                files.remove(temporary)
            raise UserError(f"{path} was not written; disk full? {reason}") from None


def refuse_hooks(model: nn.Module) -> None:
    """Reject what hangs on a parameter, and would not hang on its shards."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            attributes = {word for word in vars(parameter) if word[0] != "_"} - {"is_in_a_block"}
            for register in (
                parameter.register_hook,
                parameter.register_post_accumulate_grad_hook,
            ):
                handle: Any = register(print)  # It refers to all hooks of its kind.
                handle.remove()
                if handle.hooks_dict_ref() or attributes:
                    raise UserError(f"{name} has a hook or attribute, which shards would lose")


class IndexUnpickler(pickle.Unpickler):
    """Reads a sharded checkpoint's index, a pickle, which could otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_get_layout":
            return lambda _: torch.strided  # PyTorch's function could return what a pickle gave it.
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in INDEX_NAMES.get(module, "").split():
            raise PermissionError(f"{module}.{name} in a checkpoint's index might run code")
        return super().find_class(module, name)


def read_index(path: Path) -> Any:
    """Return a sharded checkpoint's index; run this before PyTorch, which trusts any pickle."""
    index_files = list(path.glob("*.metadata"))  # PyTorch falls back to others with such names.
    if index_files != [path / ".metadata"]:
        raise ValueError("it has no index, or several")
    with open(index_files[0], "rb") as file:
        return IndexUnpickler(file).load()


def read_header(path: Path) -> Content:
    """Return what all ranks need of a sharded checkpoint, after a look at the size of its files."""
    header = json.loads((path / "header.json").read_text())
    index = read_index(path)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    for part in index.storage_data.values():
        if sizes.get(part.relative_path, 0) < part.offset + part.length:
            raise ValueError("a part of it is damaged or missing")
    return header | {"shards": str(path)}


def collect_state(module: nn.Module, optimizer: Optimizer, keeps: bool) -> Content:
    """Return whole weights and optimizer state on the CPU, by name, if this rank keeps them."""

    def copy(tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # A collective of all ranks that have shards of it.
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
