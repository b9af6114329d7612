def check_layout(layout: ParallelConfig, model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """Reject more than one process, and settings that nn.DataParallel's copies of the model do not support."""
    if world_size > 1:
        raise UserError(f"nn.DataParallel runs in one process, but {world_size} were started; start one (NPROC=1)")
    for setting in ("compile", "activation_checkpointing"):
        if getattr(train, setting):
            raise UserError(f"train.{setting} does not work with the copies that nn.DataParallel makes; leave it off")
