ranks = range(0, world_size, config.parallel.replicas)  # Those of the first pipeline.
