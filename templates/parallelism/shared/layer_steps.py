#// Uses UserError, block, mesh, parallelize_module, tensor_plan. //#
names, plan = {name for name, _ in block.named_parameters()}, tensor_plan(block) if mesh.size() > 1 else {}
if len(plan) > 1 and any("Dropout" in type(each).__name__ and getattr(each, "p", 1) for each in block.modules()):
    raise UserError("nn.Dropout drops the same places of all shards; use F.dropout outside")
# All ranks drew the same, so each keeps its shard.
parallelize_module(block, mesh, plan, src_data_rank=None)
for name, _ in block.named_parameters():
    if name not in names:
        raise UserError(f"{name} is shared, and plan.py shards it; use a copy")
