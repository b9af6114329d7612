"""Pipeline parallelism: every rank holds consecutive blocks of the model, and micro-batches pass from rank to rank.

While a stage works on one micro-batch, other stages work on others; the schedule is the order in which a rank runs the
forwards and backwards. With several pipelines in parallel, each reads its share of the batch, and ranks with the same
stages sum their gradients; or each holds only a shard of these stages.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from .config import Config, UserError
from .runtime import Process
from .splitting import (
    ScheduledStage,
    Stage,
    assign_stages,
    build_group_after_startup,
    build_outline,
    build_schedule,
    build_stages,
    reshard,
    schedule_stages,
    shard_replica,
    split_batch,
    split_into_stages,
    to_local,
    trace_stages,
)
from .strategy import BuildFn, LossFn, Strategy


class Parallel(Strategy):
    """This rank's stages of the model, and the schedule that runs them."""

    waits_in_forward = True

    def __init__(self, build: BuildFn, loss_fn: LossFn, config: Config, process: Process) -> None:
        self.config = config.parallel
        # The data dimension is the inner one: averaging gradients sends more bytes than passing activations.
        shape = (process.world_size // self.config.replicas, self.config.replicas)
        mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=("pipeline", "data"))
        dp_rank, dp_group = mesh.get_local_rank("data"), mesh["data"].get_group()
        super().__init__(loss_fn, config, process, dp_rank, dp_group)
        self.pipeline, self.pipeline_rank = mesh["pipeline"].get_group(), mesh.get_local_rank("pipeline")
        self.group_after_startup = build_group_after_startup(mesh, config.distributed)

        # All stages, without their weights: they give the shapes of the stages' outputs.
        self.outline = split_into_stages(build_outline(build), self.config, shape[0])
        self.owners = assign_stages(len(self.outline), shape[0], self.config.schedule)
        # Gathered once per step, for all micro-batches.
        shard = partial(shard_replica, mesh=mesh["data"], dtype=self.dtype, reshard_after_forward=False)

        def move(block: nn.Module) -> None:
            block.to(self.device)
            if self.config.shard_replicas:
                shard(block)

        own = build_stages(build, self.outline, self.holds, config.train, move)
        self.module = nn.Sequential(OrderedDict(block for stage in own.values() for block in stage.named_children()))
        # Under bf16, stages send half the bytes; fp16 would overflow where one process adds in fp32.
        sent = torch.bfloat16 if self.dtype is torch.bfloat16 else torch.float32
        self.dtypes = [sent] * (len(self.outline) - 1) + [torch.float32]
        if self.config.shard_replicas:
            self.autocast = partial(self.autocast, enabled=False)  # FSDP casts parameters and inputs.
        self.stages = {i: Stage(blocks, self.autocast, self.dtypes[i], dp_group) for i, blocks in own.items()}
        for stage in self.stages.values() if self.config.shard_replicas else ():
            shard(stage)

        # Built for the shapes of a micro-batch; all ranks of a pipeline see the same ones.
        self.schedule: Any = None
        self.shapes: list[torch.Size] = []
        self.scheduled_stages: list[ScheduledStage] = []
        # In the current step, the targets of the micro-batches and the factor that scales their losses.
        self.targets, self.loss_scale = list[Any](), torch.ones(())

    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        if self.schedule is not None:
            self.pipeline = self.group_after_startup  # From the second step on, waits for other stages are shorter.
        shapes = [part.shape for part in tree_leaves(inputs) if isinstance(part, Tensor)]
        if shapes != self.shapes or self.scheduled_stages[0].group is not self.pipeline:
            self.shapes, self.schedule = shapes, self.build_schedule(split_batch(inputs, self.microbatches)[0])
        self.loss_scale = scaler.scale(torch.ones((), device=self.device))
        stage_inputs = [inputs] if self.holds(0) else []
        # The schedule splits only a single tensor, so it gets the numbers of the micro-batches instead of targets.
        self.targets = split_batch(targets, self.microbatches)
        numbers = torch.arange(self.microbatches) if self.holds(-1) else None
        self.schedule.step(*stage_inputs, target=numbers, return_outputs=False)
        for stage in self.stages.values():
            stage.buckets.wait()  # Each pipeline has its part of the mean.
        if scaler.is_enabled():
            # If one stage overflows, all have to skip the step: its NaN reaches every rank through the norm.
            nothing, gradients = self.gradient_norm() * 0, self.gradients()
            if not gradients:
                raise UserError("fp16 needs gradients, and this rank's stages are frozen; set train.precision to bf16")
            gradients[0] += nothing
        return self.finish_losses()

    def predict(self, inputs: Any) -> Any:
        # In micro-batches, so that stages work at the same time; a rank with several stages would wait for itself.
        pieces = split_batch(inputs, self.microbatches if len(self.stages) == 1 else 1)
        outputs: dict[int, Tensor] = {}
        sends = []
        for index, stage in self.stages.items():
            for number, piece in enumerate(pieces):
                if index == 0:
                    outputs[number] = stage(piece)
                else:
                    outputs[number] = stage(outputs[number] if self.holds(index - 1) else self.receive(index, piece))
                if index + 1 < len(self.owners) and not self.holds(index + 1):
                    next_rank = self.owners[index + 1]
                    sends.append(dist.isend(outputs[number].contiguous(), group=self.pipeline, group_dst=next_rank))
        for work in filter(None, sends):
            work.wait()
        reshard(self.module)
        return torch.cat(list(outputs.values())) if self.holds(-1) else None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def holds(self, index: int) -> bool:
        """Return whether stage ``index`` is on this rank."""
        return self.owners[index] == self.pipeline_rank

    def build_schedule(self, microbatch: Any) -> Any:
        """Build the schedule for micro-batches of this shape, and the shapes that its stages receive and send."""
        shapes = list(trace_stages(self.outline, self.dtypes, microbatch))
        self.scheduled_stages = schedule_stages(self.stages, shapes, self.device, self.pipeline)
        return build_schedule(self.config.schedule, self.scheduled_stages, self.microbatches, self.scaled_loss)

    def scaled_loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return one micro-batch's part of the mean loss over the global batch, times the scaler's factor."""
        return self.add_loss(outputs, self.targets[int(number)]) * self.loss_scale

    def finish_losses(self) -> dict[str, Tensor]:
        # Ranks without the last stage have losses and weights of 0, but gradients to correct.
        return self.losses.finish(self.module, dist.group.WORLD)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's stages, or of its shards of them."""
        return [to_local(p.grad) for p in self.module.parameters() if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, over all stages."""
        # On the CPU if all of this rank's stages are frozen.
        squared = nn.utils.get_total_norm(self.gradients()).to(self.device) ** 2
        # If pipelines hold shards, these add up as the stages do.
        dist.all_reduce(squared, group=dist.group.WORLD if self.config.shard_replicas else self.pipeline)
        return squared.sqrt()

    def receive(self, index: int, inputs: Any) -> Tensor:
        """Receive the outputs of stage ``index - 1`` from its rank; the pipeline's ``inputs`` determine their shape."""
        *_, (_, sent) = trace_stages(self.outline[:index], self.dtypes, inputs)
        received = torch.empty_like(sent, device=self.device, requires_grad=False)
        dist.recv(received, group=self.pipeline, group_src=self.owners[index - 1])
        return received
