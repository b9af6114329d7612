"""How the layers of each block are sharded over the ranks of a group."""

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from .model import Head


def tensor_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return how to shard a block's layers, by name, for ``parallelize_module``; other layers are on every rank.

    Styles exist for ``nn.Linear`` and ``nn.Embedding``; DTensor cannot shard the channels of a convolution.
    """
    if isinstance(block, Head):
        # Each rank maps some of the features to all classes; the sum over the ranks is the logits.
        return {"linear": RowwiseParallel(input_layouts=Replicate())}
    return {}
