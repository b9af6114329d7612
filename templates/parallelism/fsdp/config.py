@dataclass
class ParallelConfig:
    """Fully sharded data parallel; the settings are those of torch.distributed.fsdp.fully_shard."""

    replicas: PositiveInt = 1
    """Groups of ranks that each hold the whole model (hybrid sharding, for example one group per machine); 1 shards it
    over all ranks."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again for its backward. Off keeps them in
    between, which costs memory and saves a third of the communication."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory and step there; accelerators get copies of blocks."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of shares of the global batch: one per rank."""
        return world_size

    def devices_per_rank(self) -> int:
        """Return the number of accelerators that one rank computes on."""
        return 1

    def default_nproc(self, devices: int) -> int:
        """Return the number of ranks to start on a machine with this many accelerators."""
        return devices or 2
