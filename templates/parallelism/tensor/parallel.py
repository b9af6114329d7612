"""Tensor parallelism: every rank holds a shard of each layer and computes its part of the layer's output.

A block's ``tensor_plan`` defines how to shard it; a block without one is replicated, and all ranks compute the same in
it. The ranks of one group read the same samples. With several groups, each reads its share of the batch, and ranks with
the same shards sum their gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

from .config import Config, UserError
from .model import blocks
from .runtime import Process, get_rng_state, set_rng_state
from .splitting import all_reduce_sum, build_by_block, split_batch
from .strategy import BuildFn, LossFn, Strategy

Replicated = tuple[nn.Module, str, Any]


class Parallel(Strategy):
    """The model as DTensors: sharded where a block has a plan, replicated elsewhere."""

    waits_in_forward = True

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        layout = config.parallel
        shape = (layout.replicas, process.world_size // layout.replicas)
        mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=("data", "tensor"))
        dp_rank, dp_group = mesh.get_local_rank("data"), mesh["data"].get_group()
        super().__init__(loss_fn, config, process, dp_rank, dp_group)
        self.group, self.is_first = mesh["tensor"].get_group(), mesh.get_local_rank("tensor") == 0
        self.replicated: list[Replicated] = []

        def parallelize(block: nn.Module) -> None:
            self.replicated += parallelize_block(block.to(self.device), mesh["tensor"], layout.sequence_parallel)

        # Each block, when it is built, so that the whole model is never on the device, nor on the CPU.
        self.module, _ = build_by_block(build, blocks, config.train, parallelize)
        check_plan(self.module)
        parallelize(self.module)

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        for some_inputs, some_targets in split_batch((inputs, targets), self.microbatches):
            with self.local_parameters():
                with self.autocast():
                    loss = self.add_loss(self.module(some_inputs), some_targets)
                scaler.scale(loss).backward()
        if self.dp_size > 1:  # Each group has its part of the mean.
            all_reduce_sum([gradient.to_local() for gradient in self.gradients()], self.dp_group)
        if scaler.is_enabled():
            # If one shard overflows, all have to skip the step: its NaN reaches every rank through the norm.
            self.gradients()[0].to_local().add_(self.gradient_norm() * 0)
        # All ranks of a group have the same losses.
        return {name: loss * self.is_first for name, loss in self.finish_losses().items()}

    def predict(self, inputs: Any) -> Any:
        with self.local_parameters(), self.autocast():
            outputs = self.module(inputs)
        # Also where they are dropped: PyTorch warns of messages that nobody waited for.
        outputs = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.wait, outputs)
        return outputs if self.is_first else None  # All ranks of a group have the same outputs.

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def align_random_state(self) -> None:
        # Replicated activations would otherwise drop other units on each rank of a group.
        state = [get_rng_state(self.device)]
        dist.broadcast_object_list(state, group=self.group, group_src=0)
        set_rng_state(state[0], self.device)

    @contextmanager
    def local_parameters(self) -> Iterator[None]:
        """Make modules compute on replicated parameters as plain tensors, as ``torch.func.functional_call`` would.

        Backward has to run inside this context too, because activation checkpointing runs modules again.
        """
        for module, name, parameter in self.replicated:
            module._parameters[name] = parameter.to_local()
        try:
            yield
        finally:
            for module, name, parameter in self.replicated:
                module._parameters[name] = parameter

    def gradients(self) -> list[DTensor]:
        """Return the gradients of this rank's shards, and of replicated parameters."""
        return [p.grad for p in self.module.parameters() if isinstance(p.grad, DTensor)]

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, over all shards."""
        norm: DTensor = nn.utils.get_total_norm(self.gradients())  # type: ignore[assignment]
        return norm.full_tensor()


def check_plan(model: nn.Module) -> None:
    """Reject a model of which nothing would be sharded."""
    if not any(hasattr(module, "tensor_plan") for module in model.modules()):
        raise UserError(
            f"tensor shards layers by a plan, but no module of the {type(model).__name__} has one; give the modules in "
            "model.py a method tensor_plan(sequence_parallel) that returns a plan for parallelize_module"
        )


def parallelize_block(block: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> list[Replicated]:
    """Shard modules of a block by their ``tensor_plan``; replicate the rest, so the optimizer sees only DTensors.

    Returns:
        The replicated parameters, which modules compute on as plain tensors.
    """
    replicated = []
    for module in block.modules():
        plan: Any = getattr(module, "tensor_plan", None)
        if plan is not None and not any(isinstance(p, DTensor) for p in module.parameters()):
            parallelize_module(module, mesh, plan(sequence_parallel), src_data_rank=None)
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
                replicated.append((module, name, module.get_parameter(name)))
    return replicated
