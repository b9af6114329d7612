def check_layout(config: Config, world_size: int) -> None:
    """Refuse devices that the model's blocks do not fill.

    Raises:
        UserError: naming the setting, and what would work.
    """
    layout = config.parallel
    blocks = config.model.count_blocks()
    if layout.devices > blocks:
        raise UserError(f"parallel.devices is {layout.devices}, but the model has {blocks} blocks; give at most that")
    if layout.split is not None and (len(layout.split) != layout.devices or sum(layout.split) != blocks):
        raise UserError(
            f"parallel.split is {layout.split}; give {layout.devices} numbers whose sum is {blocks}, the model's blocks"
        )
