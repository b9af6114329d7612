@dataclass
class ParallelConfig:
    """Fully sharded data parallel; the settings are those of torch.distributed.fsdp.fully_shard."""

    replicas: PositiveInt = 1
    """Groups of ranks that each hold the whole model between them (hybrid sharding, one group a machine, say); 1 shards
    it over all ranks."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again for its backward; off holds them in
    between, which costs memory and saves a third of the messages."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory, and step there; blocks visit the accelerator."""

    def data_size(self, world_size: int) -> int:
        """Parts that the global batch is cut into: one a rank."""
        return world_size

    def devices_per_rank(self) -> int:
        """Accelerators that one rank computes on."""
        return 1

    def default_size(self, devices: int) -> int:
        """Ranks to start on a machine with so many accelerators."""
        return devices or 2
