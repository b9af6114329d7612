"""``model.weights``: starting from weights alone, with a fresh optimizer and schedule."""

import itertools
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import UserError
from ..runtime import all_gather_object, on_main
from . import exported, sharded
from .content import has_type
from .loading import first_line, read
from .state_dict import broadcast_full_tensors

T = TypeVar("T")


def load_weights(path: Path, initial: Sequence[str], module: nn.Module, device: torch.device) -> None:
    """Load weights into this rank's part of a model, without the whole of them in any rank's memory; a collective.

    Args:
        path: A checkpoint, a ``state_dict`` that ``torch.save`` wrote, or a ``.safetensors`` file. Only rank 0 needs
            access to a file, which is mapped to its memory; of a folder, each rank reads its part.
        initial: Modules that keep their initial weights, for example ``["head"]``; the file may hold others for them.
        module: This rank's part of the model.
        device: Through which the ranks exchange tensors.

    Rejects, on every rank, a file that cannot be read, and one with missing, unexpected or misshapen tensors.
    """
    weights: dict[str, Tensor] = {}
    saved, folder = on_main(lambda: read_shapes(path, weights))
    for group in itertools.chain(*all_gather_object(find_tied(module))):
        add_tied(group, saved)
        add_tied(group, weights)
    own = module.state_dict()
    wanted: dict[str, torch.Size] = {}
    for of_rank in all_gather_object({name: tensor.shape for name, tensor in own.items()}):
        wanted |= of_rank
    if unknown := [prefix for prefix in initial if not select(wanted, [prefix])]:
        raise UserError(f"model.weights_except is {list(initial)}, but the model has no {', '.join(unknown)}")
    skipped = select(wanted, initial) | select(saved, initial)
    check_names(path, drop(wanted, skipped), drop(saved, skipped))
    tensors = {f"model.{name}": tensor for name, tensor in drop(own, skipped).items()}
    if folder is not None:
        sharded.load(path, folder, tensors)
    else:
        full = {f"model.{name}": tensor for name, tensor in drop(weights, skipped).items()}
        broadcast_full_tensors(full, tensors, device)


def find_tied(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def add_tied(group: Sequence[str], tensors: dict[str, T]) -> None:
    """Add the names of a tied parameter that are missing, because ``.safetensors`` files hold each tensor once."""
    for name in group:
        if name in tensors:
            tensors |= {other: tensors[name] for other in group if other not in tensors}


def select(names: Iterable[str], modules: Sequence[str]) -> set[str]:
    """Return the names of tensors that belong to one of the ``modules``."""
    return {name for name in names if any(f"{name}.".startswith(f"{module}.") for module in modules)}


def drop(tensors: Mapping[str, T], names: set[str]) -> dict[str, T]:
    """Return the entries of ``tensors`` without those that have one of the ``names``."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def read_shapes(path: Path, weights: dict[str, Tensor]) -> tuple[dict[str, torch.Size], dict[str, Any] | None]:
    """Return the shapes of weights, by name; map a file of them into ``weights``, and of a folder, return the index.

    No code in it is run.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of what it then rejects.
            if path.is_dir():
                return read_index(path)
            content = read_file(path)
    except Exception as error:  # A crafted file can make its reader raise anything.
        raise UserError(f"model.weights is {path}, which cannot be read: {first_line(error)}") from None
    if not has_type(content, dict[str, Tensor]):
        raise UserError(f"model.weights is {path}, which is neither a checkpoint nor a state_dict of tensors")
    weights.update(content)
    return {name: value.shape for name, value in weights.items()}, None


def read_index(path: Path) -> tuple[dict[str, torch.Size], dict[str, Any]]:
    """Return the shapes of the weights in a sharded checkpoint, by name, and what ``sharded.load`` needs of it."""
    if not (path / sharded.HEADER).exists():
        raise UserError("a folder without a checkpoint; of a run.dir, give one of its checkpoints/step-*")
    content = read(path)
    saved = content["metadata"].state_dict_metadata.items()
    shapes = {name.removeprefix("model."): entry.size for name, entry in saved if name.startswith("model.")}
    return shapes, {name: content[name] for name in ("metadata", "checksums")}


def read_file(path: Path) -> Any:
    """Return the weights in a full checkpoint, a ``.safetensors`` file, or what ``torch.save`` wrote."""
    if not path.is_file():
        raise FileNotFoundError("no such file, or a pipe or a device")
    if path.suffix == exported.SUFFIX:
        return exported.read_tensors(path)[0]
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    is_checkpoint = isinstance(content, dict) and "format" in content and isinstance(content.get("model"), dict)
    return read(path)["model"] if is_checkpoint else content


def check_names(path: Path, wanted: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]) -> None:
    """Reject weights that are not exactly the ``wanted`` ones, by name and shape."""
    problems = {
        "missing": [name for name in wanted if name not in saved],
        "unexpected": [name for name in saved if name not in wanted],
        "of another shape": [name for name in wanted if name in saved and saved[name] != wanted[name]],
    }
    if any(problems.values()):
        listed = "; ".join(f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names)
        raise UserError(
            f"model.weights is {path}, which does not fit the model: {listed}; name modules that keep their initial "
            "weights in --model.weights_except '[...]'"
        )
