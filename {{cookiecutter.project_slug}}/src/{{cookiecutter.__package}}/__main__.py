"""The command line: ``scripts/launch.sh train --optim.lr 1e-3``; ``train --help`` lists all settings."""

import argparse
import os
import sys
from collections.abc import Sequence
from glob import escape
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace
#:: if file("task", "generate.py") or fact("shards") ::#
from jsonargparse.typing import NonNegativeFloat, PositiveInt
#:: endif ::#

from .config import CheckpointConfig, Config, UserError

COMMANDS: dict[str, tuple[str, set[str]]] = {  # What each does, and its options; with an output, it takes no settings.
    "train": ("train, or resume run.dir", set()),
    "evaluate": ("print the metrics of a checkpoint on the test set", {"checkpoint"}),
    "export": ("write the weights of a checkpoint as a .safetensors file", {"checkpoint", "output"}),
    "plot": ("draw the metrics of runs into a picture", {"runs", "output"}),
    #:: if file("task", "generate.py") ::#
    "generate": ("continue a prompt with the model of a checkpoint", {"checkpoint", "prompt"}),
    #:: endif ::#
    #:: if fact("shards") ::#
    "estimate": ("print the memory of a step on each rank, and whether it fits", {"ranks"}),
    #:: endif ::#
    #:: if fact("doctor") ::#
    "doctor": ("check what breaks a first run on several machines", set()),
    #:: endif ::#
}


def build_parser(default_files: list[str]) -> ArgumentParser:
    """Build the parser of all subcommands; it raises an ArgumentError, which is printed as one line."""
    parser = ArgumentParser(prog=__package__, exit_on_error=False, allow_abbrev=False)
    commands = parser.add_subcommands(required=True, dest="command")
    for name, (text, options) in COMMANDS.items():
        command = ArgumentParser(exit_on_error=False)
        if "output" in options:
            command.add_argument("--output", required=True, help="The file to write.")
        else:
            command.default_config_files = default_files
            command.add_argument("--config", action="config", help="A YAML file; default: configs/default.yaml.")
            command.add_class_arguments(Config, skip=options)  # Such as checkpoint, an option of some commands.
        if "runs" in options:
            command.add_argument("--runs", type=list[str], required=True, help="Directories of runs.")
        if "checkpoint" in options:  # In a file of settings, there is a section of that name.
            command.add_argument("--checkpoint", type=str | CheckpointConfig, required=True, help="The checkpoint.")
        #:: if file("task", "generate.py") ::#
        if "prompt" in options:
            command.add_argument("--prompt", type=str, default="", help="The text to continue.")
            command.add_argument("--length", type=PositiveInt, default=200, help="Bytes or tokens to add.")
            command.add_argument("--temperature", type=NonNegativeFloat, default=0.8, help="0 picks the likeliest.")
        #:: endif ::#
        #:: if fact("shards") ::#
        if "ranks" in options:
            command.add_argument("--ranks", type=PositiveInt, default=1, help="The number of ranks.")
            command.add_argument("--memory", type=NonNegativeFloat | None, default=None, help="GiB of a device.")
        #:: endif ::#
        commands.add_subcommand(name, command, help=text)
    return parser


