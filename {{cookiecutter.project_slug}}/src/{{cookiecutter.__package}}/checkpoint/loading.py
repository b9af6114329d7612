"""Reading checkpoints of either format, without ever running code from them."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import on_main
from . import sharded
from .sharded import DamagedCheckpointError
from .state_dict import broadcast_full_tensors, flatten, list_parts

# Written to each checkpoint; one with another format is rejected.
FORMAT = 2


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; for a folder, read only the header.

    Raises:
        DamagedCheckpointError: if it cannot be read, was cut short or altered, or has another format.
    """
    is_folder = path.is_dir()
    file = path / sharded.HEADER if is_folder else path
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise DamagedCheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")
        with torch.serialization.safe_globals(sharded.SAFE_GLOBALS if is_folder else []):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise DamagedCheckpointError(f"{path} is not a readable checkpoint: {reason}") from None
    parts = {"config", "progress", "param_groups", "built_groups", "tensors", "ranks", "rng"}
    parts |= {"metadata", "checksums"} if is_folder else {"model", "optimizer"}
    if not isinstance(content, dict) or content.get("format") != FORMAT or not parts <= content.keys():
        raise DamagedCheckpointError(f"{path} is not a checkpoint of format {FORMAT}")
    return content


def read_on_main(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint on rank 0; only rank 0 needs access to the file of a full checkpoint. A collective.

    Returns:
        The header on every rank: all but the tensors and what belongs to one rank each, plus the tensors' ``names``
        and the ``world_size`` of the run that saved it; and the whole content on rank 0.

    Raises:
        DamagedCheckpointError: on every rank, if it cannot be read.
    """
    content: dict[str, Any] = {}

    def read_header() -> dict[str, Any]:
        content.update(read(path))
        own = [*list_parts(content), "rng", *content["ranks"]]
        header = {name: part for name, part in content.items() if name not in own}
        names = getattr(header["metadata"], "state_dict_metadata", ()) if "metadata" in header else flatten(content)
        return header | {"names": list(names), "world_size": len(content["rng"])}

    return on_main(read_header), content


def load(
    path: Path,
    header: Mapping[str, Any],
    state: Mapping[str, Any],
    tensors: dict[str, Tensor],
    device: torch.device,
) -> None:
    """Load a checkpoint into ``tensors``, which this rank holds, by name; a collective.

    ``header`` and ``state`` are what ``read_on_main`` returned; from a folder, each rank reads its part itself. Rejects
    the checkpoint of another model, on every rank.
    """
    if "metadata" in header:
        sharded.load(path, header, tensors)
    else:
        parts = {name.partition(".")[0] for name in tensors}
        full = {name: tensor for name, tensor in flatten(state).items() if name.partition(".")[0] in parts}
        broadcast_full_tensors(full, tensors, device)


def load_model(
    path: Path,
    header: Mapping[str, Any],
    state: Mapping[str, Any],
    module: nn.Module,
    device: torch.device,
    part: str = "model",
) -> None:
    """Load the weights of a checkpoint, as ``load`` does, or what is registered as ``part``, such as their average."""
    tensors = {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
    if part != "model":  # For example, an average of the parameters, but not of the buffers.
        tensors = {name: tensor for name, tensor in tensors.items() if name in header["names"]}
    load(path, header, state, tensors, device)
