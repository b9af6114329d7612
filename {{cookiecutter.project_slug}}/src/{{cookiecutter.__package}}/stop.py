"""A request to stop (SIGTERM or SIGUSR1): all ranks hear of it, and stop at the same step.

A signal may reach one rank alone, or all of them in different steps. A handler may not save or call a collective, so
it only takes a note, and the ranks tell each other between steps.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .config import DistributedConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """A rank was asked to stop; raised on all ranks at the same step."""


class StopRequest:
    """Listens for a signal from ``__enter__`` to ``__exit__``; a second one ends the process as if nobody listened.

    Args:
        config: How long to wait for other ranks.
    """

    def __init__(self, config: DistributedConfig) -> None:
        # A group of its own, on the CPU: its messages come between no others, and wait for no device.
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.startup_timeout_seconds))
        self.received = 0

    def __enter__(self) -> StopRequest:
        self.former = {number: signal.signal(number, self.note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def note(self, number: int, _: FrameType | None) -> None:
        """Take note of a signal."""
        self.received = number
        signal.signal(number, self.former[signal.Signals(number)])

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Put around a step: the ranks tell each other while it computes, so that none waits; a collective.

        Raises:
            Stopped: after the step, on every rank, if one of them had been asked to stop before it.
        """
        highest = torch.tensor(self.received)
        work: Any = dist.all_reduce(highest, dist.ReduceOp.MAX, self.group, async_op=True)
        yield
        work.wait()
        if highest:
            raise Stopped(signal.Signals(int(highest)).name)


def end_stopped() -> NoReturn:
    """End a rank that has stopped and saved: with 0, or with STOP_CODE where 0 would be taken for the end of the run.

    Where a cluster stops one machine, the ranks of the others stop too, and nobody told their launchers why.

    Raises:
        SystemExit: always.
    """
    sys.exit(int(os.environ.get("STOP_CODE", "0")))
