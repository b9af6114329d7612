"""What each peer takes from a rendered project: the same model, data, settings and optimizer; and its log and clock.

A peer is started as ``torchrun FILE PROJECT SETTINGS``, with the settings of the project's ``train``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

PARTS = ("__main__", "dataset", "optim")


class Experiment:
    """The model, the training set, the loss and the optimizer that the project would train with."""

    def __init__(self) -> None:
        project, *settings = sys.argv[1:]
        (source,) = Path(project, "src").iterdir()
        sys.path.insert(0, str(source.parent))
        main, self.dataset, self.optim = (import_module(f"{source.name}.{name}") for name in PARTS)
        self.config: Any = main.Config(**main.launch.parse(["train", *settings], main.COMMANDS)[1])
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.share = self.config.data.global_batch_size // self.world_size
        self.steps = self.config.train.max_steps
        torch.manual_seed(self.config.run.seed)
        self.train_set = self.dataset.build_datasets(self.config)[0]
        self.model: nn.Module = import_module(f"{source.name}.model").build_model(self.config.model)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        total, weight = self.dataset.loss_fn(outputs, targets)
        return total / weight

    def build_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """Return a fused AdamW, and a warm-up followed by half a cosine."""
        options, warmup = self.config.optim, self.config.optim.warmup_steps

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / self.steps)) / 2

        groups = self.optim.group_parameters(model, options)
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
        return optimizer, LambdaLR(optimizer, factor)


class Log:
    """Writes and prints a record every ten steps on rank 0, and the seconds between these in the last line."""

    def __init__(self, experiment: Experiment) -> None:
        self.every, self.steps = experiment.config.train.log_every, experiment.steps
        self.is_main = experiment.rank == 0
        folder = Path(experiment.config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"rank{experiment.rank}.jsonl", "w", buffering=1)
        self.stamps: list[float] = []

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be logged; called after each step."""
        if step == 1 and self.is_main:
            print("first step done", flush=True)
        return step % self.every == 0

    def write(self, step: int, loss: float, norm: float, lr: float) -> None:
        """Log a step, of which the loss is the mean over the ranks."""
        if not self.is_main:
            return
        record = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr}
        self.file.write(json.dumps(record) + "\n")
        print(record, flush=True)
        self.tick(step)

    def tick(self, step: int) -> None:
        """Note the time of a log record."""
        self.stamps.append(time.perf_counter())
        if step == self.steps:
            seconds = [later - earlier for earlier, later in pairwise(self.stamps)]
            print(json.dumps({"seconds": seconds}), flush=True)


def end() -> None:
    """End this process when all ranks are here; what a framework does when it exits is not measured."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
