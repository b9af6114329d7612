"""The model: an actor and a critic side by side, as a sequence of named blocks.

A block takes and returns one tensor, so the sequence can be split, sharded or recomputed between any two blocks.

    observations (4,) ── hidden0 ── (2, 64) features ── hidden1 ── ... ── head ── logits of actions, and the value (3,)
"""

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import ModelConfig


class Layer(nn.Module):
    """A hidden layer of the actor and one of the critic, which share nothing: to (..., 2, outputs) features.

    The first layer takes (..., inputs) observations, the others (..., 2, inputs) features.
    """

    def __init__(self, inputs: int, outputs: int, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.actor = linear(inputs, outputs, gain=math.sqrt(2))
        self.critic = linear(inputs, outputs, gain=math.sqrt(2))

    def forward(self, x: Tensor) -> Tensor:
        for_actor, for_critic = (x, x) if self.is_first else x.unbind(dim=-2)
        # tanh has no kink, so that rounding differences under another split do not grow from step to step.
        return torch.stack([self.actor(for_actor), self.critic(for_critic)], dim=-2).tanh()


class Head(nn.Module):
    """Maps (..., 2, width) features to (..., actions + 1): a logit of each action, and the value."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        # Small weights: at first, all actions are about equally likely.
        self.policy = linear(width, actions, gain=0.01)
        self.value = linear(width, 1, gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        for_actor, for_critic = features.unbind(dim=-2)
        return torch.cat([self.policy(for_actor), self.value(for_critic)], dim=-1)


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Build a linear layer with orthogonal weights and without bias at first (Andrychowicz et al. 2021)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def build_model(config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Sequential:
    """Build the model on the CPU, with weights drawn from PyTorch's global generator.

    Pass each block through ``wrap`` as soon as it is built, so that a strategy can compile, shard or drop it there.
    """
    observations, actions = config.sizes()
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(config.depth):
        inputs = config.width if i else observations
        blocks[f"hidden{i}"] = wrap(Layer(inputs, config.width, is_first=i == 0))
    blocks["head"] = wrap(Head(config.width, actions))
    return nn.Sequential(blocks)
