@dataclass
class ParallelConfig:
    """Model parallelism: the layers of one model on several devices of one process."""

    devices: PositiveInt = 2
    """Devices per rank, k: local rank r uses devices r*k ... r*k+k-1. On a CPU, the CPU stands in for all of them."""
    split: list[PositiveInt] | None = None
    """Number of blocks on each device, first device first; null balances the devices by parameters."""
    bucket_cap_mb: PositiveFloat | None = None
    """MiB of gradients per all-reduce between ranks; null is DDP's default: 25, and 1 for the first; a gradient of up
    to 4 MiB is one message."""
    find_unused_parameters: bool = False
    """Search every step for parameters that get no gradient; needed only if the model has some."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of shares of the global batch: one per rank."""
        return world_size

    def devices_per_rank(self) -> int:
        """Return the number of accelerators that one rank computes on."""
        return self.devices

    def default_nproc(self, devices: int) -> int:
        """Return the number of ranks to start on a machine with this many accelerators."""
        return max(1, devices // self.devices) if devices else 2
