@dataclass
class ParallelConfig:
    """nn.DataParallel: one process uses all accelerators of its machine."""

    # A single process sends nothing, so that gloo works for any device.
    gloo_on_accelerators = True

    @property
    def devices(self) -> int:
        """Return the number of accelerators that the process uses: all of the machine."""
        # PyTorch takes seconds to import, and is not needed before the settings are checked.
        from torch.accelerator import device_count

        return device_count()

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one, which the process reads."""
        return 1

    def check(self, config: "Config", world_size: int) -> None:
        """Reject several processes, and settings that do not work with copies of the model."""
        if world_size > 1:
            problem = f"nn.DataParallel runs in one process, but {world_size} were started"
            raise UserError(f"{problem}; start one (NPROC=1)")
        # Copies of a module share its compiled code, and its replaced forward.
        for name in ("compile", "activation_checkpointing"):
            if getattr(config.train, name):
                problem = f"train.{name} does not work with the copies that nn.DataParallel makes"
                raise UserError(f"{problem}; turn it off")
