"""Tensor parallel: every rank holds a slice of each layer and computes its part of what comes out.

A block says how it may be sliced; one that does not is held whole by every rank, which all compute the same. The ranks
of one group read the same samples. With several groups, each reads its share of the batch, and ranks with the same
slices add up their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from .blocks import prepare_blocks
from .config import Config
from .distributed import World


class Parallel:
    """The model, spread over the ranks. All that the rest of the package knows of how the work is split is this class.

    Attributes:
        module: What this rank holds of the model; its parameters have the names that they have in the whole one.
        device: Where inputs and targets have to be.
        data_rank: Which share of every batch this rank reads.
        data_size: Number of such shares.
        data_group: The ranks that hold the same part of the model and read other shares; None if that is all ranks.
    """

    def __init__(
        self, model: nn.Sequential, loss_fn: Callable[[Tensor, Tensor], Tensor], config: Config, world: World
    ) -> None:
        """Spread ``model``, which has to hold the same weights on every rank.

        Args:
            model: A sequence of named blocks, on the CPU.
            loss_fn: Takes outputs and targets, gives their mean loss as a scalar.
            config: The run's settings.
            world: This process's place.
        """
        shape = (config.parallel.replicas, world.size // config.parallel.replicas)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "tensor"))
        self.data_group, self.is_first = mesh["data"].get_group(), mesh.get_local_rank("tensor") == 0
        self.data_rank, self.data_size = mesh.get_local_rank("data"), shape[0]
        self.device = world.device
        self.loss_fn = loss_fn
        self.microbatches = config.train.microbatches
        self.autocast = build_autocast(self.device, config.train.precision)
        prepare_blocks(model, config.train)
        self.module = model
        for block in model:  # One by one, so that the whole model never lies on the device.
            slice_block(block.to(self.device), mesh["tensor"], config.parallel.sequence_parallel)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """Forward and backward of one global batch, of which this rank has a share.

        Leaves in every parameter the gradient of the mean loss over the global batch (times the scaler's factor).

        Args:
            inputs: This rank's inputs, ``global_batch_size / data_size`` of them.
            targets: Their targets.
            scaler: Scales the loss of fp16, and nothing else.

        Returns:
            This rank's part of the mean loss, a detached scalar on the device: the sum over all ranks is the mean.
        """
        total = torch.zeros((), device=self.device)
        pieces = list(zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True))
        for some_inputs, some_targets in pieces:
            with self.autocast():
                loss = self.loss_fn(self.module(some_inputs), some_targets) / (len(pieces) * self.data_size)
            scaler.scale(loss).backward()
            total += loss.detach()
        self.add_up_gradients()
        if scaler.is_enabled():
            # One slice's overflow has to be everyone's, or some would step and others not: its NaN is passed on.
            self.gradients()[0].to_local().add_(self.gradient_norm() * 0)
        return total * self.is_first  # All ranks of a group have the same loss.

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for this group's ``inputs`` on its first rank, None on the others, which have the same.

        All ranks of a group have to call it together.
        """
        with self.autocast():
            outputs = self.module(inputs)
        return outputs if self.is_first else None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` where it is larger; gives its norm before, on the device."""
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def add_up_gradients(self) -> None:
        """Sum the gradients of equal slices over the groups, each of which has its part of the mean."""
        if self.data_size > 1:
            add_up([gradient.to_local() for gradient in self.gradients()], self.data_group)

    def gradients(self) -> list[DTensor]:
        """The gradients of this rank's slices, and of what it has whole."""
        return [p.grad for p in self.module.parameters() if isinstance(p.grad, DTensor)]

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient of the whole model, over all slices."""
        norm: DTensor = nn.utils.get_total_norm(self.gradients())  # type: ignore[assignment]
        return norm.full_tensor()


def slice_block(block: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Slice a block as its ``tensor_plan`` says; what that leaves out becomes DTensors that every rank has whole."""
    plan = getattr(block, "tensor_plan", None)
    if plan is not None:
        parallelize_module(block, mesh, plan(sequence_parallel), src_data_rank=None)
    for module in block.modules():
        whole = {n: p for n, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)}
        if whole:
            replicate(module, whole, mesh)


def replicate(module: nn.Module, parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Make ``parameters`` DTensors, so that the optimizer sees one kind; ``module`` still computes on plain tensors."""
    for name, parameter in parameters.items():
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole))
    # As torch.nn.utils.parametrize does it: the attribute is a property of a class made for this module.
    local = {n: property(lambda self, n=n: self._parameters[n].to_local()) for n in parameters}  # type: ignore[misc]
    module.__class__ = type(type(module).__name__, (type(module),), local)


#:: include "parallelism/autocast.py" ::#


#:: include "parallelism/add_up.py" ::#
