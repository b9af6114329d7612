"""How the layers of each block are sharded over the ranks of a group."""

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from .model import Block, Embedding, Head


def tensor_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return how to shard a block's layers, by name, for ``parallelize_module``; other layers are on every rank.

    Between a pair, column-wise then row-wise, a rank has a part of the features as a plain tensor: code there must not
    depend on their number, nor drop some (ranks draw alike); plan norms as ``SequenceParallel(use_local_output=True)``.
    """
    if isinstance(block, Embedding):
        return {"byte": RowwiseParallel(input_layouts=Replicate())}  # Each rank looks up some tokens.
    if isinstance(block, Block):
        columns, rows = ColwiseParallel(), RowwiseParallel()
        return {"qkv": columns, "out": rows, "up": columns, "down": rows}
    if isinstance(block, Head):
        # To keep shards of logits, for F.cross_entropy of classes alone: use_local_output=False in place of this.
        return {"linear": ColwiseParallel(output_layouts=Replicate())}
    return {}
