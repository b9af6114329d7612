@dataclass
class ParallelConfig:
    """Tensor parallelism: ranks share each layer as in ``plan.py``; groups shard these shares."""

    tensor: int = 0
    """Number of ranks of a group, which read the same samples; 0: all ranks of a replica."""
    replicas: PositiveInt = 1
    """Number of copies of the model, say one per machine, each sharded over equally many ranks."""
    reshard_after_forward: bool = True
    """Free a block's weights between its forward and backward pass: less memory, more traffic."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each group."""
        if self.tensor == 0:
            return self.replicas
        return world_size // self.tensor

    def check(self, config: "Config", world_size: int) -> None:
        """Reject ranks that do not divide into groups, heads into shards, and fp16."""
        # A group of all ranks, 0, only needs replicas that divide the ranks.
        tensor = max(1, self.tensor)
        if world_size % (tensor * self.replicas):
            raise UserError(
                f"parallel.replicas x parallel.tensor is {self.replicas} x {tensor}, "
                f"which does not divide {world_size} rank(s)"
            )
        shards = world_size // self.dp_size(world_size)
        # A model without attention heads has none to divide.
        heads = getattr(config.model, "heads", shards)
        if heads % shards:
            raise UserError(
                f"model.heads is {heads}, "
                f"which does not divide into {shards} shards: give a multiple"
            )
        # A GradScaler finds overflows in the gradients of its own rank, which differ between ranks.
        if config.train.precision == "fp16":
            raise UserError(
                "train.precision is fp16, "
                "whose scaler would skip steps on some ranks alone; give bf16"
            )
        # Replicas add up what each has kept of all micro-batches, by position.
        size = config.data.micro_batch_size or config.data.global_batch_size
        has_one = size * self.dp_size(world_size) >= config.data.global_batch_size
        if config.train.allow_unused and self.replicas > 1 and not has_one:
            raise UserError("train.allow_unused with parallel.replicas needs one micro-batch")
