"""The ranks that a launcher has started on this machine: how they end, and the launcher's own exit code.

what happens         what the launcher does                                           its exit code
all exit with 0      nothing                                                          0
one fails            gives the others time to report it, then ends them               that of the failed rank
a stop signal        forwards it, and gives them time to save                         128 + its number, or STOP_CODE

Ranks print what they know themselves. The launcher only adds which of them a signal has ended, or it had to kill.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import FrameType

Started = subprocess.Popen[bytes] | BaseProcess
# Seconds in which ranks that wait for a failed one report it (``runtime/failures.py``) and exit; then SIGTERM ends
# those that do not train.
REPORT_SECONDS = 10.0


class Ranks:
    """The ranks of this machine, by number; they have ``patience`` seconds to end after a failure or a stop signal."""

    def __init__(self, processes: Mapping[int, Started], patience: float) -> None:
        self.processes, self.patience = processes, patience
        self.failure = 0  # The exit code of the rank whose failure ended the others.
        self.received = 0  # The first stop signal.

    def codes(self) -> dict[int, int | None]:
        """Return the exit code of each rank: None while it runs, negative if a signal ended it."""
        return {
            rank: process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            for rank, process in self.processes.items()
        }

    def running(self) -> list[int]:
        """Return the ranks that still run."""
        return [rank for rank, code in self.codes().items() if code is None]

    def forward(self, number: int, _: FrameType | None = None) -> None:
        """Forward a stop signal to the ranks; a signal handler."""
        self.received = self.received or number
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        for rank in self.running():
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, number)

    def check(self) -> None:
        """If a rank has failed, end the others."""
        failed = {rank: code for rank, code in self.codes().items() if code}
        if not failed:
            return
        self.failure = min(failed.values())
        for rank, code in failed.items():
            if code < 0:
                print(f"rank {rank} (process {self.processes[rank].pid}) was ended by {name(-code)}", file=sys.stderr)
        self.end(terminate=self.failure != int(os.environ.get("STOP_CODE", "0")))

    def end(self, *, terminate: bool) -> None:
        """Wait until all ranks have ended; ``terminate`` those that do not report a failure, kill those that hang."""
        deadline = time.monotonic() + self.patience
        if terminate:
            self.wait(min(REPORT_SECONDS, self.patience / 2))
            # A signal, or a mistake of the user (2), is the cause of other ranks' errors.
            codes = [code for code in self.codes().values() if code]
            self.failure = min(codes, key=lambda code: (code > 0, code != 2))
            self.send(signal.SIGTERM)
        self.wait(deadline - time.monotonic())
        for rank in self.running():
            process = self.processes[rank]
            print(f"rank {rank} (process {process.pid}) still ran after {self.patience:g} s: SIGKILL", file=sys.stderr)
            with suppress(ProcessLookupError):
                kill(process.pid or 0)
        self.wait(self.patience)

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended, but not longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)

    def exit_code(self) -> int:
        """Return the launcher's exit code, once all ranks have ended; reports a stop that came too early to save."""
        codes = [code for code in (self.failure, *self.codes().values()) if code]
        if self.received and (not codes or min(codes) < 0):
            if codes:
                print(f"ended by {name(self.received)}, without saving", file=sys.stderr)
            return 128 + self.received
        code = next(iter(codes), 0)
        return code if code >= 0 else 128 - code


def kill(rank: int) -> None:
    """Kill a rank, and what it has started, if it leads a process group."""
    (os.killpg if os.getpgid(rank) == rank else os.kill)(rank, signal.SIGKILL)


def name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
