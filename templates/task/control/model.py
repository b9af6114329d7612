"""The model: an actor and a critic side by side, as a sequence of named blocks.

A block takes and returns one tensor, so the sequence can be wrapped, sharded or split between any two blocks.

    observations (4,) ── stem ── (2, 64) features ── hidden0 ── ... ── head ── logits of the actions, and the value (3,)
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
#:: if cookiecutter.__shards_layers ::#
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
#:: endif ::#

from .config import ModelConfig
from .splitting import place


class Layer(nn.Module):
    """A hidden layer of the actor and one of the critic, which share nothing: to (batch, 2, outputs) features.

    Args:
        inputs: Numbers in an observation, or features of the layer before.
        outputs: Features of the layer.
        is_first: Whether actor and critic get the same (batch, inputs), or each their own of (batch, 2, inputs).
    """

    def __init__(self, inputs: int, outputs: int, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.actor = linear(inputs, outputs, gain=math.sqrt(2))
        self.critic = linear(inputs, outputs, gain=math.sqrt(2))

    def forward(self, x: Tensor) -> Tensor:
        for_actor, for_critic = (x, x) if self.is_first else x.unbind(dim=1)
        # tanh has no kink, so that rounding differences under another split do not grow from step to step.
        return torch.stack([self.actor(for_actor), self.critic(for_critic)], dim=1).tanh()
    #:: if cookiecutter.__shards_layers ::#

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Compute some features on each rank, and gather them to all ranks."""
        return {name: ColwiseParallel(output_layouts=Replicate()) for name in ("actor", "critic")}
    #:: endif ::#


class Head(nn.Module):
    """Maps (batch, 2, width) features to what ``policy.py`` reads: the policy, and the value in the last column.

    The policy is (batch, actions) logits; or, for continuous actions, the mean and the logarithm of the standard
    deviation of each number, (batch, 2 * action_dims). The latter is the same for all observations.
    """

    def __init__(self, width: int, actions: int, action_dims: int) -> None:
        super().__init__()
        # Small weights: at first, all actions are about equally likely.
        self.policy = linear(width, actions + action_dims, gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(action_dims)) if action_dims else None
        self.value = linear(width, 1, gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        for_actor, for_critic = features.unbind(dim=1)
        columns = [self.policy(for_actor)]
        if self.log_std is not None:
            columns.append(self.log_std.expand(len(features), -1))
        return torch.cat([*columns, self.value(for_critic)], dim=1)
    #:: if cookiecutter.__shards_layers ::#

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Map some of the features to all outputs on each rank; the sum over the ranks gives the outputs."""
        return {name: RowwiseParallel(input_layouts=Replicate()) for name in ("policy", "value")}
    #:: endif ::#


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Build a linear layer with orthogonal weights and without bias at first (Andrychowicz et al. 2021)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def build_model(config: ModelConfig) -> nn.Sequential:
    """Build the model on the CPU, with weights drawn from PyTorch's global generator."""
    # Config has set them to those of the environment.
    assert config.observations is not None and config.actions is not None and config.action_dims is not None
    stem = place(Layer(config.observations, config.width, is_first=True))
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for i in range(config.depth - 1):
        blocks[f"hidden{i}"] = place(Layer(config.width, config.width, is_first=False))
    blocks["head"] = place(Head(config.width, config.actions, config.action_dims))
    return nn.Sequential(blocks)


#:: include "task/shared/blocks.py" ::#
