"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C): all ranks stop after the same step.

    rank 0   step 7 ────────── step 8 ────────── step 9    The signal reaches rank 1 during step 7. Rank 1 sends it with
    rank 1   step 7 ─ signal ─ step 8 ────────── step 9    the all-reduce that starts with step 8; every rank reads that
                               └─ all-reduce ────┘ stop    message after step 9, and stops.

Short steps have a message every few of them; a long one reads its message at its own end.
A signal may reach one rank, or all in different steps. Its handler must not call a collective, and only records it.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import STOP_SIGNALS

# Signals that repeat within this time count as one: Slurm signals all processes of a job, a shell a process group, and
# a launcher among them forwards the signal.
SECONDS_OF_ONE_SIGNAL = 5.0
MOST_STEPS = 16  # From one message to the next: those that come may be longer than those that were measured.
# Wraps some steps, and is called equally often on every rank; it may raise to stop: ``StopSignal.agree``, for example.
Context = Callable[[], AbstractContextManager[None]]


class Stopped(Exception):
    """A rank received a stop signal; raised on all ranks after the same step."""


class StopSignal:
    """Listens for stop signals in a ``with`` block; a second, later signal ends the process immediately.

    Args:
        seconds: About how long after one message the ranks exchange the next; in each step if it takes longer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # Steps from one message to the next, the number of this one in between, and when they began.
        self.interval, self.number, self.began_at = 1, 0, -math.inf
        # A separate group on the CPU: its messages never mix with others, and wait for no device.
        self.group: Any = dist.new_group(backend="gloo")
        self.received, self.received_at = 0, 0.0
        self.previous: dict[int, Any] = {}
        self.pending: tuple[Tensor, Any] | None = None

    def __enter__(self) -> Self:
        self.previous = {number: signal.signal(number, self.on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if self.pending and not failed:
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

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Wrap a step: every few steps, the ranks exchange their signals while it computes; a collective.

        Raises:
            Stopped: after the step, on every rank, if one of them had received a signal when the message was sent.
        """
        if self.number == 0 and not self.pending:
            self.pending = self.start_all_reduce()
        yield
        # A step later, it has long arrived. Waiting for it in the same step took 7 to 18 % of a step of 18 ms.
        if self.pending and self.number == min(1, self.interval - 1):
            self.read_message(*self.pending)
        self.number = (self.number + 1) % self.interval

    def restart(self) -> None:
        """Measure the interval anew, because steps of another length follow; their first one has a message."""
        if self.pending:
            self.pending[1].wait()  # The next message says the same.
        self.interval, self.number, self.began_at, self.pending = 1, 0, -math.inf, None

    def start_all_reduce(self) -> tuple[Tensor, Any]:
        """Start the all-reduce of the highest signal (0: none) and the shortest interval of the ranks."""
        now = time.monotonic()
        seconds_per_step, self.began_at = max(now - self.began_at, 1e-9) / self.interval, now
        interval = min(MOST_STEPS, max(1, math.ceil(self.seconds / seconds_per_step)))
        message = torch.tensor([self.received, -interval])
        return message, dist.all_reduce(message, dist.ReduceOp.MAX, self.group, async_op=True)

    def read_message(self, message: Tensor, work: Any) -> None:
        """Wait for the message, and obey it."""
        work.wait()
        self.pending = None
        received, interval = message.tolist()
        self.interval = -interval
        if received:
            raise Stopped(signal.Signals(received).name)


def exit_if(stopped: bool) -> None:
    """Exit after a stop: with 0, or with STOP_CODE if 0 would mean that the run is complete.

    If a cluster stops one machine, the ranks of the other machines stop too, and their launchers do not know why.
    """
    if stopped:
        sys.exit(int(os.environ.get("STOP_CODE", "0")))
