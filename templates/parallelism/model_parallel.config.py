@dataclass
class ParallelConfig:
    """Model parallel: the layers of one model on several devices of one process."""

    devices: PositiveInt = 2
    """Devices of each rank: rank r of a machine owns the devices r*k ... r*k+k-1. On a CPU it is the CPU k times."""
    split: list[PositiveInt] | None = None
    """Blocks on each device, from the first on; null balances the devices by their number of parameters."""
    bucket_cap_mb: PositiveFloat = 25.0
    """MiB of gradients that one all-reduce between ranks carries."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that got no gradient; only for models that have some."""

    def data_size(self, world_size: int) -> int:
        """Parts that the global batch is cut into: one a rank."""
        return world_size

    def devices_per_rank(self) -> int:
        """Accelerators that one rank computes on."""
        return self.devices

    def default_size(self, devices: int) -> int:
        """Ranks to start on a machine with so many accelerators."""
        return max(1, devices // self.devices) if devices else 2
