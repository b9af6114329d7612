"""A model for task=language with what breaks strategies; test_hostile_model.py puts it into projects."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig

BYTES = 256
TIED, UNUSED = False, False


class Embedding(nn.Module):
    """An embedding, BatchNorm over its features, dropout, and a frozen parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.norm(self.byte(inputs).transpose(1, 2)).transpose(1, 2)
        return self.dropout(features + self.frozen)


class Block(nn.Module):
    """Attention with a mask of -inf, which is saved, and rotary angles, which are not; and a perceptron."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1))
        rates = 100 ** -torch.linspace(0, 1, self.head_width // 2)
        self.register_buffer("angles", torch.outer(torch.arange(context), rates), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4).unbind()
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, attn_mask=self.mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def rotate(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)


class Head(nn.Module):
    """Logits, and a parameter on which they do not depend."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, BYTES, bias=False)
        if UNUSED:
            self.unused = nn.Parameter(torch.zeros(width))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


def build_model(config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Sequential:
    embedding, head = Embedding(config.width), Head(config.width)
    if TIED:
        head.linear.weight = embedding.byte.weight
    blocks: OrderedDict[str, nn.Module] = OrderedDict(embedding=wrap(embedding))
    for i in range(config.layers):
        blocks[f"block{i}"] = wrap(Block(config.width, config.heads, config.context))
    blocks["head"] = wrap(head)
    return nn.Sequential(blocks)
