"""How the layers of each block are sharded over the ranks of a group."""

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from .model import Block, Embedding, Head


def tensor_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return how to shard a block's layers, by name, for ``parallelize_module``; other layers are on every rank.

    Between the layers of a pair, column-wise then row-wise, a rank has its part of the features as a plain tensor:
    code there must not depend on their number, nor drop some (ranks draw alike); parameters must be sharded too.
    """
    if isinstance(block, Embedding):
        return {"byte": RowwiseParallel(input_layouts=Replicate())}  # Each rank looks up some tokens.
    if isinstance(block, Block):
        # Each rank computes some heads and some hidden features. The rows of qkv are ordered by head, so that a shard
        # of them is whole heads. The shortcuts add sums over the ranks.
        columns, rows = ColwiseParallel(), RowwiseParallel()
        return {"qkv": columns, "out": rows, "up": columns, "down": rows}
    if isinstance(block, Head):
        # Each rank computes the logits of some tokens, as a DTensor; output_layouts=Replicate() alone gathers them.
        return {"linear": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    return {}
