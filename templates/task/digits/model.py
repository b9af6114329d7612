"""The model: a small ResNet for 8x8 images, as a sequence of named blocks.

A block takes and returns one tensor, so the sequence can be split, sharded or recomputed between any two blocks.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig

CLASSES = 10


class Stem(nn.Module):
    """Maps (batch, 1, 8, 8) images to (batch, width, 8, 8) features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False)
        self.norm = nn.GroupNorm(ModelConfig.groups, width)

    def forward(self, images: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(images)))


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut: (batch, inputs, h, w) to (batch, outputs, h, w), halved if widths differ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(ModelConfig.groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(ModelConfig.groups, outputs)
        # A block starts as its shortcut (Goyal et al. 2017, section 5.1): early training is smooth, so that rounding
        # differences under another split do not grow from step to step. SiLU, for the same reason, has no kink.
        nn.init.zeros_(self.norm2.weight)
        self.shortcut = nn.Conv2d(inputs, outputs, 2, stride=2, bias=False) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Head(nn.Module):
    """Maps (batch, width, h, w) features to (batch, classes) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features.mean(dim=(2, 3)))


def build_model(config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Sequential:
    """Build the model on the CPU, with weights drawn from PyTorch's global generator.

    Each block passes through ``wrap`` when it is built, where a strategy may compile, shard or drop it.
    """
    narrow, wide = config.width, 2 * config.width
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=wrap(Stem(narrow)))
    for i in range(config.depth):
        blocks[f"narrow{i}"] = wrap(ResidualBlock(narrow, narrow))
    for i in range(config.depth):
        blocks[f"wide{i}"] = wrap(ResidualBlock(wide if i else narrow, wide))
    blocks["head"] = wrap(Head(wide))
    return nn.Sequential(blocks)
