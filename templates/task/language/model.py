"""The model: a GPT over bytes or tokens (Radford et al. 2019), as a sequence of named blocks.

A block takes and returns one tensor, so the sequence can be split, sharded or recomputed between any two blocks.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig


class Embedding(nn.Module):
    """Maps (batch, time) tokens, int64, to (batch, time, width) features: the sum of token and position embeddings."""

    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        # Large compared with the optimizer's first steps: the first LayerNorm divides rounding errors by this scale.
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.byte(inputs) + self.position.weight[: inputs.shape[1]]


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with a shortcut: (batch, time, width) to itself.

    The rows of ``qkv`` are ordered by head, then by query, key and value. So a contiguous shard of them is whole heads,
    and the block computes as many heads as it has rows for.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width)
        # So that rounding differences of another split do not grow from step to step, a block starts as its shortcut,
        # GELU has no kink, and keys have no bias: its gradient is rounding errors, which AdamW amplifies to full steps.
        self.out = linear(width, width, std=0.0)
        self.norm2 = nn.LayerNorm(width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        """Map (batch, time, heads * 3 * head_width) queries, keys, values to (batch, time, heads * head_width)."""
        q, k, v = qkv.unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Head(nn.Module):
    """Maps (batch, time, width) features to (batch, time, vocabulary) logits of the token that follows."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = linear(width, vocabulary)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(self.norm(features))


def linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    """Build a linear layer without bias, with weights drawn from a normal distribution."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, device=torch.get_default_device())  # Drawn once.
    nn.init.normal_(layer.weight, std=std)
    return layer


def build_model(config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Sequential:
    """Build the model on the CPU, with weights drawn from PyTorch's global generator.

    Pass each block through ``wrap`` as soon as it is built, so that a strategy can compile, shard or drop it there.
    """
    blocks = OrderedDict[str, nn.Module](embedding=wrap(Embedding(config.vocabulary, config.width, config.context)))
    for i in range(config.layers):
        blocks[f"block{i}"] = wrap(Block(config.width, config.heads))
    blocks["head"] = wrap(Head(config.width, config.vocabulary))
    return nn.Sequential(blocks)
