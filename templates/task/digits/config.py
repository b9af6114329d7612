@dataclass
class DatasetConfig:
    """UCI's optical digits: 1,797 images of 8x8 pixels, shipped with the package."""

    max_shift: NonNegativeInt = 1
    """Augmentation: shift each training image by up to this many pixels in each direction; 0 turns it off."""

    def check(self) -> None:
        """Reject shifts that move an image out of view."""
        if self.max_shift >= 8:
            raise UserError(f"dataset.max_shift is {self.max_shift}; give at most 7, for images of 8x8 pixels")


GROUPS = 8


@dataclass
class ModelConfig:
    """A small ResNet."""

    width: PositiveInt = 32
    """Channels of the first half; the second half has twice as many. A multiple of 8, the groups of GroupNorm."""
    depth: PositiveInt = 3
    """Residual blocks in each half."""
    norm: Literal["group", "batch"] = "group"
    """GroupNorm normalizes each sample by itself. BatchNorm normalizes over a rank's micro-batch, so its result depends
    on how the batch is split."""
    weights: str | None = None
    """Weights to start a new run from: a checkpoint, a state_dict file or a .safetensors file."""
    weights_except: list[str] = field(default_factory=list)
    """Modules that keep their initial weights nevertheless, for example [head]."""

    def check(self) -> None:
        """Reject a width that is not a multiple of GroupNorm's groups."""
        if self.width % GROUPS:
            raise UserError(f"model.width is {self.width}; give a multiple of {GROUPS}, the groups of GroupNorm")
#:: if cookiecutter.__cuts_blocks ::#

    def count_blocks(self) -> int:
        """Return the number of blocks; the model can be split between any two of them."""
        return 2 + 2 * self.depth
#:: endif ::#
#:: if cookiecutter.__shards_layers ::#

    def check_shards(self, size: int, sequence_parallel: bool) -> None:
        """Reject settings that cannot be sharded over ``size`` ranks."""
        if sequence_parallel:
            raise UserError("parallel.sequence_parallel is on, but images have no sequence; leave it off")
#:: endif ::#
