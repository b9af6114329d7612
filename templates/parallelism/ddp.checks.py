def check_layout(config: Config, world_size: int) -> None:
    """Refuse what PyTorch cannot do.

    Raises:
        UserError: naming the setting, and what would work.
    """
    layout = config.parallel
    if layout.static_graph and config.train.microbatches > 1:
        raise UserError("parallel.static_graph does not go with train.microbatches above 1; turn one of them off")
