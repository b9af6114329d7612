"""Pipeline parallelism: every rank holds consecutive blocks of the model, and micro-batches pass from rank to rank.

While a stage works on one micro-batch, other stages work on others; the schedule is the order in which a rank runs the
forwards and backwards. With several pipelines in parallel, each reads its share of the batch, and ranks with the same
stages sum their gradients.
"""

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils._pytree import tree_leaves

from .config import Config
from .launch import collective_timeout
from .runtime import Process
from .splitting import (
    Stage,
    all_reduce_sum,
    assign_stages,
    build_by_block,
    build_outline,
    split_batch,
    split_into_stages,
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

        # All stages, without their weights: they give the shapes of the stages' outputs.
        self.outline = split_into_stages(build_outline(build), self.config, shape[0])
        self.owners = assign_stages(len(self.outline), shape[0], self.config.schedule)
        numbers = (index for index, blocks in enumerate(self.outline) for _ in blocks)

        def move(block: nn.Module) -> None:
            """Move the next block to the device; the weights of other ranks' blocks are dropped at once."""
            block.to(self.device if self.holds(next(numbers)) else "meta")

        sequence, _ = build_by_block(build, nn.Module.children, config.train, move)
        stages = enumerate(split_into_stages(sequence, self.config, shape[0]))
        own = {index: blocks for index, blocks in stages if self.holds(index)}
        named_blocks = OrderedDict(block for blocks in own.values() for block in blocks.named_children())
        self.module = nn.Sequential(named_blocks)
        # Under bf16, stages send half the bytes; fp16 would overflow where one process adds in fp32.
        sent = torch.bfloat16 if self.dtype is torch.bfloat16 else torch.float32
        self.dtypes = [sent] * (len(self.outline) - 1) + [torch.float32]
        self.stages = {index: Stage(blocks, self.autocast, self.dtypes[index]) for index, blocks in own.items()}

        # Built for the shapes of a micro-batch; all ranks of a pipeline see the same ones.
        self.schedule: Any = None
        self.shapes: list[torch.Size] = []
        self.scheduled_stages: list[PipelineStage] = []
        # In the current step, the targets of the micro-batches and the factor that scales their losses.
        self.targets, self.loss_scale = list[Any](), torch.ones(())
        self.group_after_startup = self.pipeline
        if dist.get_backend(self.pipeline) == "gloo":
            # gloo cannot change the timeout of point-to-point messages, so a second group has the shorter timeout.
            # It is created now, while all ranks are known to be alive.
            timeout = collective_timeout(config.distributed.timeout_seconds)
            self.group_after_startup, _ = dist.new_subgroups_by_enumeration(mesh.mesh.T.tolist(), timeout)

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
        if self.dp_size > 1:  # Each pipeline has its part of the mean.
            all_reduce_sum(self.gradients(), self.dp_group)
        if scaler.is_enabled():
            # If one stage overflows, all have to skip the step: its NaN reaches every rank through the norm.
            self.gradients()[0] += self.gradient_norm() * 0
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
        self.scheduled_stages = []
        for index, (inputs, outputs) in enumerate(trace_stages(self.outline, self.dtypes, microbatch)):
            if self.holds(index):
                size, group = len(self.outline), self.pipeline
                stage = PipelineStage(self.stages[index], index, size, self.device, inputs, outputs, group=group)
                self.scheduled_stages.append(stage)
        kind = get_schedule_class(self.config.schedule)
        stages: Any = self.scheduled_stages[0] if issubclass(kind, PipelineScheduleSingle) else self.scheduled_stages
        return kind(stages, self.microbatches, loss_fn=self.scaled_loss, scale_grads=False)

    def scaled_loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return one micro-batch's part of the mean loss over the global batch, times the scaler's factor."""
        return self.add_loss(outputs, self.targets[int(number)]) * self.loss_scale

    def finish_losses(self) -> dict[str, Tensor]:
        # Ranks without the last stage have losses and weights of 0, but gradients to correct.
        return self.losses.finish(self.module, dist.group.WORLD)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's stages."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, over all stages."""
        squared = nn.utils.get_total_norm(self.gradients()) ** 2
        dist.all_reduce(squared, group=self.pipeline)
        return squared.sqrt()

    def receive(self, index: int, inputs: Any) -> Tensor:
        """Receive the outputs of stage ``index - 1`` from its rank; the pipeline's ``inputs`` determine their shape."""
        *_, (_, sent) = trace_stages(self.outline[:index], self.dtypes, inputs)
        received = torch.empty_like(sent, device=self.device, requires_grad=False)
        dist.recv(received, group=self.pipeline, group_src=self.owners[index - 1])
        return received
