@dataclass
class ParallelConfig(Section):
    """Distributed data parallel: every rank holds the whole model."""

    sync_batch_norm: bool = False
    """Replace BatchNorm with SyncBatchNorm, which normalizes over the batch of all ranks; needs accelerators."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per rank."""
        return world_size

    def check(self, config: "Config", world_size: int) -> None:
        """Accept any number of ranks."""
