@dataclass
class ParallelConfig:
    """One mesh of ranks: its sizes; what is left over shards each parameter, which is gathered for a step."""

    pipeline: int = 1
    """Stages of consecutive blocks, which pass micro-batches on; 1: each rank has a part of all blocks."""
    tensor: int = 1
    """Ranks that share each layer, as in plan.py, and read the same samples; keep them inside one machine."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal number of ranks: several machines may each hold one."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per replica and shard."""
        return world_size // (self.pipeline * self.tensor)

    def check(self, config: "Config", world_size: int) -> None:
        """Reject sizes that do not divide the ranks or the heads, and what does not work here."""
        train, heads = config.train, getattr(config.model, "heads", self.tensor)
        if world_size % (self.pipeline * self.tensor * self.replicas):
            raise UserError(f"parallel.pipeline x tensor x replicas has to divide {world_size} rank(s)")
        if heads % self.tensor:
            raise UserError(f"model.heads is {heads}, which does not divide into {self.tensor} shards: give a multiple")
        if train.allow_unused and self.dp_size(world_size) > 1:
            raise UserError("train.allow_unused needs one local batch: parallel.pipeline x tensor ranks")
        if train.precision == "fp16":
            raise UserError("train.precision is fp16, whose scaler would skip steps on some ranks alone; give bf16")
