@dataclass
class ParallelConfig:
    """nn.DataParallel: one process uses several accelerators of its machine."""

    devices: PositiveInt | None = None
    """Accelerators to use; null uses all of them, or the CPU if there are none."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of shares of the global batch: 1, because the one process reads all of it."""
        return 1

    def devices_per_rank(self) -> int:
        """Return the number of accelerators that the process needs."""
        return self.devices or 1

    def default_nproc(self, devices: int) -> int:
        """Return the number of processes to start."""
        return 1
