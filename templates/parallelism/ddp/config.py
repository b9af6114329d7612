@dataclass
class ParallelConfig:
    """Distributed data parallel: every rank holds the whole model."""

    # DDP only sums tensors, which gloo can do with an accelerator's: ranks may share a device.
    gloo_on_accelerators = True

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each rank."""
        return world_size
