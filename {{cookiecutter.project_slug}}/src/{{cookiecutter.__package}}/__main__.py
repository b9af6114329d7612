"""The command line: ``scripts/launch.sh train --optim.lr 1e-3``; ``train --help`` lists all settings."""

import os
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
#:: if file("task", "generate.py") or fact("shards") ::#
from jsonargparse.typing import NonNegativeFloat, PositiveInt
#:: endif ::#

from .config import CheckpointConfig, Config, UserError

SECTIONS = get_type_hints(Config)
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
    #:: if file("cluster", "README.md") ::#
    "doctor": ("check what breaks a first run on several machines", set()),
    #:: endif ::#
}


def build_parser(default_files: list[str]) -> ArgumentParser:
    """Build the parser of all subcommands; it raises an ArgumentError, which is printed as one line."""
    set_loader("yaml", partial(load_strictly, get_loader("yaml")), exceptions=(yaml.YAMLError,))
    parser = ArgumentParser(prog=__package__, exit_on_error=False)
    commands = parser.add_subcommands(required=True, dest="command")
    for name, (text, options) in COMMANDS.items():
        command = ArgumentParser(exit_on_error=False)
        if "output" in options:
            command.add_argument("--output", required=True, help="The file to write.")
        else:
            command.default_config_files = default_files
            command.add_argument("--config", action="config", help="A YAML file; default: configs/default.yaml.")
            for section, kind in SECTIONS.items():
                if section not in options:  # Such as checkpoint, which is an option of some commands.
                    command.add_class_arguments(kind, section)
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
            command.add_argument("--memory", type=NonNegativeFloat, help="GiB of a device.")
        #:: endif ::#
        commands.add_subcommand(name, command, help=text)
    return parser


def load_strictly(load: Callable[[str], Any], text: str) -> Any:
    """Load YAML, and reject a key that is given twice, of which only the last would count."""
    nodes = [yaml.compose(text, yaml.SafeLoader)]
    for node in nodes:
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            if repeated := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{repeated[0]} is given twice in one section of the YAML; keep one of them")
            nodes += [value for _, value in node.value]
    return load(text)


def parse(argv: Sequence[str]) -> tuple[str, Config, Namespace]:
    """Return the subcommand, the settings, and the other options."""
    names_file = any(word.split("=")[0] == "--config" for word in argv)
    parser = build_parser([] if names_file else [str(Path(__file__).parents[2] / "configs" / "default.yaml")])
    parsed = parser.instantiate(parser.parse_args(argv))
    options = parsed[parsed.command]
    settings = {name: options[name] for name, kind in SECTIONS.items() if isinstance(options.get(name), kind)}
    return parsed.command, Config(**settings), options


def run(name: str, config: Config, options: Namespace, given: set[str]) -> None:
    """Run a subcommand; ``given`` has the names of the options on the command line."""
    from .checkpoint import export  # Not before settings are checked: PyTorch takes seconds to import.
    from .distributed import cleanup, fail, rendezvous, setup
    from .evaluate import evaluate
    #:: if file("task", "generate.py") ::#
    from .generate import generate
    #:: endif ::#
    from .logger import plot
    from .train import Trainer

    if name == "export":
        return export(Path(options.checkpoint), Path(options.output))
    if name == "plot":
        return plot(options.runs, options.output)
    #:: if fact("shards") ::#
    if name == "estimate":
        from .estimate import estimate

        return estimate(config, options.ranks, options.memory)
    #:: endif ::#
    #:: if file("cluster", "README.md") ::#
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
            words = (options.prompt, options.length, options.temperature)
            generate(options.checkpoint, *words, config, given, process)
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
        if "checkpoint" in COMMANDS[name][1] and not Path(str(options.checkpoint)).exists():
            raise UserError(f"--checkpoint is {options.checkpoint}; give the path of a checkpoint")
        #:: if fact("shards") ::#
        if name == "estimate":
            config.check(options.ranks, trains=True)
            return run(name, config, options, given=set())
        #:: endif ::#
        if "output" not in COMMANDS[name][1]:
            config.check(int(os.environ.get("WORLD_SIZE", "1")), trains=name == "train")
        if len(words) == len(argv):
            run(name, config, options, given={word[2:].split("=")[0] for word in words if word[:2] == "--"})
        #:: if file("cluster", "README.md") ::#
        elif name == "doctor":
            from .doctor import meet

            sys.exit(meet())
        #:: endif ::#
    except (UserError, ArgumentError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
