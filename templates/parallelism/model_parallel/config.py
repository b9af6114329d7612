@dataclass
class ParallelConfig:
    """Model parallelism: the blocks of one model on several devices of one process."""

    devices: PositiveInt = 2
    """Number of devices per rank, k: local rank r uses devices r*k to r*k+k-1. On a CPU, the CPU
    stands in for all of them."""

    # Gloo sends all messages of DDP for an accelerator's tensors, too: ranks may share a device.
    gloo_on_accelerators = True

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each rank."""
        return world_size
