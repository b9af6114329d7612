def check_replicas(config: Config, world_size: int) -> None:
    """Refuse a number of replicas into which the ranks do not divide."""
    if world_size % config.parallel.replicas:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(f"parallel.replicas is {config.parallel.replicas}, but {world_size} rank(s) divide into {fits}")
