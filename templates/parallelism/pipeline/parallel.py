"""Pipeline parallelism: every rank holds some blocks, and micro-batches pass from rank to rank.

With several pipelines, ranks that have the same stages shard them by FSDP2: they gather weights
when a step begins, and scatter gradients when it ends.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.optim import Optimizer

from .config import Config, UserError
from .distributed import Process, seed_everything, wide_dtype
from .model import build_model
from .sharded import Checkpointer, load_state
from .stages import Outline, Shapes, Stage, gather_state_dict, prepare_block

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


class Parallel:
    """This rank's stages of the model. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.layout = config.parallel
        self.matches_one_rank = False  # A stage adds up its gradients in the order of its schedule.
        # bf16 has the range of fp32, so nothing is scaled; config.py refuses fp16.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        mesh = self.build_mesh()
        count = config.data.num_microbatches // self.dp_size
        # The numbers of this rank's micro-batches in the global batch.
        self.microbatches = range(count * self.dp_rank, count * (self.dp_rank + 1))
        self.build_stages(config, mesh)
        # The first step builds a schedule, for the shapes of its micro-batches.
        self.schedule: Any = None
        self.shapes: Any = None

    def build_mesh(self) -> DeviceMesh:
        """Number the ranks and the stages; returns the mesh over which a stage is sharded."""
        self.dp_size = self.layout.dp_size(self.process.world_size)
        self.pipeline_size = self.process.world_size // self.dp_size
        self.pipeline_rank, self.dp_rank = divmod(self.process.rank, self.dp_size)
        # A micro-batch passes through all ranks once for each stage that a rank has.
        self.num_stages = self.pipeline_size * self.layout.stages_per_rank
        self.last_stage = self.num_stages - 1
        replicas = self.layout.replicas
        shape = (self.pipeline_size, replicas, self.dp_size // replicas)
        names = ("pipeline", "replicate", "shard")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self.pipeline_group = mesh.get_group("pipeline")
        # A mesh has groups of single dimensions only. This group has all ranks with equal stages.
        self.dp_group, _ = dist.new_subgroups(self.dp_size)
        if replicas > 1:
            return mesh["replicate", "shard"]
        # FSDP would all-reduce gradients over the dimension of replicas, even with only one.
        return mesh["shard"]

    def build_stages(self, config: Config, mesh: DeviceMesh) -> None:
        """Build the model, and keep the blocks of this rank's stages."""
        dtype = torch.bfloat16 if config.train.precision == "bf16" else wide_dtype()
        # Blocks compute in this type; shards stay in fp32, and so do sums of gradients.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide_dtype())
        # Gathered weights serve all micro-batches: a schedule frees them after the last backward.
        shard: Any = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.outline = Outline(config.model, self.num_stages, dtype)
        # The outline may have drawn random numbers, too.
        seed_everything(config.run.seed)
        stages = iter(self.outline.stage_of_block)

        def wrap(block: nn.Module) -> nn.Module:
            # Blocks are wrapped in their order. Every rank draws the weights of all blocks, so that
            # they are the same on any number of ranks, but frees those of other ranks at once.
            stage_index = next(stages)
            if not self.has_stage(stage_index):
                return block.to("meta")
            block.to(self.device)
            # FSDP comes last: its hooks gather weights around forward, and around its recomputation
            # in backward.
            prepare_block(block, config)
            shard(block)
            return block

        self.module = nn.Sequential()
        self.stages = dict[int, Stage]()
        model = build_model(config.model, wrap)
        named_blocks = zip(self.outline.stage_of_block, model.named_children(), strict=True)
        for stage_index, (name, block) in named_blocks:
            if not self.has_stage(stage_index):
                continue
            self.module.add_module(name, block)
            if stage_index not in self.stages:
                is_last = stage_index == self.last_stage
                self.stages[stage_index] = Stage(nn.Sequential(), is_last)
            self.stages[stage_index].blocks.add_module(name, block)
        for stage in self.stages.values():
            # No parameter is left to shard, but a schedule asks the stage as a whole to scatter
            # gradients only after the last micro-batch.
            shard(stage)

    def has_stage(self, stage_index: int) -> bool:
        """Return whether a stage is this rank's: stages go to the ranks in turn."""
        return stage_index % self.pipeline_size == self.pipeline_rank

    def forward_backward(
        self, batch: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        microbatches = list(batch)
        shapes = self.outline.trace(microbatches[0][0])
        if any(self.outline.trace(inputs) is not shapes for inputs, _ in microbatches):
            raise UserError("micro-batches of a step differ in shape; pad all in the same way")
        if shapes is not self.shapes:
            # A schedule allocates its buffers for micro-batches of one shape.
            self.shapes = shapes
            self.schedule = self.build_schedule(shapes)
        # The loop seeds all ranks of a pipeline alike, but their layers draw different numbers.
        torch.manual_seed(torch.initial_seed() + self.pipeline_rank)
        self.mean_loss = mean_loss
        self.remaining_targets = [targets for _, targets in microbatches]
        # Inputs and targets may be nested, so the schedule only gets the numbers of micro-batches:
        # as an argument for the first stage, and as the target of the last one.
        numbers = torch.arange(len(microbatches), device=self.device)
        arguments = list[Tensor]()
        if 0 in self.stages:
            self.stages[0].remaining_inputs = [inputs for inputs, _ in microbatches]
            arguments.append(numbers)
        target = numbers if self.last_stage in self.stages else None
        self.schedule.step(*arguments, target=target)
        for stage in self.stages.values():
            name = stage.changed_parameter
            if name:
                raise UserError(f"micro-batches change {name}; do so at the end of train_step")

    def build_schedule(self, shapes: Shapes) -> Any:
        """Return a schedule that runs this rank's stages on tensors of these shapes."""
        stages: Any = []
        for stage_index, stage in self.stages.items():
            pipeline_stage = PipelineStage(
                stage,
                stage_index,
                self.num_stages,
                self.device,
                input_args=shapes[stage_index],
                output_args=shapes[stage_index + 1],
                group=self.pipeline_group,
            )
            stages.append(pipeline_stage)
        if self.layout.stages_per_rank == 1:
            # GPipe and 1F1B expect the stage itself, the other schedules a list of stages.
            stages = stages[0]
        # The losses are parts of the mean already: the schedule need not scale gradients.
        return SCHEDULES[self.layout.schedule](
            stages, len(self.microbatches), loss_fn=self.compute_loss, scale_grads=False
        )

    def compute_loss(self, *_: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss, when a schedule has run the last stage."""
        targets = self.remaining_targets.pop(0)
        # FSDP averages the gradients of the pipelines, which have to add up.
        return self.mean_loss(self.stages[self.last_stage].take_outputs(), targets) * self.dp_size

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        shapes = self.outline.trace(inputs)
        features = inputs
        for stage_index, stage in self.stages.items():
            # A rank alone has all stages, and passes features on to itself.
            if stage_index > 0 and self.pipeline_size > 1:
                features = torch.empty_like(shapes[stage_index], device=self.device)
                source = (stage_index - 1) % self.pipeline_size
                dist.recv(features, group=self.pipeline_group, group_src=source)
            features = stage(features)
            if stage_index < self.last_stage and self.pipeline_size > 1:
                destination = (stage_index + 1) % self.pipeline_size
                dist.send(features, group=self.pipeline_group, group_dst=destination)
        for block in self.module:
            # No backward follows that would free the gathered weights.
            cast(FSDPModule, block).reshard()
        if self.last_stage not in self.stages:
            return None
        return self.stages[self.last_stage].take_outputs()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        gradient_shards = list[Tensor]()
        for parameter in self.module.parameters():
            gradient: Any = parameter.grad
            if gradient is not None:
                gradient_shards.append(gradient.to_local())
        # The norm of no gradients would be on the CPU.
        local_norm = nn.utils.get_total_norm(gradient_shards).to(self.device, non_blocking=True)
        # An all-reduce may add up the ranks in any order. Gathered norms are added in the order of
        # ranks, so all ranks scale their shards by the same bits.
        norms = [torch.empty_like(local_norm) for _ in range(self.process.world_size)]
        dist.all_gather(norms, local_norm)
        # Replicas have equal gradients, and each replica's squares are in the sum.
        total_norm = torch.stack(norms).norm() / math.sqrt(self.layout.replicas)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, total_norm)
        return total_norm

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over the data-parallel ranks; a collective."""
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return weights and optimizer state of the whole model on rank 0's CPU; a collective."""
        return gather_state_dict(self.module, optimizer, self.process, self.dp_size)

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None, state: Any) -> None:
        """Load rank 0's weights of the whole model and, if given, an optimizer's state."""
        other_names = self.outline.state_names - set(self.module.state_dict())
        load_state(self.module, optimizer, model, state, self.process, other_names)
