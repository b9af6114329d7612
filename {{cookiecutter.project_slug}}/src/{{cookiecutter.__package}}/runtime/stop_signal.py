"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C): all ranks stop after the same step.

    rank 0   step 7 ────────── step 8 ────────── step 9    The signal reaches rank 1 during step 7. Rank 1 sends it with
    rank 1   step 7 ─ signal ─ step 8 ────────── step 9    the all-reduce that starts with step 8; every rank reads that
                               └─ all-reduce ────┘ stop    message after step 9, and stops.

A signal may reach one rank, or all in different steps. Its handler must not call a collective, and only records it.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import STOP_SIGNALS

# Signals that repeat within this time count as one: Slurm signals all processes of a job, a shell a process group, and
# a launcher among them forwards the signal.
SECONDS_OF_ONE_SIGNAL = 5.0


class Stopped(Exception):
    """A rank received a stop signal; raised on all ranks after the same step."""


class StopSignal:
    """Listens for stop signals in a ``with`` block; a second, later signal ends the process immediately."""

    def __init__(self) -> None:
        # A separate group on the CPU: its messages never mix with others, and wait for no device.
        self.group: Any = dist.new_group(backend="gloo")
        self.received, self.received_at = 0, 0.0
        self.previous: dict[int, Any] = {}
        self.pending = self.start_all_reduce()

    def __enter__(self) -> Self:
        self.previous = {number: signal.signal(number, self.on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if not failed:
            self.pending[1].wait()  # No step reads the last message.
        if not self.received:  # Otherwise the process is about to end, and the same signal may arrive again.
            for number, handler in self.previous.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Record a signal."""
        now = time.monotonic()
        if not self.received:
            self.received, self.received_at = number, now
        elif now - self.received_at > SECONDS_OF_ONE_SIGNAL:
            signal.signal(number, self.previous[number])
            os.kill(os.getpid(), number)

    def start_all_reduce(self) -> tuple[Tensor, Any]:
        """Start the all-reduce of the highest signal that any rank received (0: none); valid after the work's wait."""
        highest = torch.tensor(self.received)
        return highest, dist.all_reduce(highest, dist.ReduceOp.MAX, self.group, async_op=True)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Wrap a step: the ranks exchange their signals while it computes; a collective.

        A message is read one step after it was sent, long after it has arrived. Waiting for it in the same step took 7
        to 18 % of a step of 18 ms on busy processors.

        Raises:
            Stopped: after the step, on every rank, if one of them had received a signal before the previous step.
        """
        (highest, work), self.pending = self.pending, self.start_all_reduce()
        yield
        work.wait()
        if highest:
            raise Stopped(signal.Signals(int(highest)).name)


def exit_if(stopped: bool) -> None:
    """Exit after a stop: with 0, or with STOP_CODE if 0 would mean that the run is complete.

    If a cluster stops one machine, the ranks of the other machines stop too, and their launchers do not know why.
    """
    if stopped:
        sys.exit(int(os.environ.get("STOP_CODE", "0")))
