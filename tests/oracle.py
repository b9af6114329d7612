"""What a run has to give, however it is split: a plain loop in PyTorch and NumPy, written from the documented rules.

Of a rendered project it uses only the network, with its initial weights, and ``digits.npz``: data, order, augmentation,
loss, clipping, AdamW, schedule and evaluation are written out here, so that it cannot repeat a mistake of the project's
own. It computes in float64.
"""

from __future__ import annotations

import itertools
import math
import random
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module, util
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Settings = dict[str, Any]
Data = Callable[[Path, Settings, str, int], tuple[Tensor, Tensor]]


def digits(package: Path, settings: Settings, split: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Return all images of a split, shifted down and right by what is drawn for (seed, epoch, index), and labels."""
    with np.load(package / "digits.npz") as arrays:
        images, labels = arrays[f"{split}_images"] / 16, arrays[f"{split}_labels"].astype(np.int64)
    shift = settings["dataset.max_shift"] if split == "train" else 0
    padded = np.pad(images, ((0, 0), (shift, shift), (shift, shift)))
    for index in range(len(images) if shift else 0):
        key = repr((settings["run.seed"], epoch, index)).encode()
        draw = random.Random(int.from_bytes(blake2b(key, digest_size=8).digest()))
        down, right = draw.randrange(2 * shift + 1), draw.randrange(2 * shift + 1)
        images[index] = padded[index, down : down + 8, right : right + 8]
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels)


def language(package: Path, settings: Settings, split: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Return all windows of a split, and the byte after each of their bytes; the test split is the end of the text."""
    text = np.fromfile(settings["dataset.path"], np.uint8)[: settings["dataset.max_bytes"]].astype(np.int64)
    middle, context = len(text) - settings["dataset.test_bytes"], settings["model.context"]
    part = torch.from_numpy(text[:middle] if split == "train" else text[middle:])
    used = (len(part) - 1) // context * context
    return part[:used].view(-1, context), part[1 : used + 1].view(-1, context)


DATA: dict[str, Data] = {"digits": digits, "language": language}


def build_model(package: Path, settings: Settings) -> nn.Module:
    """Return a project's network as its runs start with it; each package is imported under a name of its own."""
    name = f"oracle{len(sys.modules)}"
    spec = util.spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec is not None
    sys.modules[name] = util.module_from_spec(spec)
    config = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    torch.manual_seed(settings["run.seed"])
    model: nn.Module = import_module(f"{name}.model").build_model(import_module(f"{name}.config").ModelConfig(**config))
    return model.double()


def batches(data: Data, package: Path, settings: Settings) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (epoch, inputs, targets): an epoch is one permutation, without the incomplete global batch at its end."""
    size = settings["data.global_batch_size"]
    for epoch in range(settings["train.epochs"]):
        inputs, targets = data(package, settings, "train", epoch)
        order = permutation(len(inputs), (settings["run.seed"], epoch))
        for batch in torch.tensor(order).split(size):
            if len(batch) == size:
                yield epoch, inputs[batch], targets[batch]


def permutation(length: int, key: tuple[int, ...]) -> list[int]:
    """Return the order of an epoch: eight rounds of a Feistel network, repeated until the result is in range."""
    keys = struct.unpack("<8Q", blake2b(repr(key).encode()).digest())
    rows = next(number for number in itertools.count(1) if number**2 >= length)
    columns = next(number for number in itertools.count(1) if rows * number >= length)

    def scramble(value: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ value >> shift) * factor & (1 << 64) - 1
        return value ^ value >> 31

    def follow(x: int) -> int:
        while True:
            one, two = x % rows, x // rows
            for turn in range(4):
                one = (one + scramble(two + keys[2 * turn] & (1 << 64) - 1)) % rows
                two = (two + scramble(one + keys[2 * turn + 1] & (1 << 64) - 1)) % columns
            x = one + rows * two
            if x < length:
                return x

    return [follow(x) for x in range(length)]


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fraction of it."""
    peak, warmup, floor = (settings[f"optim.{name}"] for name in ("lr", "warmup_steps", "min_lr_ratio"))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2)


