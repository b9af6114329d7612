names = {name for name, _ in block.named_parameters()}
# All ranks drew the same values, so each keeps its shard.
parallelize_module(block, mesh, tensor_plan(block) if mesh.size() > 1 else {}, src_data_rank=None)
for name, _ in block.named_parameters():
    if name not in names:
        raise UserError(f"{name} of the {type(block).__name__} is shared, and plan.py shards it; use a copy")
