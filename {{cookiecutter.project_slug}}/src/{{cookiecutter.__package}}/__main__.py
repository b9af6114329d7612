"""The command line: ``scripts/launch.sh SUBCOMMAND`` starts several ranks, each of which runs ``main``."""

import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from . import STARTED, launch
from .config import Config, UserError
from .launch import Command

PROFILE = launch.Option(
    "profile", "Write each rank's trace of a few steps to run.dir, and on CUDA a snapshot of its memory.", False
)
COMMANDS = {
    "train": Command("train, or resume from the newest checkpoint of run.dir", trains=True),
    "evaluate": Command("evaluate --checkpoint PATH on the whole test set", ("checkpoint",)),
    #:: if cookiecutter.__generates ::#
    "generate": Command("print a prompt and its continuation by --checkpoint PATH", ("checkpoint",)),
    #:: endif ::#
    "doctor": Command("check machines, interconnect and disk before a long run", trains=True),
    "benchmark": Command("measure where the time of a training step goes", trains=True, options=(PROFILE,)),
    "plan": Command("simulate a step of --ranks N: memory, messages, time", trains=True, options=launch.PLAN_OPTIONS),
    "convert": Command(
        "write --checkpoint PATH in another format as --output PATH", ("checkpoint", "output"), has_settings=False
    ),
}


def main(argv: Sequence[str]) -> None:
    """Run one subcommand on this rank; exits with code 2 and one line on stderr if the user has to change something."""
    try:
        info = launch.find_process_info()
        launch.end_with_launcher(info)
        command, settings, options = launch.parse(argv, COMMANDS)
        launch.wait_for_debugger(info)
        if command in ("convert", "plan") and info.rank > 0:  # One process is enough.
            return
        if command == "convert":
            from .checkpoint import convert

            return convert(Path(options["checkpoint"]), Path(options["output"]))
        config = Config(**settings)
        if command == "plan":
            sys.exit(run_plan(config, launch.read_plan_options(options)))
        check(config, info.world_size, COMMANDS[command].trains)
        if command == "doctor":
            sys.exit(run_doctor(config))
        run(command, config, options)
    except UserError as error:
        launch.exit_with_error(str(error))


def check(config: Config, world_size: int, trains: bool) -> None:
    """Reject settings that cannot work on ``world_size`` ranks; ``trains`` is False if the model is only evaluated."""
    launch.check_values(vars(config), may_be_empty=() if trains else ["run.dir"])
    config.check()
    launch.check_layout(config.parallel, config.model, config.train, world_size)
    if trains:
        shares = config.parallel.dp_size(world_size)
        launch.check_batch(config.data.global_batch_size, shares, config.train.microbatches)
        #:: if cookiecutter.__plays ::#
        config.control.check_batch(config.data, shares)
        #:: endif ::#


def run(command: str, config: Config, options: dict[str, str]) -> None:
    """Run ``command`` together with all other ranks."""
    # Only now: PyTorch takes seconds to import, and wrong settings are rejected before that. The import creates some
    # 400,000 permanent objects; the garbage collector skips them, during the import and in every later collection.
    gc.disable()
    #:: if cookiecutter.__generates ::#
    from .evaluate import evaluate, load_strategy
    from .reporting import generate
    #:: else ::#
    from .evaluate import evaluate
    #:: endif ::#
    from .runtime import process_group, record_collectives, set_exact_arithmetic
    from .train import Trainer, train

    gc.freeze()
    gc.enable()
    set_exact_arithmetic(config.train.exact)
    record_collectives(Path(config.run.dir))
    with process_group(config.distributed, config.parallel.devices_per_rank()) as process:
        if command == "train":
            train(config, process)
        elif command == "benchmark":
            from .benchmark import benchmark
            from .model import build_model

            builders = partial(Trainer, config, process), partial(build_model, config.model)
            benchmark(*builders, process, Path(config.run.dir), STARTED, "profile" in options)
        #:: if cookiecutter.__generates ::#
        elif command == "generate":
            _, parallel = load_strategy(options["checkpoint"], config, process)
            generate(parallel, config.generate, config.model.context, config.run.seed, process.is_main)
        #:: endif ::#
        else:
            evaluate(options["checkpoint"], config, process)


def run_doctor(config: Config) -> int:
    """Run ``doctor``, which works even if no process group can be formed; returns its exit code."""
    import torch

    from .doctor import Requirements, examine
    from .model import build_model

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(config.model).parameters())
    devices = config.parallel.devices_per_rank()
    paths = Path(config.run.dir), config.checkpoint, config.distributed
    return examine(Requirements(*paths, devices, config.data.num_workers, parameters, asdict(config)))


def run_plan(config: Config, options: launch.PlanOptions) -> int:
    """Run ``plan``, which simulates all ranks in this process; returns its exit code."""
    check(config, options.ranks, trains=True)
    from . import train
    from .plan import Project, plan

    return plan(Project(train, config, options), partial(check, trains=True))


def preflight(argv: Sequence[str]) -> None:
    """Reject a command line that cannot work before any rank starts; ``scripts/launch.sh`` calls this first.

    Prints the number of ranks to start on this machine, and the seconds within which all ranks have to arrive.
    """
    command, settings, options = launch.parse(argv, COMMANDS)
    try:
        if "checkpoint" in options and not Path(options["checkpoint"]).exists():
            raise UserError(f"--checkpoint is {options['checkpoint']}: no such file")
        if command in ("convert", "plan"):
            launch.check_debugger(world_size=1)
            print(1, 60)
            return
        config = Config(**settings)
        nproc = launch.count_ranks(config.parallel, config.distributed.device)
        world_size = nproc * launch.read_nodes().count
        launch.check_debugger(world_size)
        check(config, world_size, COMMANDS[command].trains)
        if command != "doctor":  # It reports these itself, with everything else.
            # PyTorch takes seconds to import; count_ranks has done it if it counted the accelerators of this machine.
            if "torch" in sys.modules or config.distributed.backend in ("nccl", "mpi"):
                from .runtime import check_devices

                check_devices(config.distributed, config.parallel.devices_per_rank(), world_size, nproc)
            launch.check_port(config.distributed.init_method)
        if command == "train":
            run_dir, resume = Path(config.run.dir), config.checkpoint.resume
            candidates = launch.find_resume_candidates(run_dir, resume, launch.is_restart())
            weights = config.model.weights
            if weights is not None and not candidates and not Path(weights).exists():
                raise UserError(f"model.weights is {weights}: no such file")
    except UserError as error:
        launch.exit_with_error(str(error))
    print(nproc, math.ceil(config.distributed.startup_timeout_seconds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--preflight"]:
        preflight(sys.argv[2:])
    else:
        launch.run_and_exit(main, sys.argv[1:])
