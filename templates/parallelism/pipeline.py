"""Pipeline parallel: every rank holds a run of the model's blocks, and micro-batches pass from rank to rank.

While a micro-batch is in one stage, the other stages work on others; the schedule says in which order a rank takes the
forwards and backwards of its own. With several pipelines side by side, each reads its share of the batch, and equal
stages add up their gradients.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from .blocks import prepare_blocks
from .config import Config
from .debugger import allow
from .distributed import World
from .stages import Stage, cut, place


class Parallel:
    """The model, spread over the ranks. All that the rest of the package knows of how the work is split is this class.

    Attributes:
        module: What this rank holds of the model; its parameters have the names that they have in the whole one.
        device: Where inputs and targets have to be.
        data_rank: Which share of every batch this rank reads; all ranks of a pipeline read the same one.
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
        self.config, self.device, self.loss_fn = config.parallel, world.device, loss_fn
        # Neighbours in number average gradients, which is more to send than the activations between stages.
        shape = (world.size // self.config.replicas, self.config.replicas)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("pipeline", "data"))
        self.pipeline, self.data_group = mesh["pipeline"].get_group(), mesh["data"].get_group()
        self.data_rank, self.data_size = mesh.get_local_rank("data"), self.config.replicas
        self.microbatches = config.train.microbatches

        # The stages without their weights: they tell what shape leaves each.
        self.outline = cut(copy.deepcopy(model).to("meta"), self.config, shape[0])
        self.owners = place(len(self.outline), shape[0], self.config.schedule)
        self.rank = mesh.get_local_rank("pipeline")
        prepare_blocks(model, config.train)
        autocast = build_autocast(self.device, config.train.precision)
        mine = {index: stage for index, stage in enumerate(cut(model, self.config, shape[0])) if self.holds(index)}
        self.module = nn.Sequential(
            OrderedDict(block for stage in mine.values() for block in stage.named_children())
        ).to(self.device)
        self.stages = {index: Stage(blocks, autocast) for index, blocks in mine.items()}
        self.schedule: Any = None  # Built in the first step, when the shape of a micro-batch is known.
        self.later = self.pipeline
        if dist.get_backend(self.pipeline) == "gloo":
            # It waits as long as it was told at first: for after start-up there is a group that waits less, made now,
            # while all ranks are known to be there.
            timeout = allow(config.distributed.timeout_seconds)
            self.later, _ = dist.new_subgroups_by_enumeration(mesh.mesh.T.tolist(), timeout)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """Forward and backward of one global batch, of which this rank's pipeline has a share.

        Leaves in every parameter the gradient of the mean loss over the global batch (times the scaler's factor).

        Args:
            inputs: This pipeline's inputs, ``global_batch_size / data_size`` of them.
            targets: Their targets.
            scaler: Scales the loss of fp16, and nothing else.

        Returns:
            This rank's part of the mean loss, a detached scalar on the device: the sum over all ranks is the mean.
        """
        if self.schedule is None:
            self.schedule = self.build_schedule(inputs.chunk(self.microbatches)[0])
        elif self.pipeline is not self.later:
            self.end_startup()
        self.total = torch.zeros((), device=self.device)
        self.factor = scaler.scale(torch.ones_like(self.total))
        fed = [inputs] if self.holds(0) else []
        self.schedule.step(*fed, target=targets if self.holds(-1) else None, return_outputs=False)
        self.add_up_gradients()
        if scaler.is_enabled():
            # One stage's overflow has to be everyone's, or some would step and others not: its NaN is passed on.
            self.gradients()[0] += self.gradient_norm() * 0
        return self.total

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs for this pipeline's ``inputs`` on the rank of the last stage, None on the others.

        All ranks of a pipeline have to call it together.
        """
        # In pieces, so that the stages work side by side; a rank with several stages would wait for itself.
        pieces = inputs.chunk(self.microbatches if len(self.stages) == 1 else 1)
        outputs: dict[int, Tensor] = {}
        sent = []
        for index, stage in self.stages.items():
            for number, piece in enumerate(pieces):
                if index == 0:
                    outputs[number] = stage(piece)
                else:
                    local = self.holds(index - 1)
                    outputs[number] = stage(outputs[number] if local else self.receive(index, piece))
                if index + 1 < len(self.owners) and not self.holds(index + 1):
                    neighbour = self.owners[index + 1]
                    sent.append(dist.isend(outputs[number].contiguous(), group=self.pipeline, group_dst=neighbour))
        for work in filter(None, sent):
            work.wait()
        return torch.cat(list(outputs.values())) if self.holds(-1) else None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` where it is larger; gives its norm before, on the device."""
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def holds(self, index: int) -> bool:
        """Whether stage ``index`` is on this rank."""
        return self.owners[index] == self.rank

    def build_schedule(self, microbatch: Tensor) -> Any:
        """The schedule for micro-batches like this one; each stage is told what comes in and goes out."""
        self.scheduled, outputs = [], microbatch.to("meta")
        for index, outline in enumerate(self.outline):
            inputs, outputs = outputs, outline(outputs).detach().requires_grad_()
            if self.holds(index):
                size, group = len(self.outline), self.pipeline
                stage = PipelineStage(self.stages[index], index, size, self.device, inputs, outputs, group=group)
                self.scheduled.append(stage)
        kind = get_schedule_class(self.config.schedule)
        held: Any = self.scheduled[0] if issubclass(kind, PipelineScheduleSingle) else self.scheduled
        return kind(held, self.microbatches, loss_fn=self.scaled_loss, scale_grads=False)

    def end_startup(self) -> None:
        """Wait less long for other stages from now on."""
        self.pipeline = self.later
        for stage in self.scheduled:
            stage.group = self.pipeline

    def scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The part of one micro-batch in the mean loss over the global batch, times the scaler's factor."""
        loss = self.loss_fn(outputs, targets) / (self.microbatches * self.data_size)
        self.total += loss.detach()
        return loss * self.factor

    def add_up_gradients(self) -> None:
        """Sum the gradients of equal stages over the pipelines, each of which has its part of the mean."""
        if self.data_size > 1:
            add_up(self.gradients(), self.data_group)

    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's stages."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient of the whole model, over all stages."""
        squared = nn.utils.get_total_norm(self.gradients()) ** 2
        dist.all_reduce(squared, group=self.pipeline)
        return squared.sqrt()

    def receive(self, index: int, inputs: Tensor) -> Tensor:
        """What the stages before ``index`` made of ``inputs``, from the rank that holds the last of them."""
        shaped = inputs.to("meta")
        for outline in self.outline[:index]:
            shaped = outline(shaped)
        received = torch.empty(shaped.shape, device=self.device)
        dist.recv(received, group=self.pipeline, group_src=self.owners[index - 1])
        return received


#:: include "parallelism/autocast.py" ::#


#:: include "parallelism/add_up.py" ::#
