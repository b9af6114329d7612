def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject combinations that DDP does not support."""
    if layout.static_graph and train.microbatches > 1:
        raise UserError("parallel.static_graph does not work with train.microbatches above 1; turn one of them off")
