def check_layout(config: Config, world_size: int) -> None:
    """Refuse a layout that ranks, blocks or micro-batches do not fill.

    Raises:
        UserError: naming the setting, and what would work.
    """
    layout = config.parallel
    check_replicas(config, world_size)
    check_stages(config, length=world_size // layout.replicas)
    check_schedule(config, length=world_size // layout.replicas)


def check_stages(config: Config, length: int) -> None:
    """Refuse stages that the model's blocks do not fill, on ``length`` ranks a pipeline."""
    layout = config.parallel
    stages, blocks = length * layout.stages(), config.model.count_blocks()
    if stages > blocks:
        raise UserError(
            f"{length} rank(s) with {layout.stages()} stage(s) each make {stages} stages, but the model has {blocks} "
            f"blocks; start at most {blocks // layout.stages() * layout.replicas} rank(s), or more parallel.replicas"
        )
    if layout.split is not None and (len(layout.split) != stages or sum(layout.split) != blocks):
        raise UserError(f"parallel.split is {layout.split}; give {stages} numbers whose sum is {blocks}, the blocks")


def check_schedule(config: Config, length: int) -> None:
    """Refuse what a schedule cannot do, on ``length`` ranks a pipeline."""
    layout = config.parallel
    pieces, stages, name = config.train.microbatches, length * layout.stages(), layout.schedule
    wanted = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}.get(name, layout.stages())
    if layout.stages() != wanted:
        raise UserError(f"parallel.schedule {name} needs a parallel.stages_per_rank of {wanted}; leave it out")
    if name in ("1F1B", "DualPipeV") and pieces < stages:
        raise UserError(
            f"parallel.schedule {name} has {stages} stages and train.microbatches is {pieces}; give {stages} or "
            "more, or parallel.schedule GPipe, which takes any"
        )
    if name.startswith("Interleaved") and pieces % max(1, pieces // length):
        raise UserError(
            f"parallel.schedule {name} cuts micro-batches into rounds of {length}: train.microbatches is {pieces}, "
            f"give a multiple of {length}"
        )
    if config.train.compile and name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        raise UserError(f"parallel.schedule {name} splits backward in two, which train.compile does not; turn it off")


#:: include "parallelism/replicas.py" ::#
