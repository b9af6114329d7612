"""The command line: ``scripts/launch.sh train --optim.lr 1e-3``; ``train --help`` lists all settings."""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from .config import CheckpointConfig, Config, UserError, sections

DEFAULT = Path(__file__).parents[2] / "configs" / "default.yaml"
# With the settings of a run: what all ranks do together.
COMMANDS = {
    "train": "train, or resume run.dir",
    "evaluate": "print the metrics of --checkpoint PATH on the test set",
}
# Without: what one process does with files.
FILE_COMMANDS = {
    "export": "write the weights of --checkpoint PATH as --output FILE.safetensors",
    "plot": "draw the metrics of --runs [DIR, ...] as --output FILE.png",
}


class Parser(ArgumentParser):
    """A parser that raises what the user has to change."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message)


def build_parser() -> Parser:
    """Build the parser of all subcommands."""
    load_yaml = get_loader("yaml")

    def load(text: str) -> Any:
        reject_repeated_keys(yaml.compose(text, yaml.SafeLoader))
        return load_yaml(text)

    set_loader("yaml", load, exceptions=(yaml.YAMLError,))
    parser = Parser(prog=__package__)
    commands = parser.add_subcommands(required=True, dest="command")
    for name, text in (COMMANDS | FILE_COMMANDS).items():
        command = Parser()
        if name in FILE_COMMANDS:
            command.add_argument("--output", required=True, help="The file to write.")
        else:
            command.add_argument("--config", action="config", help="A YAML file; default: configs/default.yaml.")
            for section, kind in sections().items():
                if section != "checkpoint" or name == "train":
                    command.add_class_arguments(kind, section)
        if name == "plot":
            command.add_argument("--runs", type=list[str], required=True, help="Directories of runs.")
        elif name != "train":  # In a file of settings, there is a section of that name.
            command.add_argument("--checkpoint", type=str | CheckpointConfig, required=True, help="The checkpoint.")
        commands.add_subcommand(name, command, help=text)
    return parser


def reject_repeated_keys(node: Any) -> None:
    """Reject YAML with a key that is given twice, of which only the last would count."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{repeated[0]} is given twice in one section of the YAML; keep one of them")
        for _, value in node.value:
            reject_repeated_keys(value)


def parse(argv: Sequence[str]) -> tuple[str, Namespace]:
    """Return the subcommand and its options; settings that are not given are those of ``configs/default.yaml``."""
    words = list(argv)
    names_file = any(word.split("=")[0] == "--config" for word in words)
    if words and words[0] in COMMANDS and not names_file and DEFAULT.exists():
        words[1:1] = ["--config", str(DEFAULT)]
    parser = build_parser()
    parsed = parser.instantiate(parser.parse_args(words))
    return parsed.command, parsed[parsed.command]


def read_config(options: Namespace) -> Config:
    """Return the settings among the options of a subcommand."""
    return Config(**{name: options[name] for name, kind in sections().items() if isinstance(options.get(name), kind)})


def check(name: str, options: Namespace) -> None:
    """Reject what cannot work; it needs neither PyTorch nor a process group."""
    if name not in ("train", "plot") and not Path(str(options.checkpoint)).exists():
        raise UserError(f"--checkpoint is {options.checkpoint}; give the path of a checkpoint")
    if name in COMMANDS:
        read_config(options).check(int(os.environ.get("WORLD_SIZE", "1")), trains=name == "train")


def run(name: str, options: Namespace, given: set[str]) -> None:
    """Run a subcommand; ``given`` has the names of the options on the command line."""
    # Only now: PyTorch takes seconds to import, and wrong settings are reported before that.
    from .checkpoint import export
    from .distributed import cleanup, fail, setup
    from .evaluate import evaluate
    from .logger import plot
    from .train import train

    if name == "export":
        return export(Path(options.checkpoint), Path(options.output))
    if name == "plot":
        return plot(options.runs, options.output)
    gc.freeze()  # The imports made 400,000 objects that stay; the garbage collector would look at them again and again.
    config = read_config(options)
    process = setup(config)
    try:
        if name == "train":
            train(config, process)
        else:
            evaluate(options.checkpoint, config, given, process)
    except Exception as error:
        fail(error, process)
    cleanup()


def main(argv: Sequence[str]) -> None:
    """Check the settings, and run one subcommand on this rank; ``--preflight`` only checks."""
    words = [word for word in argv if word != "--preflight"]
    try:
        name, options = parse(words)
        check(name, options)
        if len(words) == len(argv):
            run(name, options, given={word.split("=")[0].removeprefix("--") for word in words})
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
