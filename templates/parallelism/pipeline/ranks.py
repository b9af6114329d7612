ranks = range(0, world_size, config.parallel.dp_size(world_size))  # One of each position.
peaks = list[float]()
