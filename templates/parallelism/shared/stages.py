"""The stages of a pipeline: consecutive blocks of the model, and what stages send each other."""

from functools import partial
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only  # Private; optree has the same.
from torch.utils.checkpoint import checkpoint

from .config import Config, ModelConfig, UserError
from .distributed import Process
from .model import build_model
from .sharded import collect_state

# A schedule whose stage fails would log all of its actions, which hides the error itself.
getLogger("torch.distributed.pipelining.schedules").disabled = True

# What each stage receives, by its index, and what the last one returns, by the number of stages.
Shapes = dict[int, Tensor]
NUMBER = torch.empty(1, dtype=torch.int64, device="meta")  # Like the number of a micro-batch.


class Stage(nn.Module):
    """Consecutive blocks as a schedule runs them: one tensor comes in, and one goes out.

    The model's inputs and outputs may be nested. So a schedule gets numbers of micro-batches: the
    first stage takes ``remaining_inputs``, the last leaves its ``outputs`` for the loss.
    """

    def __init__(self, blocks: nn.Sequential, is_last: bool) -> None:
        super().__init__()
        self.blocks = blocks
        self.is_last = is_last
        self.remaining_inputs = list[Any]()
        self.outputs: Any = None
        self.changed_parameter = ""  # The name of one that forward changes, if there is any.

    def forward(self, inputs: Any) -> Tensor:
        """Run one micro-batch, and return what the schedule sends to the next stage."""
        if self.remaining_inputs:
            inputs = self.remaining_inputs.pop(0)  # A schedule runs micro-batches in their order.
        outputs = self.blocks(inputs)
        for name, parameter in self.blocks.named_parameters():
            # A version counts writes in place. FSDP excludes those of its all-gathers.
            if parameter._version > 0:
                self.changed_parameter = name  # A schedule would wrap an error in a RuntimeError.
        if self.is_last:
            self.outputs = outputs
            return torch.zeros(1, dtype=torch.int64)  # Nobody reads this.
        return outputs.contiguous()

    def take_outputs(self) -> Any:
        """Return the last stage's outputs; here, they would take memory until the next forward."""
        outputs = self.outputs
        self.outputs = None
        return outputs


class Outline:
    """The model without values: which stage has which block, and what the stages send each other.

    A rank has to know the shapes that it receives, but has only its own blocks.
    """

    def __init__(self, config: ModelConfig, num_stages: int, dtype: torch.dtype) -> None:
        """Build the model, whose blocks compute in ``dtype``; rejects one that has no stages."""
        self.dtype = dtype
        self.num_stages = num_stages
        self.shapes = dict[Any, Shapes]()
        wrapped_blocks = list[nn.Module]()

        def wrap(block: nn.Module) -> nn.Module:
            if block not in wrapped_blocks:  # One used twice counts once, and is rejected below.
                wrapped_blocks.append(block)
            return block

        with torch.device("meta"):
            model: Any = build_model(config, wrap)
        # Apart from blocks, it has to equal an empty nn.Sequential: no stage would have its hooks.
        is_bare = vars(model) | {"_modules": {}} == vars(nn.Sequential()) | {"_modules": {}}
        if not is_bare or type(model) is not nn.Sequential or list(model) != wrapped_blocks:
            raise UserError("a pipeline needs an nn.Sequential of what build_model wraps, no hooks")
        num_blocks = len(model)
        if num_stages > num_blocks:
            raise UserError(f"{num_blocks} blocks are too few for {num_stages} stages; use fewer")
        self.stage_of_block = [block * num_stages // num_blocks for block in range(num_blocks)]
        self.state_names = set(model.state_dict())
        refuse_shared(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # FSDP gathers a block in this type.
        self.model = model.eval()  # BatchNorm rejects one sample in training.

    def trace(self, inputs: Any) -> Shapes:
        """Return meta tensors like those that each stage receives and that the last one returns."""
        input_shapes = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if input_shapes not in self.shapes:
            self.shapes[input_shapes] = self.run_blocks(inputs)
        return self.shapes[input_shapes]

    def run_blocks(self, inputs: Any) -> Shapes:
        """Run the whole model on the device "meta", and return the tensors between its stages."""
        received: Shapes = {0: NUMBER, self.num_stages: NUMBER}
        features = inputs
        with torch.no_grad(), torch.device("meta"):
            for stage_index, block in zip(self.stage_of_block, self.model, strict=True):
                if stage_index not in received:
                    # A schedule sends gradients back only for what requires them.
                    received[stage_index] = torch.empty(
                        features.shape, dtype=features.dtype, requires_grad=True
                    )
                features = block(tree_map_only(Tensor, self.to_meta, features))
        return received

    def to_meta(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor of the type to which FSDP casts this input of a block."""
        if tensor.is_floating_point():
            return tensor.to("meta", self.dtype)
        return tensor.to("meta")


def refuse_shared(model: nn.Module) -> None:
    """Reject a parameter that two blocks have: each block would train its own copy."""
    first_names = dict[nn.Parameter, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in first_names:
            first_names[parameter] = name
        first_name = first_names[parameter]
        if name.split(".")[0] != first_name.split(".")[0]:
            raise UserError(f"{name} is also {first_name} of another block; use a copy")


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    for name, buffer in block.named_buffers():
        if not buffer.is_contiguous():
            raise UserError(f"buffer {name} cannot be loaded; make it contiguous")
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            raise UserError(
                "train.activation_checkpointing updates BatchNorm's statistics twice; turn it off"
            )
        # A wrapper module would do the same, but change the names of parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()
    return block


def gather_state_dict(
    module: nn.Module, optimizer: Optimizer, process: Process, ranks_per_stage: int
) -> dict[str, Any]:
    """Return on rank 0's CPU weights and optimizer state of all stages, by name; a collective."""
    # The ranks that share a stage are consecutive; only the first of them keeps whole tensors.
    content = collect_state(module, optimizer, keeps=process.rank % ranks_per_stage == 0)
    for source in range(ranks_per_stage, process.world_size, ranks_per_stage):
        if process.rank == source:
            dist.send_object_list([content], 0, process.cpu_group)
        elif process.rank == 0:
            received = [content]  # This is replaced.
            dist.recv_object_list(received, source, process.cpu_group)
            content["model"].update(received[0]["model"])
            content["optimizer"]["state"].update(received[0]["optimizer"]["state"])
    return content
