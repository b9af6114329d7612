"""The experiment: task, model and the three sets, built by the seed, or as a checkpoint describes them."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from .checkpoint import read_on_main
from .config import Config, UserError
from .dataset import build_datasets
from .distributed import Process, seed_everything
from .parallel import Parallel
from .task import Task


def build_experiment(config: Config, process: Process) -> tuple[Task, Parallel, tuple[Any, Any, Any]]:
    """Build task, model and the three sets by the seed."""
    seed_everything(config.run.seed)
    datasets = build_datasets(config)
    if any(isinstance(dataset, IterableDataset) for dataset in datasets):
        raise UserError("an IterableDataset has no length; see docs/recipes/stream.md of ddp-template")
    lengths = process.all_gather([len(dataset) for dataset in datasets])
    if len(lengths[0]) != 3 or not all(lengths[0]) or lengths != [lengths[0]] * process.world_size:
        raise UserError(f"the datasets have {lengths} samples; return three, none empty, equal on all ranks")
    task = Task(config, process.device)
    for part in tree_leaves(vars(task)):
        if isinstance(part, nn.Module):  # Such as a teacher.
            part.to(process.device).eval().requires_grad_(False)
    if config.train.compile:  # Otherwise, the logits would be kept in fp32.
        setattr(task, "losses", torch.compile(task.losses))  # noqa: B010 (a method has another type)
    seed_everything(config.run.seed)  # Whatever was drawn before.
    return task, Parallel(config, process), datasets


def load_experiment(path: str, config: Config, given: set[str], process: Process) -> tuple[Task, Parallel, Any, int]:
    """Return task, model, test set and step of a checkpoint, with its own settings unless they are ``given``."""
    content = read_on_main(lambda: Parallel.checkpointer.read(Path(path)), process)
    if "config" not in content:
        raise UserError(f"{path} is no checkpoint of a run: it has no settings")
    for section, settings in vars(config).items():
        for name, value in content["config"].get(section, {}).items():
            if (section in ("model", "dataset") or name in ("seed", "precision")) and hasattr(settings, name):
                if not {section, f"{section}.{name}"} & given:
                    setattr(settings, name, value)
                elif process.rank == 0 and getattr(settings, name) != value:
                    print(f"{section}.{name}: {getattr(settings, name)} instead of {value}", file=sys.stderr)
    config.check(process.world_size, trains=False)
    task, parallel, (_, _, test_set) = build_experiment(config, process)
    Parallel.checkpointer.load(parallel, content)
    return task, parallel, test_set, content["progress"]["step"]
