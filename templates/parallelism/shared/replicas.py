def check_replicas(replicas: int, world_size: int) -> None:
    """Reject a number of replicas that does not divide the ranks into equal groups."""
    if world_size % replicas:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(f"parallel.replicas is {replicas}, but {world_size} rank(s) divide into {fits}")
