"""Experience: what the policy did in the environments, and the batches that it is trained on.

An epoch is one pass over the experience. Every ``control.passes`` epochs it is collected anew, with the policy of that
moment. A global batch takes the same number of steps of each environment, so a rank needs only those of its own:

    global batch of 4, of 4 environments with 2 steps each      2 ranks: rank 0 has environments 0 and 2

    environment    0  1  2  3        rank 0 reads  0b 2a | 0a 2b
    batch 0        b  a  a  b        rank 1 reads  1a 3b | 1b 3a
    batch 1        a  b  b  a        nothing but gradients is sent in a step
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ControlConfig, DataConfig, ModelConfig, UserError
from ..runtime import all_gather_object
from .environments import Environments, generator
from .policy import Policy, draw_actions


class Experience:
    """The training set. It depends on the model, so it builds its own loader: it is both sampler and loader.

    Args:
        control: How much experience is collected, and how often.
        model: The sizes of the model.
        estimate_advantages: See ``dataset.py``.

    Attributes:
        steps_per_epoch: Optimizer steps per pass.
        environment_steps: Steps taken so far, in all environments of the run.
    """

    def __init__(self, control: ControlConfig, model: ModelConfig, estimate_advantages: Callable[..., Tensor]) -> None:
        self.control, self.model, self.estimate_advantages = control, model, estimate_advantages
        self.epoch = self.start = 0
        self.rollout = -1  # Number of the collection that is trained on.
        self.environment_steps = 0
        self.own: dict[str, Tensor] = {}  # By name: this rank's environments, then steps, then numbers.
        self.moments = torch.empty(0)

    def build_loader(
        self, strategy: Any, config: DataConfig, seed: int, register: Callable[..., None]
    ) -> tuple["Experience", "Experience"]:
        """Make this rank's environments; returns the sampler and the loader of its share of each global batch."""
        self.strategy, self.seed, self.batch_size = strategy, seed, config.global_batch_size
        self.policy = Policy(strategy, self.model)
        self.numbers = range(strategy.dp_rank, self.control.environments, strategy.dp_size)
        self.environments = Environments(self.control.environment, self.numbers, seed)
        self.per_environment = self.batch_size // self.control.environments
        self.steps_per_epoch = self.control.steps // self.per_environment
        register("experience", self)
        return self, self

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, and how many of its samples (over all ranks) have already been consumed."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        rollout, number = divmod(self.epoch, self.control.passes)
        if rollout != self.rollout:
            self.collect(rollout)
        order = self.order(self.epoch)
        for batch in range(-(-self.start // self.batch_size), self.steps_per_epoch):
            steps = order[:, batch * self.per_environment : (batch + 1) * self.per_environment]
            own = {name: take(values, steps).flatten(0, 1) for name, values in self.own.items()}
            mean, std = self.moments[number, batch].float()
            own["advantage"] = (own["advantage"] - mean) / (std + 1e-8)
            weights = {name: getattr(self.control, name) for name in ("clip", "value_weight", "entropy_weight")}
            yield own.pop("observation"), own | weights

    def order(self, epoch: int) -> Tensor:
        """Return an order of the steps for each of this rank's environments, of shape (environments, steps)."""
        steps, key = self.control.steps, (self.seed, "order", epoch)
        return torch.stack([torch.randperm(steps, generator=generator(*key, number)) for number in self.numbers])

    def collect(self, rollout: int) -> None:
        """Step the environments with the current policy; a collective."""
        self.strategy.module.eval()
        noise, taken = self.draw_noise(rollout), []
        for step in range(self.control.steps):
            observations = self.environments.observations
            policy, values = self.policy(observations)
            actions = draw_actions(policy, noise[:, step])
            log_probs = policy.log_prob(actions)
            taken.append((observations, actions, log_probs, values, *self.environments.step(actions)))
        columns = [torch.stack(each, dim=1) for each in zip(*taken, strict=True)]
        observations, actions, log_probs, values, rewards, terminated, truncated, following = columns
        # An episode that was cut off goes on after its last observation, which no action followed.
        _, following_values = self.policy(following.flatten(0, 1))
        self.strategy.module.train()
        following_values = following_values.view_as(values)
        ended = terminated | truncated
        advantages = self.estimate_advantages(rewards, values, following_values, terminated, ended, self.control)
        self.own = {"observation": observations, "action": actions, "log_prob": log_probs}
        self.own |= {"advantage": advantages, "return": advantages + values}
        self.rollout = rollout
        self.environment_steps += self.control.steps * self.control.environments
        self.measure_moments()

    def draw_noise(self, rollout: int) -> Tensor:
        """Return random numbers for the actions in this rank's environments: (environments, steps[, action_dims])."""
        keys = [(self.seed, "action", number, rollout) for number in self.numbers]
        if self.policy.is_discrete:
            return torch.stack([torch.rand(self.control.steps, generator=generator(*key)) for key in keys])
        shape = self.control.steps, self.model.action_dims or 0
        return torch.stack([torch.randn(shape, generator=generator(*key)) for key in keys])

    def measure_moments(self) -> None:
        """Compute the mean and standard deviation of the advantages of each global batch until the next collection.

        The order of the steps is known for all passes, so one message does for all of their batches.
        """
        sums = []
        for epoch in range(self.rollout * self.control.passes, (self.rollout + 1) * self.control.passes):
            advantages = take(self.own["advantage"].double(), self.order(epoch))
            batches = advantages.unflatten(1, (-1, self.per_environment))
            sums.append(torch.stack([batches.sum(dim=(0, 2)), batches.square().sum(dim=(0, 2))], dim=1))
        total = sum(self.gather(torch.stack(sums)).values())
        mean, square = (total / self.batch_size).unbind(dim=2)  # Each of shape (passes, steps per epoch).
        self.moments = torch.stack([mean, (square - mean.square()).clamp(min=0).sqrt()], dim=2)

    def gather(self, own: Any) -> dict[int, Any]:
        """Return what the ranks have, by share in order; ranks with the same share have the same. A collective."""
        if not dist.is_initialized():
            return {0: own}
        everyone = all_gather_object((self.strategy.dp_rank, own if self.policy.is_first else None))
        return dict(sorted((share, value) for share, value in everyone if value is not None))

    def state_dict(self) -> dict[str, Any]:
        """Return the environments and the experience of the whole run, by environment; a collective."""
        own = self.environments.state()
        for index, number in enumerate(self.numbers):
            own[number]["experience"] = {name: values[index].clone() for name, values in self.own.items()}
        states = {number: state for share in self.gather(own).values() for number, state in share.items()}
        collected = {"rollout": self.rollout, "environment_steps": self.environment_steps}
        return {"layout": self.layout(), **collected, "environments": [states[number] for number in sorted(states)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's share of what any number of ranks saved; a collective. Rejects another layout."""
        for name, value in self.layout().items():
            if state["layout"][name] != value:
                raise UserError(
                    f"control.{name} is {value}, and the run that was saved has {state['layout'][name]}; give the "
                    "same, or start another run.dir from its weights: --model.weights PATH"
                )
        self.environments.restore(state["environments"])
        self.rollout, self.environment_steps = state["rollout"], state["environment_steps"]
        if self.rollout >= 0:
            own = [state["environments"][number]["experience"] for number in self.numbers]
            self.own = {name: torch.stack([each[name] for each in own]) for name in own[0]}
            self.measure_moments()

    def layout(self) -> dict[str, Any]:
        """Return the settings that the saved state depends on."""
        return {name: getattr(self.control, name) for name in ("environment", "environments", "steps", "passes")}


def take(values: Tensor, steps: Tensor) -> Tensor:
    """Return some steps of each environment: (environments, all steps, ...) to (environments, steps, ...)."""
    return values[torch.arange(len(values))[:, None], steps]
