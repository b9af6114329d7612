def check_layout(config: Config, world_size: int) -> None:
    """Refuse what goes with one process, and with copies of the model that live for one forward, alone.

    Raises:
        UserError: naming the setting, and what would work.
    """
    if world_size > 1:
        raise UserError(f"nn.DataParallel runs in one process, and {world_size} were started; start one (NPROC=1)")
    for setting in ("compile", "activation_checkpointing"):
        if getattr(config.train, setting):
            raise UserError(f"train.{setting} does not follow the copies that nn.DataParallel makes; leave it off")
