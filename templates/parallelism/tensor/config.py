@dataclass
class ParallelConfig:
    """Tensor parallelism, with DTensor."""

    replicas: PositiveInt = 1
    """Groups of ranks that each hold the whole model and read a share of the batch; 1 shards every layer over all
    ranks."""
    shard_replicas: bool = False
    """Shard weights, gradients and optimizer state over the groups (FSDP), which otherwise hold the same."""
    sequence_parallel: bool = False
    """Also shard the activations between layers, along the sequence: less memory, the same number of bytes sent."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of shares of the global batch: one per group."""
        return self.replicas

    def devices_per_rank(self) -> int:
        """Return the number of accelerators that one rank computes on."""
        return 1

    def default_nproc(self, devices: int) -> int:
        """Return the number of ranks to start on a machine with this many accelerators."""
        return devices or 2
