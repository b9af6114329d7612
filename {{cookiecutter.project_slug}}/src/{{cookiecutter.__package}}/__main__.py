"""The command line of one rank: a subcommand and its settings, which ``--help`` shows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .checks import check
from .commandline import TRAINING, parse
from .config import Config, UserError, fail
from .debugger import wait_for_debugger
from .launcher_watch import end_with_launcher
from .place import Place, find_place


def main(argv: Sequence[str]) -> None:
    """Run one subcommand on this rank.

    Raises:
        SystemExit: with code 2 and one line on stderr, if the user has to change something.
    """
    try:
        place = find_place()
        end_with_launcher(place)
        command, config, paths = parse(argv)
        wait_for_debugger(place)
        if command == "convert":
            run_convert(paths, place)
            return
        check(config, place.size, training=command in TRAINING)
        if command == "doctor":
            run_doctor(config)
        else:
            run(command, config, paths)
    except UserError as error:
        fail(str(error))


def run_convert(paths: dict[str, str], place: Place) -> None:
    """The one subcommand that one process does alone."""
    from .convert import convert

    if place.rank == 0:
        convert(Path(paths["checkpoint"]), Path(paths["output"]))


def run_doctor(config: Config) -> NoReturn:
    """The one that helps where no process group can be formed; its exit code is what it found."""
    from .doctor import doctor

    sys.exit(doctor(config))


def run(command: str, config: Config, paths: dict[str, str]) -> None:
    """Do ``command`` together with all other ranks."""
    # Only now, for PyTorch takes seconds to import: settings that are wrong were refused at once.
    # Some 400,000 objects are made, and stay: the garbage collector need not look through them, neither now, again and
    # again, nor later, between two steps and at the end.
    gc.disable()
    from .benchmark import benchmark
    from .distributed import choose_arithmetic, process_group
    from .evaluate import evaluate
    #:: if cookiecutter.task == "language" ::#
    from .generate import generate
    #:: endif ::#
    from .train import train

    gc.freeze()
    gc.enable()
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
