"""Experience: what the policy did in the environments, and the batches that it is trained on.

An epoch is one pass over the experience. Every ``control.passes`` epochs it is collected anew, with the policy of that
moment. A global batch takes the same number of steps of each environment, so a rank needs only those of its own:

    global batch of 4, of 4 environments with 2 steps each      2 ranks: rank 0 has environments 0 and 2

    environment    0  1  2  3        rank 0 reads  0b 2a | 0a 2b
    batch 0        b  a  a  b        rank 1 reads  1a 3b | 1b 3a
    batch 1        a  b  b  a        so no experience is sent
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ControlConfig, UserError
from ..runtime import Context, all_gather_object
from .environments import Environments, generator
from .policy import Policy, draw_actions

STEPS_PER_MESSAGE = 32  # Ranks that step environments ask each other only so often whether one of them is to stop.
SAMPLE = ("observation", "action", "log_prob", "advantage", "return")  # What a step is trained on.
EPISODE = ("done", "episode_return", "episode_length")  # What is known of its episode.


class Experience:
    """Both sampler and loader of the training set, because what there is to read depends on the policy.

    Args:
        control: How much experience is collected, and how often.
        policy: The model that acts and is trained.
        batch_size: Steps per global batch.
        seed: The run's.
        guard: Returns a context manager for some steps, entered equally often on every rank; it may raise to stop.
        estimate_advantages: See ``dataset.py``.
        aggregate_metrics: See ``dataset.py``.

    Attributes:
        steps_per_epoch: Optimizer steps per pass.
        environment_steps: Steps taken so far, in all environments of the run.
        metrics: What records say of the episodes that ended in this experience, the same on every rank.
    """

    def __init__(
        self,
        control: ControlConfig,
        policy: Policy,
        batch_size: int,
        seed: int,
        guard: Context,
        estimate_advantages: Callable[..., Tensor],
        aggregate_metrics: Callable[[dict[str, np.ndarray]], dict[str, float]],
    ) -> None:
        self.control, self.policy, self.batch_size, self.seed, self.guard = control, policy, batch_size, seed, guard
        self.estimate_advantages, self.aggregate_metrics = estimate_advantages, aggregate_metrics
        self.numbers = range(policy.strategy.dp_rank, control.environments, policy.strategy.dp_size)
        self.environments = Environments(control, self.numbers, seed)
        self.per_environment = batch_size // control.environments
        self.steps_per_epoch = control.steps // self.per_environment
        self.epoch = self.start = self.environment_steps = 0
        self.rollout = -1  # Number of the collection that is trained on.
        self.own: dict[str, Tensor] = {}  # By name: this rank's environments, then steps, then numbers.
        self.orders: list[Tensor] = []  # Of the steps, in each pass over this experience.
        self.advantage_statistics: Tensor | None = None
        self.metrics: dict[str, float] = {}
        self.snapshot: dict[int, dict[str, Any]] | None = None  # The environments before the collection under way.

    @property
    def busy_seconds(self) -> float:
        """Return the seconds that this rank has spent in its environments."""
        return self.environments.seconds

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, and how many of its samples (over all ranks) have already been consumed."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield this rank's share of each batch of the epoch; nothing if its experience has been replaced."""
        rollout, number = divmod(self.epoch, self.control.passes)
        if rollout < self.rollout:
            return
        if rollout > self.rollout:
            self.collect(rollout)
        if self.advantage_statistics is None:  # Not gathered in load_state_dict, which may fail on one rank.
            first = rollout * self.control.passes
            self.orders = [self.order(epoch) for epoch in range(first, first + self.control.passes)]
            self.advantage_statistics = self.gather_statistics()
        for batch in range(-(-self.start // self.batch_size), self.steps_per_epoch):
            steps = self.orders[number][:, batch * self.per_environment : (batch + 1) * self.per_environment]
            own = {name: take(self.own[name], steps).flatten(0, 1) for name in SAMPLE}
            mean, std = self.advantage_statistics[number, batch].float()
            own["advantage"] = (own["advantage"] - mean) / (std + 1e-8)
            yield own.pop("observation"), own | self.loss_settings()

    def loss_settings(self) -> dict[str, float]:
        """Return the settings of the loss, which are the same for every sample."""
        return {name: getattr(self.control, name) for name in ("clip", "value_weight", "entropy_weight")}

    def blank_batch(self) -> tuple[Tensor, dict[str, Any]]:
        """Return a batch of zeros with the shapes of any other, for which no environment takes a step."""
        samples = len(self.numbers) * self.per_environment
        observations = self.environments.observations.new_zeros(samples, self.environments.observations.shape[1])
        shape = (samples,) if self.policy.is_discrete else (samples, self.policy.action_dims)
        actions = torch.zeros(shape, dtype=torch.int64 if self.policy.is_discrete else torch.float32)
        others = {name: torch.zeros(samples) for name in ("log_prob", "advantage", "return")}
        return observations, {"action": actions, **others} | self.loss_settings()

    def order(self, epoch: int) -> Tensor:
        """Return an order of the steps for each of this rank's environments, of shape (environments, steps)."""
        steps, key = self.control.steps, (self.seed, "order", epoch)
        return torch.stack([torch.randperm(steps, generator=generator(*key, number)) for number in self.numbers])

    def collect(self, rollout: int) -> None:
        """Step the environments with the current policy; a collective.

        If a stop signal interrupts it, the run saves the environments as they were before, and resumes there.
        """
        self.snapshot = self.environments.state()
        self.policy.strategy.module.eval()
        transitions = []
        for noise in self.draw_noise(rollout).split(STEPS_PER_MESSAGE, dim=1):
            with self.guard():
                transitions += [self.step(of_step) for of_step in noise.unbind(dim=1)]
        own = {name: torch.stack([each[name] for each in transitions], dim=1) for name in transitions[0]}
        own["next_value"] = self.estimate_next_values(own["value"], own["next_observation"], own["truncated"])
        self.policy.strategy.module.train()
        own["done"] = own["terminated"] | own["truncated"]
        parts = (own[name] for name in ("reward", "value", "next_value", "terminated", "done"))
        own["advantage"] = self.estimate_advantages(*parts, self.control)
        own["return"] = own["advantage"] + own["value"]
        self.own = {name: own[name] for name in (*SAMPLE, *EPISODE)}
        self.rollout, self.snapshot, self.advantage_statistics = rollout, None, None
        self.environment_steps += self.control.steps * self.control.environments

    def draw_noise(self, rollout: int) -> Tensor:
        """Return random numbers for the actions in this rank's environments: (environments, steps[, action_dims])."""
        keys = [(self.seed, "action", number, rollout) for number in self.numbers]
        if self.policy.is_discrete:
            return torch.stack([torch.rand(self.control.steps, generator=generator(*key)) for key in keys])
        shape = self.control.steps, self.policy.action_dims
        return torch.stack([torch.randn(shape, generator=generator(*key)) for key in keys])

    def step(self, noise: Tensor) -> dict[str, Tensor]:
        """Take one step in each environment with the current policy; returns all that is known of it, by name."""
        observations = self.environments.observations
        policy, values = self.policy(observations)
        actions = draw_actions(policy, noise)
        known = {"observation": observations, "action": actions, "log_prob": policy.log_prob(actions), "value": values}
        return known | self.environments.step(actions)._asdict()

    def estimate_next_values(self, values: Tensor, next_observations: Tensor, truncated: Tensor) -> Tensor:
        """Return what the critic expects after each step.

        That is the value of the next step, but after the last one, and after one that cut the episode off, the critic
        is asked about an observation that no action followed.
        """
        next_values, is_asked = values.roll(-1, dims=1), truncated.clone()
        is_asked[:, -1] = True
        next_values[is_asked] = self.policy(next_observations[is_asked])[1]
        return next_values

    def gather_statistics(self) -> Tensor:
        """Return the mean and the standard deviation of the advantages of each global batch until the next collection.

        The order of the steps is known for all passes, so one message does for all of their batches, and for the
        metrics of the episodes. Rejects rewards and observations that were not finite, on all ranks. A collective.
        """
        shares = self.gather((self.environments.problem, self.sum_advantages(), self.ended_episodes()))
        problems, sums, episodes = zip(*shares, strict=True)
        if problem := next(filter(None, problems), None):
            raise UserError(f"{problem}; the run ends with its last checkpoint: fix the environment")
        self.metrics = {"environment_steps": self.environment_steps}
        ended = {number: ends for share in episodes for number, ends in share.items()}
        returns, lengths = np.concatenate([ended[number] for number in sorted(ended)]).T
        if len(returns):
            self.metrics |= self.aggregate_metrics({"return": returns, "length": lengths})
        mean, square = (sum(sums) / self.batch_size).unbind(dim=2)
        return torch.stack([mean, (square - mean.square()).clamp(min=0).sqrt()], dim=2)

    def sum_advantages(self) -> Tensor:
        """Return the sums of this rank's advantages and of their squares: (passes, steps per epoch, 2)."""
        sums = []
        for order in self.orders:
            batches = take(self.own["advantage"].double(), order).unflatten(1, (-1, self.per_environment))
            sums.append(torch.stack([batches.sum(dim=(0, 2)), batches.square().sum(dim=(0, 2))], dim=1))
        return torch.stack(sums)

    def ended_episodes(self) -> dict[int, np.ndarray]:
        """Return the (return, length) of the episodes that ended in each of this rank's environments."""
        done = self.own["done"]
        both = torch.stack([self.own["episode_return"], self.own["episode_length"].double()], dim=2)
        return {number: both[index][done[index]].numpy() for index, number in enumerate(self.numbers)}

    def gather(self, own: Any) -> list[Any]:
        """Return what the ranks have, by share in order; ranks with the same share have the same. A collective."""
        if not dist.is_initialized():
            return [own]
        everyone = all_gather_object((self.policy.strategy.dp_rank, own) if self.policy.is_first else None)
        return [share for _, share in sorted(filter(None, everyone), key=lambda each: each[0])]

    def state_dict(self) -> dict[str, Any]:
        """Return the environments and the experience of the whole run, by environment, on rank 0; a collective."""
        own = self.snapshot or self.environments.state()
        for index, number in enumerate(self.numbers):
            own[number]["experience"] = {name: values[index].clone() for name, values in self.own.items()}
        shares: list[Any] = [own]
        if dist.is_initialized():
            shares = [None] * dist.get_world_size()
            dist.gather_object(own if self.policy.is_first else {}, shares if dist.get_rank() == 0 else None)
        states = {number: state for share in shares if share for number, state in share.items()}
        collected = {"rollout": self.rollout, "environment_steps": self.environment_steps}
        return {"layout": self.layout(), **collected, "environments": [states[number] for number in sorted(states)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's share of what any number of ranks saved. Rejects another layout.

        Raises:
            ValueError: if an environment does not repeat its episode, or experience is missing.
        """
        for name, value in self.layout().items():
            if state["layout"][name] != value:
                raise UserError(
                    f"{name} is {value}, and the run that was saved has {state['layout'][name]}; give the same, or "
                    "start another run.dir from its weights: --model.weights PATH"
                )
        self.environments.restore(state["environments"])
        self.rollout, self.environment_steps = state["rollout"], state["environment_steps"]
        self.advantage_statistics = None
        if self.rollout >= 0:
            own = [state["environments"][number]["experience"] for number in self.numbers]
            self.own = {name: torch.stack([each[name] for each in own]) for name in (*SAMPLE, *EPISODE)}
            if any(values.shape[1] != self.control.steps for values in self.own.values()):
                raise ValueError(f"the experience has not {self.control.steps} steps of each environment")

    def layout(self) -> dict[str, Any]:
        """Return the settings that the saved state depends on: a saved episode would be another one with others."""
        names = ("environment", "max_episode_steps", "environments", "steps", "passes")
        return {"run.seed": self.seed} | {f"control.{name}": getattr(self.control, name) for name in names}


def take(values: Tensor, steps: Tensor) -> Tensor:
    """Return some steps of each environment: (environments, all steps, ...) to (environments, steps, ...)."""
    return values[torch.arange(len(values))[:, None], steps]
