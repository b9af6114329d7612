"""Workers end when their launcher is gone.

A launcher that is killed (SIGKILL) cannot end its workers. Left alone, they would keep the devices and the port, and
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
    if not mpi and "LOCAL_WORLD_SIZE" not in os.environ:
        return
    launcher = os.getppid()
    # The kernel would also act when the thread that started us ends, and MPI's launchers have several.
    if sys.platform == "linux" and not mpi:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # It died before the kernel knew what to do.
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=watch, args=(launcher,), daemon=True).start()


def watch(launcher: int) -> None:
    """Wait until this process has another parent, then end it."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
