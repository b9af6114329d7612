"""How a process of the run ends: with its exit code, and at once.

Python would first take everything apart. If one of gloo's threads drops the last reference to a Python object in that
time, the process aborts: "terminate called without an active exception". ``destroy_process_group`` does not end all of
these threads, because DTensor's caches hold process groups.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(function: Callable[..., object], *args: object) -> NoReturn:
    """Call ``function``, then end this process: with 0, 1 if it raised, or what it gave ``sys.exit``."""
    code = 1
    try:
        function(*args)
        sys.stdout.flush()
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        if code and not isinstance(request.code, int):
            print(request.code, file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
    # As Python does: wait for threads that are no daemons, then call what is registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process, without a word to Python."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_mpi_available():
        sys.exit(code)  # PyTorch finalizes MPI when the C library exits.
    os._exit(code)
