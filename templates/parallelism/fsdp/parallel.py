"""Fully sharded data parallel: every rank holds a shard of each block and reads its local batch.

Before a block runs, its weights are gathered from all ranks; afterwards, they are freed. Its gradients are averaged and
scattered, so that each rank gets those of its own shard and updates only that shard.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process
from .loader import split_batch
from .model import build_model
from .sharded import Checkpointer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel:
    """The model under FSDP2. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device = process, process.device
        self.dp_rank, self.dp_size, self.dp_group = process.rank, process.world_size, dist.group.WORLD
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.precision == "fp16")
        layout, blocks, seen = config.parallel, list[nn.Module](), WeakValueDictionary[int, nn.Parameter]()
        # Blocks compute in it; shards stay in fp32, as do sums of gradients.
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.train.precision], reduce_dtype=torch.float32)
        shape = (layout.replicas, self.dp_size // layout.replicas)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        shard = partial(fully_shard, mesh=mesh if layout.replicas > 1 else mesh["shard"], mp_policy=policy)

        def wrap(block: nn.Module) -> nn.Module:
            refuse_shared(block, seen)
            blocks.append(prepare_block(block, config))
            shard(block, reshard_after_forward=layout.reshard_after_forward)
            return block

        self.module = build_model(config.model, wrap)
        self.group = mesh.get_group("shard")
        for block in blocks:  # Once more: the model may share parameters later.
            refuse_shared(block, seen)
        self.fsdp = shard(self.module)
        self.head = cast(FSDPModule, blocks[-1])
        self.head.set_reshard_after_forward(False)  # Backward starts with it.
        self.microbatches, self.allow_unused = config.train.microbatches, config.train.allow_unused

    def forward_backward(self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]) -> None:
        """Leave in each parameter the gradient of the mean loss over all micro-batches; a collective."""
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
        outputs = self.module(inputs)
        self.head.reshard()  # There is no backward.
        return outputs

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        own = nn.utils.get_total_norm([g.to_local() for g in gradients]).to(self.device)
        norms = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, own, group=self.group)  # Summed in one order on all.
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm := torch.stack(norms).norm())
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
