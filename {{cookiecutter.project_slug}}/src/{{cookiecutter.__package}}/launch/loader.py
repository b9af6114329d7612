"""Loader processes: no stop signal ends them, because their rank needs them until it has saved; they end with it."""

import os
import signal
import sys
import threading
from multiprocessing import connection, parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from uuid import uuid4

from .parent import end_with
from .signals import answer, hold_back, start_resource_tracker


class LoaderProcess(SpawnProcess):
    """A loader process, which may take seconds to import the dataset and starts with stop signals held back."""

    def start(self) -> None:
        """Start the process."""
        with hold_back():
            super().start()


class LoaderContext(SpawnContext):
    """How a ``DataLoader`` starts its processes.

    Not by forking: the child would inherit locks that other threads hold at that moment, and might deadlock.
    """

    Process = LoaderProcess

    def __init__(self) -> None:
        start_resource_tracker()  # Otherwise the first queue would start it.


def init_loader_worker(_: int) -> None:
    """Initialize a loader process: make it end with its rank, and leave stop signals to that rank."""
    rank = parent_process()
    assert rank is not None and rank.pid is not None
    # PyTorch ties it to its current parent, which is not the rank if the rank was killed in the meantime.
    end_with(rank.pid)
    answer(signal.SIG_IGN, [signal.SIGUSR1, signal.SIGINT])
    if sys.platform == "linux":
        # Where it offers its tensors to the rank: a name that the kernel forgets with the process. Python would make a
        # temporary folder, which a killed process leaves.
        connection.arbitrary_address = lambda _: f"\0loader-{uuid4()}"  # type: ignore[attr-defined]
        threading.Thread(target=end_on_request, args=(rank.pid,), daemon=True).start()
    else:  # Whoever sends SIGTERM, PyTorch's handler ends the process.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_on_request(rank: int) -> None:
    """End this process when it gets SIGTERM from ``rank``, which ends those that are left when it exits itself."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)