def yaml_in_utf8(path: str) -> list[str]:
    """Return the pattern of a file of settings, if it has any; rejects other YAML, and a key that is given twice."""
    with open(path, encoding="utf-8") as file:
        top = yaml.compose(file, yaml.SafeLoader)
    found = [(path, top)] if top and not top.tag.endswith(":null") else []
    inner = top.value if isinstance(top, yaml.MappingNode) else []
    for where, node in [*found, *((f"{key.value} in {path}", value) for key, value in inner)]:
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{where} has to hold settings by name, as configs/default.yaml does")
        names = [key.value for key, _ in node.value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{repeated[0]} is given twice in {where}; keep one of them")
    return [escape(path)] if found else []


def parse(argv: Sequence[str]) -> tuple[str, Config, Namespace]:
    """Return the subcommand, the settings, and the other options."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    default = Path(__file__).parents[2] / "configs" / "default.yaml"  # No wheel has it.
    finder.add_argument("--config", type=yaml_in_utf8, default=str(default) if default.exists() else [])
    found, words = finder.parse_known_args(argv)
    if sum(word.split("=")[0] == "--config" for word in argv) > 1:
        raise UserError("--config is given twice; name one file")
    parser = build_parser(found.config)
    parsed = parser.instantiate(parser.parse_args(words))
    options = parsed[parsed.command]
    settings = {key: options[key] for key, part in vars(Config()).items() if isinstance(options.get(key), type(part))}
    return parsed.command, Config(**settings), options


def run(name: str, config: Config, options: Namespace, given: set[str]) -> None:
    """Run a subcommand; ``given`` has the names of the options on the command line."""
    from .checkpoint import export  # Not before settings are checked: PyTorch takes seconds to import.
    from .distributed import cleanup, rendezvous, setup
    #:: if fact("shards") ::#
    from .estimate import estimate
    #:: endif ::#
    from .evaluate import evaluate
    from .failures import fail
    #:: if file("task", "generate.py") ::#
    from .generate import generate
    #:: endif ::#
    from .plot import plot
    from .train import Trainer

    if name == "export":
        return export(Path(options.checkpoint), Path(options.output))
    if name == "plot":
        return plot(options.runs, options.output)
    #:: if fact("shards") ::#
    if name == "estimate":
        return estimate(config, options.ranks, options.memory)
    #:: endif ::#
    #:: if fact("doctor") ::#
    if name == "doctor":
        from .doctor import doctor

        doctor(config)
    #:: endif ::#
    process, stopped = rendezvous(config), False
    try:
        setup(config, process)
        if name == "train":
            stopped = Trainer(config, process).run()
        #:: if file("task", "generate.py") ::#
        elif name == "generate":
            generate(options, config, given, process)
        #:: endif ::#
        else:
            evaluate(options.checkpoint, config, given, process)
        cleanup(process, stopped)
    except Exception as error:
        fail(error, process)


def main(argv: Sequence[str]) -> None:
    """Check the settings, and run one subcommand on this rank; ``--preflight`` only checks."""
    words = [word for word in argv if word != "--preflight"]
    try:
        name, config, options = parse(words)
        path = str(options.get("checkpoint"))
        if "checkpoint" in COMMANDS[name][1] and (best := Path(path, "checkpoints/best")).exists():
            options.checkpoint = path = str(best.with_name(best.read_text()))
        if "checkpoint" in COMMANDS[name][1] and not any(map(os.path.isfile, (path, f"{path}/.metadata"))):
            raise UserError(f"--checkpoint is {path}, neither a checkpoint nor a run.dir with a best one")
        folder = next(filter(Path.exists, Path(config.run.dir, "-").absolute().parents))  # It, or where it would be.
        if name == "train" and os.environ.get("NODE_RANK", "0") == "0" and not os.access(f"{folder}/", os.W_OK):
            raise UserError(f"run.dir is {config.run.dir}, but {folder} is no folder to write to; give another run.dir")
        if "output" not in COMMANDS[name][1]:
            #:: if fact("shards") ::#
            config.check(int(options.get("ranks") or os.environ.get("WORLD_SIZE", 1)), name in ("train", "estimate"))
            #:: else ::#
            config.check(int(n) if (n := os.environ.get("WORLD_SIZE", "")).isdigit() else 1, trains=name == "train")
            #:: endif ::#
        if len(words) == len(argv):
            run(name, config, options, given={word[2:].split("=")[0] for word in words if word[:2] == "--"})
        #:: if fact("doctor") ::#
        elif name == "doctor":
            from .doctor import meet

            sys.exit(meet())
        #:: endif ::#
    except (UserError, argparse.ArgumentError, OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
