"""Refuses a command that cannot work, in one line, before any process is started.

``scripts/launch.sh`` asks here first, once for all ranks, and is told how many of them to start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .checks import check
from .commandline import TRAINING, parse
from .config import Config, UserError, fail
from .place import Place
from .rundir import find_start


def preflight(argv: Sequence[str]) -> int:
    """Check the words of a command line.

    Returns:
        The number of ranks to start on this machine.

    Raises:
        SystemExit: with code 2, after one line on stderr that says what to change.
    """
    command, config, paths = parse(argv)
    try:
        if "checkpoint" in paths and not Path(paths["checkpoint"]).exists():
            raise UserError(f"--checkpoint is {paths['checkpoint']}: no such file")
        if command == "convert":
            return 1
        size = count_ranks(config)
        check(config, size * int(os.environ.get("NODES", "1")), training=command in TRAINING)
        if command != "doctor":  # It tells that among the rest.
            check_backend(config)
        if command == "train":
            find_start(config)
    except UserError as error:
        fail(str(error))
    return size


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
    print(preflight(sys.argv[1:]))
