def choose_bucket_cap(module: nn.Module) -> int | None:
    """Return the MiB of a bucket: so many that a small gradient is one message; None is DDP's default.

    A first message that starts early does not make up for a second one if both are short: on two CPUs, one message for
    1 MiB makes a step of 17 ms 5 % shorter, and for 4 MiB a step of 40 ms 1 %.
    """
    size = sum(p.nbytes for p in module.parameters() if p.requires_grad) / 2**20
    return 4 if size <= 4 else None


def check_gradients(module: nn.Module) -> None:
    """Reject parameters without a gradient: DDP would not average others in the same bucket, and then fail."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if names:
        raise UserError(
            f"the loss does not depend on {name_some(names)}: use these parameters in forward, remove them, freeze "
            "them (requires_grad_(False)), or set --parallel.find_unused_parameters true"
        )
