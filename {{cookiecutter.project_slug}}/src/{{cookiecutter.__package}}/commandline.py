"""The words of a command: a subcommand, paths, and settings that are read from YAML and overridden."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from jsonargparse import ArgumentParser

from .config import Config, fail, from_dict, sections


class Parser(ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(message)


def parse(argv: Sequence[str]) -> tuple[str, Config, dict[str, str]]:
    """Read the command line.

    Args:
        argv: The words after ``python -m <package>``.

    Returns:
        The subcommand, its settings, and what it was given of the paths ``checkpoint`` and ``output``.

    Raises:
        SystemExit: with code 2 and one line on stderr for an unknown key or a wrong type.
    """
    # --checkpoint stands beside the section of that name, which the library cannot parse in one go.
    path_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    path_parser.add_argument("--checkpoint")
    path_parser.add_argument("--output")
    found, rest = path_parser.parse_known_args(argv)

    parser = Parser(prog=__package__, description="Distributed training in plain PyTorch.")
    commands = parser.add_subcommands(required=True, dest="command")
    train, evaluate = settings_parser(), settings_parser()
    evaluate.set_defaults({"run.dir": ""})
    commands.add_subcommand("train", train, help="train, or go on from the newest checkpoint of run.dir")
    commands.add_subcommand("evaluate", evaluate, help="score --checkpoint PATH on the whole test set")
    commands.add_subcommand("convert", Parser(), help="write --checkpoint PATH in the other format as --output PATH")
    parsed = parser.parse_args(rest)

    settings, paths = parsed[parsed.command], vars(found)
    if sorted(paths) != {"train": [], "evaluate": ["checkpoint"], "convert": ["checkpoint", "output"]}[parsed.command]:
        fail(
            "evaluate needs --checkpoint PATH, and convert --output PATH besides; train takes none, but "
            "--checkpoint.resume PATH to start from one"
        )
    config = Config() if parsed.command == "convert" else from_dict({k: vars(settings[k]) for k in sections()})
    return parsed.command, config, paths


def settings_parser() -> ArgumentParser:
    """A parser of every setting of ``Config``, by section."""
    parser = Parser()
    parser.add_argument("--config", action="config", help="YAML file of settings; later arguments override it.")
    for name, kind in sections().items():
        parser.add_class_arguments(kind, name)
    return parser
