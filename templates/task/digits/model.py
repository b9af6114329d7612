"""The model: a small ResNet for 8x8 images, as blocks that each take and return one tensor."""

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
        # BatchNorm's statistics would depend on which samples a rank has. GroupNorm has none.
        self.norm = nn.GroupNorm(ModelConfig.groups, width)

    def forward(self, images: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(images)))


class ResidualBlock(nn.Module):
    """Maps (batch, inputs, h, w) to (batch, outputs, h, w), or half of h and w if these differ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(ModelConfig.groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(ModelConfig.groups, outputs)
        # A block starts as its shortcut (Goyal et al. 2017, section 5.1), and SiLU has no kink:
        # early training is smooth, so that rounding differences do not grow from step to step.
        nn.init.zeros_(self.norm2.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.shortcut = nn.Conv2d(inputs, outputs, kernel_size=2, stride=2, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = F.silu(self.norm1(self.conv1(features)))
        hidden = self.norm2(self.conv2(hidden))
        return F.silu(hidden + self.shortcut(features))


class Head(nn.Module):
    """Maps (batch, width, h, w) features to (batch, classes) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features.mean(dim=(2, 3)))


def build_model(
    config: ModelConfig, wrap: Callable[[nn.Module], nn.Module] = lambda block: block
) -> nn.Sequential:
    """Build the model on the CPU. Strategies compile, shard or drop each new block in ``wrap``."""
    narrow = config.width
    wide = 2 * config.width
    # Names of blocks begin the names of parameters in checkpoints.
    blocks = OrderedDict[str, nn.Module]()
    blocks["stem"] = wrap(Stem(narrow))
    for number in range(config.depth):
        blocks[f"narrow{number}"] = wrap(ResidualBlock(narrow, narrow))
    for number in range(config.depth):
        inputs = narrow if number == 0 else wide
        blocks[f"wide{number}"] = wrap(ResidualBlock(inputs, wide))
    blocks["head"] = wrap(Head(wide))
    return nn.Sequential(blocks)
