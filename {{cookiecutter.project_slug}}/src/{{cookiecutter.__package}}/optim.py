"""The optimizer, its parameter groups and its schedule."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from .config import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build a fused AdamW; matrices and kernels decay, biases and the weights of normalization layers do not."""
    # A group holds parameters of one mesh, because one kernel cannot update those of several.
    members: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            members[parameter.dim() > 1, getattr(parameter, "device_mesh", None)].append(parameter)
    groups = [{"params": ps, "weight_decay": config.weight_decay * decays} for (decays, _), ps in members.items()]
    groups = groups or [{"params": []}]  # All may be frozen.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then half a cosine. It has no state."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)
