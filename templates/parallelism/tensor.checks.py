def check_layout(config: Config, world_size: int) -> None:
    """Refuse a layout that ranks or layers do not fill.

    Raises:
        UserError: naming the setting, and what would work.
    """
    layout = config.parallel
    if world_size % layout.replicas:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(f"parallel.replicas is {layout.replicas}, but {world_size} rank(s) divide into {fits}")
    config.model.check_slices(world_size // layout.replicas, layout.sequence_parallel)
