@dataclass
class DatasetConfig:
    """A text, read as bytes."""

    path: str = "stdlib"
    """A text file, or a folder whose text files are joined; stdlib is the source code of this machine's own Python
    standard library."""
    max_bytes: PositiveInt | None = 4_000_000
    """Use the text up to here; null uses all of it."""
    test_bytes: PositiveInt = 200_000
    """The last bytes of that are the test split, the others the training split."""
    cache: str = "runs/texts"
    """Folder that keeps the joined text of a folder, from which it is memory-mapped; made if missing."""

    def check(self) -> None:
        """Refuse a text that is not there.

        Raises:
            UserError: naming the setting, and what would work.
        """
        if self.path != "stdlib" and not os.path.exists(self.path):
            raise UserError(f"dataset.path is {self.path}: no such file or folder; stdlib needs none")


@dataclass
class ModelConfig:
    """A GPT over bytes."""

    width: PositiveInt = 128
    """Features of each byte. A multiple of the number of heads."""
    layers: PositiveInt = 4
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads of each block."""
    context: PositiveInt = 64
    """Bytes that the network sees at once: the length of every sample."""

    def check(self) -> None:
        """Refuse a width that the heads cannot share.

        Raises:
            UserError: naming the setting, and what would work.
        """
        if self.width % self.heads:
            fits = (self.width // self.heads + 1) * self.heads
            raise UserError(f"model.width is {self.width}, which does not divide into {self.heads} heads; {fits} would")
#:: if cookiecutter.parallelism in ("pipeline", "model_parallel") ::#

    def count_blocks(self) -> int:
        """Blocks that the network consists of: between any two of them it can be cut."""
        return 2 + self.layers
#:: endif ::#
#:: if cookiecutter.parallelism == "tensor" ::#

    def check_slices(self, size: int, sequence_parallel: bool) -> None:
        """Refuse what cannot be sliced over ``size`` ranks.

        Raises:
            UserError: naming the setting, and what would work.
        """
        if self.heads % size:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UserError(
                f"model.heads is {self.heads}, which does not divide into {size} slices; {fits} would: start another "
                "number of ranks, or set parallel.replicas"
            )
        if sequence_parallel and self.context % size:
            raise UserError(f"model.context is {self.context}, which does not divide into {size} slices of a sequence")
#:: endif ::#


@dataclass
class GenerateConfig:
    """What the subcommand generate writes."""

    prompt: str = "def "
    """Text to go on from; an empty one stands for a new line."""
    length: PositiveInt = 500
    """Bytes to add to it."""
    temperature: NonNegativeFloat = 0.8
    """Below 1 likely bytes become likelier; 0 always takes the likeliest."""
