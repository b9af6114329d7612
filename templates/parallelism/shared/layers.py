def is_sharded_by_plan(tensor: Any) -> bool:
    """Return whether ``plan.py`` shards a parameter, or the parameter of a gradient."""
    # Only what the plan names is on the dimension "tensor", which is the last one of its mesh.
    return "tensor" in tensor.device_mesh.mesh_dim_names and tensor.placements[-1].is_shard()


def shard_layers(block: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Shard a block's layers over a group of ranks, as ``plan.py`` says."""
    if tensor_mesh.size() == 1:
        return
    plan = tensor_plan(block)
    if len(plan) > 1:
        refuse_dropout(block)
    names = {name for name, _ in block.named_parameters()}
    # All ranks have drawn the same weights, so each keeps its shard, and nothing is sent.
    parallelize_module(block, tensor_mesh, plan, src_data_rank=None)
    # PyTorch lists a shared parameter by its first name only. If sharding has replaced it there,
    # its other name appears.
    for name, _ in block.named_parameters():
        if name not in names:
            raise UserError(f"{name} is shared, and plan.py shards it; use a copy")


def refuse_dropout(block: nn.Module) -> None:
    """Reject dropout modules in a block, as they may lie between two sharded layers.

    The ranks of a group draw the same random numbers, which whole activations need; of shards, all
    ranks would drop the same positions.
    """
    for module in block.modules():
        if "Dropout" in type(module).__name__ and getattr(module, "p", 1) > 0:
            raise UserError("nn.Dropout drops the same places of all shards; use F.dropout outside")
