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
from torch.utils._pytree import tree_leaves, tree_map_only  # Private; optree has them.
from torch.utils.checkpoint import checkpoint

from .config import Config, ModelConfig, UserError
from .distributed import Process, seed_everything
from .loader import split_batch
from .model import build_model
from .plan import tensor_plan
from .sharded import Checkpointer

warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view")  # None is changed in place.
getLogger("torch.distributed.tensor").setLevel("ERROR")  # Warns of saving.
getLogger("torch.distributed.pipelining.schedules").disabled = True  # Prints inputs.
NUMBER = torch.empty(1, dtype=torch.int64, device="meta")  # For inputs.


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

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
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

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/buffers.py" ::#

#:: include "parallelism/shared/stage_state.py" ::#
#:: endfilter ::#


#:: include "parallelism/shared/stage.py" ::#


#:: include "parallelism/shared/outline.py" ::#


def prepare_block(block: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Shard a block's layers; recompute and compile it if set."""
#:: filter indent(4, true) ::#
#:: include "parallelism/shared/layer_steps.py" ::#
#:: include "parallelism/shared/block_steps.py" ::#
#:: endfilter ::#
