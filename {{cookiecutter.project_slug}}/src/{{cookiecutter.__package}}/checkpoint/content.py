"""What a checkpoint consists of: checked when it is read, so that a crafted one is rejected before anything changes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ..config import UserError, sections

# Written to each checkpoint; one with another format is rejected.
FORMAT = 2
LARGEST = 2**53  # Of what is counted.
# The sections of the settings that build the model and its data.
MODEL_SECTIONS = {"model", "dataset", "control"}


class DamagedCheckpointError(UserError):
    """A checkpoint cannot be read; the one before it may be intact."""


@dataclass
class Progress:
    """How far a run has come, and which run it is."""

    step: int = 0  # Optimizer steps done.
    epoch: int = 0  # Passes over the training set done.
    samples: int = 0  # Samples of the current epoch consumed, over all ranks.
    best_step: int | None = None  # Step of the best evaluation so far.
    best_value: float | None = None  # Its value of the metric that selects the best checkpoint.
    evaluated_step: int = 0  # Step of the last evaluation that was completed.
    skipped_steps: int = 0  # Steps that were left out, because something was not finite.
    run_id: str = ""  # Hexadecimal digits, drawn when the run began.

    def note_evaluation(self, value: float, higher_is_better: bool) -> bool:
        """Note the value that this step has of the metric that selects the best; return whether it is the best."""
        self.evaluated_step, sign = self.step, 1 if higher_is_better else -1
        if not math.isfinite(value) or (self.best_value is not None and sign * value <= sign * self.best_value):
            return False
        self.best_step, self.best_value = self.step, value
        return True


Tensors = dict[str, Tensor]
Plain = bool | int | float | str | None
# The type of each part. What is registered under a name of its own is checked by whoever loads it.
PARTS: dict[str, Any] = {
    "progress": dict[str, int | float | str | None],
    "config": dict[str, dict[str, Plain | list[Plain]]],
    "param_groups": list[dict[str, Any]],
    "built_groups": list[dict[str, Any]],
    "rng": list[dict[str, Any]],
    "tensors": list[str],
    "ranks": list[str],
}
FULL_PARTS: dict[str, Any] = {"model": Tensors, "optimizer": dict[str, Tensors]}
SHARDED_PARTS: dict[str, Any] = {"metadata": Metadata, "checksums": dict[tuple[Any, ...], int]}


def check_content(content: Any, is_folder: bool) -> None:
    """Reject what is no checkpoint, or lacks a part, or has something else in its place.

    Raises:
        DamagedCheckpointError: if it is; the message names the part.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpointError(f"it is no checkpoint of format {FORMAT}")
    check_types(content, PARTS | (SHARDED_PARTS if is_folder else FULL_PARTS))
    check_types(content, dict.fromkeys(content["ranks"], list))
    if is_folder:
        check_index(content["metadata"], {"model", "optimizer", *content["tensors"]})
    else:
        check_types(content, dict.fromkeys(content["tensors"], Tensors))
    check_known(content["progress"], Progress)
    progress = content["progress"]
    is_complete = {"step", "epoch", "samples"} <= progress.keys() <= vars(Progress()).keys()
    is_complete = is_complete and re.fullmatch("[0-9a-f]{0,32}", progress.get("run_id", "")) is not None
    if not is_complete or not all(0 <= value <= LARGEST for value in progress.values() if isinstance(value, int)):
        raise DamagedCheckpointError(f"its progress is {progress}")
    if not all(len(content[name]) == len(content["rng"]) > 0 for name in ("rng", *content["ranks"])):
        raise DamagedCheckpointError("it lacks the state of a rank")
    for name in content["config"].keys() & sections().keys() & MODEL_SECTIONS:
        check_known(content["config"][name], sections()[name])


def check_types(values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Reject ``values`` that lack one of the ``types``' names, or have something else there."""
    for name, hint in types.items():
        if name not in values:
            raise DamagedCheckpointError(f"it lacks {name}")
        if not has_type(values[name], hint):
            raise DamagedCheckpointError(f"its {name} is of a wrong type")


def check_known(values: Mapping[str, Any], kind: type) -> None:
    """Reject ``values`` that have something else in the place of a field of ``kind``; new fields may be missing."""
    check_types(values, {name: hint for name, hint in get_type_hints(kind).items() if name in values})


def check_index(metadata: Metadata, parts: set[str]) -> None:
    """Reject an index with tensors of no part, or that leads out of the checkpoint's own folder, or to nothing."""
    check_types(vars(metadata), {"storage_data": dict[MetadataIndex, _StorageInfo], "planner_data": dict[str, Any]})
    if metadata.planner_data.keys() != metadata.state_dict_metadata.keys():
        raise DamagedCheckpointError("its tensors have two lists of names")
    for name in metadata.planner_data:
        part, *rest = name.split(".")
        if part not in parts or len(rest) < 1 + (part == "optimizer"):
            raise DamagedCheckpointError(f"its tensor {name} is of no part")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path or min(info.offset, info.length) < 0:
            raise DamagedCheckpointError(f"a tensor of it is said to be at {info}")


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a type, such as ``dict[str, Tensor]`` or ``int | None``; a list may be a tuple."""
    kind, of = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(has_type(value, each) for each in of)
    if kind is dict:
        return isinstance(value, dict) and all(has_type(k, of[0]) and has_type(v, of[1]) for k, v in value.items())
    if kind in (list, tuple):
        return isinstance(value, list | tuple) and (not of or all(has_type(each, of[0]) for each in value))
    if kind is Tensor:
        return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    if kind is Any or kind is Literal:
        return kind is Any or value in of
    if issubclass(kind, int | float):  # A number, perhaps one of a range: PositiveInt is a class of its own.
        plain = bool if kind is bool else int if issubclass(kind, int) else (int, float)
        return isinstance(value, plain) and (kind is bool) == isinstance(value, bool)
    if is_dataclass(kind):
        hints = get_type_hints(kind).items()
        return type(value) is kind and all(has_type(getattr(value, name, None), each) for name, each in hints)
    return isinstance(value, kind)


def is_alike(saved: Any, own: Any) -> bool:
    """Return whether a saved option is of the kind that an option has, and finite."""
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(is_alike, saved, own))
    if isinstance(own, int | float) and not isinstance(own, bool):
        return isinstance(saved, int | float) and not isinstance(saved, bool) and math.isfinite(saved)
    return type(saved) is type(own)
