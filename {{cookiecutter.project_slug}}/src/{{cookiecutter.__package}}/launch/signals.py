"""Stop signals (SIGTERM, SIGUSR1, SIGINT) reach more processes than the ranks, which save and exit.

Slurm signals all processes of a job, Ctrl-C all that the terminal's command has started.

    launcher             forwards them to its ranks, and waits for these
    rank                 ends; once it trains, it saves first (``StopSignal``)
    loader process       ignores them, and ends with its rank
    resource tracker     ignores them: the helper of Python's multiprocessing that frees what others leave
    any, while starting  holds them back: Python would print a traceback, or end silently
"""

import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextmanager
def hold_back() -> Iterator[None]:
    """Block stop signals in a ``with`` block, and in the processes started there until they call ``answer``."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def answer(handler: signal.Handlers, signals: Collection[signal.Signals] = STOP_SIGNALS) -> None:
    """Answer signals from now on, including those that were held back: SIG_DFL ends the process, SIG_IGN ignores."""
    for number in signals:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def start_resource_tracker() -> None:
    """Start Python's resource tracker where SIGUSR1 is blocked: it ignores only the others.

    It does not warn either: what it frees is what a failed rank has left, and that rank's report is the last line.
    """
    sys.warnoptions.append("ignore:resource_tracker")
    with hold_back():
        resource_tracker.ensure_running()
    sys.warnoptions.pop()
