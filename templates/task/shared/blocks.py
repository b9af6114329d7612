def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that gives none to ``place``; they are sharded, compiled or recomputed one by one.

    They are the children of a sequence in it: of the one that leaves no large part of the model in one piece.
    """

    def largest_piece(sequence: nn.Module) -> int:
        *sizes, whole = (sum(p.numel() for p in part.parameters()) for part in (*sequence.children(), model))
        return max([*sizes, whole - sum(sizes)])

    sequences = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    return list(min(sequences, key=largest_piece).children()) if sequences else []
