"""How a process of the run ends: with its exit code, and at once.

Python would first take everything apart. If one of gloo's threads drops the last reference to a Python object in that
time, the process aborts: "terminate called without an active exception". ``destroy_process_group`` does not end all of
these threads: DTensor's caches, for example, hold process groups.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(function: Callable[..., object], *args: object) -> NoReturn:
    """Call ``function``, then end this process: with 0, 1 if it raised, or what it gave ``sys.exit``."""
    code = call(function, *args)
    # As Python does: wait for threads that are no daemons, call what is registered, and write what is printed.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    lost = call(sys.stdout.flush)
    sys.stderr.flush()
    end_process(code or lost)


def call(function: Callable[..., object], *args: object) -> int:
    """Call ``function``, and print on stderr what it raised; returns an exit code."""
    try:
        function(*args)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return request.code or 0
        print(request.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end_process(code: int) -> NoReturn:
    """End this process at once; Python does nothing more."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_mpi_available():
        sys.exit(code)  # PyTorch finalizes MPI when the C library exits.
    os._exit(code)
