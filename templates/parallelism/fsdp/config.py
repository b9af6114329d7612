@dataclass
class ParallelConfig:
    """Fully sharded data parallel; the settings are those of torch.distributed.fsdp.fully_shard."""

    replicas: PositiveInt = 1
    """Number of copies of the model, say one per machine, each sharded over equally many ranks."""
    reshard_after_forward: bool = True
    """Free a block's weights between its forward and backward pass: less memory, more traffic."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each rank."""
        return world_size

    def check(self, config: "Config", world_size: int) -> None:
        """Reject replicas that do not divide the ranks evenly."""
        if world_size % self.replicas:
            raise UserError(
                f"parallel.replicas is {self.replicas}, which does not divide {world_size} rank(s)"
            )
        if self.replicas > 1 and config.train.exact:
            raise UserError(
                "parallel.replicas adds up gradients in an order that depends on ranks; "
                "turn train.exact off"
            )
        # Replicas add up what each has kept of all micro-batches, by position.
        size = config.data.micro_batch_size or config.data.global_batch_size
        has_one = size * self.dp_size(world_size) >= config.data.global_batch_size
        if config.train.allow_unused and self.replicas > 1 and not has_one:
            raise UserError("train.allow_unused with parallel.replicas needs one micro-batch")
