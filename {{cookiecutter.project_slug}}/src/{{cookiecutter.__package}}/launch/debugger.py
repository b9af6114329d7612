"""One rank waits for a debugger, and the other ranks wait for that rank: ``DEBUG_RANK=1 scripts/launch.sh train``."""

import os
import socket
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec

from ..config import UserError
from .environment import ProcessInfo, exit_with_error

HOST = "127.0.0.1"  # No other address: whoever reaches the port can run code here as this user.


def find_debug_rank(world_size: int) -> int | None:
    """Return the rank that ``DEBUG_RANK`` names, or None if it is not set; rejects a value that is not a rank."""
    value = os.environ.get("DEBUG_RANK", "")
    if not value:
        return None
    if not value.isdecimal() or int(value) >= world_size:
        ranks = "0" if world_size == 1 else f"0 to {world_size - 1}"
        raise UserError(f"DEBUG_RANK is '{value}'; give the rank that waits for a debugger: {ranks}")
    return int(value)


def find_debug_port() -> int:
    """Return ``DEBUG_PORT``, by default the port that editors expect; rejects a port that cannot be used."""
    value = os.environ.get("DEBUG_PORT") or "5678"
    if not value.isdecimal() or not 0 < int(value) < 2**16:
        raise UserError(f"DEBUG_PORT is '{value}'; give a port from 1 to 65535")
    try:
        socket.create_server((HOST, int(value))).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"port {value} cannot be used for the debugger ({reason}); set DEBUG_PORT to another") from None
    return int(value)


def check_debugger(world_size: int) -> None:
    """Reject ``DEBUG_RANK`` if no debugger could attach."""
    if find_debug_rank(world_size) is not None:
        if find_spec("debugpy") is None:
            raise UserError("DEBUG_RANK needs the package debugpy; install it: pip install debugpy")
        find_debug_port()


def wait_for_debugger(info: ProcessInfo) -> None:
    """Wait until a debugger is attached and has set its breakpoints, if ``DEBUG_RANK`` names this rank."""
    if find_debug_rank(info.world_size) != info.rank:
        return
    try:
        check_debugger(info.world_size)
    except UserError as error:
        exit_with_error(str(error), only_this_rank=True)

    import_module("torch")  # Imported now, because under the debugger it would take several times as long.
    # Python's own modules are frozen and cannot be stepped through; debugpy would warn about it at length.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    import debugpy

    debugpy.configure(subProcess=False)  # Do not attach to loader processes and git.
    host, port = debugpy.listen((HOST, find_debug_port()))
    print(f"rank {info.rank} waits for a debugger at {host}:{port}", file=sys.stderr, flush=True)
    debugpy.wait_for_client()


def collective_timeout(seconds: float) -> timedelta:
    """Return how long to wait for other ranks: ``seconds``, or a day if one of them may be stopped at a breakpoint."""
    debugged = os.environ.get("DEBUG_RANK") or "pydevd" in sys.modules  # The latter: started in an editor's debugger.
    return timedelta(days=1) if debugged else timedelta(seconds=seconds)
