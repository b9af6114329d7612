"""One mesh of ranks: pipeline, tensor and fully sharded data parallelism.

Ranks that differ in a dimension have:

    pipeline    other blocks: micro-batches pass through them
    replicate   copies: gradients are averaged
    shard       shards of each parameter: gathered for a step
    tensor      parts of each layer, by ``plan.py``: activations are all-reduced
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from logging import getLogger
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; optree has it.
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process, seed_everything
from .loader import split_batch
from .model import build_model
from .plan import tensor_plan
from .sharded import Checkpointer
from .stages import Outline, Stage

warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view")  # None is changed in place.
getLogger("torch.distributed.tensor").setLevel("ERROR")  # Warns of saving.


class Parallel:
    """This rank's part of the model."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device, kind = process, process.device, process.device.type
        self.config, self.microbatches = config.parallel, config.train.microbatches
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        self.dp_size = self.config.dp_size(process.world_size)
        replicas, tensor = self.config.replicas, self.config.tensor
        shape = (self.config.pipeline, replicas, self.dp_size // replicas, tensor)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
        self.group = mesh.get_group("pipeline")
        self.dp_group, _ = dist.new_subgroups(self.dp_size * tensor)
        self.position, rank = divmod(process.rank, self.dp_size * tensor)
        self.dp_rank, self.tensor_rank = divmod(rank, tensor)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        torch.compiler.config.cache_key_tag = str(process.rank)  # Else shared.
        group = mesh["tensor"]  # Compiled blocks compare it.
        data = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
        shard = partial(fully_shard, mesh=data, mp_policy=policy, reshard_after_forward=False)
        self.outline = Outline(config.model, self.config.pipeline, dtype)
        seed_everything(config.run.seed)  # The outline drew too.
        stages, numbers = self.outline.stages, iter(self.outline.stages)

        def wrap(block: nn.Module) -> nn.Module:
            if next(numbers) != self.position:
                return block.to("meta")
            prepare_block(block.to(self.device), config, group)
            # `tensor` splits rows; uneven parts of parts fail to load.
            shard(block, shard_placement_fn=lambda p: Shard(int(p.ndim > 1 and getattr(p, "placements", 0) == rows)))
            return block

        first, rows = stages.index(self.position), (Shard(0),)
        self.module: Any = build_model(config.model, wrap)[first : first + stages.count(self.position)]
        self.stage = Stage(cast(Any, self.module), is_last=self.position == stages[-1])
        shard(self.stage)  # For the schedule.
        self.schedule = self.forms = self.loss = cast(Any, None)

    @loss_parallel()  # Sharded logits.
    def forward_backward(self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]) -> None:
        """Leave in each parameter the gradient of the mean loss over all micro-batches; a collective."""
        batches = split_batch((inputs, targets), self.microbatches)
        if (forms := self.outline.trace(batches[0][0])) is not self.forms:
            form, output, count = forms[self.position], forms[self.position + 1], self.config.pipeline
            stage = PipelineStage(self.stage, self.position, count, self.device, form, output, group=self.group)
            # 1F1B needs a micro-batch for each stage.
            kind: Any = Schedule1F1B if self.microbatches >= count else ScheduleGPipe
            self.schedule = kind(stage, self.microbatches, lambda *_: self.loss(), scale_grads=False)
            self.forms = forms
        torch.manual_seed(torch.initial_seed() + self.position)  # Equal in a stage.
        rest = [targets for _, targets in batches]
        self.loss = lambda: mean_loss(self.stage.outputs, rest.pop(0))
        self.stage.inputs = [inputs for inputs, _ in batches] if self.position == 0 else []
        ids = torch.arange(self.microbatches, device=self.device)
        self.schedule.step(*[ids] * (self.position == 0), target=ids if self.stage.is_last else None)

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        x = inputs
        if self.position > 0:
            x = torch.empty_like(self.outline.trace(inputs)[self.position], device=self.device)
            dist.recv(x, group=self.group, group_src=self.position - 1)
        x = self.stage(x)
        if not self.stage.is_last:
            dist.send(x, group=self.group, group_dst=self.position + 1)
        for block in self.module:
            block.reshard()  # No backward.
        outputs = tree_map_only(DTensor, DTensor.full_tensor, self.stage.outputs)
        return outputs if self.stage.is_last and self.tensor_rank == 0 else None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        split = [g for g in gradients if "tensor" in g.device_mesh.mesh_dim_names and g.placements[-1].is_shard()]
        counted = split if self.tensor_rank > 0 else gradients  # Each once.
        own = nn.utils.get_total_norm([g.to_local() for g in counted]).to(self.device)
        norms = [torch.empty_like(own) for _ in range(self.process.world_size)]
        dist.all_gather(norms, own)  # Summed in one order.
        norm = torch.stack(norms).norm() / self.config.replicas**0.5
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


def prepare_block(block: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Shard a block's layers; recompute and compile it if set."""
    names, plan = {name for name, _ in block.named_parameters()}, tensor_plan(block) if mesh.size() > 1 else {}
    if len(plan) > 1 and any("Dropout" in type(each).__name__ and getattr(each, "p", 1) for each in block.modules()):
        raise UserError("nn.Dropout drops the same places of all shards; use F.dropout outside")
    # All ranks drew the same, so each keeps its shard.
    parallelize_module(block, mesh, plan, src_data_rank=None)
    for name, _ in block.named_parameters():
        if name not in names:
            raise UserError(f"{name} is shared, and plan.py shards it; use a copy")
    for name, buffer in block.named_buffers():
        if not buffer.is_contiguous() or re.search(r"int16|uint[36]|float[48]|complex32", str(buffer.dtype)):
            raise UserError(f"buffer {name} cannot be sent; make it contiguous, of a type like int32")
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            raise UserError("train.activation_checkpointing updates BatchNorm's statistics twice; turn it off")
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()
