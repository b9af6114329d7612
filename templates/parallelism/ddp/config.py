@dataclass
class ParallelConfig:
    """Distributed data parallel: every rank holds the whole model."""

    sync_batch_norm: bool = False
    """Replace BatchNorm with SyncBatchNorm, which normalizes over the batch of all ranks; on accelerators alone."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per rank."""
        return world_size

    def check(self, config: "Config", world_size: int) -> None:
        """Reject SyncBatchNorm on a CPU."""
        if self.sync_batch_norm and config.distributed.device == "cpu":
            raise UserError("parallel.sync_batch_norm works on accelerators alone; turn it off on a CPU")
