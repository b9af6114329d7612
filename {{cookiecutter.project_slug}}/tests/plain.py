#:: if fact("loop") ::#
#:: include "task/" ~ cookiecutter.task ~ "/plain.py" ::#
#:: else ::#
"""A plain training loop, in one process, from which no run must differ.

It is written from the documented rules with nothing but PyTorch. Of the package it uses only the experiment: the model,
the datasets and the loss. So it repeats no mistake in order, random numbers, schedule, clipping or optimizer.
"""

import math
import random
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import module

Records = list[dict[str, float]]


def train(config: Any, steps: int) -> tuple[Records, dict[str, Tensor]]:
    """Train for a number of steps; returns what a run has to log of each, and the final weights."""
    dataset, optim, records = module("dataset"), config.optim, []
    seed_everything(config.run.seed)
    train_set, *_ = dataset.build_datasets(config)
    task = module("task").Task(config, torch.device("cpu"))
    seed_everything(config.run.seed)
    model = module("model").build_model(config.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    end = config.train.epochs * (len(train_set) // config.data.global_batch_size)
    for step, (inputs, targets) in enumerate(islice(batches(dataset, train_set, config), steps)):
        inputs, targets = task.prepare(inputs, targets)
        loss = task.losses(model(inputs), targets)["loss"] / max(task.weight(targets), 1e-30)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        lr, scale = learning_rate(step, end, optim), min(1.0, config.train.clip_grad_norm / norm)
        for p, gradient, state in zip(parameters, gradients, moments, strict=True):
            adamw(p, gradient * scale, state, step + 1, lr, optim)
        records.append({"step": step + 1, "loss": loss.item(), "lr": lr, "grad_norm": norm})
    return records, model.state_dict()


def batches(dataset: Any, train_set: Any, config: Any) -> Iterator[Any]:
    """Yield global batches: an epoch is one permutation of the samples, without the incomplete batch at its end."""
    seed, size = config.run.seed, config.data.global_batch_size
    for epoch in count():
        generator = torch.Generator().manual_seed(hashed(seed, "order", epoch))
        order = torch.randperm(len(train_set), generator=generator).tolist()
        for start in range(0, len(train_set) - size + 1, size):
            yield dataset.collate_fn(read(train_set, seed, epoch, order[start : start + size]))


def read(samples: Any, seed: int, epoch: int, indices: Any) -> list[Any]:
    """Return samples, each drawn with random numbers that are seeded with (seed, epoch, index)."""
    batch = []
    for index in indices:
        seed_everything(hashed(seed, epoch, index))
        batch.append(samples[index])
    return batch


def hashed(*key: int | str) -> int:
    """Return a seed: the first 8 bytes of a hash."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def seed_everything(seed: int) -> None:
    """Seed ``random``, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
#:: endif ::#


def learning_rate(step: int, end: int, optim: Any) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fraction of it."""
    if step < optim.warmup_steps:
        return float(optim.lr * (step + 1) / optim.warmup_steps)
    done = min(1.0, (step - optim.warmup_steps) / (end - optim.warmup_steps))
    return float(optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2))


@torch.no_grad()
def adamw(p: Tensor, gradient: Tensor, moments: Any, step: int, lr: float, optim: Any) -> None:
    """Take a step of AdamW (Loshchilov and Hutter 2019, algorithm 2); only matrices and kernels decay."""
    corrected = []
    for moment, value, beta in zip(moments, (gradient, gradient**2), optim.betas, strict=True):
        moment.mul_(beta).add_((1 - beta) * value)
        corrected.append(moment / (1 - beta**step))
    if p.dim() > 1:
        p.mul_(1 - lr * optim.weight_decay)
    p.sub_(lr * corrected[0] / (corrected[1].sqrt() + optim.eps))
