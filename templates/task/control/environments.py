"""Environments: copies of one of Gymnasium's, numbered over the whole run and stepped as a batch.

    8 environments on 2 ranks        rank 0 steps 0 2 4 6, rank 1 steps 1 3 5 7

What happens in an environment depends on its number, not on the rank that steps it: each of its episodes starts with a
seed of its own, a hash of (run.seed, number of the environment, number of the episode).
"""

import time
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from ..config import ControlConfig
from ..launch import make_environment


class Transition(NamedTuple):
    """One step in each environment; all but the observations are of shape (environments,)."""

    reward: Tensor
    terminated: Tensor  # The episode is over, and no more reward follows.
    truncated: Tensor  # It was cut off, for example by a time limit.
    next_observation: Tensor  # (environments, numbers): after the step, before an environment is reset.
    episode_return: Tensor  # The sum of the episode's rewards up to this step, without discount.
    episode_length: Tensor  # Its steps up to this one.


class Environments:
    """This rank's environments.

    Attributes:
        observations: What the next actions respond to, of shape (environments, numbers).
        problem: The first reward or observation that was not finite, in words. It becomes 0, so that this rank can go
            on to where all ranks learn of it.
        seconds: Time spent in stepping and resetting them.
    """

    def __init__(self, control: ControlConfig, numbers: Sequence[int], seed: int) -> None:
        self.numbers, self.seed, self.seconds = numbers, seed, 0.0
        make = partial(make_environment, control)
        # Not reset by the library, which would draw on from the seed of the first episode.
        self.vector = SyncVectorEnv([make] * len(numbers), copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self.problem: str | None = None
        self.episodes = [0] * len(numbers)
        self.actions: list[list[np.ndarray]] = [[] for _ in numbers]  # Since the start of the episode.
        self.returns = np.zeros(len(numbers))
        self.reset(np.ones(len(numbers), dtype=bool))

    def reset(self, mask: np.ndarray) -> None:
        """Start an episode in some of the environments."""
        keys = zip(self.numbers, self.episodes, strict=True)
        seeds: list[int | None] = [derive_seed(self.seed, "reset", number, episode) for number, episode in keys]
        self.returns[mask] = 0
        self.observations = self.read("observation", self.vector.reset(seed=seeds, options={"reset_mask": mask})[0])

    def step(self, actions: Tensor) -> Transition:
        """Take one step in each environment, and reset those whose episode ends with it."""
        start = time.perf_counter()
        valid = to_valid(actions, self.vector.single_action_space)
        for index, action in enumerate(valid.copy()):  # An environment may change the action that it gets.
            self.actions[index].append(action)
        observations, rewards, terminated, truncated, _ = self.vector.step(valid)
        self.observations = next_observations = self.read("observation", observations)
        reward, done = self.read("reward", rewards), terminated | truncated
        self.returns += rewards
        episode_return = torch.from_numpy(self.returns.copy())
        episode_length = torch.tensor([len(each) for each in self.actions])
        for index in np.flatnonzero(done).tolist():
            self.episodes[index] += 1
            self.actions[index] = []
        if done.any():
            self.reset(done)
        self.seconds += time.perf_counter() - start
        ends = torch.from_numpy(terminated.copy()), torch.from_numpy(truncated.copy())
        return Transition(reward, *ends, next_observations, episode_return, episode_length)

    def read(self, name: str, values: np.ndarray) -> Tensor:
        """Return a copy of what the environments gave, in the model's precision; note what is not finite."""
        read = values.astype(np.float32)
        if not np.isfinite(read).all():
            index = int(np.argwhere(~np.isfinite(read))[0, 0])
            step = f"step {len(self.actions[index])} of episode {self.episodes[index]}"
            self.problem = self.problem or f"the {name} of environment {self.numbers[index]} in {step} is not finite"
            read = np.nan_to_num(read, nan=0, posinf=0, neginf=0)
        return torch.from_numpy(read)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return what each environment, by its number, is restored from."""
        shape = self.vector.single_action_space.shape or ()
        actions = [torch.from_numpy(np.array(each).reshape(len(each), *shape)) for each in self.actions]
        columns = {"episode": self.episodes, "actions": actions, "return": self.returns.tolist()}
        columns["observation"] = list(self.observations.clone())
        states = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
        return dict(zip(self.numbers, states, strict=True))

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore all environments of the run: reset each as it was, and repeat the actions of its episode.

        Gymnasium's environments cannot be saved, but what they do is a function of the seed and the actions.

        Raises:
            ValueError: if it is not: the observation is then another one, or the rewards are others, than when saved.
        """
        own = [states[number] for number in self.numbers]
        self.episodes = [state["episode"] for state in own]
        self.actions = [list(state["actions"].clone().numpy()) for state in own]
        self.reset(np.ones(len(own), dtype=bool))
        for index, state in enumerate(own):
            for action in self.actions[index]:
                observation, reward, *_ = self.vector.envs[index].step(action.copy())
                self.observations[index] = torch.from_numpy(np.asarray(observation, dtype=np.float32))
                self.returns[index] += reward
            is_same = torch.equal(self.observations[index], state["observation"])
            if not is_same or self.returns[index] != state["return"]:
                raise ValueError(
                    f"environment {self.numbers[index]} does not repeat its episode: it must draw random numbers only "
                    "from self.np_random, and keep nothing from one episode to the next"
                )


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
    """Return the policy's actions as the environments take them: counted from the first one, or within the bounds.

    Where both bounds of a continuous action are finite, the policy's -1 and 1 stand for them, as with Gymnasium's
    ``RescaleAction``. The policy's distribution is that of the action before.
    """
    if isinstance(space, Discrete):
        return actions.numpy() + space.start
    assert isinstance(space, Box)
    given, low, high = actions.numpy().astype(np.float64), space.low.astype(np.float64), space.high.astype(np.float64)
    is_bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        rescaled = low + (given.clip(-1, 1) + 1) / 2 * (high - low)
    return np.where(is_bounded, rescaled, given).clip(low, high).astype(space.dtype)
