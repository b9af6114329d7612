@dataclass
class DatasetConfig:
    """UCI's optical digits: 1,797 images of 8x8 pixels, shipped with the package."""

    max_shift: NonNegativeInt = 1
    """Augmentation: a training image is moved by up to this many pixels each way; 0 turns it off."""


GROUPS = 8


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

    def check(self) -> None:
        """Refuse a width that does not divide into the groups of GroupNorm.

        Raises:
            UserError: naming the setting, and what would work.
        """
        if self.width % GROUPS:
            raise UserError(f"model.width is {self.width}; give a multiple of {GROUPS}, the groups of GroupNorm")
#:: if cookiecutter.parallelism in ("pipeline", "model_parallel") ::#

    def count_blocks(self) -> int:
        """Blocks that the network consists of: between any two of them it can be cut."""
        return 2 + 2 * self.depth
#:: endif ::#
#:: if cookiecutter.parallelism == "tensor" ::#

    def check_slices(self, size: int, sequence_parallel: bool) -> None:
        """Refuse what cannot be sliced over ``size`` ranks.

        Raises:
            UserError: naming the setting, and what would work.
        """
        if sequence_parallel:
            raise UserError("parallel.sequence_parallel is on, but images have no sequence; leave it off")
#:: endif ::#
