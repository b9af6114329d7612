def check_gradients(module: nn.Module) -> None:
    """Reject parameters without a gradient: DDP would not average others in the same bucket, and then fail."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if names:
        raise UserError(
            f"the loss does not depend on {name_some(names)}: use these parameters in forward, remove them, freeze "
            "them (requires_grad_(False)), or set --parallel.find_unused_parameters true"
        )
