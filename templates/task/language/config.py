@dataclass
class DatasetConfig:
    """A text, read as bytes."""

    path: str | None = field(default=None, metadata={"file": True})
    """A file of text; null: the source code of this machine's own Python standard library."""
    max_bytes: int | None = 4_000_000
    """Use only this many bytes of the text; null uses all."""
    test_bytes: int = 200_000
    """Bytes at the end of these that form the test set; the rest is the training set."""

    def check(self) -> None:
        """Accept any text; ``build_datasets`` rejects one that is too short."""


@dataclass
class ModelConfig:
    """A GPT over bytes."""

    width: int = 128
    """Features per position, a multiple of the number of heads."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads per block."""
    context: int = 64
    """Bytes that the model reads at a time: the length of each sample."""
    weights: str | None = field(default=None, metadata={"file": True})
    """A file of weights that a new run starts from: a checkpoint, a state_dict or a .safetensors file."""

    def check(self) -> None:
        """Reject a width that does not divide into the heads."""
        if self.width % self.heads:
            raise UserError(f"model.width is {self.width}; give a multiple of model.heads, {self.heads}")
