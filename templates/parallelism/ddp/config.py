@dataclass
class ParallelConfig:
    """Distributed data parallel; the settings are those of torch.nn.parallel.DistributedDataParallel."""

    bucket_cap_mb: PositiveFloat | None = None
    """MiB of gradients per all-reduce: larger buckets mean fewer messages, but less overlap with backward. null is
    DDP's default: 25, and 1 for the first, so that it starts early; a gradient of up to 4 MiB is one message."""
    gradient_as_bucket_view: bool = True
    """Store gradients in the buckets themselves, which saves a copy of them."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Search every step for parameters that get no gradient; needed only if the model has some."""
    sync_batch_norm: bool = False
    """Replace BatchNorm with SyncBatchNorm, which normalizes over the batch of all ranks; needs accelerators."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of shares of the global batch: one per rank."""
        return world_size

    def devices_per_rank(self) -> int:
        """Return the number of accelerators that one rank computes on."""
        return 1

    def default_nproc(self, devices: int) -> int:
        """Return the number of ranks to start on a machine with this many accelerators."""
        return devices or 2
