"""How the layers of each block are sharded over the ranks of a group."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from .config import UserError
from .model import Head


def tensor_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return how ``parallelize_module`` shards layers of a block, by name; others stay whole."""
    # Styles exist for nn.Linear and nn.Embedding. DTensor cannot shard channels of a convolution.
    if isinstance(block, Head):
        # A rank maps some of the features to all classes; the sum over the ranks is the logits.
        rows = RowwiseParallel(input_layouts=Replicate())
        return {"linear": rows}
    return {}


#:: include "parallelism/shared/layers.py" ::#
