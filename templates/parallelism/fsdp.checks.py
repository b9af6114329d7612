def check_layout(config: Config, world_size: int) -> None:
    """Refuse a layout that the ranks do not fill, and what FSDP cannot do.

    Raises:
        UserError: naming the setting, and what would work.
    """
    check_replicas(config, world_size)
    #:: if cookiecutter.task == "digits" ::#
    if config.model.norm == "batch" and config.train.precision != "fp32":
        raise UserError(
            f"model.norm batch keeps its statistics in fp32, which do not go with weights in {config.train.precision}; "
            "give model.norm group, or train.precision fp32"
        )
    #:: endif ::#


#:: include "parallelism/replicas.py" ::#
