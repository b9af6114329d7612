def check_batch_norm(model: ModelConfig, train: TrainConfig) -> None:
    """Reject BatchNorm in a lower precision, in which FSDP would gather its weights."""
    if getattr(model, "norm", None) == "batch" and train.precision != "fp32":
        raise UserError(
            f"model.norm batch keeps its statistics in fp32, which does not work with weights in {train.precision}; "
            "give model.norm group, or train.precision fp32"
        )
