"""Processes end with their parent: ranks with their launcher, loader processes with their rank.

A launcher that is killed (SIGKILL) cannot end its ranks. They would keep the devices and the port, and write to the run
directory that the restarted job uses.
"""

import ctypes
import os
import signal
import sys
import threading
import time

from .environment import ProcessInfo
from .signals import answer

PR_SET_PDEATHSIG = 1  # From <linux/prctl.h>.


def end_with_launcher(info: ProcessInfo) -> None:
    """Make this process end with its launcher, if it has one, and with a stop signal, until training answers those.

    Slurm's daemon ends its tasks by itself.
    """
    answer(signal.SIG_DFL)
    is_mpi = info.launcher == "mpirun"
    if is_mpi or "LOCAL_WORLD_SIZE" in os.environ:
        # The kernel also sends the signal when the thread that started us ends; MPI's launchers have several threads.
        end_with(os.getppid(), by_kernel=not is_mpi)


def end_with(parent: int, *, by_kernel: bool = True) -> None:
    """Make this process end with ``parent``, which started it; immediately if ``parent`` is already gone."""
    if sys.platform == "linux" and by_kernel:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent ended before the call.
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
