"""The data: what a policy does in environments of Gymnasium, which are numbered over all ranks.

A sample is an environment. Each step of training starts a new episode in all of them. So what happens there follows
from the weights, ``run.seed``, the step and the number of the environment, whichever rank it is on, and checkpoints
hold no state of environments. The price: training sees at most the first ``dataset.steps`` steps of an episode.

Runs on different numbers of ranks agree until rounding changes an action that is drawn. From there on, they are
different samples of the same experiment.
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
Policy = Callable[[Tensor], Tensor]  # Maps (batch, numbers) observations to (batch, actions + 1) logits and values.

collate_fn = default_collate  # Makes a batch, a pair (inputs, targets), of a list of samples.


class Numbers(Dataset[tuple[int, int]]):
    """Environments, or episodes of an evaluation, each as its number; twice, because there are no targets."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.first + index, self.first + index


def build_datasets(config: Config) -> tuple[Numbers, Numbers, Numbers]:
    """Return the environments to train in, and the episodes for validation and test: all start by other seeds."""
    validation = Numbers(EVALUATION_EPISODES, first=EVALUATION_EPISODES)
    return Numbers(config.data.global_batch_size), validation, Numbers(EVALUATION_EPISODES)


class Environment:
    """One environment; each of its episodes is seeded by a key and the number of the episode.

    Attributes:
        observation: What the next action responds to, of shape (numbers,).
    """

    def __init__(self, config: Config, *key: int | str) -> None:
        self.gym: Any = gymnasium.make(config.model.environment)
        self.key, self.episode = key, 0
        self.reset()

    def reset(self) -> None:
        """Start the next episode."""
        observation, _ = self.gym.reset(seed=derive_seed(*self.key, self.episode))
        self.observation = torch.as_tensor(observation, dtype=torch.float32)
        self.episode += 1

    def step(self, action: int) -> dict[str, Tensor]:
        """Take an action, and start the next episode if this one has ended.

        Returns:
            The ``reward``, the observation that was ``reached``, and whether the episode has ``ended``: it may have
            been cut off, or it was ``terminated`` and no more reward would follow.
        """
        observation, reward, terminated, truncated, _ = self.gym.step(action)
        self.observation = reached = torch.as_tensor(observation, dtype=torch.float32)
        if terminated or truncated:
            self.reset()
        flags = {"terminated": torch.tensor(terminated), "ended": torch.tensor(terminated or truncated)}
        return {"reward": torch.tensor(float(reward)), "reached": reached, **flags}


@torch.no_grad()
def collect(policy: Policy, numbers: list[int], step: int, config: Config) -> dict[str, Tensor]:
    """Return what the policy does in some environments, as tensors of shape (environments, steps, ...).

    They are ``observation``, ``action``, its ``log_prob``, ``advantage`` (how much better than expected it was) and
    ``return`` (what the critic should have expected).
    """
    seed, length = config.run.seed, config.dataset.steps
    environments = [Environment(config, seed, "collect", step, number) for number in numbers]
    generators = [torch.Generator().manual_seed(derive_seed(seed, "act", step, number)) for number in numbers]
    noise = torch.stack([torch.rand(length, generator=generator) for generator in generators])
    steps = []
    for uniform in noise.split(1, dim=1):
        observations = torch.stack([env.observation for env in environments])
        outputs = policy(observations)
        log_probs = outputs[:, :-1].log_softmax(dim=1)
        # The action in whose part of the cumulative distribution the random number lies.
        actions = (uniform >= log_probs.exp().cumsum(dim=1)[:, :-1]).sum(dim=1, keepdim=True)
        known = {"observation": observations, "value": outputs[:, -1], "action": actions[:, 0]}
        known["log_prob"] = log_probs.gather(1, actions)[:, 0]
        steps.append(known | collate_fn([env.step(int(each)) for env, each in zip(environments, actions, strict=True)]))
    taken = {name: torch.stack([each[name] for each in steps], dim=1) for name in steps[0]}
    taken["next_value"] = policy(taken["reached"].flatten(0, 1))[:, -1].view(len(numbers), length)
    advantage = estimate_advantages(taken, config.dataset)
    kept = {name: taken[name] for name in ("observation", "action", "log_prob")}
    return kept | {"advantage": advantage, "return": advantage + taken["value"]}


def estimate_advantages(taken: dict[str, Tensor], config: DatasetConfig) -> Tensor:
    """Return advantages of shape (environments, steps) (Schulman et al. 2016, arXiv:1506.02438, equation 16)."""
    # Rewards count 1 - discount, so that values are on the scale of one reward, which the critic learns fast.
    targets = (1 - config.discount) * taken["reward"] + config.discount * taken["next_value"] * ~taken["terminated"]
    errors = targets - taken["value"]
    decay = config.discount * config.gae_lambda * ~taken["ended"]
    advantages = torch.empty_like(errors)
    following = torch.zeros(len(errors))
    for i in reversed(range(config.steps)):
        advantages[:, i] = following = errors[:, i] + decay[:, i] * following
    return advantages


def minibatches(experience: dict[str, Tensor], step: int, config: Config) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the parts of all passes over the experience of a step: observations, and the inputs of the loss."""
    parts, length = config.dataset.minibatches, config.dataset.steps
    for number in range(config.dataset.passes):
        generator = torch.Generator().manual_seed(derive_seed(config.run.seed, "pass", step, number))
        order = torch.randperm(length, generator=generator)
        for part in range(parts):
            batch = {name: values[:, order[part::parts]] for name, values in experience.items()}
            yield batch.pop("observation"), batch


@torch.no_grad()
def play(policy: Policy, numbers: list[int], config: Config) -> dict[str, Tensor]:
    """Play episodes of an evaluation with the most likely actions; returns the ``return`` and ``length`` of each."""
    environments = [Environment(config, "play", number) for number in numbers]
    returns, lengths = torch.zeros(len(environments)), torch.zeros(len(environments))
    while any(env.episode == 1 for env in environments):
        actions = policy(torch.stack([env.observation for env in environments]))[:, :-1].argmax(dim=1)
        for i, env in enumerate(environments):
            if env.episode == 1:  # Its first one is not over.
                returns[i] += env.step(int(actions[i]))["reward"]
                lengths[i] += 1
    return {"return": returns, "length": lengths}
