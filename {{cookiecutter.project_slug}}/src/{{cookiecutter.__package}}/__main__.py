"""The command line: ``scripts/launch.sh train --optim.lr 1e-3``; ``--help`` lists the settings."""

import argparse
import glob
import os
import sys
from collections.abc import Sequence
#:: if fact("shards") ::#
from importlib import import_module
#:: endif ::#
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace
#:: if file("task", "generate.py") or fact("shards") ::#
from jsonargparse.typing import NonNegativeFloat, PositiveInt
#:: endif ::#

from .config import CheckpointConfig, Config, UserError

# The file is missing in an installed package, whose defaults are those of config.py.
DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "default.yaml"
CHECKPOINT_COMMANDS = {
    "evaluate",
    "export",
    #:: if file("task", "generate.py") ::#
    "generate",
    #:: endif ::#
}
#:: if fact("shards") ::#
REHEARSAL_COMMANDS = ("rehearse", "estimate")  # The second is an older name.
#:: endif ::#
# Mistakes of the user, printed as one line. YAML nested too deeply is a RecursionError.
MISTAKES = (UserError, argparse.ArgumentError, yaml.YAMLError, RecursionError, OSError, ValueError)


def build_parser(config_files: list[str]) -> ArgumentParser:
    """Build the parser of all subcommands; the values in ``config_files`` become its defaults."""
    parser = ArgumentParser(prog=__package__, exit_on_error=False, allow_abbrev=False)
    add_subcommand = parser.add_subcommands(required=True, dest="command").add_subcommand
    train = build_settings_parser(config_files)
    add_subcommand("train", train, help="train, or resume run.dir")
    evaluate = build_settings_parser(config_files, skip={"checkpoint"})
    add_checkpoint(evaluate)
    evaluate.add_argument("--split", choices=["validation", "test"], default="test", help="Set.")
    add_subcommand("evaluate", evaluate, help="print the metrics of a checkpoint")
    export = ArgumentParser(exit_on_error=False)
    add_checkpoint(export)
    export.add_argument("--output", required=True, help="The file to write.")
    add_subcommand("export", export, help="write a checkpoint's weights as a .safetensors file")
    plot = ArgumentParser(exit_on_error=False)
    plot.add_argument("--runs", type=list[str], required=True, help="Directories of runs.")
    plot.add_argument("--output", required=True, help="The file to write.")
    add_subcommand("plot", plot, help="draw the metrics of runs into a picture")
    #:: if file("task", "generate.py") ::#
    generate = build_settings_parser(config_files, skip={"checkpoint"})
    add_checkpoint(generate)
    generate.add_argument("--prompt", type=str, default="", help="The text to continue.")
    generate.add_argument("--length", type=PositiveInt, default=200, help="Bytes or tokens to add.")
    temperature_help = "0 picks the likeliest token."
    generate.add_argument(
        "--temperature", type=NonNegativeFloat, default=0.8, help=temperature_help
    )
    add_subcommand("generate", generate, help="continue a prompt with the model of a checkpoint")
    #:: endif ::#
    #:: if fact("shards") ::#
    for name in REHEARSAL_COMMANDS:
        rehearse = build_settings_parser(config_files)
        add = rehearse.add_argument
        add("--ranks", type=PositiveInt, default=1, help="The number of ranks.")
        add("--all", action="store_true", help="Run those that differ in their data alone.")
        add("--memory", type=NonNegativeFloat, default=0, help="Memory of a device in GiB.")
        add("--flops", type=NonNegativeFloat, default=0, help="Speed of a device in TFLOP/s.")
        add("--links", type=dict[str, float], default={}, help="GB/s by dimension of the mesh.")
        add_subcommand(name, rehearse, help="run as many ranks on a CPU, without values")
    #:: endif ::#
    #:: if fact("doctor") ::#
    doctor = build_settings_parser(config_files)
    add_subcommand("doctor", doctor, help="check what breaks a first run on several machines")
    #:: endif ::#
    return parser


