def prepare_block(block: nn.Module, config: Config) -> None:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    if config.train.activation_checkpointing:
        if any(isinstance(layer, BATCH_NORMS) for layer in block.modules()):
            raise UserError("train.activation_checkpointing would update BatchNorm's statistics twice; turn it off")
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Split a batch of any nesting into micro-batches; what is no tensor is part of each."""
    leaves, structure = tree_flatten(batch)
    chunks = [leaf.chunk(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(micro), structure) for micro in zip(*chunks, strict=True)]


def average_batch_norm(module: nn.Module, group: Any = None) -> None:
    """Average the running statistics of BatchNorm over the ranks of a group, each of which has seen other samples."""
    for layer in module.modules():
        if isinstance(layer, BATCH_NORMS):
            for statistics in (layer.running_mean, layer.running_var):
                if statistics is not None:
                    dist.all_reduce(statistics, group=group)
                    statistics /= dist.get_world_size(group)
