"""The stages of a pipeline: consecutive blocks of the model, and the rank that holds each stage."""

from collections.abc import Callable
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # Private; optree has it.

from .config import ModelConfig, UserError
from .model import build_model

NUMBER = torch.empty(1, dtype=torch.int64, device="meta")  # Of a micro-batch, for the first stage.
getLogger("torch.distributed.pipelining.schedules").disabled = True  # It would print them if one fails.


class Stage(nn.Module):
    """Consecutive blocks, as a schedule runs them: with one tensor between two stages."""

    def __init__(self, autocast: Callable[[], torch.autocast], is_last: bool) -> None:
        super().__init__()
        self.blocks, self.autocast, self.is_last = nn.Sequential(), autocast, is_last
        self.inputs: list[Any] = []  # Of all micro-batches, in the first stage, which gets only their numbers.
        self.outputs: Any = None  # Of the last micro-batch, in the last stage.

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs:
            x = self.inputs[int(x)]
        else:
            x = x.view_as(x)
            x.register_hook(Tensor.contiguous)  # Only such gradients can be sent, and only such outputs.
        with self.autocast():
            x = self.blocks(x)
        if self.is_last:
            self.outputs, x = x, torch.zeros_like(NUMBER, device="cpu")  # The loss reads the former.
        return x.contiguous()


def shapes_of(inputs: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of all tensors in inputs of any nesting."""
    return tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def outline_stages(config: ModelConfig, count: int) -> tuple[list[int], dict[str, int]]:
    """Divide the model, built without values, into ``count`` stages; returns those of blocks, and of state by name."""
    wrapped: dict[nn.Module, nn.Module] = {}
    with torch.device("meta"):
        model: Any = build_model(config, lambda block: wrapped.setdefault(block, block))
    if type(model) is not nn.Sequential or [*model] != [*wrapped]:
        raise UserError("a pipeline splits a sequence: build_model has to return an nn.Sequential of what it wraps")
    if count > len(model):
        raise UserError(f"the model has {len(model)} blocks, too few for {count} stages; start fewer ranks")
    stages = [number * count // len(model) for number in range(len(model))]
    places, users = dict[str, int](), dict[nn.Parameter, str]()
    for (label, block), stage in zip(model.named_children(), stages, strict=True):
        places |= dict.fromkeys(block.state_dict(prefix=f"{label}."), stage)
        for name, parameter in block.named_parameters(label):
            other = users.setdefault(parameter, name)
            if places[other] != stage:
                raise UserError(f"{name} is also {other}, which is in another stage; untie them or start fewer ranks")
    return stages, places
