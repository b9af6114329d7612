@dataclass
class ParallelConfig:
    """nn.DataParallel: one process uses all accelerators of its machine."""

    gloo_on_accelerators = True  # One rank sends nothing.

    @property
    def devices(self) -> int:
        """Return how many accelerators the process uses: all."""
        from torch.accelerator import device_count  # Not before the settings are checked.

        return device_count()

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one, which the process reads."""
        return 1

    def check(self, config: "Config", world_size: int) -> None:
        """Reject more than one process, and settings that do not work with the copies of the model."""
        if world_size > 1:
            raise UserError(f"nn.DataParallel runs in one process, but {world_size} were started; start one (NPROC=1)")
        for name in ("compile", "activation_checkpointing"):
            if getattr(config.train, name):
                raise UserError(f"train.{name} does not work with the copies that nn.DataParallel makes; turn it off")
