@dataclass
class ParallelConfig:
    """Pipeline parallelism; the schedules are those of torch.distributed.pipelining."""

    replicas: PositiveInt = 1
    """Pipelines in parallel, each with a share of the batch and an equal number of ranks."""
    shard_replicas: bool = False
    """Shard weights, gradients and optimizer state over the pipelines (FSDP), which otherwise hold the same."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order in which a rank runs the forwards and backwards of its micro-batches."""
    stages_per_rank: PositiveInt | None = None
    """Stages on each rank; null is 1 for GPipe and 1F1B and 2 for all others."""
    split: list[PositiveInt] | None = None
    """Number of blocks in each stage, first stage first; null balances the stages by parameters."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of shares of the global batch: one per pipeline."""
        return self.replicas

    def devices_per_rank(self) -> int:
        """Return the number of accelerators that one rank computes on."""
        return 1

    def default_nproc(self, devices: int) -> int:
        """Return the number of ranks to start on a machine with this many accelerators."""
        return devices or 2

    def stages(self) -> int:
        """Return the number of stages on each rank."""
        return self.stages_per_rank or (1 if self.schedule in ("GPipe", "1F1B") else 2)
