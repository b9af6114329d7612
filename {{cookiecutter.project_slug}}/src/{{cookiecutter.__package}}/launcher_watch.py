"""Processes end when the one that started them is gone: ranks with their launcher, loader processes with their rank.

A launcher that is killed (SIGKILL) cannot end its ranks. Left alone, they would keep the devices and the port, and
write into the run directory that the restarted job uses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from .place import Place

PR_SET_PDEATHSIG = 1  # From <linux/prctl.h>.


def end_with_launcher(place: Place) -> None:
    """Have this process end with the launcher that started it; a process started by hand has none, and goes on.

    Slurm needs no help: its daemon ends what it started.
    """
    mpi = place.launcher == "mpirun"
    if mpi or "LOCAL_WORLD_SIZE" in os.environ:
        # The kernel would also act when the thread that started us ends, and MPI's launchers have several.
        end_with(os.getppid(), by_kernel=not mpi)


def end_with(parent: int, *, by_kernel: bool = True) -> None:
    """Have this process end with ``parent``, the process that started it; at once, if that is gone already."""
    if sys.platform == "linux" and by_kernel:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before the kernel knew what to do.
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def watch(parent: int) -> None:
    """Wait until this process has another parent, then end it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
