"""One rank waits for a debugger, and the others wait for it: ``DEBUG_RANK=1 scripts/launch.sh train``.

Imports no PyTorch, so that what is wrong is told before anything is started.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec

from .config import UserError, fail
from .place import Place

HOST = "127.0.0.1"  # No other: whoever reaches the port can run code here as this user.


def find_debug_rank(size: int) -> int | None:
    """The rank that ``DEBUG_RANK`` names; None if it is not set.

    Raises:
        UserError: if it is none of ``size`` ranks.
    """
    wanted = os.environ.get("DEBUG_RANK", "")
    if not wanted:
        return None
    if not wanted.isdecimal() or int(wanted) >= size:
        ranks = "0" if size == 1 else f"0 to {size - 1}"
        raise UserError(f"DEBUG_RANK is '{wanted}'; give the rank that is to wait for a debugger: {ranks}")
    return int(wanted)


def find_debug_port() -> int:
    """``DEBUG_PORT``; where it is not set, that of debugpy and of the editors.

    Raises:
        UserError: if it is not a port, or is in use.
    """
    wanted = os.environ.get("DEBUG_PORT") or "5678"
    if not wanted.isdecimal() or not 0 < int(wanted) < 2**16:
        raise UserError(f"DEBUG_PORT is '{wanted}'; give a port, from 1 to 65535")
    try:
        socket.create_server((HOST, int(wanted))).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"port {wanted} is not for the debugger ({why}); set DEBUG_PORT to another") from None
    return int(wanted)


def check_debugger(size: int) -> None:
    """Refuse a debugger that could not come, where ``DEBUG_RANK`` asks for one in a run of ``size`` ranks.

    Raises:
        UserError: saying what to change.
    """
    if find_debug_rank(size) is not None:
        if find_spec("debugpy") is None:
            raise UserError("DEBUG_RANK needs the package debugpy; install it: pip install -e '.[dev]'")
        find_debug_port()


def wait_for_debugger(place: Place) -> None:
    """Wait until a debugger has attached itself and set its breakpoints, if ``DEBUG_RANK`` names this rank.

    Raises:
        UserError: if ``DEBUG_RANK`` names none.
        SystemExit: with code 2 and one line on stderr, if this rank cannot wait for a debugger.
    """
    if find_debug_rank(place.size) != place.rank:
        return
    try:
        check_debugger(place.size)
    except UserError as error:
        fail(str(error), alone=True)

    import_module("torch")  # Before the debugger looks on, which makes it take several times as long.
    # Python's own modules are frozen and cannot be stepped through: debugpy warns of it at length.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    import debugpy

    debugpy.configure(subProcess=False)  # Loader processes and git go their own way.
    host, port = debugpy.listen((HOST, find_debug_port()))
    print(f"rank {place.rank} waits for a debugger at {host}:{port}", file=sys.stderr, flush=True)
    debugpy.wait_for_client()


def allow(seconds: float) -> timedelta:
    """How long to wait for other ranks: ``seconds``, but a day where one of them may stand at a breakpoint."""
    debugged = os.environ.get("DEBUG_RANK") or "pydevd" in sys.modules  # Or started in the debugger of an editor.
    return timedelta(days=1) if debugged else timedelta(seconds=seconds)
