"""The model: a GPT (Radford et al. 2019), as blocks that each take and return one tensor."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig


class Embedding(nn.Module):
    """Maps (batch, time) tokens, int64, to (batch, time, width) features."""

    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        # The first LayerNorm divides by this scale: it is large beside the optimizer's first steps.
        nn.init.normal_(self.byte.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.byte(inputs) + self.position.weight[: inputs.shape[1]]


class Block(nn.Module):
    """Maps (batch, time, width) features by causal attention, then a perceptron, to others."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        # Rows are ordered by head, so that a contiguous shard of them is whole heads.
        self.qkv = linear(width, 3 * width)
        # A block starts as its shortcut, GELU has no kink, and keys have no bias, whose gradient is
        # rounding alone: so differences by rounding do not grow from step to step.
        self.out = linear(width, width, std=0.0)
        self.norm2 = nn.LayerNorm(width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, std=0.0)

    def forward(self, features: Tensor) -> Tensor:
        attended = self.attend(self.qkv(self.norm1(features)))
        features = features + self.out(attended)
        hidden = F.gelu(self.up(self.norm2(features)))
        return features + self.down(hidden)

    def attend(self, qkv: Tensor) -> Tensor:
        """Attend in each head: (batch, time, heads * 3 * head_width) to (batch, time, width)."""
        # The number of heads (-1) is not `heads` where a rank has only a shard of them.
        by_head = qkv.unflatten(2, (-1, 3, self.head_width))
        queries, keys, values = by_head.permute(3, 0, 2, 1, 4).unbind()  # (batch, heads, time, -1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


class Head(nn.Module):
    """Maps (batch, time, width) features to (batch, time, vocabulary) logits of the next token."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = linear(width, vocabulary)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(self.norm(features))


def linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    """Build a linear layer without bias, with weights drawn from a normal distribution."""
    # nn.Linear would draw weights in vain. skip_init has to be told of `with torch.device(...)`.
    device = torch.get_default_device()
    layer = nn.utils.skip_init(
        nn.Linear,
        inputs,
        outputs,
        bias=False,
        device=device,
    )
    nn.init.normal_(layer.weight, std=std)
    return layer


def build_model(
    config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block
) -> nn.Sequential:
    """Build the model on the CPU. Strategies compile, shard or drop each new block in ``wrap``."""
    blocks = OrderedDict[str, nn.Module]()  # Names of blocks begin names of parameters.
    blocks["embedding"] = wrap(Embedding(config.vocabulary, config.width, config.context))
    for number in range(config.layers):
        blocks[f"block{number}"] = wrap(Block(config.width, config.heads))
    blocks["head"] = wrap(Head(config.width, config.vocabulary))
    return nn.Sequential(blocks)
