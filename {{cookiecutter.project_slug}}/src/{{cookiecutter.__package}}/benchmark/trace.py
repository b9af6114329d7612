"""Exposed communication: the time in which a message is under way and this rank computes nothing, from a trace.

backward         |==============================|
computing          =====   =====       =====
all-reduces            --------------------------
exposed                 ===     =======     ====        what would be gained if messages took no time
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from ..runtime import Process, publish
from .steps import Steps, split_step

PROFILED = 3  # Steps; the last of them is logged.
# How PyTorch's profiler names the messages of a backend on the CPU, and the kernels of one on an accelerator.
ON_CPU, ON_ACCELERATOR = ("gloo:", "mpi:", "ucc:"), ("nccl", "rccl", "xccl", "oneccl")
COMPUTING = ("aten::", "Torch-Compiled Region")
WAITING = "_c10d_functional::wait_tensor"  # In a compiled region.

Spans = list[tuple[float, float]]  # Start and end, sorted and disjoint.


class Kept:
    """Where a rank's trace is kept, and its memory snapshot if the device has one."""

    def __init__(self, run_dir: Path, process: Process) -> None:
        self.trace = run_dir / f"trace-rank{process.rank}.json"
        self.snapshot = run_dir / f"snapshot-rank{process.rank}.pickle"
        self.has_snapshot = process.device.type == "cuda"
        run_dir.mkdir(parents=True, exist_ok=True)  # Another machine may have a disk of its own.
        if self.has_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        elif process.is_main:
            instead = "the traces have an event [memory] for each allocation instead"
            print(f"only CUDA has memory snapshots, and this is {process.device.type}: {instead}", file=sys.stderr)

    def write(self, profiler: Any) -> None:
        """Write what this rank keeps."""
        temporary = self.trace.with_suffix(".tmp.json")
        profiler.export_chrome_trace(str(temporary))
        publish(temporary, self.trace)
        if self.has_snapshot:
            torch.cuda.memory._dump_snapshot(str(self.snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)


def measure_exposed(steps: Steps, device: torch.device, kept: Kept | None) -> dict[str, float]:
    """Return the share of each part of a step, from 0 to 1, that is exposed communication; a collective.

    A ``Stopwatch`` has to watch the parts.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Otherwise it prints when it starts and ends.
    with profile(activities=supported_activities(), profile_memory=kept is not None) as profiler:
        steps.take(PROFILED, log_every=PROFILED)
    if kept is not None:
        kept.write(profiler)
    return exposed_shares(profiler.events(), device)


def exposed_shares(events: Iterable[Any], device: torch.device) -> dict[str, float]:
    """Return the share of each part of a step that is exposed communication.

    Args:
        events: Of ``torch.profiler``, which the names of a ``Stopwatch`` divide into parts.
        device: Where the rank computes.
    """
    on_cpu = device.type == "cpu"
    parts: dict[str, Spans] = {}
    messages, computing, waiting = Spans(), Spans(), Spans()
    for event in events:
        span, name = (event.time_range.start, event.time_range.end), event.name
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation:
                is_message = any(library in name.lower() for library in ON_ACCELERATOR)
                (messages if is_message else computing).append(span)
        elif name.startswith(ON_CPU):
            messages.append(span)
        elif event.is_user_annotation:
            parts.setdefault(name, []).append(span)
        elif on_cpu and name.startswith(COMPUTING):
            computing.append(span)
        elif name == WAITING:
            waiting.append(span)
    exposed = subtract(union(messages), subtract(union(computing), union(waiting)))
    whole = split_step({name: length(union(spans)) for name, spans in parts.items()})
    taken = split_step({name: length(intersect(exposed, union(spans))) for name, spans in parts.items()})
    return {name: taken[name] / time if time > 0 else 0.0 for name, time in whole.items()}


def union(spans: Spans) -> Spans:
    """Return the time that is in any of the spans, which may overlap."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def subtract(spans: Spans, others: Spans) -> Spans:
    """Return the time that is in ``spans`` but not in ``others``."""
    left, position = Spans(), 0
    for start, end in spans:
        while position < len(others) and others[position][1] <= start:
            position += 1
        for other_start, other_end in others[position:]:
            if other_start >= end:
                break
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            left.append((start, end))
    return left


def intersect(spans: Spans, others: Spans) -> Spans:
    """Return the time that is in both."""
    return subtract(spans, subtract(spans, others))


def length(spans: Spans) -> float:
    """Return how long the spans take together."""
    return sum(end - start for start, end in spans)
