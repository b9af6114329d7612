def check_layout(config: Config, world_size: int) -> None:
    """Refuse a layout that ranks or layers do not fill.

    Raises:
        UserError: naming the setting, and what would work.
    """
    layout = config.parallel
    check_replicas(config, world_size)
    config.model.check_slices(world_size // layout.replicas, layout.sequence_parallel)


#:: include "parallelism/replicas.py" ::#
