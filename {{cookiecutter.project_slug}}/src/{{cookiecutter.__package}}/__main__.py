"""The command line of one rank: a subcommand and its settings, which ``--help`` shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .checks import check
from .commandline import parse
from .config import UserError, fail
from .debugger import wait_for_debugger
from .launcher_watch import end_with_launcher


def main(argv: Sequence[str]) -> None:
    """Run one subcommand on this rank.

    Raises:
        SystemExit: with code 2 and one line on stderr, if the user has to change something.
    """
    end_with_launcher()
    command, config, paths = parse(argv)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    wait_for_debugger(int(os.environ.get("RANK", "0")), size)
    # Only now, for PyTorch takes seconds to import: settings that are wrong were refused at once.
    from .benchmark import benchmark
    from .convert import convert
    from .distributed import choose_arithmetic, process_group
    from .evaluate import evaluate
    #:: if cookiecutter.task == "language" ::#
    from .generate import generate
    #:: endif ::#
    from .train import train

    try:
        if command == "convert":
            if os.environ.get("RANK", "0") == "0":
                convert(Path(paths["checkpoint"]), Path(paths["output"]))
            return
        check(config, size, training=command != "evaluate")
        choose_arithmetic(config.train.exact)
        with process_group(config) as world:
            if command == "train":
                train(config, world)
            elif command == "benchmark":
                benchmark(config, world)
            #:: if cookiecutter.task == "language" ::#
            elif command == "generate":
                generate(paths["checkpoint"], config, world)
            #:: endif ::#
            else:
                evaluate(paths["checkpoint"], config, world)
    except UserError as error:
        fail(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