def build_settings_parser(config_files: list[str], skip: set[str] | None = None) -> ArgumentParser:
    """Build a subcommand's parser of all settings, without the sections in ``skip``."""
    parser = ArgumentParser(exit_on_error=False)
    parser.default_config_files = config_files
    # parse() takes --config away: here, it is only listed by --help, and brings --print_config.
    config_help = "A YAML file of settings; default: configs/default.yaml."
    parser.add_argument("--config", action="config", help=config_help)
    parser.add_class_arguments(Config, skip=skip)
    return parser


def add_checkpoint(command: ArgumentParser) -> None:
    """Add ``--checkpoint PATH`` to a subcommand."""
    either = str | CheckpointConfig  # A file of settings may hold the section of this name.
    command.add_argument("--checkpoint", type=either, required=True, help="A checkpoint.")


def parse(words: Sequence[str]) -> tuple[str, Config, Namespace]:
    """Return the subcommand, the settings, and the other options."""
    # jsonargparse would let --config override the options before it. Here, it gives defaults.
    early_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early_parser.add_argument("--config", action="append", default=[])
    early_options, other_words = early_parser.parse_known_args(words)
    if len(early_options.config) > 1:
        raise UserError("--config is given twice; name one file")
    paths = early_options.config
    if not paths and DEFAULT_CONFIG.exists():
        paths = [str(DEFAULT_CONFIG)]
    # jsonargparse expects patterns, and rejects a file that holds nothing.
    config_files = [glob.escape(path) for path in paths if holds_settings(path)]
    parser = build_parser(config_files)
    parsed = parser.instantiate(parser.parse_args(other_words))  # Sections become dataclasses.
    options = parsed[parsed.command]
    settings = {}
    for section, default in vars(Config()).items():
        value = options.get(section)
        # Some commands have no settings, and --checkpoint may be a path instead of the section.
        if isinstance(value, type(default)):
            settings[section] = value
    return parsed.command, Config(**settings), options


