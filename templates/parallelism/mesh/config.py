@dataclass
class ParallelConfig:
    """The sizes of one mesh of ranks; the ranks that remain shard each parameter, as FSDP does."""

    pipeline: PositiveInt = 1
    """Number of stages of consecutive blocks; 1: every rank has a part of every block."""
    tensor: PositiveInt = 1
    """Number of ranks, ideally on one machine, that share each layer and read the same samples."""
    replicas: PositiveInt = 1
    """Number of copies of the model, say one per machine, each sharded over equally many ranks."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each replica and shard."""
        return world_size // (self.pipeline * self.tensor)

    def check(self, config: "Config", world_size: int) -> None:
        """Reject sizes that do not divide the ranks or the heads, and what does not work here."""
        if world_size % (self.pipeline * self.tensor * self.replicas):
            raise UserError(
                f"parallel.pipeline x tensor x replicas has to divide {world_size} rank(s)"
            )
        heads = getattr(config.model, "heads", self.tensor)  # Some models have none to divide.
        if heads % self.tensor:
            raise UserError(
                f"model.heads is {heads}, "
                f"which does not divide into {self.tensor} shards: give a multiple"
            )
        # Where plan.py shards the rows of layers, as by heads, FSDP shards their columns, evenly.
        shards = self.dp_size(world_size) // self.replicas
        if hasattr(config.model, "heads") and self.tensor > 1 and config.model.width % shards:
            raise UserError(
                f"model.width is {config.model.width}, but {shards} shards need a multiple of that"
            )
        # FSDP reduces only gradients that exist: ranks whose batches leave out others would hang.
        if config.train.allow_unused and self.dp_size(world_size) > 1:
            raise UserError(
                "train.allow_unused needs one local batch: parallel.pipeline x tensor ranks"
            )
        # A GradScaler finds overflows in the gradients of its own rank, which differ between ranks.
        if config.train.precision == "fp16":
            raise UserError(
                "train.precision is fp16, whose scaler would skip steps on single ranks; give bf16"
            )
