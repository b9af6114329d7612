def shard_layers(block: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a block's layers over a group of ranks, by its plan; rejects weights that layers share."""
#:: filter indent(4, true) ::#
#:: include "parallelism/shared/layer_steps.py" ::#
#:: endfilter ::#


def is_split(p: Any) -> bool:
    """Return whether ``plan.py`` shards a parameter, or what is its gradient."""
    return "tensor" in p.device_mesh.mesh_dim_names and not p.placements[-1].is_replicate()