def holds_settings(path: str) -> bool:
    """Return whether a file holds settings; rejects a key given twice, and what is no section."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:  # PyYAML rejects others.
        document = yaml.compose(file, yaml.SafeLoader)
    # Comments alone, an empty document and null all mean that every setting keeps its default.
    if document is None or document.tag == "tag:yaml.org,2002:null":
        return False
    # PyYAML would keep the last of two equal keys, and jsonargparse take an empty section for None.
    check_mapping(document, path)
    for key, section in document.value:
        check_mapping(section, f"{key.value} in {path}")
    return True


def check_mapping(node: yaml.Node, location: str) -> None:
    """Reject a YAML node that is no mapping, or one with a key that is given twice."""
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{location} has to hold settings by name, as configs/default.yaml does")
    seen_keys = []
    for key, _ in node.value:
        if key.value in seen_keys:
            raise UserError(f"{key.value} is given twice in {location}; keep one of them")
        seen_keys.append(key.value)


def find_checkpoint(path: str) -> str:
    """Return the path of a checkpoint: of a run.dir, its best one."""
    best_file = Path(path, "checkpoints", "best")
    checkpoint = path
    if best_file.is_file():
        checkpoint = str(best_file.parent / best_file.read_text()[:99])  # A link leads to any text.
    #:: if fact("shards") ::#
    if Path(checkpoint, ".metadata").is_file():
        return checkpoint  # A sharded one is a folder, as torch.distributed.checkpoint writes it.
    #:: endif ::#
    if not Path(checkpoint).is_file():
        raise UserError(
            f"--checkpoint is {path}, neither a checkpoint nor a run.dir with a best one"
        )
    return checkpoint


def check_writable(run_dir: str) -> None:
    """Reject a run.dir that rank 0 cannot create or write to."""
    if os.environ.get("NODE_RANK", "0") != "0":
        return  # Only rank 0 creates run.dir, and other machines may not see it yet.
    if run_dir.startswith("~"):
        raise UserError(f"run.dir is {run_dir}; write $HOME instead of ~, or a whole path")
    folder = Path(run_dir)
    while not folder.exists():
        folder = folder.parent  # The run creates what is missing.
    if not os.access(f"{folder}/.", os.W_OK):  # A file has no "/.".
        raise UserError(f"run.dir is {run_dir}, but {folder} is no folder to write to")


def check(subcommand: str, config: Config, options: Namespace) -> None:
    """Find the checkpoint, and reject what cannot work, before PyTorch is imported."""
    if subcommand in CHECKPOINT_COMMANDS:
        options.checkpoint = str(options.checkpoint)  # A section of settings names no file.
        find_checkpoint(options.checkpoint)
    #:: if fact("shards") ::#
    if subcommand in REHEARSAL_COMMANDS:
        config.check(options.ranks, trains=True)
        return
    #:: endif ::#
    if subcommand not in ("export", "plot"):
        # If WORLD_SIZE is no number, the rendezvous rejects it, and names the variable.
        world_size = os.environ.get("WORLD_SIZE", "")
        num_ranks = int(world_size) if world_size.isdigit() else 1
        config.check(num_ranks, trains=subcommand == "train")
    if subcommand == "train":
        check_writable(config.run.dir)


def run(subcommand: str, config: Config, options: Namespace, given: set[str]) -> None:
    """Run a subcommand; ``given`` has the names of the options on the command line."""
    # PyTorch takes seconds to import, so nothing here is imported before the settings are checked.
    if subcommand == "export":
        from .checkpoint import export

        export(Path(find_checkpoint(options.checkpoint)), Path(options.output))
    elif subcommand == "plot":
        from .plot import plot

        plot(options.runs, options.output)
    #:: if fact("shards") ::#
    elif subcommand in REHEARSAL_COMMANDS:
        # No run needs this file, so it is none of the package's.
        sys.path.append(str(Path(__file__).parents[2] / "scripts"))
        import_module("rehearse").rehearse(config, options)
    #:: endif ::#
    #:: if fact("doctor") ::#
    elif subcommand == "doctor":
        from .doctor import doctor

        doctor(config)
    #:: endif ::#
    else:
        run_together(subcommand, config, options, given)


def run_together(subcommand: str, config: Config, options: Namespace, given: set[str]) -> None:
    """Run a subcommand for which the ranks form a process group, and end this process."""
    from .distributed import cleanup, rendezvous, setup
    from .evaluate import evaluate
    from .failures import fail
    #:: if file("task", "generate.py") ::#
    from .generate import generate
    #:: endif ::#
    from .train import Trainer

    process = rendezvous(config)
    stopped = False
    try:
        setup(config, process)
        if subcommand in CHECKPOINT_COMMANDS:
            options.checkpoint = find_checkpoint(options.checkpoint)  # It may be another by now.
        if subcommand == "train":
            stopped = Trainer(config, process).run()
        #:: if file("task", "generate.py") ::#
        elif subcommand == "generate":
            generate(options, config, given, process)
        #:: endif ::#
        else:
            evaluate(options, config, given, process)
        cleanup(process, stopped)
    except Exception as error:
        # The other ranks wait for this one; fail() reports the error to them and ends the process.
        fail(error, process)


def main(argv: Sequence[str]) -> None:
    """Check the settings, and run one subcommand on this rank; ``--preflight`` only checks."""
    words = [word for word in argv if word != "--preflight"]
    # A checkpoint brings its own settings, which count unless they are given on the command line.
    given = {word[2:].split("=")[0] for word in words if word.startswith("--")}
    try:
        subcommand, config, options = parse(words)
        check(subcommand, config, options)
        if "--preflight" not in argv:
            run(subcommand, config, options, given)
        #:: if fact("doctor") ::#
        elif subcommand == "doctor":
            # Machines that do not reach each other could not start ranks that report it.
            from .doctor import meet

            sys.exit(meet())
        #:: endif ::#
    except MISTAKES as error:
        message = " ".join(str(error).split())  # Some have several lines.
        if "train.microbatches" in message:
            message += "; version 2 has data.micro_batch_size instead"
        print("error:", message, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        # Sets would have another order in each rank and each start. Python reads this only once.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)
    main(sys.argv[1:])
