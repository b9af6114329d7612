"""A plain training loop, in one process and one environment at a time, from which no run must differ.

It is written from the documented rules with nothing but PyTorch and Gymnasium. Of the package it uses only the model.
"""

import math
from hashlib import blake2b
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from support import module

Records = list[dict[str, float]]


def train(config: Any, steps: int) -> tuple[Records, dict[str, Tensor]]:
    """Train for a number of steps; returns what a run has to log of each, and the final weights."""
    torch.manual_seed(config.run.seed)
    model, optim, settings, records = module("model").build_model(config.model), config.optim, config.dataset, []
    parameters, updates = list(model.parameters()), 0
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step in range(steps):
        lr, losses, norms = learning_rate(step, config.train.epochs, optim), [], []
        experience = [act(model, config, step, number) for number in range(config.data.global_batch_size)]
        columns = [torch.stack(part) for part in zip(*experience, strict=True)]
        columns[3] = (columns[3] - columns[3].mean()) / columns[3].std(correction=0)
        for number in range(settings.passes):
            generator = torch.Generator().manual_seed(hashed(config.run.seed, "pass", step, number))
            order = torch.randperm(settings.steps, generator=generator)
            for some in (order[part :: settings.minibatches] for part in range(settings.minibatches)):
                loss = loss_of(model, config, *(column[:, some] for column in columns))
                gradients, updates = torch.autograd.grad(loss, parameters), updates + 1
                norms.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)))
                scale = min(1.0, config.train.clip_grad_norm / norms[-1])
                for p, gradient, state in zip(parameters, gradients, moments, strict=True):
                    adamw(p, gradient * scale, state, updates, lr, optim)
                losses.append(loss.item())
        records.append({"step": step + 1, "loss": np.mean(losses), "lr": lr, "grad_norm": np.mean(norms)})
    return records, model.state_dict()


@torch.no_grad()
def act(model: nn.Module, config: Any, step: int, number: int) -> list[Tensor]:
    """Return observations, actions, their log probabilities, advantages and returns of the steps in one environment."""
    settings, seed = config.dataset, config.run.seed
    episode, ended, rows = 0, True, []
    environment = gymnasium.make(config.model.environment)
    generator = torch.Generator().manual_seed(hashed(seed, "act", step, number))
    for uniform in torch.rand(settings.steps, generator=generator):
        if ended:
            seen, _ = environment.reset(seed=hashed(seed, "collect", step, number, episode))
            episode += 1
        *logits, value = model(torch.tensor(seen))
        log_probs = torch.stack(logits).log_softmax(dim=0)
        ends = log_probs.exp().cumsum(dim=0)[:-1]
        action = next((i for i, end in enumerate(ends) if uniform < end), len(ends))
        reached, reward, terminated, truncated, _ = environment.step(action)
        after, ended = 0.0 if terminated else float(model(torch.tensor(reached))[-1]), terminated or truncated
        rows.append((torch.tensor(seen), torch.tensor(action), log_probs[action], value, float(reward), after, ended))
        seen = reached
    advantage, found = torch.tensor(0.0), []
    for seen, action, log_prob, value, reward, after, ended in reversed(rows):
        decay = 0 if ended else settings.discount * settings.gae_lambda
        advantage = (1 - settings.discount) * reward + settings.discount * after - value + decay * advantage
        found.insert(0, (seen, action, log_prob, advantage, advantage + value))
    return [torch.stack(column) for column in zip(*found, strict=True)]


def loss_of(model: nn.Module, config: Any, seen: Tensor, action: Tensor, before: Tensor, *target: Tensor) -> Tensor:
    """Return the mean loss of proximal policy optimization (Schulman et al. 2017, equations 7 and 9)."""
    *logits, value = model(seen).unbind(dim=-1)
    policy, clip = torch.distributions.Categorical(logits=torch.stack(logits, dim=-1)), config.dataset.clip
    ratio, (advantage, gain) = (policy.log_prob(action) - before).exp(), target
    surrogate = torch.minimum(ratio * advantage, ratio.clip(1 - clip, 1 + clip) * advantage)
    return (0.5 * (value - gain) ** 2 - surrogate - config.dataset.entropy_weight * policy.entropy()).mean()


@torch.no_grad()
def evaluate(model: nn.Module, config: Any, first: int) -> dict[str, float]:
    """Return the metrics of a model, from 100 episodes that are played one after another, from number ``first`` on."""
    environment, played = gymnasium.make(config.model.environment), []
    for number in range(first, first + 100):
        seen, _ = environment.reset(seed=hashed("play", number, 0))
        rewards, ended = [], False
        while not ended:
            action = int(model(torch.tensor(seen))[:-1].argmax())
            seen, reward, terminated, truncated, _ = environment.step(action)
            rewards, ended = [*rewards, float(reward)], terminated or truncated
        played.append((sum(rewards), len(rewards)))
    returns, lengths = np.array(played).T
    extremes = {"min_return": returns.min(), "max_return": returns.max()}
    return {"num_samples": 100, "mean_return": returns.mean(), **extremes, "mean_length": lengths.mean()}


def hashed(*key: int | str) -> int:
    """Return a seed for a key."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")
