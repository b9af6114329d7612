#// Uses UserError, WeakValueDictionary, nn. //#
def refuse_shared(block: nn.Module, seen: WeakValueDictionary[int, nn.Parameter]) -> None:
    """Reject a parameter that was ``seen`` in another block: two copies of it would be trained."""
    for name, parameter in block.named_parameters():
        if seen.get(id(parameter)) is parameter:
            raise UserError(f"{name} of the {type(block).__name__} is shared with another block; use a copy")
        seen[id(parameter)] = parameter
