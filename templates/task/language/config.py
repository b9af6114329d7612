@dataclass
class DatasetConfig:
    """A text, read as bytes or tokens."""

    path: str | None = field(default=None, metadata={"file": True})
    """File of text, or of tokens by scripts/prepare.py (.bin); null: Python's standard library."""
    max_bytes: PositiveInt | None = None
    """Use only this many bytes or tokens; null: all of a file, 4,000,000 bytes of the library."""
    test_bytes: PositiveInt = 200_000
    """Number of bytes or tokens at the end for the test set; as many before them validate."""


@dataclass
class ModelConfig:
    """A GPT over bytes or tokens."""

    width: PositiveInt = 128
    """Number of features per position, a multiple of the number of heads."""
    layers: PositiveInt = 4
    """Number of transformer blocks."""
    heads: PositiveInt = 4
    """Number of attention heads per block."""
    context: PositiveInt = 64
    """Number of bytes or tokens that the model reads at a time: the length of each sample."""
    weights: str | None = field(default=None, metadata={"file": True})
    """File that a new run starts from: a checkpoint, a state_dict or a .safetensors file."""
    # build_datasets sets this from a file of tokens. Without a type, it is not a setting.
    vocabulary = 256

    def check(self, config: "Config", world_size: int) -> None:
        """Reject a width that does not divide into the heads."""
        if self.width % self.heads:
            raise UserError(
                f"model.width is {self.width}; give a multiple of model.heads, {self.heads}"
            )
