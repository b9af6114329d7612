"""Reading checkpoints of either format, without ever running code from them."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import UserError
from ..launch import first_line
from ..runtime import all_gather_object, on_main
from . import exported, sharded
from .content import DamagedCheckpointError, check_content
from .state_dict import broadcast_full_tensors, flatten, list_parts


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or exported weights, to the CPU; for a folder, read only the header.

    Raises:
        DamagedCheckpointError: if it cannot be read, was cut short, altered or crafted, or has another format.
    """
    is_folder = path.is_dir()
    try:
        if path.suffix == exported.SUFFIX:
            content = exported.read(path)
        else:
            header = path / sharded.HEADER if is_folder else path
            content = read_archive(header, sharded.SAFE_GLOBALS if is_folder else [])
        check_content(content, is_folder)
    except Exception as error:  # A crafted file can make its reader raise anything.
        raise DamagedCheckpointError(f"{path} is not a readable checkpoint: {first_line(error)}") from None
    checked: dict[str, Any] = content
    return checked


def read_model(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, whole; ``content`` is what ``read`` returned."""
    if "metadata" not in content:
        weights: dict[str, Tensor] = content["model"]
        return weights
    tensors = sharded.load_in_one_process(path, content, part="model.")
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def read_archive(file: Path, safe_globals: list[Any]) -> Any:
    """Return the content of a file that ``torch.save`` wrote, if all its checksums are right; no code in it is run."""
    if not file.is_file():  # Reading a pipe would never end.
        raise FileNotFoundError(f"{file} is no file")
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise zipfile.BadZipFile("a part of it is compressed")
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    with torch.serialization.safe_globals(safe_globals):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


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


@contextmanager
def damage_on_any_rank(path: Path) -> Iterator[None]:
    """Raise DamagedCheckpointError on every rank if one cannot take its state from a checkpoint; a collective.

    A UserError of one rank is raised on every rank, too.
    """
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    except Exception as error:  # Whatever ``load_state_dict`` raises for something that it did not save.
        reason = f"{type(error).__name__}: {first_line(error)}"
        own = DamagedCheckpointError(f"the state in {path} cannot be restored: {reason}")
    if errors := [error for error in all_gather_object(own) if error]:
        raise errors[0]
