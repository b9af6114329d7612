"""Faults for the ranks of a rendered project: what happens, to which rank, from which step on, and in which phase.

`chaos.py` plants a call of `arm` in the project, and describes one fault in the variable FAULT. A fault fires once: it
leaves a file with the moment, which shows that it did. This file is imported by ranks, so it needs only PyTorch.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, at the first opportunity from a step on.

    Attributes:
        folder: Where ranks leave their process ids, and the one that has the fault leaves the moment (``fired``).
        run: The run directory.
    """

    kind: str
    phase: str
    rank: int
    step: int
    folder: str = ""
    run: str = ""


def kill_all(fault: Fault) -> None:
    """Kill all ranks, this one last."""
    pids = {int(path.read_text()) for path in Path(fault.folder).glob("rank-*")}
    for pid in [*(pids - {os.getpid()}), os.getpid()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def keep_interpreter(_: Fault) -> None:
    """Let a thread call a C function for a day without releasing the interpreter's lock, as a bad extension does."""
    threading.Thread(target=ctypes.PyDLL(None).sleep, args=(86400,), daemon=True).start()


def run_out_of_memory(_: Fault) -> None:
    """Limit the address space to a little more than is in use, and ask for more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**27
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.zeros(2**29)


def fill_disk(fault: Fault) -> None:
    """Write to the disk of the run until nothing is left; ``chaos.py`` removes it afterwards."""
    with suppress(OSError), open(Path(fault.run).parent / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_read_only(fault: Fault) -> None:
    """Let nobody write checkpoints any more; the mount is private to this run, like all that follow."""
    folder = f"{fault.run}/checkpoints"
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def unmount(fault: Fault) -> None:
    """Take the disk of the run away, although files on it are open."""
    subprocess.run(["umount", "--lazy", Path(fault.run).parent], check=True)


def make_clock_jump(_: Fault) -> None:
    """Let the time of day jump for this rank, to a day later or earlier; the machine's own clock is for others too."""
    real, jumps = time.time, itertools.cycle((86400, -86400))
    time.time = lambda: real() + next(jumps)


KINDS: dict[str, Callable[[Fault], object]] = {
    "kill rank": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kill all": kill_all,
    "kill launcher": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "segmentation fault": lambda _: ctypes.string_at(0),
    "interpreter kept": keep_interpreter,
    "out of memory": run_out_of_memory,
    "disk full": fill_disk,
    "disk read-only": make_read_only,
    "disk gone": unmount,
    "clock jumps": make_clock_jump,
}
# Where `arm` stops a rank. Rank 0 alone saves and cleans up.
MAIN_PHASES = ("before the rename", "in the write", "after the rename", "clean-up")
PHASES = ("start", "forward", "all-reduce", "evaluation", *MAIN_PHASES)


def arm(package: str) -> None:
    """Let the fault of the variable FAULT, if there is one, happen to this rank of ``package`` when its time comes."""
    if "FAULT" not in os.environ:
        return
    fault, rank = Fault(**json.loads(os.environ["FAULT"])), int(os.environ.get("RANK", "0"))
    Path(fault.folder, f"rank-{rank}").write_text(str(os.getpid()))
    if rank != fault.rank:
        return
    train, checkpointer = (import_module(f"{package}.{name}") for name in ("train", "checkpoint.checkpointer"))
    reached = 0  # The step that this rank takes, or has taken.

    def fire(*_: Any) -> None:
        marker = Path(fault.folder, "fired")
        if (reached >= fault.step or fault.phase == "start") and not marker.exists():
            marker.write_text(str(time.monotonic()))
            KINDS[fault.kind](fault)

    def count(trainer: Any, *_: Any) -> None:
        nonlocal reached
        reached = trainer.progress.step + 1

    def save_in_halves(save: Callable[..., None], content: Any, file: Any, **options: Any) -> None:
        """Write the first half of what ``torch.save`` writes, then the second."""
        save(content, buffer := io.BytesIO(), **options)
        half = len(data := buffer.getvalue()) // 2
        file.write(data[:half])
        file.flush()
        fire()
        file.write(data[half:])

    def rename(replace: Callable[..., None], source: Any, target: Any) -> None:
        is_checkpoint = Path(target).name.startswith("step-")
        if is_checkpoint and fault.phase == "before the rename":
            fire()
        replace(source, target)
        if is_checkpoint and fault.phase == "after the rename":
            fire()

    before(train.Trainer, "run_step", count)
    if fault.phase == "in the write":
        around(torch, "save", save_in_halves)
    elif "rename" in fault.phase:
        around(os, "replace", rename)
    else:
        before(*{
            "start": (train.Trainer, "__init__"),
            "forward": (train.Parallel, "forward_backward"),
            "all-reduce": (torch.autograd, "backward"),  # The other ranks wait for this one's gradients.
            "evaluation": (train.Evaluator, "evaluate_share"),
            "clean-up": (checkpointer, "remove"),
        }[fault.phase], fire)  # fmt: skip


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by ``wrapper``, whose first argument is the original."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(lambda *args, **options: wrapper(original, *args, **options)))


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call ``action`` with the arguments of a function before each call of it."""

    def wrapper(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        action(*args)
        return original(*args, **options)

    around(owner, name, wrapper)
