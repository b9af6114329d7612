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
    """Return how ``parallelize_module`` shards the layers of a block, by name.

    Every rank holds all other layers whole. Between a pair of layers, column-wise then row-wise, a
    rank has a plain tensor with a part of the features. Code between them must not depend on the
    number of features, nor drop some: all ranks would drop the same. Plan norms between them as
    ``SequenceParallel(use_local_output=True)``.
    """
    if isinstance(block, Embedding):
        # A rank looks up some of the tokens; the sum over the ranks is the features of all.
        return {"byte": RowwiseParallel(input_layouts=Replicate())}
    if isinstance(block, Block):
        columns = ColwiseParallel()
        rows = RowwiseParallel()
        # A rank computes some of the heads and, in the perceptron, some of the hidden features.
        return {"qkv": columns, "out": rows, "up": columns, "down": rows}
    if isinstance(block, Head):
        # A rank computes the logits of some tokens, and gathers those of the others. If the losses
        # are F.cross_entropy alone, use_local_output=False keeps the logits sharded instead.
        return {"linear": ColwiseParallel(output_layouts=Replicate())}
    return {}


#:: include "parallelism/shared/layers.py" ::#
