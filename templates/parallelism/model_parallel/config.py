@dataclass
class ParallelConfig:
    """Model parallelism: the blocks of one model on several devices of one process."""

    devices: int = 2
    """Devices per rank, k: local rank r uses devices r*k to r*k+k-1. On a CPU, the CPU stands in for all of them."""

    gloo_on_accelerators = True  # It can sum their tensors, which is all that DDP needs: ranks may share a device.

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per rank."""
        return world_size
