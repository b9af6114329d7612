"""The optimizer, its parameter groups and its schedule."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from .config import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build AdamW; matrices and kernels decay, biases and weights of normalization do not."""
    members = defaultdict[Any, list[nn.Parameter]](list)
    members[0.0, None] = []  # An optimizer needs a group, but all parameters may be frozen.
    is_cpu = True
    for parameter in module.parameters():
        is_cpu = parameter.is_cpu
        if parameter.requires_grad:
            weight_decay = config.weight_decay if parameter.dim() > 1 else 0.0
            # Sharded parameters have a mesh, and a fused kernel takes those of one mesh only.
            mesh = getattr(parameter, "device_mesh", None)
            members[weight_decay, mesh].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": weight_decay}
        for (weight_decay, _), parameters in members.items()
    ]
    # On a CPU, the fused kernel rounds the last numbers of a tensor in another way, and shards of a
    # tensor end elsewhere. One call for all tensors is the fastest of the others.
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=not is_cpu,
        foreach=is_cpu,
    )


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then half a cosine."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, total_steps: int, config: OptimConfig
) -> None:
    """Set the learning rate of a step; a group that was built with its own ``lr`` keeps a share."""
    share_of_peak = learning_rate(step, total_steps, config) / config.lr
    for group in optimizer.param_groups:
        peak = group.setdefault("initial_lr", float(group["lr"]))  # Some optimizers have tensors.
        group["lr"] = share_of_peak * peak
