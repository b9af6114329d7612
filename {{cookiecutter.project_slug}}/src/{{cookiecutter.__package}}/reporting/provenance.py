"""Where a run came from: its settings, command, code, template and machine, written to the run directory."""

import json
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ..runtime import Process, replace_text
from .metrics import set_aside

PACKAGE = __package__.partition(".")[0]
PROJECT = Path(__file__).parents[3]
DEPENDENCIES = ("torch", "numpy", "jsonargparse")


def write_provenance(run_dir: Path, settings: Mapping[str, Any], process: Process, run_id: str, step: int) -> None:
    """Write ``config.yaml`` and ``provenance.json``, which keeps the records of earlier starts, newest first.

    ``step`` is what this start resumes from; 0 if it begins.
    """
    replace_text(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
    path = run_dir / "provenance.json"
    content = {"run_id": run_id} | describe_run(process) | {"step": step, "earlier": read_earlier(path)}
    replace_text(path, json.dumps(content, indent=2) + "\n")


def read_earlier(path: Path) -> list[dict[str, Any]]:
    """Return the records of earlier starts, newest first; a damaged file is set aside."""
    if not path.exists():
        return []
    try:
        previous = json.loads(path.read_bytes())
        return [previous, *previous.pop("earlier", [])]
    except (ValueError, AttributeError, TypeError, RecursionError):
        set_aside(path)
        return []


def read_resumed_steps(run_dir: Path, last: int) -> list[int]:
    """Return the steps before ``last`` that the run was resumed from, except those that a later start took again."""
    starts: list[Any] = read_earlier(run_dir / "provenance.json")  # Newest first.
    steps: list[int] = []
    for start in starts:
        step = start.get("step") if isinstance(start, dict) else None
        if isinstance(step, int) and step < min([last, *steps]):
            steps.append(step)
    return sorted(step for step in steps if step > 0)


def describe_run(process: Process) -> dict[str, Any]:
    """Return everything needed to repeat a run, except its settings."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", PACKAGE, *sys.argv[1:]]),
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if (status := git("status", "--porcelain")) is None else bool(status),
        "template": read_template_answers(),
        "python": sys.version.split()[0],
        "packages": {name: metadata.version(name) for name in DEPENDENCIES},
        "host": socket.gethostname(),
        "world_size": process.world_size,
        "device": str(process.device),
    }


def git(*arguments: str) -> str | None:
    """Return what git prints about this project; None if there is no git or no repository."""
    try:
        command = ["git", "-C", str(PROJECT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_template_answers() -> dict[str, Any] | None:
    """Return the template's version and the answers that generated this project, from ``pyproject.toml``."""
    path = PROJECT / "pyproject.toml"
    if not path.is_file():
        return None
    return tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("ddp-template")
