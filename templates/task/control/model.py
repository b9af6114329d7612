"""The model: an actor and a critic side by side, as a sequence of named blocks.

A block takes and returns one tensor, so a strategy can split the sequence between any two blocks,
and shard or recompute each of them.

    observations (4,) ── hidden0 ── features (2, 64) ── hidden1 ── ... ── head ── outputs (3,)

The outputs are a logit of each action, and the critic's value.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import ModelConfig


class Layer(nn.Module):
    """A hidden layer of the actor and one of the critic, which share no weights.

    The first maps (..., inputs) observations to (..., 2, outputs) features, the others map
    (..., 2, inputs) features to (..., 2, outputs) features.
    """

    def __init__(self, inputs: int, outputs: int, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.actor = linear(inputs, outputs, gain=math.sqrt(2))
        self.critic = linear(inputs, outputs, gain=math.sqrt(2))

    def forward(self, features: Tensor) -> Tensor:
        if self.is_first:
            # Actor and critic see the same observations.
            for_actor = features
            for_critic = features
        else:
            for_actor, for_critic = features.unbind(dim=-2)
        hidden = torch.stack(
            [
                self.actor(for_actor),
                self.critic(for_critic),
            ],
            dim=-2,
        )
        # tanh has no kink, so rounding differences between numbers of ranks do not grow from step
        # to step.
        return hidden.tanh()


class Head(nn.Module):
    """Maps (..., 2, width) features to (..., actions + 1) outputs: logits, and the value."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        # Small weights make all actions about equally likely at first.
        self.policy = linear(width, actions, gain=0.01)
        self.value = linear(width, 1, gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        for_actor, for_critic = features.unbind(dim=-2)
        return torch.cat([self.policy(for_actor), self.value(for_critic)], dim=-1)


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Build a linear layer with orthogonal weights and a bias of 0 (Andrychowicz et al. 2021)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def build_model(
    config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block
) -> nn.Sequential:
    """Build the model on the CPU, with weights drawn from PyTorch's global generator.

    Pass each block through ``wrap`` as soon as it is built: a strategy compiles, shards or drops it
    there, so that a rank need not hold the whole model.
    """
    observation_size, num_actions = config.sizes()
    # Names of blocks begin the names of parameters in checkpoints.
    blocks = OrderedDict[str, nn.Module]()
    for number in range(config.depth):
        is_first = number == 0
        inputs = observation_size if is_first else config.width
        blocks[f"hidden{number}"] = wrap(Layer(inputs, config.width, is_first))
    blocks["head"] = wrap(Head(config.width, num_actions))
    return nn.Sequential(blocks)
