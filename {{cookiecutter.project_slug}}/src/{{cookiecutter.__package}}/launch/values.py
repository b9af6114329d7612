"""What is checked of any setting and of the launcher's variables, whatever they mean, before one of them is used."""

import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

from ..config import DistributedConfig, UserError

LARGEST = 1e12  # Of fractions: in seconds or MiB, what PyTorch can hold.
LARGEST_INT = 2**53
# Of what is built or started so many times, a mistake would fill the memory before anything could fail.
LARGEST_OF = {"model": 2**16, "data.num_workers": 2**10}
#:: if cookiecutter.__plays ::#
LARGEST_OF |= {"control": 2**20, "control.environments": 2**16}
#:: endif ::#
LONGEST_NAME, LONGEST_PATH = 255, 4095  # Of files, in bytes, on Linux.


def check_values(settings: Mapping[str, Any], may_be_empty: Collection[str] = ()) -> None:
    """Reject settings that are null or empty but must not be, numbers out of all bounds, and texts that no path is.

    Args:
        settings: The dataclass of each section, by name. A field with the metadata ``any_text`` is no path.
        may_be_empty: Names of settings, such as ``run.dir``.
    """
    for section, values in settings.items():
        hints = get_type_hints(type(values))
        for field in fields(values):
            name, value = f"{section}.{field.name}", getattr(values, field.name)
            if value is None and NoneType not in get_args(hints[field.name]):
                raise UserError(f"{name} is null; give a value, or leave it out")
            if value == "" and name not in may_be_empty and "any_text" not in field.metadata:
                raise UserError(f"{name} is empty; give a value, or leave it out")
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, int | float):
                    check_number(name, part)
                elif isinstance(part, str) and "any_text" not in field.metadata:
                    check_path(name, part)
    check_distributed(settings["distributed"])


def check_number(name: str, value: int | float) -> None:
    """Reject a number that is not finite, or too large for what counts it."""
    limit = LARGEST if isinstance(value, float) else LARGEST_INT
    limit = min(LARGEST_OF.get(name, limit), LARGEST_OF.get(name.partition(".")[0], limit))
    if not abs(value) <= limit:  # Or it is not a number.
        shown = f"{value:g}" if abs(value) < 1e300 or isinstance(value, float) else "too large"
        raise UserError(f"{name} is {shown}; give at most {limit:g}")


def check_path(name: str, value: str) -> None:
    """Reject a text that cannot be a path."""
    if "\0" in value:
        raise UserError(f"{name} contains a zero byte")
    longest = max(len(os.fsencode(part)) for part in Path(value).parts or ".")
    if longest > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
        raise UserError(f"{name} is too long for a path: a name in it has {longest} bytes, of {LONGEST_NAME} at most")


def check_distributed(config: DistributedConfig) -> None:
    """Reject a rendezvous that PyTorch has no rule for, and waits that are none."""
    method, shortest = config.init_method, min(config.timeout_seconds, config.startup_timeout_seconds)
    try:
        url = urlsplit(method)
        is_known = {"env": method == "env://", "tcp": url.hostname and url.port, "file": url.path}[url.scheme]
    except (KeyError, ValueError):  # Another scheme; a port that is no number.
        is_known = False
    if not is_known:
        raise UserError(f"distributed.init_method is {method}; give env://, tcp://HOST:PORT or file:///PATH")
    if shortest < 0.1:
        raise UserError(f"a timeout of distributed is {shortest} seconds; give at least 0.1")


def check_variables(env: Mapping[str, str] = os.environ) -> None:
    """Reject variables of the launch script that are no numbers."""
    #:: if cookiecutter.launcher == "torchrun" ::#
    names = ("STOP_SECONDS", "STOP_CODE", "MAX_RESTARTS")
    #:: else ::#
    names = ("STOP_SECONDS", "STOP_CODE")
    #:: endif ::#
    for name in names:
        if not (env.get(name) or "0").isdecimal():
            raise UserError(f"{name} is '{env[name]}'; give a whole number, 0 or more")
