"""The messages of a step: what each collective sends, and over which links.

A rank of N that takes part in a collective on B bytes sends, around a ring,

    all_reduce             2 (N - 1) / N x B      a reduce_scatter, then an all_gather
    all_gather                 (N - 1) / N x B    B is what each rank has afterwards
    reduce_scatter             (N - 1) / N x B    B is what each rank had before
    broadcast                            1 x B
    all_to_all                 (N - 1) / N x B
    send                                 1 x B    recv: 0

Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..config import UserError

# Operations of torch.ops.c10d and of torch.ops._c10d_functional, which DTensor uses.
NAMES = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"), "all_reduce"),
    **dict.fromkeys(("all_reduce_coalesced", "all_reduce_coalesced_"), "all_reduce"),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), "all_gather"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_out"), "all_gather"),
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("broadcast_", "broadcast"), "broadcast"),
    **dict.fromkeys(("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"), "all_to_all"),
    "send": "send",
    "recv_": "recv",
}
SILENT = {"wait_tensor", "barrier", "monitored_barrier_"}  # They send nothing, or next to nothing.


@dataclass(frozen=True)
class Message:
    """One collective, or one point-to-point message, of this rank.

    Attributes:
        name: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``all_to_all``, ``send`` or ``recv``.
        size: Bytes of the largest tensor that takes part.
        ranks: The ranks that take part, by their numbers in the run.
    """

    name: str
    size: int
    ranks: tuple[int, ...]

    def sent(self) -> float:
        """Return the bytes that this rank sends, around a ring."""
        others = (len(self.ranks) - 1) / len(self.ranks)
        return self.size * {"all_reduce": 2 * others, "broadcast": 1, "send": 1, "recv": 0}.get(self.name, others)


def read_message(func: Any, args: Sequence[Any]) -> Message | None:
    """Return the message that an operation is; None if it is another operation, or has no other rank.

    Rejects a message of another kind than those in ``NAMES``.
    """
    operation = func.overloadpacket.__name__
    if func.namespace not in ("c10d", "_c10d_functional", "_dtensor") or operation in SILENT:
        return None
    if operation not in NAMES:
        raise UserError(f"plan does not know what the operation {operation} sends; add it to NAMES in plan/messages.py")
    name = NAMES[operation]
    ranks, size = tuple(dist.get_process_group_ranks(find_group(args))), total(args[0])
    if func.namespace == "_c10d_functional":
        size *= len(ranks) if name == "all_gather" else 1  # What it gathers is its result.
    elif name in ("all_gather", "reduce_scatter"):
        size = max(size, total(args[1]))
    elif name in ("send", "recv"):  # With the other rank's number in the group.
        ranks = tuple(sorted({ranks[args[2]], dist.get_rank()}))
    return Message(name, size, ranks) if len(ranks) > 1 else None


def find_buffers(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that exist for a message alone: not what is sent as it is, nor the results of DTensor's."""
    if func.namespace != "c10d" or func.overloadpacket.__name__ == "send":
        return []
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


def spans(ranks: Iterable[int], ranks_per_node: int) -> bool:
    """Return whether ranks are on more than one node."""
    return len({rank // ranks_per_node for rank in ranks}) > 1


def total(tensors: Any) -> int:
    """Return the bytes of tensors in any nesting."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def find_group(args: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group among an operation's arguments, which may be its name."""
    for argument in args:
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    name = next(argument for argument in reversed(args) if isinstance(argument, str))
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
