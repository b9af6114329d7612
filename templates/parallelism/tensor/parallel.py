"""Tensor parallelism: every rank holds a shard of each large layer, and computes its part of the layer's output.

``plan.py`` lists which layers are sharded, and how. The ranks of a group read the same samples:

    rank 0   x ── half of the features of layer 1 ── half of the terms of layer 2 ──┐
                                                                               all-reduce ── y
    rank 1   x ── the other half ─────────────────── the other half ────────────────┘

With several groups, each reads a local batch, and what a rank holds is sharded over them once more, by FSDP2.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from logging import getLogger
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; optree has it.
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model
from .plan import tensor_plan
from .sharded import Checkpointer

warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view")  # Nothing changes outputs in place.
getLogger("torch.distributed.tensor").setLevel("ERROR")  # It warns of saving.


class Parallel:
    """The model with sharded layers. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device = process, process.device
        layout, kind = config.parallel, self.device.type
        blocks, seen = list[nn.Module](), WeakValueDictionary[int, nn.Parameter]()
        self.dp_size = layout.dp_size(process.world_size)
        self.replicas = layout.replicas
        shape = (self.replicas, self.dp_size // self.replicas, process.world_size // self.dp_size)
        self.dp_rank, rank_in_group = divmod(process.rank, shape[-1])
        self.is_first = rank_in_group == 0
        self.dp_group = dist.group.WORLD
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        # Blocks compute in it; shards stay in fp32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        torch.compiler.config.cache_key_tag = str(process.rank)  # Else shared.
        group = mesh["tensor"]  # Compiled blocks compare it.
        data = mesh["replicate", "shard"] if self.replicas > 1 else mesh["shard"]
        shard = partial(fully_shard, mesh=data, mp_policy=policy)

        def wrap(block: nn.Module) -> nn.Module:
            refuse_shared(block.to(self.device), seen)
            shard_layers(block, group)
            blocks.append(prepare_block(block, config))
            shard(block, reshard_after_forward=layout.reshard_after_forward)
            return block

        self.module = build_model(config.model, wrap)
        for block in blocks:  # Once more: the model may share parameters later.
            refuse_shared(block, seen)
        if not any(map(tensor_plan, blocks)):
            raise UserError("plan.py shards no layer, so ranks would compute the same")
        self.fsdp = shard(self.module)
        self.head = cast(FSDPModule, blocks[-1])
        self.head.set_reshard_after_forward(False)  # Backward starts with it.
        self.microbatches, self.allow_unused = config.train.microbatches, config.train.allow_unused

    @loss_parallel()  # Sharded logits.
    def forward_backward(self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]) -> None:
        """Leave in each parameter the gradient of the mean loss over all micro-batches; a collective."""
        # A group's ranks draw the same, as dropout of whole activations needs.
        microbatches = split_batch((inputs, targets), self.microbatches)
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            # Each micro-batch scatters its gradients: to wait for the last would keep whole ones. Replicas average
            # theirs once, after the last.
            self.fsdp.set_requires_all_reduce(number == self.microbatches)
            self.scaler.scale(mean_loss(self.module(inputs), targets)).backward()
        if self.allow_unused:
            self.compare_used()

    def compare_used(self) -> None:
        """Reject parameters with a gradient on some ranks only: FSDP would have added those of others to it."""
        used = self.process.all_gather({name for name, p in self.module.named_parameters() if p.grad is not None})
        if names := set.union(*used) - set.intersection(*used):
            raise UserError(f"only some ranks use {min(names)}; under this strategy, all have to, or none")

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        outputs = tree_map_only(DTensor, DTensor.full_tensor, self.module(inputs))
        self.head.reshard()  # There is no backward.
        return outputs if self.is_first else None  # Its group has the same.

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        # A group's ranks have equal gradients of what plan.py leaves whole.
        own = nn.utils.get_total_norm([g.to_local() for g in gradients if self.is_first or is_split(g)])
        norms = [torch.empty_like(own, device=self.device) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, own.to(self.device))  # Summed in one order.
        norm = torch.stack(norms).norm() / self.replicas**0.5
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.to_local().mul_(scale)
        return norm

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over ranks with other samples."""
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole model's weights, and the optimizer's state by parameter, on rank 0's CPU."""
        options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = dsd.get_state_dict(self.module, optimizer, options=options)
        return {"model": model, "optimizer": {"state": optim.get("state", {})}}  # On other ranks, there is none.

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
        """Load rank 0's weights of the whole model, and the optimizer's state if given."""
        options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dsd.set_model_state_dict(self.module, model, options=options)
        options.strict = False  # A parameter that never had a gradient has no state.
        if optimizer and (own := dsd.get_optimizer_state_dict(self.module, optimizer))["state"]:  # Plain SGD has none.
            dsd.set_optimizer_state_dict(self.module, optimizer, {**own, "state": state or {}}, options=options)


def shard_layers(block: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a block's layers over a group of ranks, by its plan; rejects weights that layers share."""
    names, plan = {name for name, _ in block.named_parameters()}, tensor_plan(block) if mesh.size() > 1 else {}
    if len(plan) > 1 and any("Dropout" in type(each).__name__ and getattr(each, "p", 1) for each in block.modules()):
        raise UserError("nn.Dropout drops the same places of all shards; use F.dropout outside")
    # All ranks drew the same, so each keeps its shard.
    parallelize_module(block, mesh, plan, src_data_rank=None)
    for name, _ in block.named_parameters():
        if name not in names:
            raise UserError(f"{name} is shared, and plan.py shards it; use a copy")


def is_split(p: Any) -> bool:
    """Return whether ``plan.py`` shards a parameter, or what is its gradient."""
    return "tensor" in p.device_mesh.mesh_dim_names and not p.placements[-1].is_replicate()


def refuse_shared(block: nn.Module, seen: WeakValueDictionary[int, nn.Parameter]) -> None:
    """Reject a parameter that was ``seen`` in another block: two copies of it would be trained."""
    for name, parameter in block.named_parameters():
        if seen.get(id(parameter)) is parameter:
            raise UserError(f"{name} of the {type(block).__name__} is shared with another block; use a copy")
        seen[id(parameter)] = parameter


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    for name, buffer in block.named_buffers():
        if not buffer.is_contiguous() or re.search(r"int16|uint[36]|float[48]|complex32", str(buffer.dtype)):
            raise UserError(f"buffer {name} cannot be sent; make it contiguous, of a type like int32")
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            raise UserError("train.activation_checkpointing updates BatchNorm's statistics twice; turn it off")
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()
    return block
