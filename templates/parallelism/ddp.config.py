@dataclass
class ParallelConfig:
    """Distributed data parallel; the settings are those of torch.nn.parallel.DistributedDataParallel."""

    bucket_cap_mb: PositiveFloat = 25.0
    """MiB of gradients that one all-reduce carries; a larger bucket means fewer messages, but less overlap."""
    gradient_as_bucket_view: bool = True
    """Let gradients live in the buckets, which saves one copy of them."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that got no gradient; only for models that have some."""
    sync_batch_norm: bool = False
    """Replace BatchNorm by SyncBatchNorm, which sees the batch of all ranks; needs accelerators."""

    def data_size(self, world_size: int) -> int:
        """Parts that the global batch is cut into: one a rank."""
        return world_size

    def devices_per_rank(self) -> int:
        """Accelerators that one rank computes on."""
        return 1

    def default_size(self, devices: int) -> int:
        """Ranks to start on a machine with so many accelerators."""
        return devices or 2
