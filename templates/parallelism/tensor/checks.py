def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject ranks that do not divide into replicas, and layers that do not divide into shards."""
    check_replicas(layout.replicas, world_size)
    #:: if cookiecutter.__has_batch_norm ::#
    if layout.shard_replicas:
        check_batch_norm(model, train)
    #:: endif ::#
    model.check_shards(world_size // layout.replicas, layout.sequence_parallel)


#:: include "parallelism/shared/replicas.py" ::#
#:: if cookiecutter.__has_batch_norm ::#


#:: include "parallelism/shared/batch_norm.py" ::#
#:: endif ::#
