"""Replicas: ranks that would hold the same part of the model and the same optimizer state, for different samples.

They sum their gradients in buckets, each as soon as backward has computed it; or each holds a shard of the part, and
gets only the sum of its shard: weights, gradients and optimizer state then take 1/replicas of the memory between steps.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20  # Large enough for the bandwidth, small enough to start early.


def shard_replica(
    module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, reshard_after_forward: bool | None = None
) -> None:
    """Shard the parameters of a module that are not sharded over ``mesh`` yet; they are gathered as a unit.

    Args:
        module: A block, or what consists of sharded blocks.
        mesh: The ranks that would hold the same parameters.
        dtype: What forward and backward compute in; shards stay in fp32, and gradients are summed in it.
        reshard_after_forward: Whether to free what was gathered until backward; None does, except at the root.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # FSDP would average what has to be summed.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def reshard(module: nn.Module) -> None:
    """Free what was gathered, in a module whose replicas may be sharded."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class Bucket:
    """An all-reduce of the gradients of some parameters, which starts with this object.

    What a replica has no gradient for, because its samples took another way through the model, counts as zero; if none
    of them has one, there is none. So each gradient is sent with a 1 for a replica that has it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.missing = [number for number, p in enumerate(parameters) if p.grad is None]
        self.parameters = parameters
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        local = [to_local(gradient) for gradient in self.gradients]
        present = local[0].new_ones(len(parameters))
        if self.missing:
            present[self.missing] = 0
        self.parts = [*local, present]
        self.flat = _flatten_dense_tensors(self.parts)
        self.work: Any = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums, and copy them to the gradients."""
        self.work.wait()
        torch._foreach_copy_(self.parts, _unflatten_dense_tensors(self.flat, self.parts))
        for number in self.missing:
            if self.parts[-1][number] > 0:
                self.parameters[number].grad = self.gradients[number]


class GradientBuckets:
    """Sums the gradients of a module over the ranks of a group, bucket by bucket, while backward computes others.

    Backward computes the gradients of the last layers first, so the first bucket has the last parameters. All ranks
    start with the same bucket and go on in the same order.

    Attributes:
        is_last_backward: Whether the backward that is about to run completes the gradients of this step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.is_last_backward = group, False
        is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())  # FSDP itself sums the gradients.
        parameters = [] if is_sharded or group.size() == 1 else [p for p in module.parameters() if p.requires_grad]
        self.buckets = fill_buckets(parameters)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.started = 0
        self.pending: deque[Bucket] = deque()
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.note, number))

    def note(self, number: int, parameter: Tensor) -> None:
        """Note that backward has added to the gradient of a parameter in a bucket; start what is complete."""
        if self.is_last_backward:
            self.missing[number] -= 1
            while self.started < len(self.buckets) and self.missing[self.started] == 0:
                self.start_next()

    def start_next(self) -> None:
        """Start the all-reduce of the next bucket."""
        while self.pending and self.pending[0].work.is_completed():
            self.pending.popleft().finish()  # Each bucket that is on its way is a copy of its gradients.
        self.pending.append(Bucket(self.buckets[self.started], self.group))
        self.started += 1

    def start_rest(self) -> None:
        """Start what the last backward did not: its gradients are complete, or there are none."""
        while self.started < len(self.buckets):
            self.start_next()

    def wait(self) -> None:
        """Wait until all gradients are summed; a collective."""
        self.start_rest()
        while self.pending:
            self.pending.popleft().finish()
        self.missing, self.started = [len(bucket) for bucket in self.buckets], 0
        self.is_last_backward = False


def fill_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters, last first, into buckets of about ``BUCKET_BYTES``, each of one type."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        if room <= 0 or buckets[-1][-1].dtype != parameter.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= to_local(parameter).nbytes
    return buckets


def to_local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
