"""Refuses a command that cannot work, in one line, before any process is started.

``scripts/launch.sh`` asks here first, once for all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .config import UserError, fail, parse
from .rundir import find_start


def preflight(argv: Sequence[str]) -> None:
    """Check the words of a command line, for a world of ``WORLD_SIZE`` ranks.

    Raises:
        SystemExit: with code 2, after one line on stderr that says what to change.
    """
    command, config, checkpoint = parse(argv)
    try:
        if command == "train":
            find_start(config)
        elif not Path(str(checkpoint)).is_file():
            raise UserError(f"--checkpoint is {checkpoint}: no such file")
    except UserError as error:
        fail(str(error))


if __name__ == "__main__":
    preflight(sys.argv[1:])