@torch.no_grad()
def adamw(p: Tensor, gradient: Tensor, state: list[Tensor], step: int, lr: float, settings: Settings) -> None:
    """Take one step (Loshchilov and Hutter 2019, algorithm 2); only matrices and kernels decay."""
    corrected = []
    for moment, value, beta in zip(state, (gradient, gradient**2), settings["optim.betas"], strict=True):
        moment.mul_(beta).add_((1 - beta) * value)
        corrected.append(moment / (1 - beta ** (step + 1)))
    if p.dim() > 1:
        p -= lr * settings["optim.weight_decay"] * p
    p -= lr * corrected[0] / (corrected[1].sqrt() + settings["optim.eps"])


def seed(*key: int | str) -> int:
    """Return the number that a key of environments, episodes or actions stands for."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def generator(*key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(seed(*key))


@torch.no_grad()
def play(model: nn.Module, settings: Settings, number: int, episodes: Iterator[int]) -> Iterator[tuple[Any, ...]]:
    """Yield every step in one environment: observation, action, its log-probability, value, next value, reward, end."""
    environment, observation = gymnasium.make("CartPole-v1"), None
    for collection in itertools.count():
        random = generator(settings["run.seed"], "action", number, collection)
        for noise in torch.rand(settings["control.steps"], generator=random).tolist():
            if observation is None:
                start = seed(settings["run.seed"], "reset", number, next(episodes))
                observation = torch.from_numpy(environment.reset(seed=start)[0])
            outputs = model(observation[None].double())[0]
            action = int(noise >= outputs[:2].softmax(0)[0])
            following, reward, terminated, truncated, _ = environment.step(action)
            after = 0.0 if terminated else model(torch.from_numpy(following)[None].double())[0, 2].item()
            log_prob = outputs[:2].log_softmax(0)[action].item()
            yield observation.double(), action, log_prob, outputs[2].item(), after, reward, terminated or truncated
            observation = None if terminated or truncated else torch.from_numpy(following)


def control(model: nn.Module, settings: Settings) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """Yield (epoch, observations, targets): of each environment the same number of steps, in an order of its own."""
    count, steps = settings["control.environments"], settings["control.steps"]
    worlds = [play(model, settings, number, itertools.count()) for number in range(count)]
    share = settings["data.global_batch_size"] // count
    samples: list[list[tuple[Any, ...]]] = []
    for epoch in range(settings["train.epochs"]):
        if epoch % settings["control.passes"] == 0:
            samples = [add_advantages(list(itertools.islice(world, steps)), settings) for world in worlds]
        keys = [(settings["run.seed"], "order", epoch, number) for number in range(count)]
        orders = [torch.randperm(steps, generator=generator(*key)).tolist() for key in keys]
        for i in range(0, steps, share):
            chosen = [own[step] for own, order in zip(samples, orders, strict=True) for step in order[i : i + share]]
            observations, *targets = zip(*chosen, strict=True)
            action, log_prob, advantage, gain = (torch.tensor(values) for values in targets)
            advantage = advantage.double()
            advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
            yield epoch, torch.stack(observations), [action, log_prob.double(), advantage, gain.double()]


def add_advantages(steps: list[tuple[Any, ...]], settings: Settings) -> list[tuple[Any, ...]]:
    """Return (observation, action, log-probability, advantage, return) of steps, the last one first computed."""
    advantage, found = 0.0, []
    for observation, action, log_prob, value, after, reward, is_end in reversed(steps):
        error = reward + settings["control.discount"] * after - value
        decay = settings["control.discount"] * settings["control.gae_lambda"]
        advantage = error + (0.0 if is_end else decay * advantage)
        found.append((observation, action, log_prob, advantage, advantage + value))
    return found[::-1]


def clipped_loss(outputs: Tensor, targets: list[Tensor], settings: Settings) -> Tensor:
    """Return the mean loss of proximal policy optimization."""
    action, log_prob, advantage, gain = targets
    log_probs = outputs[:, :2].log_softmax(1)
    ratio = (log_probs[torch.arange(len(action)), action] - log_prob).exp()
    bound = advantage * ratio.clip(1 - settings["control.clip"], 1 + settings["control.clip"])
    entropy = -(log_probs.exp() * log_probs).sum(1)
    squared = (outputs[:, 2] - gain) ** 2
    loss = -torch.minimum(ratio * advantage, bound) + settings["control.value_weight"] * squared
    return (loss - settings["control.entropy_weight"] * entropy).mean()


@torch.no_grad()
def play_episodes(model: nn.Module, settings: Settings) -> dict[str, float]:
    """Return the metrics of the evaluation's episodes, in which a step's reward is 1."""
    environment, lengths = gymnasium.make("CartPole-v1"), []
    for number in range(settings["control.evaluation_episodes"]):
        observation, _ = environment.reset(seed=seed(settings["run.seed"], "evaluation", number))
        for length in itertools.count(1):
            action = int(model(torch.from_numpy(observation)[None].double())[0, :2].argmax())
            observation, _, terminated, truncated, _ = environment.step(action)
            if terminated or truncated:
                lengths.append(length)
                break
    mean = sum(lengths) / len(lengths)
    metrics = {"mean_return": mean, "min_return": min(lengths), "max_return": max(lengths), "mean_length": mean}
    return {"num_samples": len(lengths), **metrics}


@dataclass
class Oracle:
    """What a run has to log of each step and each evaluation, and its final weights."""

    records: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(package: Path, task: str, settings: Settings) -> Oracle:
    """Train and evaluate in this process, in one thread: several would wait for each other on a busy machine."""
    torch.set_num_threads(1)
    model, oracle, is_control = build_model(package, settings), Oracle(), task == "control"
    parameters = list(model.parameters())
    states = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
    if is_control:
        experience = settings["control.environments"] * settings["control.steps"]
        steps = settings["train.epochs"] * experience // settings["data.global_batch_size"]
        schedule: Any = control(model, settings)  # While the model changes.
    else:
        schedule = list(batches(DATA[task], package, settings))
        steps = len(schedule)
    for step, (epoch, inputs, targets) in enumerate(schedule):
        outputs = model(inputs)
        loss = clipped_loss(outputs, targets, settings) if is_control else cross_entropy(outputs, targets)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        lr = learning_rate(step, steps, settings)
        scale = min(1.0, settings["train.clip_grad_norm"] / norm)
        for p, gradient, state in zip(parameters, gradients, states, strict=True):
            adamw(p, gradient * scale, state, step, lr, settings)
        oracle.records.append({"step": step + 1, "epoch": epoch, "loss": loss.item(), "lr": lr, "grad_norm": norm})
        if (step + 1) % settings["train.eval_every"] == 0:
            metrics = play_episodes(model, settings) if is_control else evaluate(model, task, package, settings)
            oracle.evaluations.append({"step": step + 1, **metrics})
    oracle.weights = dict(model.state_dict())
    return oracle


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, task: str, package: Path, settings: Settings) -> dict[str, Any]:
    """Return the metrics of a whole test split, each sample once."""
    inputs, targets = DATA[task](package, settings, "test", 0)
    outputs = model(inputs)
    loss = cross_entropy(outputs, targets).item()
    if targets.dim() == 1:
        right = (outputs.argmax(1) == targets).double()
        of_class = [right[targets == label].mean().item() for label in range(10)]
        metrics = {"accuracy": right.mean().item(), "class_accuracy": of_class}
    else:
        metrics = {"bits_per_byte": loss / math.log(2), "perplexity": math.exp(loss)}
    return {"num_samples": len(inputs), "loss": loss, **metrics}
