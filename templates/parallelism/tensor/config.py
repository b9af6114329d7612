@dataclass
class ParallelConfig:
    """Tensor parallelism: the ranks of a group shard layers, as in ``plan.py``, and read the same samples."""

    replicas: int = 1
    """Groups of ranks that each hold the whole model and read a local batch; 1 shards layers over all ranks."""

    gloo_on_accelerators = False  # It cannot send their tensors.

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per group."""
        return self.replicas

    def check(self, config: "Config", world_size: int) -> None:
        """Reject ranks that do not divide into groups, attention heads that do not divide into shards, and fp16."""
        if world_size % self.replicas:
            raise UserError(f"parallel.replicas is {self.replicas}, which does not divide {world_size} rank(s)")
        shards = world_size // self.replicas
        heads = getattr(config.model, "heads", shards)
        if heads % shards:
            raise UserError(f"model.heads is {heads}, which does not divide into {shards} shards: give a multiple")
        if config.train.precision == "fp16":
            raise UserError("train.precision is fp16, whose scaler would skip steps on some ranks alone; give bf16")
