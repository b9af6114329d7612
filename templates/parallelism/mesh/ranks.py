ranks, peaks = range(0, world_size, world_size // config.parallel.pipeline), list[float]()  # Stages.
pool = ProcessPoolExecutor(1, max_tasks_per_child=1)  # DTensor caches groups.
