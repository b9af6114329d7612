"""A plain training loop, from which no run must differ: one process, one environment at a time.

It is written from the documented rules with nothing but PyTorch and Gymnasium. Of the package it
uses only the model.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from rules import learning_rate, update
from support import module

Records = list[dict[str, float]]
Tensors = dict[str, Tensor]


def train(config: Any) -> tuple[Records, dict[str, Tensor]]:
    """Train; returns what a run has to log of each step, and the final weights."""
    _, _, model = build(config)
    parameters = dict(model.named_parameters())
    states = defaultdict[str, Any](dict)
    records = []
    for step in range(config.train.max_steps):
        lr = learning_rate(step, config.train.epochs, config.optim)
        losses = []
        norms = []
        for minibatch in minibatches(model, config, step):
            loss = loss_of(model, config, minibatch)
            norms.append(take_step(parameters, states, loss, lr, config))
            losses.append(loss.item())
        means = {"loss": np.mean(losses), "grad_norm": np.mean(norms)}
        records.append({"step": step + 1, "lr": lr, **means})
    return records, model.state_dict()


def minibatches(model: nn.Module, config: Any, step: int) -> Iterator[Tensors]:
    """Let the model act, and yield tensors by name, of shape (environments, chosen steps, ...)."""
    settings = config.dataset
    numbers = range(config.data.global_batch_size)
    acted = [act(model, config, step, number) for number in numbers]
    experience = {name: torch.stack([tensors[name] for tensors in acted]) for name in acted[0]}
    advantage = experience["advantage"]
    experience["advantage"] = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    for number in range(settings.passes):
        generator = torch.Generator().manual_seed(hashed(config.run.seed, "pass", step, number))
        order = torch.randperm(settings.steps, generator=generator)
        for first in range(settings.minibatches):
            chosen = order[first :: settings.minibatches]
            yield {name: values[:, chosen] for name, values in experience.items()}


@torch.no_grad()
def act(model: nn.Module, config: Any, step: int, number: int) -> Tensors:
    """Act in one environment; returns tensors by name, of shape (steps, ...)."""
    seed = config.run.seed
    environment = gymnasium.make(config.model.environment)
    generator = torch.Generator().manual_seed(hashed(seed, "act", step, number))
    rows: list[dict[str, Any]] = []
    episode = 0
    has_ended = True
    for uniform in torch.rand(config.dataset.steps, generator=generator):
        if has_ended:
            seen, _ = environment.reset(seed=hashed(seed, "collect", step, number, episode))
            episode += 1
        row = {"seen": torch.tensor(seen, dtype=torch.get_default_dtype())}
        *logits, value = model(row["seen"])
        log_probs = torch.stack(logits).log_softmax(dim=0)
        # The action is the one in whose part of the cumulative distribution the number lies.
        limits = log_probs.exp().cumsum(dim=0)[:-1]
        action = 0
        while action < len(limits) and uniform >= limits[action]:
            action += 1
        row |= {"action": torch.tensor(action), "value": value}
        seen, reward, terminated, truncated, _ = environment.step(action)
        next_seen = torch.tensor(seen, dtype=torch.get_default_dtype())
        next_value = 0.0 if terminated else float(model(next_seen)[-1])
        has_ended = terminated or truncated
        row |= {"log_prob": log_probs[action], "reward": float(reward)}
        rows.append(row | {"next_value": next_value, "has_ended": has_ended})
    add_advantages(rows, config.dataset)
    names = ("seen", "action", "log_prob", "advantage", "return")
    return {name: torch.stack([row[name] for row in rows]) for name in names}


def add_advantages(rows: list[dict[str, Any]], settings: Any) -> None:
    """Add the advantages and returns (Schulman et al. 2016, arXiv:1506.02438, equation 16)."""
    advantage = torch.tensor(0.0)
    for row in reversed(rows):
        target = (1 - settings.discount) * row["reward"] + settings.discount * row["next_value"]
        decay = 0 if row["has_ended"] else settings.discount * settings.gae_lambda
        advantage = target - row["value"] + decay * advantage
        row["advantage"] = advantage
        row["return"] = advantage + row["value"]


def loss_of(model: nn.Module, config: Any, experience: Tensors) -> Tensor:
    """Return the mean loss of PPO (Schulman et al. 2017, equations 7 and 9)."""
    clip = config.dataset.clip
    advantage = experience["advantage"]
    *logits, value = model(experience["seen"]).unbind(dim=-1)
    policy = torch.distributions.Categorical(logits=torch.stack(logits, dim=-1))
    ratio = (policy.log_prob(experience["action"]) - experience["log_prob"]).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clip(1 - clip, 1 + clip) * advantage)
    value_loss = 0.5 * (value - experience["return"]) ** 2
    return (value_loss - surrogate - config.dataset.entropy_weight * policy.entropy()).mean()


@torch.no_grad()
def evaluate(model: nn.Module, config: Any, first: int) -> dict[str, float]:
    """Play 100 episodes, one after another, from number ``first`` on; returns their metrics."""
    environment = gymnasium.make(config.model.environment)
    returns = []
    lengths = []
    for number in range(first, first + 100):
        seen, _ = environment.reset(seed=hashed("play", number, 0))
        rewards = []
        has_ended = False
        while not has_ended:
            action = int(model(torch.tensor(seen))[:-1].argmax())
            seen, reward, terminated, truncated, _ = environment.step(action)
            rewards.append(float(reward))
            has_ended = terminated or truncated
        returns.append(sum(rewards))
        lengths.append(len(rewards))
    extremes = {"min_return": min(returns), "max_return": max(returns)}
    means = {"mean_return": np.mean(returns), "mean_length": np.mean(lengths)}
    return {"num_samples": 100, **extremes, **means}
