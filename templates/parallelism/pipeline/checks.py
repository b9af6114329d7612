def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject ranks, blocks and micro-batches that do not fit the stages and the schedule."""
    check_replicas(layout.replicas, world_size)
    #:: if cookiecutter.__has_batch_norm ::#
    if layout.shard_replicas:
        check_batch_norm(model, train)
    #:: endif ::#
    pipeline_size = world_size // layout.replicas
    check_stages(layout, model.count_blocks(), pipeline_size)
    check_schedule(layout, train, pipeline_size)


def check_stages(layout: ParallelConfig, blocks: int, pipeline_size: int) -> None:
    """Reject stages that the model's blocks cannot fill, with ``pipeline_size`` ranks per pipeline."""
    stages = pipeline_size * layout.stages()
    if stages > blocks:
        raise UserError(
            f"{pipeline_size} rank(s) with {layout.stages()} stage(s) each make {stages} stages, but the model has "
            f"{blocks} blocks; start at most {blocks // layout.stages() * layout.replicas} rank(s), or set more "
            "parallel.replicas"
        )
    if layout.split is not None and (len(layout.split) != stages or sum(layout.split) != blocks):
        raise UserError(f"parallel.split is {layout.split}; give {stages} numbers whose sum is {blocks}, the blocks")


def check_schedule(layout: ParallelConfig, train: TrainConfig, pipeline_size: int) -> None:
    """Reject settings that the schedule does not support, with ``pipeline_size`` ranks per pipeline."""
    microbatches, stages, name = train.microbatches, pipeline_size * layout.stages(), layout.schedule
    wanted = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}.get(name, layout.stages())
    if layout.stages() != wanted:
        raise UserError(f"parallel.schedule {name} needs a parallel.stages_per_rank of {wanted}; leave it out")
    if name in ("1F1B", "DualPipeV") and microbatches < stages:
        raise UserError(
            f"parallel.schedule {name} has {stages} stages and train.microbatches is {microbatches}; give {stages} or "
            "more, or parallel.schedule GPipe, which takes any number"
        )
    if name.startswith("Interleaved") and microbatches % max(1, microbatches // pipeline_size):
        raise UserError(
            f"parallel.schedule {name} runs micro-batches in rounds of {pipeline_size}: train.microbatches is "
            f"{microbatches}, give a multiple of {pipeline_size}"
        )
    if train.compile and name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        raise UserError(f"parallel.schedule {name} splits backward, which train.compile does not; turn it off")


#:: include "parallelism/shared/replicas.py" ::#
#:: if cookiecutter.__has_batch_norm ::#


#:: include "parallelism/shared/batch_norm.py" ::#
#:: endif ::#
