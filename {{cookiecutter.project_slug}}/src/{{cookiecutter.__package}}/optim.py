"""The optimizer, its parameter groups and its schedule, and how many steps there are."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .config import OptimConfig, TrainConfig, UserError

# Options by name: the first pattern found in a parameter's name applies, for example (r"^head\.", {"lr": 1e-2}).
PATTERNS: list[tuple[str, dict[str, float]]] = []


def build_optimizer(module: nn.Module, config: OptimConfig, register: Callable[..., None]) -> torch.optim.Optimizer:
    """Build a fused AdamW, and register what it and its like have to save (``Checkpointer.register``)."""
    groups = group_parameters(module, config)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    register("optimizer", optimizer)
    return optimizer


def group_parameters(module: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return a group for each pattern, then one of matrices and kernels, and one of vectors, without weight decay."""
    decay = {"weight_decay": config.weight_decay}
    options = [*(decay | found for _, found in PATTERNS), decay, {"weight_decay": 0.0}]
    groups: list[dict[str, Any]] = [{"params": [], **of_group} for of_group in options]
    for name, parameter in module.named_parameters():
        matches = (i for i, (pattern, _) in enumerate(PATTERNS) if re.search(pattern, name))
        # Biases and the weights of normalization layers are vectors.
        groups[next(matches, -2 if parameter.dim() > 1 else -1)]["params"].append(parameter)
    return groups


class Schedule(LambdaLR):
    """A linear warm-up, then half a cosine; a checkpoint holds only its position, so that changed settings act."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig, planned_steps: int) -> None:
        self.config, self.end = config, config.decay_steps or planned_steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Return the rate of a step as a fraction of the peak."""
        warmup, least = self.config.warmup_steps, self.config.min_lr_ratio
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, self.end - warmup))
        return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2

    def end_at(self, planned_steps: int) -> None:
        """Set the last planned step, and the rate of the next one."""
        self.end = self.config.decay_steps or planned_steps
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]
        for group, peak in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = peak * self.factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def count_steps(
    steps_per_epoch: int | None, train: TrainConfig, optim: OptimConfig, others: int = 0
) -> tuple[int, int | None]:
    """Return the steps that the schedule is planned for, and the steps to take; None if only the stream knows its end.

    ``others`` are additional steps of earlier epochs, which had another global batch. Rejects a stream without a length
    if no setting says how long the schedule is.
    """
    if steps_per_epoch is not None:
        planned_steps = train.epochs * steps_per_epoch + others
        return planned_steps, min(planned_steps, train.max_steps or planned_steps)
    if train.max_steps is None and optim.decay_steps is None:
        raise UserError("the training set is a stream without a length: set train.max_steps or optim.decay_steps")
    return optim.decay_steps or train.max_steps or 0, train.max_steps
