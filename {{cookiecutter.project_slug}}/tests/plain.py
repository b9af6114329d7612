"""A plain training loop, in one process, from which every run must not differ.

It is written from the documented rules with nothing but PyTorch. Of the package it uses only the experiment: the model,
the datasets and the loss. So it repeats no mistake in order, random numbers, schedule, clipping or optimizer.
"""

import math
#:: if not cookiecutter.__plays ::#
import random
import struct
#:: endif ::#
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from typing import Any

#:: if cookiecutter.__plays ::#
import gymnasium
#:: endif ::#
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
#:: if not cookiecutter.__plays ::#
from torch.utils.data import IterableDataset
#:: endif ::#

from support import module

dataset, build_model = module("dataset"), module("model").build_model


@dataclass
class Plain:
    """What a run has to log of each step, and its final weights."""

    records: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(config: Any, steps: int, device: str = "cpu") -> Plain:
    """Train for a number of steps, with the model on ``device``."""
    torch.manual_seed(config.run.seed)
    train_set, _ = dataset.build_datasets(config)
    model, plain = build_model(config.model).to(device), Plain()
    parameters = [p for p in model.parameters() if p.requires_grad]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    planned = plan_steps(train_set, config)
    #:: if cookiecutter.__plays ::#
    # It plays with the model as it is at that moment.
    endless = batches(lambda observations: model(observations.to(device)).cpu(), config)
    #:: else ::#
    endless = batches(train_set, config)
    #:: endif ::#
    for step, batch in enumerate(islice(endless, steps)):
        inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        losses, weight = dataset.loss_fn(model(inputs), targets)
        loss = (losses["loss"] if isinstance(losses, dict) else losses) / weight
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        lr, scale = learning_rate(step, planned, config.optim), min(1.0, config.train.clip_grad_norm / norm)
        for p, gradient, state in zip(parameters, gradients, moments, strict=True):
            adamw(p, gradient * scale, state, step + 1, lr, config.optim)
        plain.records.append({"step": step + 1, "loss": loss.item(), "lr": lr, "grad_norm": norm})
    plain.weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return plain


def plan_steps(train_set: Any, config: Any) -> int:
    """Return the step at which the schedule ends."""
    if config.optim.decay_steps is None and hasattr(train_set, "__len__"):
        return int(config.train.epochs * (len(train_set) // config.data.global_batch_size))
    return int(config.optim.decay_steps or config.train.max_steps)


#:: include cookiecutter.__loop_of_task ~ "/plain.py" ::#


def learning_rate(step: int, end: int, optim: Any) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fraction of it."""
    if step < optim.warmup_steps:
        return float(optim.lr * (step + 1) / optim.warmup_steps)
    done = min(1.0, (step - optim.warmup_steps) / (end - optim.warmup_steps))
    return float(optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2))


@torch.no_grad()
def adamw(p: nn.Parameter, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float, optim: Any) -> None:
    """Take a step of AdamW (Loshchilov and Hutter 2019, algorithm 2); only matrices and kernels decay."""
    corrected = []
    for moment, value, beta in zip(moments, (gradient, gradient**2), optim.betas, strict=True):
        moment.mul_(beta).add_((1 - beta) * value)
        corrected.append(moment / (1 - beta**step))
    if p.dim() > 1:
        p.mul_(1 - lr * optim.weight_decay)
    p.sub_(lr * corrected[0] / (corrected[1].sqrt() + optim.eps))
