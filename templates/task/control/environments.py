"""Environments: copies of one of Gymnasium's, numbered over the whole run and stepped as a batch.

    8 environments on 2 ranks        rank 0 steps 0 2 4 6, rank 1 steps 1 3 5 7

What happens in an environment depends on its number, not on the rank that steps it: each of its episodes starts with a
seed of its own, a hash of (run.seed, number of the environment, number of the episode).
"""

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from ..launch import make_environment


class Transition(NamedTuple):
    """One step in each environment."""

    reward: Tensor  # (environments,)
    terminated: Tensor  # (environments,): the episode is over, and no more reward follows.
    truncated: Tensor  # (environments,): it was cut off, for example by a time limit.
    following: Tensor  # (environments, numbers): the observation after the step, before an environment is reset.


class Environments:
    """This rank's environments.

    Attributes:
        observations: What the next actions respond to, of shape (environments, numbers).
    """

    def __init__(self, name: str, numbers: Sequence[int], seed: int) -> None:
        self.numbers, self.seed = numbers, seed
        make = partial(make_environment, name)
        # Not reset by the library, which would draw on from the seed of the first episode.
        self.vector = SyncVectorEnv([make] * len(numbers), copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self.episodes = [0] * len(numbers)
        self.actions: list[list[np.ndarray]] = [[] for _ in numbers]  # Since the start of the episode.
        self.reset(np.ones(len(numbers), dtype=bool))

    def reset(self, mask: np.ndarray) -> None:
        """Start an episode in some of the environments."""
        keys = zip(self.numbers, self.episodes, strict=True)
        seeds: list[int | None] = [derive_seed(self.seed, "reset", number, episode) for number, episode in keys]
        self.observations = to_tensor(self.vector.reset(seed=seeds, options={"reset_mask": mask})[0])

    def step(self, actions: Tensor) -> Transition:
        """Take one step in each environment, and reset those whose episode ends with it."""
        valid = to_valid(actions, self.vector.single_action_space)
        observations, rewards, terminated, truncated, _ = self.vector.step(valid)
        self.observations = following = to_tensor(observations)
        ended = terminated | truncated
        for index, action in enumerate(valid):
            self.actions[index].append(action)
            if ended[index]:
                self.episodes[index] += 1
                self.actions[index] = []
        if ended.any():
            self.reset(ended)
        reward = torch.from_numpy(rewards.astype(np.float32))
        return Transition(reward, torch.from_numpy(terminated), torch.from_numpy(truncated), following)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return what each environment, by its number, is restored from."""
        shape = self.vector.single_action_space.shape or ()
        actions = [torch.from_numpy(np.array(each).reshape(len(each), *shape)) for each in self.actions]
        states = [{"episode": n, "actions": each} for n, each in zip(self.episodes, actions, strict=True)]
        return dict(zip(self.numbers, states, strict=True))

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore all environments of the run: reset each as it was, and repeat the actions of its episode.

        Gymnasium's environments cannot be saved, but what they do is a function of the seed and the actions.
        """
        own = [states[number] for number in self.numbers]
        self.episodes = [state["episode"] for state in own]
        self.actions = [list(state["actions"].clone().numpy()) for state in own]
        self.reset(np.ones(len(own), dtype=bool))
        for index, actions in enumerate(self.actions):
            for action in actions:
                observation = self.vector.envs[index].step(action)[0]
                self.observations[index] = torch.from_numpy(np.asarray(observation, dtype=np.float32))


def derive_seed(*key: int | str) -> int:
    """Return a number below 2**63 for a key: other keys, other numbers."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def generator(*key: int | str) -> torch.Generator:
    """Return a generator seeded by a key."""
    return torch.Generator().manual_seed(derive_seed(*key))


def to_tensor(observations: np.ndarray) -> Tensor:
    """Return a copy of observations, in the model's precision."""
    return torch.from_numpy(observations.astype(np.float32))


def to_valid(actions: Tensor, space: Any) -> np.ndarray:
    """Return the policy's actions as the environments take them: counted from the first one, or within the bounds."""
    if isinstance(space, Discrete):
        return actions.numpy() + space.start
    assert isinstance(space, Box)
    return np.clip(actions.numpy(), space.low, space.high)
