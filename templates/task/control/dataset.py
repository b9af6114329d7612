"""The data: what a policy does in environments of Gymnasium, which are numbered over all ranks.

A sample is an environment. Every step of training starts a new episode in all of them. So what
happens there follows from the weights, ``run.seed``, the step and the number of the environment,
whichever rank it is on, and checkpoints hold no state of environments. The price: training sees at
most the first ``dataset.steps`` steps of an episode.

Runs on different numbers of ranks agree until rounding changes an action that is drawn. After that,
they are different samples of the same experiment.
"""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .config import Config, DatasetConfig
from .distributed import derive_seed

EVALUATION_EPISODES = 100

# A policy maps (batch, numbers) observations to (batch, actions + 1) outputs: a logit of each
# action, and the critic's value.
Policy = Callable[[Tensor], Tensor]

# The loader turns a list of samples into a batch by this function: a pair (inputs, targets).
collate_fn = default_collate


class Numbers(Dataset[tuple[int, int]]):
    """The numbers of environments, or of an evaluation's episodes.

    A sample is a number twice: a pair (inputs, targets), although there are no targets.
    """

    def __init__(self, length: int, first: int = 0) -> None:
        self.length = length
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        number = self.first + index
        return number, number


def build_datasets(config: Config) -> tuple[Numbers, Numbers, Numbers]:
    """Return the environments to train in, and the episodes for validation and for the test."""
    train_set = Numbers(config.data.global_batch_size)
    # Episodes are seeded by their numbers, so validation and test have different ones.
    validation_set = Numbers(EVALUATION_EPISODES, first=EVALUATION_EPISODES)
    return train_set, validation_set, Numbers(EVALUATION_EPISODES)


class Environment:
    """One environment, in which the next episode starts as soon as one ends."""

    def __init__(self, config: Config, *key: int | str) -> None:
        self.gym: Any = gymnasium.make(config.model.environment)
        # The seeds of the episodes follow from this and from their numbers.
        self.key = key
        # The first episode, which reset() starts, has the number 1.
        self.episode = 0
        self.reset()

    def reset(self) -> None:
        """Start the next episode."""
        observation, _ = self.gym.reset(seed=derive_seed(*self.key, self.episode))
        # The next action responds to this; its shape is (numbers,).
        self.observation = torch.as_tensor(observation, dtype=torch.get_default_dtype())
        self.episode += 1

    def step(self, action: int) -> dict[str, Tensor]:
        """Take an action, and start the next episode if it ended this one.

        Returns:
            ``reward``: The reward of the action.
            ``next_observation``: What the action led to, even if it ended the episode.
            ``terminated``: Whether no more reward would follow.
            ``ended``: Whether the episode was terminated, or cut off at its maximum length.
        """
        observation, reward, terminated, truncated, _ = self.gym.step(action)
        # Some environments return numbers of another type than the model's weights.
        next_observation = torch.as_tensor(observation, dtype=torch.get_default_dtype())
        ended = terminated or truncated
        self.observation = next_observation
        if ended:
            self.reset()
        return {
            "reward": torch.tensor(float(reward)),
            "next_observation": next_observation,
            "terminated": torch.tensor(terminated),
            "ended": torch.tensor(ended),
        }


@torch.no_grad()
def collect(policy: Policy, numbers: list[int], step: int, config: Config) -> dict[str, Tensor]:
    """Let a policy act in the environments ``numbers``, for a step of training.

    Returns:
        Tensors of shape (environments, time, ...): ``observation``, ``action``, ``log_prob`` (of
        the action), ``advantage`` (how much better than expected the action was) and ``return``
        (what the critic should have expected).
    """
    seed = config.run.seed
    environments = [Environment(config, seed, "collect", step, number) for number in numbers]
    uniform = draw_uniform_numbers(numbers, step, config)
    transitions = []
    for time in range(config.dataset.steps):
        transitions.append(act(policy, environments, uniform[:, time]))
    # All transitions have the same names.
    experience = {}
    for name in transitions[0]:
        over_time = [transition[name] for transition in transitions]
        experience[name] = torch.stack(over_time, dim=1)
    # One batch of all next observations is faster than one per step.
    next_outputs = policy(experience["next_observation"].flatten(0, 1))
    experience["next_value"] = next_outputs[:, -1].view(len(numbers), config.dataset.steps)
    advantage = estimate_advantages(experience, config.dataset)
    return {
        "observation": experience["observation"],
        "action": experience["action"],
        "log_prob": experience["log_prob"],
        "advantage": advantage,
        "return": advantage + experience["value"],
    }


