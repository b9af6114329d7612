"""The policy: what the model's outputs say about actions, and how every rank gets those that it needs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from ..config import ModelConfig
from ..runtime import all_gather_object


def read_outputs(outputs: Tensor, is_discrete: bool) -> tuple[Distribution, Tensor]:
    """Return the distribution over actions, and the (batch,) values, of (batch, columns) outputs."""
    policy, value = outputs.float()[:, :-1], outputs.float()[:, -1]
    if is_discrete:
        return Categorical(logits=policy, validate_args=False), value
    mean, log_std = policy.chunk(2, dim=1)
    return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False), value


def draw_actions(policy: Distribution, noise: Tensor) -> Tensor:
    """Return the actions that random numbers stand for, so that these may come from any generator.

    Args:
        policy: A distribution for each of a number of environments.
        noise: Uniform random numbers of shape (environments,) for discrete actions, which are drawn by the inverse of
            the cumulative distribution; normal ones of shape (environments, action_dims) for continuous actions.
    """
    if isinstance(policy, Categorical):
        ends = policy.probs.cumsum(dim=1)[:, :-1]  # Rounding may leave the last end below 1.
        return (noise[:, None] >= ends).sum(dim=1)
    return policy.mean + policy.stddev * noise


class Policy:
    """The model as a policy, which each rank can ask about the environments that it steps.

    Ranks that share the samples of a batch, because each holds a part of the model, step the same environments. Only
    some of them hold the outputs; the first of these broadcasts them, so that all do the same.
    """

    def __init__(self, strategy: Any, config: ModelConfig) -> None:
        assert config.actions is not None and config.action_dims is not None
        self.strategy, self.action_dims, self.is_discrete = strategy, config.action_dims, config.action_dims == 0
        self.columns = config.actions + 2 * config.action_dims + 1
        shares = all_gather_object(strategy.dp_rank) if dist.is_initialized() else [0]
        groups = [[rank for rank, share in enumerate(shares) if share == wanted] for wanted in sorted(set(shares))]
        self.is_first = not dist.is_initialized() or dist.get_rank() in [group[0] for group in groups]
        self.group: dist.ProcessGroup | None = None
        self.source: int | None = None  # The rank in the group that holds the outputs; known from the first call on.
        if any(len(group) > 1 for group in groups):
            self.group, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo")

    @torch.no_grad()
    def __call__(self, observations: Tensor) -> tuple[Distribution, Tensor]:
        """Return the distribution over actions, and the values, for (environments, numbers) observations on the CPU.

        A collective: all ranks have to call it equally often.
        """
        outputs = self.strategy.predict(observations.to(self.strategy.device))
        if self.group is not None:
            outputs = self.broadcast(outputs, len(observations))
        return read_outputs(outputs.cpu(), self.is_discrete)

    def broadcast(self, outputs: Tensor | None, length: int) -> Tensor:
        """Return the outputs on each rank of the group, whether it holds them or not."""
        if self.source is None:
            holders: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(holders, outputs is not None, self.group)
            self.source = holders.index(True)
        everywhere = torch.empty(length, self.columns) if outputs is None else outputs.float().cpu()
        dist.broadcast(everywhere, group=self.group, group_src=self.source)
        return everywhere
