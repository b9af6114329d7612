"""The settings of a run and those of the checkpoint that it resumes: which may differ, and what is said about it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..config import UserError, sections

Settings = Mapping[str, Mapping[str, Any]]

# Which run it is and where its files are.
PLACES = {"run.dir", "checkpoint.resume", "model.weights", "model.weights_except"}


def check_changes(saved: Settings, settings: Settings, samples: int) -> list[str]:
    """Return a line for each setting that differs from the checkpoint's; it takes effect from now on.

    Rejects another model or dataset, and whatever decides which samples are next if the checkpoint is in the middle of
    an epoch: ``samples`` is how many of it were consumed.
    """
    lines = []
    for section, values in settings.items():
        before = saved_section(saved, section)
        places = places_of(section)
        for key, value in values.items():
            name, previous = f"{section}.{key}", getattr(before, key)
            if name in places or to_list(previous) == to_list(value):
                continue
            if section in ("model", "dataset"):
                raise UserError(f"{name} is {value}, and {previous} in the checkpoint; give that, or another run.dir")
            if samples and name in ("run.seed", "data.global_batch_size"):
                raise UserError(
                    f"{name} is {value}, and {previous} in the checkpoint, which is in the middle of an epoch: samples "
                    "would be missed or repeated; give that, or another run.dir"
                )
            lines.append(f"{name} is {value} from now on; it was {previous}")
    for section, values in saved.items():
        if section != "parallel":  # Another strategy has other settings.
            unknown = sorted(values.keys() - settings.get(section, {}).keys())
            lines += [f"{section}.{key} of the checkpoint is ignored: there is no such setting" for key in unknown]
    return lines


def places_of(section: str) -> set[str]:
    """Return the settings, as ``section.key``, that say where files are; a field is one by its metadata ``place``."""
    return PLACES | {f"{section}.{field.name}" for field in fields(sections()[section]) if "place" in field.metadata}


def saved_section(saved: Settings, name: str) -> Any:
    """Return a section of a checkpoint's settings; what it lacks, because it is new, has its default."""
    section = sections()[name]()
    for key in vars(section).keys() & saved.get(name, {}).keys():
        setattr(section, key, saved[name][key])
    return section


def to_list(value: Any) -> Any:
    """Return a tuple as a list, as it is after a round through YAML."""
    return list(value) if isinstance(value, tuple) else value