def act(policy: Policy, environments: list[Environment], uniform: Tensor) -> dict[str, Tensor]:
    """Take one step in each environment, with actions that are drawn by ``uniform`` numbers.

    Returns:
        Tensors of shape (environments, ...): what ``Environment.step`` returns, ``observation``
        (before the step), ``value`` (by the critic), ``action`` and its ``log_prob``.
    """
    observations = torch.stack([environment.observation for environment in environments])
    outputs = policy(observations)
    # The last output is the critic's value, the others are logits of actions.
    log_probs = outputs[:, :-1].log_softmax(dim=1)
    actions = draw_actions(log_probs, uniform)
    results = []
    for environment, action in zip(environments, actions.tolist(), strict=True):
        results.append(environment.step(action))
    transition = collate_fn(results)
    transition["observation"] = observations
    transition["value"] = outputs[:, -1]
    transition["action"] = actions
    log_prob = log_probs.gather(1, actions[:, None])
    transition["log_prob"] = log_prob[:, 0]
    return transition


def draw_uniform_numbers(numbers: list[int], step: int, config: Config) -> Tensor:
    """Return random numbers from 0 to 1 of shape (environments, time), to draw actions with."""
    rows = []
    for number in numbers:
        # An environment's random numbers must not depend on which others this rank has.
        generator = torch.Generator()
        generator.manual_seed(derive_seed(config.run.seed, "act", step, number))
        rows.append(torch.rand(config.dataset.steps, generator=generator))
    return torch.stack(rows)


def draw_actions(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw an action in each environment, by inverse transform sampling.

    Args:
        log_probs: Logarithms of the probabilities of actions, of shape (environments, actions).
        uniform: Random numbers from 0 to 1, of shape (environments,).

    Returns:
        Actions of shape (environments,).
    """
    # Action i has the part of [0, 1) between bounds i - 1 and i. The last bound is left out: it is
    # 1, or less by rounding.
    bounds = log_probs.exp().cumsum(dim=1)[:, :-1]
    is_above = uniform[:, None] >= bounds
    return is_above.sum(dim=1)


def estimate_advantages(experience: dict[str, Tensor], config: DatasetConfig) -> Tensor:
    """Return advantages of shape (environments, time).

    Source: generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).
    """
    # The factor 1 - discount gives values the scale of one reward, which the critic learns fast.
    rewards = (1 - config.discount) * experience["reward"]
    next_values = config.discount * experience["next_value"] * ~experience["terminated"]
    errors = rewards + next_values - experience["value"]
    # An advantage includes those that follow in the same episode, with less and less weight.
    decay = config.discount * config.gae_lambda * ~experience["ended"]
    advantages = torch.empty_like(errors)
    advantage = torch.zeros(len(errors))
    for time in reversed(range(config.steps)):
        advantage = errors[:, time] + decay[:, time] * advantage
        advantages[:, time] = advantage
    return advantages


def minibatches(
    experience: dict[str, Tensor],
    step: int,
    config: Config,
) -> Iterator[list[tuple[Tensor, dict[str, Tensor]]]]:
    """Yield lists of micro-batches (inputs, targets), observations and all else, for each update.

    They have some steps of every environment; each pass over the experience has each step once.
    """
    size = config.data.micro_batch_size or len(experience["observation"])
    count = config.dataset.minibatches
    for number in range(config.dataset.passes):
        # All ranks choose the same steps, because neither seed nor length depends on the rank.
        generator = torch.Generator()
        generator.manual_seed(derive_seed(config.run.seed, "pass", step, number))
        order = torch.randperm(config.dataset.steps, generator=generator)
        for first in range(count):
            chosen = order[first::count]
            microbatches = []
            for start in range(0, len(experience["observation"]), size):
                targets = {}
                for name, values in experience.items():
                    targets[name] = values[start : start + size, chosen]
                microbatches.append((targets.pop("observation"), targets))
            yield microbatches


@torch.no_grad()
def play(policy: Policy, numbers: list[int], config: Config) -> dict[str, Tensor]:
    """Play the episodes ``numbers`` of an evaluation, with the most likely actions.

    Returns:
        ``return`` and ``length`` of each episode, of shape (episodes,).
    """
    environments = [Environment(config, "play", number) for number in numbers]
    returns = torch.zeros(len(environments))
    lengths = torch.zeros(len(environments))
    # An episode is over when its environment has started another one.
    while any(environment.episode == 1 for environment in environments):
        observations = torch.stack([environment.observation for environment in environments])
        actions = policy(observations)[:, :-1].argmax(dim=1)
        # An environment whose episode is over stays in the batch, and waits for the others.
        for index, environment in enumerate(environments):
            if environment.episode == 1:
                returns[index] += environment.step(int(actions[index]))["reward"]
                lengths[index] += 1
    return {"return": returns, "length": lengths}
