#:: if fact("loop") ::#
#:: include "task/" ~ cookiecutter.task ~ "/plain.py" ::#
#:: else ::#
"""A plain loop in one process, from which no run must differ, written from the documented rules.

Of the package, it uses only model, datasets and loss, and so repeats no mistake of the others."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rules import learning_rate, update
from support import module

Records = list[dict[str, float]]


def train(config: Any) -> tuple[Records, dict[str, Tensor]]:
    """Train; returns what a run has to log of each step, and the final weights."""
    (train_set, *_), task, model = build(config)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    states = defaultdict[str, Any](dict)
    scheduled_steps = config.train.epochs * (len(train_set) // config.data.global_batch_size)
    records = []
    for step, batch in enumerate(islice(batches(train_set, config), config.train.max_steps)):
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
        norm = take_step(parameters, states, loss, lr, config)
        records.append({"step": step + 1, "loss": loss.item(), "lr": lr, "grad_norm": norm})
    return records, model.state_dict()


def batches(train_set: Any, config: Any) -> Iterator[Any]:
    """Yield lists of micro-batches without end; an epoch's last, incomplete batch is dropped."""
    seed, size, micro = config.run.seed, config.data.global_batch_size, config.data.micro_batch_size
    for epoch in count():
        generator = torch.Generator().manual_seed(hashed(seed, "order", epoch))
        order = torch.randperm(len(train_set), generator=generator).tolist()
        for start in range(0, len(train_set) - size + 1, size):
            firsts = range(start, start + size, micro)
            parts = [read(train_set, seed, epoch, order[first : first + micro]) for first in firsts]
            batch = [module("dataset").collate_fn(part) for part in parts]
            if config.train.precision == "fp64":
                batch = tree_map_only(torch.FloatTensor, Tensor.double, batch)
            yield batch


def read(samples: Any, seed: int, epoch: int, indices: Any) -> list[Any]:
    """Return samples, each drawn with random numbers that are seeded with (seed, epoch, index)."""
    batch = []
    for index in indices:
        seed_everything(hashed(seed, epoch, index))
        batch.append(samples[index])
    return batch
#:: endif ::#


def build(config: Any) -> tuple[Any, Any, Any]:
    """Return the datasets, the task and the model of an experiment; fp64 stays the default type."""
    torch.set_default_dtype(torch.float64 if config.train.precision == "fp64" else torch.float32)
    seed_everything(config.run.seed)
    datasets = module("dataset").build_datasets(config)
    task = module("task").Task(config, torch.device("cpu"))
    own = [name for name, value in vars(task).items() if isinstance(value, torch.nn.Parameter)]
    assert not own, f"nothing would train {own} of Task: let the model have them"
    seed_everything(config.run.seed)
    return datasets, task, module("model").build_model(config.model)


def seed_everything(seed: int) -> None:
    """Seed ``random``, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def hashed(*key: int | str) -> int:
    """Return a seed for a key: the first 8 bytes of its hash."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def take_step(parameters: Any, states: Any, loss: Tensor, lr: float, config: Any) -> float:
    """Take a step with the clipped gradient of a loss; returns its norm before it was clipped."""
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    scale = min(1.0, config.train.clip_grad_norm / (norm + 1e-6))  # As in clip_grad_norm_().
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        update(name, parameter, gradient * scale, states[name], lr, config.optim)
    return norm
