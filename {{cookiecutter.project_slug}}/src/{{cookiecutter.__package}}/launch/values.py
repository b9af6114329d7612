"""What is checked of any setting and of the launcher's variables, whatever they mean, before one of them is used."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

from ..config import Config, UserError, sections

LARGEST = 1e12  # Of fractions: in seconds or MiB, what PyTorch can hold.
LARGEST_INT = 2**53
LONGEST_NAME, LONGEST_PATH = 255, 4095  # Of files, in bytes, on Linux.


def check_values(config: Config) -> None:
    """Reject settings that are null but must not be, numbers that are out of all bounds, and texts that no path is."""
    for section, kind in sections().items():
        hints = get_type_hints(kind)
        for key, value in vars(getattr(config, section)).items():
            name = f"{section}.{key}"
            if value is None and NoneType not in get_args(hints[key]):
                raise UserError(f"{name} is null; give a value, or leave it out")
            for part in value if isinstance(value, list | tuple) else [value]:
                check_number(name, part) if isinstance(part, int | float) else check_text(name, part)
    check_rendezvous(config.distributed.init_method)
    for key in ("timeout_seconds", "startup_timeout_seconds"):
        if getattr(config.distributed, key) < 0.1:
            raise UserError(f"distributed.{key} is {getattr(config.distributed, key)}; give at least 0.1")


def check_number(name: str, value: float) -> None:
    """Reject a number that is not finite, or too large for what counts it."""
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}; give a finite number")
    limit = LARGEST if isinstance(value, float) else LARGEST_INT
    if abs(value) > limit:
        raise UserError(f"{name} is {value:g}; give at most {limit:g}")


def check_text(name: str, value: Any) -> None:
    """Reject a text that is empty or cannot be a path, except a prompt."""
    if not isinstance(value, str) or name == "generate.prompt":
        return
    if not value:
        raise UserError(f"{name} is empty; give a value, or leave it out")
    if "\0" in value:
        raise UserError(f"{name} contains a zero byte")
    longest = max(len(os.fsencode(part)) for part in Path(value).parts or ".")
    if longest > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
        raise UserError(f"{name} is too long for a path: a name in it has {longest} bytes, of {LONGEST_NAME} at most")


def check_rendezvous(init_method: str) -> None:
    """Reject a rendezvous that PyTorch has no rule for."""
    try:
        url = urlsplit(init_method)
        is_known = {"env": init_method == "env://", "tcp": url.hostname and url.port, "file": url.path}[url.scheme]
    except (KeyError, ValueError):  # Another scheme; a port that is no number.
        is_known = False
    if not is_known:
        raise UserError(
            f"distributed.init_method is {init_method}; give env://, tcp://HOST:PORT or file:///PATH of a new file"
        )


def check_variables(env: Mapping[str, str] = os.environ) -> None:
    """Reject variables of the launch script that are no numbers."""
    for name in ("STOP_SECONDS", "MAX_RESTARTS"):
        if not (env.get(name) or "0").isdecimal():
            raise UserError(f"{name} is '{env[name]}'; give a whole number, 0 or more")
