"""Exported weights: a ``.safetensors`` file, with what builds the model again in its metadata.

Its tensors have the model's own names, and any program reads them; the metadata are texts:

    config      JSON: the settings of the model and its data, {"model": {"width": 32, ...}, ...}
    state       JSON: the numbers in the run's state, {"progress": {"step": 440, ...}, ...}
    template    the template that this project was made from
    crc32       the checksum of all of this
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..runtime import write_atomically
from .changes import places_of
from .content import FORMAT, MODEL_SECTIONS, DamagedCheckpointError

SUFFIX = ".safetensors"
TEMPLATE = "ddp-template {{ cookiecutter._version }}"
# What a checkpoint has in addition, and exported weights do not.
NOTHING: dict[str, Any] = {
    "optimizer": {},
    "param_groups": [],
    "built_groups": [],
    "tensors": [],
    "ranks": [],
    "rng": [{}],  # Of one rank.
}


def write(path: Path, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write the ``weights`` of a checkpoint, whose header is in ``content``.

    Raises:
        OSError: if the file cannot be written.
    """
    config = {
        section: {key: value for key, value in values.items() if f"{section}.{key}" not in places_of(section)}
        for section, values in content["config"].items()
        if section in MODEL_SECTIONS
    }
    state = {
        name: {key: value for key, value in part.items() if isinstance(value, int | float)}
        for name, part in content.items()
        if isinstance(part, dict) and name not in ("model", "optimizer", "config", "checksums", *content["tensors"])
    }
    tensors = separate(weights)
    metadata = {"format": "pt", "template": TEMPLATE, "config": json.dumps(config), "state": json.dumps(state)}
    metadata["crc32"] = checksum(metadata, tensors)
    serialized = save(tensors, metadata)
    write_atomically(path, lambda file: file.write(serialized))


def separate(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as the format needs: a tied parameter is written under each of its names."""
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in weights.items():
        address = tensor.untyped_storage().data_ptr()
        is_alone = tensor.is_contiguous() and address not in memory
        tensors[name] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
        memory.add(address)
    return tensors


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of the texts, and of the names, types, shapes and values of the tensors."""
    total = 0
    for key in ("template", "config", "state"):
        total = zlib.crc32(metadata.get(key, "").encode(), total)
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return str(total)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a ``.safetensors`` file of any origin, and its metadata.

    Raises:
        DamagedCheckpointError: if this project wrote the file, and its content has changed since.
    """
    if not path.is_file():  # Reading a pipe would never end.
        raise FileNotFoundError(f"{path} is no file")
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}
    if "template" in metadata and metadata.get("crc32") != checksum(metadata, tensors):
        raise DamagedCheckpointError("its checksum is wrong")
    return tensors, metadata


def read(path: Path) -> dict[str, Any]:
    """Return exported weights as a checkpoint that has nothing else.

    Raises:
        DamagedCheckpointError: if the content has changed, or another program wrote the file.
    """
    tensors, metadata = read_tensors(path)
    if "template" not in metadata:
        raise DamagedCheckpointError("it lacks this project's settings; start a run from it with --model.weights")
    state = {name: part for name, part in json.loads(metadata["state"]).items() if name != "metadata"}  # A folder's.
    return state | NOTHING | {"config": json.loads(metadata["config"]), "model": tensors, "format": FORMAT}
