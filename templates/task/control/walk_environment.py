"""An environment whose faults can be chosen, and what collects experience in one rank's environments."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch

from support import module, settings

dataset = module("dataset")
Guard = Callable[[], AbstractContextManager[None]]


class Walk(gymnasium.Env[Any, Any]):
    """A position, moved by pushes between 0 and 4; ``fault`` says what is wrong with it."""

    fault = ""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Box(0, 4, (1,), np.float32)
        if self.fault == "init":
            raise RuntimeError("no\nlicense")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen, self.received = 0, []
        size = 2 if self.fault == "shape" else 1
        self.position = np.random.random(size) if self.fault == "global" else self.np_random.random(size)
        return self.position.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.seen += 1
        self.received.append(float(action[0]))
        self.position = self.position + action
        if self.fault == "in place":
            action[:] = 0
        is_bad = self.fault == "reward" and self.seen == 3
        observation = self.position if self.fault != "observation" or self.seen != 3 else self.position * np.nan
        return observation.astype(np.float32), math.nan if is_bad else 1.0, False, False, {}


gymnasium.register("Walk-v0", Walk, max_episode_steps=50)
gymnasium.register("Endless-v0", Walk)
gymnasium.register("Image-v0", lambda: gymnasium.wrappers.ReshapeObservation(Walk(), (1, 1, 1)), max_episode_steps=50)
gymnasium.register("Random-v0", Walk, max_episode_steps=50, nondeterministic=True)
WALK = ("--control.environment", "Walk-v0")


def build(*words: str, dp_rank: int = 0, dp_size: int = 1, guard: Guard = nullcontext) -> Any:
    """Return the experience of one rank, with the model's initial weights as its policy."""
    chosen = settings(*words)
    torch.manual_seed(0)
    model = module("model").build_model(chosen.model)
    cpu = torch.device("cpu")
    strategy = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size, device=cpu, module=model, predict=model)
    rollouts, _ = dataset.build_datasets(chosen)
    return rollouts.build_loader(strategy, chosen.data, chosen.run.seed, lambda *_: None, guard)[0]


def advance(experience: Any, epoch: int) -> list[Any]:
    """Return the batches of an epoch."""
    experience.set_epoch(epoch)
    return list(experience)


def same(one: Any, other: Any) -> bool:
    """Return whether two states are bitwise the same."""
    pairs = zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
