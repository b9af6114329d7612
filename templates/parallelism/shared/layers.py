def shard_layers(block: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a block's layers over a group of ranks, by its plan; rejects weights that layers share."""
    names = {name for name, _ in block.named_parameters()}
    # All ranks drew the same values, so each keeps its shard.
    parallelize_module(block, mesh, tensor_plan(block), src_data_rank=None)
    for name, _ in block.named_parameters():
        if name not in names:
            raise UserError(f"{name} of the {type(block).__name__} is shared, and plan.py shards it; use a copy")


def is_split(p: Any) -> bool:
    """Return whether ``plan.py`` shards a parameter, or what is its gradient."""
    return "tensor" in p.device_mesh.mesh_dim_names and not p.placements[-1].is_replicate()
