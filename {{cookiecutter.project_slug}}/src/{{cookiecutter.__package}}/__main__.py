"""The command line of one rank: a subcommand and its settings, which ``--help`` shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .checks import check
from .commandline import parse
from .config import Config, UserError, fail
from .launcher_watch import end_with_launcher


def main(argv: Sequence[str]) -> None:
    """Run one subcommand on this rank.

    Raises:
        SystemExit: with code 2 and one line on stderr, if the user has to change something.
    """
    end_with_launcher()
    command, config, paths = parse(argv)
    try:
        if command == "convert":
            run_convert(paths)
            return
        check(config, int(os.environ.get("WORLD_SIZE", "1")), training=command != "evaluate")
        if command == "doctor":
            from .doctor import doctor

            sys.exit(doctor(config))
        run(command, config, paths)
    except UserError as error:
        fail(str(error))


def run_convert(paths: Mapping[str, str]) -> None:
    """Convert a checkpoint, in one process."""
    from .convert import convert

    if os.environ.get("RANK", "0") == "0":
        convert(Path(paths["checkpoint"]), Path(paths["output"]))


def run(command: str, config: Config, paths: Mapping[str, str]) -> None:
    """Run a subcommand that all ranks do together."""
    # Only now, for PyTorch takes seconds to import: settings that are wrong were refused at once.
    from .benchmark import benchmark
    from .distributed import choose_arithmetic, process_group
    from .evaluate import evaluate
    #:: if cookiecutter.task == "language" ::#
    from .generate import generate
    #:: endif ::#
    from .train import train

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


if __name__ == "__main__":
    main(sys.argv[1:])
