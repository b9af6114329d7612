"""The stages of a pipeline: consecutive blocks of the model, and what they send each other."""

from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only  # Private; optree has them.

from .config import ModelConfig, UserError
from .model import build_model

NUMBER = torch.empty(1, dtype=torch.int64, device="meta")  # Of a micro-batch, for the first stage.
getLogger("torch.distributed.pipelining.schedules").disabled = True  # It would print them if one fails.


#:: include "parallelism/shared/stage.py" ::#


#:: include "parallelism/shared/outline.py" ::#
