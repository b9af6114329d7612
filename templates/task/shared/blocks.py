def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, which are sharded, compiled or recomputed one by one: its longest sequence."""
    sequences = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    return list(max(sequences, key=len, default=()))
