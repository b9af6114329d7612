@dataclass
class ParallelConfig:
    """Pipeline parallel; the schedules are those of torch.distributed.pipelining."""

    replicas: PositiveInt = 1
    """Pipelines side by side, each with a share of the batch; each is as long as the ranks allow."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """In which order a rank runs forwards and backwards of its micro-batches."""
    stages_per_rank: PositiveInt | None = None
    """Stages that a rank holds; null is 1 under GPipe and 1F1B and 2 under all others."""
    split: list[PositiveInt] | None = None
    """Blocks in each stage, from the first stage on; null balances the stages by their number of parameters."""

    def data_size(self, world_size: int) -> int:
        """Parts that the global batch is cut into: one a pipeline."""
        return self.replicas

    def devices_per_rank(self) -> int:
        """Accelerators that one rank computes on."""
        return 1

    def default_size(self, devices: int) -> int:
        """Ranks to start on a machine with so many accelerators."""
        return devices or 2

    def stages(self) -> int:
        """Stages that each rank holds."""
        return self.stages_per_rank or (1 if self.schedule in ("GPipe", "1F1B") else 2)
