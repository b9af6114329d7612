"""The experiment: task, model and data sets, built by the seed or by a checkpoint's settings."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .checkpoint import read_on_main
from .config import Config, UserError
from .dataset import build_datasets
from .distributed import Process, seed_everything
from .parallel import Parallel
from .task import Task


def build_experiment(config: Config, process: Process) -> tuple[Any, Parallel, Any]:
    """Build the task, the model, and the sets for training, validation and test."""
    if config.train.precision == "fp64":
        torch.set_default_dtype(torch.float64)
    # A random split of the data is the same on all ranks, and in every command.
    seed_everything(config.run.seed)
    datasets = build_datasets(config)
    check_datasets(datasets, process)
    task = build_task(config, process.device)
    # The initial weights do not depend on what the data sets and the task have drawn.
    seed_everything(config.run.seed)
    return task, Parallel(config, process), datasets


def check_datasets(datasets: Any, process: Process) -> None:
    """Reject all but three sets whose lengths agree on all ranks."""
    lengths = list(map(len, datasets))
    lengths_of_ranks = process.all_gather(lengths)
    if lengths_of_ranks != [lengths] * process.world_size or len(lengths) != 3 or 0 in lengths:
        raise UserError(
            f"the datasets have {lengths_of_ranks} samples; "
            "return three, none empty, equal on all ranks"
        )


def build_task(config: Config, device: torch.device) -> Any:
    """Build the task on ``device``, with its modules frozen, and listed as ``frozen_modules``."""
    task: Any = Task(config, device)
    members = tree_leaves(vars(task))
    modules = nn.ModuleList(member for member in members if isinstance(member, nn.Module))
    # A task's modules, such as a teacher, are not trained: the optimizer never sees them.
    modules.to(device).eval().requires_grad_(False)
    task.frozen_modules = modules
    if config.train.compile:
        # A loss that is not compiled keeps a copy of the logits in fp32 for backward.
        task.losses = torch.compile(task.losses)
    return task


def load_experiment(path: str, config: Config, given: set[str], process: Process) -> Any:
    """Return task, model, data sets and step of a checkpoint; settings ``given`` override its."""
    content = read_on_main(lambda: Parallel.checkpointer.read(Path(path)), process)
    if "config" not in content:
        raise UserError(f"{path} is no checkpoint of a run: it has no settings")
    apply_saved_settings(config, content["config"], given)
    config.check(process.world_size, trains=False)
    task, parallel, datasets = build_experiment(config, process)
    Parallel.checkpointer.load(parallel, content)
    return task, parallel, datasets, content["progress"]["step"]


def apply_saved_settings(config: Config, saved: Any, given: set[str]) -> None:
    """Take model, dataset, seed and precision from a checkpoint, unless they are ``given``."""
    for section, settings in vars(config).items():
        for name, saved_value in saved.get(section, {}).items():
            decides_on_results = section in ("model", "dataset") or name in ("seed", "precision")
            # A checkpoint of an older version of the project may have settings that are gone.
            if decides_on_results and hasattr(settings, name):
                if not given & {section, f"{section}.{name}"}:
                    setattr(settings, name, saved_value)
