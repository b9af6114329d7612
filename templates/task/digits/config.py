@dataclass
class DatasetConfig:
    """UCI's optical digits: 1,797 images of 8x8 pixels, shipped with the package."""

    max_shift: Annotated[int, 0, 7] = 0
    """Augmentation: shift each training image at random, by up to this many pixels."""


@dataclass
class ModelConfig:
    """A small ResNet."""

    # GroupNorm normalizes the channels in this many groups. Without a type, it is not a setting.
    groups = 8
    width: PositiveInt = 16
    """Number of channels in the first half, a multiple of 8; the second half has twice as many."""
    depth: PositiveInt = 2
    """Number of residual blocks in each half."""
    weights: str | None = field(default=None, metadata={"file": True})
    """File that a new run starts from: a checkpoint, a state_dict or a .safetensors file."""

    def check(self, config: "Config", world_size: int) -> None:
        """Reject a width that is not a multiple of GroupNorm's groups."""
        if self.width % self.groups:
            raise UserError(
                f"model.width is {self.width}; "
                f"give a multiple of {self.groups}, the groups of GroupNorm"
            )
