def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject ranks that do not divide into replicas, and settings that FSDP does not support."""
    check_replicas(layout.replicas, world_size)
    #:: if cookiecutter.__has_batch_norm ::#
    if getattr(model, "norm", None) == "batch" and train.precision != "fp32":
        raise UserError(
            f"model.norm batch keeps its statistics in fp32, which does not work with weights in {train.precision}; "
            "give model.norm group, or train.precision fp32"
        )
    #:: endif ::#


#:: include "parallelism/shared/replicas.py" ::#
