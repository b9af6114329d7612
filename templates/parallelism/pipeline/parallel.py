"""Pipeline parallelism: every rank holds some blocks of the model, and micro-batches pass from rank to rank.

Ranks of several pipelines with the same stages shard these by FSDP2: they gather weights when a step
begins, and scatter gradients when it ends.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process, seed_everything
from .loader import split_batch
from .model import build_model
from .sharded import Checkpointer
from .stages import Outline, Stage


class Parallel:
    """Stages of the model."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device, kind = process, process.device, process.device.type
        self.config, self.microbatches = config.parallel, config.train.microbatches
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        self.dp_size, replicas = self.config.dp_size(process.world_size), self.config.replicas
        self.position, self.dp_rank = divmod(process.rank, self.dp_size)
        shape = (process.world_size // self.dp_size, replicas, self.dp_size // replicas)
        self.mesh = init_device_mesh(kind, shape, mesh_dim_names=("pipeline", "replicate", "shard"))
        self.group, (self.dp_group, _) = self.mesh.get_group("pipeline"), dist.new_subgroups(self.dp_size)
        self.owners = [*range(shape[0])] * self.config.stages_per_rank
        self.last = len(self.owners) - 1
        self.module, self.stages = nn.Sequential(), dict[int, Stage]()
        self.build_stages(config)
        self.schedule = self.forms = cast(Any, None)

    def build_stages(self, config: Config) -> None:
        """Build the model, and keep this rank's blocks."""
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        # Blocks compute in it; shards stay in fp32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        self.outline = Outline(config.model, len(self.owners), dtype)
        seed_everything(config.run.seed)  # The outline may draw too.
        stages, numbers = self.outline.stages, iter(self.outline.stages)
        mesh = self.mesh["replicate", "shard"] if self.config.replicas > 1 else self.mesh["shard"]
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

        def wrap(block: nn.Module) -> nn.Module:
            prepare_block(block, config)
            if self.owners[next(numbers)] != self.position:
                return block.to("meta")
            shard(block.to(self.device))
            return block

        for stage, (name, block) in zip(stages, build_model(config.model, wrap).named_children(), strict=True):
            if self.owners[stage] == self.position:
                self.module.add_module(name, block)
                self.stages.setdefault(stage, Stage(nn.Sequential(), stage == self.last)).blocks.append(block)
        for each in self.stages.values():
            shard(each)  # For the schedule.

    def forward_backward(self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]) -> None:
        """Leave in each parameter the gradient of the mean loss over all micro-batches; a collective."""
        batches = split_batch((inputs, targets), self.microbatches)
        if (forms := self.outline.trace(batches[0][0])) is not self.forms:
            self.build_schedule(forms)
        torch.manual_seed(torch.initial_seed() + self.position)  # For dropout.
        self.targets, self.mean_loss = [targets for _, targets in batches], mean_loss
        ids = torch.arange(self.microbatches, device=self.device)
        if first := self.stages.get(0):
            first.inputs = [inputs for inputs, _ in batches]
        self.schedule.step(*[ids] * (first is not None), target=ids if self.last in self.stages else None)

    def build_schedule(self, forms: dict[int, Tensor]) -> None:
        """Build the schedule for tensors of these forms."""
        build = partial(PipelineStage, num_stages=len(self.owners), device=self.device, group=self.group)
        stages = [build(s, i, input_args=forms[i], output_args=forms[i + 1]) for i, s in self.stages.items()]
        kind: Any = get_schedule_class(self.config.schedule)
        own = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self.schedule = kind(own, self.microbatches, loss_fn=self.compute_loss, scale_grads=False)
        self.forms = forms

    def compute_loss(self, *_: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss; called after the last stage."""
        return self.mean_loss(self.stages[self.last].outputs, self.targets.pop(0))

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        x, group, forms = inputs, self.group, self.outline.trace(inputs)
        for index, stage in self.stages.items():
            if index > 0 and index - 1 not in self.stages:
                x = torch.empty_like(forms[index], device=self.device)
                dist.recv(x, group=group, group_src=self.owners[index - 1])
            x = stage(x)
            if index < self.last and index + 1 not in self.stages:
                dist.send(x, group=group, group_dst=self.owners[index + 1])
        for block in self.module:
            cast(FSDPModule, block).reshard()  # There is no backward.
        return self.stages[self.last].outputs if self.last in self.stages else None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        own = nn.utils.get_total_norm([g.to_local() for g in gradients]).to(self.device)
        norms = [torch.empty_like(own) for _ in range(self.process.world_size)]
        dist.all_gather(norms, own)  # Summed in one order on all.
        norm = torch.stack(norms).norm() / self.config.replicas**0.5
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over ranks with other samples."""
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole model's weights, and the optimizer's state by parameter, on rank 0's CPU."""
        rank, group, size = self.process.rank, self.process.cpu_group, dist.get_world_size(self.dp_group)
        model, optim = dsd.get_state_dict(self.module, optimizer)

        def gather(part: Tensor) -> Tensor | None:
            whole = part.full_tensor() if isinstance(part, DTensor) else part
            return whole.cpu() if rank % size == 0 else None

        whole: list[Any] = tree_map_only(Tensor, gather, [model, optim["state"]])
        for source in range(size, self.process.world_size, size):
            part = [*whole]
            if rank == source:
                dist.send_object_list(part, 0, group)
            elif rank == 0:
                dist.recv_object_list(part, source, group)
                whole = [mine | theirs for mine, theirs in zip(whole, part, strict=True)]
        return {"model": whole[0], "optimizer": {"state": whole[1]}}

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
        """Load rank 0's weights of the whole model, and the optimizer's state if given."""
        own, states, names = dict[str, Any](), dict[str, Any](), self.module.state_dict()
        for name in max(self.process.all_gather([*model])):  # Rank 0's.
            entry = [model.get(name), (state or {}).get(name)]
            dist.broadcast_object_list(entry, 0, self.process.cpu_group)
            if name in names or name not in self.outline.names:
                own[name], states[name] = entry
        options = dsd.StateDictOptions(full_state_dict=True)
        dsd.set_model_state_dict(self.module, own, options=options)
        options.strict = False  # Without a gradient, there is no state.
        if optimizer and any(states.values()):
            whole = dsd.get_optimizer_state_dict(self.module, optimizer)
            whole["state"] = {name: values for name, values in states.items() if values}
            dsd.set_optimizer_state_dict(self.module, optimizer, whole, options=options)


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
