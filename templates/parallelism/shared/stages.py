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


class Stage(nn.Module):
    """Consecutive blocks, as a schedule runs them: with one tensor between two stages."""

    def __init__(self, blocks: nn.Sequential, is_last: bool) -> None:
        super().__init__()
        self.blocks, self.is_last = blocks, is_last
        self.inputs: list[Any] = []  # Of all micro-batches, in the first stage, which gets numbers.
        self.outputs: Any = None  # Of the last micro-batch, in the last stage.

    def forward(self, x: Any) -> Tensor:
        if self.inputs:
            x = self.inputs.pop(0)  # They come in order.
        elif torch.is_grad_enabled():
            x = x.view_as(x)
            x.register_hook(Tensor.contiguous)  # Only such gradients can be sent.
        x = self.blocks(x)
        if self.is_last:
            self.outputs, x = x, torch.zeros_like(NUMBER, device="cpu")  # For the loss.
        return x.contiguous()


class Outline:
    """The model without values: each block's stage, and what stages send."""

    def __init__(self, config: ModelConfig, count: int, dtype: torch.dtype) -> None:
        wrapped: dict[nn.Module, nn.Module] = {}
        with torch.device("meta"):
            self.model: Any = build_model(config, lambda block: wrapped.setdefault(block, block)).eval()
        if type(self.model) is not nn.Sequential or [*self.model] != [*wrapped]:
            raise UserError("a pipeline needs an nn.Sequential of what build_model wraps")
        if count > (blocks := len(self.model)):
            raise UserError(f"{blocks} blocks are too few for {count} stages; use fewer")
        self.stages, self.dtype = [number * count // blocks for number in range(blocks)], dtype
        self.names, self.forms = {*self.model.state_dict()}, dict[Any, dict[int, Tensor]]()
        users = dict[nn.Parameter, str]()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            other = users.setdefault(parameter, name)
            if other.split(".")[0] != name.split(".")[0]:
                raise UserError(f"{name} is also {other} of another block; use a copy")
            parameter.data = parameter.data.to(dtype)

    def trace(self, inputs: Any) -> dict[int, Tensor]:
        """Return what enters each stage, and leaves the last one; one dict for equal shapes."""
        shapes = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if shapes not in self.forms:
            x, self.forms[shapes] = inputs, {0: NUMBER, 1 + self.stages[-1]: NUMBER}
            with torch.no_grad(), torch.device("meta"):
                for stage, block in zip(self.stages, self.model, strict=True):
                    if stage not in self.forms[shapes]:
                        self.forms[shapes][stage] = torch.empty(x.shape, dtype=x.dtype, requires_grad=True)
                    x = tree_map_only(Tensor, lambda t: t.to("meta", self.dtype if t.is_floating_point() else None), x)
                    x = block(x)  # In the type of FSDP's inputs.
        return self.forms[shapes]
