@dataclass
class ParallelConfig:
    """Distributed data parallel: every rank holds the whole model."""

    gloo_on_accelerators = True  # It can sum their tensors, which is all that DDP needs: ranks may share a device.

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per rank."""
        return world_size
