#:: if fact("loop") ::#
#:: include "task/" ~ cookiecutter.task ~ "/plain.py" ::#
#:: else ::#
"""A plain loop in one process, from which no run must differ, written from the documented rules.

Of the package, it uses only the experiment: model, datasets and loss. So it repeats no mistake in
the order of samples, random numbers, the schedule, clipping or the optimizer.
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
    """Train; returns what a run has to log of each step, and the final weights."""
    dataset = module("dataset")
    seed_everything(config.run.seed)
    train_set, *_ = dataset.build_datasets(config)
    task = module("task").Task(config, torch.device("cpu"))
    seed_everything(config.run.seed)
    model = module("model").build_model(config.model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in parameters]
    scheduled_steps = config.train.epochs * (len(train_set) // config.data.global_batch_size)
    records = []
    for step, batch in enumerate(islice(batches(dataset, train_set, config), steps)):
        microbatches = []
        for number, microbatch in enumerate(batch):
            seed_everything(hashed(config.run.seed, "prepare", step, number))
            microbatches.append(task.prepare(*task.augment(*microbatch)))
        weight = sum(task.weight(targets) for _, targets in microbatches)
        loss = torch.zeros(())
        for number, (inputs, targets) in enumerate(microbatches):
            seed_everything(hashed(config.run.seed, "forward", step, number))
            loss += task.losses(model(inputs), targets)["loss"] / max(weight, 1e-30)
        lr = learning_rate(step, scheduled_steps, config.optim)
        norm = update(parameters, loss, moments, step + 1, lr, config)
        records.append({"step": step + 1, "loss": loss.item(), "lr": lr, "grad_norm": norm})
    return records, model.state_dict()


def batches(dataset: Any, train_set: Any, config: Any) -> Iterator[Any]:
    """Yield lists of micro-batches without end; an epoch's last, incomplete batch is dropped."""
    seed, size, micro = config.run.seed, config.data.global_batch_size, config.data.micro_batch_size
    for epoch in count():
        generator = torch.Generator().manual_seed(hashed(seed, "order", epoch))
        order = torch.randperm(len(train_set), generator=generator).tolist()
        for start in range(0, len(train_set) - size + 1, size):
            firsts = range(start, start + size, micro)
            parts = [read(train_set, seed, epoch, order[first : first + micro]) for first in firsts]
            yield [dataset.collate_fn(part) for part in parts]


def read(samples: Any, seed: int, epoch: int, indices: Any) -> list[Any]:
    """Return samples, each drawn with random numbers that are seeded with (seed, epoch, index)."""
    batch = []
    for index in indices:
        seed_everything(hashed(seed, epoch, index))
        batch.append(samples[index])
    return batch


def seed_everything(seed: int) -> None:
    """Seed ``random``, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
#:: endif ::#


def hashed(*key: int | str) -> int:
    """Return a seed for a key: the first 8 bytes of its hash."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def learning_rate(step: int, scheduled_steps: int, optim: Any) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fraction of it."""
    if step < optim.warmup_steps:
        return float(optim.lr * (step + 1) / optim.warmup_steps)
    done = min(1.0, (step - optim.warmup_steps) / (scheduled_steps - optim.warmup_steps))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return float(optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine))


def update(
    parameters: list[Any], loss: Tensor, moments: Any, step: int, lr: float, config: Any
) -> float:
    """Take a step with the clipped gradient of a loss; returns its norm before it was clipped."""
    gradients = torch.autograd.grad(loss, parameters)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    scale = min(1.0, config.train.clip_grad_norm / norm)
    for parameter, gradient, state in zip(parameters, gradients, moments, strict=True):
        adamw(parameter, gradient * scale, state, step, lr, config.optim)
    return norm


@torch.no_grad()
def adamw(
    parameter: Tensor, gradient: Tensor, moments: Any, step: int, lr: float, optim: Any
) -> None:
    """Change a parameter by AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
    first_moment, second_moment = moments
    first_beta, second_beta = optim.betas
    first_moment.mul_(first_beta).add_((1 - first_beta) * gradient)
    second_moment.mul_(second_beta).add_((1 - second_beta) * gradient**2)
    # Only matrices and kernels decay, but no bias and no weight of a normalization.
    if parameter.dim() > 1:
        parameter.mul_(1 - lr * optim.weight_decay)
    mean = first_moment / (1 - first_beta**step)
    variance = second_moment / (1 - second_beta**step)
    parameter.sub_(lr * mean / (variance.sqrt() + optim.eps))
