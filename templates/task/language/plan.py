"""How the layers of each block are sharded over the ranks of a group."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from .config import UserError
from .model import Block, Embedding, Head


def tensor_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return how ``parallelize_module`` shards layers of a block, by name; others stay whole."""
    # Between a column-wise and a row-wise layer, a rank has some of the features: code there must
    # not depend on their number, nor drop some; norms are SequenceParallel(use_local_output=True).
    if isinstance(block, Embedding):
        # A rank looks up some of the tokens; the sum over the ranks is the features of all.
        return {"byte": RowwiseParallel(input_layouts=Replicate())}
    if isinstance(block, Block):
        columns = ColwiseParallel()
        rows = RowwiseParallel()
        # A rank computes some of the heads and, in the perceptron, some of the hidden features.
        return {"qkv": columns, "out": rows, "up": columns, "down": rows}
    if isinstance(block, Head):
        # A rank has some tokens' logits. For F.cross_entropy, use_local_output=False is enough.
        return {"linear": ColwiseParallel(output_layouts=Replicate())}
    return {}


#:: include "parallelism/shared/layers.py" ::#
