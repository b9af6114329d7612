"""Where the effects of settings are observed: a rendered project's ranks, which build one trainer after another."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

# If one rank fails, the others do not wait long for it.
SHORT = "--data.global_batch_size 64 --train.epochs 1 --distributed.startup_timeout_seconds 60"
BASE = {
    "digits": f"{SHORT} --model.width 8 --model.depth 1",
    "language": f"{SHORT} --dataset.path {os.__file__} --dataset.max_bytes 12000 --dataset.test_bytes 2100 "
    "--model.width 16 --model.layers 2 --model.heads 2 --model.context 16",
    "control": f"{SHORT} --train.epochs 40 --control.environments 4 --control.evaluation_episodes 5 --model.width 16",
}


def name_error(error: Exception) -> str:
    """Return what was raised, for a list of findings: not as a traceback has it, which `test_mutants.py` looks for."""
    return f"{type(error).__name__} ({error})"


class Lab:
    """Builds what an effect is observed in, from the settings of a command line.

    Attributes:
        process: This rank of the project's process group.
        ignored: A setting that is not obeyed, as ``section.name``.
    """

    def __init__(self, package: str, task: str, folder: Path) -> None:
        self.package, self.task, self.folder = package, task, folder
        self.process: Any = None
        self.ignored, self.numbers = "", itertools.count()

    def module(self, name: str) -> Any:
        """Import a module of the package."""
        return import_module(f"{self.package}.{name}")

    def settings(self, *words: str) -> Any:
        """Return the settings of a command line; the ignored one keeps the value that it has without ``words``."""
        config, base = self.parse(*words), self.parse()
        if self.ignored:
            section, name = self.ignored.split(".")
            setattr(getattr(config, section), name, getattr(getattr(base, section), name))
        return config

    def parse(self, *words: str) -> Any:
        train = {"train": self.module("__main__").COMMANDS["train"]}  # A parser of all commands takes long to build.
        parsed = self.module("launch").parse(["train", *BASE[self.task].split(), *words], train)[1]
        return self.module("config").Config(**parsed)

    def new_folder(self) -> Path:
        """Return a folder that does not exist yet, the same on all ranks."""
        return self.folder / str(next(self.numbers))

    def trainer(self, *words: str) -> Any:
        """Build a trainer that writes to a new folder."""
        return self.module("train").Trainer(self.settings("--run.dir", str(self.new_folder()), *words), self.process)

    def run(self, *words: str) -> Path:
        """Train to the end, and return the run's directory."""
        if self.task == "language":  # Writing takes longer than training.
            self.module("dataset").SAMPLE_BYTES = 2
        config = self.settings("--run.dir", str(self.new_folder()), *words)
        self.module("train").train(config, self.process)
        dist.barrier()
        return Path(config.run.dir)

    def weights_after(self, steps: int, *words: str) -> dict[str, Tensor]:
        """Return what this rank holds of each parameter after some steps."""
        trainer = self.trainer(*words)
        take_steps(trainer, steps)
        return {name: local(p).detach().clone() for name, p in trainer.parallel.module.named_parameters()}

    def whole_model(self, *words: str) -> nn.Module:
        """Build the model as one process does."""
        config = self.settings(*words)
        torch.manual_seed(config.run.seed)
        model: nn.Module = self.module("model").build_model(config.model)
        return model

    def refusal(self, action: Callable[[], Any]) -> str:
        """Return the line with which the project refuses something, or nothing if it does not."""
        try:
            action()
        except self.module("config").UserError as error:
            return str(error)
        return ""

    def refused_layout(self, *words: str) -> str:
        """Return the line with which the project refuses a layout of its ranks, or nothing if it does not."""
        config = self.settings(*words)
        check_layout = self.module("launch").check_layout
        return self.refusal(lambda: check_layout(config.parallel, config.model, config.train, dist.get_world_size()))


def batches(trainer: Any, count: int) -> Iterator[Any]:
    """Yield this rank's inputs and targets of the first batches."""
    unpack = import_module(type(trainer).__module__).unpack
    return (unpack(batch) for batch in itertools.islice(iter(trainer.loader), count))


def take_steps(trainer: Any, count: int = 1) -> None:
    """Take the first steps of an epoch."""
    for batch in batches(trainer, count):
        trainer.step(*batch)


def first_step(trainer: Any) -> Tensor:
    """Take the first step of an epoch, and return its loss and the norm of its gradient."""
    ((inputs, targets),) = batches(trainer, 1)
    losses, norm = trainer.step(inputs, targets)
    dist.all_reduce(losses["loss"])
    return torch.stack([losses["loss"], norm])


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the summed absolute difference of weights, over all ranks."""
    total = torch.tensor(sum(float((ours[name] - theirs[name]).abs().sum()) for name in ours), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def layers(trainer: Any) -> list[nn.Module]:
    """Return this rank's linear layers and convolutions."""
    return [layer for layer in trainer.parallel.module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


def count_collectives(trainer: Any, kind: str) -> int:
    """Return how many collectives of one kind this rank starts in a step, once DDP has arranged its buckets."""
    take_steps(trainer, 2)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        take_steps(trainer)
    return sum(event.count for event in trace.key_averages() if event.key.startswith("gloo:") and kind in event.key)


def recorded_steps(run: Path, event: str) -> list[int]:
    """Return the steps of a run's records of one kind."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["event"] == event]


def saved_steps(run: Path) -> set[int]:
    """Return the steps of the checkpoints in a run's directory."""
    return {int(path.stem.removeprefix("step-")) for path in (run / "checkpoints").iterdir()}
