def is_sharded_by_plan(tensor: Any) -> bool:
    """Return whether ``plan.py`` shards a parameter, or the parameter of a gradient."""
    # Only what the plan names has "tensor" in its mesh, as the last dimension.
    return "tensor" in tensor.device_mesh.mesh_dim_names and tensor.placements[-1].is_shard()


def shard_layers(block: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Shard a block's layers over a group of ranks, as ``plan.py`` says."""
    if tensor_mesh.size() == 1:
        return
    plan = tensor_plan(block)
    for module in block.modules():
        is_dropout = "Dropout" in type(module).__name__ and getattr(module, "p", 1) > 0
        # Between two sharded layers, ranks have other features, but would draw the same numbers.
        if is_dropout and len(plan) > 1:
            raise UserError("nn.Dropout drops the same places of all shards; use F.dropout outside")
    names = {name for name, _ in block.named_parameters()}
    parallelize_module(block, tensor_mesh, plan, src_data_rank=None)  # Ranks drew equal weights.
    # Of a shared parameter, the first name is listed. The other appears if the first is replaced.
    for name, _ in block.named_parameters():
        if name not in names:
            raise UserError(f"{name} is shared, and plan.py shards it; use a copy")
