@dataclass
class DatasetConfig:
    """UCI's optical digits: 1,797 images of 8x8 pixels, shipped with the package."""

    max_shift: NonNegativeInt = 1
    """Augmentation: a training image is moved by up to this many pixels each way; 0 turns it off."""


@dataclass
class ModelConfig:
    """A small residual network."""

    width: PositiveInt = 32
    """Channels of the first stage; the second one has twice as many. A multiple of 8, the groups of GroupNorm."""
    depth: PositiveInt = 3
    """Residual blocks in each of the two stages."""
    norm: Literal["group", "batch"] = "group"
    """GroupNorm looks at one sample at a time; BatchNorm at the whole micro-batch of its rank, so that its result
    depends on how the batch is split."""
