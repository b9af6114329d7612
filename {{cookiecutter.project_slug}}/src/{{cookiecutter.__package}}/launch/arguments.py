"""Parsing the command line: a subcommand, paths, and settings from a YAML file and from arguments.

train --config configs/default.yaml --optim.lr 1e-3
convert --checkpoint runs/large/checkpoints/step-00000100.dcp --output large.pt
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jsonargparse import ArgumentParser

from ..config import sections
from .environment import exit_with_error
#:: if cookiecutter.__plays ::#
from .spaces import complete_settings
#:: endif ::#

# What jsonargparse says of a setting that may be null; the first group is what is wrong.
OR_NULL = re.compile(r"Does not validate against any of the Union.*?- (.*?)\s*- Expected a <class 'NoneType'>.*", re.S)


class Option(NamedTuple):
    """What one subcommand takes besides settings."""

    name: str
    help: str
    takes_value: bool = True


class Command(NamedTuple):
    """A subcommand."""

    help: str
    paths: tuple[str, ...] = ()  # Which of --checkpoint and --output it needs.
    trains: bool = False  # It takes optimizer steps or prepares for them, so the global batch has to divide evenly.
    has_settings: bool = True
    options: tuple[Option, ...] = ()


class Parser(ArgumentParser):
    """A parser that reports an error as one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        exit_with_error(OR_NULL.sub(r"\1; or null", message))


def parse(argv: Sequence[str], commands: Mapping[str, Command]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Parse the arguments after ``python -m <package>``; rejects an unknown key or a wrong type.

    Returns:
        The subcommand, the sections of its settings by name (none if it takes none), and its paths by name, with those
        of its options that are given, as text (empty for an option without a value).
    """
    # jsonargparse cannot parse --checkpoint, because a section has that name.
    path_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    path_parser.add_argument("--checkpoint")
    path_parser.add_argument("--output")
    given, rest = path_parser.parse_known_args(argv)

    parser = Parser(prog=__package__.partition(".")[0], description="Distributed training in plain PyTorch.")
    subparsers = parser.add_subcommands(required=True, dest="command")
    for name, command in commands.items():
        subparsers.add_subcommand(name, build_parser(name, command), help=command.help)
    parsed = parser.parse_args(rest)

    name, paths = parsed.command, vars(given)
    command = commands[name]
    if name == "train" and paths:
        exit_with_error("train takes no --checkpoint and no --output, but --checkpoint.resume PATH to start from one")
    if paths.keys() != set(command.paths):
        needed = " and ".join(f"--{path} PATH" for path in command.paths) or "neither"
        exit_with_error(f"of --checkpoint and --output, {name} needs {needed}")
    kinds = sections().items() if command.has_settings else ()
    if empty := [key for key, _ in kinds if parsed[name][key] is None]:
        exit_with_error(f"{empty[0]} is null; give it a setting, or leave it out")
    settings = {key: build_section(kind, vars(parsed[name][key])) for key, kind in kinds}
    #:: if cookiecutter.__plays ::#
    if settings and command.trains:  # Otherwise, a checkpoint says what the model is.
        complete_settings(settings["control"], settings["model"])
    #:: endif ::#
    options = {option.name: parsed[name][option.name] for option in command.options}
    return name, settings, paths | {option: value for option, value in options.items() if value is not None}


def build_section(kind: type, values: Mapping[str, Any]) -> Any:
    """Build a section of the settings from its values."""

    def to_builtin(value: Any) -> Any:
        # The parser's numbers are subclasses that check bounds; a checkpoint holds only built-in types.
        if isinstance(value, list | tuple):
            return type(value)(map(to_builtin, value))
        number = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
        return value if number is None else number(value)

    return kind(**{name: to_builtin(value) for name, value in values.items()})


def build_parser(name: str, command: Command) -> ArgumentParser:
    """Build the parser of a subcommand, with every setting by section."""
    parser = Parser()
    if command.has_settings:
        parser.add_argument("--config", action="config", help="YAML file of settings; later arguments override it.")
        for section, kind in sections().items():
            parser.add_class_arguments(kind, section)
    for option in command.options:
        value = {"type": str} if option.takes_value else {"action": "store_const", "const": ""}
        parser.add_argument(f"--{option.name.replace('_', '-')}", help=option.help, **value)
    if name == "evaluate":
        parser.set_defaults({"run.dir": ""})  # By default, the record is only printed.
    return parser
