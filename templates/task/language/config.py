@dataclass
class DatasetConfig:
    """A text, read as bytes, or tokens."""

    path: str | None = field(default=None, metadata={"file": True})
    """A file of text, or of tokens by scripts/prepare.py (.bin); null: this machine's Python standard library."""
    max_bytes: int | None = None
    """Use only this many bytes or tokens; null uses all of a file, and 4,000,000 bytes of the library."""
    test_bytes: int = 200_000
    """Bytes or tokens at the end of these that form the test set; as many before them are for validation."""


@dataclass
class ModelConfig:
    """A GPT over bytes or tokens."""

    width: int = 128
    """Features per position, a multiple of the number of heads."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads per block."""
    context: int = 64
    """Bytes or tokens that the model reads at a time: the length of each sample."""
    weights: str | None = field(default=None, metadata={"file": True})
    """A file of weights that a new run starts from: a checkpoint, a state_dict or a .safetensors file."""
    vocabulary = 256  # Not a setting: build_datasets takes it from a file of tokens.

    def check(self, *_: object) -> None:
        """Reject a width that does not divide into the heads."""
        if self.width % self.heads:
            raise UserError(f"model.width is {self.width}; give a multiple of model.heads, {self.heads}")
