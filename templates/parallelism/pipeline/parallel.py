"""Pipeline parallelism: every rank holds some blocks of the model, and micro-batches pass from rank to rank.

Several pipelines read local batches, and ranks with the same stages average their gradients.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process, seed_everything
from .loader import split_batch
from .model import build_model
from .sharded import Checkpointer as Checkpointer
from .stages import NUMBER, Stage, outline_stages, shapes_of


class Parallel:
    """Stages of the model."""

    def __init__(self, config: Config, process: Process) -> None:
        self.process, self.device = process, process.device
        self.config, self.microbatches = config.parallel, config.train.microbatches
        self.dp_size, kind = config.parallel.replicas, self.device.type
        self.autocast = partial(torch.autocast, kind, torch.bfloat16, enabled=config.train.precision == "bf16")
        self.scaler = torch.amp.GradScaler(kind, enabled=False)
        self.position, self.dp_rank = divmod(process.rank, self.dp_size)
        ranks = torch.arange(process.world_size).view(-1, self.dp_size)
        self.group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), process.timeout)
        self.dp_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), process.timeout)
        self.owners = [*range(len(ranks))] * config.parallel.stages_per_rank  # By stage.
        self.last = len(self.owners) - 1
        self.module, self.stages = nn.Sequential(), dict[int, Stage]()
        self.build_stages(config)
        self.forms: dict[Any, dict[int, Tensor]] = {}  # By shapes of inputs.
        self.schedule = self.shapes = cast(Any, None)

    def build_stages(self, config: Config) -> None:
        """Build the model block by block, and keep this rank's blocks."""
        stages, self.places = outline_stages(config.model, len(self.owners))
        seed_everything(config.run.seed)  # The outline may draw too.
        numbers = iter(stages)

        def wrap(block: nn.Module) -> nn.Module:
            is_own = self.owners[next(numbers)] == self.position
            return prepare_block(block, config).to(self.device if is_own else "meta")

        for stage, (name, block) in zip(stages, build_model(config.model, wrap).named_children(), strict=True):
            if self.owners[stage] == self.position:
                self.module.add_module(name, block)
                self.stages.setdefault(stage, Stage(self.autocast, stage == self.last)).blocks.append(block)

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/forward_backward.py" ::#
#:: endfilter ::#
        batches = split_batch((inputs, targets), self.microbatches)
        if shapes_of(batches[0][0]) != self.shapes:
            self.build_schedule(batches[0][0])
        torch.manual_seed(torch.initial_seed() + self.position)  # For dropout.
        self.targets, self.mean_loss = [targets for _, targets in batches], mean_loss
        ids = torch.arange(self.microbatches)
        if first := self.stages.get(0):
            first.inputs = [inputs for inputs, _ in batches]
        self.schedule.step(*[ids] * (first is not None), target=ids if self.last in self.stages else None)
        self.average_gradients()

    def compute_loss(self, _: Tensor, number: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss; called after the last stage."""
        with self.autocast():
            return self.mean_loss(self.stages[self.last].outputs, self.targets[int(number)])

    def build_schedule(self, inputs: Any) -> None:
        """Build the schedule for such micro-batches; a collective."""
        if shapes_of(inputs) not in self.forms:
            self.module.eval()  # Keeps statistics.
            with torch.no_grad():
                self.predict(inputs)
            self.module.train()
        self.shapes, count = shapes_of(inputs), len(self.owners)
        forms = self.forms[self.shapes]
        build = partial(PipelineStage, num_stages=count, device=self.device, group=self.group)
        stages = [build(s, i, input_args=forms[i], output_args=forms[i + 1]) for i, s in self.stages.items()]
        kind: Any = get_schedule_class(self.config.schedule)
        own = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self.schedule = kind(own, self.microbatches, loss_fn=self.compute_loss, scale_grads=False)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average gradients over the pipelines, block by block."""
        for block in self.module.children() if self.dp_size > 1 else ():
            gradients: list[Any] = [p.grad for p in block.parameters() if p.requires_grad]
            if gradients and not any(g is None for g in gradients):  # Else, the run ends.
                vector = nn.utils.parameters_to_vector(gradients) / self.dp_size
                dist.all_reduce(vector, group=self.dp_group)
                nn.utils.vector_to_parameters(vector, gradients)

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        x, group = inputs, self.group
        forms = self.forms.setdefault(shapes_of(inputs), {0: NUMBER, len(self.owners): NUMBER})
        for index, stage in self.stages.items():
            if index > 0 and index - 1 not in self.stages:
                source, message = self.owners[index - 1], list[Any]([None])
                dist.recv_object_list(message, group=group, group_src=source)
                forms[index] = message[0]
                x = torch.empty_like(forms[index], device=self.device, requires_grad=False)
                dist.recv(x, group=group, group_src=source)
            with self.autocast():
                x = stage.blocks(x)
            if index < self.last:
                forms[index + 1] = torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=True)
                if index + 1 not in self.stages:
                    dist.send_object_list([forms[index + 1]], group=group, group_dst=self.owners[index + 1])
                    dist.send(x.contiguous(), group=group, group_dst=self.owners[index + 1])
        return x if self.last in self.stages else None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient; returns the norm before."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        own = nn.utils.get_total_norm(gradients).to(self.device)
        norms = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, own, group=self.group)  # Summed in one order on all.
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm := torch.stack(norms).norm())
        return norm

#:: filter indent(4, true) ::#
#:: include "parallelism/shared/buffers.py" ::#
#:: endfilter ::#

    def full_state_dict(self, optimizer: Optimizer) -> tuple[Any, Any]:
        """Return the whole model's weights, and the optimizer's state by parameter, on rank 0's CPU."""
        rank, group = self.process.rank, self.process.cpu_group
        model, optim = dsd.get_state_dict(self.module, optimizer, options=dsd.StateDictOptions(cpu_offload=True))
        whole: list[Any] = [model, optim["state"]]
        for source in range(self.dp_size, self.process.world_size, self.dp_size):
            part = [*whole]
            if rank == source:
                dist.send_object_list(part, 0, group)
            elif rank == 0:
                dist.recv_object_list(part, source, group)
                whole = [mine | theirs for mine, theirs in zip(whole, part, strict=True)]
        return whole[0], whole[1]

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
        """Load rank 0's weights of the whole model, and the optimizer's state if given."""
        own, states = dict[str, Any](), dict[str, Any]()
        for name in max(self.process.all_gather([*model])):  # Rank 0's.
            entry = [model.get(name), (state or {}).get(name)]
            dist.broadcast_object_list(entry, 0, self.process.cpu_group)
            if name not in self.places or self.owners[self.places[name]] == self.position:
                own[name], states[name] = entry
        dsd.set_model_state_dict(self.module, own)
        if optimizer:
            whole = dsd.get_optimizer_state_dict(self.module, optimizer)
            whole["state"] = {name: values for name, values in states.items() if values}
            dsd.set_optimizer_state_dict(self.module, optimizer, whole, options=dsd.StateDictOptions(strict=False))


#:: include "parallelism/shared/blocks.py" ::#
