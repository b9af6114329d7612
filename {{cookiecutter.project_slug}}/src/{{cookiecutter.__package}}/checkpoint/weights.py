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
from .loading import first_line, read, read_model
from .state_dict import broadcast_full_tensors

T = TypeVar("T")


def load_weights(path: Path, initial: Sequence[str], module: nn.Module, device: torch.device) -> None:
    """Load a file of weights into this rank's part of a model; a collective, and only rank 0 needs access to the file.

    Args:
        path: A checkpoint, a ``state_dict`` that ``torch.save`` wrote, or a ``.safetensors`` file.
        initial: Modules that keep their initial weights, for example ``["head"]``; the file may hold others for them.
        module: This rank's part of the model.
        device: Through which the ranks exchange tensors.

    Rejects, on every rank, a file that cannot be read, and one with missing, unexpected or misshapen tensors.
    """
    weights: dict[str, Tensor] = {}
    saved = on_main(lambda: {name: value.shape for name, value in read_weights(path, weights).items()})
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
    full = {f"model.{name}": tensor for name, tensor in drop(weights, skipped).items()}
    broadcast_full_tensors(full, {f"model.{name}": tensor for name, tensor in drop(own, skipped).items()}, device)


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


def read_weights(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a file of weights to the CPU into ``weights``, which is returned; no code in it is run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of what it then rejects.
            content = read_file(path)
    except Exception as error:  # A crafted file can make its reader raise anything.
        raise UserError(f"model.weights is {path}, which cannot be read: {first_line(error)}") from None
    if not has_type(content, dict[str, Tensor]):
        raise UserError(f"model.weights is {path}, which is neither a checkpoint nor a state_dict of tensors")
    weights.update(content)
    return weights


def read_file(path: Path) -> Any:
    """Return the weights in a checkpoint of either format, a ``.safetensors`` file, or what ``torch.save`` wrote."""
    if not path.exists() or not (path.is_file() or path.is_dir()):
        raise FileNotFoundError("no such file, or a pipe or a device")
    if path.is_dir():
        if not (path / sharded.HEADER).exists():
            raise UserError("a folder without a checkpoint; of a run.dir, give one of its checkpoints/step-*")
        return read_model(path, read(path))
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
