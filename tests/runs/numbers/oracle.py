"""What a run has to give, however it is split: a plain loop in PyTorch and NumPy, written from the documented rules.

Of a rendered project it uses only the model, with its initial weights, and ``digits.npz``: data, order, augmentation,
loss, clipping, AdamW, schedule and evaluation are written out here, so that it cannot repeat a mistake of the project.
It computes in float64.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module, util
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Settings = dict[str, Any]


@dataclass
class Result:
    """What a run has to log of each step and each evaluation, and its final weights."""

    records: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(package: Path, task: str, settings: Settings) -> Result:
    """Train and evaluate in this process, in one thread: several would wait for each other on a busy machine."""
    torch.set_num_threads(1)
    model, result, steps = build_model(package, settings), Result(), settings["train.max_steps"]
    parameters = list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step, (total, epoch, inputs, targets) in enumerate(islice(batches(task, package, settings), steps)):
        loss = TASKS[task].loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        lr, scale = learning_rate(step, total, settings), min(1.0, settings["train.clip_grad_norm"] / norm)
        for p, gradient, state in zip(parameters, gradients, moments, strict=True):
            adamw(p, gradient * scale, state, step + 1, lr, settings)
        record = {"step": step + 1, "epoch": epoch, "loss": loss.item(), "lr": lr, "grad_norm": norm}
        result.records.append(record)
        if (step + 1) % settings["train.eval_every"] == 0:
            metrics = evaluate(model, task, *TASKS[task].data(package, settings, "validation", 0))
            result.evaluations.append({"step": step + 1, **metrics})
    result.weights = dict(model.state_dict())
    return result


def build_model(package: Path, settings: Settings) -> nn.Module:
    """Return a project's model as its runs start with it; each package is imported under a name of its own."""
    name = f"oracle{len(sys.modules)}"
    spec = util.spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec is not None
    sys.modules[name] = util.module_from_spec(spec)
    config = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    torch.manual_seed(settings["run.seed"])
    model: nn.Module = import_module(f"{name}.model").build_model(import_module(f"{name}.config").ModelConfig(**config))
    return model.double()


def batches(task: str, package: Path, settings: Settings) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield the number of all steps, the epochs done after this one, its inputs and its targets.

    An epoch is one permutation of the samples, without the incomplete global batch at its end.
    """
    size, epochs, seed = (settings[name] for name in ("data.global_batch_size", "train.epochs", "run.seed"))
    for epoch in range(epochs):
        inputs, targets = TASKS[task].data(package, settings, "train", epoch)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed_of(seed, "order", epoch)))
        steps = len(inputs) // size
        for number, batch in enumerate(order[: steps * size].split(size), start=1):
            yield epochs * steps, epoch + number // steps, inputs[batch], targets[batch]


def seed_of(*key: int | str) -> int:
    """Return the seed of a key: PyTorch's generators on a CPU read its last 32 bits alone, so it is a hash."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def digits(package: Path, settings: Settings, split: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Return all images of a split, shifted down and right by what is drawn for (seed, epoch, index), and labels.

    The first 237 of a permutation by the seed are for validation.
    """
    torch.manual_seed(settings["run.seed"])
    order = torch.randperm(1437).numpy()
    chosen = {"train": order[237:], "validation": order[:237]}[split]
    with np.load(package / "digits.npz") as arrays:
        images, labels = arrays["train_images"][chosen] / 16, arrays["train_labels"][chosen].astype(np.int64)
    shift = settings["dataset.max_shift"] if split == "train" else 0
    padded = np.pad(images, ((0, 0), (shift, shift), (shift, shift)))
    for index in range(len(images) if shift else 0):
        draw = random.Random(seed_of(settings["run.seed"], epoch, index))
        down, right = draw.randrange(2 * shift + 1), draw.randrange(2 * shift + 1)
        images[index] = padded[index, down : down + 8, right : right + 8]
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels)


def language(package: Path, settings: Settings, split: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Return all windows of a split, and the byte after each of their bytes; two parts at the end are for others."""
    text = np.fromfile(settings["dataset.path"], np.uint8)[: settings["dataset.max_bytes"]].astype(np.int64)
    size, context = settings["dataset.test_bytes"], settings["model.context"]
    part = torch.from_numpy(text[: -2 * size] if split == "train" else text[-2 * size : -size])
    used = (len(part) - 1) // context * context
    return part[:used].view(-1, context), part[1 : used + 1].view(-1, context)


def letters(package: Path, settings: Settings, split: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Return the windows of a split, in which no letter e is a target: each sample has another number of them."""
    inputs, targets = language(package, settings, split, epoch)
    return inputs, targets.masked_fill(targets == ord("e"), -100)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return the share of images that are recognized, of all and of each class."""
    right = (outputs.argmax(1) == targets).double()
    return {"accuracy": right.mean().item(), "class_accuracy": [right[targets == c].mean().item() for c in range(10)]}


def perplexity(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    loss = cross_entropy(outputs, targets).item()
    return {"bits_per_byte": loss / math.log(2), "perplexity": math.exp(loss)}


@dataclass
class Task:
    """What a task learns: the data of a split in an epoch, the mean loss of a batch, and the metrics of a split."""

    data: Callable[[Path, Settings, str, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Callable[[Tensor, Tensor], dict[str, Any]]


TASKS = {
    "digits": Task(digits, cross_entropy, accuracy),
    "language": Task(language, cross_entropy, perplexity),
    "letters": Task(letters, cross_entropy, perplexity),
}


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fraction of it."""
    peak, warmup, floor = (settings[f"optim.{name}"] for name in ("lr", "warmup_steps", "min_lr_ratio"))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2)


@torch.no_grad()
def adamw(p: Tensor, gradient: Tensor, moments: Any, step: int, lr: float, settings: Settings) -> None:
    """Take one step (Loshchilov and Hutter 2019, algorithm 2); only matrices and kernels decay."""
    corrected = []
    for moment, value, beta in zip(moments, (gradient, gradient**2), settings["optim.betas"], strict=True):
        moment.mul_(beta).add_((1 - beta) * value)
        corrected.append(moment / (1 - beta**step))
    if p.dim() > 1:
        p -= lr * settings["optim.weight_decay"] * p
    p -= lr * corrected[0] / (corrected[1].sqrt() + settings["optim.eps"])


@torch.no_grad()
def evaluate(model: nn.Module, task: str, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return the metrics of a whole split, each sample once."""
    outputs = model(inputs)
    metrics = TASKS[task].metrics(outputs, targets)
    return {"num_samples": len(inputs), "loss": TASKS[task].loss(outputs, targets).item(), **metrics}
