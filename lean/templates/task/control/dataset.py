"""The data: what a policy does in environments of Gymnasium, which are numbered over all ranks.

A sample is an environment. Each training step starts a new episode in all of them, so what happens there is a function of
the weights, ``run.seed``, the step and the environment's number: it does not matter which rank steps it, and checkpoints
hold no state of environments. The price: training sees no more than the first ``dataset.steps`` steps of an episode.
"""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .config import Config
from .distributed import derive_seed

EVALUATION_EPISODES = 100
Policy = Callable[[Tensor], Tensor]  # Maps (batch, numbers) observations to (batch, actions + 1) logits and values.

# Makes a batch, a pair (inputs, targets), of a list of samples.
collate_fn = default_collate


class Numbers(Dataset[tuple[int, int]]):
    """Environments, or episodes of an evaluation, each as its number (twice: there are no targets)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


def build_datasets(config: Config) -> tuple[Numbers, Numbers]:
    """Return the environments to train in, and the episodes to evaluate on."""
    return Numbers(config.data.global_batch_size), Numbers(EVALUATION_EPISODES)


class World:
    """One environment, which starts its next episode when one is over; each episode is seeded by ``key`` and its number.

    Attributes:
        observation: What the next action responds to, of shape (numbers,).
    """

    def __init__(self, config: Config, *key: int | str) -> None:
        self.environment: Any = gymnasium.make(config.model.environment)
        self.key, self.episode = key, 0
        self.reset()

    def reset(self) -> None:
        """Start the next episode."""
        observation, _ = self.environment.reset(seed=derive_seed(*self.key, self.episode))
        self.observation = torch.as_tensor(observation, dtype=torch.float32)
        self.episode += 1

    def step(self, action: int) -> dict[str, Tensor]:
        """Take an action; returns what follows, and whether nothing more would (``terminated``)."""
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        self.observation = following = torch.as_tensor(observation, dtype=torch.float32)
        if terminated or truncated:
            self.reset()
        result = {"reward": torch.tensor(float(reward)), "following": following}
        return result | {"terminated": torch.tensor(terminated), "ended": torch.tensor(terminated or truncated)}


@torch.no_grad()
def collect(policy: Policy, numbers: list[int], step: int, config: Config) -> dict[str, Tensor]:
    """Return what the policy does in some environments, as tensors of shape (environments, steps, ...) by name.

    They are ``observation``, ``action``, its ``log_prob``, ``advantage`` (Schulman et al. 2016, equation 16) and
    ``return``, the value that the critic should have predicted.
    """
    settings, seed = config.dataset, config.run.seed
    worlds = [World(config, seed, "collect", step, number) for number in numbers]
    seeds = [derive_seed(seed, "action", step, number) for number in numbers]
    noise = torch.stack([torch.rand(settings.steps, generator=torch.Generator().manual_seed(key)) for key in seeds])
    taken = []
    for uniform in noise.split(1, dim=1):
        observations = torch.stack([world.observation for world in worlds])
        outputs = policy(observations)
        log_probs = outputs[:, :-1].log_softmax(dim=1)
        # The action in whose part of the cumulative distribution the random number lies.
        actions = (uniform >= log_probs.exp().cumsum(dim=1)[:, :-1]).sum(dim=1, keepdim=True)
        found = default_collate([world.step(action) for world, action in zip(worlds, actions[:, 0].tolist(), strict=True)])
        known = {"observation": observations, "action": actions[:, 0], "value": outputs[:, -1]}
        taken.append(known | {"log_prob": log_probs.gather(1, actions)[:, 0]} | found)
    steps = {name: torch.stack([each[name] for each in taken], dim=1) for name in taken[0]}
    following = policy(steps.pop("following").flatten(0, 1))[:, -1].view_as(steps["value"])
    errors = steps.pop("reward") + settings.discount * following * ~steps.pop("terminated") - steps["value"]
    decay, advantages = settings.discount * settings.gae_lambda * ~steps.pop("ended"), [torch.zeros(len(numbers))]
    for i in reversed(range(settings.steps)):
        advantages.append(errors[:, i] + decay[:, i] * advantages[-1])
    advantage = torch.stack(advantages[:0:-1], dim=1)
    return steps | {"advantage": advantage, "return": advantage + steps.pop("value")}


def minibatches(experience: dict[str, Tensor], step: int, config: Config) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the parts of all passes over the experience of a step, as observations and what the loss compares."""
    count, seed = config.dataset.minibatches, config.run.seed
    for number in range(config.dataset.passes):
        generator = torch.Generator().manual_seed(derive_seed(seed, "pass", step, number))
        order = torch.randperm(config.dataset.steps, generator=generator)
        for part in range(count):
            batch = {name: values[:, order[part::count]] for name, values in experience.items()}
            yield batch.pop("observation"), batch


@torch.no_grad()
def play(policy: Policy, numbers: list[int], config: Config) -> dict[str, Tensor]:
    """Play episodes with the most likely actions; returns the ``return`` and ``length`` of each."""
    worlds = [World(config, config.run.seed, "evaluate", number) for number in numbers]
    totals, lengths = torch.zeros(len(worlds)), torch.zeros(len(worlds))
    # Equally many calls on each rank, because the policy may be a collective.
    for _ in range(worlds[0].environment.spec.max_episode_steps if worlds else 0):
        actions = policy(torch.stack([world.observation for world in worlds]))[:, :-1].argmax(dim=1)
        for i, (world, action) in enumerate(zip(worlds, actions.tolist(), strict=True)):
            if world.episode == 1:
                totals[i] += world.step(action)["reward"]
                lengths[i] += 1
    return {"return": totals, "length": lengths}
