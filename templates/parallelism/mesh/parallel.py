"""One mesh of ranks, which differ in a dimension by what they have:

pipeline    other blocks: micro-batches pass through them
replicate   copies: gradients are averaged
shard       shards of each parameter: gathered for a step
tensor      parts of each layer, by ``plan.py``: activations are all-reduced
"""

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, rand
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; optree has the same.

from .config import Config, UserError
from .distributed import Process, seed_everything, wide_dtype
from .model import build_model
from .plan import is_sharded_by_plan, shard_layers
from .sharded import Checkpointer, load_state
from .stages import Outline, Shapes, Stage, gather_state_dict, prepare_block

# FSDP2 warns of blocks that return views, as changing such an output would break backward.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view")
# DTensor's logger warns that saving gathers one dimension of the mesh after the other.
getLogger("torch.distributed.tensor").setLevel("ERROR")


class Parallel:
    """This rank's stage of the model. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.layout = config.parallel
        self.matches_one_rank = False  # A stage adds up its gradients in the order of its schedule.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)  # fp16 is refused.
        # Ranks share a cache of compiled code, but their shards differ: a tag keeps the code apart.
        torch.compiler.config.cache_key_tag = str(process.rank)
        mesh = self.build_mesh()
        count = config.data.num_microbatches // self.dp_size  # The numbers of a rank's follow.
        self.microbatches = range(count * self.dp_rank, count * (self.dp_rank + 1))
        self.build_stage(config, mesh)
        self.schedule: Any = None
        self.shapes: Any = None

    def build_mesh(self) -> DeviceMesh:
        """Number the ranks in each dimension; returns the mesh over which FSDP shards."""
        layout = self.layout
        self.dp_size = layout.dp_size(self.process.world_size)
        self.ranks_per_stage = self.dp_size * layout.tensor
        self.stage_index, rank_in_stage = divmod(self.process.rank, self.ranks_per_stage)
        self.dp_rank, self.tensor_rank = divmod(rank_in_stage, layout.tensor)
        shape = (
            layout.pipeline,
            layout.replicas,
            self.dp_size // layout.replicas,
            layout.tensor,
        )
        names = ("pipeline", "replicate", "shard", "tensor")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self.pipeline_group = mesh.get_group("pipeline")
        self.tensor_mesh = mesh["tensor"]
        if self.device.type != "cpu":
            # DTensor's first random operation waits for all ranks, but stages come to it in turn.
            rand(1, device_mesh=self.tensor_mesh)
        self.dp_group, _ = dist.new_subgroups(self.ranks_per_stage)  # Tensor ranks have equal data.
        if layout.replicas > 1:
            return mesh["replicate", "shard"]
        # FSDP would all-reduce gradients over the dimension of replicas, even with only one.
        return mesh["shard"]

    def build_stage(self, config: Config, mesh: DeviceMesh) -> None:
        """Build the model, and keep the blocks of this rank's stage."""
        dtype = torch.bfloat16 if config.train.precision == "bf16" else wide_dtype()
        # Blocks compute in this type; shards stay in fp32, and so do sums of gradients.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide_dtype())
        # Gathered weights serve all micro-batches: a schedule frees them after the last backward.
        shard: Any = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.outline = Outline(config.model, self.layout.pipeline, dtype)
        seed_everything(config.run.seed)  # The outline may have drawn numbers.
        stage_of_block = self.outline.stage_of_block
        stages = iter(stage_of_block)

        def wrap(block: nn.Module) -> nn.Module:
            # Blocks come in the model's order. Every rank draws all weights, so they are the same.
            stage_index = next(stages)
            if stage_index != self.stage_index:
                return block.to("meta")
            block.to(self.device)
            # FSDP is last: it shards the plan's DTensors, and its hooks stay outside recomputation.
            shard_layers(block, self.tensor_mesh)
            prepare_block(block, config)
            shard(block, shard_placement_fn=choose_placement)
            return block

        model: Any = build_model(config.model, wrap)
        first_block = stage_of_block.index(self.stage_index)
        num_blocks = stage_of_block.count(self.stage_index)
        self.module: Any = model[first_block : first_block + num_blocks]
        self.stage = Stage(self.module, is_last=self.stage_index == self.layout.pipeline - 1)
        shard(self.stage)  # A schedule delays scattering only for an FSDP module.

    # A plan may leave logits sharded over the classes, for F.cross_entropy and its backward.
    @loss_parallel()
    def forward_backward(
        self, batch: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        microbatches = list(batch)
        shapes = self.outline.trace(microbatches[0][0])
        if any(self.outline.trace(inputs) is not shapes for inputs, _ in microbatches):
            raise UserError("micro-batches of a step differ in shape; pad all in the same way")
        # Micro-batches of equal shapes have the same dict, and fit into a schedule's buffers.
        if shapes is not self.shapes:
            self.shapes = shapes
            self.schedule = self.build_schedule(shapes)
        # Tensor ranks draw the same numbers, as dropout of whole features needs; stages do not.
        torch.manual_seed(torch.initial_seed() + self.stage_index)
        self.mean_loss = mean_loss
        self.remaining_targets = [targets for _, targets in microbatches]
        numbers = torch.arange(len(microbatches), device=self.device)
        arguments = list[Tensor]()
        if self.stage_index == 0:
            self.stage.remaining_inputs = [inputs for inputs, _ in microbatches]
            arguments.append(numbers)
        target = numbers if self.stage.is_last else None
        self.schedule.step(*arguments, target=target)
        name = self.stage.changed_parameter
        if name:
            raise UserError(f"micro-batches change {name}; do so at the end of train_step")

    def build_schedule(self, shapes: Shapes) -> Any:
        """Return a schedule that runs this rank's stage on tensors of these shapes."""
        num_stages = self.layout.pipeline
        stage = PipelineStage(
            self.stage,
            self.stage_index,
            num_stages,
            self.device,
            input_args=shapes[self.stage_index],
            output_args=shapes[self.stage_index + 1],
            group=self.pipeline_group,
        )
        # 1F1B keeps the activations of fewer micro-batches, but needs at least one per stage.
        count = len(self.microbatches)
        schedule: Any = Schedule1F1B if count >= num_stages else ScheduleGPipe
        return schedule(stage, count, loss_fn=self.compute_loss, scale_grads=False)

    def compute_loss(self, *_: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss, when a schedule has run the last stage."""
        targets = self.remaining_targets.pop(0)
        # FSDP averages the gradients of local batches, which have to add up.
        return self.mean_loss(self.stage.take_outputs(), targets) * self.dp_size

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        features = inputs
        if self.stage_index:
            shapes = self.outline.trace(inputs)
            features = torch.empty_like(shapes[self.stage_index], device=self.device)
            dist.recv(features, group=self.pipeline_group, group_src=self.stage_index - 1)
        features = self.stage(features)
        if not self.stage.is_last:
            dist.send(features, group=self.pipeline_group, group_dst=self.stage_index + 1)
        for block in self.module:
            block.reshard()  # No backward follows that would free the gathered weights.
        # Metrics need whole outputs, even if plan.py keeps the logits sharded.
        outputs = tree_map_only(DTensor, DTensor.full_tensor, self.stage.take_outputs())
        # The tensor ranks of the last stage have the same outputs: one of them counts.
        return outputs if self.stage.is_last and self.tensor_rank == 0 else None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient, and return the norm before."""
        shards = list[Tensor]()
        counted_gradients = list[Tensor]()
        parameter: Any
        for parameter in self.module.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            # PyTorch clips tensors of one mesh, or plain ones: a shard, and its gradient.
            shard = parameter.to_local()
            shard.grad = gradient.to_local()
            shards.append(shard)
            # Tensor ranks have equal gradients where plan.py shards nothing: the first counts them.
            if self.tensor_rank == 0 or is_sharded_by_plan(gradient):
                counted_gradients.append(shard.grad)
        # The norm of no gradients would be on the CPU.
        local_norm = nn.utils.get_total_norm(counted_gradients).to(self.device, non_blocking=True)
        # An all-reduce may add in any order. Replicas have equal gradients, and all are in the sum.
        norms = [torch.empty_like(local_norm) for _ in range(self.process.world_size)]
        dist.all_gather(norms, local_norm)
        total_norm = torch.stack(norms).norm() / math.sqrt(self.layout.replicas)
        nn.utils.clip_grads_with_norm_(shards, max_norm, total_norm)
        return total_norm

    def average_buffers(self) -> None:
        """Average BatchNorm's statistics over data-parallel ranks, and reject copies that drift."""
        self.check_copies()
        # A rank's statistics have seen only its own local batches since the last call.
        for name, statistics in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)

    def check_copies(self) -> None:
        """Reject parameters outside plan.py whose copies on the tensor ranks have drifted apart."""
        # A copy that is used on a shard of the features gets the gradient of that shard alone.
        norms = dict[tuple[int, str], float]()
        for name, parameter in self.module.named_parameters():
            if not is_sharded_by_plan(parameter):
                shard: Any = parameter
                norms[self.dp_rank, name] = shard.to_local().norm().item()
        for other_norms in self.process.all_gather(norms):
            # Ranks of another dp_rank have other shards. The rank with the larger norm raises.
            for key in norms.keys() & other_norms.keys():
                if norms[key] > 1.0001 * other_norms[key]:
                    raise UserError(f"copies of {key[1]} drift apart; plan it, or set train.exact")

    def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return weights and optimizer state of the whole model on rank 0's CPU; a collective."""
        return gather_state_dict(self.module, optimizer, self.process, self.ranks_per_stage)

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None, state: Any) -> None:
        """Load rank 0's weights of the whole model and, if given, an optimizer's state."""
        other_names = self.outline.state_names - set(self.module.state_dict())
        load_state(self.module, optimizer, model, state, self.process, other_names)


def choose_placement(parameter: nn.Parameter) -> Shard:
    """Return the dimension over which FSDP shards a parameter."""
    is_sharded_by_rows = getattr(parameter, "placements", None) == (Shard(0),)
    if is_sharded_by_rows and parameter.ndim > 1:
        # Shards of the rows that plan.py has sharded may be uneven, which loading rejects.
        return Shard(1)
    return Shard(0)
