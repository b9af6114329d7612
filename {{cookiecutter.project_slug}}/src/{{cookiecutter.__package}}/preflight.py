"""Refuses a command that cannot work, in one line, before any process is started.

``scripts/launch.sh`` asks here first, once for all ranks, and is told how many of them to start, and how many seconds
they have to meet.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from .checks import check
from .commandline import TRAINING, parse
from .config import Config, UserError, fail
from .debugger import check_debugger
from .place import Place
from .rundir import find_start, is_restart


def preflight(argv: Sequence[str]) -> tuple[int, int]:
    """Check the words of a command line.

    Returns:
        The number of ranks to start on this machine, and the seconds in which all have to have met.

    Raises:
        SystemExit: with code 2, after one line on stderr that says what to change.
    """
    command, config, paths = parse(argv)
    try:
        if "checkpoint" in paths and not Path(paths["checkpoint"]).exists():
            raise UserError(f"--checkpoint is {paths['checkpoint']}: no such file")
        size = 1 if command == "convert" else count_ranks(config)
        world_size = size * int(os.environ.get("NODES", "1"))
        check_debugger(world_size)
        if command == "convert":
            return size, 60
        check(config, world_size, training=command in TRAINING)
        if command != "doctor":  # It tells those among the rest.
            check_backend(config)
            check_port(config)
        if command == "train":
            find_start(config, is_restart())
    except UserError as error:
        fail(str(error))
    return size, math.ceil(config.distributed.startup_timeout_seconds)


def check_port(config: Config) -> None:
    """Refuse a port at which rank 0 is to wait for the others, if something on this machine does so already.

    Raises:
        UserError: naming it, and where another one is set.
    """
    port, remedy = None, ""
    if config.distributed.init_method.startswith("tcp://"):
        port, remedy = urlsplit(config.distributed.init_method).port, "give another in --distributed.init_method"
    elif os.environ.get("NODES", "1") != "1":
        port, remedy = int(os.environ.get("PORT", "29400")), "set PORT to another on all machines"
    if port is None or os.environ.get("NODE_RANK", "0") != "0":
        return
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port in use on this machine: {port}; wait for what uses it, or {remedy}") from None


def check_backend(config: Config) -> None:
    """Refuse a backend that was asked for by name, and that this machine or this PyTorch lacks.

    Raises:
        UserError: naming it, and what would work.
    """
    if config.distributed.backend in ("nccl", "mpi"):
        from .distributed import choose_backend, choose_device  # PyTorch takes seconds to import.

        choose_backend(config.distributed.backend, choose_device(config.distributed, 1, Place()))


def count_ranks(config: Config) -> int:
    """``NPROC``; where it is not set, what suits this machine's accelerators.

    Raises:
        UserError: if it is not a number of ranks.
    """
    wanted = os.environ.get("NPROC", "")
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise UserError(f"NPROC is '{wanted}'; give the number of ranks to start, 1 or more")
        return int(wanted)
    if config.distributed.device == "cpu":
        return config.parallel.default_size(devices=0)
    import torch  # Takes seconds to import.

    return config.parallel.default_size(torch.accelerator.device_count())


if __name__ == "__main__":
    print(*preflight(sys.argv[1:]))
