def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject ranks that do not divide into replicas, and settings that FSDP does not support."""
    check_replicas(layout.replicas, world_size)
    #:: if cookiecutter.__has_batch_norm ::#
    check_batch_norm(model, train)
    #:: endif ::#


#:: include "parallelism/shared/replicas.py" ::#
#:: if cookiecutter.__has_batch_norm ::#


#:: include "parallelism/shared/batch_norm.py" ::#
#:: endif ::#
