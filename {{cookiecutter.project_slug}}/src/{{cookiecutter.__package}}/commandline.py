"""The words of a command: a subcommand, paths, and settings that are read from YAML and overridden."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from jsonargparse import ArgumentParser

from .config import Config, fail, from_dict, sections

# What each subcommand does, and the paths that it needs.
COMMANDS = {
    "train": ("train, or go on from the newest checkpoint of run.dir", ()),
    "evaluate": ("score --checkpoint PATH on the whole test set", ("checkpoint",)),
    #:: if cookiecutter.task == "language" ::#
    "generate": ("print text that --checkpoint PATH goes on with", ("checkpoint",)),
    #:: endif ::#
    "doctor": ("check machines, network and disk before a long run", ()),
    "benchmark": ("measure where the time of a training step goes", ()),
    "convert": ("write --checkpoint PATH in the other format as --output PATH", ("checkpoint", "output")),
}

# Those that take optimizer steps or prepare for it, so that the global batch has to divide.
TRAINING = ("train", "benchmark", "doctor")


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
    for name, (purpose, _) in COMMANDS.items():
        commands.add_subcommand(name, Parser() if name == "convert" else settings_parser(name), help=purpose)
    parsed = parser.parse_args(rest)

    command, paths = parsed.command, vars(found)
    needed = COMMANDS[command][1]
    if command == "train" and paths:
        fail("train takes no --checkpoint and no --output, but --checkpoint.resume PATH to start from one")
    if tuple(paths) != needed:
        wanted = " and ".join(f"--{path} PATH" for path in needed) or "neither"
        fail(f"of --checkpoint and --output, {command} needs {wanted}")
    settings = parsed[command]
    return command, Config() if command == "convert" else from_dict({k: vars(settings[k]) for k in sections()}), paths


def settings_parser(command: str) -> ArgumentParser:
    """A parser of every setting of ``Config``, by section."""
    parser = Parser()
    parser.add_argument("--config", action="config", help="YAML file of settings; later arguments override it.")
    for name, kind in sections().items():
        parser.add_class_arguments(kind, name)
    if command == "evaluate":
        parser.set_defaults({"run.dir": ""})  # Only where it is given, its record goes into metrics.jsonl there.
    return parser
