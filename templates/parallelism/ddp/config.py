@dataclass
class ParallelConfig:
    """Distributed data parallel: every rank holds the whole model."""

    # Gloo sends all messages of DDP for an accelerator's tensors, too: ranks may share a device.
    gloo_on_accelerators = True

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each rank."""
        return world_size
