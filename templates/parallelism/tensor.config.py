@dataclass
class ParallelConfig:
    """Tensor parallel, by DTensor."""

    replicas: PositiveInt = 1
    """Groups of ranks that each hold the whole model between them and read a share of the batch; 1 slices every layer
    over all ranks."""
    sequence_parallel: bool = False
    """Slice also what lies between the layers, along the sequence: less memory for activations, as many bytes sent."""

    def data_size(self, world_size: int) -> int:
        """Parts that the global batch is cut into: one a group."""
        return self.replicas

    def devices_per_rank(self) -> int:
        """Accelerators that one rank computes on."""
        return 1

    def default_size(self, devices: int) -> int:
        """Ranks to start on a machine with so many accelerators."""
        return devices or 2
