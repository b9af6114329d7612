@dataclass
class DatasetConfig:
    """A text, read as bytes."""

    path: str = "stdlib"
    """A text file, or a folder whose text files are concatenated. stdlib is the source code of this machine's own
    Python standard library."""
    max_bytes: PositiveInt | None = 4_000_000
    """Use only this many bytes of the text; null uses all of it."""
    test_bytes: PositiveInt = 200_000
    """Bytes at the end of that part that form the test split; the rest is the training split."""
    cache: str = field(default="runs/texts", metadata={"place": True})
    """Cache folder for the concatenated files of a text folder, which are memory-mapped; created if missing."""

    def check(self) -> None:
        """Reject a text that does not exist."""
        if self.path != "stdlib" and not os.path.exists(self.path):
            raise UserError(f"dataset.path is {self.path}: no such file or folder; stdlib needs none")


@dataclass
class ModelConfig:
    """A GPT over bytes."""

    width: PositiveInt = 128
    """Features per position. A multiple of the number of heads."""
    layers: PositiveInt = 4
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads per block."""
    context: PositiveInt = 64
    """Bytes that the model sees at a time: the length of each sample."""
    weights: str | None = None
    """Weights to start a new run from: a checkpoint, a state_dict file or a .safetensors file."""
    weights_except: list[str] = field(default_factory=list)
    """Modules that keep their initial weights nevertheless, for example [head]."""

    def check(self) -> None:
        """Reject a width that does not divide into the heads."""
        if self.width % self.heads:
            fits = (self.width // self.heads + 1) * self.heads
            raise UserError(f"model.width is {self.width}, which does not divide into {self.heads} heads; {fits} would")
#:: if cookiecutter.__cuts_blocks ::#

    def count_blocks(self) -> int:
        """Return the number of blocks; the model can be split between any two of them."""
        return 2 + self.layers
#:: endif ::#
#:: if cookiecutter.__shards_layers ::#

    def check_shards(self, size: int, sequence_parallel: bool) -> None:
        """Reject settings that cannot be sharded over ``size`` ranks."""
        if self.heads % size:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UserError(
                f"model.heads is {self.heads}, which does not divide into {size} shards; {fits} would: start another "
                "number of ranks, or set parallel.replicas"
            )
        if sequence_parallel and self.context % size:
            raise UserError(f"model.context is {self.context}, which does not divide into {size} shards of a sequence")
#:: endif ::#


@dataclass
class GenerateConfig:
    """The text that the subcommand generate prints."""

    prompt: str = field(default="def ", metadata={"any_text": True})
    """Text to continue; an empty text stands for a newline."""
    length: PositiveInt = 500
    """Bytes to generate."""
    temperature: NonNegativeFloat = 0.8
    """Below 1, likely bytes become more likely; 0 always picks the most likely one."""
