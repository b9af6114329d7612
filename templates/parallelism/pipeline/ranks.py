ranks, peaks = range(0, world_size, config.parallel.replicas), list[float]()  # Of one pipeline.
