@dataclass
class ParallelConfig:
    """nn.DataParallel: one process uses several accelerators of its machine."""

    devices: PositiveInt | None = None
    """Accelerators to use; null uses all of them, and the CPU where there are none."""

    def data_size(self, world_size: int) -> int:
        """Parts that the global batch is cut into: one, for there is one process."""
        return 1

    def devices_per_rank(self) -> int:
        """Accelerators that one rank computes on, at least."""
        return self.devices or 1

    def default_size(self, devices: int) -> int:
        """Ranks to start on a machine with so many accelerators."""
        return 1
