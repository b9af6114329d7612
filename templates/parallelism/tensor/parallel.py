"""Tensor parallelism: every rank holds a shard of each large layer and computes part of its output.

``plan.py`` lists which layers are sharded, and how. The ranks of a group read the same samples:

    rank 0   x ── half of the features of layer 1 ── half of the terms of layer 2 ──┐
                                                                               all-reduce ── y
    rank 1   x ── the other half ─────────────────── the other half ────────────────┘

With several groups, each group reads a local batch, and FSDP2 shards what a rank holds once more,
over the groups.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from logging import getLogger
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only  # Private; optree has the same.
from torch.utils.checkpoint import checkpoint

from .config import Config, UserError
from .distributed import Process, wide_dtype
from .model import build_model
from .plan import is_sharded_by_plan, shard_layers, tensor_plan
from .sharded import Checkpointer, collect_state, load_state

# FSDP2 warns of blocks that return views, as those do that end with a sharded layer: changing such
# an output in place would break backward. Nothing here changes a block's output in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view")
# Saving gathers a tensor over one dimension of the mesh after the other, and DTensor's logger warns
# that one message would be faster.
getLogger("torch.distributed.tensor").setLevel("ERROR")


class Parallel:
    """The model with sharded layers. The loop uses only what all strategies have."""

    checkpointer = Checkpointer

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.device = process.device
        self.layout = config.parallel
        self.matches_one_rank = False  # The sum over a layer's shards is rounded by their number.
        self.allow_unused = config.train.allow_unused
        # bf16 has the range of fp32, so nothing is scaled; config.py refuses fp16.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        # The ranks of a machine have one cache of compiled code, but code for one rank's shard is
        # wrong for another's: a tag makes the keys differ.
        torch.compiler.config.cache_key_tag = str(process.rank)
        mesh = self.build_mesh()
        count = config.data.num_microbatches // self.dp_size
        # The numbers of this rank's micro-batches in the global batch.
        self.microbatches = range(count * self.dp_rank, count * (self.dp_rank + 1))
        dtype = torch.bfloat16 if config.train.precision == "bf16" else wide_dtype()
        # Blocks compute in this type; shards stay in fp32, and so do sums of gradients.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide_dtype())
        self.shard_model(config, partial(fully_shard, mesh=mesh, mp_policy=policy))
        # The parameters that forward sees, and those that the last backward has reached.
        self.gathered = dict[str, Tensor]()
        self.reached = set[Tensor]()
        self.watch_parameters()

    def build_mesh(self) -> DeviceMesh:
        """Number the ranks and their groups; returns the mesh over which FSDP shards."""
        replicas = self.layout.replicas
        self.dp_size = self.layout.dp_size(self.process.world_size)
        group_size = self.process.world_size // self.dp_size
        self.dp_rank, self.tensor_rank = divmod(self.process.rank, group_size)
        # The ranks of a group have equal statistics, so that averages over all ranks are right.
        self.dp_group = dist.group.WORLD
        shape = (replicas, self.dp_size // replicas, group_size)
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self.tensor_mesh = mesh["tensor"]
        if replicas > 1:
            return mesh["replicate", "shard"]
        # FSDP would all-reduce gradients over the dimension of replicas, even with only one.
        return mesh["shard"]

    def shard_model(self, config: Config, shard: Callable[..., Any]) -> None:
        """Build the model; shard each block at once, so that no rank holds all weights whole."""
        blocks = list[nn.Module]()

        def wrap(block: nn.Module) -> nn.Module:
            block.to(self.device)
            refuse_shared(block)
            # FSDP comes last: it shards the plan's DTensors, and its hooks gather weights around
            # forward, and around its recomputation in backward.
            shard_layers(block, self.tensor_mesh)
            prepare_block(block, config)
            shard(block, reshard_after_forward=self.layout.reshard_after_forward)
            blocks.append(block)
            return block

        self.module = build_model(config.model, wrap)
        # The model may have let its blocks share parameters after they were wrapped.
        for block in blocks:
            refuse_shared(block)
        if not any(tensor_plan(block) for block in blocks):
            raise UserError("plan.py shards no layer, so ranks would compute the same")
        # This shards parameters outside of the blocks.
        self.fsdp = shard(self.module)
        # Backward starts with the last block: freed weights would be gathered again at once.
        self.last_block = cast(FSDPModule, blocks[-1])
        self.last_block.set_reshard_after_forward(False)

    # F.cross_entropy and its backward accept logits that plan.py keeps sharded over the classes.
    @loss_parallel()
    def forward_backward(
        self, microbatches: Iterable[Any], mean_loss: Callable[[Any, Any], Tensor]
    ) -> None:
        """Leave in parameters the gradient of the mean loss over micro-batches; a collective."""
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            self.reached.clear()
            # FSDP scatters gradients after every micro-batch: keeping them whole until the last
            # would take the memory of a whole model. Replicas add up shards once, after the last.
            self.fsdp.set_requires_all_reduce(number == len(self.microbatches))
            # FSDP averages the gradients of the groups, which have to add up.
            loss = mean_loss(self.module(inputs), targets) * self.dp_size
            self.check_unchanged()
            self.scaler.scale(loss).backward()
            self.check_used()

    def watch_parameters(self) -> None:
        """Keep gathered parameters; a backward adds those that it reaches to ``reached``."""
        # The whole model comes last: its unshard() gathers only parameters outside of the blocks.
        for prefix, block in reversed(list(self.module.named_modules())):
            if not isinstance(block, FSDPModule):
                continue
            # Hooks belong on gathered parameters. FSDP frees their memory, but keeps these objects.
            block.unshard()
            for name, parameter in cast(nn.Module, block).named_parameters(prefix):
                if name not in self.gathered:
                    self.gathered[name] = parameter
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(self.reached.add)
            block.reshard()

    def check_unchanged(self) -> None:
        """Reject a forward that changes a parameter: it has changed a copy, which is freed."""
        for name, parameter in self.gathered.items():
            # A version counts writes in place. FSDP excludes those of its all-gathers.
            if parameter._version > 0:
                raise UserError(f"micro-batches change {name}; do so at the end of train_step")

    def check_used(self) -> None:
        """Reject a micro-batch without a gradient of a parameter that other ranks may have."""
        # FSDP has concatenated the gradients that a rank has, and added the results up over the
        # ranks: where one rank lacked a gradient, those of different parameters were added.
        unused = set[str]()
        for name, parameter in self.gathered.items():
            if parameter.requires_grad and parameter not in self.reached:
                unused.add(name)
        if unused and not self.allow_unused:
            raise UserError(
                f"the loss does not depend on {sorted(unused)[:5]} in each micro-batch; "
                "use or freeze them, or set train.allow_unused"
            )
        if self.allow_unused:
            unused_by_rank = self.process.all_gather(unused)
            used_by_some = set.union(*unused_by_rank) - set.intersection(*unused_by_rank)
            if used_by_some:
                raise UserError(f"only some ranks use {min(used_by_some)}; all have to, or none")

    def predict(self, inputs: Any) -> Any:
        """Return this rank's outputs, or None if another rank has them; a collective."""
        # Metrics need whole outputs, also if plan.py keeps the logits sharded.
        outputs = tree_map_only(DTensor, DTensor.full_tensor, self.module(inputs))
        # No backward follows that would free the last block's weights.
        self.last_block.reshard()
        # The ranks of a group have the same outputs, of the same samples: one of them counts.
        return outputs if self.tensor_rank == 0 else None

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
            # A gradient that plan.py does not shard is equal on all tensor ranks: only the first of
            # them counts it.
            if self.tensor_rank == 0 or is_sharded_by_plan(gradient):
                counted_gradients.append(shard.grad)
        # The norm of no gradients would be on the CPU.
        local_norm = nn.utils.get_total_norm(counted_gradients).to(self.device, non_blocking=True)
        # An all-reduce may add up the ranks in any order. Gathered norms are added in the order of
        # ranks, so all ranks scale their shards by the same bits.
        norms = [torch.empty_like(local_norm) for _ in range(self.process.world_size)]
        dist.all_gather(norms, local_norm)
        # Replicas have equal gradients, and each replica's squares are in the sum.
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
        """Return copies of all weights and optimizer state on rank 0's CPU; a collective."""
        return collect_state(self.module, optimizer, keeps=self.process.rank == 0)

    def load_full_state_dict(self, model: Any, optimizer: Optimizer | None, state: Any) -> None:
        """Load rank 0's weights of the whole model and, if given, an optimizer's state."""
        load_state(self.module, optimizer, model, state, self.process)


def refuse_shared(block: nn.Module) -> None:
    """Reject a parameter that another block has, too: each block would train its own copy."""
    parameter: Any
    for name, parameter in block.named_parameters():
        if hasattr(parameter, "is_in_a_block"):
            raise UserError(
                f"{name} of the {type(block).__name__} is shared with another block; use a copy"
            )
        # A parameter loses the mark when a shard replaces it; a later call marks the shard.
        parameter.is_in_a_block = True


def prepare_block(block: nn.Module, config: Config) -> nn.Module:
    """Let a block recompute its activations in backward, and compile it, if the settings say so."""
    for name, buffer in block.named_buffers():
        if not buffer.is_contiguous():
            raise UserError(f"buffer {name} cannot be loaded; make it contiguous")
    if config.train.activation_checkpointing:
        if any("running_mean" in name for name, _ in block.named_buffers()):
            raise UserError(
                "train.activation_checkpointing updates BatchNorm's statistics twice; turn it off"
            )
        # A wrapper module would do the same, but change the names of parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        block.compile()
    return block
