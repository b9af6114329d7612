@dataclass
class ParallelConfig:
    """Tensor parallelism: the ranks of a group share each layer, as in ``plan.py``; groups shard what each rank has."""

    tensor: int = 0
    """Ranks of a group, which read the same samples; 0: all ranks of a replica."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal number of ranks: several machines may each hold one."""
    reshard_after_forward: bool = True
    """Free a block's weights after its forward and gather them again for its backward: less memory, more messages."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per group."""
        return world_size // self.tensor if self.tensor else self.replicas

    def check(self, config: "Config", world_size: int) -> None:
        """Reject ranks that do not divide into groups, attention heads that do not divide into shards, and fp16."""
        if world_size % (max(1, self.tensor) * self.replicas):
            product = f"parallel.replicas x parallel.tensor is {self.replicas} x {max(1, self.tensor)}"
            raise UserError(f"{product}, which does not divide {world_size} rank(s)")
        tensor = world_size // self.dp_size(world_size)
        heads = getattr(config.model, "heads", tensor)
        if heads % tensor:
            raise UserError(f"model.heads is {heads}, which does not divide into {tensor} shards: give a multiple")
        if config.train.precision == "fp16":
            raise UserError("train.precision is fp16, whose scaler would skip steps on some ranks alone; give bf16")
