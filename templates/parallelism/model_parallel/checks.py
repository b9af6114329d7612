def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject more devices than blocks, and a split that does not match them."""
    blocks = model.count_blocks()
    if layout.devices > blocks:
        raise UserError(f"parallel.devices is {layout.devices}, but the model has {blocks} blocks; give at most that")
    if layout.split is not None and (len(layout.split) != layout.devices or sum(layout.split) != blocks):
        raise UserError(
            f"parallel.split is {layout.split}; give {layout.devices} numbers whose sum is {blocks}, the model's blocks"
        )
